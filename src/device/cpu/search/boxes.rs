//! Rows of few dimensions in a tree of boxes: a query looks only at the leaves that may have a row within its
//! sink's reach, the nearest first.
//!
//! A row's difference from a query is at least that of its box's nearest side, in every dimension. Rounding keeps
//! that order, and the terms of both sums are added in the same order: so a box's sum is never more than that of a
//! row in it, and comparing it with the reach needs no margin.

use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::panels::{Absolute, Accumulate, Squares};
use super::sink::Sink;
use super::traversal::Call;
use crate::device::contract::{Pairing, QueryRows, Work};
use crate::device::cpu::order::{self, Coordinates, Cut, near_each_other};
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::level::Level;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::matrix::Rows;
use crate::metric::Sum;
use crate::parallel::{fill_on_threads, on_other_threads};

/// Rows of a leaf, and nodes below another: registers of either side by side.
const WIDE: usize = 32;

/// In more dimensions, nearly all leaves have to be looked at.
const MOST_DIM: usize = 16;

/// Fewer rows are compared as fast as they are ordered.
const LEAST_ROWS: usize = 4096;

/// In more dimensions, so many leaves may have to be looked at that ordering rows is wasted.
const FEW_DIMS: usize = 8;

/// Rows that are ordered in about the time in which a query is compared with all, and in a small part of it.
const ROWS_PER_QUERY: [usize; 2] = [256, 4];

/// How many times as many queries probably follow where they are base rows.
const MORE_OF_BASE: usize = 16;

/// Queries that are ordered in the time in which one of so many base rows is looked at.
const OF_BASE: usize = 16;

/// Queries of a task, and of the sample that tells how many leaves have to be looked at.
const TASK_QUERIES: usize = 64;
const SAMPLED: usize = 32;

/// If a query looks at more than this share of all rows, comparing it with all of them is faster: with AVX-512, and
/// without.
const MOST_VISITED: [f64; 2] = [0.05, 0.1];

/// A number of each of some rows or boxes.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Column<T>([T; WIDE]);

/// Rows in leaves, and boxes around these.
#[derive(Debug)]
pub(super) struct Boxes<T> {
    /// The row at each place: those of leaf i are from place 32 i on.
    order: Vec<u32>,
    /// For each leaf, dimension by dimension, the coordinates of its rows.
    leaves: Vec<Column<T>>,
    /// From the leaves up, the boxes of all nodes of a level, 32 beside each other: dimension by dimension their low
    /// and their high sides.
    levels: Vec<Vec<Column<T>>>,
    dim: usize,
    _reserved: Reserved,
}

/// The rows of a matrix.
struct Values<'a, T> {
    values: &'a [T],
    dim: usize,
}

impl<T: Lanes> Coordinates for Values<'_, T> {
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

/// Whether rows like these may be worth a tree, once so many queries have been asked for; where queries are base rows,
/// others follow.
pub(super) fn may_pay(rows: &Rows, call: &Call<'_>, queries: usize) -> bool {
    let metric = call.metric;
    let more = if call.pairing.queries == QueryRows::Separate { 1 } else { MORE_OF_BASE };
    let is_sum = matches!(metric.sum(), Sum::Squares | Sum::Absolute);
    let (dim, count) = (rows.matrix().dim(), rows.len());
    is_sum
        && (1..=MOST_DIM).contains(&dim)
        && count >= LEAST_ROWS
        && queries.saturating_mul(ROWS_PER_QUERY[usize::from(dim > FEW_DIMS)] * more) >= count
}

/// Parts on the left of so many: as many as a node has below it, so that a level's nodes are halves.
fn left(parts: usize) -> usize {
    parts.next_power_of_two() / 2
}

impl<T: Lanes> Boxes<T> {
    /// Orders rows, of which there is at least one, and puts boxes around them.
    pub fn new(rows: &Rows, values: &[T], job: &Job) -> Result<Self> {
        let (count, dim) = (rows.len(), rows.matrix().dim());
        let leaves = count.div_ceil(WIDE);
        // A level has 32 times as many boxes as the next.
        let columns = leaves * dim + 2 * dim * (leaves.div_ceil(WIDE) + leaves.div_ceil(512) + 8);
        let bytes = columns * size_of::<Column<T>>() + count * size_of::<u32>();
        // Twice as much, so that it does not take the last that others need.
        let building = count * order::BUILDING;
        let mut reserved = job.reserve("a tree of rows", 2 * bytes + building)?;
        let points = Values { values: &values[..count * dim], dim };
        let order = on_other_threads(|| near_each_other(&points, Cut { rows: WIDE, left }, job))?;
        reserved.shrink_to(bytes);
        let mut columns = vec![Column([T::ZERO; WIDE]); leaves * dim];
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
        let sides = |low: &Column<T>, high: &Column<T>, lanes: usize| {
            let low = low.0[..lanes].iter().fold(T::INFINITY, |a, b| a.min(*b));
            (low, high.0[..lanes].iter().fold(-T::INFINITY, |a, b| a.max(*b)))
        };
        let mut below = self.leaves.len() / dim;
        while self.levels.is_empty() || below > 1 {
            let mut level = vec![Column([T::ZERO; WIDE]); 2 * dim * below.div_ceil(WIDE)];
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

    /// The numbers of the nodes below one, whose boxes are beside each other in a level.
    fn nodes(&self, level: usize, node: usize) -> Range<usize> {
        let all = (0..level).fold(self.leaves.len() / self.dim, |nodes, _| nodes.div_ceil(WIDE));
        node * WIDE..all.min((node + 1) * WIDE)
    }

    /// Whether a sample of so many queries is a small part of the work.
    pub fn is_worth_a_sample(queries: usize) -> bool {
        queries >= 32 * SAMPLED
    }

    /// Whether queries look at few enough leaves, by a sample of them.
    pub fn suits<K: Sink<T>>(
        &self,
        queries: &[T],
        sinks: &[K],
        call: (&Call<'_>, Level),
    ) -> Result<bool> {
        let count = sinks.len().min(SAMPLED);
        let visited = (0..count).into_par_iter().map(|i| {
            let query = i * sinks.len() / count;
            self.some(queries, &mut [(query as u32, sinks[query].sibling())], call)
        });
        let visited = visited.try_reduce(|| 0, |a, b| Ok(a + b))?;
        let most = MOST_VISITED[usize::from(!call.1.has_avx512())];
        Ok(visited as f64 <= most * (count * self.order.len()) as f64)
    }

    /// Offers queries' sinks every row within their reach, and some others.
    pub fn search<K: Sink<T>>(
        &self,
        queries: &[T],
        sinks: &mut [K],
        call: (&Call<'_>, Level),
    ) -> Result<Work> {
        // Queries near each other look at the same leaves, which stay in a cache.
        let order = self.order_of(queries, sinks.len(), call.0)?;
        let taken = |query: &u32| {
            let sink = &mut sinks[*query as usize];
            let empty = sink.sibling();
            (*query, std::mem::replace(sink, empty))
        };
        let mut taken: Vec<(u32, K)> = order.iter().map(taken).collect();
        let tasks = taken.par_chunks_mut(TASK_QUERIES).map(|taken| self.some(queries, taken, call));
        let pairs = tasks.try_reduce(|| 0, |a, b| Ok(a + b))?;
        taken.into_iter().for_each(|(query, sink)| sinks[query as usize] = sink);
        Ok(Work { pairs, ..Work::default() })
    }

    /// The numbers of so many queries, near ones near each other.
    fn order_of(&self, queries: &[T], count: usize, call: &Call<'_>) -> Result<Vec<u32>> {
        if let QueryRows::OfBase { first } = call.pairing.queries
            && count.saturating_mul(OF_BASE) >= self.order.len()
            && let Some(first) = first.checked_sub(call.pairing.first_base)
        {
            let rows = first..first + count as u32;
            let own = self.order.iter().filter(|row| rows.contains(*row));
            let own: Vec<u32> = own.map(|row| row - first).collect();
            if own.len() == count {
                return Ok(own);
            }
        }
        let points = Values { values: queries, dim: self.dim };
        near_each_other(&points, Cut { rows: TASK_QUERIES, left }, call.job)
    }

    /// The same for a few of them; returns how many rows they looked at.
    fn some<K: Sink<T>>(
        &self,
        queries: &[T],
        taken: &mut [(u32, K)],
        (call, level): (&Call<'_>, Level),
    ) -> Result<u64> {
        call.job.check()?;
        Ok(level.dispatch(Descent { boxes: self, queries, call, taken }))
    }
}

/// A node to be looked at: its level, 0 for a leaf, and its number there.
#[derive(Clone, Copy)]
struct Open<T> {
    least: T,
    level: u32,
    node: u32,
}

/// The way of some queries through the tree.
struct Descent<'a, T, K> {
    boxes: &'a Boxes<T>,
    queries: &'a [T],
    call: &'a Call<'a>,
    /// The numbers of these queries, and their sinks.
    taken: &'a mut [(u32, K)],
}

impl<T: Lanes, K: Sink<T>> WithSimd for Descent<'_, T, K> {
    type Output = u64;

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) -> u64 {
        match self.call.metric.sum() {
            Sum::Squares => self.queries::<S, Squares>(simd),
            _ => self.queries::<S, Absolute>(simd),
        }
    }
}

impl<T: Lanes, K: Sink<T>> Descent<'_, T, K> {
    #[inline(always)]
    fn queries<S: Simd, A: Accumulate>(&mut self, simd: S) -> u64 {
        let (boxes, dim) = (self.boxes, self.boxes.dim);
        let root = Open { least: T::ZERO, level: boxes.levels.len() as u32, node: 0 };
        let (mut open, mut looked_at) = (Vec::new(), 0);
        for (number, sink) in &mut *self.taken {
            let query = &self.queries[*number as usize * dim..][..dim];
            open.push(root);
            while let Some(Open { least, level, node }) = open.pop() {
                let (level, node, reach) = (level as usize, node as usize, sink.reach());
                if least > reach {
                    continue;
                }
                let mut sums = [T::ZERO; WIDE];
                match level.checked_sub(1) {
                    None => {
                        let rows = &boxes.leaves[node * dim..][..dim];
                        looked_at += WIDE as u64;
                        if sums_of::<S, T, A>(simd, rows, query, &mut sums, reach) {
                            let rows = &boxes.order[node * WIDE..];
                            offer((*number, sink), rows, &sums, self.call.pairing);
                        }
                    }
                    Some(below) => {
                        let sides = &boxes.levels[below][node * 2 * dim..][..2 * dim];
                        least_of::<S, T, A>(simd, sides, query, &mut sums);
                        let mut lanes = [0; WIDE];
                        let near = within(&sums, boxes.nodes(below, node).len(), reach, &mut lanes);
                        // The nearest comes last, and is looked at first.
                        let nearest = (1..near).fold(0, |nearest, i| {
                            let is_nearer = sums[lanes[i]] < sums[lanes[nearest]];
                            if is_nearer { i } else { nearest }
                        });
                        lanes[..near].rotate_left((nearest + 1).min(near));
                        let of = |lane: &usize| Open {
                            least: sums[*lane],
                            level: below as u32,
                            node: (node * WIDE + lane) as u32,
                        };
                        open.extend(lanes[..near].iter().map(of));
                    }
                }
            }
        }
        looked_at
    }
}

/// Puts the lanes of so many whose sums are within reach first, in their order; returns how many they are.
#[inline(always)]
fn within<T: Lanes>(sums: &[T; WIDE], count: usize, reach: T, lanes: &mut [usize; WIDE]) -> usize {
    let mut near = 0;
    for (lane, sum) in sums.iter().enumerate() {
        // Without a branch, which could not be foreseen.
        lanes[near & (WIDE - 1)] = lane;
        near += usize::from(*sum <= reach && lane < count);
    }
    near
}

/// Offers a leaf's rows within reach.
#[inline(never)]
fn offer<T: Lanes, K: Sink<T>>(
    (query, sink): (u32, &mut K),
    rows: &[u32],
    sums: &[T; WIDE],
    pairing: &Pairing<'_>,
) {
    let mut lanes = [0; WIDE];
    let near = within(sums, rows.len().min(WIDE), sink.reach(), &mut lanes);
    for lane in &lanes[..near] {
        let row = pairing.first_base + rows[*lane];
        if sums[*lane] <= sink.reach() && !pairing.queries.is_same(query as usize, u64::from(row)) {
            sink.offer(sums[*lane], row);
        }
    }
}

/// The sums of a query with the rows of a leaf; whether one is within reach.
#[inline(always)]
fn sums_of<S: Simd, T: Lanes, A: Accumulate>(
    simd: S,
    rows: &[Column<T>],
    query: &[T],
    sums: &mut [T; WIDE],
    reach: T,
) -> bool {
    let (mut is_near, reach) = (false, T::splat(simd, reach));
    // Two at a time, as each term waits for the one before.
    for (pair, sums) in T::vectors_mut::<S>(sums).chunks_exact_mut(2).enumerate() {
        let mut totals = [T::splat(simd, T::ZERO); 2];
        for (column, q) in rows.iter().zip(query) {
            let x = &T::vectors::<S>(&column.0)[2 * pair..][..2];
            let q = T::splat(simd, *q);
            totals[0] = A::accumulate::<S, T>(simd, q, x[0], totals[0]);
            totals[1] = A::accumulate::<S, T>(simd, q, x[1], totals[1]);
        }
        is_near |= T::any_at_most::<S>(simd, T::lesser(simd, totals[0], totals[1]), reach);
        sums.copy_from_slice(&totals);
    }
    is_near
}

/// The least sums that rows in some boxes may have with a query.
#[inline(always)]
fn least_of<S: Simd, T: Lanes, A: Accumulate>(
    simd: S,
    sides: &[Column<T>],
    query: &[T],
    sums: &mut [T; WIDE],
) {
    let zero = T::splat(simd, T::ZERO);
    for (pair, sums) in T::vectors_mut::<S>(sums).chunks_exact_mut(2).enumerate() {
        let mut totals = [zero; 2];
        for (sides, q) in sides.chunks_exact(2).zip(query) {
            let side = |i: usize| &T::vectors::<S>(&sides[i].0)[2 * pair..][..2];
            let (low, high, q) = (side(0), side(1), T::splat(simd, *q));
            for (i, total) in totals.iter_mut().enumerate() {
                let beyond = T::lesser(simd, T::minus(simd, q, low[i]), T::minus(simd, high[i], q));
                // As far as from that to zero: none where the query is between both sides.
                *total = A::accumulate::<S, T>(simd, zero, T::lesser(simd, beyond, zero), *total);
            }
        }
        sums.copy_from_slice(&totals);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Metric;
    use crate::device::cpu::search::sink::{Neighbor, Selection};
    use crate::matrix::{Elements, Matrix};
    use crate::random::Random;

    /// Rows of several kinds: spread out, on a grid, equal, far from the origin with one that is farther, huge, tiny.
    fn values(kind: usize, count: usize, random: &mut Random) -> Vec<f64> {
        let value = |i: usize, random: &mut Random| match kind {
            0 => random.unit(),
            1 => (random.unit() * 4.0).floor(),
            2 => 0.25,
            3 if i == 0 => -1e6,
            3 => 1e4 + random.unit() * 1e-2,
            4 => (random.unit() - 0.5) * 5e38,
            5 => (random.unit() - 0.5) * 1e-44,
            _ => i as f64,
        };
        (0..count).map(|i| value(i, random)).collect()
    }

    fn check<T: Lanes>(rows: Rows, metric: Metric, k: usize, is_self_join: bool, level: Level) {
        let (dim, job) = (rows.matrix().dim(), Job::default());
        let values = rows.reals::<T>().unwrap();
        let boxes = Boxes::new(&rows, values, &job).unwrap();
        let queries =
            if is_self_join { QueryRows::OfBase { first: 7 } } else { QueryRows::Separate };
        let pairing = Pairing { queries, first_base: 7, ..Pairing::default() };
        let call = Call { metric, pairing: &pairing, job: &job };
        let asked = rows.len().min(70);
        let mut sinks = vec![Selection::new(k, metric); asked];
        let asked_values = &values[..asked * dim];
        boxes.suits(asked_values, &sinks, (&call, level)).unwrap();
        boxes.search(asked_values, &mut sinks, (&call, level)).unwrap();
        for (query, sink) in sinks.into_iter().enumerate() {
            let of = |row: usize| &values[row * dim..][..dim];
            let others = (0..rows.len()).filter(|row| !is_self_join || *row != query);
            let mut wanted: Vec<(T, u32)> = others
                .map(|row| (metric.distance(metric.sum_of(of(query), of(row))), row as u32 + 7))
                .collect();
            wanted.sort_by_key(|(distance, row)| distance.key(*row));
            wanted.truncate(k);
            let found = sink.into_sorted().into_iter();
            let found: Vec<(T, u32)> =
                found.map(|Neighbor { distance, row }| (distance, row)).collect();
            assert!(
                found == wanted,
                "query {query} of {} × {dim}, {metric}, {level:?}",
                rows.len()
            );
        }
    }

    #[test]
    fn neighbours_are_those_of_all_rows() {
        let mut random = Random::new(5);
        for (i, (count, dim)) in
            [(1, 1), (31, 2), (32, 3), (33, 7), (1024, 2), (1025, 1), (2100, 16), (34_000, 3)]
                .into_iter()
                .enumerate()
        {
            for kind in 0..7 {
                let all = values(kind, count * dim, &mut random);
                let metric = [Metric::L2, Metric::L1, Metric::SqEuclidean][(i + kind) % 3];
                let k = [1, 5, 40][(i + kind / 2) % 3];
                let singles: Vec<f32> =
                    all.iter().map(|x| (*x as f32).clamp(f32::MIN, f32::MAX)).collect();
                let of = |elements| Rows::all(Arc::new(Matrix::new(elements, count, dim)));
                for level in Level::all() {
                    check::<f32>(
                        of(Elements::F32(singles.clone())),
                        metric,
                        k,
                        kind % 2 == 0,
                        level,
                    );
                    check::<f64>(of(Elements::F64(all.clone())), metric, k, kind % 2 == 1, level);
                }
            }
        }
    }

    #[test]
    fn few_leaves_are_looked_at() {
        let mut random = Random::new(6);
        let (count, dim, job) = (40_000, 2, Job::default());
        let all: Vec<f32> = (0..count * dim).map(|_| random.unit() as f32).collect();
        let rows = Rows::all(Arc::new(Matrix::new(Elements::F32(all), count, dim)));
        let values = rows.reals::<f32>().unwrap();
        let boxes = Boxes::new(&rows, values, &job).unwrap();
        let call = Call { metric: Metric::L2, pairing: &Pairing::default(), job: &job };
        let mut sinks = vec![Selection::new(10, Metric::L2); count];
        let work = boxes.search(values, &mut sinks, (&call, Level::all()[0])).unwrap();
        assert!(work.pairs < 400 * count as u64, "{} pairs", work.pairs);
    }
}
