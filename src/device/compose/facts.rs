//! Error bounds: which lists of a device's sums are certain by the definition of distances.

use crate::device::contract::Enough;
use crate::device::cpu::length_of;
use crate::matrix::{ElementKind, Matrix, Real};
use crate::metric::Metric;
use crate::parallel::in_parallel;
use crate::rows::{NEAR_UNIT, Rows};

/// Rows that a thread looks at.
const TASK: usize = 4096;

/// Facts of the values of rows.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// The exponent of the lowest bit of any number: all are multiples of that power of two.
    step: i32,
    /// The least and the largest number.
    range: (f64, f64),
    /// The length of the longest row.
    pub longest: f64,
    /// Tokens of the largest set, or bits of a row.
    tokens: usize,
}

impl Facts {
    const NONE: Self =
        Self { step: i32::MAX, range: (f64::INFINITY, f64::NEG_INFINITY), longest: 0.0, tokens: 0 };

    /// Those of some rows; the longest is looked for only if it is needed.
    pub fn of(rows: &Rows, needs_lengths: bool) -> Self {
        let tasks: Vec<usize> = (0..rows.len()).step_by(TASK).collect();
        let all = in_parallel(tasks, |first| {
            let some = first..rows.len().min(first + TASK);
            let mut facts = Self::NONE;
            for row in some {
                facts.add::<f32>(rows, row, needs_lengths);
                facts.add::<f64>(rows, row, needs_lengths);
                if let Some((sets, start)) = rows.sets() {
                    facts.tokens = facts.tokens.max(sets.tokens(start + row).len());
                }
            }
            facts
        });
        let of_bits = if rows.words().is_some() { rows.matrix().dim() } else { 0 };
        all.into_iter().fold(Self { tokens: of_bits, ..Self::NONE }, |a, b| a.and(&b))
    }

    fn add<T: Real>(&mut self, rows: &Rows, row: usize, needs_lengths: bool) {
        let Some(vector) = rows.vector::<T>(row) else { return };
        // Plain comparisons, of as many numbers at a time as registers hold.
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

    /// Whether numbers are multiples of the step so far, as far as that shows without looking at their bits.
    fn has_multiples<T: Real>(&self, values: &[T]) -> bool {
        let scale = 2f64.powi(self.step.checked_neg().unwrap_or(0));
        let is_known = self.step < i32::MAX && scale.is_normal();
        let is_whole = |x: &T| {
            let steps = x.to_f64() * scale;
            // Neither overflows nor vanishes.
            let is_number = (steps.abs() < f64::MAX) & ((steps != 0.0) | (*x == T::ZERO));
            is_number & (steps.trunc() == steps)
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

    /// The largest magnitude of a number.
    fn largest(&self) -> f64 {
        self.range.1.max(-self.range.0)
    }
}

/// The exponent of the lowest bit of a number other than 0.
fn lowest_bit(x: f64) -> i32 {
    let bits = x.to_bits();
    let exponent = (bits >> 52 & 0x7ff) as i32;
    let mantissa = bits & ((1 << 52) - 1) | if exponent == 0 { 0 } else { 1 << 52 };
    exponent.max(1) - 1075 + mantissa.trailing_zeros() as i32
}

/// How far the sums of a device may be from the definition, for one metric and one type of row.
#[derive(Debug, Clone, Copy)]
pub struct Filter {
    metric: Metric,
    kind: ElementKind,
    dim: usize,
}

/// Distances of `l2` from here on have normal squares.
const LEAST_NORMAL_ROOT: f64 = 1.6e-154;

/// The largest numbers of bits or tokens in either of two rows of which f32 holds no two fractions as one: they differ by
/// more than 2⁻²⁴.
const MOST_FRACTIONS: usize = 4096;

/// Counts up to this are exact in f32.
const MOST_COUNTED: usize = 1 << 24;

impl Filter {
    pub fn new(metric: Metric, rows: &Matrix) -> Self {
        Self { metric, kind: rows.kind(), dim: rows.dim() }
    }

    /// Of rows that were widened to float64.
    pub fn of_f64(metric: Metric) -> Self {
        Self { metric, kind: ElementKind::F64, dim: 0 }
    }

    /// Whether sums are those of the definition.
    pub fn is_definition(&self) -> bool {
        self.kind == ElementKind::F64 && self.metric != Metric::InnerProduct
            || self.metric == Metric::Hamming && self.dim <= MOST_COUNTED
    }

    /// Whether float64 has more to tell.
    pub fn has_wider(&self) -> bool {
        self.kind == ElementKind::F32 && self.metric != Metric::InnerProduct
    }

    /// Whether lengths of rows decide how far sums may be off.
    pub fn needs_lengths(&self) -> bool {
        self.metric == Metric::InnerProduct
    }

    /// Rows that a list of `k` needs besides, so that nearly all lists are certain. About one row in 2²⁴ / (k · dim) lies
    /// within the error of the last one, in data of some ten dimensions, and hardly ever two.
    pub fn more(&self, k: usize) -> usize {
        if self.is_definition() {
            return 0;
        }
        match self.kind {
            ElementKind::F32 => (1 + self.dim / 128).clamp(2, 3) + k / 64 + k * self.dim / 16_384,
            _ => 1,
        }
    }

    /// The rows that a device lists besides the first `k`, so that a list that has room left is certain.
    pub fn enough(&self, k: usize) -> Option<Enough> {
        if self.is_definition() || !matches!(self.kind, ElementKind::F32) || self.needs_lengths() {
            return None;
        }
        let (unit, tiny) = (f64::from(f32::EPSILON) / 2.0, 1.5e-45);
        let terms = self.dim as f64 + 8.0;
        // Both sums may be off: see `least_behind`.
        let (root, times) = match self.metric.is_of_directions() {
            true => (4.04 * NEAR_UNIT, 6.0),
            false => (0.0, 3.0),
        };
        let share = times * terms * unit;
        (share < 0.1).then_some(Enough { k, root, share, absolute: 4.0 * terms * tiny })
    }

    /// Whether rows behind the last of a list are farther, by the definition, than its k-th. `last` is the distance of the
    /// last by a device's sum, `lengths` the largest product of the lengths of the query and a base row.
    pub fn is_certain(&self, kth: f64, last: f64, lengths: f64) -> bool {
        match (self.is_definition(), self.metric) {
            // Equal rows are in the order of the base.
            (true, Metric::L2) if kth == 0.0 => true,
            (true, Metric::L2) => (LEAST_NORMAL_ROOT..f64::INFINITY).contains(&last),
            (true, _) => true,
            // Equal rows have a sum of 0, and are in the order of the base on every list.
            (false, Metric::L2 | Metric::SqEuclidean | Metric::L1) if kth == 0.0 => true,
            // Nothing in common, or all: no other fraction of so few is rounded to that.
            (false, Metric::Jaccard) if kth == 0.0 || kth == 1.0 => self.dim <= MOST_COUNTED,
            (false, _) => kth < self.least_behind(last, lengths),
        }
    }

    /// Whether facts may show that lists are in the order of the definition, or even that sums are exact.
    pub fn may_be_exact(&self) -> bool {
        !self.metric.is_of_directions()
    }

    /// Whether the sums of all pairs are exact, so that lists are in the order of the definition.
    pub fn is_exact(&self, base: &Facts, query: &Facts) -> bool {
        if self.kind == ElementKind::Bits || self.kind == ElementKind::Sets {
            // All bits of a row are in the tokens of both.
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
            // Of l2: no square vanishes or overflows.
            return step >= -500 && both.largest() < 1e150;
        }
        // Sums are numbers of the type, too.
        let (bits, steps) = match self.kind {
            ElementKind::F32 => (f32::MANTISSA_DIGITS, -149..=100),
            _ => (f64::MANTISSA_DIGITS, -1000..=960),
        };
        let (most, in_steps) = (2f64.powi(bits as i32), |x: f64| x / 2f64.powi(step));
        // How far two numbers may be apart.
        let (dim, apart) = (self.dim as f64, in_steps(both.range.1 - both.range.0));
        let (sum, of_step) = match self.metric {
            Metric::L1 => (dim * apart, step),
            Metric::InnerProduct => {
                (dim * in_steps(base.largest()) * in_steps(query.largest()), 2 * step)
            }
            _ => (dim * apart * apart, 2 * step),
        };
        sum <= most && steps.contains(&of_step)
    }

    /// A lower bound on the distance by the definition of rows whose sums are not less than that of `last`.
    fn least_behind(&self, last: f64, lengths: f64) -> f64 {
        let (unit, tiny, most) = match self.kind {
            ElementKind::F64 => (f64::EPSILON / 2.0, 5e-324, f64::MAX),
            _ => (f64::from(f32::EPSILON) / 2.0, 1.5e-45, f64::from(f32::MAX)),
        };
        // A sum of so many terms is off by at most this share of the terms' magnitudes; the definition's sum by less.
        let share = (self.dim as f64 + 8.0) * unit;
        let least = |sum: f64| (sum - self.dim as f64 * tiny) * (1.0 - share);
        let sum = last.min(most);
        match self.metric {
            Metric::SqEuclidean | Metric::L1 => least(sum),
            Metric::L2 => least(sum).max(0.0).sqrt() * (1.0 - 1e-15),
            Metric::Cosine | Metric::Pearson => {
                // Each unit vector is off by its rounding.
                let apart = least(sum).max(0.0).sqrt() - 2.02 * NEAR_UNIT;
                0.5 * apart.max(0.0).powi(2) * (1.0 - 1e-9)
            }
            Metric::InnerProduct if lengths < most / 8.0 => {
                last - 2.0 * share * lengths - 4.0 * self.dim as f64 * tiny
            }
            Metric::InnerProduct => f64::NEG_INFINITY,
            Metric::Hamming | Metric::Jaccard => last * (1.0 - 4.0 * unit),
        }
    }
}
