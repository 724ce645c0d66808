//! The nearest of few base rows in few dimensions, by comparing every pair.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use crate::device::contract::{Distances, Neighbors, Pairing, QueryRows, Work};
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::transposed::{SIDE_BY_SIDE, Transposed, squares};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::Rows;
use crate::metric::Metric;

/// Up to this many dimensions and base rows, comparing every pair is the fastest way to the nearest.
const FEW: [(usize, usize); 3] = [(32, 4096), (256, 128), (usize::MAX, 64)];
/// Bytes of the queries of a task, and their number at most.
const TASK_BYTES: usize = 512 << 10;
const TASK_QUERIES: usize = 2048;

/// Whether every pair may be compared with this many base rows.
pub(super) fn is_small(dim: usize, base: usize) -> bool {
    FEW.iter().any(|(most_dim, most_rows)| dim <= *most_dim && base <= *most_rows)
}

/// See [`SearchDevice::nearest_one`](crate::device::SearchDevice::nearest_one). `None` if
/// another method suits better.
pub(super) fn nearest_one(
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    pairing: &Pairing<'_>,
    job: &Job,
) -> Option<Result<Neighbors>> {
    // Roots of different squares may be equal; the earlier row then wins.
    let plain = metric == Metric::SqEuclidean && pairing.queries == QueryRows::Separate;
    if !is_small(queries.matrix().dim(), base.len()) || !plain || base.is_empty() {
        return None;
    }
    if let (Some(from), Some(to)) = (queries.reals::<f32>(), base.reals::<f32>()) {
        return Some(nearest_reals(from, to, queries.matrix().dim(), pairing.first_base, job));
    }
    let (from, to) = (queries.reals::<f64>()?, base.reals::<f64>()?);
    Some(nearest_reals(from, to, queries.matrix().dim(), pairing.first_base, job))
}

fn nearest_reals<T: Lanes>(
    queries: &[T],
    base: &[T],
    dim: usize,
    first_base: u32,
    job: &Job,
) -> Result<Neighbors> {
    let count = queries.len() / dim;
    let (mut rows, mut distances) = (vec![0; count], vec![T::ZERO; count]);
    let task = (TASK_BYTES / (dim * size_of::<T>())).clamp(SIDE_BY_SIDE, TASK_QUERIES);
    let task = task.next_multiple_of(SIDE_BY_SIDE);
    queries
        .par_chunks(task * dim)
        .zip(rows.par_chunks_mut(task).zip(distances.par_chunks_mut(task)))
        .try_for_each(|(queries, (rows, distances))| {
            job.check()?;
            let queries = Transposed::new(queries, dim);
            pulp::Arch::new().dispatch(Nearest { queries: &queries, base, rows, distances });
            rows.iter_mut().for_each(|row| *row += first_base);
            Ok::<_, Error>(())
        })?;
    let pairs = count as u64 * (base.len() / dim) as u64;
    let work = Work { pairs, ..Work::default() };
    Ok(Neighbors { per_query: 1, rows, distances: Distances::of(distances), work })
}

/// The nearest base row of every query, the first in case of a tie, and its squared distance.
struct Nearest<'a, T> {
    queries: &'a Transposed<T>,
    base: &'a [T],
    rows: &'a mut [u32],
    distances: &'a mut [T],
}

/// Base rows that are compared together.
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
            // The numbers of few rows are exact in any type.
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

/// Updates the least value so far and its number with some more values, numbered from this one on.
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
