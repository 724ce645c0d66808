//! Neighbour counts: the rows within eps of every row, until they are enough to make it core.

use super::context::{Context, Core, PairCounts, add};
use super::space::Space;
use super::tiles::{LANES, TileRow, TileRows, lanes_of};
use super::tree::TileNode;
use super::weights::{Total, Weights};
use crate::error::Result;
use crate::parallel::try_in_parallel;

/// The counts of a tile's rows.
pub(super) struct NeighborCounts {
    totals: [Total; LANES],
    /// The rows that are not known to be core.
    pub open: u64,
}

impl NeighborCounts {
    /// Counts of nothing, for these rows.
    pub fn of(rows: u64) -> Self {
        Self { totals: [Total::default(); LANES], open: rows }
    }

    /// Number of further rows that make a row core.
    pub fn missing(&self, lane: u32, weights: &Weights) -> u32 {
        weights.missing(self.totals[lane as usize])
    }

    pub fn add(&mut self, lane: u32, more: Total, weights: &Weights) {
        let total = &mut self.totals[lane as usize];
        *total += more;
        if weights.is_enough(*total) {
            self.open &= !(1 << lane);
        }
    }
}

/// A tile whose rows are counted.
struct Counting<'a> {
    tile_node: TileNode,
    weights: &'a Weights,
    counts: NeighborCounts,
    tested: u64,
    pruned: u64,
    pairs: PairCounts,
}

impl<P: Space> Context<'_, P> {
    /// The core rows.
    pub fn core(&self, weights: &Weights) -> Result<Core> {
        if P::IN_PAIRS {
            return self.core_in_pairs(weights);
        }
        let tiles = 0..self.tree.rows().div_ceil(LANES);
        try_in_parallel(tiles, |tile| self.core_of(tile, weights))
    }

    fn core_of(&self, tile: usize, weights: &Weights) -> Result<u64> {
        let counts = NeighborCounts::of(self.tree.lanes(tile));
        let (tested, pruned, pairs) = (0, 0, PairCounts::default());
        let (tile_node, others) = self.around(tile);
        let mut counting = Counting { tile_node, weights, counts, tested, pruned, pairs };
        for node in std::iter::once(tile_node).chain(others) {
            self.count(&mut counting, node)?;
        }
        add(&self.counters.tested, counting.tested);
        add(&self.counters.pruned, counting.pruned);
        self.account(counting.pairs);
        self.decide(tile, &counting.counts, weights)
    }

    /// The core rows of a tile, from its counts.
    pub fn decide(&self, tile: usize, counts: &NeighborCounts, weights: &Weights) -> Result<u64> {
        let unsure = lanes_of(counts.open);
        let unsure = unsure.filter(|lane| weights.may_be_enough(counts.totals[*lane as usize]));
        let mut core = self.tree.lanes(tile) & !counts.open;
        for lane in unsure {
            core |= u64::from(self.is_core_exactly(tile, lane, weights)?) << lane;
        }
        Ok(core)
    }

    /// Counts the rows of a node that are within eps of the rows of a tile.
    fn count(&self, counting: &mut Counting<'_>, node: TileNode) -> Result<()> {
        if counting.counts.open == 0 {
            return Ok(());
        }
        counting.tested += 1;
        let (tile_bounds, node_bounds) =
            (self.tree.bounds(counting.tile_node), self.tree.bounds(node));
        if self.pruning.is_apart(tile_bounds, node_bounds) {
            counting.pruned += 1;
            return Ok(());
        }
        if self.pruning.is_within(tile_bounds, node_bounds) {
            counting.pruned += 1;
            let all = counting.weights.of_tiles(node.tiles(), self.tree.rows_in(node));
            for lane in lanes_of(counting.counts.open) {
                counting.counts.add(lane, all, counting.weights);
            }
            return Ok(());
        }
        if let Some((left, right)) = node.children() {
            self.count(counting, left)?;
            return self.count(counting, right);
        }
        self.job.check()?;
        let (row_tile, tile) = (counting.tile_node.tile(), node.tile());
        let mut rows = counting.counts.open;
        if row_tile != tile {
            rows = self.rows_near(row_tile, rows, node_bounds);
        }
        let all = TileRows { tile, rows: u64::MAX };
        let candidates = self.space.candidates(TileRows { tile: row_tile, rows }, all);
        for lane in lanes_of(rows) {
            let candidates = TileRows { tile, rows: candidates[lane as usize] };
            let most = counting.counts.missing(lane, counting.weights);
            let row = TileRow { tile: row_tile, lane };
            let near = self.near(row, candidates, most, &mut counting.pairs);
            let more = counting.weights.of_lanes(tile, near);
            counting.counts.add(lane, more, counting.weights);
        }
        Ok(())
    }

    /// Whether the weights of the rows within eps are enough, added up without rounding.
    fn is_core_exactly(&self, tile: usize, lane: u32, weights: &Weights) -> Result<bool> {
        let (mut exact, mut pairs) = (weights.exact(), PairCounts::default());
        let point = self.point(self.tree.row(tile, lane));
        let mut open = vec![TileNode::root(self.tree.rows())];
        while let Some(node) = open.pop() {
            self.job.check()?;
            if self.pruning.is_apart_from(&point, self.tree.bounds(node)) {
                continue;
            }
            if let Some((left, right)) = node.children() {
                open.extend([left, right]);
                continue;
            }
            let other = node.tile();
            let (row, all) = (TileRows { tile, rows: 1 << lane }, u64::MAX);
            let candidates = self.space.candidates(row, TileRows { tile: other, rows: all });
            let candidates = TileRows { tile: other, rows: candidates[lane as usize] };
            let near = self.near(TileRow { tile, lane }, candidates, u32::MAX, &mut pairs);
            exact.add(lanes_of(near).map(|lane| other * LANES + lane as usize));
        }
        self.account(pairs);
        Ok(exact.is_enough())
    }
}
