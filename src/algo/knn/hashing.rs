//! The parameters of hashing.

use std::fmt;

use crate::error::{Error, Result};
use crate::index::lsh::{Family, MOST_PLANES, Planes, Rounding, Signature};
use crate::metric::Metric;

/// The most tables.
pub(super) const MOST_TABLES: usize = 1024;

/// The most functions of a table.
pub(super) const MOST_HASHES: usize = 256;

/// The most buckets that a query looks at in a table.
const MOST_PROBES: usize = 65_536;

/// The most buckets that a query looks at in all tables.
pub(super) const MOST_BUCKETS: usize = 1 << 20;

/// Tables that are tried, if their number is free.
const FREE_TABLES: usize = 128;
/// The same where planes are trained, which takes time for each.
const FREE_TRAINED_TABLES: usize = 32;

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
    /// How many tables there are to choose from; `None` if more can be built.
    pub most_tables: Option<usize>,
    /// Functions of each table: rows are in one bucket if all of them agree.
    pub hashes: Option<usize>,
    /// The width of p-stable slots, in units of the distance.
    pub width: Option<f64>,
    /// Whether the width was chosen: rows that it puts too many slots away are then no error.
    pub is_width_chosen: bool,
    /// How p-stable slots are rounded.
    pub rounding: Rounding,
    /// How hyperplanes are made.
    pub planes: Planes,
    /// Whether the numbers of a hyperplane sum to 0.
    pub is_zero_sum: bool,
    /// Whether hyperplanes go through the mean of the base instead of the origin.
    pub is_centred: bool,
    /// Buckets that a query looks at in each table, its own included.
    pub probes: usize,
    /// Whether more probes may be chosen.
    pub has_free_probes: bool,
    /// Every box of orthogonal planes is looked at that is within this distance of the query.
    pub box_radius: Option<f64>,
    /// How candidates are scored before they are compared; by default all are compared.
    pub scoring: Option<Scoring>,
    /// The seed of all functions.
    pub seed: u64,
    /// The recall that free parameters are chosen for.
    pub recall: f64,
}

/// Error weighted hashing (Bhatia and Badarla 2014): rows are compared if their score is high enough,
/// which is the sum over all tables of the weight of the number of bits by which their bucket differs.
#[derive(Debug, Clone, PartialEq)]
pub struct Scoring {
    /// The weight of no error, of one, …: as many as are looked at.
    pub weights: Vec<f64>,
    /// Rows with a greater score are compared.
    pub score: f64,
}

impl Scoring {
    /// The most errors that are looked at.
    pub const MOST_ERRORS: usize = 2;

    /// The buckets that a query looks at in a table with so many bits.
    pub fn probes(&self, bits: usize) -> usize {
        let pairs = bits * bits.saturating_sub(1) / 2;
        [1, 1 + bits, 1 + bits + pairs][self.weights.len() - 1]
    }

    /// Whether every row that is found has a score that is high enough.
    pub(super) fn takes_all(&self) -> bool {
        self.weights.iter().all(|weight| *weight > self.score)
    }

    /// The weight of the `probe`-th of these buckets, which are in the order of their errors.
    pub(super) fn weight(&self, probe: usize, bits: usize) -> f64 {
        let errors = if probe == 0 { 0 } else { 1 + usize::from(probe > bits) };
        self.weights[errors]
    }
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
            most_tables: None,
            hashes: None,
            width: None,
            is_width_chosen: false,
            rounding: Rounding::Floor,
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

    /// Checks all values, and sets the recall, if one is given.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for values out of range, and for those that do not go together.
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

    /// What the number of functions of a table is called.
    pub(super) fn hashes_name(&self) -> &'static str {
        if self.scoring.is_some() { "bits" } else { "hashes" }
    }

    /// What only some families have.
    fn check_family(&self) -> Result<(), String> {
        let family = self.family.name();
        let slots =
            [("width", self.width.is_some()), ("rounding", self.rounding != Rounding::Floor)];
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

    /// The most tables that are tried.
    pub(super) fn tried_tables(&self) -> usize {
        let free = match self.planes {
            Planes::Trained => FREE_TRAINED_TABLES,
            _ => FREE_TABLES,
        };
        self.tables.or(self.most_tables).unwrap_or(free)
    }

    /// How values become keys, with this width.
    pub(super) fn signature(&self, metric: Metric, width: f64, is_clamped: bool) -> Signature {
        Signature { family: self.family, metric, width, rounding: self.rounding, is_clamped }
    }

    /// Whether functions follow from the rows of a base as well.
    pub fn needs_all_rows(&self) -> bool {
        self.planes == Planes::Trained || self.is_centred
    }

    /// Whether something is left to be chosen.
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
        if self.rounding == Rounding::Zero {
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
