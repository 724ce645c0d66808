//! The contract of a device: one trait for each family of functions.
//!
//! Each primitive is defined by one mathematical statement, which every device implements bit by
//! bit. The contract does not depend on any device.

mod dbscan;
mod hashing;
mod kmeans;
mod search;

use std::ops::AddAssign;
use std::time::Duration;

#[cfg(feature = "cuda")]
pub use dbscan::CertainSquares;
pub use dbscan::{Components, DbscanDevice, DbscanInput, DbscanWork, NOISE, Within};
pub use hashing::{
    BucketTask, Buckets, Hashes, HashingDevice, NearestInBuckets, ProbeSet, Ranges, SelfRows,
    Starts, TableRows, TablesBuilt,
};
#[allow(unused_imports, reason = "some devices sum in float64 only")]
pub use kmeans::squares_are_finite;
pub use kmeans::{
    Assigned, Assigner, Assignment, KMeansDevice, KMeansInput, KMeansKind, KMeansProblem,
    KMeansSession, KMeansShape, Labels, Moved, RoundsRun, StopReason, centroid_shift, stop_reason,
};
pub use search::{
    Candidates, Capacity, Definition, Distances, Enough, NO_ROW, Neighbors, Outcome, Pairing,
    QueryInput, QueryRows, RowUse, SearchDevice, Shape,
};

/// Counters of the work of a computation, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Pairs of rows whose distance was computed, or bounded by one product.
    pub pairs: u64,
    /// Pairs computed a second time, because the bound was not decisive.
    pub rechecked: u64,
    /// Query rows that were processed again: in a search, after an overflow of their candidate
    /// lists; in Lloyd's rounds, because the products did not decide the nearest centroid.
    pub redone: u64,
    /// Bytes sent to the device.
    pub bytes_sent: u64,
    /// Time spent sending them.
    pub transfer: Duration,
    /// Time spent computing.
    pub kernel: Duration,
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.pairs += other.pairs;
        self.rechecked += other.rechecked;
        self.redone += other.redone;
        self.bytes_sent += other.bytes_sent;
        self.transfer += other.transfer;
        self.kernel += other.kernel;
    }
}
