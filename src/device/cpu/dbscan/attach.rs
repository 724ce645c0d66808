//! Gives rows that are not core to the first cluster within eps.

use rayon::prelude::*;

use super::points::Points;
use super::search::{Core, Pairs, Search};
use super::tree::{LANES, Node, lanes_of};
use super::union::Sets;
use crate::device::contract::NOISE;
use crate::error::Result;

impl<P: Points> Search<'_, P> {
    /// For each row that is not core, the first of the clusters within eps; for each core row its own.
    /// By row.
    pub fn attach(&self, core: &Core, sets: &Sets) -> Result<Vec<u32>> {
        let root = Node::root(self.tree.rows());
        let mut first_of = vec![NOISE; 2 * core.len()];
        self.first_clusters(root, core, sets, &mut first_of);
        let tiles = (0..core.len()).into_par_iter().map(|tile| -> Result<[u32; LANES]> {
            self.job.check()?;
            let mut firsts = [NOISE; LANES];
            let mut pairs = Pairs::default();
            for lane in lanes_of(self.tree.lanes(tile)) {
                let row = self.tree.row(tile, lane);
                firsts[lane as usize] = if core[tile] >> lane & 1 == 1 {
                    sets.first(row)
                } else {
                    let point = self.point(row);
                    let mut found = (NOISE, pairs);
                    self.nearest(&point, (tile, lane), root, (core, sets, &first_of), &mut found)?;
                    pairs = found.1;
                    found.0
                };
            }
            self.account(pairs);
            Ok(firsts)
        });
        let tiles: Vec<_> = tiles.collect::<Result<_>>()?;
        let mut firsts = vec![NOISE; self.tree.rows()];
        for (position, row) in self.tree.order.iter().enumerate() {
            firsts[*row as usize] = tiles[position / LANES][position % LANES];
        }
        Ok(firsts)
    }

    /// Finds the first cluster with a core row in each node, or [`NOISE`].
    fn first_clusters(&self, node: Node, core: &Core, sets: &Sets, first_of: &mut [u32]) -> u32 {
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

    /// Looks in a node for an earlier cluster within eps of a row. `found` has the first so far, and
    /// the pairs compared.
    fn nearest(
        &self,
        point: &[f64],
        (own, lane): (usize, u32),
        node: Node,
        all @ (core, sets, first_of): (&Core, &Sets, &[u32]),
        found: &mut (u32, Pairs),
    ) -> Result<()> {
        let bounds = self.tree.bounds(node);
        if first_of[node.index] >= found.0 || self.reach.is_apart_from(point, bounds) {
            return Ok(());
        }
        if let Some((left, right)) = node.children() {
            self.nearest(point, (own, lane), left, all, found)?;
            return self.nearest(point, (own, lane), right, all, found);
        }
        self.job.check()?;
        let tile = node.tile();
        let near = self.near(own, lane, tile, &mut found.1) & core[tile];
        let firsts = lanes_of(near).map(|lane| sets.first(self.tree.row(tile, lane)));
        found.0 = firsts.min().unwrap_or(NOISE).min(found.0);
        Ok(())
    }
}
