//! The parameters of `knn_lsh` in Rust.

use crate::algo::knn::{LshParams, Scoring};
use crate::error::{Error, Result};
use crate::exec::read::vector_column::VectorColumn;
use crate::index::lsh::{Family, Planes, SlotRounding};
use crate::metric::Metric;

/// The parameters of `knn_lsh` in Rust: k, and those that differ from the defaults. Omitted
/// parameters are tuned on the data to reach the recall.
///
/// ```
/// use datafusion_neighbors::{KnnLsh, Metric};
/// let most_of_ten = KnnLsh::k(10).metric(Metric::Cosine).recall(0.95).vector("embedding");
/// let by_hand = KnnLsh::k(10).tables(50).hashes(15).width(1.0).seed(7);
/// let within = KnnLsh::k(10).tables(1).hashes(16).planes("trained").box_radius(35.0);
/// let scored = KnnLsh::k(1).metric(Metric::Hamming).method("ewh").tables(8).bits(16).score(30.0);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KnnLsh {
    pub(crate) k: u64,
    pub(crate) metric: Metric,
    pub(crate) vector: Option<VectorColumn>,
    pub(crate) family: Option<String>,
    pub(crate) tables: Option<u64>,
    pub(crate) hashes: Option<u64>,
    pub(crate) width: Option<f64>,
    pub(crate) rounding: Option<String>,
    pub(crate) probes: Option<u64>,
    pub(crate) planes: Option<String>,
    pub(crate) zero_sum: Option<bool>,
    pub(crate) centre: Option<bool>,
    pub(crate) box_radius: Option<f64>,
    pub(crate) method: Option<String>,
    pub(crate) bits: Option<u64>,
    pub(crate) errors: Option<u64>,
    pub(crate) weights: Option<Vec<f64>>,
    pub(crate) score: Option<f64>,
    pub(crate) seed: Option<u64>,
    pub(crate) recall: Option<f64>,
}

/// A parameter of [`KnnLsh`] that may be left out, by the type of its values.
pub(crate) enum LshSlot<'a> {
    /// A whole number from 1.
    Count(&'a mut Option<u64>),
    /// A whole number from 0.
    Whole(&'a mut Option<u64>),
    Number(&'a mut Option<f64>),
    /// A number from 0.
    Length(&'a mut Option<f64>),
    Numbers(&'a mut Option<Vec<f64>>),
    Flag(&'a mut Option<bool>),
    Name(&'a mut Option<String>),
}

impl KnnLsh {
    /// About nine in ten of the k nearest neighbours, by Euclidean distance.
    pub fn k(k: u64) -> Self {
        Self {
            k,
            metric: Metric::default(),
            vector: None,
            family: None,
            tables: None,
            hashes: None,
            width: None,
            rounding: None,
            probes: None,
            planes: None,
            zero_sum: None,
            centre: None,
            box_radius: None,
            method: None,
            bits: None,
            errors: None,
            weights: None,
            score: None,
            seed: None,
            recall: None,
        }
    }

    /// Uses another distance.
    pub fn metric(self, metric: Metric) -> Self {
        Self { metric, ..self }
    }

    /// The column of vectors, on both sides; without it, the only one there is.
    pub fn vector(self, column: impl Into<String>) -> Self {
        Self { vector: Some(VectorColumn::Whole(column.into())), ..self }
    }

    /// The family of hash functions: `pstable`, `hyperplane`, `bits` or `minhash`.
    pub fn family(self, name: impl Into<String>) -> Self {
        Self { family: Some(name.into()), ..self }
    }

    /// The number of hash tables.
    pub fn tables(self, tables: u64) -> Self {
        Self { tables: Some(tables), ..self }
    }

    /// The number of hash functions of each table.
    pub fn hashes(self, hashes: u64) -> Self {
        Self { hashes: Some(hashes), ..self }
    }

    /// The width of p-stable slots, in units of the distance.
    pub fn width(self, width: f64) -> Self {
        Self { width: Some(width), ..self }
    }

    /// The rounding of p-stable slots: `floor` or `zero`.
    pub fn rounding(self, name: impl Into<String>) -> Self {
        Self { rounding: Some(name.into()), ..self }
    }

    /// The number of buckets that a query probes in each table, its own included (multi-probe LSH).
    pub fn probes(self, probes: u64) -> Self {
        Self { probes: Some(probes), ..self }
    }

    /// The kind of hyperplanes: `random`, `orthogonal`, or `trained` on a sample of the base.
    pub fn planes(self, name: impl Into<String>) -> Self {
        Self { planes: Some(name.into()), ..self }
    }

    /// Whether the coefficients of each hyperplane sum to 0.
    pub fn zero_sum(self, is_zero_sum: bool) -> Self {
        Self { zero_sum: Some(is_zero_sum), ..self }
    }

    /// Whether hyperplanes pass through the mean of the base instead of the origin.
    pub fn centre(self, is_centred: bool) -> Self {
        Self { centre: Some(is_centred), ..self }
    }

    /// Probes every box of orthogonal planes within this Euclidean distance of the query; `cosine`
    /// and `pearson` measure it between rows scaled to length 1.
    pub fn box_radius(self, radius: f64) -> Self {
        Self { box_radius: Some(radius), ..self }
    }

    /// The selection of candidates: `lsh`, or `ewh` for error weighted hashing of bits.
    pub fn method(self, name: impl Into<String>) -> Self {
        Self { method: Some(name.into()), ..self }
    }

    /// The number of bits of a table, for `ewh`.
    pub fn bits(self, bits: u64) -> Self {
        Self { bits: Some(bits), ..self }
    }

    /// The maximum number of bits by which a probed bucket may differ, for `ewh`: up to 2.
    pub fn errors(self, errors: u64) -> Self {
        Self { errors: Some(errors), ..self }
    }

    /// The weights of buckets that differ by 0, 1, … bits, for `ewh`.
    pub fn weights(self, weights: Vec<f64>) -> Self {
        Self { weights: Some(weights), ..self }
    }

    /// The threshold of the sum of weights above which a row is a candidate, for `ewh`.
    pub fn score(self, score: f64) -> Self {
        Self { score: Some(score), ..self }
    }

    /// The seed of all hash functions.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// The target recall, the share of the neighbours to be found: above 0 and below 1.
    pub fn recall(self, recall: f64) -> Self {
        Self { recall: Some(recall), ..self }
    }

    /// The parameters that may be left out, with their names.
    pub(crate) fn slots(&mut self) -> [(&'static str, LshSlot<'_>); 17] {
        [
            ("recall", LshSlot::Number(&mut self.recall)),
            ("family", LshSlot::Name(&mut self.family)),
            ("tables", LshSlot::Count(&mut self.tables)),
            ("hashes", LshSlot::Count(&mut self.hashes)),
            ("width", LshSlot::Length(&mut self.width)),
            ("rounding", LshSlot::Name(&mut self.rounding)),
            ("probes", LshSlot::Count(&mut self.probes)),
            ("planes", LshSlot::Name(&mut self.planes)),
            ("zero_sum", LshSlot::Flag(&mut self.zero_sum)),
            ("centre", LshSlot::Flag(&mut self.centre)),
            ("box_radius", LshSlot::Length(&mut self.box_radius)),
            ("method", LshSlot::Name(&mut self.method)),
            ("bits", LshSlot::Count(&mut self.bits)),
            ("errors", LshSlot::Whole(&mut self.errors)),
            ("weights", LshSlot::Numbers(&mut self.weights)),
            ("score", LshSlot::Number(&mut self.score)),
            ("seed", LshSlot::Whole(&mut self.seed)),
        ]
    }

    pub(crate) fn params(&self) -> Result<LshParams> {
        let family = named("family", self.family.as_deref(), &Family::NAMES)?;
        let count = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        // Parameters of hyperplanes imply their family.
        let has_planes = self.planes.is_some()
            || self.zero_sum == Some(true)
            || self.centre == Some(true)
            || self.box_radius.is_some();
        let family = family.or(has_planes.then_some(Family::Hyperplane));
        let mut params = LshParams::try_new(self.metric, family)?;
        let rounding = named("rounding", self.rounding.as_deref(), &SlotRounding::NAMES)?;
        let planes = named("planes", self.planes.as_deref(), &Planes::NAMES)?;
        params.tables = self.tables.map(count);
        params.hashes = self.hashes.map(count);
        params.width = self.width;
        params.rounding = rounding.unwrap_or(params.rounding);
        params.probes = self.probes.map_or(params.probes, count);
        let of_boxes = self.box_radius.map(|_| Planes::Orthogonal);
        params.planes = planes.or(of_boxes).unwrap_or(params.planes);
        params.is_zero_sum = self.zero_sum.unwrap_or(false);
        params.is_centred = self.centre.unwrap_or(false);
        params.box_radius = self.box_radius;
        params.seed = self.seed.unwrap_or(params.seed);
        self.score_candidates(&mut params).map_err(Error::InvalidArgument)?;
        params.check(self.recall)?;
        Ok(params)
    }

    /// Sets the parameters of error weighted hashing.
    pub(crate) fn score_candidates(&self, params: &mut LshParams) -> Result<(), String> {
        let only = [
            ("bits", self.bits.is_some()),
            ("errors", self.errors.is_some()),
            ("weights", self.weights.is_some()),
            ("score", self.score.is_some()),
        ];
        match self.method.as_deref().unwrap_or("lsh").to_ascii_lowercase().as_str() {
            "lsh" => match only.iter().find(|(_, is_given)| *is_given) {
                Some((name, _)) => Err(format!("{name} is given, but only method 'ewh' has it")),
                None => Ok(()),
            },
            "ewh" => {
                if self.hashes.is_some() {
                    return Err("hashes is given, which is bits in method 'ewh'".to_string());
                }
                let count = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
                params.hashes = self.bits.map(count);
                let bits = params.hashes.unwrap_or(0);
                let most = Scoring::MOST_ERRORS.min(bits);
                let given = self.weights.as_ref().map(|weights| weights.len().saturating_sub(1));
                let errors = self.errors.map(count).or(given).unwrap_or(most);
                if let Some(weights) =
                    self.weights.as_ref().filter(|w| w.len() != errors.saturating_add(1))
                {
                    let (numbers, needed) = (weights.len(), errors.saturating_add(1));
                    return Err(format!(
                        "weights has {numbers} numbers, but errors asks for {needed}"
                    ));
                }
                if errors > most {
                    return Err(format!("errors is {errors}; accepted are 0 to {most}"));
                }
                let default = || (0..=errors).map(|r| (bits - r) as f64).collect();
                let weights = self.weights.clone().unwrap_or_else(default);
                params.scoring = Some(Scoring { weights, score: self.score.unwrap_or(0.0) });
                Ok(())
            }
            other => Err(format!("unknown method '{other}'; accepted are 'lsh', 'ewh'")),
        }
    }
}

/// The value with this name, if a name is given.
fn named<T: Copy>(argument: &str, name: Option<&str>, all: &[(&str, T)]) -> Result<Option<T>> {
    let Some(name) = name else { return Ok(None) };
    let entry = all.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
    entry.map(|(_, value)| Some(*value)).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(name, _)| format!("'{name}'")).collect();
        let names = names.join(", ");
        Error::InvalidArgument(format!("unknown {argument} '{name}'; accepted are {names}"))
    })
}
