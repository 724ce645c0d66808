//! Rows dimension by dimension, so that a register holds an element of many rows.

use crate::matrix::Real;
use crate::metric::{Metric, Sum};

/// Number of rows whose sums are formed together.
pub(in crate::device::cpu) const SIDE_BY_SIDE: usize = 32;

/// One dimension of rows side by side.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct Column<T>(pub [T; SIDE_BY_SIDE]);

/// Rows, `SIDE_BY_SIDE` at a time and dimension by dimension.
pub(in crate::device::cpu) struct Transposed<T> {
    pub columns: Vec<Column<T>>,
    pub dim: usize,
}

impl<T: Real> Transposed<T> {
    pub fn new(values: &[T], dim: usize) -> Self {
        let rows = values.len() / dim;
        let mut columns = vec![Column([T::ZERO; SIDE_BY_SIDE]); rows.div_ceil(SIDE_BY_SIDE) * dim];
        for (row, values) in values.chunks_exact(dim).enumerate() {
            let group = &mut columns[row / SIDE_BY_SIDE * dim..][..dim];
            for (column, value) in group.iter_mut().zip(values) {
                column.0[row % SIDE_BY_SIDE] = *value;
            }
        }
        Self { columns, dim }
    }

    /// The distance of every row from a query, in the contract's order.
    pub fn costs(&self, metric: Metric, query: &[T], out: &mut [T]) {
        let squares = metric.sum() == Sum::Squares;
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for (group, out) in
                    self.columns.chunks_exact(self.dim).zip(out.chunks_mut(SIDE_BY_SIDE))
                {
                    let mut sums = [T::ZERO; SIDE_BY_SIDE];
                    for (column, q) in group.iter().zip(query) {
                        for (sum, x) in sums.iter_mut().zip(&column.0) {
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
