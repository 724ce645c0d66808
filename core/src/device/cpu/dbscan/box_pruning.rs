//! Tests of two boxes: all rows of one are farther than eps from all rows of the other, or all are within eps.

use crate::device::contract::Within;
use crate::metric::{Metric, Sum};

/// Decides pairs of boxes without their rows, where bounds are certain.
#[derive(Debug, Clone, Copy)]
pub(super) struct BoxPruning {
    metric: Metric,
    /// Thresholds: sums above `beyond` are certainly not within eps, and sums up to `inside` certainly are.
    beyond: f64,
    inside: f64,
}

impl BoxPruning {
    pub fn new(within: Within, coordinates: usize) -> Self {
        let (beyond, inside) = within.bounds_of_boxes(coordinates);
        Self { metric: within.metric(), beyond, inside }
    }

    /// Tests by lower bounds on sums of squares: lower bounds above `beyond` prove that rows are not within eps.
    pub fn beyond(beyond: f64) -> Self {
        Self { metric: Metric::SqEuclidean, beyond, inside: -1.0 }
    }

    /// Whether no row of one box is within eps of any row of the other.
    pub fn is_apart(&self, a: &[f64], b: &[f64]) -> bool {
        self.least(a, b) > self.beyond
    }

    /// Whether no row of a box is within eps of a point.
    pub fn is_apart_from(&self, point: &[f64], bounds: &[f64]) -> bool {
        let (low, high) = bounds.split_at(point.len());
        let least = match self.metric.sum() {
            Sum::DifferentBits | Sum::SharedBits => self.least(&[point[0], point[0]], bounds),
            sum => point.iter().zip(low.iter().zip(high)).fold(0.0, |total, (x, (low, high))| {
                let gap = (low - x).max(x - high).max(0.0);
                total + if sum == Sum::Absolute { gap } else { gap * gap }
            }),
        };
        least > self.beyond
    }

    /// Whether all rows of one box are within eps of all rows of the other.
    pub fn is_within(&self, a: &[f64], b: &[f64]) -> bool {
        self.most(a, b) <= self.inside
    }

    /// The least sum of a row of each box.
    fn least(&self, a: &[f64], b: &[f64]) -> f64 {
        let half = a.len() / 2;
        let ((a, a_high), (b, b_high)) = (a.split_at(half), b.split_at(half));
        match self.metric.sum() {
            Sum::DifferentBits => (a[0] - b_high[0]).max(b[0] - a_high[0]).max(0.0),
            Sum::SharedBits => {
                // At least the share of bits that the fuller row has beyond all of the other's.
                let (fewer, more) =
                    if a_high[0] < b[0] { (a_high[0], b[0]) } else { (b_high[0], a[0]) };
                if fewer < more { 1.0 - fewer / more } else { 0.0 }
            }
            sum => (0..half).fold(0.0, |total, i| {
                let gap = (a[i] - b_high[i]).max(b[i] - a_high[i]).max(0.0);
                total + if sum == Sum::Absolute { gap } else { gap * gap }
            }),
        }
    }

    /// The largest sum of a row of each box.
    fn most(&self, a: &[f64], b: &[f64]) -> f64 {
        let half = a.len() / 2;
        let ((a, a_high), (b, b_high)) = (a.split_at(half), b.split_at(half));
        match self.metric.sum() {
            Sum::DifferentBits => a_high[0] + b_high[0],
            Sum::SharedBits => 1.0,
            sum => (0..half).fold(0.0, |total, i| {
                let gap = (a_high[i] - b[i]).max(b_high[i] - a[i]);
                total + if sum == Sum::Absolute { gap } else { gap * gap }
            }),
        }
    }
}
