//! The rows and parameters of a problem, as runs and rounds use them.

use crate::algo::kmeans::params::KMeansParams;
use crate::device::{KMeansInput, KMeansProblem};
use crate::matrix::Real;
use crate::rows::Rows;

/// The rows of one problem, which get clusters of their own.
pub(super) struct ProblemInput<'a, T> {
    pub rows: Rows,
    pub values: &'a [T],
    pub dim: usize,
    pub weights: Option<&'a [f64]>,
    pub params: KMeansParams,
    /// See [`KMeansProblem`].
    pub unit: f64,
    pub tolerance: f64,
}

impl<'a, T: Real> ProblemInput<'a, T> {
    /// The rows of a problem within an input.
    pub fn new(
        problem: &KMeansProblem,
        input: KMeansInput<'a>,
        values: &'a [T],
        params: &KMeansParams,
    ) -> Self {
        let (range, dim) = (problem.rows.clone(), input.rows.matrix().dim());
        Self {
            rows: input.rows.slice(range.clone()),
            values: &values[range.start * dim..range.end * dim],
            dim,
            weights: input.weights.map(|weights| &weights[range]),
            params: KMeansParams { k: problem.k, ..params.clone() },
            unit: problem.unit,
            tolerance: problem.tolerance,
        }
    }

    pub fn weight(&self, row: usize) -> f64 {
        self.weights.map_or(1.0, |weights| weights[row])
    }

    pub fn row(&self, row: usize) -> &[T] {
        &self.values[row * self.dim..][..self.dim]
    }
}
