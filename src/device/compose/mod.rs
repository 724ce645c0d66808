//! Primitives made of other primitives, the same on every device: searches larger than a device's
//! memory, and k-means by search.

mod by_search;
mod means;
mod search;

use super::CpuDevice;

use super::ClusterSums;
use super::contract::{KMeansInput, KMeansProblem};
use super::cpu::cluster_sums;
use crate::matrix::{Real, Rows};

pub use by_search::{BySearch, LARGE_PROBLEM};
pub use means::Means;
pub use search::StreamedSearch;

/// k-means on the CPU, whatever device the rest is on.
pub type KMeansOnHost<'a, T> = BySearch<'a, CpuDevice, T>;

/// A session on the CPU.
pub fn host_session<T: Real>(
    input: KMeansInput<'_>,
    problems: Vec<KMeansProblem>,
) -> KMeansOnHost<'_, T> {
    BySearch::open(&CpuDevice::new().into(), input, problems)
}

/// The sums of clusters that have these rows, by their labels. `empty` has the sums of no rows.
pub fn sums_of(rows: &Rows, labels: &[u32], mut empty: ClusterSums) -> ClusterSums {
    cluster_sums::move_rows(rows, None, (None, labels), &mut empty);
    empty
}
