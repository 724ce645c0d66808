//! Neighbour counts where boxes prune little: each pair of tiles is compared once, for the rows of both.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::context::{Context, Core, PairCounts, add};
use super::count::NeighborCounts;
use super::space::Space;
use super::tiles::{LANES, TileRow, TileRows, lanes_of};
use super::tree::TileNode;
use super::weights::Weights;
use crate::error::Result;
use crate::parallel::{lock, try_in_parallel};

/// A tile whose rows are counted, by several threads.
struct SharedCounts {
    node: TileNode,
    /// The rows that are not known to be core. It may be outdated, with rows that have just become core.
    open: AtomicU64,
    counts: Mutex<NeighborCounts>,
}

impl SharedCounts {
    fn open(&self) -> u64 {
        self.open.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, NeighborCounts> {
        lock(&self.counts)
    }

    /// Ends a change of the counts.
    fn unlock(&self, counts: MutexGuard<'_, NeighborCounts>) {
        self.open.store(counts.open, Ordering::Relaxed);
    }
}

impl<P: Space> Context<'_, P> {
    /// The core rows.
    pub fn core_in_pairs(&self, weights: &Weights) -> Result<Core> {
        let tiles = self.tree.rows().div_ceil(LANES);
        let _reserved = self.job.reserve("neighbour counts", tiles * size_of::<SharedCounts>())?;
        let shared = |tile| {
            let (node, rows) = (self.around(tile).0, self.tree.lanes(tile));
            SharedCounts { node, open: rows.into(), counts: Mutex::new(NeighborCounts::of(rows)) }
        };
        let all: Vec<_> = (0..tiles).map(shared).collect();
        try_in_parallel(0..tiles, |a| {
            let mut pairs = PairCounts::default();
            (a..tiles).try_for_each(|b| self.count_pair(&all[a], &all[b], weights, &mut pairs))?;
            self.account(pairs);
            Ok(())
        })?;
        let decide = |tile: usize| self.decide(tile, &all[tile].lock(), weights);
        try_in_parallel(0..tiles, decide)
    }

    /// Compares two tiles, or one with itself.
    fn count_pair(
        &self,
        a: &SharedCounts,
        b: &SharedCounts,
        weights: &Weights,
        pairs: &mut PairCounts,
    ) -> Result<()> {
        let (tile_of_a, tile_of_b) = (a.node.tile(), b.node.tile());
        let open = a.open();
        // Of one tile, all pairs are seen from both rows.
        let open_others = if tile_of_a == tile_of_b { 0 } else { b.open() };
        if open | open_others == 0 {
            return Ok(());
        }
        self.job.check()?;
        add(&self.counters.tested, 1);
        if self.pruning.is_apart(self.tree.bounds(a.node), self.tree.bounds(b.node)) {
            add(&self.counters.pruned, 1);
            return Ok(());
        }
        let rows = if open_others == 0 { open } else { self.tree.lanes(tile_of_a) };
        let others = if open == 0 { open_others } else { self.tree.lanes(tile_of_b) };
        let (of_a, of_b) =
            (TileRows { tile: tile_of_a, rows }, TileRows { tile: tile_of_b, rows: others });
        let candidates = self.space.candidates(of_a, of_b);
        let mut near = [0; LANES];
        for lane in lanes_of(rows) {
            let counted = if open >> lane & 1 == 1 { others } else { open_others };
            let most = if open_others == 0 { a.lock().missing(lane, weights) } else { u32::MAX };
            let candidates =
                TileRows { tile: tile_of_b, rows: candidates[lane as usize] & counted };
            near[lane as usize] =
                self.near(TileRow { tile: tile_of_a, lane }, candidates, most, pairs);
        }
        let mut counts = a.lock();
        for lane in lanes_of(open).filter(|lane| near[*lane as usize] != 0) {
            counts.add(lane, weights.of_lanes(tile_of_b, near[lane as usize]), weights);
        }
        a.unlock(counts);
        if open_others == 0 {
            return Ok(());
        }
        let mut counts = b.lock();
        for lane in lanes_of(rows) {
            let one = weights.of_lanes(tile_of_a, 1 << lane);
            let near = near[lane as usize] & open_others;
            lanes_of(near).for_each(|other| counts.add(other, one, weights));
        }
        b.unlock(counts);
        Ok(())
    }
}
