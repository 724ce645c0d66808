//! The parameters of a nearest neighbour search.

use crate::error::{Error, Result};
use crate::metric::Metric;

/// The number of neighbours `k`, and the metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnnParams {
    k: usize,
    metric: Metric,
}

impl KnnParams {
    /// # Errors
    /// [`Error::InvalidArgument`] if `k` is 0 or more than row numbers can count.
    pub fn try_new(k: u64, metric: Metric) -> Result<Self> {
        match usize::try_from(k) {
            Ok(k @ 1..) if u32::try_from(k).is_ok() => Ok(Self { k, metric }),
            _ => Err(Error::InvalidArgument(format!("k is {k}; accepted are 1 to {}", u32::MAX))),
        }
    }

    /// Neighbours per query.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The distance.
    pub fn metric(&self) -> Metric {
        self.metric
    }
}
