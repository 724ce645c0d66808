//! The parameters of `knn_lsh` in Rust.

use super::vectors::VectorColumn;
use crate::algo::knn::LshParams;
use crate::error::{Error, Result};
use crate::index::lsh::Family;
use crate::metric::Metric;

/// The parameters of `knn_lsh` in Rust: k, and those that differ from the defaults. What is not given
/// is chosen by the data, so that the recall is reached.
///
/// ```
/// use datafusion_neighbors::{KnnLsh, Metric};
/// let most_of_ten = KnnLsh::k(10).metric(Metric::Cosine).recall(0.95).vector("embedding");
/// let by_hand = KnnLsh::k(10).tables(50).hashes(15).width(1.0).seed(7);
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
    pub(crate) probes: Option<u64>,
    pub(crate) seed: Option<u64>,
    pub(crate) recall: Option<f64>,
}

impl KnnLsh {
    /// About nine in ten of the k nearest, by Euclidean distance.
    pub fn k(k: u64) -> Self {
        Self {
            k,
            metric: Metric::default(),
            vector: None,
            family: None,
            tables: None,
            hashes: None,
            width: None,
            probes: None,
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

    /// Number of tables.
    pub fn tables(self, tables: u64) -> Self {
        Self { tables: Some(tables), ..self }
    }

    /// Functions of each table.
    pub fn hashes(self, hashes: u64) -> Self {
        Self { hashes: Some(hashes), ..self }
    }

    /// The width of p-stable slots, in units of the distance.
    pub fn width(self, width: f64) -> Self {
        Self { width: Some(width), ..self }
    }

    /// Buckets that a query looks at in each table, its own included.
    pub fn probes(self, probes: u64) -> Self {
        Self { probes: Some(probes), ..self }
    }

    /// The seed of all functions.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// The share of the neighbours to be found, above 0 and below 1.
    pub fn recall(self, recall: f64) -> Self {
        Self { recall: Some(recall), ..self }
    }

    pub(crate) fn params(&self) -> Result<LshParams> {
        let family = self.family.as_deref().map(family).transpose()?;
        let count = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        let mut params = LshParams::try_new(self.metric, family)?;
        params.tables = self.tables.map(count);
        params.hashes = self.hashes.map(count);
        params.width = self.width;
        params.probes = self.probes.map_or(params.probes, count);
        params.seed = self.seed.unwrap_or(params.seed);
        params.check(self.recall)?;
        Ok(params)
    }
}

/// A family by its name.
fn family(name: &str) -> Result<Family> {
    let found = Family::NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
    found.map(|(_, family)| *family).ok_or_else(|| {
        let names = Family::NAMES.map(|(name, _)| format!("'{name}'")).join(", ");
        Error::InvalidArgument(format!("unknown family '{name}'; accepted are {names}"))
    })
}
