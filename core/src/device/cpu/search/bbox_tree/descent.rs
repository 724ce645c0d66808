//! The descent of some queries, near each other, through the tree of boxes.
//!
//! They descend together, so that boxes and leaves visited by one query are cached for the next.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::tree::{BboxTree, NodeColumn, WIDE};
use crate::device::cpu::search::direct::{AbsoluteTerm, Accumulate, SquareTerm};
use crate::device::cpu::search::sink::Sink;
use crate::device::cpu::search::traversal::Call;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::metric::Sum;

/// Visits every leaf with a row within a query's threshold, and some other leaves.
pub(super) struct Descent<'a, T, K> {
    pub boxes: &'a BboxTree<T>,
    pub queries: &'a [T],
    pub call: &'a Call<'a>,
    /// The numbers of these queries, and their sinks.
    pub taken: &'a mut [(u32, K)],
}

/// A node to be visited: its level, 0 for parents of leaves, and its number there.
struct OpenNode {
    level: usize,
    node: usize,
    /// Start of the node's queries in the list of all, where they end at the start of the next node's.
    first: usize,
}

/// A query that is to visit a node, by its place in `taken`, and a lower bound on its sums with the node's rows.
#[derive(Clone, Copy)]
struct QueuedQuery<T> {
    query: usize,
    least: T,
}

/// A query's lower bounds on the sums with the rows of each child of a node.
struct ChildBounds<T> {
    query: usize,
    near: LaneMask,
    sums: [T; WIDE],
}

impl<T: SimdReal, K: Sink<T>> WithSimd for Descent<'_, T, K> {
    /// The number of rows visited.
    type Output = u64;

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) -> u64 {
        match self.call.metric.sum() {
            Sum::Squares => self.run::<S, SquareTerm>(simd),
            _ => self.run::<S, AbsoluteTerm>(simd),
        }
    }
}

impl<T: SimdReal, K: Sink<T>> Descent<'_, T, K> {
    #[inline(always)]
    fn run<S: Simd, A: Accumulate>(&mut self, simd: S) -> u64 {
        let (mut begun, mut together) = (Vec::with_capacity(self.taken.len()), Vec::new());
        let mut leaves = 0;
        for query in 0..self.taken.len() {
            let leaf = self.nearest_leaf::<S, A>(simd, query);
            self.visit_leaf::<S, A>(simd, leaf, query);
            leaves += 1;
            let mut visited = leaf..leaf + 1;
            if !self.is_bounded(query) {
                leaves += self.nearest_of::<S, A>(simd, leaf, query);
                visited = self.boxes.nodes(0, leaf / WIDE);
            }
            begun.push(visited);
            // A query without a threshold goes alone: in a group, it would visit all leaves near any query.
            if self.is_bounded(query) {
                together.push(query);
            } else {
                leaves += self.go::<S, A>(simd, &[query], &begun);
            }
        }
        leaves += self.go::<S, A>(simd, &together, &begun);
        (leaves * WIDE) as u64
    }

    #[inline(always)]
    fn is_bounded(&self, query: usize) -> bool {
        self.taken[query].1.threshold() < T::INFINITY
    }

    /// Visits the siblings of a leaf, the nearest first; returns their number.
    #[inline(always)]
    fn nearest_of<S: Simd, A: Accumulate>(
        &mut self,
        simd: S,
        skipped: usize,
        query: usize,
    ) -> usize {
        let node = skipped / WIDE;
        let seen = self.see::<S, A>(simd, 0, node, query);
        let (sums, mut leaves) = (seen.sums, 0);
        // The farthest come first.
        let lanes: Vec<_> = farthest_first(&[seen]).collect();
        for lane in lanes.into_iter().rev() {
            let leaf = node * WIDE + lane;
            if sums[lane] <= self.taken[query].1.threshold() && leaf != skipped {
                self.visit_leaf::<S, A>(simd, leaf, query);
                leaves += 1;
            }
        }
        leaves
    }

    /// Lets queries visit all leaves within their thresholds, except those that each has `begun` with; returns the
    /// number of visits.
    #[inline(always)]
    fn go<S: Simd, A: Accumulate>(
        &mut self,
        simd: S,
        queries: &[usize],
        begun: &[Range<usize>],
    ) -> usize {
        let (mut leaves, mut now, mut seen) = (0, Vec::new(), Vec::new());
        let mut queued: Vec<_> =
            queries.iter().map(|query| QueuedQuery { query: *query, least: T::ZERO }).collect();
        let mut open = vec![OpenNode { level: self.boxes.levels.len() - 1, node: 0, first: 0 }];
        while let Some(OpenNode { level, node, first }) = open.pop() {
            now.clear();
            for QueuedQuery { query, least } in queued.drain(first..) {
                if least <= self.taken[query].1.threshold() {
                    now.push(query);
                }
            }
            if level == 0 {
                for query in &now {
                    leaves += self.leaves_of::<S, A>(simd, node, *query, &begun[*query]);
                }
                continue;
            }
            seen.clear();
            for query in &now {
                seen.push(self.see::<S, A>(simd, level, node, *query));
            }
            for lane in farthest_first(&seen) {
                open.push(OpenNode {
                    level: level - 1,
                    node: node * WIDE + lane,
                    first: queued.len(),
                });
                for ChildBounds { query, near, sums } in &seen {
                    if near.has(lane) {
                        queued.push(QueuedQuery { query: *query, least: sums[lane] });
                    }
                }
            }
        }
        leaves
    }

    #[inline(always)]
    fn see<S: Simd, A: Accumulate>(
        &self,
        simd: S,
        level: usize,
        node: usize,
        query: usize,
    ) -> ChildBounds<T> {
        let mut sums = [T::ZERO; WIDE];
        least_of::<S, T, A>(simd, self.boxes.sides(level, node), self.values(query), &mut sums);
        let count = self.boxes.nodes(level, node).len();
        let near = LaneMask::new(simd, &sums, count, self.taken[query].1.threshold());
        ChildBounds { query, near, sums }
    }

    /// Visits the leaves of a node within the threshold, except `skipped`; returns their number.
    #[inline(always)]
    fn leaves_of<S: Simd, A: Accumulate>(
        &mut self,
        simd: S,
        node: usize,
        query: usize,
        skipped: &Range<usize>,
    ) -> usize {
        let ChildBounds { near, sums, .. } = self.see::<S, A>(simd, 0, node, query);
        let mut leaves = 0;
        for lane in near {
            let leaf = node * WIDE + lane;
            if sums[lane] <= self.taken[query].1.threshold() && !skipped.contains(&leaf) {
                self.visit_leaf::<S, A>(simd, leaf, query);
                leaves += 1;
            }
        }
        leaves
    }

    /// The leaf that a descent to the nearest box of each level ends in.
    #[inline(always)]
    fn nearest_leaf<S: Simd, A: Accumulate>(&self, simd: S, query: usize) -> usize {
        let mut node = 0;
        let mut sums = [T::ZERO; WIDE];
        for level in (0..self.boxes.levels.len()).rev() {
            let sides = self.boxes.sides(level, node);
            least_of::<S, T, A>(simd, sides, self.values(query), &mut sums);
            let mut least = T::splat(simd, T::INFINITY);
            for sums in T::vectors::<S>(&sums) {
                least = T::lesser(simd, least, *sums);
            }
            let count = self.boxes.nodes(level, node).len();
            let mut nearest = LaneMask::new(simd, &sums, count, T::least(simd, least));
            node = node * WIDE + nearest.next().unwrap_or(0);
        }
        node
    }

    /// Offers a leaf's rows within the threshold.
    #[inline(always)]
    fn visit_leaf<S: Simd, A: Accumulate>(&mut self, simd: S, leaf: usize, query: usize) {
        let (boxes, pairing) = (self.boxes, self.call.pairing);
        let columns = &boxes.leaves[leaf * boxes.dim..][..boxes.dim];
        let mut sums = [T::ZERO; WIDE];
        let threshold = self.taken[query].1.threshold();
        if !sums_of::<S, T, A>(simd, columns, self.values(query), &mut sums, threshold) {
            return;
        }
        let rows = &boxes.order[leaf * WIDE..];
        let (number, sink) = &mut self.taken[query];
        for lane in LaneMask::new(simd, &sums, rows.len().min(WIDE), threshold) {
            let row = pairing.first_base + rows[lane];
            let is_same = pairing.queries.is_same(*number as usize, u64::from(row));
            if sums[lane] <= sink.threshold() && !is_same {
                sink.offer(sums[lane], row);
            }
        }
    }

    #[inline(always)]
    fn values(&self, query: usize) -> &[T] {
        let dim = self.boxes.dim;
        &self.queries[self.taken[query].0 as usize * dim..][..dim]
    }
}

/// The children within the threshold of any query, the nearest last: it is visited first, and lowers thresholds the
/// most.
#[inline(always)]
fn farthest_first<T: SimdReal>(seen: &[ChildBounds<T>]) -> impl Iterator<Item = usize> {
    let (mut least, mut near) = ([T::INFINITY; WIDE], 0);
    for seen in seen {
        near |= seen.near.0;
        for (least, sum) in least.iter_mut().zip(seen.sums) {
            *least = least.min(sum);
        }
    }
    let mut lanes = [0; WIDE];
    let count = LaneMask(near).zip(&mut lanes).map(|(lane, to)| *to = lane).count();
    lanes[..count].sort_unstable_by(|a, b| least[*b].key(0).cmp(&least[*a].key(0)));
    lanes.into_iter().take(count)
}

/// A mask of the lanes whose sums are within the threshold.
#[derive(Clone, Copy)]
struct LaneMask(u32);

impl LaneMask {
    /// Tests the first `count` lanes.
    #[inline(always)]
    fn new<S: Simd, T: SimdReal>(simd: S, sums: &[T; WIDE], count: usize, threshold: T) -> Self {
        let (threshold, zero) = (T::splat(simd, threshold), T::splat(simd, T::ZERO));
        let powers = T::vectors::<S>(T::POWERS);
        let mut all = 0;
        for (half, sums) in T::vectors::<S>(sums).chunks_exact(powers.len()).enumerate() {
            // Sums of different powers of two up to 2¹⁵ are exact.
            let mut bits = zero;
            for (sum, power) in sums.iter().zip(powers) {
                let of_sum = T::where_less(simd, threshold, *sum, zero, *power);
                bits = T::plus(simd, bits, of_sum);
            }
            all |= (T::total(simd, bits).to_f64() as u32) << (16 * half);
        }
        Self(all & (u32::MAX >> (WIDE - count)))
    }

    #[inline(always)]
    fn has(self, lane: usize) -> bool {
        self.0 >> lane & 1 == 1
    }
}

impl Iterator for LaneMask {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let lane = (self.0 != 0).then_some(self.0.trailing_zeros() as usize);
        self.0 &= self.0.wrapping_sub(1);
        lane
    }
}

/// The sums of a query with the rows of a leaf; whether one is within the threshold.
#[inline(always)]
fn sums_of<S: Simd, T: SimdReal, A: Accumulate>(
    simd: S,
    rows: &[NodeColumn<T>],
    query: &[T],
    sums: &mut [T; WIDE],
    threshold: T,
) -> bool {
    let least = match T::vectors::<S>(sums).len() {
        2 => some_sums::<S, T, A, 2>(simd, rows, query, sums),
        _ => some_sums::<S, T, A, 4>(simd, rows, query, sums),
    };
    T::any_at_most::<S>(simd, least, T::splat(simd, threshold))
}

/// Computes sums, `TOGETHER` registers side by side, as each term waits for the one before; returns the least of each
/// lane.
#[inline(always)]
fn some_sums<S: Simd, T: SimdReal, A: Accumulate, const TOGETHER: usize>(
    simd: S,
    rows: &[NodeColumn<T>],
    query: &[T],
    sums: &mut [T; WIDE],
) -> T::Register<S> {
    let mut least = T::splat(simd, T::INFINITY);
    for (part, sums) in T::vectors_mut::<S>(sums).chunks_exact_mut(TOGETHER).enumerate() {
        let mut totals = [T::splat(simd, T::ZERO); TOGETHER];
        for (column, q) in rows.iter().zip(query) {
            let x = &T::vectors::<S>(&column.0)[TOGETHER * part..][..TOGETHER];
            let q = T::splat(simd, *q);
            for i in 0..TOGETHER {
                totals[i] = A::accumulate::<S, T>(simd, q, x[i], totals[i]);
            }
        }
        for total in totals {
            least = T::lesser(simd, least, total);
        }
        sums.copy_from_slice(&totals);
    }
    least
}

/// Lower bounds on the sums of a query with the rows of some boxes.
#[inline(always)]
fn least_of<S: Simd, T: SimdReal, A: Accumulate>(
    simd: S,
    sides: &[NodeColumn<T>],
    query: &[T],
    sums: &mut [T; WIDE],
) {
    match T::vectors::<S>(sums).len() {
        2 => some_least::<S, T, A, 2>(simd, sides, query, sums),
        _ => some_least::<S, T, A, 4>(simd, sides, query, sums),
    }
}

/// As [`least_of`], with `TOGETHER` registers side by side.
#[inline(always)]
fn some_least<S: Simd, T: SimdReal, A: Accumulate, const TOGETHER: usize>(
    simd: S,
    sides: &[NodeColumn<T>],
    query: &[T],
    sums: &mut [T; WIDE],
) {
    let zero = T::splat(simd, T::ZERO);
    for (part, sums) in T::vectors_mut::<S>(sums).chunks_exact_mut(TOGETHER).enumerate() {
        let mut totals = [zero; TOGETHER];
        for (sides, q) in sides.chunks_exact(2).zip(query) {
            let low = &T::vectors::<S>(&sides[0].0)[TOGETHER * part..][..TOGETHER];
            let high = &T::vectors::<S>(&sides[1].0)[TOGETHER * part..][..TOGETHER];
            let q = T::splat(simd, *q);
            for i in 0..TOGETHER {
                let beyond = T::lesser(simd, T::minus(simd, q, low[i]), T::minus(simd, high[i], q));
                // Minus the distance from the box in this dimension: 0 where the query is between both sides.
                let beyond = T::lesser(simd, beyond, zero);
                totals[i] = A::accumulate::<S, T>(simd, zero, beyond, totals[i]);
            }
        }
        sums.copy_from_slice(&totals);
    }
}
