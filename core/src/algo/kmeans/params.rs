//! The parameters of k-means.

use crate::error::{Error, Result};
use crate::metric::Metric;

/// The parameters of `kmeans`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KMeansParams {
    pub k: usize,
    pub metric: Metric,
    /// The maximum number of rounds.
    pub max_iterations: usize,
    /// Rounds end when the sum of the squared shifts of all centroids is at most this multiple of
    /// the mean variance of the dimensions.
    pub tolerance: f64,
    /// The method for initial centroids.
    pub init: Init,
    /// The number of runs; the one with the smallest inertia is kept, ties going to the earlier
    /// one.
    pub runs: usize,
    /// The seed of all random choices.
    pub seed: u64,
}

/// A method for initial centroids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Hash, Default)]
#[non_exhaustive]
pub enum Init {
    /// Greedy k-means++.
    #[default]
    PlusPlus,
    /// k-means||.
    Parallel,
    /// Random rows.
    Random,
    /// The rows of another matrix.
    Given,
}

impl Init {
    /// The SQL names of the methods without a table of centroids.
    pub const NAMES: [(&'static str, Self); 3] =
        [("k-means++", Self::PlusPlus), ("k-means||", Self::Parallel), ("random", Self::Random)];
}

impl KMeansParams {
    /// The defaults of `max_iterations` and `tolerance`: scikit-learn's.
    pub const MAX_ITERATIONS: usize = 300;
    pub const TOLERANCE: f64 = 1e-4;

    /// scikit-learn's defaults except `runs`: 300 rounds, tolerance 1e-4, greedy k-means++, one
    /// run.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `k` is 0 or exceeds the range of cluster numbers, or the
    /// metric is neither `l2` nor `cosine`.
    pub fn try_new(k: u64, metric: Metric) -> Result<Self> {
        if !matches!(metric, Metric::L2 | Metric::Cosine) {
            return Err(Error::InvalidArgument(format!(
                "kmeans: metric '{metric}'; accepted are l2, cosine"
            )));
        }
        let k = match usize::try_from(k) {
            Ok(k @ 1..) if u32::try_from(k).is_ok() => k,
            _ => {
                return Err(Error::InvalidArgument(format!(
                    "kmeans: k is {k}; accepted are 1 to {}",
                    u32::MAX
                )));
            }
        };
        Ok(Self {
            k,
            metric,
            max_iterations: Self::MAX_ITERATIONS,
            tolerance: Self::TOLERANCE,
            init: Init::default(),
            runs: 1,
            seed: 0,
        })
    }

    /// Number of clusters.
    pub fn k(&self) -> usize {
        self.k
    }

    /// `l2` or `cosine`.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// # Errors
    /// [`Error::InvalidArgument`] for numbers that are invalid for any rows.
    pub(super) fn check(&self) -> Result<()> {
        if self.max_iterations == 0 || self.runs == 0 {
            let message = "kmeans: max_iterations and runs are counted from 1";
            return Err(Error::InvalidArgument(message.to_string()));
        }
        if !(self.tolerance >= 0.0 && self.tolerance.is_finite()) {
            let tolerance = self.tolerance;
            return Err(Error::InvalidArgument(format!(
                "kmeans: tolerance is {tolerance}; accepted are numbers from 0"
            )));
        }
        Ok(())
    }

    /// The metric whose distances are summed to the inertia.
    pub fn cost(&self) -> Metric {
        cost_of(self.metric)
    }
}

/// The metric whose distances k-means sums under a metric.
pub(super) fn cost_of(metric: Metric) -> Metric {
    if metric == Metric::L2 { Metric::SqEuclidean } else { metric }
}
