//! Rows in an order in which near rows are near each other, cut into tiles, and a tree of boxes over
//! the tiles: every node is halved along the dimension in which its rows spread the most.

use std::ops::Range;

use super::points::Points;
use super::tiles::{LANES, lowest};
use crate::error::Result;
use crate::job::{Job, Reserved};

/// Rows of a node that are looked at to find the dimension in which they spread the most.
const SAMPLED: usize = 128;

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
pub(super) struct Node {
    /// Its place among all nodes, each of which comes before its own.
    pub index: usize,
    first: usize,
    tiles: usize,
}

impl Node {
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
    /// Bytes for so many rows and coordinates, with what building takes.
    fn bytes(rows: usize, coordinates: usize) -> (usize, usize) {
        let nodes = 2 * rows.div_ceil(LANES);
        let kept = rows * size_of::<u32>() + nodes * 2 * coordinates * size_of::<f64>();
        (kept, rows * size_of::<u64>())
    }

    /// Orders rows, of which there is at least one.
    pub fn new(points: &impl Points, job: &Job) -> Result<Self> {
        let (rows, coordinates) = (points.rows(), points.coordinates());
        let (kept, building) = Self::bytes(rows, coordinates);
        let mut reserved = job.reserve("a tree of rows", kept + building)?;
        let mut order: Vec<u32> = (0..rows as u32).collect();
        let mut keys = vec![0; rows];
        let root = Node::root(rows);
        sort(points, root, &mut order, &mut keys, job)?;
        drop(keys);
        reserved.shrink_to(kept);
        let mut boxes = vec![0.0; root.nodes() * 2 * coordinates];
        bound(points, root, &order, &mut boxes, job)?;
        Ok(Self { order, boxes, coordinates, _reserved: reserved })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.order.len()
    }

    /// The box of a node: the least values of its coordinates, then the largest.
    pub fn bounds(&self, node: Node) -> &[f64] {
        &self.boxes[node.index * 2 * self.coordinates..][..2 * self.coordinates]
    }

    /// Number of a node's rows.
    pub fn rows_in(&self, node: Node) -> usize {
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

/// Orders the rows of a node. `keys` is as long as the order.
fn sort(
    points: &impl Points,
    node: Node,
    order: &mut [u32],
    keys: &mut [u64],
    job: &Job,
) -> Result<()> {
    let Some((left, right)) = node.children() else { return Ok(()) };
    job.check()?;
    if order.len() * points.coordinates() <= NEARBY {
        Nearby::new(points, order).sort(node, order, keys);
        return Ok(());
    }
    let split = left.tiles * LANES;
    let widest = widest(points, order);
    halve(order, keys, split, |row| points.coordinate(row as usize, widest) as f32);
    let (order, keys) = (order.split_at_mut(split), keys.split_at_mut(split));
    let mut go =
        (|| sort(points, left, order.0, keys.0, job), || sort(points, right, order.1, keys.1, job));
    let done = if node.is_small() { (go.0(), go.1()) } else { rayon::join(go.0, go.1) };
    done.0.and(done.1)
}

/// Puts rows with the lowest values first, as many as `split` says; of equal ones the first.
fn halve(order: &mut [u32], keys: &mut [u64], split: usize, value: impl Fn(u32) -> f32) {
    for (key, row) in keys.iter_mut().zip(&*order) {
        let bits = value(*row).to_bits();
        // Ascending like the numbers.
        let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        *key = u64::from(ascending) << 32 | u64::from(*row);
    }
    keys.select_nth_unstable(split);
    order.iter_mut().zip(&*keys).for_each(|(row, key)| *row = *key as u32);
}

/// Coordinates that fit into a cache near the processor.
const NEARBY: usize = 1 << 16;

/// The coordinates of a node's rows, row by row: copied together, they are found at once however often
/// the rows are moved.
struct Nearby {
    rows: Vec<u32>,
    coordinates: usize,
    values: Vec<f32>,
}

impl Nearby {
    fn new(points: &impl Points, order: &[u32]) -> Self {
        let coordinates = points.coordinates();
        let of_row = |row: &u32| {
            let row = *row as usize;
            (0..coordinates).map(move |i| points.coordinate(row, i) as f32)
        };
        let values = order.iter().flat_map(of_row).collect();
        Self { rows: order.to_vec(), coordinates, values }
    }

    fn sort(&self, node: Node, order: &mut [u32], keys: &mut [u64]) {
        order.iter_mut().zip(0..).for_each(|(place, own)| *place = own);
        let mut sides = vec![0.0; 2 * self.coordinates];
        self.sort_places(node, order, keys, &mut sides);
        order.iter_mut().for_each(|place| *place = self.rows[*place as usize]);
    }

    /// Orders places of rows. `sides` is for two values of every coordinate.
    fn sort_places(&self, node: Node, order: &mut [u32], keys: &mut [u64], sides: &mut [f32]) {
        let Some((left, right)) = node.children() else { return };
        let split = left.tiles * LANES;
        let widest = self.widest(order, sides);
        halve(order, keys, split, |place| self.row(place)[widest]);
        let (order, keys) = (order.split_at_mut(split), keys.split_at_mut(split));
        self.sort_places(left, order.0, keys.0, sides);
        self.sort_places(right, order.1, keys.1, sides);
    }

    fn row(&self, place: u32) -> &[f32] {
        &self.values[place as usize * self.coordinates..][..self.coordinates]
    }

    /// The coordinate in which a sample of some rows spreads the most.
    fn widest(&self, order: &[u32], sides: &mut [f32]) -> usize {
        let (low, high) = sides.split_at_mut(self.coordinates);
        low.fill(f32::INFINITY);
        high.fill(f32::NEG_INFINITY);
        for place in order.iter().step_by(order.len().div_ceil(SAMPLED)) {
            for ((low, high), x) in low.iter_mut().zip(high.iter_mut()).zip(self.row(*place)) {
                *low = if x < low { *x } else { *low };
                *high = if x > high { *x } else { *high };
            }
        }
        // Half of it: the whole may overflow.
        let spread = |i: &usize| 0.5 * high[*i] - 0.5 * low[*i];
        (0..self.coordinates).max_by(|a, b| spread(a).total_cmp(&spread(b))).unwrap_or(0)
    }
}

/// The coordinate in which a sample of some rows spreads the most.
fn widest(points: &impl Points, order: &[u32]) -> usize {
    let step = order.len().div_ceil(SAMPLED);
    let spread = |i: usize| {
        let of_row = |row: &u32| points.coordinate(*row as usize, i);
        let values = order.iter().step_by(step).map(of_row);
        let ends = values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        // Half of it: the whole may overflow.
        0.5 * ends.1 - 0.5 * ends.0
    };
    (0..points.coordinates()).max_by(|a, b| spread(*a).total_cmp(&spread(*b))).unwrap_or(0)
}

/// Fills the boxes of a node and of all below it.
fn bound(
    points: &impl Points,
    node: Node,
    order: &[u32],
    boxes: &mut [f64],
    job: &Job,
) -> Result<()> {
    let width = 2 * points.coordinates();
    let (own, below) = boxes.split_at_mut(width);
    let (low, high) = own.split_at_mut(points.coordinates());
    let Some((left, right)) = node.children() else {
        job.check()?;
        low.fill(f64::INFINITY);
        high.fill(f64::NEG_INFINITY);
        let start = node.first * LANES;
        for row in &order[start..order.len().min(start + LANES)] {
            for (i, (low, high)) in low.iter_mut().zip(high.iter_mut()).enumerate() {
                let x = points.coordinate(*row as usize, i);
                (*low, *high) = (low.min(x), high.max(x));
            }
        }
        return Ok(());
    };
    let (a, b) = below.split_at_mut(left.nodes() * width);
    let done = if node.is_small() {
        (bound(points, left, order, a, job), bound(points, right, order, b, job))
    } else {
        rayon::join(|| bound(points, left, order, a, job), || bound(points, right, order, b, job))
    };
    done.0.and(done.1)?;
    let (a, b) = (&a[..width], &b[..width]);
    for (i, (low, high)) in low.iter_mut().zip(high.iter_mut()).enumerate() {
        *low = a[i].min(b[i]);
        *high = a[i + width / 2].max(b[i + width / 2]);
    }
    Ok(())
}
