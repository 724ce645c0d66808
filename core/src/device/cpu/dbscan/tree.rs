//! Rows in a spatial order, cut into tiles, and a binary tree of bounding boxes over the tiles: every node is halved
//! along the dimension of its rows' widest spread.

use std::ops::Range;

use super::space::Space;
use super::tiles::{LANES, lowest};
use crate::device::cpu::spatial_order::{self, Bisection, order_by_bisection};
use crate::error::Result;
use crate::job::{Job, Reserved};

/// Below this many tiles, a node is the work of one thread.
pub(super) const ALONE: usize = 16;

/// See the [module](self).
pub(super) struct Tree {
    /// The rows in order: those of tile t are from position 64 t on.
    pub order: Vec<u32>,
    /// For every node, the least and the largest value of each coordinate.
    boxes: Vec<f64>,
    coordinates: usize,
    _reserved: Reserved,
}

/// Some consecutive tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TileNode {
    /// Its position in pre-order.
    pub index: usize,
    first: usize,
    tiles: usize,
}

impl TileNode {
    /// The node of all tiles.
    pub fn root(rows: usize) -> Self {
        Self { index: 0, first: 0, tiles: rows.div_ceil(LANES) }
    }

    /// Its halves; `None` for a node of one tile.
    pub fn children(self) -> Option<(Self, Self)> {
        let Self { index, first, tiles } = self;
        let half = tiles / 2;
        (half > 0).then(|| {
            let left = Self { index: index + 1, first, tiles: half };
            let right = Self { index: index + 2 * half, first: first + half, tiles: tiles - half };
            (left, right)
        })
    }

    /// The number of its first tile, its only one if it has no children.
    pub fn tile(self) -> usize {
        self.first
    }

    /// Its tiles.
    pub fn tiles(self) -> Range<usize> {
        self.first..self.first + self.tiles
    }

    /// Whether it is the work of one thread.
    pub fn is_small(self) -> bool {
        self.tiles < ALONE
    }

    /// Whether it has more tiles than another.
    pub fn is_larger(self, other: Self) -> bool {
        self.tiles > other.tiles
    }

    fn nodes(self) -> usize {
        2 * self.tiles - 1
    }
}

impl Tree {
    /// Bytes of a tree of this many rows and coordinates, and further bytes while it is built.
    fn bytes(rows: usize, coordinates: usize) -> (usize, usize) {
        let nodes = 2 * rows.div_ceil(LANES);
        let tree_bytes = rows * size_of::<u32>() + nodes * 2 * coordinates * size_of::<f64>();
        (tree_bytes, rows * spatial_order::BUILDING)
    }

    /// Orders rows, of which there is at least one.
    pub fn new(space: &impl Space, job: &Job) -> Result<Self> {
        let (rows, coordinates) = (space.rows(), space.coordinates());
        let (tree_bytes, building) = Self::bytes(rows, coordinates);
        let mut reserved = job.reserve("a tree of bounding boxes", tree_bytes + building)?;
        let order =
            order_by_bisection(space, Bisection { rows: LANES, left: |tiles| tiles / 2 }, job)?;
        let root = TileNode::root(rows);
        reserved.shrink_to(tree_bytes);
        let mut boxes = vec![0.0; root.nodes() * 2 * coordinates];
        bound(space, root, &order, &mut boxes, job)?;
        Ok(Self { order, boxes, coordinates, _reserved: reserved })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.order.len()
    }

    /// The box of a node: the least values of its coordinates, then the largest.
    pub fn bounds(&self, node: TileNode) -> &[f64] {
        &self.boxes[node.index * 2 * self.coordinates..][..2 * self.coordinates]
    }

    /// Number of a node's rows.
    pub fn rows_in(&self, node: TileNode) -> usize {
        let Range { start, end } = node.tiles();
        (end * LANES).min(self.rows()) - start * LANES
    }

    /// A bit for each row of a tile.
    pub fn lanes(&self, tile: usize) -> u64 {
        lowest(self.rows() - tile * LANES)
    }

    /// The rows of a tile.
    pub fn rows_of(&self, tile: usize) -> &[u32] {
        let start = tile * LANES;
        &self.order[start..self.rows().min(start + LANES)]
    }

    /// The row of a lane of a tile.
    pub fn row(&self, tile: usize, lane: u32) -> u32 {
        self.order[tile * LANES + lane as usize]
    }
}

/// Fills the boxes of a node and of all below it.
fn bound(
    space: &impl Space,
    node: TileNode,
    order: &[u32],
    boxes: &mut [f64],
    job: &Job,
) -> Result<()> {
    let width = 2 * space.coordinates();
    let (node_box, below) = boxes.split_at_mut(width);
    let (low, high) = node_box.split_at_mut(space.coordinates());
    let Some((left, right)) = node.children() else {
        job.check()?;
        low.fill(f64::INFINITY);
        high.fill(f64::NEG_INFINITY);
        let start = node.first * LANES;
        for row in &order[start..order.len().min(start + LANES)] {
            for (i, (low, high)) in low.iter_mut().zip(high.iter_mut()).enumerate() {
                let x = space.coordinate(*row as usize, i);
                (*low, *high) = (low.min(x), high.max(x));
            }
        }
        return Ok(());
    };
    let (a, b) = below.split_at_mut(left.nodes() * width);
    let done = if node.is_small() {
        (bound(space, left, order, a, job), bound(space, right, order, b, job))
    } else {
        rayon::join(|| bound(space, left, order, a, job), || bound(space, right, order, b, job))
    };
    done.0.and(done.1)?;
    let (a, b) = (&a[..width], &b[..width]);
    for (i, (low, high)) in low.iter_mut().zip(high.iter_mut()).enumerate() {
        *low = a[i].min(b[i]);
        *high = a[i + width / 2].max(b[i + width / 2]);
    }
    Ok(())
}
