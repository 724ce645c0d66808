//! Searches in few dimensions by a tree of bounding boxes: a query visits only the leaves that may have a row within
//! its sink's threshold.
//!
//! The difference of a query and a row is at least that of the query and the nearest side of the row's box, in every
//! dimension. Rounding keeps that order, and the terms of both sums are added in the same order. Hence the sum of a
//! box is a lower bound on the sums of its rows, and comparing it with the threshold needs no margin.

mod descent;
mod tree;

use self::descent::Descent;
pub(super) use self::tree::BboxTree;
use self::tree::{MatrixPoints, left};
use super::sink::Sink;
use super::traversal::Call;
use crate::device::contract::{QueryRows, Work};
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::device::cpu::spatial_order::{Bisection, order_by_bisection};
use crate::error::Result;
use crate::metric::Sum;
use crate::parallel::try_in_parallel;
use crate::rows::Rows;

/// With fewer rows, comparing all of them is as fast as ordering them.
const LEAST_ROWS: usize = 4096;

/// `(dim, rows)`: with up to `dim` dimensions, `rows` rows for each query may be ordered before the share of visited
/// leaves is known. That takes about as long as comparing a query with all rows; fewer rows where many visits are
/// likely.
const ROWS_PER_QUERY: [(usize, usize); 3] = [(8, 256), (12, 64), (16, 4)];

/// The factor by which queries are expected to grow, if they are base rows.
const MORE_OF_BASE: usize = 16;

/// The most base rows per query for which queries that are base rows take their order from the tree, instead of
/// computing it.
const OF_BASE: usize = 16;

/// Queries of a task, and of the sample that estimates the share of visited leaves.
const TASK_QUERIES: usize = 64;
const SAMPLED: usize = 32;

/// The largest share of visited rows for which the tree is faster than comparing all rows: with AVX-512, and without.
const MOST_VISITED: [f64; 2] = [0.14, 0.25];

/// Whether a tree of these rows may pay, after `queries` queries; where queries are base rows, more are expected.
pub(super) fn may_pay(rows: &Rows, call: &Call<'_>, queries: usize) -> bool {
    let metric = call.metric;
    let more = if call.pairing.queries == QueryRows::Separate { 1 } else { MORE_OF_BASE };
    let is_sum = matches!(metric.sum(), Sum::Squares | Sum::Absolute);
    let (dim, count) = (rows.matrix().dim(), rows.len());
    let rows_per_query = ROWS_PER_QUERY.iter().find(|(most, _)| dim <= *most);
    is_sum
        && dim > 0
        && count >= LEAST_ROWS
        && rows_per_query.is_some_and(|(_, rows)| queries.saturating_mul(rows * more) >= count)
}

impl<T: SimdReal> BboxTree<T> {
    /// Whether a sample is a small part of the work of this many queries.
    pub fn is_worth_a_sample(queries: usize) -> bool {
        queries >= 32 * SAMPLED
    }

    /// Whether a sample of the queries visits few enough leaves.
    pub fn suits<K: Sink<T>>(&self, queries: &[T], sinks: &[K], call: &Call<'_>) -> Result<bool> {
        let count = sinks.len().min(SAMPLED);
        let visited = try_in_parallel(0..count, |i| {
            let query = i * sinks.len() / count;
            self.some(queries, &mut [(query as u32, sinks[query].sibling())], call)
        });
        let visited: u64 = visited?.into_iter().sum();
        let most = MOST_VISITED[usize::from(!call.level.has_avx512())];
        Ok(visited as f64 <= most * (count * self.order.len()) as f64)
    }

    /// Offers to each query's sink every row within its threshold, and some others.
    pub fn search<K: Sink<T>>(
        &self,
        queries: &[T],
        sinks: &mut [K],
        call: &Call<'_>,
    ) -> Result<Work> {
        // Queries near each other visit the same leaves, which stay in a cache.
        let order = self.order_of(queries, sinks.len(), call)?;
        let taken = |query: &u32| {
            let sink = &mut sinks[*query as usize];
            let empty = sink.sibling();
            (*query, std::mem::replace(sink, empty))
        };
        let mut taken: Vec<(u32, K)> = order.iter().map(taken).collect();
        let tasks = taken.chunks_mut(TASK_QUERIES);
        let pairs = try_in_parallel(tasks, |taken| self.some(queries, taken, call))?;
        let pairs = pairs.into_iter().sum();
        taken.into_iter().for_each(|(query, sink)| sinks[query as usize] = sink);
        Ok(Work { pairs, ..Work::default() })
    }

    /// The numbers of `count` queries in a spatial order.
    fn order_of(&self, queries: &[T], count: usize, call: &Call<'_>) -> Result<Vec<u32>> {
        if let QueryRows::OfBase { first } = call.pairing.queries
            && count.saturating_mul(OF_BASE) >= self.order.len()
            && let Some(first) = first.checked_sub(call.pairing.first_base)
        {
            let rows = first..first + count as u32;
            let positions = self.order.iter().filter(|row| rows.contains(*row));
            let positions: Vec<u32> = positions.map(|row| row - first).collect();
            if positions.len() == count {
                return Ok(positions);
            }
        }
        let points = MatrixPoints { values: queries, dim: self.dim };
        order_by_bisection(&points, Bisection { rows: TASK_QUERIES, left }, call.job)
    }

    /// Searches for some of the queries; returns the number of rows that they visited.
    fn some<K: Sink<T>>(
        &self,
        queries: &[T],
        taken: &mut [(u32, K)],
        call: &Call<'_>,
    ) -> Result<u64> {
        call.job.check()?;
        Ok(call.level.dispatch(Descent { boxes: self, queries, call, taken }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::device::contract::Pairing;
    use crate::device::cpu::search::sink::{Neighbor, TopK};
    use crate::device::cpu::simd::level::Level;
    use crate::job::Job;
    use crate::matrix::{Elements, Matrix};
    use crate::metric::Metric;
    use crate::random::Random;

    /// Rows of several kinds: spread out, on a grid, equal, far from the origin with one that is farther, huge, tiny,
    /// ascending.
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

    fn check<T: SimdReal>(rows: Rows, metric: Metric, k: usize, is_self_join: bool, level: Level) {
        let (dim, job) = (rows.matrix().dim(), Job::default());
        let values = rows.reals::<T>().unwrap();
        let boxes = BboxTree::new(&rows, values, &job).unwrap();
        let query_rows =
            if is_self_join { QueryRows::OfBase { first: 7 } } else { QueryRows::Separate };
        let pairing = Pairing { queries: query_rows, first_base: 7, ..Pairing::default() };
        let call = Call { metric, level, pairing: &pairing, job: &job };
        let count = rows.len().min(70);
        let mut sinks = vec![TopK::new(k, metric); count];
        let queries = &values[..count * dim];
        boxes.suits(queries, &sinks, &call).unwrap();
        boxes.search(queries, &mut sinks, &call).unwrap();
        for (query, sink) in sinks.iter_mut().enumerate() {
            let of = |row: usize| &values[row * dim..][..dim];
            let others = (0..rows.len()).filter(|row| !is_self_join || *row != query);
            let mut expected: Vec<(T, u32)> = others
                .map(|row| (metric.distance(metric.sum_of(of(query), of(row))), row as u32 + 7))
                .collect();
            expected.sort_by_key(|(distance, row)| distance.key(*row));
            expected.truncate(k);
            let neighbors = sink.take_sorted().into_iter();
            let neighbors: Vec<(T, u32)> =
                neighbors.map(|Neighbor { distance, row }| (distance, row)).collect();
            assert!(
                neighbors == expected,
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
                let k = [1, 5, 16, 17, 25, 40, 1200][(i + kind) % 7];
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
        let boxes = BboxTree::new(&rows, values, &job).unwrap();
        let (pairing, level) = (&Pairing::default(), Level::all()[0]);
        let call = Call { metric: Metric::L2, level, pairing, job: &job };
        let mut sinks = vec![TopK::new(10, Metric::L2); count];
        let work = boxes.search(values, &mut sinks, &call).unwrap();
        assert!(work.pairs < 400 * count as u64, "{} pairs", work.pairs);
        // Queries of a task that are far apart do not visit leaves near other queries.
        let far_apart: Vec<f32> =
            values.chunks_exact(dim).step_by(625).flatten().copied().collect();
        for (k, most) in [(10, 400), (40, 1000), (1000, 4000)] {
            let mut sinks = vec![TopK::new(k, Metric::L2); 64];
            let work = boxes.search(&far_apart, &mut sinks, &call).unwrap();
            assert!(work.pairs < 64 * most, "{} pairs, k = {k}", work.pairs);
        }
    }
}
