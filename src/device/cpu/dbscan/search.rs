//! What the steps of DBSCAN share: rows in a tree of tiles, and how they are compared.

use std::sync::atomic::{AtomicU64, Ordering};

use super::points::Points;
use super::reach::Reach;
use super::tree::Tree;
use crate::job::Job;

/// Rows, ordered, and how they are compared.
pub(super) struct Search<'a, P> {
    pub points: &'a P,
    pub tree: &'a Tree,
    pub reach: Reach,
    pub job: &'a Job,
    pub counters: Counters,
}

/// The work done so far.
#[derive(Default)]
pub(super) struct Counters {
    pub tested: AtomicU64,
    pub pruned: AtomicU64,
    pub joined: AtomicU64,
    pub pairs: AtomicU64,
    pub rechecked: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Pairs of rows compared, and those of them that were compared again.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Pairs {
    computed: u64,
    rechecked: u64,
}

/// For each tile, a bit for each core row.
pub(super) type Core = Vec<u64>;

impl<P: Points> Search<'_, P> {
    /// The rows of a tile that are within eps of a row, which is within eps of itself.
    pub fn near(&self, own: usize, lane: u32, tile: usize, pairs: &mut Pairs) -> u64 {
        let (row, others) = (self.tree.row(own, lane) as usize, self.tree.rows_of(tile));
        let (near, is_rechecked) = self.points.near(row, tile, others);
        let rows = self.tree.lanes(tile);
        let count = u64::from(rows.count_ones());
        pairs.computed += count;
        pairs.rechecked += if is_rechecked { count } else { 0 };
        near & rows | if own == tile { 1 << lane } else { 0 }
    }

    /// Accounts for pairs compared.
    pub fn account(&self, pairs: Pairs) {
        add(&self.counters.pairs, pairs.computed);
        add(&self.counters.rechecked, pairs.rechecked);
    }

    /// The coordinates of a row.
    pub fn point(&self, row: u32) -> Vec<f64> {
        let all = 0..self.points.coordinates();
        all.map(|i| self.points.coordinate(row as usize, i)).collect()
    }
}
