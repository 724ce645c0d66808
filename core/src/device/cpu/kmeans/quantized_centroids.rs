//! The centroids of a round in quantised form, and the conversion between their distances and their costs.
//!
//! Distances here are Euclidean, in steps of the rows' quantisation. They bound the costs of products, too:
//! `‖q − x‖² = ‖q‖² + ‖x‖² − 2 q·x`.

use super::drake::bound_list::{down, up};
use crate::device::cpu::quantize::base::{QuantizedBase, RoundingError};
use crate::device::cpu::quantize::quantizer::{ONE_OUTLIER_IN, Quantizer, TOGETHER};
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::Width;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::device::cpu::simd::squares::{longest_square, square, square_between};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::{Metric, Sum};
use crate::parallel::in_parallel;
use crate::rows::Rows;

/// The largest root mean square rounding error of a centroid, relative to the rows' distance from the centre, for
/// which 8 bits are fine enough.
const FINE: f64 = 0.02;

/// The quantisation, metric and instruction level by which rows and centroids are compared.
pub(super) struct Measure {
    pub metric: Metric,
    pub level: Level,
    pub quantizer: Quantizer,
    /// The squared length of the longest row.
    longest: f64,
}

/// The centroids of a round.
pub(super) struct QuantizedCentroids<'a, T, R> {
    pub values: &'a [T],
    /// The quantised centroids.
    pub rounded: R,
    /// The movement of each centroid, and the largest of all, in steps.
    pub moved: Vec<f32>,
    pub most_moved: f32,
    metric: Metric,
    rounding: RoundingError,
    /// Steps in a unit of the rows.
    pub unit: f64,
    /// For products: an upper bound on `‖x − c‖² − 2 · sum`.
    squares: f64,
    /// Margins between the distances a and b of two centroids of equal cost: `a ≤ factor · b + offset` for squares,
    /// `a² ≤ b² + slack` for products.
    factor: f32,
    offset: f32,
    slack: f32,
    /// For squares: the distance up to which no cost overflows.
    finite: f32,
}

impl Measure {
    /// Chooses 8-bit codes where they are fine enough, else 16-bit codes; `None` for values near overflow or
    /// underflow.
    pub fn new<T: SimdReal>(
        values: &[T],
        dim: usize,
        metric: Metric,
        level: Level,
        job: &Job,
    ) -> Result<Option<Self>> {
        let whole = match level.has(Width::Eight) {
            true => Quantizer::try_new(values, false, dim, Sum::Squares, Width::Eight, level, job)?,
            false => None,
        };
        job.check()?;
        match whole.filter(|whole| is_fine(values, whole)) {
            // Centroids are rounded.
            Some(whole) => Self::with(values, Quantizer { integral: false, ..whole }, metric, job),
            None => Self::sixteen(values, dim, metric, level, job),
        }
    }

    /// The measure with 16-bit codes.
    pub fn sixteen<T: SimdReal>(
        values: &[T],
        dim: usize,
        metric: Metric,
        level: Level,
        job: &Job,
    ) -> Result<Option<Self>> {
        let outliers = values.len() / dim / ONE_OUTLIER_IN;
        let quantizer = Quantizer::fitting(values, outliers, dim, Sum::Squares, level, job)?;
        Self::with(values, quantizer, metric, job)
    }

    fn with<T: SimdReal>(
        values: &[T],
        quantizer: Quantizer,
        metric: Metric,
        job: &Job,
    ) -> Result<Option<Self>> {
        job.check()?;
        let (dim, level) = (quantizer.centre.len(), quantizer.level);
        let longest = longest_square(level, values, dim);
        job.check()?;
        Ok(quantizer.is_usual().then_some(Self { metric, level, quantizer, longest }))
    }

    /// The quantised centroids; `None` if one lies outside the range.
    pub fn quantized<T: SimdReal>(
        &self,
        rows: &Rows,
        values: &[T],
        job: &Job,
    ) -> Result<Option<QuantizedBase>> {
        let (metric, quantizer) = (Metric::SqEuclidean, self.quantizer.clone());
        let quantized = QuantizedBase::rounded(rows, values, metric, quantizer, job)?;
        Ok(Some(quantized).filter(|quantized| quantized.outliers.is_empty()))
    }

    /// Centroids, which were at `before` in the last round.
    pub fn centroids<'a, T: SimdReal, R>(
        &self,
        values: &'a [T],
        rounded: R,
        before: &[T],
    ) -> QuantizedCentroids<'a, T, R> {
        let (unit, dim) = (1.0 / self.quantizer.step, self.quantizer.centre.len());
        let pairs = values.chunks_exact(dim).zip(before.chunks_exact(dim));
        let moved = pairs.map(|(now, before)| {
            up(square_between(self.level, now, before).sqrt() * (1.0 + 1e-9) * unit)
        });
        let mut moved: Vec<f32> = moved.collect();
        moved.resize(values.len() / dim, 0.0);
        let most_moved = moved.iter().copied().fold(0.0, f32::max);
        let rounding = RoundingError::of::<T>(dim as f64);
        let mut centroids = QuantizedCentroids {
            values,
            rounded,
            moved,
            most_moved,
            metric: self.metric,
            rounding,
            unit,
            squares: 0.0,
            factor: up(1.0 + 2.0 * rounding.relative),
            offset: up(3.0 * rounding.absolute.sqrt() * unit),
            slack: 0.0,
            finite: f32::INFINITY,
        };
        if self.metric.sum() == Sum::Squares {
            // Infinite costs are equal, whatever the distances.
            centroids.finite = down((T::MAX.to_f64() / 4.0).sqrt() * unit);
        }
        if self.metric.sum() != Sum::Squares {
            let squares = values.chunks_exact(dim).map(|row| square(self.level, row));
            let (shortest, longest) = squares
                .fold((f64::INFINITY, 0.0f64), |(least, most), x| (least.min(x), most.max(x)));
            let both = self.longest + longest;
            let error = rounding.relative * both + rounding.absolute + 8.0 * T::EPSILON.to_f64();
            // Costs below 0 are 0.
            let of_zero = (both - 2.0).max(0.0);
            centroids.squares = both + 4.0 * error;
            centroids.slack = up(((longest - shortest) + of_zero + 4.0 * error) * unit * unit);
        }
        centroids
    }
}

impl<T: SimdReal, R> QuantizedCentroids<'_, T, R> {
    /// Upper bound on the distance of a centroid of this cost.
    pub fn most(&self, cost: T) -> f32 {
        let RoundingError { relative, absolute, .. } = self.rounding;
        let largest_sum = self.metric.largest_sum(cost).to_f64();
        let distance = match self.metric.sum() {
            Sum::Squares => (largest_sum.sqrt() + absolute.sqrt()) * (1.0 + relative),
            _ => (self.squares + 2.0 * largest_sum).max(0.0).sqrt(),
        };
        up(distance * self.unit)
    }

    /// Lower bound on the distance of a centroid of this cost.
    pub fn least(&self, cost: T) -> f32 {
        let RoundingError { relative, absolute, .. } = self.rounding;
        if self.metric.sum() != Sum::Squares || cost == T::INFINITY {
            return 0.0;
        }
        let square = (cost.to_f64() - absolute).max(0.0);
        down(square.sqrt() * (1.0 - relative) * self.unit)
    }

    /// The distance above which every centroid costs more than every centroid within `distance`.
    #[inline(always)]
    pub fn bound(&self, distance: f32) -> f32 {
        if distance > self.finite {
            return f32::INFINITY;
        }
        let bound = if self.slack > 0.0 {
            (distance * distance + self.slack).sqrt()
        } else {
            distance * self.factor + self.offset
        };
        bound * (1.0 + 4.0 * f32::EPSILON)
    }

    /// Lower bound on the distance to every centroid outside `squared_radius`, a squared distance of rows.
    pub fn beyond(&self, squared_radius: f64) -> f32 {
        down(squared_radius.sqrt() * self.unit * (1.0 - 1e-9))
    }
}

/// Whether rounding moves a centroid little, compared with the rows' distances from the centre.
fn is_fine<T: Real>(values: &[T], whole: &Quantizer) -> bool {
    let centre = &whole.centre;
    let square = |row: &[T]| {
        let differences = row.iter().zip(centre).map(|(x, c)| x.to_f64() - c);
        differences.map(|x| x * x).sum::<f64>()
    };
    let some = |rows: &[T]| rows.chunks_exact(centre.len()).map(square).sum::<f64>();
    let squares = in_parallel(values.chunks(TOGETHER * centre.len()), some);
    let count = (values.len() / centre.len()) as f64;
    // The squared rounding error of a uniform number is 1/12 on average.
    let rounded = centre.len() as f64 / 12.0;
    rounded * count <= FINE * FINE * squares.into_iter().sum::<f64>()
}
