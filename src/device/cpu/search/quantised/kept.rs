//! Pairs that passed: where sums of whole numbers hardly err, few more than are asked for have to be computed at
//! the end.
//!
//! Base rows lie in panels each of which is a sample of all. Of the `k` nearest, hardly more than their share lie among
//! those visited so far: the pair of that rank tells what the least sum of the `k` nearest will probably be, long before
//! so many have been seen. Whether it was is known in the end; a query for which it was not searches again.

use crate::device::cpu::rounded::coarse::MOST_GUESSED;
use crate::device::cpu::rounded::query::Query;
use crate::matrix::Real;
use crate::metric::Metric;

/// The most pairs of a query that are kept.
const MOST: usize = 2 * MOST_GUESSED;

/// How many standard deviations more than their share of the nearest rows are expected among those visited, and how
/// many rows beside.
const DEVIATIONS: f64 = 3.5;
const BESIDE: f64 = 5.0;

/// The pairs of a query that passed and are not computed yet.
#[derive(Debug, Clone)]
pub(super) struct Kept {
    /// Sums of whole numbers, and places of rows.
    pairs: Vec<(i32, u32)>,
    /// Pairs with smaller sums are not among the nearest.
    least: i32,
    /// Pairs with smaller sums are probably not.
    guess: i32,
    /// Whether a guess may be made.
    guesses: bool,
    /// How many the last cut left.
    left: usize,
}

impl Kept {
    /// Of a query for which guesses may be made.
    pub fn new(guesses: bool) -> Self {
        Self { pairs: Vec::new(), least: i32::MIN, guess: i32::MIN, guesses, left: 0 }
    }

    /// Bytes of the pairs that are kept for the `k` nearest, of which there are at most `rows`.
    pub fn bytes(k: usize, rows: usize) -> usize {
        full(k).saturating_mul(2).min(rows) * size_of::<(i32, u32)>()
    }

    /// Pairs with smaller sums are not among the nearest, as far as is known or guessed.
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

    /// The rank among the pairs of the visited rows that is hardly better than `k` among those of all.
    fn rank(&self, k: usize, share: f64) -> usize {
        if !self.guesses || k > MOST_GUESSED {
            return k;
        }
        let expected = k as f64 * share;
        k.min((expected + DEVIATIONS * expected.sqrt() + BESIDE) as usize)
    }

    /// Drops the pairs that cannot be among the `k` nearest, or probably are not; returns whether that made room.
    pub fn cut<T: Real>(
        &mut self,
        (k, share): (usize, f64),
        metric: Metric,
        query: &Query,
    ) -> bool {
        let rank = self.rank(k, share);
        if self.pairs.len() >= rank {
            let (_, last, _) = self.pairs.select_nth_unstable_by(rank - 1, |a, b| b.0.cmp(&a.0));
            let most = query.most(last.0);
            // Rounded up. Different sums may still give equal distances; the row number then decides.
            let most = T::from_f64(most + most.abs() * 2.0 * T::EPSILON.to_f64()) + T::MIN_POSITIVE;
            let reach = metric.reach(metric.distance(most)).to_f64();
            let bound = if rank == k { &mut self.least } else { &mut self.guess };
            *bound = (*bound).max(query.least(reach));
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
        // With a guess they stay until there are far too many: they cannot be computed, and others dropped.
        self.pairs.len() < if self.has_guess() { full(k) } else { k + (k / 4).max(4) }
    }

    /// Whether pairs may have been dropped that are among the nearest.
    pub fn has_guess(&self) -> bool {
        self.guess > self.least
    }

    /// Whether no pair was dropped that may be among the nearest, of those visited; rows within the sink's reach have at
    /// least this sum.
    pub fn is_sure(&self, within: i32) -> bool {
        !self.has_guess() || self.guess <= within
    }

    /// All pairs, which are then kept no longer; no guess is made from then on.
    pub fn take(&mut self) -> Vec<(i32, u32)> {
        self.guesses = false;
        std::mem::take(&mut self.pairs)
    }

    /// Uses the memory of pairs that were taken again.
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
    k.saturating_add((k / 2).max(6)).min(MOST)
}
