//! Exact distances of chosen pairs, from rows in their original layout.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use crate::device::contract::{Candidates, Distances};
use crate::device::cpu::simd::lanes::Lanes;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::Rows;
use crate::metric::Metric;

/// Pairs of a task, and those of sets, which may be large.
const TASK_PAIRS: usize = 4096;
const TASK_SETS: usize = 64;

/// Pairs of a query whose sums are added up side by side.
const TOGETHER: usize = 8;

/// See [`SearchDevice::among`](crate::device::SearchDevice::among).
pub(super) fn among(
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    candidates: &Candidates<'_>,
    job: &Job,
) -> Result<Distances> {
    if let (Some(from), Some(to)) = (queries.reals::<f64>(), base.reals::<f64>()) {
        let numbers = Numbers { metric, dim: base.matrix().dim(), from, to };
        return each(candidates, TASK_PAIRS, |pairs, found| numbers.distances(pairs, found), job)
            .map(Distances::F64);
    }
    if let (Some(from), Some(to)) = (queries.reals::<f32>(), base.reals::<f32>()) {
        let numbers = Numbers { metric, dim: base.matrix().dim(), from, to };
        return each(candidates, TASK_PAIRS, |pairs, found| numbers.distances(pairs, found), job)
            .map(Distances::F32);
    }
    if let (Some((from, first)), Some((to, start))) = (queries.sets(), base.sets()) {
        let sets = |pairs: &[(usize, u32)], found: &mut [f32]| {
            for (found, (query, row)) in found.iter_mut().zip(pairs) {
                *found = from.distance(first + query, to, start + *row as usize);
            }
        };
        return each(candidates, TASK_SETS, sets, job).map(Distances::F32);
    }
    let (from, to) = (queries.words().unwrap_or_default(), base.words().unwrap_or_default());
    let width = base.matrix().width();
    let bits = |pairs: &[(usize, u32)], found: &mut [f32]| {
        pulp::Arch::new().dispatch(BitPairs { metric, width, from, to, pairs, found });
    };
    each(candidates, TASK_PAIRS, bits, job).map(Distances::F32)
}

/// Rows of numbers.
#[derive(Clone, Copy)]
struct Numbers<'a, T> {
    metric: Metric,
    dim: usize,
    from: &'a [T],
    to: &'a [T],
}

impl<T: Lanes> Numbers<'_, T> {
    fn distances(self, pairs: &[(usize, u32)], found: &mut [T]) {
        pulp::Arch::new().dispatch(NumberPairs { numbers: self, pairs, found });
    }
}

/// The distances of pairs of rows of numbers.
struct NumberPairs<'a, T> {
    numbers: Numbers<'a, T>,
    pairs: &'a [(usize, u32)],
    found: &'a mut [T],
}

impl<T: Lanes> WithSimd for NumberPairs<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { numbers: Numbers { metric, dim, from, to }, pairs, found } = self;
        for (pairs, found) in pairs.chunks(TOGETHER).zip(found.chunks_mut(TOGETHER)) {
            // Of a last few, some are computed more than once.
            let pair = |i: usize| pairs[i.min(pairs.len() - 1)];
            let x: [&[T]; TOGETHER] = std::array::from_fn(|i| &from[pair(i).0 * dim..][..dim]);
            let y: [&[T]; TOGETHER] =
                std::array::from_fn(|i| &to[pair(i).1 as usize * dim..][..dim]);
            let mut sums = [T::ZERO; TOGETHER];
            for j in 0..dim {
                for i in 0..TOGETHER {
                    sums[i] = metric.add_to_sum(sums[i], x[i][j], y[i][j]);
                }
            }
            found.iter_mut().zip(sums).for_each(|(found, sum)| *found = metric.distance(sum));
        }
    }
}

/// The distances of pairs of rows of bits.
struct BitPairs<'a> {
    metric: Metric,
    width: usize,
    from: &'a [u64],
    to: &'a [u64],
    pairs: &'a [(usize, u32)],
    found: &'a mut [f32],
}

impl WithSimd for BitPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { metric, width, from, to, pairs, found } = self;
        for (found, (query, row)) in found.iter_mut().zip(pairs) {
            let (x, y) = (&from[query * width..][..width], &to[*row as usize * width..][..width]);
            *found = metric.distance_of_bits(x, y);
        }
    }
}

/// The distances of all pairs, in their order.
fn each<T: Copy + Default + Send + Sync>(
    candidates: &Candidates<'_>,
    together: usize,
    distances: impl Fn(&[(usize, u32)], &mut [T]) + Sync,
    job: &Job,
) -> Result<Vec<T>> {
    let mut found = vec![T::default(); candidates.len()];
    found.par_chunks_mut(together).enumerate().try_for_each(|(task, found)| {
        job.check()?;
        let pairs: Vec<_> = candidates.pairs_from(task * together).take(found.len()).collect();
        distances(&pairs, found);
        Ok::<_, Error>(())
    })?;
    Ok(found)
}
