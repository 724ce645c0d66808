//! The centroids of a round, rounded to whole numbers, and what distances from them say about costs.
//!
//! Distances here are Euclidean, in steps of the rows' rounding. Costs of products are bounded by them too:
//! `‖q − x‖² = ‖q‖² + ‖x‖² − 2 q·x`.

use rayon::prelude::*;

use super::lists::{down, up};
use crate::device::cpu::rounded::base::{Quantised, Rounding};
use crate::device::cpu::rounded::scale::{ONE_OUTLIER_IN, Scale};
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::Width;
use crate::device::cpu::simd::squares::{square, square_between};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::{Metric, Sum};
use crate::rows::Rows;

/// By which part of a row's length a centroid may be moved for 8 bits to be fine enough.
const FINE: f64 = 0.02;

/// How rows and centroids are compared.
pub(super) struct Measure {
    pub metric: Metric,
    pub level: Level,
    pub scale: Scale,
    /// The square of the longest row.
    longest: f64,
}

/// The centroids of a round.
pub(super) struct Centroids<'a, T, R> {
    pub values: &'a [T],
    /// The same in whole numbers.
    pub rounded: R,
    /// How far each has moved, and the farthest of them.
    pub moved: Vec<f32>,
    pub most_moved: f32,
    metric: Metric,
    rounding: Rounding,
    /// Steps in a unit of the rows.
    pub unit: f64,
    /// Of products: what the square of a distance exceeds twice the sum by, at most.
    squares: f64,
    /// By which factor and by how much distances from two centroids of equal costs differ, and of products by how much
    /// their squares do.
    factor: f32,
    apart: f32,
    slack: f32,
    /// Of squares: a distance up to which no cost overflows.
    finite: f32,
}

impl Measure {
    /// `None` if rows are too far from the usual sizes.
    pub fn new<T: Lanes>(
        values: &[T],
        dim: usize,
        (metric, level): (Metric, Level),
        job: &Job,
    ) -> Result<Option<Self>> {
        let whole = match level.has(Width::Eight) {
            true => Scale::new(values, dim, (Sum::Squares, Width::Eight), job)?,
            false => None,
        };
        job.check()?;
        match whole.filter(|whole| is_fine(values, whole)) {
            // Centroids are rounded.
            Some(whole) => {
                Self::with(values, Scale { integral: false, ..whole }, (metric, level), job)
            }
            None => Self::sixteen(values, dim, (metric, level), job),
        }
    }

    /// The same in 16 bits.
    pub fn sixteen<T: Lanes>(
        values: &[T],
        dim: usize,
        of: (Metric, Level),
        job: &Job,
    ) -> Result<Option<Self>> {
        let outliers = values.len() / dim / ONE_OUTLIER_IN;
        let scale = Scale::fitting((values, outliers), dim, Sum::Squares, job)?;
        Self::with(values, scale, of, job)
    }

    fn with<T: Lanes>(
        values: &[T],
        scale: Scale,
        (metric, level): (Metric, Level),
        job: &Job,
    ) -> Result<Option<Self>> {
        job.check()?;
        let dim = scale.centre.len();
        let longest = values.par_chunks_exact(dim).map(square).reduce(|| 0.0, f64::max);
        job.check()?;
        Ok(scale.is_usual().then_some(Self { metric, level, scale, longest }))
    }

    /// Centroids in whole numbers, or `None` if some are too far away for that.
    pub fn quantised<T: Lanes>(
        &self,
        (rows, values): (&Rows, &[T]),
        job: &Job,
    ) -> Result<Option<Quantised>> {
        let of = (Metric::SqEuclidean, self.level, self.scale.clone());
        let quantised = Quantised::rounded(rows, values, of, job)?;
        Ok(Some(quantised).filter(|quantised| quantised.outliers.is_empty()))
    }

    /// Centroids, which were at `before` in the last round.
    pub fn centroids<'a, T: Lanes, R>(
        &self,
        (values, rounded): (&'a [T], R),
        before: &[T],
    ) -> Centroids<'a, T, R> {
        let (unit, dim) = (1.0 / self.scale.step, self.scale.centre.len());
        let pairs = values.chunks_exact(dim).zip(before.chunks_exact(dim));
        let moved =
            pairs.map(|(now, before)| up(square_between(now, before).sqrt() * (1.0 + 1e-9) * unit));
        let mut moved: Vec<f32> = moved.collect();
        moved.resize(values.len() / dim, 0.0);
        let most_moved = moved.iter().copied().fold(0.0, f32::max);
        let rounding = Rounding::of::<T>(dim as f64);
        let mut centroids = Centroids {
            values,
            rounded,
            moved,
            most_moved,
            metric: self.metric,
            rounding,
            unit,
            squares: 0.0,
            factor: up(1.0 + 2.0 * rounding.relative),
            apart: up(3.0 * rounding.absolute.sqrt() * unit),
            slack: 0.0,
            finite: f32::INFINITY,
        };
        if self.metric.sum() == Sum::Squares {
            // Infinite costs are equal, whatever the distances.
            centroids.finite = down((T::MAX.to_f64() / 4.0).sqrt() * unit);
        }
        if self.metric.sum() != Sum::Squares {
            let squares = values.chunks_exact(dim).map(square);
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

impl<T: Lanes, R> Centroids<'_, T, R> {
    /// A distance that a centroid of this cost is not beyond.
    pub fn most(&self, cost: T) -> f32 {
        let Rounding { relative, absolute, .. } = self.rounding;
        let reach = self.metric.reach(cost).to_f64();
        let distance = match self.metric.sum() {
            Sum::Squares => (reach.sqrt() + absolute.sqrt()) * (1.0 + relative),
            _ => (self.squares + 2.0 * reach).max(0.0).sqrt(),
        };
        up(distance * self.unit)
    }

    /// A distance that a centroid of this cost is not nearer than.
    pub fn least(&self, cost: T) -> f32 {
        let Rounding { relative, absolute, .. } = self.rounding;
        if self.metric.sum() != Sum::Squares || cost == T::INFINITY {
            return 0.0;
        }
        let square = (cost.to_f64() - absolute).max(0.0);
        down(square.sqrt() * (1.0 - relative) * self.unit)
    }

    /// A distance such that what is beyond it costs more than what is within this one.
    #[inline(always)]
    pub fn bound(&self, distance: f32) -> f32 {
        if distance > self.finite {
            return f32::INFINITY;
        }
        let bound = if self.slack > 0.0 {
            (distance * distance + self.slack).sqrt()
        } else {
            distance * self.factor + self.apart
        };
        bound * (1.0 + 4.0 * f32::EPSILON)
    }

    /// What is not nearer than centroids outside of this reach, a squared distance of rows.
    pub fn beyond(&self, reach: f64) -> f32 {
        down(reach.sqrt() * self.unit * (1.0 - 1e-9))
    }
}

/// Whether rounding a centroid to whole numbers moves it by little, compared with how far rows are apart.
fn is_fine<T: Real>(values: &[T], whole: &Scale) -> bool {
    let centre = &whole.centre;
    let square = |row: &[T]| {
        let apart = row.iter().zip(centre).map(|(x, c)| x.to_f64() - c);
        apart.map(|x| x * x).sum::<f64>()
    };
    let rows = values.par_chunks_exact(centre.len());
    let count = rows.len() as f64;
    // The mean square of a number from 0 to 1 rounded to a whole one.
    let rounded = centre.len() as f64 / 12.0;
    rounded * count <= FINE * FINE * rows.map(square).sum::<f64>()
}
