//! Quantised rows that are queries of many bases, all encoded by the same quantiser.

use super::base::{QuantizedBase, RoundingError};
use super::quantizer::{Quantizer, TOGETHER};
use super::query_bound::{Bound, QuantizedQuery};
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::parallel::try_in_parallel;

/// Quantised rows as queries, which are compared by squares.
pub(in crate::device::cpu) struct QuantizedRows {
    /// The words of all rows, `length` of each.
    words: Vec<i32>,
    length: usize,
    rows: Vec<QuantizedRow>,
    /// The rounding error of the sums that are bounded.
    rounding: RoundingError,
    reserved: Reserved,
}

#[derive(Clone, Copy, Default)]
struct QuantizedRow {
    /// The length of the rounding residual; infinite if there is no bound.
    residual: f64,
    square: f64,
    /// See [`QuantizedQuery`].
    offset: f64,
}

impl QuantizedRows {
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
    pub fn new<T: SimdReal>(
        values: &[T],
        dim: usize,
        quantizer: &Quantizer,
        job: &Job,
    ) -> Result<Self> {
        let (count, length) = (values.len() / dim, dim.div_ceil(quantizer.width.per_word()));
        let bytes = count * (length * size_of::<i32>() + size_of::<QuantizedRow>());
        let reserved = job.reserve("quantised rows", bytes)?;
        let mut words = vec![0; count * length];
        let mut rows = vec![QuantizedRow::default(); count];
        let parts = words.chunks_mut(TOGETHER * length).zip(rows.chunks_mut(TOGETHER));
        let parts = parts.zip(values.chunks(TOGETHER * dim));
        try_in_parallel(parts, |((words, rows), values)| {
            job.check()?;
            let mut numbers = Vec::with_capacity(dim);
            let each = rows.iter_mut().zip(words.chunks_exact_mut(length));
            for ((row, words), values) in each.zip(values.chunks_exact(dim)) {
                let rounded =
                    quantizer.round(values, &quantizer.centre, quantizer.step, &mut numbers);
                if quantizer.is_too_long(&rounded, quantizer.step) {
                    row.residual = f64::INFINITY;
                    continue;
                }
                let sum: i64 = numbers.iter().map(|x| i64::from(*x)).sum();
                *row = QuantizedRow {
                    residual: rounded.residual,
                    square: rounded.square,
                    offset: quantizer.offset() * sum as f64,
                };
                quantizer.write_words(&numbers, words);
            }
            Ok::<_, crate::Error>(())
        })?;
        let rounding = RoundingError::of::<T>(dim as f64);
        Ok(Self { words, length, rows, rounding, reserved })
    }

    /// Frees the rows, which must not be used afterwards.
    pub fn clear(&mut self) {
        (self.words, self.rows) = (Vec::new(), Vec::new());
        self.reserved.shrink_to(0);
    }

    /// The words of a row.
    pub fn words(&self, row: usize) -> &[i32] {
        &self.words[row * self.length..][..self.length]
    }

    /// A row as a query of a base.
    pub fn query(&self, row: usize, base: &QuantizedBase) -> QuantizedQuery {
        let QuantizedRow { residual, square, offset } = self.rows[row];
        let bound = match residual.is_finite() {
            true => self.rounding.squares(base, residual, square),
            false => Bound::None,
        };
        QuantizedQuery { offset, integral: None, far: false, known: (f64::NAN, i32::MIN), bound }
    }
}
