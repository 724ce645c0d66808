//! Metrics: the exact distance, and the sums by which devices search.
//!
//! # Definition
//!
//! *A distance is a Float64, computed from the values of the vectors, in ascending order of
//! dimensions, each operation rounded once. Neighbours are ranked by distance, ties by the order of
//! the base.* [`Metric::exact`] is this definition.
//!
//! | metric | distance |
//! |---|---|
//! | `l2` | `√Σ(x − y)²`; a subnormal or overflowed sum is computed again, scaled by a power of two |
//! | `sqeuclidean` | `Σ(x − y)²` |
//! | `l1` | `Σ abs(x − y)` |
//! | `inner_product` | `−Σ x · y` |
//! | `cosine` | `½ Σ(x · ix − y · iy)²` with `ix = 1 / ‖x‖`: `1 − cos`, without its cancellation |
//! | `pearson` | the same, on rows minus their means |
//! | `hamming` | number of different bits |
//! | `jaccard` | `(either − both) / either` of bits or tokens, 0 for two empty rows |
//!
//! # Sums
//!
//! Devices search for candidates by sums in the element type of the rows, which are the same on
//! every device, bit by bit: elements in ascending order, from `s = 0`, one fused multiply-add or
//! one addition each. f64 rounds squares before it adds them, so that its sums are exact distances.
//! [`Metric::distance`] turns a sum into a distance; it is monotonic.
//!
//! | metric | sum, in order of j | distance |
//! |---|---|---|
//! | `l2` | `s = (qⱼ − xⱼ)² + s` | `√s` |
//! | `sqeuclidean` | the same | `s` |
//! | `l1` | `s = s + abs(qⱼ − xⱼ)` | `s` |
//! | `inner_product` | `s = fma(−qⱼ, xⱼ, s)` | `s` |
//! | `cosine`, `pearson` | the same, on [prepared](Metric::prepare) rows | `1 + s`, clamped to 0…2 |
//!
//! A fused multiply-add of finite numbers is never NaN, even after an overflow of the sum, so that
//! sums are totally ordered.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result, RowProblem};
use crate::matrix::{ElementKind, Real};
use crate::sets::{exact_jaccard, jaccard};

/// The distance between two rows. See the module for the exact arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[non_exhaustive]
pub enum Metric {
    /// Euclidean distance.
    #[default]
    L2,
    /// Squared Euclidean distance.
    SqEuclidean,
    /// 1 − cosine of the angle between the rows: half the squared distance of their unit vectors.
    Cosine,
    /// Negated inner product, so that smaller is nearer.
    InnerProduct,
    /// Sum of absolute differences.
    L1,
    /// 1 − Pearson correlation of the elements.
    Pearson,
    /// Number of bits that differ.
    Hamming,
    /// 1 − intersection / union of bits or, for sets of integers, of tokens.
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
    /// Negated products.
    Products,
    /// Bits that differ.
    DifferentBits,
    /// Number of bits in both rows, and in either.
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

    /// Whether rows are bits or sets, rather than vectors of real numbers.
    pub fn is_binary(self) -> bool {
        matches!(self, Self::Hamming | Self::Jaccard)
    }

    /// Whether rows of this element type can be compared under this metric.
    pub fn accepts(self, kind: ElementKind) -> bool {
        match kind {
            ElementKind::F32 | ElementKind::F64 => !self.is_binary(),
            ElementKind::Bits => self.is_binary(),
            ElementKind::Sets => self == Self::Jaccard,
        }
    }

    /// The types of rows it compares, for messages.
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

    /// Whether rows are compared by their directions.
    pub fn is_of_directions(self) -> bool {
        matches!(self, Self::Cosine | Self::Pearson)
    }

    /// Rewrites a row of real numbers so that the device's sum gives this metric: under `cosine`
    /// and `pearson`, to the unit vector of the definition, rounded to the element type.
    ///
    /// # Errors
    /// The problem of a row without direction under this metric.
    pub fn prepare<T: Real>(self, row: &mut [T]) -> Result<(), RowProblem> {
        if let Some(direction) = self.direction(row)? {
            row.iter_mut().for_each(|x| *x = T::from_f64(direction.coordinate(x.to_f64())));
        }
        Ok(())
    }

    /// The direction of a row, if this metric compares directions.
    ///
    /// # Errors
    /// The problem of a row without direction: zero under `cosine`, or constant under `pearson`.
    pub fn direction<T: Real>(self, row: &[T]) -> Result<Option<Direction>, RowProblem> {
        let problem = match self {
            Self::Cosine => RowProblem::ZeroVector,
            Self::Pearson if row.iter().all(|x| *x == row[0]) => {
                return Err(RowProblem::ConstantVector);
            }
            Self::Pearson => RowProblem::ConstantVector,
            _ => return Ok(None),
        };
        let direction = Direction::of(self, row);
        if direction.inverse.is_finite() { Ok(Some(direction)) } else { Err(problem) }
    }

    /// # Errors
    /// Those of [`direction`](Self::direction).
    pub fn check_direction<T: Real>(self, row: &[T]) -> Result<(), RowProblem> {
        match self {
            // Squares are scaled, so that a non-zero row of any size has a direction.
            Self::Cosine if row.iter().any(|x| *x != T::ZERO) => Ok(()),
            _ => self.direction(row).map(drop),
        }
    }

    /// The distance of two rows of real numbers: the definition, whose terms are in the
    /// module's table.
    pub fn exact<T: Real>(self, x: Vector<'_, T>, y: Vector<'_, T>) -> f64 {
        let pairs = || x.coordinates().zip(y.coordinates());
        let sum = pairs().fold(0.0, |sum, (x, y)| self.add_exactly(sum, x, y));
        self.finish(sum, pairs)
    }

    /// The definition's sum with one more pair of coordinates.
    #[inline(always)]
    pub fn add_exactly(self, sum: f64, x: f64, y: f64) -> f64 {
        match self {
            Self::L1 => sum + (x - y).abs(),
            Self::InnerProduct => sum - x * y,
            _ => sum + (x - y) * (x - y),
        }
    }

    /// The distance for a sum of the definition over these pairs of coordinates.
    #[inline]
    pub fn finish<P: Iterator<Item = (f64, f64)>>(self, sum: f64, pairs: impl Fn() -> P) -> f64 {
        match self {
            Self::L2 if !(f64::MIN_POSITIVE..f64::INFINITY).contains(&sum) => {
                let largest = pairs().fold(0.0, |most: f64, (x, y)| most.max((x - y).abs()));
                if !largest.is_finite() {
                    return f64::INFINITY;
                }
                let scale = power_of_two_near_inverse(largest);
                let scaled = |(x, y): (f64, f64)| (x - y) * scale;
                let square: f64 =
                    pairs().map(scaled).fold(0.0, |sum, difference| sum + difference * difference);
                square.sqrt() / scale
            }
            Self::L2 => sum.sqrt(),
            Self::InnerProduct if !sum.is_finite() => {
                let most = |of: fn((f64, f64)) -> f64| {
                    power_of_two_near_inverse(pairs().map(of).fold(0.0, |m, x| m.max(x.abs())))
                };
                let (of_x, of_y) = (most(|(x, _)| x), most(|(_, y)| y));
                let sum = pairs().fold(0.0, |sum, (x, y)| sum - (x * of_x) * (y * of_y));
                // Dividing by the larger factor first keeps the quotient in range if the result is.
                sum / of_x.max(of_y) / of_x.min(of_y)
            }
            Self::Cosine | Self::Pearson => 0.5 * sum,
            // Adding 0 turns −0 into 0.
            _ => sum + 0.0,
        }
    }

    /// The metric by whose sums a device searches, on prepared rows of this element type.
    /// Directions are compared by the squared distance of unit vectors; in f32 `l2` is compared by
    /// its square, since rounded roots have more ties than in f64.
    pub fn searched(self, kind: ElementKind) -> Self {
        match self {
            Self::Cosine | Self::Pearson => Self::SqEuclidean,
            Self::L2 if kind == ElementKind::F32 => Self::SqEuclidean,
            other => other,
        }
    }

    /// The distance for a device's sum over real numbers.
    #[inline(always)]
    pub fn distance<T: Real>(self, sum: T) -> T {
        match self {
            Self::L2 => sum.sqrt(),
            Self::Cosine | Self::Pearson => (T::ONE + sum).max(T::ZERO).min(T::ONE + T::ONE),
            // Adding 0 turns −0 into 0.
            _ => sum + T::ZERO,
        }
    }

    /// An upper bound on the sum of any pair within `distance`: a device compares sums with it
    /// before it computes a distance. It may be a few ulp too large, never too small.
    #[inline]
    pub fn largest_sum<T: Real>(self, distance: T) -> T {
        let few = T::EPSILON * T::from_f64(4.0);
        match self {
            Self::L2 => distance * distance * (T::ONE + few) + T::MIN_POSITIVE,
            Self::Cosine | Self::Pearson if distance < T::ONE + T::ONE => distance - T::ONE + few,
            Self::Cosine | Self::Pearson => T::INFINITY,
            _ => distance,
        }
    }

    /// The sum of a pair of prepared rows of real numbers: the definition that every device must
    /// match.
    ///
    /// # Panics
    /// For metrics of bits.
    #[inline(always)]
    pub fn sum_of<T: Real>(self, query: &[T], base: &[T]) -> T {
        query.iter().zip(base).fold(T::ZERO, |sum, (q, x)| self.add_to_sum(sum, *q, *x))
    }

    /// The sum with one more pair of elements.
    ///
    /// # Panics
    /// For metrics of bits.
    #[inline(always)]
    pub fn add_to_sum<T: Real>(self, sum: T, query: T, base: T) -> T {
        match self.sum() {
            Sum::Squares => (query - base).square_plus(sum),
            Sum::Absolute => sum + (query - base).abs(),
            Sum::Products => (-query).mul_add(base, sum),
            Sum::DifferentBits | Sum::SharedBits => unreachable!("{self} is a metric of bits"),
        }
    }

    /// The distance of two rows of bits of equal length.
    ///
    /// # Panics
    /// For metrics of real numbers.
    #[inline(always)]
    pub fn exact_of_bits(self, query: &[u64], base: &[u64]) -> f64 {
        let pairs = query.iter().zip(base);
        match self.sum() {
            Sum::DifferentBits => f64::from(pairs.map(|(q, x)| (q ^ x).count_ones()).sum::<u32>()),
            Sum::SharedBits => {
                let (both, either) = pairs.fold((0u32, 0u32), |(both, either), (q, x)| {
                    (both + (q & x).count_ones(), either + (q | x).count_ones())
                });
                exact_jaccard(both, either)
            }
            _ => unreachable!("{self} is a metric of numbers"),
        }
    }

    /// The same as devices compute it, rounded to f32.
    ///
    /// # Panics
    /// For metrics of real numbers.
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

/// A vector of real numbers, as the exact distance reads it.
#[derive(Debug, Clone, Copy)]
pub struct Vector<'a, T> {
    /// Its elements.
    pub values: &'a [T],
    /// Its direction, if the metric compares directions and the elements are not those of the unit
    /// vector.
    pub direction: Option<Direction>,
}

impl<'a, T: Real> Vector<'a, T> {
    /// Its elements, or the coordinates of its unit vector.
    pub fn coordinates(self) -> impl Iterator<Item = f64> + use<'a, T> {
        let direction = self.direction.unwrap_or(Direction::NONE);
        self.values.iter().map(move |x| direction.coordinate(x.to_f64()))
    }
}

/// The unit vector of a row under `cosine` and `pearson`, as the affine map of its values:
/// `(x · unit − mean) · inverse`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Direction {
    /// A power of two; 1 unless squares would overflow or underflow in float64.
    pub unit: f64,
    /// The mean of the values times `unit`; 0 under `cosine`.
    pub mean: f64,
    /// The inverse norm; not finite for a row without direction.
    pub inverse: f64,
}

impl Direction {
    /// The identity.
    pub const NONE: Self = Self { unit: 1.0, mean: 0.0, inverse: 1.0 };

    /// The direction of a row under `cosine` or `pearson`.
    pub fn of<T: Real>(metric: Metric, row: &[T]) -> Self {
        Self::of_each(metric, [row])[0]
    }

    /// The directions of rows of equal length, with interleaved sums.
    pub fn of_each<T: Real, const COUNT: usize>(
        metric: Metric,
        rows: [&[T]; COUNT],
    ) -> [Self; COUNT] {
        let dim = rows.iter().fold(usize::MAX, |dim, row| dim.min(row.len()));
        let rows = rows.map(|row| &row[..dim]);
        let units = rows.map(|row| {
            let largest = largest_magnitude(row).to_f64();
            let is_near_1 = (1e-60..1e60).contains(&largest);
            if is_near_1 { 1.0 } else { power_of_two_near_inverse(largest) }
        });
        let value = |i: usize, j: usize| rows[i][j].to_f64() * units[i];
        let means = match metric {
            Metric::Pearson => add_beside(dim, value).map(|sum| sum / dim as f64),
            _ => [0.0; COUNT],
        };
        let deviation = |i: usize, j: usize| value(i, j) - means[i];
        let squares: [f64; COUNT] = add_beside(dim, |i, j| deviation(i, j) * deviation(i, j));
        std::array::from_fn(|i| Self {
            unit: units[i],
            mean: means[i],
            inverse: 1.0 / squares[i].sqrt(),
        })
    }

    /// The coordinate of the unit vector for a value.
    #[inline(always)]
    pub fn coordinate(self, x: f64) -> f64 {
        (x * self.unit - self.mean) * self.inverse
    }
}

/// `COUNT` interleaved sums of `terms` terms each.
#[inline(always)]
fn add_beside<const COUNT: usize>(
    terms: usize,
    term: impl Fn(usize, usize) -> f64,
) -> [f64; COUNT] {
    let mut sums = [0.0; COUNT];
    for j in 0..terms {
        sums.iter_mut().enumerate().for_each(|(i, sum)| *sum += term(i, j));
    }
    sums
}

/// The largest absolute value of a row.
fn largest_magnitude<T: Real>(row: &[T]) -> T {
    let (most, last) = row.as_chunks::<16>();
    let mut largest = [T::ZERO; 16];
    let mut see = |row: &[T]| {
        for (largest, x) in largest.iter_mut().zip(row) {
            let x = x.abs();
            *largest = if x > *largest { x } else { *largest };
        }
    };
    most.iter().for_each(|row| see(row));
    see(last);
    largest.into_iter().fold(T::ZERO, |most, x| if x > most { x } else { most })
}

/// A power of two that scales a number of this size close to 1; 1 for 0.
pub fn power_of_two_near_inverse(largest: f64) -> f64 {
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
