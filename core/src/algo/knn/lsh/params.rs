//! The LSH parameters as given, each checked or left free.

use std::fmt;

use crate::error::{Error, Result};
use crate::index::lsh::{Family, HashSignature, MOST_PLANES, Planes, SlotRounding};
use crate::metric::Metric;

/// Largest number of tables.
pub(super) const MOST_TABLES: usize = 1024;

/// Largest number of hash functions of a table.
pub(super) const MOST_HASHES: usize = 256;

/// Largest number of buckets that a query probes in a table.
const MOST_PROBES: usize = 65_536;

/// Largest number of buckets that a query probes in all tables.
pub(super) const MOST_BUCKETS: usize = 1 << 20;

/// Largest number of tables that is tried if their number is free.
const FREE_TABLES: usize = 128;
/// The same for trained planes, since training takes time for each table.
const FREE_TRAINED_TABLES: usize = 32;

/// The default recall.
const RECALL: f64 = 0.9;

/// The LSH parameters. Free ones, `None`, are tuned on the data.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LshParams {
    /// The family of hash functions.
    pub family: Family,
    /// Number of tables.
    pub tables: Option<usize>,
    /// Number of stored tables to choose from; `None` if more tables can be built.
    pub most_tables: Option<usize>,
    /// Hash functions of each table; rows share a bucket if all of their hash values agree.
    pub hashes: Option<usize>,
    /// The width of p-stable slots, in units of the distance.
    pub width: Option<f64>,
    /// Whether the width was tuned; then slots that are out of range are clamped, instead of an
    /// error.
    pub is_width_chosen: bool,
    /// The rounding of p-stable slots.
    pub rounding: SlotRounding,
    /// The construction of hyperplanes.
    pub planes: Planes,
    /// Whether the coefficients of a hyperplane sum to 0.
    pub is_zero_sum: bool,
    /// Whether hyperplanes go through the mean of the base instead of the origin.
    pub is_centred: bool,
    /// Number of buckets that a query probes in each table, its home bucket included.
    pub probes: usize,
    /// Whether the number of probes is free.
    pub has_free_probes: bool,
    /// Search radius: queries probe every box of orthogonal planes within this distance.
    pub box_radius: Option<f64>,
    /// Scoring of candidates; by default all candidates are compared.
    pub scoring: Option<Scoring>,
    /// The seed of all hash functions.
    pub seed: u64,
    /// The recall for which free parameters are tuned.
    pub recall: f64,
}

/// Error weighted hashing (Bhatia and Badarla 2014). The score of a row is the sum, over all
/// tables, of the weight of the number of bits in which its bucket differs from the query's; rows
/// with a high score are compared.
#[derive(Debug, Clone, PartialEq)]
pub struct Scoring {
    /// The weight of 0 errors, of 1, …; buckets with more errors are not probed.
    pub weights: Vec<f64>,
    /// Score threshold: rows with a greater score are compared.
    pub score: f64,
}

impl Scoring {
    /// Largest number of errors with a weight.
    pub const MOST_ERRORS: usize = 2;

    /// Number of buckets that a query probes in a table of `bits` bits.
    pub fn probes(&self, bits: usize) -> usize {
        let pairs = bits * bits.saturating_sub(1) / 2;
        [1, 1 + bits, 1 + bits + pairs][self.weights.len() - 1]
    }

    /// Whether a single hit suffices for every score to exceed the threshold.
    pub(super) fn takes_all(&self) -> bool {
        self.weights.iter().all(|weight| *weight > self.score)
    }

    /// The weight of the `probe`-th bucket; buckets are in order of their errors.
    pub(super) fn weight(&self, probe: usize, bits: usize) -> f64 {
        let errors = if probe == 0 { 0 } else { 1 + usize::from(probe > bits) };
        self.weights[errors]
    }
}

impl LshParams {
    /// Parameters with the given family, by default the first that suits the metric; the rest is
    /// free. To be filled in, and then [checked](Self::check).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the metric has no family, or the given family does not suit
    /// it.
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
            most_tables: None,
            hashes: None,
            width: None,
            is_width_chosen: false,
            rounding: SlotRounding::Floor,
            planes: Planes::Random,
            is_zero_sum: false,
            is_centred: false,
            probes: 1,
            has_free_probes: false,
            box_radius: None,
            scoring: None,
            seed: 0,
            recall: RECALL,
        })
    }

    /// Checks all values; sets the recall to `recall` if it is given.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for values out of range, and for combinations that exclude each
    /// other.
    pub fn check(&mut self, recall: Option<f64>) -> Result<()> {
        if let (Some(_), false) = (recall, self.is_open()) {
            let rest = match self.scoring {
                Some(_) => "method 'ewh' has all its parameters given: leave recall out",
                None => "leave out tables, hashes or width",
            };
            let message =
                format!("recall is given, but nothing is left to be chosen for it: {rest}");
            return Err(Error::InvalidArgument(message));
        }
        self.recall = recall.unwrap_or(self.recall);
        self.check_values().map_err(Error::InvalidArgument)
    }

    fn check_values(&self) -> Result<(), String> {
        let counts = [
            ("tables", self.tables, MOST_TABLES),
            (self.hashes_name(), self.hashes, MOST_HASHES),
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
        self.check_family()?;
        self.check_boxes()?;
        self.check_scoring()?;
        if !(self.recall > 0.0 && self.recall < 1.0) {
            return Err(format!(
                "recall is {}; accepted are numbers above 0 and below 1 (knn_exact finds all)",
                self.recall
            ));
        }
        Ok(())
    }

    /// The SQL name of the number of hash functions of a table.
    pub(super) fn hashes_name(&self) -> &'static str {
        if self.scoring.is_some() { "bits" } else { "hashes" }
    }

    /// Checks the options that apply to some families only.
    fn check_family(&self) -> Result<(), String> {
        let family = self.family.name();
        let slots =
            [("width", self.width.is_some()), ("rounding", self.rounding != SlotRounding::Floor)];
        let planes = [
            ("planes", self.planes != Planes::Random),
            ("zero_sum", self.is_zero_sum),
            ("centre", self.is_centred),
            ("box_radius", self.box_radius.is_some()),
        ];
        let first = |given: &[(&'static str, bool)]| {
            given.iter().find(|(_, is_given)| *is_given).map(|(name, _)| *name)
        };
        if let (Some(name), true) = (first(&slots), self.family != Family::PStable) {
            return Err(format!("{name} is given, but family '{family}' has no slots"));
        }
        if let (Some(name), true) = (first(&planes), self.family != Family::Hyperplane) {
            return Err(format!("{name} is given, but family '{family}' has no hyperplanes"));
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
        Ok(())
    }

    fn check_boxes(&self) -> Result<(), String> {
        let Some(radius) = self.box_radius else { return Ok(()) };
        if !(radius >= 0.0 && radius.is_finite()) {
            return Err(format!("box_radius is {radius}; accepted are numbers from 0"));
        }
        if self.planes == Planes::Random {
            let message = "box_radius is given, but planes is 'random'; accepted are 'orthogonal' \
                           and 'trained'";
            return Err(message.to_string());
        }
        if self.probes > 1 {
            return Err("probes and box_radius are given; accepted is one of them".to_string());
        }
        match self.hashes {
            Some(hashes) if hashes > MOST_PLANES => {
                Err(format!("hashes is {hashes}; accepted are 1 to {MOST_PLANES} with box_radius"))
            }
            _ => Ok(()),
        }
    }

    fn check_scoring(&self) -> Result<(), String> {
        let Some(Scoring { weights, score }) = &self.scoring else { return Ok(()) };
        if self.family != Family::Bits {
            let family = self.family.name();
            return Err(format!("method 'ewh' scores by bits, which family '{family}' has not"));
        }
        if self.probes > 1 {
            return Err("probes is given, but method 'ewh' has errors instead".to_string());
        }
        let (Some(tables), Some(bits)) = (self.tables, self.hashes) else {
            return Err("method 'ewh' needs tables and bits".to_string());
        };
        let (errors, most) = (weights.len().saturating_sub(1), Scoring::MOST_ERRORS.min(bits));
        if weights.is_empty() || errors > most {
            return Err(format!("errors is {errors}; accepted are 0 to {most}"));
        }
        if let Some(weight) = weights.iter().find(|weight| !(**weight >= 0.0 && weight.is_finite()))
        {
            return Err(format!("weights has {weight}; accepted are numbers from 0"));
        }
        if !score.is_finite() {
            return Err(format!("score is {score}; accepted are finite numbers"));
        }
        let buckets = tables * self.scoring.as_ref().map_or(1, |scoring| scoring.probes(bits));
        if buckets > MOST_BUCKETS {
            return Err(format!(
                "tables is {tables}, bits {bits} and errors {errors}: {buckets} buckets for each \
                 query; accepted are {MOST_BUCKETS}"
            ));
        }
        Ok(())
    }

    /// Largest number of tables that tuning tries.
    pub(super) fn tried_tables(&self) -> usize {
        let free = match self.planes {
            Planes::Trained => FREE_TRAINED_TABLES,
            _ => FREE_TABLES,
        };
        self.tables.or(self.most_tables).unwrap_or(free)
    }

    /// The mapping of hash values to keys, with this width.
    pub(super) fn signature(&self, metric: Metric, width: f64, is_clamped: bool) -> HashSignature {
        HashSignature { family: self.family, metric, width, rounding: self.rounding, is_clamped }
    }

    /// Whether the hash functions depend on the rows of the base.
    pub fn needs_all_rows(&self) -> bool {
        self.planes == Planes::Trained || self.is_centred
    }

    /// Whether any parameter is free.
    pub fn is_open(&self) -> bool {
        let has_width = self.width.is_some() || self.family != Family::PStable;
        self.tables.is_none() || self.hashes.is_none() || !has_width || self.has_free_probes
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
        if self.rounding == SlotRounding::Zero {
            write!(f, ", rounding=zero")?;
        }
        let planes = Planes::NAMES.iter().find(|(_, planes)| *planes == self.planes);
        if let Some((name, _)) = planes.filter(|(_, planes)| *planes != Planes::Random) {
            write!(f, ", planes={name}")?;
        }
        let flags = [(", zero_sum", self.is_zero_sum), (", centre", self.is_centred)];
        flags.iter().filter(|(_, is_so)| *is_so).try_for_each(|(name, _)| write!(f, "{name}"))?;
        match (self.box_radius, &self.scoring) {
            (Some(radius), _) => write!(f, ", box_radius={radius}")?,
            (None, Some(Scoring { weights, score })) => {
                write!(f, ", ewh weights={weights:?} score={score}")?
            }
            (None, None) => write!(f, ", probes={}", self.probes)?,
        }
        write!(f, ", seed={}", self.seed)?;
        if self.is_open() { write!(f, ", recall={}", self.recall) } else { Ok(()) }
    }
}
