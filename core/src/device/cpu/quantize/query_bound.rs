//! Quantised queries: bounds between integer sums and the sums of the contract.

/// A quantised query.
pub(in crate::device::cpu) struct QuantizedQuery {
    /// The offset that the unsigned base adds to every product.
    pub(in crate::device::cpu) offset: f64,
    /// The square of the query, if neither it nor the base was rounded.
    pub(in crate::device::cpu) integral: Option<f64>,
    pub(in crate::device::cpu) bound: Bound,
    /// The last threshold of the sink, and the smallest sum within it.
    pub(in crate::device::cpu) known: (f64, i32),
    /// Whether it lies far outside the range of the base, where its bounds are loose.
    pub(in crate::device::cpu) far: bool,
}

pub(in crate::device::cpu) enum Bound {
    /// Lengths in steps.
    Squares { factor: f64, error: f64, residual: f64, inverse: f64, square: f64 },
    Products {
        error: f64,
        inverse: f64,
        /// The product of the query and the centre.
        of_centre: f64,
    },
    /// Every row passes.
    None,
}

impl QuantizedQuery {
    /// The smallest integer sum that a pair within the sink's threshold may have. The threshold rarely changes.
    #[inline]
    pub(in crate::device::cpu) fn least_now(&mut self, threshold: f64) -> i32 {
        if self.known.0 != threshold {
            self.known = (threshold, self.least(threshold));
        }
        self.known.1
    }

    /// The smallest integer sum that a pair within the threshold may have.
    pub(in crate::device::cpu) fn least(&self, threshold: f64) -> i32 {
        let least = match self.bound {
            Bound::Squares { factor, error, residual, inverse, square } => {
                let radius = threshold.max(0.0).sqrt() * factor * inverse + error + residual;
                (square - radius * radius * (1.0 + 1e-9)) / 2.0
            }
            Bound::Products { error, inverse, of_centre } => {
                let slack = 1e-14 * (threshold.abs() + of_centre.abs()) + 1e-9 * error;
                (-threshold - of_centre - error - slack) * inverse
            }
            Bound::None => return i32::MIN,
        };
        // The cast rounds towards zero, by less than 1, and saturates.
        let least = least + self.offset - 3.0;
        if least.is_nan() { i32::MIN } else { least as i32 }
    }

    /// Lower bound on the distance of a pair with this integer sum, by squares; 0 without a bound.
    pub(in crate::device::cpu) fn nearest(&self, sum: i32) -> f64 {
        let sum = f64::from(sum) - self.offset;
        match self.bound {
            Bound::Squares { error, residual, inverse, square, .. } => {
                let between = (square - 2.0 * sum).max(0.0).sqrt() - residual - error;
                (between / inverse * (1.0 - 1e-9)).max(0.0)
            }
            Bound::Products { .. } | Bound::None => 0.0,
        }
    }

    /// Upper bound on the sum of a pair with this integer sum.
    pub(in crate::device::cpu) fn most(&self, sum: i32) -> f64 {
        let sum = f64::from(sum) - self.offset;
        match self.bound {
            Bound::Squares { factor, error, residual, inverse, square } => {
                // A start may have lost a half.
                let length = (square - 2.0 * sum + 1.0).max(0.0).sqrt() + residual + error;
                let distance = length * factor / inverse;
                distance * distance * (1.0 + 1e-9)
            }
            Bound::Products { error, inverse, of_centre } => {
                let slack = 1e-14 * of_centre.abs() + 1e-9 * error;
                -sum / inverse * (1.0 - 1e-12 * sum.signum()) - of_centre + error + slack
            }
            Bound::None => f64::INFINITY,
        }
    }
}
