//! Lower and upper bounds of a query's sums, and the rows they cannot rule out.

use crate::matrix::Real;
use crate::metric::{Metric, Sum};

/// Bounds on the error of a matrix product against a query's sum. See [`super::product`] for the
/// derivation.
pub(super) struct Bounds<T> {
    /// The factor of a product.
    pub factor: T,
    /// Half the growth of the bound's width with the norm of the base row.
    pub slope: T,
    /// The term that all lower bounds of this query have in common.
    common: T,
    squares: bool,
    unit: T,
    norm: T,
    least: T,
}

impl<T: Real> Bounds<T> {
    /// E relative to the norms.
    pub fn unit(dim: usize) -> f64 {
        (dim as f64 + 8.0) * T::EPSILON.to_f64()
    }

    pub fn new(metric: Metric, dim: usize, norm: f64) -> Self {
        let unit = Self::unit(dim);
        let squares = metric.sum() == Sum::Squares;
        // Each of about 4 d roundings in the subnormal range errs by at most one smallest subnormal.
        let least = (4.0 * dim as f64 + 16.0) * T::MIN_POSITIVE.to_f64() * T::EPSILON.to_f64();
        let (factor, slope, common) = if squares {
            (-2.0, 2.0 * unit * norm, norm * norm * (1.0 - unit))
        } else {
            (-1.0, unit * norm, 0.0)
        };
        Self {
            factor: T::from_f64(factor),
            slope: T::from_f64(slope),
            common: T::from_f64(common - least),
            squares,
            unit: T::from_f64(unit),
            norm: T::from_f64(norm),
            least: T::from_f64(least),
        }
    }

    /// The lower bound of a base row.
    #[inline(always)]
    pub fn lower(&self, product: T, offset: T, norm: T) -> T {
        let lower = product.mul_add(self.factor, offset);
        (-self.slope).mul_add(norm, lower) + self.common
    }

    /// Converts a limit on lower bounds to one without the common term.
    #[inline(always)]
    pub fn relative(&self, limit: T) -> T {
        let slack = T::EPSILON * (limit.abs() + self.common.abs());
        if limit.is_finite() { limit - self.common + slack } else { limit }
    }

    /// The difference of the upper and the lower bound: 2 E.
    #[inline(always)]
    pub fn width(&self, norm: T) -> T {
        let product = self.norm * norm;
        let scale = if self.squares { (self.norm + norm) * (self.norm + norm) } else { product };
        (self.unit * scale + self.least) * T::from_f64(2.01)
    }
}

/// A base row whose sum lies between two bounds; once computed, both are the sum.
#[derive(Clone, Copy)]
struct Candidate<T> {
    lower: T,
    upper: T,
    row: u32,
}

/// The rows that may be among a query's k nearest.
pub(super) struct Candidates<T> {
    k: usize,
    rows: Vec<Candidate<T>>,
    limit: T,
}

impl<T: Real> Candidates<T> {
    /// Bytes of a row.
    pub const BYTES: usize = size_of::<Candidate<T>>();

    /// The most rows that are kept for the `k` nearest.
    pub fn most(k: usize) -> usize {
        k.saturating_mul(2).saturating_add(32)
    }

    /// An empty set. `limit` is a sum that none of the k nearest exceeds.
    pub fn new(k: usize, limit: T) -> Self {
        Self { k, rows: Vec::new(), limit }
    }

    /// None of the k nearest has a lower bound above this.
    #[inline(always)]
    pub fn limit(&self) -> T {
        self.limit
    }

    #[inline(always)]
    pub fn push(&mut self, lower: T, upper: T, row: u32) {
        self.rows.push(Candidate { lower, upper, row });
    }

    /// Whether it is time to [prune](Self::prune).
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.rows.len() >= Self::most(self.k)
    }

    /// Whether pruning did not make enough room.
    pub fn is_crowded(&self) -> bool {
        self.rows.len() >= self.k.saturating_add(self.k / 2 + 24)
    }

    /// Drops the rows that the k-th smallest upper bound rules out.
    pub fn prune(&mut self, metric: Metric) {
        if self.rows.len() < self.k {
            return;
        }
        let by_upper = |a: &Candidate<T>, b: &Candidate<T>| order(a.upper, b.upper);
        let (_, kth, _) = self.rows.select_nth_unstable_by(self.k - 1, by_upper);
        // Different sums may still give equal distances; the row number then decides.
        let limit = metric.reach(metric.distance(kth.upper));
        if limit < self.limit {
            self.limit = limit;
        }
        let limit = self.limit;
        self.rows.retain(|candidate| candidate.lower <= limit);
    }

    /// Computes the sums still unknown; returns how many.
    #[inline(always)]
    pub fn settle(&mut self, sum: impl Fn(u32) -> T) -> u64 {
        let mut computed = 0;
        for candidate in self.rows.iter_mut().filter(|c| c.lower != c.upper) {
            let sum = sum(candidate.row);
            (candidate.lower, candidate.upper) = (sum, sum);
            computed += 1;
        }
        computed
    }

    /// Keeps the k nearest of settled rows.
    pub fn cut(&mut self, metric: Metric) {
        self.prune(metric);
        if self.rows.len() > self.k {
            self.rows.select_nth_unstable_by(self.k - 1, |a, b| {
                order(metric.distance(a.lower), metric.distance(b.lower)).then(a.row.cmp(&b.row))
            });
            self.rows.truncate(self.k);
        }
    }

    /// The sums of settled rows.
    pub fn into_sums(self) -> impl Iterator<Item = (T, u32)> {
        self.rows.into_iter().map(|candidate| (candidate.lower, candidate.row))
    }
}

fn order<T: Real>(a: T, b: T) -> std::cmp::Ordering {
    a.partial_cmp(&b).unwrap_or(std::cmp::Ordering::Equal)
}
