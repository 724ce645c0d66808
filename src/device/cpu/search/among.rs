//! Exact distances of chosen pairs, from rows in their original layout.

use rayon::prelude::*;

use crate::device::contract::{Candidates, Distances};
use crate::device::cpu::simd::lanes::Lanes;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::Rows;
use crate::metric::Metric;

/// Pairs of a task.
const TASK_PAIRS: usize = 4096;

/// See [`SearchDevice::among`](crate::device::SearchDevice::among).
pub(super) fn among(
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    candidates: &Candidates<'_>,
    job: &Job,
) -> Result<Distances> {
    let dim = base.matrix().dim();
    if let (Some(from), Some(to)) = (queries.reals::<f64>(), base.reals::<f64>()) {
        let distance = |query, row| real_distance(metric, dim, (from, query), (to, row));
        return each(candidates, distance, job).map(Distances::F64);
    }
    if let (Some(from), Some(to)) = (queries.reals::<f32>(), base.reals::<f32>()) {
        let distance = |query, row| real_distance(metric, dim, (from, query), (to, row));
        return each(candidates, distance, job).map(Distances::F32);
    }
    let (from, to) = (queries.words().unwrap_or_default(), base.words().unwrap_or_default());
    let width = base.matrix().width();
    let distance = |query: usize, row: usize| {
        metric.distance_of_bits(&from[query * width..][..width], &to[row * width..][..width])
    };
    each(candidates, distance, job).map(Distances::F32)
}

#[inline(always)]
fn real_distance<T: Lanes>(
    metric: Metric,
    dim: usize,
    (from, query): (&[T], usize),
    (to, row): (&[T], usize),
) -> T {
    let sum = metric.sum_of(&from[query * dim..][..dim], &to[row * dim..][..dim]);
    metric.distance(sum)
}

/// The distances of all pairs, in their order.
fn each<T: Copy + Default + Send + Sync>(
    candidates: &Candidates<'_>,
    distance: impl Fn(usize, usize) -> T + Sync,
    job: &Job,
) -> Result<Vec<T>> {
    let mut found = vec![T::default(); candidates.len()];
    found.par_chunks_mut(TASK_PAIRS).enumerate().try_for_each(|(task, found)| {
        job.check()?;
        let pairs = candidates.pairs_from(task * TASK_PAIRS);
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for (found, (query, row)) in found.iter_mut().zip(pairs) {
                    *found = distance(query, row as usize);
                }
            },
        );
        Ok::<_, Error>(())
    })?;
    Ok(found)
}
