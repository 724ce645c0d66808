//! Rows quantised to 16 bits and stored row by row, with lower and upper bounds on the distances of pairs.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::quantizer::{CodeLengths, Quantizer, TOGETHER};
use crate::device::cpu::simd::bounds::lower;
use crate::device::cpu::simd::dot_i16::{CacheLine, CodeLines};
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::memory::Aligned;
use crate::parallel::try_in_parallel;

/// Rows encoded to 16 bits by one quantiser.
pub(in crate::device::cpu) struct RowCodes {
    lines: Aligned<CacheLine>,
    per_row: usize,
    rows: Vec<RowNorms>,
    level: Level,
    reserved: Reserved,
}

/// The lengths of a row, in steps of the quantiser.
#[derive(Debug, Clone, Copy, Default)]
struct RowNorms {
    /// The length of the rounding residual; infinite if there is no bound.
    residual: f64,
    square: f64,
}

/// Rows of the other side in a tile: a part of an L1 cache.
const OTHERS: usize = 32;

/// Pairs whose roots are computed together.
const SIDE_BY_SIDE: usize = 8;

/// Lower and upper bound on the distance of a pair, in steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::device::cpu) struct DistanceBounds {
    pub least: f32,
    pub most: f32,
}

impl RowCodes {
    /// Quantises rows; those for which `is_too_long` holds have no bounds.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
    pub fn new<T: SimdReal>(
        values: &[T],
        quantizer: &Quantizer,
        is_too_long: impl Fn(&CodeLengths) -> bool + Sync,
        job: &Job,
    ) -> Result<Self> {
        let dim = quantizer.centre.len();
        let (count, per_row) = (values.len() / dim, CacheLine::count(dim));
        let bytes = count * (per_row * size_of::<CacheLine>() + size_of::<RowNorms>());
        let reserved = job.reserve("quantised rows", bytes)?;
        let mut lines = Aligned::<CacheLine>::zeros(count * per_row);
        let mut rows = vec![RowNorms::default(); count];
        let parts = lines.chunks_mut(TOGETHER * per_row).zip(rows.chunks_mut(TOGETHER));
        let parts = parts.zip(values.chunks(TOGETHER * dim));
        try_in_parallel(parts, |((lines, rows), values)| {
            job.check()?;
            let mut numbers = Vec::with_capacity(dim);
            let each = rows.iter_mut().zip(lines.chunks_exact_mut(per_row));
            for ((row, lines), values) in each.zip(values.chunks_exact(dim)) {
                let rounded =
                    quantizer.round(values, &quantizer.centre, quantizer.step, &mut numbers);
                if is_too_long(&rounded) {
                    // Its products could overflow 32 bits: its codes stay 0.
                    row.residual = f64::INFINITY;
                    continue;
                }
                let residual = rounded.residual / quantizer.step * (1.0 + 1e-9);
                *row = RowNorms { residual, square: rounded.square };
                CacheLine::copy(&numbers, lines);
            }
            Ok::<_, crate::Error>(())
        })?;
        Ok(Self { lines, per_row, rows, level: quantizer.level, reserved })
    }

    /// Whether all rows have bounds.
    pub fn all_have_bounds(&self) -> bool {
        self.rows.iter().all(|row| row.residual.is_finite())
    }

    /// Frees the rows, which must not be used afterwards.
    pub fn clear(&mut self) {
        (self.lines, self.rows) = (Aligned::zeros(0), Vec::new());
        self.reserved.shrink_to(0);
    }

    fn lines(&self) -> CodeLines<'_> {
        CodeLines { all: &self.lines, per_row: self.per_row }
    }

    /// Bounds on the distances of pairs of a row and a row of `others`, given by their numbers. `sums` is a buffer.
    pub fn bounds(
        &self,
        others: &Self,
        pairs: &[(u32, u32)],
        sums: &mut Vec<i32>,
        bounds: &mut Vec<DistanceBounds>,
    ) {
        self.level.dot_i16_pairs(self.lines(), others.lines(), pairs, sums);
        bounds.clear();
        self.level.dispatch(BoundPairs { rows: (&self.rows, &others.rows), pairs, sums, bounds });
    }

    /// Bounds on the distances of some rows from all rows of `others`. `least` gets lower bounds in whole steps, as many
    /// for each row as it has room for; `nearest` gets the row of `others` with the smallest upper bound, and that
    /// bound. `pairs` and `sums` are buffers.
    pub fn bounds_to_all(
        &self,
        others: &Self,
        rows: Range<usize>,
        pairs: &mut Vec<(u32, u32)>,
        sums: &mut Vec<i32>,
        least: &mut [u16],
        nearest: &mut [(u32, f32)],
    ) {
        let stride = least.len() / rows.len();
        for (part, of_part) in others.rows.chunks(OTHERS).enumerate() {
            let first = part * OTHERS;
            let numbers = first as u32..(first + of_part.len()) as u32;
            pairs.clear();
            for row in rows.clone() {
                pairs.extend(numbers.clone().map(|other| (row as u32, other)));
            }
            self.level.dot_i16_pairs(self.lines(), others.lines(), pairs, sums);
            let each = self.rows[rows.clone()].iter().zip(sums.chunks_exact(of_part.len()));
            let least = least.chunks_exact_mut(stride).map(|least| &mut least[first..]);
            for (((row, sums), least), nearest) in each.zip(least).zip(&mut *nearest) {
                self.level.dispatch(BoundTile {
                    row,
                    others: (first, of_part),
                    sums,
                    least,
                    nearest,
                });
            }
        }
    }
}

impl RowNorms {
    /// Bounds on its distance from another row, given the product of their codes.
    #[inline(always)]
    fn bounds(&self, other: &Self, product: i32) -> DistanceBounds {
        let square = self.square + other.square - 2.0 * f64::from(product);
        DistanceBounds::of(square, self.residual + other.residual)
    }
}

impl DistanceBounds {
    /// Bounds on a distance from its quantised square and the sum of both residuals.
    #[inline(always)]
    fn of(square: f64, residual: f64) -> Self {
        let positive = |x: f64| if x > 0.0 { x } else { 0.0 };
        let between = positive(square).sqrt();
        // More than the rounding errors here and of the conversion to float32.
        let error = 2.0 * f64::from(f32::EPSILON);
        let least = (positive(between - residual) * (1.0 - error)) as f32;
        let most = ((between + residual) * (1.0 + error)) as f32 + f32::MIN_POSITIVE;
        Self { least: if least < f32::MIN_POSITIVE { 0.0 } else { least }, most }
    }
}

/// Pairs of rows of both sides, see [`RowCodes::bounds`].
struct BoundPairs<'a> {
    rows: (&'a [RowNorms], &'a [RowNorms]),
    pairs: &'a [(u32, u32)],
    /// Their products.
    sums: &'a [i32],
    bounds: &'a mut Vec<DistanceBounds>,
}

impl WithSimd for BoundPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { rows: (rows, others), pairs, sums, bounds } = self;
        let (most, last) = pairs.as_chunks::<SIDE_BY_SIDE>();
        let (most_sums, last_sums) = sums.as_chunks::<SIDE_BY_SIDE>();
        for (pairs, sums) in most.iter().zip(most_sums) {
            let [mut squares, mut residuals] = [[0.0; SIDE_BY_SIDE]; 2];
            let each = squares.iter_mut().zip(&mut residuals).zip(pairs.iter().zip(sums));
            for ((square, residual), ((row, other), sum)) in each {
                let (row, other) = (&rows[*row as usize], &others[*other as usize]);
                *square = row.square + other.square - 2.0 * f64::from(*sum);
                *residual = row.residual + other.residual;
            }
            let mut distance_bounds = [DistanceBounds { least: 0.0, most: 0.0 }; SIDE_BY_SIDE];
            for ((to, square), residual) in distance_bounds.iter_mut().zip(squares).zip(residuals) {
                *to = DistanceBounds::of(square, residual);
            }
            bounds.extend_from_slice(&distance_bounds);
        }
        bounds.extend(
            last.iter().zip(last_sums).map(|((row, other), sum)| {
                rows[*row as usize].bounds(&others[*other as usize], *sum)
            }),
        );
    }
}

/// A row and some rows of the other side, see [`RowCodes::bounds_to_all`].
struct BoundTile<'a> {
    row: &'a RowNorms,
    /// The rows of the other side, and the number of the first.
    others: (usize, &'a [RowNorms]),
    /// Their products.
    sums: &'a [i32],
    least: &'a mut [u16],
    nearest: &'a mut (u32, f32),
}

impl WithSimd for BoundTile<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { row, others: (first, others), sums, least, nearest } = self;
        let mut most = [f32::INFINITY; OTHERS];
        let each = others.iter().zip(sums).zip(least).zip(&mut most);
        for (((other, sum), least), most) in each {
            let bounds = row.bounds(other, *sum);
            (*least, *most) = (lower(bounds.least), bounds.most);
        }
        let lesser = |a: f32, b: f32| if b < a { b } else { a };
        let least = most.into_iter().fold(f32::INFINITY, lesser);
        if least < nearest.1 {
            let place = most.iter().position(|most| *most == least);
            *nearest = ((first + place.unwrap_or_default()) as u32, least);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::Sum;
    use crate::random::Random;

    #[test]
    fn rows_are_as_far_apart_as_the_bounds_say() {
        let (count, dim, job, mut random) = (300, 70, Job::default(), Random::new(3));
        for kind in 0..4 {
            let value = |i: usize, random: &mut Random| match kind {
                0 => random.normal(),
                1 => 1e4 + 1e-2 * random.normal(),
                2 => random.normal() * if i / dim % 50 == 7 { 1e3 } else { 1.0 },
                _ => random.normal() * 1e-30 * 10f64.powi((i / dim % 9) as i32),
            };
            let values: Vec<f64> = (0..count * dim).map(|i| value(i, &mut random)).collect();
            let pairs = (0..count as u32).flat_map(|a| (0..40).map(move |b| (a, b * 7)));
            let pairs: Vec<_> = pairs.collect();
            for level in Level::all() {
                let quantizer = Quantizer::fitting(&values, 0, dim, Sum::Squares, level, &job);
                let quantizer = quantizer.unwrap();
                let is_too_long = |row: &_| quantizer.is_too_long(row, quantizer.step);
                let rows = RowCodes::new(&values, &quantizer, is_too_long, &job).unwrap();
                let is_outlier = |row: &_| quantizer.is_outlier(row);
                let others = RowCodes::new(&values, &quantizer, is_outlier, &job).unwrap();
                let (mut sums, mut bounds, mut close) = (Vec::new(), Vec::new(), 0);
                rows.bounds(&others, &pairs, &mut sums, &mut bounds);
                for ((a, b), bounds) in pairs.iter().zip(&bounds) {
                    let [a, b] = [a, b].map(|row| &values[*row as usize * dim..][..dim]);
                    let square: f64 = a.iter().zip(b).map(|(x, y)| (x - y) * (x - y)).sum();
                    let steps = square.sqrt() / quantizer.step;
                    let (least, most) = (f64::from(bounds.least), f64::from(bounds.most));
                    assert!(least <= steps && steps <= most, "{kind}: {steps}, {bounds:?}");
                    close += usize::from(most - least < 0.01 * steps);
                }
                let stride = count + 3;
                let (mut least, mut nearest) = (vec![9; 20 * stride], [(0, f32::INFINITY); 20]);
                let (buffer, of_buffer) = (&mut Vec::new(), &mut Vec::new());
                rows.bounds_to_all(&others, 50..70, buffer, of_buffer, &mut least, &mut nearest);
                let all = (50..70).flat_map(|a| (0..count as u32).map(move |b| (a, b)));
                rows.bounds(&others, &all.collect::<Vec<_>>(), &mut sums, &mut bounds);
                let each = bounds.chunks_exact(count).zip(least.chunks_exact(stride));
                for ((bounds, least), (other, most)) in each.zip(nearest) {
                    let expected = bounds.iter().map(|bounds| lower(bounds.least)).chain([9; 3]);
                    assert!(expected.eq(least.iter().copied()), "{kind}, {level:?}");
                    assert!(bounds.iter().all(|bounds| bounds.most >= most));
                    assert!(most == f32::INFINITY || bounds[other as usize].most == most);
                }
                // Long rows leave few numbers to the others.
                assert!(kind > 1 || close > pairs.len() / 2, "{kind}, {level:?}: {close}");
            }
        }
    }
}
