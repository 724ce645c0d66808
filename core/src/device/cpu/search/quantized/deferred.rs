//! The candidates of a query: where integer sums hardly err, little more than `k` of them have to be computed in the
//! end.
//!
//! Base rows lie in panels, each of which is a sample of all rows. Among the rows visited, there is hardly more than
//! their expected share of the `k` nearest: the pair of that rank tells the probable threshold of the `k` nearest,
//! long before `k` pairs have been seen. Whether the guess was right is known in the end; a query with a wrong guess
//! searches again.

use crate::device::cpu::quantize::prefilter::MOST_GUESSED;
use crate::device::cpu::quantize::query_bound::QuantizedQuery;
use crate::matrix::Real;
use crate::metric::Metric;

/// The most pairs of a query that are kept.
const MOST_KEPT: usize = 2 * MOST_GUESSED;

/// A guess takes the rank of the expected share of the `k` nearest, plus this many standard deviations and this many
/// rows.
const DEVIATIONS: f64 = 3.5;
const MORE_ROWS: f64 = 5.0;

/// The candidates of a query: pairs that passed and are not computed yet.
#[derive(Debug, Clone)]
pub(super) struct DeferredPairs {
    /// Integer sums, and places of rows.
    pairs: Vec<(i32, u32)>,
    /// Pairs with smaller sums are not among the nearest.
    least: i32,
    /// Pairs with smaller sums are probably not among the nearest.
    guess: i32,
    /// Whether a guess may be made.
    guesses: bool,
    /// The number of pairs that the last cut left.
    left: usize,
}

impl DeferredPairs {
    /// An empty list, which may guess if `guesses` is set.
    pub fn new(guesses: bool) -> Self {
        Self { pairs: Vec::new(), least: i32::MIN, guess: i32::MIN, guesses, left: 0 }
    }

    /// Bytes of the pairs of one query, for the `k` nearest of `rows` rows.
    pub fn bytes(k: usize, rows: usize) -> usize {
        full(k).saturating_mul(2).min(rows) * size_of::<(i32, u32)>()
    }

    /// The threshold: pairs with smaller sums are, by bound or by guess, not among the nearest.
    #[inline(always)]
    pub fn least(&self) -> i32 {
        self.least.max(self.guess)
    }

    #[inline(always)]
    pub fn push(&mut self, sum: i32, place: u32) {
        self.pairs.push((sum, place));
    }

    /// Whether it is time to [cut](Self::cut), when `share` of all rows have been visited.
    pub fn is_full(&self, k: usize, share: f64) -> bool {
        let rank = self.rank(k, share);
        // Guesses become better as more rows are visited; one that leaves many equal pairs does not.
        let some = rank.max(self.left);
        self.pairs.len() >= if rank < k { (some + (some / 4).max(6)).min(full(k)) } else { full(k) }
    }

    /// The rank among visited rows that is probably no better than rank `k` among all rows.
    fn rank(&self, k: usize, share: f64) -> usize {
        if !self.guesses || k > MOST_GUESSED {
            return k;
        }
        let expected = k as f64 * share;
        k.min((expected + DEVIATIONS * expected.sqrt() + MORE_ROWS) as usize)
    }

    /// Drops the pairs not among the `k` nearest, by bound or by guess; returns whether this made room.
    pub fn cut<T: Real>(
        &mut self,
        k: usize,
        share: f64,
        metric: Metric,
        query: &QuantizedQuery,
    ) -> bool {
        let rank = self.rank(k, share);
        if self.pairs.len() >= rank {
            let (_, last, _) = self.pairs.select_nth_unstable_by(rank - 1, |a, b| b.0.cmp(&a.0));
            let most = query.most(last.0);
            // Rounded up. Different sums may still give equal distances; the row number then decides.
            let most = T::from_f64(most + most.abs() * 2.0 * T::EPSILON.to_f64()) + T::MIN_POSITIVE;
            let threshold = metric.largest_sum(metric.distance(most)).to_f64();
            let bound = if rank == k { &mut self.least } else { &mut self.guess };
            *bound = (*bound).max(query.least(threshold));
            let least = self.least();
            // The first ones are no smaller.
            let mut end = rank;
            for i in rank..self.pairs.len() {
                if self.pairs[i].0 >= least {
                    self.pairs.swap(end, i);
                    end += 1;
                }
            }
            self.pairs.truncate(end);
            self.left = end;
        }
        if k > MOST_GUESSED {
            return false;
        }
        // With a guess, pairs stay until there are far too many: those that were dropped could not be computed with
        // them.
        self.pairs.len() < if self.has_guess() { full(k) } else { k + (k / 4).max(4) }
    }

    /// Whether pairs may have been dropped that are among the nearest.
    pub fn has_guess(&self) -> bool {
        self.guess > self.least
    }

    /// Whether all visited pairs that may be among the nearest were kept; pairs within the sink's threshold have sums
    /// of at least `within`.
    pub fn is_sure(&self, within: i32) -> bool {
        !self.has_guess() || self.guess <= within
    }

    /// Takes all pairs out; no guess is made from then on.
    pub fn take(&mut self) -> Vec<(i32, u32)> {
        self.guesses = false;
        std::mem::take(&mut self.pairs)
    }

    /// Reuses the memory of pairs that were taken.
    pub fn give_back(&mut self, mut pairs: Vec<(i32, u32)>) {
        pairs.clear();
        self.pairs = pairs;
    }

    /// Drops all pairs, and takes no more: the query searches again.
    pub fn give_up(&mut self) {
        *self = Self { guess: i32::MAX, ..Self::new(false) };
    }
}

/// Pairs that are kept before they are cut.
fn full(k: usize) -> usize {
    k.saturating_add((k / 2).max(6)).min(MOST_KEPT)
}
