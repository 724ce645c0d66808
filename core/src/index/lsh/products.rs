//! Dot products of rows and planes, in SIMD registers.

use pulp::{Simd, WithSimd};

use crate::matrix::Real;

/// Planes are padded to a multiple of this; the width of a register divides it.
const LANES: usize = 8;

/// Rows whose sums are accumulated together, to hide the latency of additions.
const TOGETHER: usize = 4;

/// The coefficients of planes by dimension, padded to a multiple of [`LANES`].
pub(super) fn padded(planes: &[Vec<f64>]) -> Vec<f64> {
    let padded = planes.len().next_multiple_of(LANES);
    let mut numbers = vec![0.0; planes.first().map_or(0, Vec::len) * padded];
    for (i, plane) in planes.iter().enumerate() {
        plane.iter().enumerate().for_each(|(j, x)| numbers[j * padded + i] = *x);
    }
    numbers
}

/// The dot products of rows and planes.
pub(super) struct PlaneProducts<'a, T> {
    pub rows: &'a [T],
    pub dim: usize,
    pub planes: &'a [f64],
    pub count: usize,
    pub values: &'a mut [f64],
}

impl<T: Real> WithSimd for PlaneProducts<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { rows, dim, planes, count, values } = self;
        let padded = count.next_multiple_of(LANES);
        let (planes, _) = S::as_simd_f64s(planes);
        // Registers of a dimension's coefficients; the last ones may be padding alone.
        let registers = padded / S::F64_LANES;
        let used = count.div_ceil(S::F64_LANES);
        let mut sums = vec![0.0; padded];
        let rows_of = rows.chunks(dim * TOGETHER).zip(values.chunks_mut(count * TOGETHER));
        for (rows, values) in rows_of {
            // The last row is repeated up to `TOGETHER`.
            let some = rows.len() / dim;
            let rows: [&[T]; TOGETHER] =
                std::array::from_fn(|i| &rows[i.min(some - 1) * dim..][..dim]);
            for register in (0..used).step_by(2) {
                // Two registers at a time, so that each value of a row is loaded once for both.
                let other = (register + 1).min(registers - 1);
                let mut added = [[simd.splat_f64s(0.0); 2]; TOGETHER];
                for j in 0..dim {
                    let planes = [planes[j * registers + register], planes[j * registers + other]];
                    for i in 0..TOGETHER {
                        let x = simd.splat_f64s(rows[i][j].to_f64());
                        for (added, plane) in added[i].iter_mut().zip(planes) {
                            *added = simd.mul_add_f64s(x, plane, *added);
                        }
                    }
                }
                for (i, added) in added.iter().enumerate().take(some) {
                    for (added, register) in added.iter().zip(register..used) {
                        let first = register * S::F64_LANES;
                        let here = S::F64_LANES.min(count - first);
                        let (to, _) = S::as_mut_simd_f64s(&mut sums);
                        to[0] = *added;
                        values[i * count + first..][..here].copy_from_slice(&sums[..here]);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Registers of any width give the same bits, for any number of planes.
    #[test]
    fn every_processor_has_the_same_products() {
        let (dim, count) = (5, 7);
        let mut random = Random::new(3);
        let rows: Vec<f32> = (0..count * dim).map(|_| random.normal() as f32).collect();
        for planes in (1..=17).chain([26]) {
            let planes: Vec<Vec<f64>> =
                (0..planes).map(|_| (0..dim).map(|_| random.normal()).collect()).collect();
            let of = |row: &[f32], plane: &[f64]| {
                row.iter().zip(plane).fold(0.0, |sum, (x, a)| f64::from(*x).mul_add(*a, sum))
            };
            let expected: Vec<f64> = rows
                .chunks_exact(dim)
                .flat_map(|row| planes.iter().map(move |plane| of(row, plane)))
                .collect();
            let numbers = padded(&planes);
            let mut computed = vec![0.0; expected.len()];
            let count = planes.len();
            let values = &mut computed;
            let products = PlaneProducts { rows: &rows, dim, planes: &numbers, count, values };
            pulp::Arch::new().dispatch(products);
            assert_eq!(computed, expected, "{count}");
            computed.fill(0.0);
            let values = &mut computed;
            let products = PlaneProducts { rows: &rows, dim, planes: &numbers, count, values };
            products.with_simd(pulp::Scalar::new());
            assert_eq!(computed, expected, "{count}, without SIMD");
            #[cfg(target_arch = "x86_64")]
            if let Some(simd) = pulp::x86::V3::try_new() {
                computed.fill(0.0);
                let values = &mut computed;
                let products = PlaneProducts { rows: &rows, dim, planes: &numbers, count, values };
                Simd::vectorize(simd, products);
                assert_eq!(computed, expected, "{count}, AVX2");
            }
        }
    }
}
