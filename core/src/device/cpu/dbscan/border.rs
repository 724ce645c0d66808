//! Assigns rows that are not core to the first cluster within eps.

use super::context::{Context, Core, PairCounts};
use super::space::Space;
use super::tiles::{LANES, TileRow, TileRows, lanes_of};
use super::tree::TileNode;
use super::union_find::UnionFind;
use crate::device::contract::NOISE;
use crate::error::Result;
use crate::parallel::try_in_parallel;

impl<P: Space> Context<'_, P> {
    /// The cluster of each row: for a core row its own, for any other the first cluster within eps, or [`NOISE`].
    pub fn assign_borders(&self, core: &Core, sets: &UnionFind) -> Result<Vec<u32>> {
        let root = TileNode::root(self.tree.rows());
        let mut first_of = vec![NOISE; 2 * core.len()];
        self.first_clusters(root, core, sets, &mut first_of);
        let tiles = try_in_parallel(0..core.len(), |tile| -> Result<[u32; LANES]> {
            self.job.check()?;
            let mut firsts = [NOISE; LANES];
            for lane in lanes_of(core[tile]) {
                firsts[lane as usize] = sets.first(self.tree.row(tile, lane));
            }
            let open = self.tree.lanes(tile) & !core[tile];
            if open == 0 {
                return Ok(firsts);
            }
            let ((tile_node, others), pairs) = (self.around(tile), PairCounts::default());
            let first_of = &first_of;
            let mut search =
                BorderSearch { core, sets, first_of, tile_node, open, firsts, most: NOISE, pairs };
            for node in std::iter::once(tile_node).chain(others) {
                self.nearest(&mut search, node)?;
            }
            self.account(search.pairs);
            Ok(search.firsts)
        })?;
        let mut firsts = vec![NOISE; self.tree.rows()];
        for (position, row) in self.tree.order.iter().enumerate() {
            firsts[*row as usize] = tiles[position / LANES][position % LANES];
        }
        Ok(firsts)
    }

    /// Finds the first cluster with a core row in each node, or [`NOISE`].
    fn first_clusters(
        &self,
        node: TileNode,
        core: &Core,
        sets: &UnionFind,
        first_of: &mut [u32],
    ) -> u32 {
        let first = match node.children() {
            Some((left, right)) => {
                let left = self.first_clusters(left, core, sets, first_of);
                left.min(self.first_clusters(right, core, sets, first_of))
            }
            None => {
                let (tile, row) = (node.tile(), |lane| self.tree.row(node.tile(), lane));
                lanes_of(core[tile]).map(|lane| sets.first(row(lane))).min().unwrap_or(NOISE)
            }
        };
        first_of[node.index] = first;
        first
    }

    /// Looks in a node for earlier clusters within eps of a tile's rows.
    fn nearest(&self, search: &mut BorderSearch<'_>, node: TileNode) -> Result<()> {
        let (bounds, first) = (self.tree.bounds(node), search.first_of[node.index]);
        if first >= search.most || self.pruning.is_apart(self.tree.bounds(search.tile_node), bounds)
        {
            return Ok(());
        }
        if let Some((left, right)) = node.children() {
            self.nearest(search, left)?;
            return self.nearest(search, right);
        }
        self.job.check()?;
        let BorderSearch { core, sets, .. } = *search;
        let (row_tile, tile) = (search.tile_node.tile(), node.tile());
        let is_open = |lane: &u32| first < search.firsts[*lane as usize];
        let rows = lanes_of(search.open).filter(is_open).fold(0, |rows, lane| rows | 1 << lane);
        let rows = self.rows_near(row_tile, rows, bounds);
        let others = TileRows { tile, rows: core[tile] };
        let candidates = self.space.candidates(TileRows { tile: row_tile, rows }, others);
        for lane in lanes_of(rows) {
            let candidates = TileRows { tile, rows: candidates[lane as usize] & core[tile] };
            let row = TileRow { tile: row_tile, lane };
            let near = self.near(row, candidates, u32::MAX, &mut search.pairs);
            let firsts = lanes_of(near).map(|lane| sets.first(self.tree.row(tile, lane)));
            let first = &mut search.firsts[lane as usize];
            *first = firsts.min().unwrap_or(NOISE).min(*first);
        }
        let of_open = lanes_of(search.open).map(|lane| search.firsts[lane as usize]);
        search.most = of_open.max().unwrap_or(0);
        Ok(())
    }
}

/// A tile whose rows that are not core search for clusters.
struct BorderSearch<'a> {
    core: &'a Core,
    sets: &'a UnionFind,
    /// For each node, the first cluster with a core row there.
    first_of: &'a [u32],
    tile_node: TileNode,
    /// The tile's rows that are not core.
    open: u64,
    /// The first cluster found for each row.
    firsts: [u32; LANES],
    /// The last of these rows' first clusters: a later cluster changes none of them.
    most: u32,
    pairs: PairCounts,
}
