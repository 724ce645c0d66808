//! The context that the steps of DBSCAN share: rows in a tree of tiles, their comparison, and counters.

use std::sync::atomic::{AtomicU64, Ordering};

use super::box_pruning::BoxPruning;
use super::space::Space;
use super::tiles::{TileRow, TileRows, lanes_of};
use super::tree::{TileNode, Tree};
use crate::job::Job;

/// The context of a step: the ordered rows, and their comparison.
pub(super) struct Context<'a, P> {
    pub space: &'a P,
    pub tree: &'a Tree,
    pub pruning: BoxPruning,
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
pub(super) struct PairCounts {
    computed: u64,
    rechecked: u64,
}

/// For each tile, a bit for each core row.
pub(super) type Core = Vec<u64>;

impl<P: Space> Context<'_, P> {
    /// The candidates that are within eps of a row: all of them, or at least `most`. A row is within eps of itself.
    pub fn near(
        &self,
        TileRow { tile: row_tile, lane }: TileRow,
        TileRows { tile, rows: candidates }: TileRows,
        most: u32,
        pairs: &mut PairCounts,
    ) -> u64 {
        let rows = self.tree.lanes(tile);
        pairs.computed += u64::from(rows.count_ones());
        if candidates == 0 {
            return 0;
        }
        let (row, others) = (self.tree.row(row_tile, lane) as usize, self.tree.rows_of(tile));
        let (near, rechecked) = self.space.near(row, tile, others, candidates, most);
        pairs.rechecked += u64::from((rechecked & rows).count_ones());
        (near | if row_tile == tile { 1 << lane } else { 0 }) & candidates & rows
    }

    /// Accounts for pairs compared.
    pub fn account(&self, pairs: PairCounts) {
        add(&self.counters.pairs, pairs.computed);
        add(&self.counters.rechecked, pairs.rechecked);
    }

    /// The rows among `rows` of a tile that may be within eps of a row in a box.
    pub fn rows_near(&self, tile: usize, rows: u64, bounds: &[f64]) -> u64 {
        if let Some(near) = self.space.rows_near(tile, bounds) {
            return near & rows;
        }
        let mut point = vec![0.0; self.space.coordinates()];
        let may_be = |lane: &u32| {
            self.fill(self.tree.row(tile, *lane), &mut point);
            !self.pruning.is_apart_from(&point, bounds)
        };
        lanes_of(rows).filter(may_be).fold(0, |near, lane| near | 1 << lane)
    }

    /// The coordinates of a row.
    pub fn point(&self, row: u32) -> Vec<f64> {
        let mut point = vec![0.0; self.space.coordinates()];
        self.fill(row, &mut point);
        point
    }

    fn fill(&self, row: u32, point: &mut [f64]) {
        let coordinates = point.iter_mut().enumerate();
        coordinates.for_each(|(i, to)| *to = self.space.coordinate(row as usize, i));
    }

    /// The node of a tile, and the sibling of each node on its path from the root, the nearest first.
    pub fn around(&self, tile: usize) -> (TileNode, impl Iterator<Item = TileNode>) {
        let mut others = Vec::new();
        let mut node = TileNode::root(self.tree.rows());
        while let Some((left, right)) = node.children() {
            let is_left = left.tiles().contains(&tile);
            others.push(if is_left { right } else { left });
            node = if is_left { left } else { right };
        }
        (node, others.into_iter().rev())
    }
}
