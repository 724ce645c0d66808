//! Pairs that passed: where sums of whole numbers hardly err, few more than are asked for have to be computed at
//! the end.

use crate::device::cpu::rounded::query::Query;
use crate::matrix::Real;
use crate::metric::Metric;

/// The most pairs of a query that are kept.
const MOST: usize = 8192;

/// The pairs of a query that passed and are not computed yet.
#[derive(Debug, Clone)]
pub(super) struct Kept {
    /// Sums of whole numbers, and rows.
    pairs: Vec<(i32, u32)>,
    /// Pairs with smaller sums are not among the nearest.
    least: i32,
}

impl Kept {
    pub fn new() -> Self {
        Self { pairs: Vec::new(), least: i32::MIN }
    }

    /// Bytes of the pairs that are kept for the `k` nearest, of which there are at most `rows`.
    pub fn bytes(k: usize, rows: usize) -> usize {
        full(k).saturating_mul(2).min(rows) * size_of::<(i32, u32)>()
    }

    /// Pairs with smaller sums are not among the nearest.
    #[inline(always)]
    pub fn least(&self) -> i32 {
        self.least
    }

    #[inline(always)]
    pub fn push(&mut self, sum: i32, row: u32) {
        self.pairs.push((sum, row));
    }

    /// Whether it is time to [cut](Self::cut).
    pub fn is_full(&self, k: usize) -> bool {
        self.pairs.len() >= full(k)
    }

    /// Drops the pairs that cannot be among the `k` nearest; returns whether that made room.
    pub fn cut<T: Real>(&mut self, k: usize, metric: Metric, query: &Query) -> bool {
        if self.pairs.len() > k {
            let (_, kth, _) = self.pairs.select_nth_unstable_by(k - 1, |a, b| b.0.cmp(&a.0));
            let most = query.most(kth.0);
            // Rounded up. Different sums may still give equal distances; the row number then decides.
            let most = T::from_f64(most + most.abs() * 2.0 * T::EPSILON.to_f64()) + T::MIN_POSITIVE;
            let reach = metric.reach(metric.distance(most)).to_f64();
            self.least = self.least.max(query.least(reach));
            // The first k are no smaller.
            let mut end = k;
            for i in k..self.pairs.len() {
                if self.pairs[i].0 >= self.least {
                    self.pairs.swap(end, i);
                    end += 1;
                }
            }
            self.pairs.truncate(end);
        }
        k <= MOST / 2 && self.pairs.len() < k + (k / 4).max(4)
    }

    /// All pairs, which are then kept no longer.
    pub fn take(&mut self) -> Vec<(i32, u32)> {
        std::mem::take(&mut self.pairs)
    }

    /// Uses the memory of pairs that were taken again.
    pub fn give_back(&mut self, mut pairs: Vec<(i32, u32)>) {
        pairs.clear();
        self.pairs = pairs;
    }
}

/// Pairs that are kept before they are cut.
fn full(k: usize) -> usize {
    k.saturating_add((k / 2).max(6)).min(MOST)
}
