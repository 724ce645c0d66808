//! Joins core rows within eps of each other, two nodes of the tree at a time. Nodes whose core rows are
//! joined already, or too far apart, need no pairs of rows.

use std::sync::atomic::{AtomicU32, Ordering};

use super::context::{Context, Core, PairCounts, add};
use super::space::Space;
use super::tiles::{TileRow, TileRows, lanes_of};
use super::tree::TileNode;
use super::union_find::UnionFind;
use crate::error::Result;

impl<P: Space> Context<'_, P> {
    /// Joins all core rows within eps of each other.
    pub fn connect(&self, core: &Core) -> Result<UnionFind> {
        let nodes = 2 * core.len();
        let connector = CoreConnector {
            context: self,
            core,
            sets: UnionFind::new(self.tree.rows()),
            known: (0..nodes).map(|_| AtomicU32::new(UNKNOWN)).collect(),
        };
        let root = TileNode::root(self.tree.rows());
        connector.find_empty(root);
        connector.within(root)?;
        Ok(connector.sets)
    }
}

/// In [`CoreConnector::known`]: the core rows of a node may not all be joined.
const UNKNOWN: u32 = u32::MAX;
/// In [`CoreConnector::known`]: a node has no core rows.
const EMPTY: u32 = u32::MAX - 1;

/// Joins core rows, two nodes of the tree at a time.
struct CoreConnector<'a, P> {
    context: &'a Context<'a, P>,
    core: &'a Core,
    sets: UnionFind,
    /// For each node, one of its core rows, if all of them are joined.
    known: Vec<AtomicU32>,
}

impl<P: Space> CoreConnector<'_, P> {
    /// Marks nodes without core rows.
    fn find_empty(&self, node: TileNode) -> bool {
        let is_empty = match node.children() {
            // Both are marked.
            Some((left, right)) => self.find_empty(left) & self.find_empty(right),
            None => self.core[node.tile()] == 0,
        };
        if is_empty {
            self.know(node, EMPTY);
        }
        is_empty
    }

    fn known(&self, node: TileNode) -> u32 {
        self.known[node.index].load(Ordering::Relaxed)
    }

    fn know(&self, node: TileNode, row: u32) {
        self.known[node.index].store(row, Ordering::Relaxed);
    }

    /// Joins the core rows of a node.
    fn within(&self, node: TileNode) -> Result<()> {
        if self.known(node) != UNKNOWN {
            return Ok(());
        }
        let bounds = self.context.tree.bounds(node);
        if self.context.pruning.is_within(bounds, bounds) {
            add(&self.context.counters.pruned, 1);
            return self.join_all(node, None);
        }
        let Some((left, right)) = node.children() else { return self.within_tile(node) };
        let done = if node.is_small() {
            (self.within(left), self.within(right))
        } else {
            rayon::join(|| self.within(left), || self.within(right))
        };
        done.0.and(done.1)?;
        self.between(left, right)?;
        self.update(node, left, right);
        Ok(())
    }

    /// Joins the core rows of two nodes that are within eps of each other.
    fn between(&self, a: TileNode, b: TileNode) -> Result<()> {
        let Context { tree, pruning, counters, .. } = self.context;
        if self.known(a) == EMPTY || self.known(b) == EMPTY {
            return Ok(());
        }
        add(&counters.tested, 1);
        if self.are_joined(a, b) {
            add(&counters.joined, 1);
            return Ok(());
        }
        if pruning.is_apart(tree.bounds(a), tree.bounds(b)) {
            add(&counters.pruned, 1);
            return Ok(());
        }
        if pruning.is_within(tree.bounds(a), tree.bounds(b)) {
            add(&counters.pruned, 1);
            return self.join_all(a, Some(b));
        }
        let (large, other) = if b.is_larger(a) { (b, a) } else { (a, b) };
        let Some((left, right)) = large.children() else { return self.between_tiles(a, b) };
        let done = if large.is_small() {
            (self.between(left, other), self.between(right, other))
        } else {
            rayon::join(|| self.between(left, other), || self.between(right, other))
        };
        done.0.and(done.1)?;
        self.update(large, left, right);
        Ok(())
    }

    /// Whether all core rows of two nodes are in one set.
    fn are_joined(&self, a: TileNode, b: TileNode) -> bool {
        let (a, b) = (self.known(a), self.known(b));
        a < EMPTY && b < EMPTY && self.sets.first(a) == self.sets.first(b)
    }

    /// Records whether the core rows of a node are joined, after those of its halves.
    fn update(&self, node: TileNode, left: TileNode, right: TileNode) {
        match (self.known(left), self.known(right)) {
            (EMPTY, known) | (known, EMPTY) => self.know(node, known),
            (known, _) if self.are_joined(left, right) => self.know(node, known),
            _ => {}
        }
    }

    /// Joins all core rows of a node, or of two.
    fn join_all(&self, node: TileNode, other: Option<TileNode>) -> Result<()> {
        let tiles = node.tiles().chain(other.iter().flat_map(|other| other.tiles()));
        let mut first = None;
        for tile in tiles {
            self.context.job.check()?;
            for lane in lanes_of(self.core[tile]) {
                let row = self.context.tree.row(tile, lane);
                self.sets.join(*first.get_or_insert(row), row);
            }
        }
        if let Some(row) = first {
            self.know(node, row);
            other.into_iter().for_each(|other| self.know(other, row));
        }
        Ok(())
    }

    /// Joins the core rows of a tile.
    fn within_tile(&self, node: TileNode) -> Result<()> {
        let Context { tree, job, .. } = self.context;
        job.check()?;
        let tile = node.tile();
        let (mut open, mut frontier, mut pairs) = (self.core[tile], 0u64, PairCounts::default());
        let all = TileRows { tile, rows: open };
        let candidates = self.context.space.candidates(all, all);
        // A search from row to row: each row of the frontier looks for further open rows of the tile.
        while open != 0 {
            if frontier == 0 {
                frontier = open & open.wrapping_neg();
                open ^= frontier;
            }
            let lane = frontier.trailing_zeros();
            frontier ^= 1 << lane;
            let candidates = TileRows { tile, rows: candidates[lane as usize] & open };
            let row = TileRow { tile, lane };
            let near = self.context.near(row, candidates, u32::MAX, &mut pairs);
            let row = tree.row(tile, lane);
            lanes_of(near).for_each(|other| self.sets.join(row, tree.row(tile, other)));
            (open, frontier) = (open ^ near, frontier | near);
        }
        self.context.account(pairs);
        self.know_tile(node);
        Ok(())
    }

    /// Joins the core rows of two tiles that are within eps of each other.
    fn between_tiles(&self, a: TileNode, b: TileNode) -> Result<()> {
        let Context { tree, job, .. } = self.context;
        job.check()?;
        let (row_tile, other, bounds) = (a.tile(), b.tile(), tree.bounds(b));
        let mut pairs = PairCounts::default();
        let rows = self.context.rows_near(row_tile, self.core[row_tile], bounds);
        let others = TileRows { tile: other, rows: self.core[other] };
        let candidates = self.context.space.candidates(TileRows { tile: row_tile, rows }, others);
        for lane in lanes_of(rows) {
            let (row, known) = (tree.row(row_tile, lane), self.known(b));
            if known < EMPTY && self.sets.first(row) == self.sets.first(known) {
                continue;
            }
            // One pair is enough where all core rows of the other tile are joined.
            let most = if known < EMPTY { 1 } else { u32::MAX };
            let rows = candidates[lane as usize] & self.core[other];
            let (row_in_tile, candidates) =
                (TileRow { tile: row_tile, lane }, TileRows { tile: other, rows });
            let near = self.context.near(row_in_tile, candidates, most, &mut pairs);
            if near == 0 {
                continue;
            }
            if known < EMPTY {
                self.sets.join(row, known);
            } else {
                lanes_of(near).for_each(|lane| self.sets.join(row, tree.row(other, lane)));
            }
            if self.are_joined(a, b) {
                break;
            }
        }
        self.context.account(pairs);
        self.know_tile(a);
        self.know_tile(b);
        Ok(())
    }

    /// Records whether the core rows of a tile are joined.
    fn know_tile(&self, node: TileNode) {
        if self.known(node) != UNKNOWN {
            return;
        }
        let mut rows =
            lanes_of(self.core[node.tile()]).map(|lane| self.context.tree.row(node.tile(), lane));
        if let Some(row) = rows.next() {
            let first = self.sets.first(row);
            if rows.all(|row| self.sets.first(row) == first) {
                self.know(node, row);
            }
        }
    }
}
