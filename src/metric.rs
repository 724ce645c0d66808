//! Distances, and the arithmetic that makes them the same on every device.
//!
//! A distance is computed in three steps, and only the middle one, which is done for every pair of
//! rows, runs on a device:
//!
//! 1. [`Metric::prepare`] rewrites each row once (`cosine` and `pearson` scale it to length 1).
//! 2. The *sum*: elements in ascending order, from `s = 0`, one fused multiply-add or one addition
//!    each, in the precision of the rows. See [`Sum`].
//! 3. [`Metric::distance`] turns the sum into the distance; it never decreases when the sum grows.
//!
//! | metric | sum, in order of j | distance |
//! |---|---|---|
//! | `l2` | `s = fma(qⱼ − xⱼ, qⱼ − xⱼ, s)` | `√s` |
//! | `sqeuclidean` | the same | `s` |
//! | `l1` | `s = s + abs(qⱼ − xⱼ)` | `s` |
//! | `inner_product` | `s = fma(−qⱼ, xⱼ, s)` | `s` |
//! | `cosine`, `pearson` | the same, on prepared rows | `1 + s`, clamped to 0…2 |
//! | `hamming` | bits that differ | the count |
//! | `jaccard` | bits or tokens in both, and in either | `(either − both) / either`, 0 if there are none |
//!
//! A fused multiply-add of finite numbers is never NaN, even when the sum has overflowed, so
//! distances are totally ordered and the order of neighbours is `(distance, base row)`.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result, RowProblem};
use crate::matrix::{ElementKind, Real};
use crate::sets::jaccard;

/// How far apart two rows are. See the [module](self) for the exact arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[non_exhaustive]
pub enum Metric {
    /// Euclidean distance.
    #[default]
    L2,
    /// Squared Euclidean distance.
    SqEuclidean,
    /// 1 − cosine of the angle between the rows.
    Cosine,
    /// Negated inner product, so that smaller is nearer.
    InnerProduct,
    /// Sum of absolute differences.
    L1,
    /// 1 − Pearson's correlation of the elements.
    Pearson,
    /// Number of bits that differ.
    Hamming,
    /// 1 − bits in both over bits in either; of sets of integers, 1 − tokens in both over tokens in
    /// either.
    Jaccard,
}

/// The sum that a device computes over the elements of a pair of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Sum {
    /// Squared differences.
    Squares,
    /// Absolute differences.
    Absolute,
    /// Products, negated.
    Products,
    /// Bits that differ.
    DifferentBits,
    /// Bits in both and bits in either.
    SharedBits,
}

impl Metric {
    /// Every metric, in the order of the documentation.
    pub const ALL: [Self; 8] = [
        Self::L2,
        Self::SqEuclidean,
        Self::Cosine,
        Self::InnerProduct,
        Self::L1,
        Self::Pearson,
        Self::Hamming,
        Self::Jaccard,
    ];

    /// The name used in SQL.
    pub fn name(self) -> &'static str {
        match self {
            Self::L2 => "l2",
            Self::SqEuclidean => "sqeuclidean",
            Self::Cosine => "cosine",
            Self::InnerProduct => "inner_product",
            Self::L1 => "l1",
            Self::Pearson => "pearson",
            Self::Hamming => "hamming",
            Self::Jaccard => "jaccard",
        }
    }

    /// Whether rows are strings of bits, or sets, rather than vectors of numbers.
    pub fn is_binary(self) -> bool {
        matches!(self, Self::Hamming | Self::Jaccard)
    }

    /// Whether rows of this kind can be compared under this metric.
    pub fn accepts(self, kind: ElementKind) -> bool {
        match kind {
            ElementKind::F32 | ElementKind::F64 => !self.is_binary(),
            ElementKind::Bits => self.is_binary(),
            ElementKind::Sets => self == Self::Jaccard,
        }
    }

    /// What it compares, for messages.
    pub fn compares(self) -> &'static str {
        match self {
            Self::Jaccard => "binary strings or lists of integers",
            Self::Hamming => "binary strings",
            _ => "lists of numbers",
        }
    }

    /// The sum that a device computes for this metric.
    pub fn sum(self) -> Sum {
        match self {
            Self::L2 | Self::SqEuclidean => Sum::Squares,
            Self::L1 => Sum::Absolute,
            Self::Cosine | Self::InnerProduct | Self::Pearson => Sum::Products,
            Self::Hamming => Sum::DifferentBits,
            Self::Jaccard => Sum::SharedBits,
        }
    }

    /// Rewrites a row of numbers so that the device's sum gives this metric.
    ///
    /// `cosine` divides by the length, `pearson` subtracts the mean first; both compute in float64
    /// after an exact scaling by a power of two, so that no row over- or underflows.
    ///
    /// # Errors
    /// The row has no direction under this metric.
    pub fn prepare<T: Real>(self, row: &mut [T]) -> Result<(), RowProblem> {
        let centre = match self {
            Self::Cosine => false,
            Self::Pearson => true,
            _ => return Ok(()),
        };
        let problem = if centre { RowProblem::ConstantVector } else { RowProblem::ZeroVector };
        if centre && row.iter().all(|x| *x == row[0]) {
            return Err(problem);
        }
        let largest = row.iter().fold(0.0f64, |m, x| m.max(x.to_f64().abs()));
        let scale = power_of_two_near_inverse(largest);
        let mean = if centre {
            row.iter().map(|x| x.to_f64() * scale).sum::<f64>() / row.len() as f64
        } else {
            0.0
        };
        let square: f64 = row.iter().map(|x| (x.to_f64() * scale - mean).powi(2)).sum();
        if square == 0.0 {
            return Err(problem);
        }
        let length = square.sqrt();
        for x in row {
            *x = T::from_f64((x.to_f64() * scale - mean) / length);
        }
        Ok(())
    }

    /// The distance for a device's sum over numbers.
    #[inline(always)]
    pub fn distance<T: Real>(self, sum: T) -> T {
        match self {
            Self::L2 => sum.sqrt(),
            Self::Cosine | Self::Pearson => (T::ONE + sum).max(T::ZERO).min(T::ONE + T::ONE),
            // Adding 0 turns −0 into 0.
            _ => sum + T::ZERO,
        }
    }

    /// An upper bound on the sum of any pair at `distance` or nearer: a device compares sums with
    /// it before it computes a distance. May be a few units too large, never too small.
    #[inline]
    pub fn reach<T: Real>(self, distance: T) -> T {
        let few = T::EPSILON * T::from_f64(4.0);
        match self {
            Self::L2 => distance * distance * (T::ONE + few) + T::MIN_POSITIVE,
            Self::Cosine | Self::Pearson if distance < T::ONE + T::ONE => distance - T::ONE + few,
            Self::Cosine | Self::Pearson => T::INFINITY,
            _ => distance,
        }
    }

    /// The sum of a pair of prepared rows of numbers: the definition that every device must match.
    ///
    /// # Panics
    /// If the metric is one of bits.
    #[inline(always)]
    pub fn sum_of<T: Real>(self, query: &[T], base: &[T]) -> T {
        query.iter().zip(base).fold(T::ZERO, |sum, (q, x)| self.add_to_sum(sum, *q, *x))
    }

    /// The sum with one more pair of elements.
    ///
    /// # Panics
    /// If the metric is one of bits.
    #[inline(always)]
    pub fn add_to_sum<T: Real>(self, sum: T, query: T, base: T) -> T {
        match self.sum() {
            Sum::Squares => (query - base).mul_add(query - base, sum),
            Sum::Absolute => sum + (query - base).abs(),
            Sum::Products => (-query).mul_add(base, sum),
            Sum::DifferentBits | Sum::SharedBits => unreachable!("{self} is a metric of bits"),
        }
    }

    /// The distances of these pairs of prepared rows of numbers.
    ///
    /// # Panics
    /// If the metric is one of bits.
    pub fn distances<'a, T: Real>(self, pairs: impl Iterator<Item = (&'a [T], &'a [T])>) -> Vec<T> {
        // With the processor's own fused multiply-add, if it has one.
        pulp::Arch::new().dispatch(|| {
            pairs.map(|(query, base)| self.distance(self.sum_of(query, base))).collect()
        })
    }

    /// The distance of two strings of bits of equal length.
    ///
    /// # Panics
    /// If the metric is one of numbers.
    #[inline(always)]
    pub fn distance_of_bits(self, query: &[u64], base: &[u64]) -> f32 {
        let pairs = query.iter().zip(base);
        match self.sum() {
            Sum::DifferentBits => pairs.map(|(q, x)| (q ^ x).count_ones()).sum::<u32>() as f32,
            Sum::SharedBits => {
                let (both, either) = pairs.fold((0u32, 0u32), |(both, either), (q, x)| {
                    (both + (q & x).count_ones(), either + (q | x).count_ones())
                });
                jaccard(both, either)
            }
            _ => unreachable!("{self} is a metric of numbers"),
        }
    }
}

/// A power of two that brings a number of this size near 1; 1 for 0.
pub(crate) fn power_of_two_near_inverse(largest: f64) -> f64 {
    if largest == 0.0 {
        return 1.0;
    }
    let exponent = largest.log2().floor().clamp(-1000.0, 1000.0);
    2f64.powi(-(exponent as i32))
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Metric {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let lower = name.to_ascii_lowercase();
        let canonical = match lower.as_str() {
            "euclidean" => "l2",
            "dot" => "inner_product",
            other => other,
        };
        Self::ALL.into_iter().find(|m| m.name() == canonical).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::InvalidArgument(format!(
                "unknown metric '{name}'; accepted are {names}, euclidean (l2), dot (inner_product)"
            ))
        })
    }
}
