//! The k nearest so far, of one query.

use crate::matrix::Real;
use crate::metric::Metric;

/// A base row at its distance.
#[derive(Debug, Clone, Copy)]
pub(super) struct Neighbor<T> {
    pub distance: T,
    pub row: u32,
}

impl<T: Real> Neighbor<T> {
    /// Nearer first, then the earlier row. Distances are never NaN.
    #[inline(always)]
    fn key(&self) -> T::Key {
        self.distance.key(self.row)
    }
}

/// Keeps the k smallest of what it is offered, in a buffer that is cut back to k whenever it fills.
#[derive(Debug, Clone)]
pub(super) struct Selection<T> {
    k: usize,
    metric: Metric,
    entries: Vec<Neighbor<T>>,
    /// The k-th smallest when the buffer was last cut back.
    worst: Option<Neighbor<T>>,
    reach: T,
}

impl<T: Real> Selection<T> {
    pub fn new(k: usize, metric: Metric) -> Self {
        Self { k, metric, entries: Vec::new(), worst: None, reach: T::INFINITY }
    }

    /// At most how many it keeps.
    pub fn k(&self) -> usize {
        self.k
    }

    /// An empty selection that takes what this one would still take.
    pub fn sibling(&self) -> Self {
        Self { entries: Vec::new(), ..*self }
    }

    /// No sum above this one can enter.
    #[inline(always)]
    pub fn reach(&self) -> T {
        self.reach
    }

    /// Take nothing that comes after this neighbour, which will be offered itself.
    pub fn narrow(&mut self, neighbor: Neighbor<T>) {
        if self.worst.is_some_and(|worst| worst.key() <= neighbor.key()) {
            return;
        }
        self.reach = self.metric.reach(neighbor.distance);
        self.worst = Some(neighbor);
    }

    /// Consider a base row with this sum.
    #[inline]
    pub fn offer(&mut self, sum: T, row: u32) {
        self.insert(Neighbor { distance: self.metric.distance(sum), row });
    }

    /// Consider a base row at this distance.
    #[inline]
    pub fn insert(&mut self, candidate: Neighbor<T>) {
        if self.worst.is_some_and(|worst| candidate.key() > worst.key()) {
            return;
        }
        self.entries.push(candidate);
        if self.entries.len() >= self.k + (self.k / 4).clamp(8, 1024) {
            self.cut();
        }
    }

    /// Consider everything another selection kept.
    pub fn absorb(&mut self, other: Self) {
        other.entries.into_iter().for_each(|entry| self.insert(entry));
    }

    /// Drop all but the k smallest, if there are more.
    pub fn cut(&mut self) {
        if self.entries.len() < self.k {
            return;
        }
        let last = self.k - 1;
        let (_, worst, _) = self.entries.select_nth_unstable_by_key(last, Neighbor::key);
        let worst = *worst;
        self.entries.truncate(self.k);
        self.reach = self.metric.reach(worst.distance);
        self.worst = Some(worst);
    }

    /// The k smallest, ascending.
    pub fn into_sorted(mut self) -> Vec<Neighbor<T>> {
        self.cut();
        self.entries.sort_unstable_by_key(Neighbor::key);
        self.entries
    }
}
