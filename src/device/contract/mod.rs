//! What devices do: one contract for each family of functions.
//!
//! Each primitive is one sentence of mathematics, which every device keeps, bit by bit. Nothing here
//! knows of a device.

mod kmeans;
mod search;

use std::ops::AddAssign;
use std::time::Duration;

pub use kmeans::{
    Assignment, KMeansDevice, KMeansInput, KMeansProblem, KMeansSession, RoundsRun, StopReason,
    centroid_shift, squares_are_finite, stop_reason,
};
pub use search::{
    Candidates, Capacity, Distances, Neighbors, Pairing, RowUse, SearchDevice, Shape,
};

/// What a computation took, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Pairs of rows whose sum was computed, or bounded by one product.
    pub pairs: u64,
    /// Pairs computed a second time in the exact order, because a product could not decide.
    pub rechecked: u64,
    /// Query rows that were looked at again: in a search, because their candidates overflowed; in
    /// Lloyd's rounds, because products left open which centroid is the nearest.
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
