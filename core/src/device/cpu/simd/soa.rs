//! Rows dimension by dimension, so that a register holds an element of many rows.

use pulp::{Simd, WithSimd};

use super::level::Level;
use super::simd_real::SimdReal;
use crate::matrix::Real;
use crate::metric::{Metric, Sum};

/// Number of rows whose sums are formed together.
pub(in crate::device::cpu) const SIDE_BY_SIDE: usize = 32;

/// One dimension of rows side by side.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct SoaColumn<T>(pub [T; SIDE_BY_SIDE]);

/// Rows, `SIDE_BY_SIDE` at a time and dimension by dimension.
pub(in crate::device::cpu) struct SoaRows<T> {
    pub columns: Vec<SoaColumn<T>>,
    pub dim: usize,
    /// Number of rows.
    pub count: usize,
}

impl<T: Real> SoaRows<T> {
    pub fn new(values: &[T], dim: usize) -> Self {
        let rows = values.len() / dim;
        let mut columns =
            vec![SoaColumn([T::ZERO; SIDE_BY_SIDE]); rows.div_ceil(SIDE_BY_SIDE) * dim];
        for (row, values) in values.chunks_exact(dim).enumerate() {
            let group = &mut columns[row / SIDE_BY_SIDE * dim..][..dim];
            for (column, value) in group.iter_mut().zip(values) {
                column.0[row % SIDE_BY_SIDE] = *value;
            }
        }
        Self { columns, dim, count: rows }
    }

    /// Calls `on_distances` with the distances of each [`SIDE_BY_SIDE`] rows, by the number of the first, from a query,
    /// in the contract's order. It is compiled for the processor's instructions if it is always inlined.
    pub fn distances(
        &self,
        level: Level,
        metric: Metric,
        query: &[T],
        on_distances: impl FnMut(usize, &[T; SIDE_BY_SIDE]),
    ) where
        T: SimdReal,
    {
        level.dispatch(SoaDistances { rows: self, metric, query, on_distances });
    }
}

/// See [`SoaRows::distances`].
struct SoaDistances<'a, T, F> {
    rows: &'a SoaRows<T>,
    metric: Metric,
    query: &'a [T],
    on_distances: F,
}

impl<T: SimdReal, F: FnMut(usize, &[T; SIDE_BY_SIDE])> WithSimd for SoaDistances<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let Self { rows, metric, query, .. } = self;
        let squares = metric.sum() == Sum::Squares;
        for (number, group) in rows.columns.chunks_exact(rows.dim).enumerate() {
            let mut sums = [T::ZERO; SIDE_BY_SIDE];
            for (register, sum) in T::vectors_mut::<S>(&mut sums).iter_mut().enumerate() {
                for (column, q) in group.iter().zip(query) {
                    let x = T::vectors::<S>(&column.0)[register];
                    *sum = if squares {
                        let difference = T::minus(simd, T::splat(simd, *q), x);
                        T::squared_plus(simd, difference, *sum)
                    } else {
                        T::times_plus(simd, T::splat(simd, -*q), x, *sum)
                    };
                }
            }
            if !squares {
                sums.iter_mut().for_each(|sum| *sum = metric.distance(*sum));
            }
            (self.on_distances)(number * SIDE_BY_SIDE, &sums);
        }
    }
}

/// Registers of rows, and others, that are compared together.
const REGISTERS: usize = 2;
const TOGETHER: usize = 3;

/// Takes each register of rows side by side through all others, which are end to end: `fold` gets what it returned for
/// the one before, `start` at first, the number of the other one, and the squares of the distances from it. Gives the
/// number of each register and the last result to `end`.
///
/// It is compiled for the processor's instructions if the functions are always inlined.
#[inline(always)]
pub(in crate::device::cpu) fn fold_squares<S: Simd, T: SimdReal, A: Copy>(
    simd: S,
    rows: &[SoaColumn<T>],
    others: &[T],
    start: A,
    fold: impl Fn(A, T::Register<S>, T::Register<S>) -> A,
    mut end: impl FnMut(usize, A),
) {
    let (dim, one) = (rows.len(), T::splat(simd, T::ONE));
    for first in (0..T::vectors::<S>(&[T::ZERO; SIDE_BY_SIDE]).len()).step_by(REGISTERS) {
        let (mut folded, mut number) = ([start; REGISTERS], T::splat(simd, T::ZERO));
        let some = others.chunks_exact(TOGETHER * dim);
        let last = some.remainder().chunks_exact(dim);
        for some in some {
            for squares in squares::<S, T, TOGETHER>(simd, rows, first, some) {
                for (folded, squares) in folded.iter_mut().zip(squares) {
                    *folded = fold(*folded, number, squares);
                }
                number = T::plus(simd, number, one);
            }
        }
        for other in last {
            for squares in squares::<S, T, 1>(simd, rows, first, other) {
                for (folded, squares) in folded.iter_mut().zip(squares) {
                    *folded = fold(*folded, number, squares);
                }
                number = T::plus(simd, number, one);
            }
        }
        for (i, folded) in folded.into_iter().enumerate() {
            end(first + i, folded);
        }
    }
}

/// Squares of the distances of registers of rows from some others.
#[inline(always)]
fn squares<S: Simd, T: SimdReal, const OTHERS: usize>(
    simd: S,
    rows: &[SoaColumn<T>],
    first: usize,
    others: &[T],
) -> [[T::Register<S>; REGISTERS]; OTHERS] {
    let dim = rows.len();
    let others: [&[T]; OTHERS] = std::array::from_fn(|i| &others[i * dim..][..dim]);
    let mut sums = [[T::splat(simd, T::ZERO); REGISTERS]; OTHERS];
    for (j, column) in rows.iter().enumerate() {
        let registers = &T::vectors::<S>(&column.0)[first..][..REGISTERS];
        for (sums, other) in sums.iter_mut().zip(others) {
            let other = T::splat(simd, other[j]);
            for (sum, x) in sums.iter_mut().zip(registers) {
                let difference = T::minus(simd, *x, other);
                *sum = T::squared_plus(simd, difference, *sum);
            }
        }
    }
    sums
}
