//! What the functions of all tables have in common.

use std::sync::Arc;

use super::family::{Family, Planes};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Metric;
use crate::random::Random;
use crate::rows::Rows;

/// Rows that are made ready at a time.
const TOGETHER: usize = 256;

/// What the functions of all tables have in common: with it, functions follow from the number of the
/// table and their own.
#[derive(Debug, Clone)]
pub struct Hasher {
    pub(super) family: Family,
    pub(super) metric: Metric,
    pub(super) seed: u64,
    pub(super) dim: usize,
    pub(super) planes: Planes,
    pub(super) is_zero_sum: bool,
    pub(super) shift: Option<Arc<Shift>>,
    /// Rows that planes are trained on, as planes see them.
    pub(super) training: Arc<[f64]>,
    /// The numbers of all planes of each table, if they are known.
    pub(super) known: Option<Arc<[Vec<f64>]>>,
}

/// How rows are changed before planes see them.
#[derive(Debug, Default)]
pub(super) struct Shift {
    /// Their own mean is subtracted.
    is_level: bool,
    /// They are divided by their length.
    is_unit: bool,
    /// Then this is subtracted.
    centre: Vec<f64>,
}

impl Hasher {
    /// Functions of a family for a metric, of rows of `dim` dimensions. Under `pearson` the numbers of
    /// a plane sum to 0, so that a row's mean is of no influence.
    pub fn new((family, metric): (Family, Metric), seed: u64, dim: usize) -> Self {
        let (planes, shift) = (Planes::Random, None);
        let is_zero_sum = metric == Metric::Pearson;
        let (training, known) = ([].into(), None);
        Self { family, metric, seed, dim, planes, is_zero_sum, shift, training, known }
    }

    /// Planes made in another way; with `is_zero_sum`, their numbers sum to 0.
    pub fn with_planes(self, planes: Planes, is_zero_sum: bool) -> Self {
        let is_zero_sum = is_zero_sum || self.is_zero_sum;
        Self { planes, is_zero_sum, ..self }
    }

    /// The same where planes see rows of length 1 under `cosine`, and under `pearson` those less
    /// their means.
    pub fn with_unit_rows(self) -> Self {
        let is_level = self.metric == Metric::Pearson;
        let is_unit = is_level || self.metric == Metric::Cosine;
        if !is_unit {
            return self;
        }
        let shift = Shift { is_level, is_unit, centre: Vec::new() };
        Self { shift: Some(Arc::new(shift)), ..self }
    }

    /// The same through the mean of these rows instead of the origin.
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

    /// The same through this point instead of the origin.
    pub fn with_centre(self, centre: Vec<f64>) -> Self {
        let hasher = self.with_unit_rows();
        let (is_level, is_unit) =
            hasher.shift.as_ref().map_or((false, false), |shift| (shift.is_level, shift.is_unit));
        Self { shift: Some(Arc::new(Shift { is_level, is_unit, centre })), ..hasher }
    }

    /// The point that planes go through; empty if it is the origin.
    pub fn centre(&self) -> &[f64] {
        self.shift.as_ref().map_or(&[], |shift| &shift.centre)
    }

    /// The same with planes that were trained before: of each table their numbers, plane by plane.
    pub fn with_known_planes(self, planes: Vec<Vec<f64>>) -> Self {
        Self { known: Some(planes.into()), ..self }
    }

    /// The same with planes trained on these rows.
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

    /// Drops the rows that planes were trained on, once there are all planes.
    pub fn forget_training(&mut self) {
        self.training = [].into();
    }

    /// The family of functions.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Whether rows are changed before planes see them.
    pub fn changes_rows(&self) -> bool {
        self.shift.is_some()
    }

    /// The dimensions of rows.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Bytes of so many functions.
    pub fn bytes(&self, functions: usize) -> usize {
        match self.family {
            Family::PStable | Family::Hyperplane => {
                self.dim * functions.next_multiple_of(8) * size_of::<f64>()
            }
            Family::Bits | Family::MinHash => functions * size_of::<u64>(),
        }
    }

    /// How many functions a table can have.
    pub fn most(&self) -> usize {
        match (self.family, self.planes) {
            (Family::Bits, _) => self.dim,
            (Family::Hyperplane, Planes::Orthogonal | Planes::Trained) => {
                self.dim - usize::from(self.is_zero_sum).min(self.dim)
            }
            _ => usize::MAX,
        }
    }

    /// Rows as planes see them, in float64.
    fn seen(&self, rows: &Rows) -> Vec<f64> {
        let none = Shift::default();
        self.shift.as_deref().unwrap_or(&none).apply(rows)
    }

    /// The length of each row, as planes see it.
    pub fn lengths(&self, rows: &Rows) -> Vec<f64> {
        let length = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut lengths = Vec::with_capacity(rows.len());
        for first in (0..rows.len()).step_by(TOGETHER) {
            let some = rows.slice(first..rows.len().min(first + TOGETHER));
            lengths.extend(self.seen(&some).chunks_exact(self.dim.max(1)).map(length));
        }
        lengths
    }

    /// The length of what is subtracted from rows.
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

/// The random numbers of a function.
pub(super) fn random_of(seed: u64, table: usize, function: usize) -> Random {
    let mut random = Random::new(seed);
    let mut random = Random::new(random.bits() ^ table as u64);
    let mut random = Random::new(random.bits() ^ function as u64);
    Random::new(random.bits())
}
