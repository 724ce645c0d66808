//! Error bounds: whether a list ranked by approximate distances is certain to have the exact
//! neighbours.

use crate::device::contract::Enough;
use crate::device::cpu::length_of;
use crate::device::sums::ROUND_TO_INTEGER_F64;
use crate::matrix::{ElementKind, Matrix, Real};
use crate::metric::Metric;
use crate::parallel::in_parallel;
use crate::rows::{NEAR_UNIT, Rows};

/// Numbers below this are rounded to integers by adding [`ROUND_TO_INTEGER_F64`].
const MOST_STEPS: f64 = (1u64 << 51) as f64;

/// Elements per task.
const TASK: usize = 1 << 16;

/// Norms and ranges of the values of rows, from which error bounds follow.
#[derive(Debug, Clone, Copy)]
pub struct RowStats {
    /// The exponent of the lowest bit of any value: all values are multiples of that power of two.
    step: i32,
    /// The smallest and the largest value.
    range: (f64, f64),
    /// The largest norm of a row.
    pub longest: f64,
    /// Number of tokens of the largest set, or of bits of a row.
    tokens: usize,
}

impl RowStats {
    const NONE: Self =
        Self { step: i32::MAX, range: (f64::INFINITY, f64::NEG_INFINITY), longest: 0.0, tokens: 0 };

    /// The statistics of some rows; norms are computed only if `needs_lengths`.
    pub fn of(rows: &Rows, needs_lengths: bool) -> Self {
        let task = (TASK / rows.matrix().dim().max(1)).max(1);
        let tasks: Vec<usize> = (0..rows.len()).step_by(task).collect();
        let all = in_parallel(tasks, |first| {
            let some = first..rows.len().min(first + task);
            let mut stats = Self::NONE;
            for row in some {
                stats.add::<f32>(rows, row, needs_lengths);
                stats.add::<f64>(rows, row, needs_lengths);
                if let Some((sets, start)) = rows.sets() {
                    stats.tokens = stats.tokens.max(sets.tokens(start + row).len());
                }
            }
            stats
        });
        let of_bits = if rows.words().is_some() { rows.matrix().dim() } else { 0 };
        all.into_iter().fold(Self { tokens: of_bits, ..Self::NONE }, |a, b| a.and(&b))
    }

    fn add<T: Real>(&mut self, rows: &Rows, row: usize, needs_lengths: bool) {
        let Some(vector) = rows.vector::<T>(row) else { return };
        // Plain comparisons, which the compiler vectorises.
        let widen = |(least, largest): (T, T), x: &T| {
            (if *x < least { *x } else { least }, if *x > largest { *x } else { largest })
        };
        let none = (T::INFINITY, -T::INFINITY);
        let (least, largest) = vector.values.iter().fold(none, widen);
        self.range = (self.range.0.min(least.to_f64()), self.range.1.max(largest.to_f64()));
        if !self.has_multiples(vector.values) {
            let others = vector.values.iter().map(|x| x.to_f64()).filter(|x| *x != 0.0);
            self.step = others.map(lowest_bit).fold(self.step, i32::min);
        }
        if needs_lengths {
            self.longest = self.longest.max(length_of(rows, row));
        }
    }

    /// Whether values are certain to be multiples of the current step: a vectorised test without
    /// bit operations, which may return false for multiples.
    fn has_multiples<T: Real>(&self, values: &[T]) -> bool {
        let scale = 2f64.powi(self.step.checked_neg().unwrap_or(0));
        let is_known = self.step < i32::MAX && scale.is_normal();
        let is_whole = |x: &T| {
            let steps = x.to_f64() * scale;
            // No underflow, and small enough that the sum below is rounded to an integer.
            let is_small = (steps.abs() < MOST_STEPS) & ((steps != 0.0) | (*x == T::ZERO));
            is_small & ((steps + ROUND_TO_INTEGER_F64) - ROUND_TO_INTEGER_F64 == steps)
        };
        is_known && values.iter().fold(true, |all, x| all & is_whole(x))
    }

    fn and(&self, other: &Self) -> Self {
        Self {
            step: self.step.min(other.step),
            range: (self.range.0.min(other.range.0), self.range.1.max(other.range.1)),
            longest: self.longest.max(other.longest),
            tokens: self.tokens.max(other.tokens),
        }
    }

    /// The largest absolute value.
    fn largest(&self) -> f64 {
        self.range.1.max(-self.range.0)
    }
}

/// The exponent of the lowest bit of a non-zero number.
fn lowest_bit(x: f64) -> i32 {
    let bits = x.to_bits();
    let exponent = (bits >> 52 & 0x7ff) as i32;
    let mantissa = bits & ((1 << 52) - 1) | if exponent == 0 { 0 } else { 1 << 52 };
    exponent.max(1) - 1075 + mantissa.trailing_zeros() as i32
}

/// Error bounds on a device's sums relative to the exact distance, for one metric and one element
/// type.
#[derive(Debug, Clone, Copy)]
pub struct ErrorBounds {
    metric: Metric,
    kind: ElementKind,
    dim: usize,
}

/// Smallest `l2` distance whose square is a normal number.
const LEAST_NORMAL_ROOT: f64 = 1.6e-154;

/// Largest number of bits or tokens in the union of two rows for which f32 distinguishes all
/// Jaccard distances: they differ by more than 2⁻²⁴.
const MOST_FRACTIONS: usize = 4096;

/// Largest count that is exact in f32.
const MOST_COUNTED: usize = 1 << 24;

impl ErrorBounds {
    pub fn new(metric: Metric, rows: &Matrix) -> Self {
        Self { metric, kind: rows.kind(), dim: rows.dim() }
    }

    /// The error bounds of rows widened to float64.
    pub fn of_f64(metric: Metric) -> Self {
        Self { metric, kind: ElementKind::F64, dim: 0 }
    }

    /// Whether the device's sums are exact distances.
    pub fn is_definition(&self) -> bool {
        self.kind == ElementKind::F64 && self.metric != Metric::InnerProduct
            || self.metric == Metric::Hamming && self.dim <= MOST_COUNTED
    }

    /// Whether a search in float64 is more precise.
    pub fn has_wider(&self) -> bool {
        self.kind == ElementKind::F32 && self.metric != Metric::InnerProduct
    }

    /// Whether error bounds depend on the norms of rows.
    pub fn needs_lengths(&self) -> bool {
        self.metric == Metric::InnerProduct
    }

    /// Number of candidates beyond `k` with which nearly all lists are certain. In data of some ten
    /// dimensions, about one row in 2²⁴ / (k · dim) lies within the rounding error of the k-th, and
    /// hardly ever two.
    pub fn more(&self, k: usize) -> usize {
        if self.is_definition() {
            return 0;
        }
        match self.kind {
            ElementKind::F32 => (1 + self.dim / 128).clamp(2, 3) + k / 64 + k * self.dim / 16_384,
            _ => 1,
        }
    }

    /// The margin within which a device lists rows beyond the k-th, so that a list with empty
    /// entries is certain.
    pub fn enough(&self, k: usize) -> Option<Enough> {
        if self.is_definition() || !matches!(self.kind, ElementKind::F32) || self.needs_lengths() {
            return None;
        }
        let (unit, tiny) = (f64::from(f32::EPSILON) / 2.0, 1.5e-45);
        let terms = self.dim as f64 + 8.0;
        // Both sums have rounding errors: see `least_behind`.
        let (root, times) = match self.metric.is_of_directions() {
            true => (4.04 * NEAR_UNIT, 6.0),
            false => (0.0, 3.0),
        };
        let share = times * terms * unit;
        (share < 0.1).then_some(Enough { k, root, share, absolute: 4.0 * terms * tiny })
    }

    /// Whether all unlisted rows are farther than the k-th of a list, by exact distance. `last` is
    /// the approximate distance of the last row of the list, `lengths` the largest product of the
    /// norms of the query and a base row.
    pub fn is_certain(&self, kth: f64, last: f64, lengths: f64) -> bool {
        match (self.is_definition(), self.metric) {
            // Ties are in the order of the base.
            (true, Metric::L2) if kth == 0.0 => true,
            (true, Metric::L2) => (LEAST_NORMAL_ROOT..f64::INFINITY).contains(&last),
            (true, _) => true,
            // Rows equal to the query have sum 0 in every list, and ties are in the order of the
            // base.
            (false, Metric::L2 | Metric::SqEuclidean | Metric::L1) if kth == 0.0 => true,
            // Disjoint or equal sets: no other fraction of counts up to `MOST_COUNTED` is rounded
            // to 0 or 1.
            (false, Metric::Jaccard) if kth == 0.0 || kth == 1.0 => self.dim <= MOST_COUNTED,
            (false, _) => kth < self.least_behind(last, lengths),
        }
    }

    /// Whether the facts may show that sums are exact, or at least rank rows by exact distance.
    pub fn may_be_exact(&self) -> bool {
        !self.metric.is_of_directions()
    }

    /// Whether the sums of all pairs are exact, so that they rank rows by exact distance.
    pub fn is_exact(&self, base: &RowStats, query: &RowStats) -> bool {
        if self.kind == ElementKind::Bits || self.kind == ElementKind::Sets {
            // The union of two bit rows is within the row length.
            let is_bits = self.kind == ElementKind::Bits;
            let either = if is_bits { base.tokens } else { base.tokens + query.tokens };
            return either <= MOST_FRACTIONS;
        }
        let both = base.and(query);
        let step = both.step;
        if step == i32::MAX {
            return true;
        }
        if self.is_definition() {
            // For `l2`: no square underflows, and no sum of 2^32 of them overflows.
            return step >= -500 && both.largest() < 1e148;
        }
        // Sums must be representable, too.
        let (bits, steps) = match self.kind {
            ElementKind::F32 => (f32::MANTISSA_DIGITS, -149..=100),
            _ => (f64::MANTISSA_DIGITS, -1000..=960),
        };
        let (most, in_steps) = (2f64.powi(bits as i32), |x: f64| x / 2f64.powi(step));
        // The largest difference of two values, in steps.
        let (dim, difference) = (self.dim as f64, in_steps(both.range.1 - both.range.0));
        let (sum, of_step) = match self.metric {
            Metric::L1 => (dim * difference, step),
            Metric::InnerProduct => {
                (dim * in_steps(base.largest()) * in_steps(query.largest()), 2 * step)
            }
            _ => (dim * difference * difference, 2 * step),
        };
        sum <= most && steps.contains(&of_step)
    }

    /// A lower bound on the exact distances of all rows whose sums are at least that of `last`.
    fn least_behind(&self, last: f64, lengths: f64) -> f64 {
        let (unit, tiny, most) = match self.kind {
            ElementKind::F64 => (f64::EPSILON / 2.0, 5e-324, f64::MAX),
            _ => (f64::from(f32::EPSILON) / 2.0, 1.5e-45, f64::from(f32::MAX)),
        };
        // Relative error bound of a device's sum; the error of the exact distance is smaller.
        let share = (self.dim as f64 + 8.0) * unit;
        let least = |sum: f64| (sum - self.dim as f64 * tiny) * (1.0 - share);
        let sum = last.min(most);
        match self.metric {
            Metric::SqEuclidean | Metric::L1 => least(sum),
            Metric::L2 => least(sum).max(0.0).sqrt() * (1.0 - 1e-15),
            Metric::Cosine | Metric::Pearson => {
                // The rounding error of each unit vector.
                let distance_bound = least(sum).max(0.0).sqrt() - 2.02 * NEAR_UNIT;
                0.5 * distance_bound.max(0.0).powi(2) * (1.0 - 1e-9)
            }
            Metric::InnerProduct if lengths < most / 8.0 => {
                last - 2.0 * share * lengths - 4.0 * self.dim as f64 * tiny
            }
            Metric::InnerProduct => f64::NEG_INFINITY,
            Metric::Hamming | Metric::Jaccard => last * (1.0 - 4.0 * unit),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::matrix::Elements;

    #[test]
    fn the_step_is_the_lowest_bit_of_any_value() {
        let half = 0.5;
        // From 2⁵¹ on, adding rounds to halves; a power of two above 2⁵² is a multiple of all below.
        let large = [2f64.powi(51), 2f64.powi(51) + half, -2f64.powi(51) - half, 2f64.powi(60)];
        let others = [0.0, 1.0, -3.0, half, 12.0, 2f64.powi(-300), f64::MIN_POSITIVE, 1e300];
        let values: Vec<f64> = large.into_iter().chain(others).collect();
        for a in &values {
            for b in &values {
                let rows = [[1.0, *a], [*b, 1.0]].concat();
                let lowest = rows.iter().filter(|x| **x != 0.0).map(|x| lowest_bit(*x)).min();
                let rows = Rows::all(Arc::new(Matrix::new(Elements::F64(rows), 2, 2)));
                assert_eq!(Some(RowStats::of(&rows, false).step), lowest, "{a:e} {b:e}");
            }
        }
    }
}
