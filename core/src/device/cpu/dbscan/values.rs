//! The values of rows of numbers: as points, or by their directions.

use crate::device::contract::Within;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::matrix::Real;
use crate::metric::{Direction, Sum};
use crate::parallel::map_in_parallel;

/// Rows of a task.
const TASK: usize = 4096;

/// Rows of numbers, as they were read.
pub(super) struct Values<'a, T> {
    values: &'a [T],
    pub dim: usize,
    pub within: Within,
    /// The rows' directions, if the metric compares those; else empty.
    directions: Vec<Direction>,
    _reserved: Reserved,
}

impl<'a, T: Real> Values<'a, T> {
    pub fn new(values: &'a [T], dim: usize, within: Within, job: &Job) -> Result<Self> {
        let is_direction = within.metric().sum() == Sum::Products;
        let bytes = if is_direction { values.len() / dim * size_of::<Direction>() } else { 0 };
        let _reserved = job.reserve("directions of rows", bytes)?;
        let directions = if is_direction {
            let of_row = |row: usize| within.direction(&values[row * dim..][..dim]);
            map_in_parallel(values.len() / dim, TASK, of_row)
        } else {
            Vec::new()
        };
        Ok(Self { values, dim, within, directions, _reserved })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.values.len() / self.dim
    }

    pub fn row(&self, row: usize) -> &'a [T] {
        &self.values[row * self.dim..][..self.dim]
    }

    /// Whether rows are compared by their directions.
    pub fn are_directions(&self) -> bool {
        !self.directions.is_empty()
    }

    /// The direction of each row; empty if the metric compares points.
    pub fn directions(&self) -> &[Direction] {
        &self.directions
    }

    /// A coordinate of a row: of its unit vector, if it is a direction.
    pub fn coordinate(&self, row: usize, i: usize) -> f64 {
        let x = self.values[row * self.dim + i].to_f64();
        match self.directions.get(row) {
            Some(of) => of.coordinate(x),
            None => x,
        }
    }

    /// A row's values as they are multiplied.
    pub fn centred(&self, row: usize) -> impl Iterator<Item = T> {
        let of = self.directions.get(row).copied();
        let centred = move |x: &T| match of {
            Some(of) => T::from_f64(x.to_f64() * of.unit - of.mean),
            None => *x,
        };
        self.row(row).iter().map(centred)
    }

    /// One over a row's length.
    pub fn inverse(&self, row: usize) -> T {
        self.directions.get(row).map_or(T::ONE, |of| T::from_f64(of.inverse))
    }

    /// Whether two rows are within eps of each other: the definition.
    pub fn are_near(&self, row: usize, other: usize) -> bool {
        match (self.directions.get(row), self.directions.get(other)) {
            (Some(a), Some(b)) => {
                self.within.holds_for_directions(self.row(row), a, self.row(other), b)
            }
            _ => self.within.holds(self.row(row), self.row(other)),
        }
    }

    /// Whether directions multiply values as they were read.
    pub fn are_as_read(&self, a: &Direction, b: &Direction) -> bool {
        [a, b].iter().all(|of| of.unit == 1.0 && of.mean == 0.0)
    }
}
