//! LSH parameters with every default resolved, and the generator of the hash functions.

use super::params::LshParams;
use crate::error::{Error, Result};
use crate::index::lsh::{Family, HashSignature, Hasher, Planes, SlotOutOfRange, TableFunctions};
use crate::job::Job;
use crate::metric::Metric;
use crate::rows::Rows;

/// Probing rule: the buckets of a table that a query probes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum ProbeRule {
    /// This number of buckets, the most probable first (multi-probe LSH, Lv et al. 2007).
    Probes(usize),
    /// All boxes within this distance of the query.
    Radius(f64),
}

impl ProbeRule {
    pub fn of(params: &LshParams, hashes: usize) -> Self {
        match (params.box_radius, &params.scoring) {
            (Some(radius), _) => Self::Radius(radius),
            (None, Some(scoring)) => Self::Probes(scoring.probes(hashes)),
            (None, None) => Self::Probes(params.probes),
        }
    }
}

/// The generator of the hash functions of all tables, for this base. Planes are trained on
/// `training`.
pub(super) fn hasher(
    params: &LshParams,
    metric: Metric,
    base: &Rows,
    training: &Rows,
    job: &Job,
) -> Result<Hasher> {
    let dim = base.matrix().dim();
    let mut hasher = Hasher::new(params.family, metric, params.seed, dim)
        .with_planes(params.planes, params.is_zero_sum);
    // The radius of boxes is a distance between unit vectors.
    if params.planes != Planes::Random {
        hasher = hasher.with_unit_rows();
    }
    if params.is_centred {
        hasher = hasher.with_centre_of(base, job)?;
    }
    if params.planes == Planes::Trained {
        hasher = hasher.with_training(training, job)?;
    }
    let (most, requested) = (hasher.most(), params.hashes.unwrap_or(1));
    if requested <= most {
        return Ok(hasher);
    }
    let what = match params.family {
        Family::Bits => format!("rows have only {dim} bits to sample"),
        _ if params.is_zero_sum || metric == Metric::Pearson => format!(
            "in {dim} dimensions only {most} planes whose numbers sum to 0 are at right angles to \
             each other"
        ),
        _ => format!("in {dim} dimensions only {most} planes are at right angles to each other"),
    };
    Err(Error::Unsatisfiable(format!("{} is {requested}, but {what}", params.hashes_name())))
}

/// The key of each row in each table. All parameters must be given, and the hash functions must not
/// depend on a base.
///
/// # Errors
/// [`Error::InvalidArgument`] for other parameters, [`Error::Unsatisfiable`] for parameters that
/// these rows cannot meet.
pub fn bucket_keys(params: &LshParams, metric: Metric, rows: &Rows) -> Result<Vec<Vec<u64>>> {
    if rows.is_empty() {
        return Ok(vec![Vec::new(); params.tables.unwrap_or(0)]);
    }
    let job = Job::default();
    let rows = &rows.searched(metric, &job)?;
    let hasher = hasher(params, metric, rows, &rows.slice(0..0), &job)?;
    let given = ResolvedParams::given(params, metric, &hasher);
    let Some(resolved) = given.filter(|_| !params.needs_all_rows()) else {
        return Err(Error::InvalidArgument("tables, hashes and width are needed".to_string()));
    };
    let keys = |table| resolved.keys(rows, &resolved.functions(table, &job)?);
    (0..resolved.tables).map(keys).collect()
}

/// LSH parameters, all of them resolved.
#[derive(Debug, Clone)]
pub(super) struct ResolvedParams {
    pub hasher: Hasher,
    pub signature: HashSignature,
    pub tables: usize,
    pub hashes: usize,
    pub probe_rule: ProbeRule,
}

impl ResolvedParams {
    /// Resolves the parameters without tuning; `None` if any is free.
    pub fn given(params: &LshParams, metric: Metric, hasher: &Hasher) -> Option<Self> {
        if params.is_open() {
            return None;
        }
        let width = if params.family == Family::PStable { params.width? } else { 0.0 };
        let signature = params.signature(metric, width, params.is_width_chosen);
        let (tables, hashes) = (params.tables?, params.hashes?);
        let (hasher, probe_rule) = (hasher.clone(), ProbeRule::of(params, hashes));
        Some(Self { hasher, signature, tables, hashes, probe_rule })
    }

    /// Placeholder parameters for a base without rows.
    pub fn any(params: &LshParams, metric: Metric, dim: usize) -> Self {
        let signature = params.signature(metric, params.width.unwrap_or(1.0), true);
        let (tables, hashes) = (params.tables.unwrap_or(1), params.hashes.unwrap_or(1));
        let hasher = Hasher::new(params.family, metric, params.seed, dim);
        let probe_rule = ProbeRule::of(params, hashes);
        Self { hasher, signature, tables, hashes, probe_rule }
    }

    /// The resolved parameters; options that do not affect the tables are taken from `open`.
    pub fn params(&self, open: &LshParams) -> LshParams {
        let width = (open.family == Family::PStable).then_some(self.signature.width);
        let (tables, hashes) = (Some(self.tables), Some(self.hashes));
        let is_width_chosen = self.signature.is_clamped;
        let probes = match (self.probe_rule, &open.scoring) {
            (ProbeRule::Probes(probes), None) => probes,
            _ => open.probes,
        };
        let has_free_probes = false;
        let open = open.clone();
        LshParams { tables, hashes, width, is_width_chosen, probes, has_free_probes, ..open }
    }

    /// Bytes of the hash functions of a table.
    pub fn bytes(&self) -> usize {
        self.hasher.bytes(self.hashes)
    }

    /// The hash functions of a table.
    pub fn functions(&self, table: usize, job: &Job) -> Result<TableFunctions> {
        self.hasher.functions(table, self.hashes, job)
    }

    /// The key of each row in a table.
    ///
    /// # Errors
    /// [`Error::Unsatisfiable`] if a p-stable slot is out of range.
    pub fn keys(&self, rows: &Rows, functions: &TableFunctions) -> Result<Vec<u64>> {
        let wholes = self.signature.wholes(&functions.values(rows), functions);
        let wholes = wholes.map_err(|SlotOutOfRange| self.out_of_range())?;
        Ok(wholes.chunks_exact(self.hashes).map(|wholes| self.signature.key(wholes)).collect())
    }

    pub fn out_of_range(&self) -> Error {
        Error::Unsatisfiable(format!(
            "rows are more than 16777216 slots of width {} from the origin; give a larger width",
            self.signature.width
        ))
    }
}
