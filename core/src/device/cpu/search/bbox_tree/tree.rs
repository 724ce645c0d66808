//! A tree of bounding boxes over leaves of 32 rows.

use std::ops::Range;

use crate::device::cpu::simd::simd_real::SimdReal;
use crate::device::cpu::spatial_order::{self, Bisection, Coordinates, order_by_bisection};
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::parallel::{fill_on_threads, on_other_threads};
use crate::rows::Rows;

/// Rows of a leaf, and children of a node: either are compared side by side in registers.
pub(super) const WIDE: usize = 32;

/// One coordinate of each row of a leaf, or one side of the box of each child.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct NodeColumn<T>(pub [T; WIDE]);

/// A tree of bounding boxes over all rows.
#[derive(Debug)]
pub(in crate::device::cpu::search) struct BboxTree<T> {
    /// The row at each place: those of leaf i are from place 32 i on.
    pub(super) order: Vec<u32>,
    /// For each leaf, dimension by dimension, the coordinates of its rows.
    pub(super) leaves: Vec<NodeColumn<T>>,
    /// From the leaves up, the boxes of all nodes of a level, 32 beside each other: dimension by dimension their low
    /// and their high sides.
    pub(super) levels: Vec<Vec<NodeColumn<T>>>,
    pub(super) dim: usize,
    _reserved: Reserved,
}

/// The rows of a matrix.
pub(super) struct MatrixPoints<'a, T> {
    pub values: &'a [T],
    pub dim: usize,
}

impl<T: SimdReal> Coordinates for MatrixPoints<'_, T> {
    fn rows(&self) -> usize {
        self.values.len() / self.dim
    }

    fn coordinates(&self) -> usize {
        self.dim
    }

    fn coordinate(&self, row: usize, i: usize) -> f64 {
        self.values[row * self.dim + i].to_f64()
    }
}

/// The number of parts on the left side: the largest power of two below `parts`, so that every node holds a whole
/// part of the bisection.
pub(super) fn left(parts: usize) -> usize {
    parts.next_power_of_two() / 2
}

impl<T: SimdReal> BboxTree<T> {
    /// Orders rows, of which there is at least one, and puts boxes around them.
    pub(in crate::device::cpu::search) fn new(
        rows: &Rows,
        values: &[T],
        job: &Job,
    ) -> Result<Self> {
        let (count, dim) = (rows.len(), rows.matrix().dim());
        let leaves = count.div_ceil(WIDE);
        // A level has 32 times as many boxes as the next.
        let columns = leaves * dim + 2 * dim * (leaves.div_ceil(WIDE) + leaves.div_ceil(512) + 8);
        let bytes = columns * size_of::<NodeColumn<T>>() + count * size_of::<u32>();
        // Reserved twice, so as not to take the last memory that others need.
        let building = count * spatial_order::BUILDING;
        let mut reserved = job.reserve("a tree of bounding boxes", 2 * bytes + building)?;
        let points = MatrixPoints { values: &values[..count * dim], dim };
        let order =
            on_other_threads(|| order_by_bisection(&points, Bisection { rows: WIDE, left }, job))?;
        reserved.shrink_to(bytes);
        let mut columns = vec![NodeColumn([T::ZERO; WIDE]); leaves * dim];
        fill_on_threads(&mut columns, dim, |first, part| {
            job.check()?;
            for (leaf, columns) in part.chunks_exact_mut(dim).enumerate() {
                let places = (first + leaf) * WIDE;
                for lane in 0..WIDE {
                    // A last leaf repeats its last row.
                    let row = order[(places + lane).min(count - 1)] as usize;
                    let elements = &points.values[row * dim..][..dim];
                    columns.iter_mut().zip(elements).for_each(|(to, x)| to.0[lane] = *x);
                }
            }
            Ok(())
        })?;
        let mut boxes =
            Self { order, leaves: columns, levels: Vec::new(), dim, _reserved: reserved };
        boxes.put_around();
        Ok(boxes)
    }

    /// Puts boxes around all leaves, and around those, up to one node.
    fn put_around(&mut self) {
        let dim = self.dim;
        let sides = |low: &NodeColumn<T>, high: &NodeColumn<T>, lanes: usize| {
            let low = low.0[..lanes].iter().fold(T::INFINITY, |a, b| a.min(*b));
            (low, high.0[..lanes].iter().fold(-T::INFINITY, |a, b| a.max(*b)))
        };
        let mut below = self.leaves.len() / dim;
        while self.levels.is_empty() || below > 1 {
            // Missing boxes lie at infinity.
            let mut level = vec![NodeColumn([T::INFINITY; WIDE]); 2 * dim * below.div_ceil(WIDE)];
            for node in 0..below {
                let to = &mut level[node / WIDE * 2 * dim..][..2 * dim];
                for (i, to) in to.chunks_exact_mut(2).enumerate() {
                    let (low, high) = match self.levels.last() {
                        None => {
                            let column = &self.leaves[node * dim + i];
                            sides(column, column, WIDE)
                        }
                        Some(boxes) => {
                            let of = &boxes[(node * dim + i) * 2..][..2];
                            sides(&of[0], &of[1], self.nodes(self.levels.len() - 1, node).len())
                        }
                    };
                    (to[0].0[node % WIDE], to[1].0[node % WIDE]) = (low, high);
                }
            }
            self.levels.push(level);
            below = below.div_ceil(WIDE);
        }
    }

    /// The numbers of a node's children, whose boxes lie side by side in `level`.
    pub(super) fn nodes(&self, level: usize, node: usize) -> Range<usize> {
        let all = (0..level).fold(self.leaves.len() / self.dim, |nodes, _| nodes.div_ceil(WIDE));
        node * WIDE..all.min((node + 1) * WIDE)
    }

    /// The boxes of a node's children.
    #[inline(always)]
    pub(super) fn sides(&self, level: usize, node: usize) -> &[NodeColumn<T>] {
        &self.levels[level][node * 2 * self.dim..][..2 * self.dim]
    }
}
