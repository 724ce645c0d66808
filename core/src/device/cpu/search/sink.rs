//! Sinks of the pairs that a search compares, and the top-k list, which keeps the k nearest.

use crate::device::contract::{Enough, NO_ROW};
use crate::device::cpu::simd::ordered_sums::prefetch;
use crate::matrix::Real;
use crate::metric::Metric;

/// A base row at its distance.
#[derive(Debug, Clone, Copy)]
pub(super) struct Neighbor<T> {
    pub distance: T,
    pub row: u32,
}

impl<T: Real> Neighbor<T> {
    /// After every row at any distance.
    const LAST: Self = Self { distance: T::INFINITY, row: NO_ROW };

    /// Nearer first, then the earlier row. Distances are never NaN.
    #[inline(always)]
    fn key(&self) -> T::Key {
        self.distance.key(self.row)
    }

    /// The order of keys, without making them.
    #[inline(always)]
    fn is_before(&self, other: &Self) -> bool {
        self.distance < other.distance || self.distance == other.distance && self.row < other.row
    }
}

/// The consumer of one query's pairs. A search offers it every pair whose sum is within its threshold once, in
/// any order, from one thread at a time. It changes nothing but itself.
pub(super) trait Sink<T>: Send + Sync {
    /// The threshold: no pair with a larger sum matters.
    fn threshold(&self) -> T;

    /// The most pairs that can matter: of more, only the nearest do.
    fn most(&self) -> usize;

    /// Takes a base row with this sum.
    fn offer(&mut self, sum: T, row: u32);

    /// Takes a base row at this distance.
    fn insert(&mut self, neighbor: Neighbor<T>);

    /// An empty sink that takes what this one would still take.
    fn sibling(&self) -> Self;

    /// Takes everything that a sibling took.
    fn absorb(&mut self, other: Self);
}

/// Up to this k, a list is kept in order, so that each neighbour lowers the threshold at once.
const MOST_IN_ORDER: usize = 32;

/// The top-k list of a query: it keeps the k smallest pairs offered, up to [`MOST_IN_ORDER`] in order, more in a buffer
/// that is cut back to k whenever it fills.
#[derive(Debug, Clone)]
pub(super) struct TopK<T> {
    k: usize,
    metric: Metric,
    enough: Option<EnoughLimits<T>>,
    entries: Vec<Neighbor<T>>,
    /// The k-th smallest neighbour as last known, or the last that matters.
    worst: Neighbor<T>,
    /// An upper bound on the sum of `worst`.
    threshold: T,
}

/// The constants of an [`Enough`] in the element type, rounded up.
#[derive(Debug, Clone, Copy)]
struct EnoughLimits<T> {
    k: usize,
    root: T,
    factor: T,
    absolute: T,
}

impl<T: Real> EnoughLimits<T> {
    fn new(enough: Enough) -> Self {
        let [root, factor, absolute] = enough.limits();
        Self { k: enough.k, root, factor, absolute }
    }

    /// The distance up to which further neighbours matter, from that of the `k`-th.
    #[inline(always)]
    fn up_to(&self, last: T) -> T {
        let square = if self.root > T::ZERO { self.squared(last) } else { last };
        square * self.factor + self.absolute
    }

    /// `(√last + root)²`. Not inlined, so that the slow root is not computed for every number.
    #[inline(never)]
    fn squared(&self, last: T) -> T {
        let root = last.sqrt() + self.root;
        root * root
    }
}

impl<T: Real> TopK<T> {
    pub fn new(k: usize, metric: Metric) -> Self {
        let (entries, worst) = (Vec::new(), Neighbor::LAST);
        Self { k, metric, enough: None, entries, worst, threshold: T::INFINITY }
    }

    /// Takes only neighbours that matter by `enough` from now on.
    pub fn limit(&mut self, enough: Option<Enough>) {
        let enough = enough.filter(|enough| (1..self.k).contains(&enough.k));
        self.enough = enough.map(EnoughLimits::new);
    }

    /// The most neighbours it keeps.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Number of neighbours found.
    pub fn count(&self) -> usize {
        self.entries.len().min(self.k)
    }

    /// The number of neighbours from which on the list has a threshold.
    #[inline]
    fn bounding(&self) -> usize {
        self.enough.map_or(self.k, |enough| enough.k)
    }

    /// Sets the threshold to the last neighbour that matters: `kth` is the distance at rank
    /// [`bounding`](Self::bounding), `last` the last of a full list.
    #[inline]
    fn bound(&mut self, kth: T, last: Option<Neighbor<T>>) {
        let far = self.enough.map(|enough| enough.up_to(kth));
        let far = far.map(|distance| Neighbor { distance, row: NO_ROW });
        let end = match (far, last) {
            (Some(far), Some(last)) => Some(if last.is_before(&far) { last } else { far }),
            (far, last) => far.or(last),
        };
        end.into_iter().for_each(|end| self.end_at(end));
    }

    #[inline]
    fn end_at(&mut self, worst: Neighbor<T>) {
        self.threshold = self.metric.largest_sum(worst.distance);
        self.worst = worst;
    }

    /// Rejects from now on all neighbours behind this one, which will be offered itself.
    pub fn tighten(&mut self, neighbor: Neighbor<T>) {
        if neighbor.is_before(&self.worst) {
            self.end_at(neighbor);
        }
    }

    /// Inserts one of the k smallest into a list in order.
    #[inline]
    fn insert_in_order(&mut self, candidate: Neighbor<T>) {
        if self.entries.len() == self.k {
            self.entries.pop();
        } else if self.entries.capacity() == 0 {
            self.entries.reserve_exact(self.k);
        }
        let nearer = self.entries.iter().rposition(|entry| entry.is_before(&candidate));
        let place = nearer.map_or(0, |last| last + 1);
        self.entries.insert(place, candidate);
        let (count, bounding) = (self.entries.len(), self.bounding());
        if count < bounding || place >= bounding && count < self.k {
            return;
        }
        let last = if count == self.k { self.entries.last().copied() } else { None };
        self.bound(self.entries[bounding - 1].distance, last);
        while self.entries.last().is_some_and(|last| self.worst.is_before(last)) {
            self.entries.pop();
        }
    }

    /// Drops all but the k smallest that matter, if there are more.
    pub fn cut(&mut self) {
        let bounding = self.bounding();
        if self.entries.len() < bounding {
            return;
        }
        let mut last = None;
        if self.entries.len() >= self.k {
            let (_, worst, _) = self.entries.select_nth_unstable_by_key(self.k - 1, Neighbor::key);
            last = Some(*worst);
            self.entries.truncate(self.k);
        }
        let mut kth = last;
        if bounding < self.k {
            let (_, neighbor, _) =
                self.entries.select_nth_unstable_by_key(bounding - 1, Neighbor::key);
            kth = Some(*neighbor);
        }
        if let Some(kth) = kth {
            self.bound(kth.distance, last);
        }
        if self.enough.is_some() {
            let worst = self.worst;
            self.entries.retain(|entry| !worst.is_before(entry));
        }
    }

    /// Prefetches the neighbours of a short list.
    pub fn prefetch(&self) {
        prefetch(&self.entries[..self.entries.len().min(MOST_IN_ORDER)]);
    }

    /// The k smallest, ascending.
    pub fn take_sorted(&mut self) -> Vec<Neighbor<T>> {
        if self.k > MOST_IN_ORDER {
            self.cut();
            self.entries.sort_unstable_by_key(Neighbor::key);
        }
        std::mem::take(&mut self.entries)
    }
}

impl<T: Real> Sink<T> for TopK<T> {
    #[inline(always)]
    fn threshold(&self) -> T {
        self.threshold
    }

    #[inline(always)]
    fn most(&self) -> usize {
        self.k
    }

    #[inline]
    fn offer(&mut self, sum: T, row: u32) {
        self.insert(Neighbor { distance: self.metric.distance(sum), row });
    }

    #[inline]
    fn insert(&mut self, candidate: Neighbor<T>) {
        if self.worst.is_before(&candidate) {
            return;
        }
        if self.k <= MOST_IN_ORDER {
            return self.insert_in_order(candidate);
        }
        self.entries.push(candidate);
        if self.entries.len() >= self.k + (self.k / 4).clamp(8, 1024) {
            self.cut();
        }
    }

    fn sibling(&self) -> Self {
        Self { entries: Vec::new(), ..*self }
    }

    fn absorb(&mut self, other: Self) {
        other.entries.into_iter().for_each(|entry| self.insert(entry));
    }
}
