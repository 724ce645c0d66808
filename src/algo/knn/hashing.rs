//! The parameters of hashing.

use std::fmt;

use crate::error::{Error, Result};
use crate::index::lsh::{Family, Rounding, Signature, SlotOutOfRange, TableFunctions};
use crate::matrix::Rows;
use crate::metric::Metric;

/// The most tables.
const MOST_TABLES: usize = 1024;

/// The most functions of a table.
pub(super) const MOST_HASHES: usize = 256;

/// The most buckets that a query looks at in a table.
const MOST_PROBES: usize = 65_536;

/// The most buckets that a query looks at in all tables.
pub(super) const MOST_BUCKETS: usize = 1 << 20;

/// The recall aimed for if nothing is said.
const RECALL: f64 = 0.9;

/// The parameters of hashing, as far as they are given; the others are chosen by the data.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LshParams {
    /// The family of hash functions.
    pub family: Family,
    /// Number of tables.
    pub tables: Option<usize>,
    /// Functions of each table: rows are in one bucket if all of them agree.
    pub hashes: Option<usize>,
    /// The width of p-stable slots, in units of the distance.
    pub width: Option<f64>,
    /// Whether the width was chosen: rows that it puts too many slots away are then no error.
    pub is_width_chosen: bool,
    /// How p-stable slots are rounded.
    pub rounding: Rounding,
    /// Buckets that a query looks at in each table, its own included.
    pub probes: usize,
    /// The seed of all functions.
    pub seed: u64,
    /// The recall that free parameters are chosen for.
    pub recall: f64,
}

impl LshParams {
    /// Nothing given but the family, by default the first that suits the metric. To be filled in, and
    /// then [checked](Self::check).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no family or not this one suits the metric.
    pub fn try_new(metric: Metric, family: Option<Family>) -> Result<Self> {
        let suited = Family::of(metric);
        let Some(default) = suited.first() else {
            return Err(Error::InvalidArgument(format!(
                "no hash functions suit metric '{metric}': it is not a distance; use knn_exact, or \
                 'cosine'"
            )));
        };
        let family = family.unwrap_or(*default);
        if !suited.contains(&family) {
            let names: Vec<_> =
                suited.iter().map(|family| format!("'{}'", family.name())).collect();
            return Err(Error::InvalidArgument(format!(
                "family '{}' does not suit metric '{metric}'; accepted are {}",
                family.name(),
                names.join(", ")
            )));
        }
        Ok(Self {
            family,
            tables: None,
            hashes: None,
            width: None,
            is_width_chosen: false,
            rounding: Rounding::Floor,
            probes: 1,
            seed: 0,
            recall: RECALL,
        })
    }

    /// Checks all values, and sets the recall, if one is given.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for values out of range, and for those that do not go together.
    pub fn check(&mut self, recall: Option<f64>) -> Result<()> {
        if let (Some(_), false) = (recall, self.is_open()) {
            let message = "recall is given, but nothing is left to be chosen for it: leave out tables, \
                           hashes or width";
            return Err(Error::InvalidArgument(message.to_string()));
        }
        self.recall = recall.unwrap_or(self.recall);
        self.check_values().map_err(Error::InvalidArgument)
    }

    fn check_values(&self) -> Result<(), String> {
        let family = self.family.name();
        let counts = [
            ("tables", self.tables, MOST_TABLES),
            ("hashes", self.hashes, MOST_HASHES),
            ("probes", Some(self.probes), MOST_PROBES),
        ];
        for (name, value, most) in counts {
            if let Some(value) = value.filter(|value| !(1..=most).contains(value)) {
                return Err(format!("{name} is {value}; accepted are 1 to {most}"));
            }
        }
        if self.tables.unwrap_or(1) * self.probes > MOST_BUCKETS {
            let (tables, probes) = (self.tables.unwrap_or(1), self.probes);
            return Err(format!(
                "tables is {tables} and probes is {probes}; accepted are {MOST_BUCKETS} buckets in all"
            ));
        }
        if self.family != Family::PStable {
            let given =
                [("width", self.width.is_some()), ("rounding", self.rounding != Rounding::Floor)];
            if let Some((name, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
                return Err(format!("{name} is given, but family '{family}' has no slots"));
            }
        }
        if let Some(width) = self.width.filter(|width| !(*width > 0.0 && width.is_finite())) {
            return Err(format!("width is {width}; accepted are numbers above 0"));
        }
        if self.probes > 1 && self.family == Family::MinHash {
            return Err(format!(
                "probes is {}, but family '{family}' has no next best buckets",
                self.probes
            ));
        }
        if !(self.recall > 0.0 && self.recall < 1.0) {
            return Err(format!(
                "recall is {}; accepted are numbers above 0 and below 1 (knn_exact finds all)",
                self.recall
            ));
        }
        Ok(())
    }

    /// How values become keys, with this width.
    pub(super) fn signature(&self, metric: Metric, width: f64, is_clamped: bool) -> Signature {
        Signature { family: self.family, metric, width, rounding: self.rounding, is_clamped }
    }

    /// Whether something is left to be chosen.
    pub fn is_open(&self) -> bool {
        let has_width = self.width.is_some() || self.family != Family::PStable;
        self.tables.is_none() || self.hashes.is_none() || !has_width
    }
}

impl fmt::Display for LshParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "family={}", self.family.name())?;
        let given = [("tables", self.tables), ("hashes", self.hashes)];
        for (name, value) in given {
            value.map_or(Ok(()), |value| write!(f, ", {name}={value}"))?;
        }
        self.width.map_or(Ok(()), |width| write!(f, ", width={width}"))?;
        if self.rounding == Rounding::Zero {
            write!(f, ", rounding=zero")?;
        }
        write!(f, ", probes={}, seed={}", self.probes, self.seed)?;
        if self.is_open() { write!(f, ", recall={}", self.recall) } else { Ok(()) }
    }
}

/// Parameters that all have values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Hashing {
    pub signature: Signature,
    pub tables: usize,
    pub hashes: usize,
    pub probes: usize,
    pub seed: u64,
}

impl Hashing {
    /// `None` if something is left to be chosen.
    pub fn given(params: &LshParams, metric: Metric) -> Option<Self> {
        let width = if params.family == Family::PStable { params.width? } else { 0.0 };
        let LshParams { probes, seed, .. } = *params;
        let signature = params.signature(metric, width, params.is_width_chosen);
        Some(Self { signature, tables: params.tables?, hashes: params.hashes?, probes, seed })
    }

    /// The same where there is nothing to hash, and so nothing to choose.
    pub fn any(params: &LshParams, metric: Metric) -> Self {
        let LshParams { probes, seed, .. } = *params;
        let signature = params.signature(metric, params.width.unwrap_or(1.0), true);
        let (tables, hashes) = (params.tables.unwrap_or(1), params.hashes.unwrap_or(1));
        Self { signature, tables, hashes, probes, seed }
    }

    /// The same as parameters that leave nothing to be chosen.
    pub fn params(&self, open: &LshParams) -> LshParams {
        let width = (open.family == Family::PStable).then_some(self.signature.width);
        let (tables, hashes) = (Some(self.tables), Some(self.hashes));
        let is_width_chosen = self.signature.is_clamped;
        LshParams { tables, hashes, width, is_width_chosen, ..open.clone() }
    }

    /// The functions of a table.
    pub fn functions(&self, table: usize, dim: usize) -> TableFunctions {
        let Signature { family, metric, .. } = self.signature;
        TableFunctions::new((family, metric), (self.seed, table), self.hashes, dim)
    }

    /// The key of each row in a table.
    ///
    /// # Errors
    /// [`Error::Unsatisfiable`] for slots out of range.
    pub fn keys(&self, rows: &Rows, functions: &TableFunctions) -> Result<Vec<u64>> {
        let wholes = self.signature.wholes(&functions.values(rows), functions);
        let wholes = wholes.map_err(|SlotOutOfRange| self.out_of_range())?;
        Ok(wholes.chunks_exact(self.hashes).map(|wholes| self.signature.key(wholes)).collect())
    }

    pub fn out_of_range(&self) -> Error {
        Error::Unsatisfiable(format!(
            "knn_lsh: rows are more than 16777216 slots of width {} from the origin; give a larger width",
            self.signature.width
        ))
    }
}
