//! Sums of clusters, distances from chosen rows and the nearest of few rows, on all cores.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::lanes::Lanes;
use crate::device::clusters::{ClusterSums, SPREAD_BLOCK, Spread, share};
use crate::device::{Distances, Neighbors, Pairing, Work};
use crate::error::Result;
use crate::matrix::Rows;
use crate::metric::{Metric, Sum};

/// Fewer moved rows than this are not worth the threads.
const FEW_MOVED: usize = 4096;

/// See [`Device::regroup`](crate::device::Device::regroup).
pub(in crate::device) fn regroup(
    rows: &Rows,
    weights: Option<&[f64]>,
    labels: (Option<&[u32]>, &[u32]),
    sums: &mut ClusterSums,
) {
    if let Some(values) = rows.reals::<f32>() {
        regroup_reals(values, rows.matrix().dim(), weights, labels, sums);
    } else if let Some(values) = rows.reals::<f64>() {
        regroup_reals(values, rows.matrix().dim(), weights, labels, sums);
    }
}

fn regroup_reals<T: Lanes>(
    values: &[T],
    dim: usize,
    weights: Option<&[f64]>,
    (old, new): (Option<&[u32]>, &[u32]),
    sums: &mut ClusterSums,
) {
    let before = |row: usize| old.map(|old| old[row]);
    let moved: Vec<u32> =
        (0..new.len() as u32).filter(|r| before(*r as usize) != Some(new[*r as usize])).collect();
    let shift = |sums: &mut ClusterSums, moved: &[u32]| {
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for row in moved.iter().map(|row| *row as usize) {
                    let weight = weights.map_or(1.0, |weights| weights[row]);
                    sums.shift(&values[row * dim..][..dim], weight, before(row), new[row]);
                }
            },
        );
    };
    if moved.len() < FEW_MOVED {
        return shift(sums, &moved);
    }
    let parts: Vec<_> = moved
        .par_chunks(moved.len().div_ceil(rayon::current_num_threads()))
        .map(|moved| {
            let mut part = sums.cleared();
            shift(&mut part, moved);
            part
        })
        .collect();
    parts.iter().for_each(|part| sums.absorb(part));
}

/// See [`Device::spread`](crate::device::Device::spread).
pub(in crate::device) fn spread(spread: &mut Spread, candidates: &[u32]) -> u32 {
    if spread.rows.reals::<f32>().is_some() {
        spread_reals::<f32>(spread, candidates)
    } else {
        spread_reals::<f64>(spread, candidates)
    }
}

fn spread_reals<T: Lanes>(spread: &mut Spread, candidates: &[u32]) -> u32 {
    let rows = spread.rows.clone();
    let (values, dim) = (rows.reals::<T>().unwrap_or_default(), rows.matrix().dim());
    let weights = spread.weights.as_deref();
    let mut costs = match spread.costs.take() {
        Some(costs) => costs.reals().unwrap_or_default(),
        None => vec![T::INFINITY; rows.len()],
    };
    let candidate = |row: u32| &values[row as usize * dim..][..dim];
    let metric = spread.metric;
    let total = |block: usize, costs: &mut dyn Iterator<Item = T>| -> f64 {
        let first = block * SPREAD_BLOCK;
        let weight = |i: usize| weights.map_or(1.0, |weights| weights[first + i]);
        costs.enumerate().map(|(i, cost)| share(weight(i), cost.to_f64())).sum()
    };
    let mut best = candidates[0];
    if candidates.len() > 1 {
        // For each block, what would be left with each candidate; added up in order of the blocks.
        let blocks: Vec<Vec<f64>> = values
            .par_chunks(SPREAD_BLOCK * dim)
            .zip(costs.par_chunks(SPREAD_BLOCK))
            .enumerate()
            .map(|(block, (values, costs))| {
                let transposed = Transposed::new(values, dim);
                let mut found = vec![T::ZERO; costs.len()];
                let left = |row: &u32| {
                    transposed.costs(metric, candidate(*row), &mut found);
                    total(block, &mut found.iter().zip(costs).map(|(a, b)| a.min(*b)))
                };
                candidates.iter().map(left).collect()
            })
            .collect();
        let left = |i: usize| blocks.iter().map(|block| block[i]).sum::<f64>();
        let lefts: Vec<_> = (0..candidates.len()).map(left).collect();
        let least = (1..lefts.len()).fold(0, |a, b| if lefts[b] < lefts[a] { b } else { a });
        best = candidates[least];
    }
    spread.totals = values
        .par_chunks(SPREAD_BLOCK * dim)
        .zip(costs.par_chunks_mut(SPREAD_BLOCK))
        .enumerate()
        .map(|(block, (values, costs))| {
            let mut found = vec![T::ZERO; costs.len()];
            Transposed::new(values, dim).costs(metric, candidate(best), &mut found);
            costs.iter_mut().zip(found).for_each(|(cost, found)| *cost = cost.min(found));
            total(block, &mut costs.iter().copied())
        })
        .collect();
    spread.costs = Some(Distances::of(costs));
    best
}

/// Up to so many dimensions and base rows, looking at every pair is the fastest way to the nearest.
const FEW_DIMENSIONS: usize = 32;
const FEW_ROWS: usize = 4096;
/// Queries of a task.
const TASK_QUERIES: usize = 2048;

/// See [`Device::nearest_one`](crate::device::Device::nearest_one). `None` if this is not the way.
pub(super) fn nearest_one(
    queries: &Rows,
    base: &Rows,
    pairing: &Pairing<'_>,
) -> Option<Result<Neighbors>> {
    let few = queries.matrix().dim() <= FEW_DIMENSIONS && base.len() <= FEW_ROWS;
    // Roots of different squares may be equal, and the earlier row then counts.
    let plain = pairing.metric == Metric::SqEuclidean && pairing.first_query.is_none();
    if !few || !plain || base.is_empty() {
        return None;
    }
    if let (Some(from), Some(to)) = (queries.reals::<f32>(), base.reals::<f32>()) {
        return Some(nearest_reals(from, to, queries.matrix().dim(), pairing));
    }
    let (from, to) = (queries.reals::<f64>()?, base.reals::<f64>()?);
    Some(nearest_reals(from, to, queries.matrix().dim(), pairing))
}

fn nearest_reals<T: Lanes>(
    queries: &[T],
    base: &[T],
    dim: usize,
    pairing: &Pairing<'_>,
) -> Result<Neighbors> {
    let count = queries.len() / dim;
    let (mut rows, mut distances) = (vec![0; count], vec![T::ZERO; count]);
    queries
        .par_chunks(TASK_QUERIES * dim)
        .zip(rows.par_chunks_mut(TASK_QUERIES).zip(distances.par_chunks_mut(TASK_QUERIES)))
        .try_for_each(|(queries, (rows, distances))| {
            pairing.cancel.check()?;
            let queries = Transposed::new(queries, dim);
            pulp::Arch::new().dispatch(Nearest { queries: &queries, base, rows, distances });
            rows.iter_mut().for_each(|row| *row += pairing.first_base);
            Ok::<_, crate::error::Error>(())
        })?;
    let pairs = count as u64 * (base.len() / dim) as u64;
    let work = Work { pairs, ..Work::default() };
    Ok(Neighbors { per_query: 1, rows, distances: Distances::of(distances), work })
}

/// The first of the nearest base rows of every query, and the square of its distance.
struct Nearest<'a, T> {
    queries: &'a Transposed<T>,
    base: &'a [T],
    rows: &'a mut [u32],
    distances: &'a mut [T],
}

/// Base rows that pass by together.
const PASSING: usize = 4;

impl<T: Lanes> WithSimd for Nearest<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let dim = self.queries.dim;
        let groups = self.queries.columns.chunks_exact(dim);
        let out = self.rows.chunks_mut(SIDE_BY_SIDE).zip(self.distances.chunks_mut(SIDE_BY_SIDE));
        for (group, (rows, distances)) in groups.zip(out) {
            let mut best = [T::INFINITY; SIDE_BY_SIDE];
            // Numbers of few rows are exact in any type.
            let mut number = [T::ZERO; SIDE_BY_SIDE];
            let registers = T::vectors_mut::<S>(&mut best).iter_mut();
            for (register, (best, number)) in
                registers.zip(T::vectors_mut::<S>(&mut number)).enumerate()
            {
                let mut found = (*best, *number);
                let mut passing = self.base.chunks_exact(PASSING * dim);
                for (i, base) in passing.by_ref().enumerate() {
                    let sums = squares::<S, T, PASSING>(simd, group, register, base);
                    found = nearer::<S, T, PASSING>(simd, i * PASSING, sums, found);
                }
                let done = self.base.len() / dim / PASSING * PASSING;
                for (i, base) in passing.remainder().chunks_exact(dim).enumerate() {
                    let sums = squares::<S, T, 1>(simd, group, register, base);
                    found = nearer::<S, T, 1>(simd, done + i, sums, found);
                }
                (*best, *number) = found;
            }
            for (row, number) in rows.iter_mut().zip(number) {
                *row = number.to_f64() as u32;
            }
            distances.copy_from_slice(&best[..distances.len()]);
        }
    }
}

/// The least so far and its number, after some more from this number on.
#[inline(always)]
fn nearer<S: Simd, T: Lanes, const BASE: usize>(
    simd: S,
    first: usize,
    sums: [T::Vector<S>; BASE],
    (mut best, mut number): (T::Vector<S>, T::Vector<S>),
) -> (T::Vector<S>, T::Vector<S>) {
    for (i, sum) in sums.into_iter().enumerate() {
        let own = T::splat(simd, T::from_f64((first + i) as f64));
        number = T::where_less(simd, (sum, best), own, number);
        best = T::lesser(simd, sum, best);
    }
    (best, number)
}

/// Squares of the distances of a register of queries from some base rows.
#[inline(always)]
fn squares<S: Simd, T: Lanes, const BASE: usize>(
    simd: S,
    queries: &[Column<T>],
    register: usize,
    base: &[T],
) -> [T::Vector<S>; BASE] {
    let dim = queries.len();
    let mut sums = [T::splat(simd, T::ZERO); BASE];
    for (j, column) in queries.iter().enumerate() {
        let query = T::vectors::<S>(&column.0)[register];
        for (i, sum) in sums.iter_mut().enumerate() {
            let apart = T::minus(simd, query, T::splat(simd, base[i * dim + j]));
            *sum = T::times_plus(simd, apart, apart, *sum);
        }
    }
    sums
}

/// Rows side by side whose sums are formed together.
const SIDE_BY_SIDE: usize = 32;

/// One dimension of rows side by side.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Column<T>([T; SIDE_BY_SIDE]);

/// Rows, `SIDE_BY_SIDE` at a time and dimension by dimension.
struct Transposed<T> {
    columns: Vec<Column<T>>,
    dim: usize,
}

impl<T: Lanes> Transposed<T> {
    fn new(values: &[T], dim: usize) -> Self {
        let rows = values.len() / dim;
        let mut columns = vec![Column([T::ZERO; SIDE_BY_SIDE]); rows.div_ceil(SIDE_BY_SIDE) * dim];
        for (row, values) in values.chunks_exact(dim).enumerate() {
            let group = &mut columns[row / SIDE_BY_SIDE * dim..][..dim];
            for (column, value) in group.iter_mut().zip(values) {
                column.0[row % SIDE_BY_SIDE] = *value;
            }
        }
        Self { columns, dim }
    }

    /// The distance of every row from a query, in the contract's order.
    fn costs(&self, metric: Metric, query: &[T], out: &mut [T]) {
        let squares = metric.sum() == Sum::Squares;
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for (group, out) in
                    self.columns.chunks_exact(self.dim).zip(out.chunks_mut(SIDE_BY_SIDE))
                {
                    let mut sums = [T::ZERO; SIDE_BY_SIDE];
                    for (column, q) in group.iter().zip(query) {
                        for (sum, x) in sums.iter_mut().zip(&column.0) {
                            *sum = if squares {
                                (*q - *x).mul_add(*q - *x, *sum)
                            } else {
                                (-*q).mul_add(*x, *sum)
                            };
                        }
                    }
                    for (out, sum) in out.iter_mut().zip(sums) {
                        *out = metric.distance(sum);
                    }
                }
            },
        );
    }
}
