//! All distances by one matrix product, then exact ones for the few that matter.
//!
//! `‖q − x‖² = ‖q‖² + ‖x‖² − 2 q·x`, and the product of a block of queries with a block of base
//! rows runs at the speed of a matrix multiplication. It rounds differently from the sum that the
//! contract asks for, but by a bounded amount: with u half the gap after 1 and d the dimension,
//!
//! - squares: `|product − sum| ≤ E = 2 (d + 8) u (‖q‖ + ‖x‖)²`. The product's own rounding is at
//!   most `γ_d · 2‖q‖‖x‖ ≤ γ_d (‖q‖ + ‖x‖)² / 2`, the contract's sum is off by at most
//!   `(d + 2) u (‖q‖ + ‖x‖)²` (Higham 2002, §3.1), norms, centring and final additions take the rest;
//! - products: `E = 2 (d + 8) u ‖q‖‖x‖`, likewise.
//!
//! Each pair therefore has a lower and an upper bound, and a query keeps every row whose lower
//! bound is not above the k-th smallest upper bound. Those rows, about k of them, get their sum in
//! the contract's order. A query that would keep too many settles them at once; the answer is exact
//! either way. Rows far from the origin are centred first, so that the norms in E stay small.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use pulp::{Simd, WithSimd};

use super::bounds::{Bounds, Candidates};
use super::sink::Sink;
use super::traversal::{Arithmetic, BLOCK_ROWS, Block, Visit};
use crate::device::contract::Work;
use crate::device::cpu::simd::lanes::Lanes;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::matrix::{Real, Rows};
use crate::metric::{Metric, Sum};
use crate::parallel::fill_on_threads;

/// Rows that are prepared between two checks for cancellation.
const ROWS_UNCHECKED: usize = 8192;

/// Norms between these have squares and products that neither over- nor underflow, in f32 or f64.
const SAFE_NORMS: std::ops::RangeInclusive<f64> = 1e-12..=1e15;

/// Base rows with the values that the bounds need.
#[derive(Debug)]
pub(super) struct Product<T> {
    rows: Rows,
    metric: Metric,
    /// The mean of the rows, and the rows minus the mean; `None` if the mean is near the origin.
    centred: Option<(Vec<T>, Vec<T>)>,
    /// `‖x‖` of each row, rounded up.
    norms: Vec<T>,
    /// The initial value of a lower bound: `‖x‖² (1 − e)` for squares, 0 for products.
    offsets: Vec<T>,
    _reserved: Reserved,
}

impl<T: Lanes> Product<T> {
    /// `None` if the rows are too large or too small for products without overflow.
    pub fn try_new(rows: &Rows, values: &[T], metric: Metric, job: &Job) -> Result<Option<Self>> {
        let dim = rows.matrix().dim();
        let squares = metric.sum() == Sum::Squares;
        let of_rows = rows.len() * (2 * size_of::<T>() + size_of::<f64>());
        let mut reserved = job
            .reserve("base rows for products", of_rows + if squares { rows.bytes() } else { 0 })?;
        let centred = if squares { centre(values, dim, job)? } else { None };
        if squares && centred.is_none() {
            reserved.shrink_to(of_rows);
        }
        let used = centred.as_ref().map_or(values, |(_, centred)| centred);
        let e = Bounds::<T>::unit(dim);
        let mut exact = vec![0.0; rows.len()];
        fill_on_threads(&mut exact, 1, |first, part| {
            for (i, norms) in part.chunks_mut(ROWS_UNCHECKED).enumerate() {
                job.check()?;
                let rows = used[(first + i * ROWS_UNCHECKED) * dim..].chunks_exact(dim);
                norms.iter_mut().zip(rows).for_each(|(to, row)| *to = norm(row));
            }
            Ok(())
        })?;
        if !used.chunks_exact(dim).zip(&exact).all(|(row, norm)| is_safe(row, *norm)) {
            return Ok(None);
        }
        let norms = exact.iter().map(|norm| round_up(*norm)).collect();
        let offset = |norm: &f64| if squares { norm * norm * (1.0 - e) } else { 0.0 };
        let offsets = exact.iter().map(|norm| T::from_f64(offset(norm))).collect();
        let (rows, _reserved) = (rows.clone(), reserved);
        Ok(Some(Self { rows, metric, centred, norms, offsets, _reserved }))
    }

    /// The rows that the product multiplies.
    fn multiplied(&self) -> &[T] {
        match &self.centred {
            Some((_, centred)) => centred,
            None => self.exact(),
        }
    }

    /// The products of some rows with queries.
    fn multiply(&self, rows: std::ops::Range<usize>, queries: &[T], products: &mut [T]) {
        let dim = self.rows.matrix().dim();
        let (count, columns) = (rows.len(), queries.len() / dim);
        matmul(
            MatMut::from_column_major_slice_mut(products, count, columns),
            Accum::Replace,
            MatRef::from_row_major_slice(
                &self.multiplied()[rows.start * dim..rows.end * dim],
                count,
                dim,
            ),
            MatRef::from_column_major_slice(queries, dim, columns),
            T::ONE,
            Par::Seq,
        );
    }

    /// The original rows.
    fn exact(&self) -> &[T] {
        self.rows.reals().unwrap_or_default()
    }
}

impl<T: Lanes> Arithmetic<T> for Product<T> {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn scan<K: Sink<T>>(
        &self,
        queries: &Block<'_, T>,
        visit: &Visit<'_>,
        sinks: &mut [K],
    ) -> Result<Work> {
        let dim = self.rows.matrix().dim();
        let arch = pulp::Arch::new();
        let moved: Vec<T>;
        let multiplied = match &self.centred {
            Some((mean, _)) => {
                moved = queries.values.chunks_exact(dim).flat_map(|q| minus(q, mean)).collect();
                &moved
            }
            None => queries.values,
        };
        let bounds: Vec<_> = multiplied
            .chunks_exact(dim)
            .map(|query| {
                let norm = norm(query);
                is_safe(query, norm).then(|| Bounds::<T>::new(self.metric, dim, norm))
            })
            .collect();
        let most = sinks.first().map_or(0, |sink| Candidates::<T>::most(sink.most()));
        let of_query = most.min(self.rows.len()) * Candidates::<T>::BYTES;
        let of_query = of_query + BLOCK_ROWS * size_of::<T>();
        let _reserved = visit.job.reserve("candidates", sinks.len() * of_query)?;
        let mut candidates: Vec<_> =
            sinks.iter().map(|sink| Candidates::new(sink.most(), sink.reach())).collect();
        let mut products = vec![T::ZERO; BLOCK_ROWS * sinks.len()];
        let mut work = Work::default();
        for block in visit.blocks() {
            visit.job.check()?;
            let rows = visit.rows_of(block);
            work.pairs += (rows.len() * sinks.len()) as u64;
            let products = &mut products[..rows.len() * sinks.len()];
            self.multiply(rows.clone(), multiplied, products);
            for (i, candidates) in candidates.iter_mut().enumerate() {
                work.rechecked += arch.dispatch(Sift {
                    base: self,
                    rows: rows.clone(),
                    products: &products[i * rows.len()..][..rows.len()],
                    query: &queries.values[i * dim..][..dim],
                    position: queries.first + i,
                    bounds: bounds[i].as_ref(),
                    visit,
                    candidates,
                });
            }
        }
        for (i, (candidates, sink)) in candidates.into_iter().zip(sinks).enumerate() {
            visit.job.check()?;
            let query = &queries.values[i * dim..][..dim];
            work.rechecked += arch.dispatch(Settle { base: self, query, visit, candidates, sink });
        }
        Ok(work)
    }
}

/// Keeps the rows of a block that may be among a query's nearest.
struct Sift<'a, T> {
    base: &'a Product<T>,
    rows: std::ops::Range<usize>,
    products: &'a [T],
    query: &'a [T],
    /// Position of the query among all of the call.
    position: usize,
    /// `None` if the query's norm allows no bound: every row is then computed exactly.
    bounds: Option<&'a Bounds<T>>,
    visit: &'a Visit<'a>,
    candidates: &'a mut Candidates<T>,
}

impl<T: Lanes> WithSimd for Sift<'_, T> {
    type Output = u64;

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) -> u64 {
        let Some(bounds) = self.bounds else {
            return self.compute_all();
        };
        const STEP: usize = 64;
        let mut rechecked = 0;
        let rows = self.rows.clone();
        let whole = rows.len() / STEP * STEP;
        let factor = T::splat(simd, bounds.factor);
        let slope = T::splat(simd, -bounds.slope);
        for first in (0..whole).step_by(STEP) {
            let limit = T::splat(simd, bounds.relative(self.candidates.limit()));
            let at = rows.start + first..rows.start + first + STEP;
            let products = T::vectors::<S>(&self.products[first..first + STEP]);
            let offsets = T::vectors::<S>(&self.base.offsets[at.clone()]);
            let norms = T::vectors::<S>(&self.base.norms[at]);
            let mut least = T::splat(simd, T::INFINITY);
            for ((product, offset), norm) in products.iter().zip(offsets).zip(norms) {
                let lower = T::times_plus(simd, *product, factor, *offset);
                least = T::lesser(simd, least, T::times_plus(simd, slope, *norm, lower));
            }
            if T::any_at_most::<S>(simd, least, limit) {
                rechecked += self.keep(bounds, first..first + STEP);
            }
        }
        rechecked + self.keep(bounds, whole..rows.len())
    }
}

impl<T: Lanes> Sift<'_, T> {
    /// Keeps those of these rows of the block whose lower bound is within the limit.
    #[inline(always)]
    fn keep(&mut self, bounds: &Bounds<T>, range: std::ops::Range<usize>) -> u64 {
        let mut rechecked = 0;
        for i in range {
            let base = self.rows.start + i;
            let (offset, norm) = (self.base.offsets[base], self.base.norms[base]);
            let lower = bounds.lower(self.products[i], offset, norm);
            if lower <= self.candidates.limit() && !self.visit.is_itself(self.position, base) {
                let upper = lower + bounds.width(norm);
                self.candidates.push(lower, upper, base as u32);
                if self.candidates.is_full() {
                    rechecked += tighten(self.base, self.query, self.candidates);
                }
            }
        }
        rechecked
    }

    #[inline(always)]
    fn compute_all(&mut self) -> u64 {
        let mut rechecked = 0;
        for base in self.rows.clone() {
            if !self.visit.is_itself(self.position, base) {
                let sum = sum(self.base, self.query, base as u32);
                self.candidates.push(sum, sum, base as u32);
                if self.candidates.is_full() {
                    rechecked += tighten(self.base, self.query, self.candidates);
                }
            }
        }
        rechecked + self.rows.len() as u64
    }
}

/// Computes the candidates exactly and offers them to the query's sink.
struct Settle<'a, T, K> {
    base: &'a Product<T>,
    query: &'a [T],
    visit: &'a Visit<'a>,
    candidates: Candidates<T>,
    sink: &'a mut K,
}

impl<T: Lanes, K: Sink<T>> WithSimd for Settle<'_, T, K> {
    type Output = u64;

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _simd: S) -> u64 {
        self.candidates.prune(self.base.metric);
        let rechecked = self.candidates.settle(|row| sum(self.base, self.query, row));
        for (sum, row) in self.candidates.into_sums() {
            self.sink.offer(sum, self.visit.number(row as usize));
        }
        rechecked
    }
}

/// Makes room among the candidates; computes them exactly if the bounds alone do not.
#[inline(always)]
fn tighten<T: Lanes>(base: &Product<T>, query: &[T], candidates: &mut Candidates<T>) -> u64 {
    candidates.prune(base.metric);
    if !candidates.is_crowded() {
        return 0;
    }
    let rechecked = candidates.settle(|row| sum(base, query, row));
    candidates.cut(base.metric);
    rechecked
}

/// The sum of the contract.
#[inline(always)]
fn sum<T: Lanes>(base: &Product<T>, query: &[T], row: u32) -> T {
    let values = &base.exact()[row as usize * query.len()..][..query.len()];
    base.metric.sum_of(query, values)
}

/// The mean, and the rows minus the mean, if the mean is much farther from the origin than the rows
/// are from the mean.
fn centre<T: Real>(values: &[T], dim: usize, job: &Job) -> Result<Option<(Vec<T>, Vec<T>)>> {
    let rows = values.len() / dim;
    let mut mean = vec![0.0f64; dim];
    let mut square = 0.0;
    for (i, row) in values.chunks_exact(dim).enumerate() {
        if i % ROWS_UNCHECKED == 0 {
            job.check()?;
        }
        for (mean, x) in mean.iter_mut().zip(row) {
            let x = x.to_f64();
            *mean += x;
            square += x * x;
        }
    }
    mean.iter_mut().for_each(|x| *x /= rows.max(1) as f64);
    let of_mean: f64 = mean.iter().map(|x| x * x).sum();
    let spread = (square / rows.max(1) as f64 - of_mean).max(0.0);
    if of_mean <= 16.0 * spread {
        return Ok(None);
    }
    let mean: Vec<T> = mean.into_iter().map(T::from_f64).collect();
    let mut centred = vec![T::ZERO; values.len()];
    fill_on_threads(&mut centred, dim, |first, part| {
        let rows = values[first * dim..].chunks_exact(dim);
        for (i, (to, row)) in part.chunks_exact_mut(dim).zip(rows).enumerate() {
            if i % ROWS_UNCHECKED == 0 {
                job.check()?;
            }
            to.iter_mut().zip(minus(row, &mean)).for_each(|(to, x)| *to = x);
        }
        Ok(())
    })?;
    Ok(Some((mean, centred)))
}

fn minus<'a, T: Real>(row: &'a [T], mean: &'a [T]) -> impl Iterator<Item = T> + 'a {
    row.iter().zip(mean).map(|(x, m)| *x - *m)
}

fn norm<T: Real>(row: &[T]) -> f64 {
    row.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>().sqrt()
}

/// Whether a row of this norm has bounds. A norm of 0 may come from elements too small to square.
fn is_safe<T: Real>(row: &[T], norm: f64) -> bool {
    SAFE_NORMS.contains(&norm) || row.iter().all(|x| *x == T::ZERO)
}

/// The norm in the rows' precision, rounded up.
fn round_up<T: Real>(norm: f64) -> T {
    T::from_f64(norm * (1.0 + 2.0 * T::EPSILON.to_f64()))
}
