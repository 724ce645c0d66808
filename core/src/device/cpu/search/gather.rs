//! Exact distances of chosen pairs, from rows in their original layout.

use pulp::{Simd, WithSimd};

use crate::device::contract::{Candidates, Distances};
use crate::device::cpu::exact;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Metric;
use crate::parallel::try_in_parallel;
use crate::rows::Rows;

/// Pairs of a task, and those of sets, which may be large.
const TASK_PAIRS: usize = 4096;
const TASK_SETS: usize = 64;

/// See [`SearchDevice::distances_of`](crate::device::SearchDevice::distances_of).
pub(super) fn distances_of(
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    candidates: &Candidates<'_>,
    level: Level,
    job: &Job,
) -> Result<Distances> {
    assert!(u32::try_from(queries.len()).is_ok(), "pairs are of 32 bits");
    let dim = base.matrix().dim();
    if let (Some(from), Some(to)) = (queries.reals::<f64>(), base.reals::<f64>()) {
        return numbers(from, to, metric, dim, candidates, level, job).map(Distances::F64);
    }
    if let (Some(from), Some(to)) = (queries.reals::<f32>(), base.reals::<f32>()) {
        return numbers(from, to, metric, dim, candidates, level, job).map(Distances::F32);
    }
    if let (Some((from, first)), Some((to, start))) = (queries.sets(), base.sets()) {
        let sets = |pairs: &[(u32, u32)], distances: &mut [f32]| {
            for (distance, (query, row)) in distances.iter_mut().zip(pairs) {
                *distance =
                    from.rounded_distance(first + *query as usize, to, start + *row as usize);
            }
        };
        return each(candidates, TASK_SETS, sets, job).map(Distances::F32);
    }
    let (from, to) = (queries.words().unwrap_or_default(), base.words().unwrap_or_default());
    let width = base.matrix().width();
    let bits = |pairs: &[(u32, u32)], distances: &mut [f32]| {
        level.dispatch(BitPairs { metric, width, from, to, pairs, distances });
    };
    each(candidates, TASK_PAIRS, bits, job).map(Distances::F32)
}

/// The distances of pairs of rows of numbers.
fn numbers<T: SimdReal>(
    queries: &[T],
    base: &[T],
    metric: Metric,
    dim: usize,
    candidates: &Candidates<'_>,
    level: Level,
    job: &Job,
) -> Result<Vec<T>> {
    let distances = |pairs: &[(u32, u32)], distances: &mut [T]| {
        let mut to = distances.iter_mut();
        let on_sum = |_, sum| {
            if let Some(to) = to.next() {
                *to = metric.distance(sum);
            }
        };
        exact::PairSums { metric, queries, base, dim, pairs, on_sum }.compute(level);
    };
    each(candidates, TASK_PAIRS, distances, job)
}

/// The distances of pairs of rows of bits.
struct BitPairs<'a> {
    metric: Metric,
    width: usize,
    from: &'a [u64],
    to: &'a [u64],
    pairs: &'a [(u32, u32)],
    distances: &'a mut [f32],
}

impl WithSimd for BitPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { metric, width, from, to, pairs, distances } = self;
        for (distance, (query, row)) in distances.iter_mut().zip(pairs) {
            let (x, y) =
                (&from[*query as usize * width..][..width], &to[*row as usize * width..][..width]);
            *distance = metric.distance_of_bits(x, y);
        }
    }
}

/// The distances of all pairs, in their order.
fn each<T: Real>(
    candidates: &Candidates<'_>,
    together: usize,
    distances: impl Fn(&[(u32, u32)], &mut [T]) + Sync,
    job: &Job,
) -> Result<Vec<T>> {
    let mut gathered = vec![T::ZERO; candidates.len()];
    try_in_parallel(gathered.chunks_mut(together).enumerate(), |(task, part): (_, &mut [T])| {
        job.check()?;
        let pairs = candidates.pairs_from(task * together).take(part.len());
        let pairs: Vec<_> = pairs.map(|(query, row)| (query as u32, row)).collect();
        distances(&pairs, part);
        Ok::<_, Error>(())
    })?;
    Ok(gathered)
}
