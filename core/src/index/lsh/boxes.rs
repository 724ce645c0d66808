//! Boxes between hyperplanes, and the boxes within a radius of a row (Widerberg, chapter 6).
//!
//! A lower bound on distances: if orthonormal planes `a` separate a row from a query `q`, their
//! squared distance is at least `Σ (a·q)²`. So a box within radius `T` has `Σ (a·q)² ≤ T²` over the
//! planes between it and the query.

use crate::matrix::ElementKind;
use crate::metric::Metric;

/// Largest number of planes of a table whose boxes are searched by radius: a key has one bit per
/// plane.
pub const MOST_PLANES: usize = 64;

/// A test of whether a box of a table is near a row.
pub struct BoxesInRadius {
    /// The squared distance of the row to each plane.
    costs: Vec<f64>,
    /// The upper limit of their sum.
    limit: f64,
}

/// The upper limit of the sum of squared distances to crossed planes. It includes every row whose
/// distance is within the radius, whether computed exactly or with the rounding errors of element
/// type `kind`. Rows have `dim` dimensions; `size` is the sum of the norms of the query, the
/// longest row, and the centre subtracted from both.
pub fn limit(radius: f64, size: f64, metric: Metric, kind: ElementKind, dim: usize) -> f64 {
    let dim = dim as f64 + 8.0;
    // Each value has an error of up to (dim + 4) / 2 ulp of its size, at the query and at the row;
    // there are up to 64 values.
    let of_values = 16.0 * dim * f64::EPSILON * size;
    // The error of a distance is one ulp per dimension, …
    let (unit, least) = match kind {
        ElementKind::F64 => (f64::EPSILON, f64::from_bits(1)),
        _ => (f64::from(f32::EPSILON), f64::from(f32::from_bits(1))),
    };
    let of_radius = match metric {
        // … relative to 1, which bounds half of the squared chord, …
        Metric::Cosine | Metric::Pearson => (radius * radius + 4.0 * dim * unit).sqrt(),
        // … or relative to itself, plus the underflow of its squares.
        _ => radius * (1.0 + dim * unit) + (dim * least).sqrt(),
    };
    (of_radius + of_values).powi(2)
}

impl BoxesInRadius {
    /// A row with these values, at most [`MOST_PLANES`].
    pub fn new(values: &[f64], limit: f64) -> Self {
        // NaN, after an overflow, excludes no box.
        let cost = |value: &f64| if value.is_nan() { 0.0 } else { value * value };
        Self { costs: values.iter().map(cost).collect(), limit }
    }

    fn bit(&self, function: usize) -> u64 {
        1 << (self.costs.len() - 1 - function)
    }

    /// Whether the box whose sides differ in `flips` is within the limit. The sum is always taken
    /// in the order of the functions, so that a subset of crossed planes never has a larger sum.
    pub fn contains(&self, flips: u64) -> bool {
        let (mut left, mut sum) = (flips, 0.0);
        while left != 0 {
            let place = 63 - left.leading_zeros() as usize;
            sum += self.costs[self.costs.len() - 1 - place];
            left &= !(1 << place);
        }
        sum <= self.limit
    }

    /// The flipped sides of every box within the limit, the home box first; `None` if there are
    /// more than `most`.
    pub fn flips(&self, most: usize) -> Option<Vec<u64>> {
        let mut order: Vec<usize> = (0..self.costs.len()).collect();
        order.retain(|i| self.costs[*i] <= self.limit);
        order.sort_by(|a, b| self.costs[*a].total_cmp(&self.costs[*b]));
        let mut near = vec![0];
        // Sets to be extended by planes from position `next` of `order` on, with their sums.
        let mut open = vec![(0u64, 0.0, 0)];
        while let Some((flips, sum, next)) = open.pop() {
            if near.len() > most {
                return None;
            }
            for (i, function) in order.iter().enumerate().skip(next) {
                let sum: f64 = sum + self.costs[*function];
                // Slack for sums in another order.
                if sum > self.limit * (1.0 + 1e-9) {
                    break;
                }
                let flips = flips | self.bit(*function);
                if self.contains(flips) {
                    near.push(flips);
                }
                open.push((flips, sum, i + 1));
            }
        }
        Some(near)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn limit_of_f32(radius: f64, size: f64) -> f64 {
        limit(radius, size, Metric::L2, ElementKind::F32, 3)
    }

    #[test]
    fn every_near_box_is_found_once() {
        let mut random = Random::new(4);
        for planes in 1..12 {
            let values: Vec<f64> = (0..planes).map(|_| random.normal()).collect();
            for radius in [0.0, 0.3, 1.0, 2.0, 100.0] {
                let near = BoxesInRadius::new(&values, limit_of_f32(radius, 1.0));
                let expected: Vec<u64> =
                    (0..1 << planes).filter(|flips| near.contains(*flips)).collect();
                let mut listed = near.flips(expected.len()).expect("all of them");
                assert_eq!(listed[0], 0);
                assert!(near.flips(expected.len() - 1).is_none());
                listed.sort_unstable();
                assert_eq!(listed, expected);
                let by_hand = expected.iter().all(|flips| {
                    let crossed = (0..planes).filter(|i| flips >> (planes - 1 - i) & 1 == 1);
                    crossed.map(|i| values[i].powi(2)).sum::<f64>() <= (radius + 1e-3).powi(2)
                });
                assert!(by_hand);
            }
        }
    }

    #[test]
    fn values_that_overflowed_exclude_nothing() {
        let limit = limit_of_f32(1.0, f64::INFINITY);
        let near = BoxesInRadius::new(&[f64::NAN, f64::INFINITY], limit);
        assert_eq!(near.flips(4).map(|flips| flips.len()), Some(4));
        assert!(near.flips(3).is_none());
    }
}
