//! The input of seeding.

use crate::device::contract::KMeansProblem;
use crate::matrix::Real;
use crate::metric::Metric;
use crate::rows::Rows;

/// Sampled elements, which determine the step of quantised codes, and the share of elements that is
/// clipped.
const SAMPLED: usize = 1 << 18;
const ONE_CUT_IN: usize = 4096;

/// The largest code.
const LARGEST: f64 = 127.0;

/// Rows to choose from.
pub(in super::super) struct SeedingInput<'a> {
    pub(in super::super) rows: &'a Rows,
    pub(in super::super) weights: Option<&'a [f64]>,
    pub(in super::super) metric: Metric,
    pub(in super::super) problem: &'a KMeansProblem,
}

impl SeedingInput<'_> {
    pub(super) fn dim(&self) -> usize {
        self.rows.matrix().dim()
    }

    /// Whether rows and origin have `dim` elements, and each row has a weight, if there are
    /// weights.
    pub(super) fn has_as_many(&self, dim: usize) -> bool {
        let has_weights = self.weights.is_none_or(|weights| weights.len() >= self.rows.len());
        self.dim() == dim && self.problem.origin.len() == dim && has_weights
    }

    /// The steps of a code per unit, chosen so that few elements are clipped.
    pub(super) fn inverse<T: Real>(&self) -> f64 {
        let (dim, values) = (self.dim(), self.rows.reals::<T>().unwrap_or_default());
        let distance = |(x, centre): (&T, &f64)| (x.to_f64() - centre).abs();
        let every = (values.len() / SAMPLED).max(1);
        let rows = values.chunks_exact(dim).step_by(every);
        let mut sample: Vec<f64> =
            rows.flat_map(|row| row.iter().zip(&self.problem.origin).map(distance)).collect();
        let unclipped = sample.len() - 1 - sample.len() / ONE_CUT_IN;
        let (_, most, _) = sample.select_nth_unstable_by(unclipped, f64::total_cmp);
        let inverse = LARGEST / if *most > 0.0 { *most } else { self.problem.farthest };
        if inverse.is_normal() { inverse } else { 1.0 }
    }
}
