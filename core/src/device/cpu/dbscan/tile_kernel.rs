//! The comparison of a row of numbers with a tile of rows, in registers.

use pulp::{Simd, WithSimd};

use super::tiles::LANES;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::metric::Sum;

/// Registers that are summed side by side: enough for sums not to wait for each other.
const SUM_REGISTERS: usize = 4;

/// Dimensions between two checks whether all sums exceed the limit.
const DIMS_BETWEEN_CHECKS: usize = 32;

/// `(inside, outside)`: a sum or distance up to `inside` is certainly within eps, one above `outside` certainly not.
#[derive(Debug, Clone, Copy)]
pub(super) struct CertainBounds<T>(pub T, pub T);

/// Two sets of rows of a tile: those certainly within eps of a row, and those possibly. Products and sums are
/// rounded one by one, in ascending order of dimensions.
pub(super) struct RowTileKernel<'a, T> {
    pub sum: Sum,
    pub query: &'a [T],
    /// Values of the tile: [`LANES`] of the first dimension, [`LANES`] of the next, …
    pub columns: &'a [T],
    /// For products: one over the row's length, and over those of the tile's rows.
    pub inverse: T,
    pub inverses: &'a [T],
    pub limits: CertainBounds<T>,
}

/// The rows of a tile that may be within eps of a row in a box: their sums with the nearest point of the
/// box, rounded as those of two rows, do not pass the limit. For sums of squares or magnitudes, which can
/// only be more with a row in the box.
pub(super) struct BoxTileKernel<'a, T> {
    pub sum: Sum,
    /// The least and the largest value of each dimension, at most as many as columns have.
    pub low: &'a [T],
    pub high: &'a [T],
    pub columns: &'a [T],
    /// Sums above this are not within eps for certain.
    pub limit: T,
}

impl<T: SimdReal> WithSimd for BoxTileKernel<'_, T> {
    type Output = u64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> u64 {
        let lanes = size_of::<T::Register<S>>() / size_of::<T>();
        let mut may_be = 0;
        for first in (0..LANES / lanes).step_by(SUM_REGISTERS) {
            let mut sums = [T::splat(simd, T::ZERO); SUM_REGISTERS];
            let sides = self.low.iter().zip(self.high);
            for ((low, high), column) in sides.zip(self.columns.chunks_exact(LANES)) {
                let (low, high) = (T::splat(simd, *low), T::splat(simd, *high));
                let column = &T::vectors::<S>(column)[first..first + SUM_REGISTERS];
                for (sum, x) in sums.iter_mut().zip(column) {
                    let nearest = T::where_less(simd, *x, low, low, *x);
                    let nearest = T::where_less(simd, high, nearest, high, nearest);
                    let difference = T::minus(simd, *x, nearest);
                    let term = match self.sum {
                        Sum::Squares => T::times(simd, difference, difference),
                        _ => T::magnitude(simd, difference),
                    };
                    *sum = T::plus(simd, *sum, term);
                }
            }
            if is_beyond(simd, &sums, self.limit) {
                continue;
            }
            for (i, sum) in sums.into_iter().enumerate() {
                may_be |= at_most(simd, sum, self.limit) << ((first + i) * lanes);
            }
        }
        may_be
    }
}

impl<T: SimdReal> WithSimd for RowTileKernel<'_, T> {
    type Output = (u64, u64);

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> (u64, u64) {
        match self.sum {
            Sum::Squares => self.all(simd, |simd, sum, x, y| {
                let difference = T::minus(simd, x, y);
                T::plus(simd, sum, T::times(simd, difference, difference))
            }),
            Sum::Absolute => self.all(simd, |simd, sum, x, y| {
                T::plus(simd, sum, T::magnitude(simd, T::minus(simd, x, y)))
            }),
            _ => self.all(simd, |simd, sum, x, y| T::plus(simd, sum, T::times(simd, x, y))),
        }
    }
}

impl<T: SimdReal> RowTileKernel<'_, T> {
    #[inline(always)]
    fn all<S: Simd>(
        &self,
        simd: S,
        add: impl Fn(S, T::Register<S>, T::Register<S>, T::Register<S>) -> T::Register<S>,
    ) -> (u64, u64) {
        let lanes = size_of::<T::Register<S>>() / size_of::<T>();
        let (mut sure, mut may_be) = (0, 0);
        for first in (0..LANES / lanes).step_by(SUM_REGISTERS) {
            let mut sums = [T::splat(simd, T::ZERO); SUM_REGISTERS];
            let stretches = self
                .query
                .chunks(DIMS_BETWEEN_CHECKS)
                .zip(self.columns.chunks(DIMS_BETWEEN_CHECKS * LANES));
            for (query, columns) in stretches {
                for (x, column) in query.iter().zip(columns.chunks_exact(LANES)) {
                    let x = T::splat(simd, *x);
                    let column = &T::vectors::<S>(column)[first..first + SUM_REGISTERS];
                    for (sum, y) in sums.iter_mut().zip(column) {
                        *sum = add(simd, *sum, x, *y);
                    }
                }
                // Sums of products may fall again.
                if query.len() == DIMS_BETWEEN_CHECKS
                    && self.sum != Sum::Products
                    && is_beyond(simd, &sums, self.limits.1)
                {
                    break;
                }
            }
            if self.sum == Sum::Products {
                let one = T::splat(simd, T::ONE);
                let inverse = T::splat(simd, self.inverse);
                let others = &T::vectors::<S>(self.inverses)[first..first + SUM_REGISTERS];
                for (sum, other) in sums.iter_mut().zip(others) {
                    *sum =
                        T::minus(simd, one, T::times(simd, *sum, T::times(simd, inverse, *other)));
                }
            }
            if is_beyond(simd, &sums, self.limits.1) {
                continue;
            }
            for (i, sum) in sums.into_iter().enumerate() {
                let place = (first + i) * lanes;
                sure |= at_most(simd, sum, self.limits.0) << place;
                may_be |= at_most(simd, sum, self.limits.1) << place;
            }
        }
        (sure, may_be)
    }
}

/// Whether all sums have passed the limit.
#[inline(always)]
fn is_beyond<T: SimdReal, S: Simd>(
    simd: S,
    sums: &[T::Register<S>; SUM_REGISTERS],
    limit: T,
) -> bool {
    let [a, b, c, d] = *sums;
    let least = T::lesser(simd, T::lesser(simd, a, b), T::lesser(simd, c, d));
    !T::any_at_most(simd, least, T::splat(simd, limit))
}

/// A bit for each lane that is at most the limit. No lane is NaN.
#[inline(always)]
fn at_most<T: SimdReal, S: Simd>(simd: S, sum: T::Register<S>, limit: T) -> u64 {
    // Each lane has a power of two of its own: their sum is exact.
    let powers: [T; 16] = std::array::from_fn(|i| T::from_f64((1u64 << i) as f64));
    let power = T::vectors::<S>(&powers)[0];
    let (zero, limit) = (T::splat(simd, T::ZERO), T::splat(simd, limit));
    let bits = T::where_less(simd, limit, sum, zero, power);
    T::total(simd, bits).to_f64() as u64
}
