//! The operator of k-means and DBSCAN: rows with their clusters, or the clusters.
//!
//! ```text
//! KMeansExec: k=100, metric=l2, device=auto
//!   input     drained once, all its partitions at a time
//!   init      the first centroids, if a relation gives them
//! ```
//!
//! As a window function, rows are grouped by the values of columns, and every group has clusters of
//! its own.
//!
//! Phases: (1) the inputs are collected and their vectors become rows; (2) a device is chosen and
//! all rows are clustered on the crate's own threads, which dropping the stream cancels; if a device that
//! was not requested by name fails, the CPU does it; (3) the input's batches come out again, with
//! the columns of the family, or the clusters do.
//!
//! Output: one partition, in the order of the input, or of the clusters.
//!
//! Memory: the input's batches, its vectors twice, and what the [family](ClusterFamily) says,
//! reserved in the session's pool; more than it allows fails with `ResourcesExhausted`.

mod exec;
mod family;
mod stream;

pub use self::exec::ClusterExec;
pub(super) use self::family::{ClusterExecution, Clustered};
pub use self::family::{ClusterFamily, ClusterSpec, output_fields};
