//! The nearest of few base rows in few dimensions, by comparing every pair.

use pulp::{Simd, WithSimd};

use crate::device::contract::{Distances, Neighbors, Pairing, QueryRows, Work};
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::device::cpu::simd::soa::{SIDE_BY_SIDE, SoaRows, fold_squares};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::metric::Metric;
use crate::parallel::try_in_parallel;
use crate::rows::Rows;

/// `(dim, rows)` up to which comparing every pair is the fastest search for the nearest base row.
const SMALL_BASES: [(usize, usize); 3] = [(32, 4096), (256, 128), (usize::MAX, 64)];
/// Bytes of the queries of a task, and their number at most.
const TASK_BYTES: usize = 512 << 10;
const TASK_QUERIES: usize = 2048;

/// Whether comparing every pair is the fastest search among this many base rows.
pub(super) fn is_small(dim: usize, base: usize) -> bool {
    SMALL_BASES.iter().any(|(most_dim, most_rows)| dim <= *most_dim && base <= *most_rows)
}

/// See [`SearchDevice::nearest_one`](crate::device::SearchDevice::nearest_one). `None` if
/// another method suits better.
pub(super) fn nearest_one(
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    pairing: &Pairing<'_>,
    level: Level,
    job: &Job,
) -> Option<Result<Neighbors>> {
    // Roots of different squares may be equal; the earlier row then wins.
    let plain = metric == Metric::SqEuclidean && pairing.queries == QueryRows::Separate;
    if !is_small(queries.matrix().dim(), base.len()) || !plain || base.is_empty() {
        return None;
    }
    let (dim, first) = (queries.matrix().dim(), pairing.first_base);
    if let (Some(from), Some(to)) = (queries.reals::<f32>(), base.reals::<f32>()) {
        return Some(nearest_reals(from, to, dim, first, level, job));
    }
    let (from, to) = (queries.reals::<f64>()?, base.reals::<f64>()?);
    Some(nearest_reals(from, to, dim, first, level, job))
}

fn nearest_reals<T: SimdReal>(
    queries: &[T],
    base: &[T],
    dim: usize,
    first_base: u32,
    level: Level,
    job: &Job,
) -> Result<Neighbors> {
    let count = queries.len() / dim;
    let (mut rows, mut distances) = (vec![0; count], vec![T::ZERO; count]);
    let task = (TASK_BYTES / (dim * size_of::<T>())).clamp(SIDE_BY_SIDE, TASK_QUERIES);
    let task = task.next_multiple_of(SIDE_BY_SIDE);
    let into = rows.chunks_mut(task).zip(distances.chunks_mut(task));
    try_in_parallel(queries.chunks(task * dim).zip(into), |(queries, (rows, distances))| {
        job.check()?;
        let queries = SoaRows::new(queries, dim);
        level.dispatch(ArgminSmall { queries: &queries, base, rows, distances });
        rows.iter_mut().for_each(|row| *row += first_base);
        Ok::<_, Error>(())
    })?;
    let pairs = count as u64 * (base.len() / dim) as u64;
    let work = Work { pairs, ..Work::default() };
    Ok(Neighbors::new(1, rows, Distances::of(distances), work))
}

/// The nearest base row of every query, the first in case of a tie, and its squared distance.
struct ArgminSmall<'a, T> {
    queries: &'a SoaRows<T>,
    base: &'a [T],
    rows: &'a mut [u32],
    distances: &'a mut [T],
}

impl<T: SimdReal> WithSimd for ArgminSmall<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let dim = self.queries.dim;
        let groups = self.queries.columns.chunks_exact(dim);
        let out = self.rows.chunks_mut(SIDE_BY_SIDE).zip(self.distances.chunks_mut(SIDE_BY_SIDE));
        for (group, (rows, distances)) in groups.zip(out) {
            // The numbers of few rows are exact in any type.
            let (mut best, mut numbers) = ([T::ZERO; SIDE_BY_SIDE], [T::ZERO; SIDE_BY_SIDE]);
            fold_squares::<S, T, _>(
                simd,
                group,
                self.base,
                (T::splat(simd, T::INFINITY), T::splat(simd, T::ZERO)),
                #[inline(always)]
                |(best, nearest), number, squares| {
                    let nearest = T::where_less(simd, squares, best, number, nearest);
                    (T::lesser(simd, squares, best), nearest)
                },
                #[inline(always)]
                |register, (least, nearest)| {
                    T::vectors_mut::<S>(&mut best)[register] = least;
                    T::vectors_mut::<S>(&mut numbers)[register] = nearest;
                },
            );
            for (row, number) in rows.iter_mut().zip(numbers) {
                *row = number.whole();
            }
            distances.copy_from_slice(&best[..distances.len()]);
        }
    }
}
