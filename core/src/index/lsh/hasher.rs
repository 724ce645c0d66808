//! Settings shared by the hash functions of all tables.

use std::sync::Arc;

use super::family::{Family, Planes};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Metric;
use crate::random::Random;
use crate::rows::Rows;

/// Rows that are transformed at a time.
const TOGETHER: usize = 256;

/// Settings shared by the hash functions of all tables. Each function follows from them, the number
/// of the table, and its own number.
#[derive(Debug, Clone)]
pub struct Hasher {
    pub(super) family: Family,
    pub(super) metric: Metric,
    pub(super) seed: u64,
    pub(super) dim: usize,
    pub(super) planes: Planes,
    pub(super) is_zero_sum: bool,
    pub(super) shift: Option<Arc<Shift>>,
    /// The training rows of planes, transformed.
    pub(super) training: Arc<[f64]>,
    /// The coefficients of all planes of each table, if they were trained before.
    pub(super) known: Option<Arc<[Vec<f64>]>>,
}

/// The transformation of rows before they are multiplied by planes.
#[derive(Debug, Default)]
pub(super) struct Shift {
    /// Subtract the row's mean from each of its values.
    is_level: bool,
    /// Divide by the norm.
    is_unit: bool,
    /// Then subtract this point.
    centre: Vec<f64>,
}

impl Hasher {
    /// The hash functions of a family for a metric, for rows of `dim` dimensions. Under `pearson`
    /// the coefficients of a plane sum to 0, so that a row's mean has no influence.
    pub fn new(family: Family, metric: Metric, seed: u64, dim: usize) -> Self {
        let (planes, shift) = (Planes::Random, None);
        let is_zero_sum = metric == Metric::Pearson;
        let (training, known) = ([].into(), None);
        Self { family, metric, seed, dim, planes, is_zero_sum, shift, training, known }
    }

    /// Sets the construction of planes; with `is_zero_sum`, their coefficients sum to 0.
    pub fn with_planes(self, planes: Planes, is_zero_sum: bool) -> Self {
        let is_zero_sum = is_zero_sum || self.is_zero_sum;
        Self { planes, is_zero_sum, ..self }
    }

    /// Normalises rows before hashing: to length 1 under `cosine`, and to mean 0 and length 1 under
    /// `pearson`.
    pub fn with_unit_rows(self) -> Self {
        let is_level = self.metric == Metric::Pearson;
        let is_unit = is_level || self.metric == Metric::Cosine;
        if !is_unit {
            return self;
        }
        let shift = Shift { is_level, is_unit, centre: Vec::new() };
        Self { shift: Some(Arc::new(shift)), ..self }
    }

    /// Moves the planes from the origin to the mean of `rows`.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn with_centre_of(self, rows: &Rows, job: &Job) -> Result<Self> {
        let hasher = self.with_unit_rows();
        let mut centre = vec![0.0; hasher.dim];
        let all = rows.len() as f64;
        for first in (0..rows.len()).step_by(TOGETHER) {
            job.check()?;
            let some = rows.slice(first..rows.len().min(first + TOGETHER));
            for row in hasher.seen(&some).chunks_exact(hasher.dim) {
                centre.iter_mut().zip(row).for_each(|(sum, x)| *sum += x / all);
            }
        }
        Ok(hasher.with_centre(centre))
    }

    /// Moves the planes from the origin to `centre`.
    pub fn with_centre(self, centre: Vec<f64>) -> Self {
        let hasher = self.with_unit_rows();
        let (is_level, is_unit) =
            hasher.shift.as_ref().map_or((false, false), |shift| (shift.is_level, shift.is_unit));
        Self { shift: Some(Arc::new(Shift { is_level, is_unit, centre })), ..hasher }
    }

    /// The centre that planes go through; empty for the origin.
    pub fn centre(&self) -> &[f64] {
        self.shift.as_ref().map_or(&[], |shift| &shift.centre)
    }

    /// Sets planes that were trained before: for each table, its coefficients plane by plane.
    pub fn with_known_planes(self, planes: Vec<Vec<f64>>) -> Self {
        Self { known: Some(planes.into()), ..self }
    }

    /// Trains planes on `rows`.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn with_training(self, rows: &Rows, job: &Job) -> Result<Self> {
        let mut training = Vec::with_capacity(rows.len() * self.dim);
        for first in (0..rows.len()).step_by(TOGETHER) {
            job.check()?;
            training.extend(self.seen(&rows.slice(first..rows.len().min(first + TOGETHER))));
        }
        Ok(Self { training: training.into(), ..self })
    }

    /// Drops the training rows, once all planes are trained.
    pub fn forget_training(&mut self) {
        self.training = [].into();
    }

    /// The family of functions.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Whether rows are transformed before hashing.
    pub fn changes_rows(&self) -> bool {
        self.shift.is_some()
    }

    /// The number of dimensions of a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Bytes of `functions` hash functions.
    pub fn bytes(&self, functions: usize) -> usize {
        match self.family {
            Family::PStable | Family::Hyperplane => {
                self.dim * functions.next_multiple_of(8) * size_of::<f64>()
            }
            Family::Bits | Family::MinHash => functions * size_of::<u64>(),
        }
    }

    /// Largest number of hash functions of a table.
    pub fn most(&self) -> usize {
        match (self.family, self.planes) {
            (Family::Bits, _) => self.dim,
            (Family::Hyperplane, Planes::Orthogonal | Planes::Trained) => {
                self.dim - usize::from(self.is_zero_sum).min(self.dim)
            }
            _ => usize::MAX,
        }
    }

    /// Transformed rows, in float64.
    fn seen(&self, rows: &Rows) -> Vec<f64> {
        let none = Shift::default();
        self.shift.as_deref().unwrap_or(&none).apply(rows)
    }

    /// The norm of each transformed row.
    pub fn lengths(&self, rows: &Rows) -> Vec<f64> {
        let length = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut lengths = Vec::with_capacity(rows.len());
        for first in (0..rows.len()).step_by(TOGETHER) {
            let some = rows.slice(first..rows.len().min(first + TOGETHER));
            lengths.extend(self.seen(&some).chunks_exact(self.dim.max(1)).map(length));
        }
        lengths
    }

    /// The norm of the centre.
    pub fn shifted_by(&self) -> f64 {
        let centre = self.shift.iter().flat_map(|shift| &shift.centre);
        centre.map(|x| x * x).sum::<f64>().sqrt()
    }
}

impl Shift {
    pub(super) fn apply(&self, rows: &Rows) -> Vec<f64> {
        let dim = rows.matrix().dim();
        if let Some(x) = rows.reals::<f32>() {
            self.changed(x, dim)
        } else {
            rows.reals::<f64>().map_or_else(Vec::new, |x| self.changed(x, dim))
        }
    }

    fn changed<T: Real>(&self, rows: &[T], dim: usize) -> Vec<f64> {
        let mut changed: Vec<f64> = rows.iter().map(|x| x.to_f64()).collect();
        for row in changed.chunks_exact_mut(dim.max(1)) {
            if self.is_unit {
                let largest = row.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                if largest > 0.0 {
                    row.iter_mut().for_each(|x| *x /= largest);
                }
            }
            if self.is_level {
                let mean = row.iter().sum::<f64>() / dim as f64;
                row.iter_mut().for_each(|x| *x -= mean);
            }
            if self.is_unit {
                let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
                if length > 0.0 {
                    row.iter_mut().for_each(|x| *x /= length);
                }
            }
            row.iter_mut().zip(&self.centre).for_each(|(x, centre)| *x -= centre);
        }
        changed
    }
}

/// The random generator of a hash function.
pub(super) fn random_of(seed: u64, table: usize, function: usize) -> Random {
    let mut random = Random::new(seed);
    let mut random = Random::new(random.bits() ^ table as u64);
    let mut random = Random::new(random.bits() ^ function as u64);
    Random::new(random.bits())
}
