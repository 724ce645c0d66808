//! Sums of groups and distances from chosen rows, on all cores.

use rayon::prelude::*;

use super::lanes::Lanes;
use crate::device::Distances;
use crate::device::clusters::{Groups, SPREAD_BLOCK, Spread};
use crate::matrix::Rows;
use crate::metric::{Metric, Sum};

/// Fewer moved rows than this are not worth the threads.
const FEW_MOVED: usize = 4096;

/// See [`Device::regroup`](crate::device::Device::regroup).
pub(in crate::device) fn regroup(
    rows: &Rows,
    weights: Option<&[f64]>,
    labels: (Option<&[u32]>, &[u32]),
    groups: &mut Groups,
) {
    if let Some(values) = rows.reals::<f32>() {
        regroup_reals(values, rows.matrix().dim(), weights, labels, groups);
    } else if let Some(values) = rows.reals::<f64>() {
        regroup_reals(values, rows.matrix().dim(), weights, labels, groups);
    }
}

fn regroup_reals<T: Lanes>(
    values: &[T],
    dim: usize,
    weights: Option<&[f64]>,
    (old, new): (Option<&[u32]>, &[u32]),
    groups: &mut Groups,
) {
    let before = |row: usize| old.map(|old| old[row]);
    let moved: Vec<u32> =
        (0..new.len() as u32).filter(|r| before(*r as usize) != Some(new[*r as usize])).collect();
    let shift = |groups: &mut Groups, moved: &[u32]| {
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for row in moved.iter().map(|row| *row as usize) {
                    let weight = weights.map_or(1.0, |weights| weights[row]);
                    groups.shift(&values[row * dim..][..dim], weight, before(row), new[row]);
                }
            },
        );
    };
    if moved.len() < FEW_MOVED {
        return shift(groups, &moved);
    }
    let parts: Vec<_> = moved
        .par_chunks(moved.len().div_ceil(rayon::current_num_threads()))
        .map(|moved| {
            let mut part = groups.cleared();
            shift(&mut part, moved);
            part
        })
        .collect();
    parts.iter().for_each(|part| groups.absorb(part));
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
        costs.enumerate().map(|(i, cost)| weight(i) * cost.to_f64()).sum()
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

/// Rows side by side whose sums are formed together.
const SIDE_BY_SIDE: usize = 32;

/// Rows, `SIDE_BY_SIDE` at a time and dimension by dimension.
struct Transposed<T> {
    columns: Vec<[T; SIDE_BY_SIDE]>,
    dim: usize,
}

impl<T: Lanes> Transposed<T> {
    fn new(values: &[T], dim: usize) -> Self {
        let rows = values.len() / dim;
        let mut columns = vec![[T::ZERO; SIDE_BY_SIDE]; rows.div_ceil(SIDE_BY_SIDE) * dim];
        for (row, values) in values.chunks_exact(dim).enumerate() {
            let group = &mut columns[row / SIDE_BY_SIDE * dim..][..dim];
            for (column, value) in group.iter_mut().zip(values) {
                column[row % SIDE_BY_SIDE] = *value;
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
                        for (sum, x) in sums.iter_mut().zip(column) {
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
