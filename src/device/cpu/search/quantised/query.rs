//! Queries rounded to whole numbers, and which sums they rule out.

/// A query rounded to whole numbers.
pub(super) struct Query {
    pub(super) words: Vec<i32>,
    /// The offset that the unsigned base adds to every product.
    pub(super) offset: f64,
    /// The square of the query, if neither it nor the base was rounded.
    pub(super) integral: Option<f64>,
    pub(super) bound: Bound,
    /// The last reach, and its distance, cached because reaches rarely change.
    pub(super) known: (f64, f64),
    /// Whether it lies far outside the range of the base, so that its bounds are loose.
    pub(super) far: bool,
}

pub(super) enum Bound {
    /// Lengths in steps.
    Squares {
        factor: f64,
        apart: f64,
        residual: f64,
        inverse: f64,
        square: f64,
    },
    Products {
        apart: f64,
        inverse: f64,
    },
    /// Every row passes.
    None,
}

/// A distance that the sums of all rows have been tightened for.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tightened {
    /// In steps, without the row's residual.
    pub(super) distance: f64,
    pub(super) most_slack: f64,
}

impl Query {
    /// The distance up to which a row without a residual may be within reach, in steps.
    pub(super) fn distance(&mut self, reach: f64) -> f64 {
        if self.known.0 != reach {
            let distance = match self.bound {
                Bound::Squares { factor, apart, inverse, .. } => {
                    reach.max(0.0).sqrt() * factor * inverse + apart
                }
                _ => f64::INFINITY,
            };
            self.known = (reach, distance);
        }
        self.known.1
    }

    /// The smallest sum of a pair that may be within reach.
    pub(super) fn least(&mut self, reach: f64, tightened: Tightened) -> i32 {
        let least = match self.bound {
            Bound::Squares { residual, square, .. } => {
                let own = self.distance(reach);
                // For a row of slack s: (own + residual − s)² = (own + residual)² − s (2 own + 2 residual − s), of
                // which the row's start already subtracts s (2 tightened + 2 residual − s).
                let too_much = 2.0 * tightened.most_slack * (tightened.distance - own).max(0.0);
                let most = (own + residual) * (own + residual) + too_much;
                (square - most * (1.0 + 1e-9)) / 2.0
            }
            Bound::Products { apart, inverse } => {
                let least = -reach - apart;
                (least - least.abs() * 1e-9) * inverse
            }
            Bound::None => return i32::MIN,
        };
        // The cast rounds towards zero, by less than 1, and saturates.
        let least = least + self.offset - 3.0;
        if least.is_nan() { i32::MIN } else { least as i32 }
    }
}
