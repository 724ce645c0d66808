//! Queries in whole numbers, and which sums they rule out.

/// A query in whole numbers.
pub(super) struct Query {
    pub(super) words: Vec<i32>,
    /// What the unsigned base adds to every product.
    pub(super) offset: f64,
    /// The square of a query that was not rounded, of a base that was not.
    pub(super) whole: Option<f64>,
    pub(super) bound: Bound,
    /// A reach, and the distance it means: reaches change seldom.
    pub(super) known: (f64, f64),
    /// It lies far out of the range of the base: its bounds are loose.
    pub(super) far: bool,
}

pub(super) enum Bound {
    /// Lengths in steps.
    Squares {
        factor: f64,
        apart: f64,
        rest: f64,
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
    /// In steps, without the rest of the row.
    pub(super) distance: f64,
    pub(super) most_spare: f64,
}

impl Query {
    /// The distance within which a row without a rest may be within reach, in steps.
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

    /// The least sum of a pair that may be within reach.
    pub(super) fn least(&mut self, reach: f64, tightened: Tightened) -> i32 {
        let least = match self.bound {
            Bound::Squares { rest, square, .. } => {
                let own = self.distance(reach);
                // For a row with s to spare: (own + rest − s)² = (own + rest)² − s (2 own + 2 rest − s),
                // of which the row's start has taken s (2 tightened + 2 rest − s) away.
                let too_much = 2.0 * tightened.most_spare * (tightened.distance - own).max(0.0);
                let most = (own + rest) * (own + rest) + too_much;
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
