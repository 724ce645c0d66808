//! The projection of rows for products of 16-bit codes, from a sample: whether it pays, and on how many directions.

use std::ops::Range;

use super::principal_directions::PrincipalDirections;
use super::values::Values;
use crate::device::cpu::plan::{self, DIRECTIONS, DbscanStrategy};
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::Result;
use crate::job::Job;
use crate::parallel::map_in_parallel;

/// Rows of a task.
const TASK: usize = 256;

/// Rows of the sample of which directions are taken, rows of it compared with each other, and the least rows of a
/// sample.
const SAMPLED: usize = 1024;
const COMPARED: usize = 192;
const LEAST_SAMPLE: usize = 32;
/// The most numbers of a sample, which has at least 64 rows in any case.
const MOST_NUMBERS: usize = 1 << 20;

/// Directions are tried in steps of this many.
const STEP: usize = 16;

/// Rows longer than this, scaled, have no projections.
pub(super) const FARTHEST: f64 = 1e3;
/// Rows beyond the quantile `1 − FAR_SHARE` of lengths are outliers without bounds, if the longest row is more than
/// `FAR` times as long as the quantile.
const FAR_SHARE: f64 = 0.001;
const FAR: f64 = 4.0;

/// A map of rows to the numbers whose products are formed.
pub(super) struct Projection {
    /// The centre, which is subtracted from every row, and the factor that multiplies the difference.
    centre: Vec<f64>,
    scale: f64,
    /// The length of the longest row, scaled.
    pub longest: f64,
    /// The largest squared distance that may be within eps, of scaled rows.
    pub squared_eps: f64,
    /// Directions to project on; `None` for all dimensions as they are.
    pub leading: Option<PrincipalDirections>,
}

impl Projection {
    /// `None` if direct sums are faster or bounds impossible.
    pub fn new<T: SimdReal>(values: &Values<'_, T>, job: &Job) -> Result<Option<Self>> {
        let (rows, dim) = (values.rows(), values.dim);
        let strategy = plan::dbscan(values.within.metric(), rows, dim);
        let DbscanStrategy::Sampled { directions } = strategy else { return Ok(None) };
        if !values.directions().iter().all(|of| of.inverse.is_finite()) {
            return Ok(None);
        }
        let sampled = (MOST_NUMBERS / dim).clamp(64, SAMPLED);
        let in_sample = (sampled + COMPARED + DIRECTIONS) * dim + sampled * DIRECTIONS;
        let bytes = rows * size_of::<f64>() + in_sample * size_of::<f32>();
        let _reserved = job.reserve("a sample of rows", bytes)?;
        let sample: Vec<usize> = (0..rows).step_by(rows.div_ceil(sampled)).collect();
        let mut centre = vec![0.0; dim];
        for row in &sample {
            let share = 1.0 / sample.len() as f64;
            centre.iter_mut().enumerate().for_each(|(i, mean)| {
                *mean += values.coordinate(*row, i) * share;
            });
        }
        let mut projection = Self {
            centre,
            scale: 1.0,
            longest: 1.0,
            squared_eps: values.within.bounds_of_boxes(dim).0,
            leading: None,
        };
        let (radius, longest) = projection.lengths(values, job)?;
        projection.scale = 1.0 / radius;
        projection.longest = longest * projection.scale;
        projection.squared_eps *= projection.scale * projection.scale * (1.0 + 1e-9);
        // Squares far from over- and underflow; not all rows within eps of each other.
        if !(1e-100..1e100).contains(&radius) || projection.squared_eps > 4.0 {
            return Ok(None);
        }
        job.check()?;
        let (mut rows_of, mut squares) = (Vec::with_capacity(sample.len() * dim), Vec::new());
        let mut scaled = vec![0.0; dim];
        for row in sample {
            let square = projection.scale(values, row, &mut scaled);
            if square <= 1.0 {
                rows_of.extend_from_slice(&scaled);
                squares.push(square);
            }
        }
        job.check()?;
        // If nearly all rows of the sample are far from the rest, it tells nothing.
        let is_enough = squares.len() >= LEAST_SAMPLE;
        Ok(if is_enough { projection.choose(&rows_of, &squares, rows, directions) } else { None })
    }

    /// The length of the longest row that is not far from all others, and of the longest.
    fn lengths<T: SimdReal>(&self, values: &Values<'_, T>, job: &Job) -> Result<(f64, f64)> {
        let square = |row| {
            let centre = self.centre.iter().enumerate();
            let differences = centre.map(|(i, centre)| values.coordinate(row, i) - centre);
            differences.map(|x| x * x).sum::<f64>()
        };
        let mut squares = map_in_parallel(values.rows(), TASK, square);
        job.check()?;
        let usual = ((1.0 - FAR_SHARE) * (squares.len() - 1) as f64) as usize;
        let (_, usual, longer) = squares.select_nth_unstable_by(usual, f64::total_cmp);
        let longest = longer.iter().fold(*usual, |most, square| most.max(*square));
        let square = if longest <= *usual * FAR * FAR { longest } else { *usual };
        Ok((square.sqrt() * (1.0 + 1e-9), longest.sqrt() * (1.0 + 1e-9)))
    }

    /// Numbers of a projection: one for each direction, or all dimensions.
    pub fn count(&self) -> usize {
        self.leading.as_ref().map_or(self.centre.len(), PrincipalDirections::count)
    }

    /// Projects some rows on the directions, or keeps their first dimensions, up to the room in `projected`; sets
    /// their squared lengths.
    pub fn project<T: SimdReal>(
        &self,
        values: &Values<'_, T>,
        rows: Range<usize>,
        projected: &mut [f32],
        squares: &mut [f64],
    ) {
        let dim = self.centre.len();
        let mut scaled = vec![0.0; rows.len() * dim];
        for ((row, to), square) in rows.zip(scaled.chunks_exact_mut(dim)).zip(&mut *squares) {
            *square = self.scale(values, row, to);
        }
        match &self.leading {
            Some(leading) => leading.project(&scaled, projected),
            None => {
                let stored_dims = projected.len() / squares.len();
                let rows = projected.chunks_exact_mut(stored_dims).zip(scaled.chunks_exact(dim));
                rows.for_each(|(to, row)| to.copy_from_slice(&row[..stored_dims]));
            }
        }
    }

    /// Upper bound on the error of a projection of a row of length 1.
    pub fn error(&self) -> f64 {
        f64::from(f32::EPSILON) + self.leading.as_ref().map_or(0.0, PrincipalDirections::error)
    }

    /// Scales a row; returns its squared length, which is above 1 for an outlier.
    pub fn scale<T: SimdReal>(&self, values: &Values<'_, T>, row: usize, to: &mut [f32]) -> f64 {
        let mut square = 0.0;
        for (i, (to, centre)) in to.iter_mut().zip(&self.centre).enumerate() {
            let x = (values.coordinate(row, i) - centre) * self.scale;
            square += x * x;
            *to = x as f32;
        }
        if square > FARTHEST * FARTHEST {
            to.fill(0.0);
        }
        square
    }

    /// Chooses the number of directions of the least cost, up to `most`, from a sample and its squared lengths.
    fn choose(mut self, sample: &[f32], squares: &[f64], rows: usize, most: usize) -> Option<Self> {
        let dim = self.centre.len();
        // A sample says little about more directions than half of its rows.
        let most = most.min(squares.len() / 2);
        let leading = PrincipalDirections::of(sample, dim, most);
        let step = squares.len().div_ceil(COMPARED).max(1);
        let squares: Vec<f64> = squares.iter().step_by(step).copied().collect();
        let compared = sample.chunks_exact(dim).step_by(step).flatten().copied();
        let sample: Vec<f32> = compared.collect();
        let mut projected = vec![0.0; squares.len() * leading.count()];
        leading.project(&sample, &mut projected);
        let exactly =
            share(&ProjectionBounds::new(&sample, dim, &squares).bounds_in(dim), self.squared_eps);
        let mut bounds = ProjectionBounds::new(&projected, leading.count(), &squares);
        let mut best = (plan::filter_cost(dim, dim as f64, exactly), None);
        for count in (STEP..=leading.count()).step_by(STEP) {
            let products = count as f64 + plan::projection_cost(dim, count, rows);
            let passing = share(&bounds.bounds_in(count), self.squared_eps);
            let cost = plan::filter_cost(dim, products, passing);
            if cost < best.0 {
                best = (cost, Some(count));
            }
        }
        self.leading = best.1.map(|count| leading.first(count));
        plan::filter_pays(best.0, dim).then_some(self)
    }
}

/// Lower bounds on the squared distances of all pairs of some rows, by a growing number of their coordinates.
struct ProjectionBounds<'a> {
    rows: Vec<&'a [f32]>,
    count: usize,
    /// For each pair, the squared distance in the first `count` coordinates.
    squares: Vec<f64>,
    /// For each row, its squared length in the other coordinates.
    tails: Vec<f64>,
}

impl<'a> ProjectionBounds<'a> {
    fn new(numbers: &'a [f32], each: usize, squares: &[f64]) -> Self {
        let rows: Vec<_> = numbers.chunks_exact(each.max(1)).collect();
        let pairs = rows.len() * rows.len().saturating_sub(1) / 2;
        Self { rows, count: 0, squares: vec![0.0; pairs], tails: squares.to_vec() }
    }

    /// Bounds by the first `count` coordinates, at least as many as before.
    fn bounds_in(&mut self, count: usize) -> Vec<f64> {
        let more = std::mem::replace(&mut self.count, count)..count;
        let rows = self.rows.iter().map(|row| &row[more.clone()]);
        let square = |x: f32| f64::from(x * x);
        for (tail, row) in self.tails.iter_mut().zip(rows.clone()) {
            *tail -= row.iter().map(|x| square(*x)).sum::<f64>();
        }
        let tails: Vec<f64> = self.tails.iter().map(|tail| tail.max(0.0).sqrt()).collect();
        let mut bounds = Vec::with_capacity(self.squares.len());
        let mut squares = self.squares.iter_mut();
        for (i, a) in rows.clone().enumerate() {
            for ((b, tail), total) in rows.clone().zip(&tails).take(i).zip(&mut squares) {
                *total += a.iter().zip(b).map(|(x, y)| square(x - y)).sum::<f64>();
                bounds.push(*total + (tails[i] - tail).powi(2));
            }
        }
        bounds
    }
}

/// The share of squared distances that are at most `limit`.
fn share(bounds: &[f64], limit: f64) -> f64 {
    let within = bounds.iter().filter(|bounds| **bounds <= limit).count();
    within as f64 / bounds.len().max(1) as f64
}
