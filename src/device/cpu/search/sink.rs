//! Sinks, which consume the pairs that a search compares, and the one that keeps the k nearest.

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

/// Consumes the pairs of one query. A search offers it every pair whose sum is within reach once, in
/// any order.
pub(super) trait Sink<T>: Send + Sync {
    /// A bound: no pair with a larger sum matters.
    fn reach(&self) -> T;

    /// The most pairs that can matter; if there are more, these are the nearest.
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

/// Up to so many neighbours are kept in order, so that each bounds the reach at once.
const FEW: usize = 32;

/// The sink of `top_k`: keeps the k smallest pairs offered: a few in order, more in a buffer that is cut back to k
/// whenever it fills.
#[derive(Debug, Clone)]
pub(super) struct Selection<T> {
    k: usize,
    metric: Metric,
    entries: Vec<Neighbor<T>>,
    /// None that comes after this one is taken: the k-th smallest, when that was last known.
    worst: Option<Neighbor<T>>,
    reach: T,
}

impl<T: Real> Selection<T> {
    pub fn new(k: usize, metric: Metric) -> Self {
        Self { k, metric, entries: Vec::new(), worst: None, reach: T::INFINITY }
    }

    /// The most neighbours it keeps.
    pub fn k(&self) -> usize {
        self.k
    }

    /// How many neighbours were found.
    pub fn count(&self) -> usize {
        self.entries.len().min(self.k)
    }

    /// Takes nothing that comes after this neighbour, which will be offered itself.
    pub fn narrow(&mut self, neighbor: Neighbor<T>) {
        if self.worst.is_some_and(|worst| worst.key() <= neighbor.key()) {
            return;
        }
        self.reach = self.metric.reach(neighbor.distance);
        self.worst = Some(neighbor);
    }

    /// Takes one of the k smallest so far, where all are in order.
    #[inline]
    fn insert_in_order(&mut self, candidate: Neighbor<T>) {
        if self.entries.len() == self.k {
            self.entries.pop();
        }
        let key = candidate.key();
        let nearer = self.entries.iter().rposition(|entry| entry.key() < key);
        self.entries.insert(nearer.map_or(0, |last| last + 1), candidate);
        if let Some(worst) = self.entries.get(self.k - 1) {
            self.reach = self.metric.reach(worst.distance);
            self.worst = Some(*worst);
        }
    }

    /// Drops all but the k smallest, if there are more.
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

impl<T: Real> Sink<T> for Selection<T> {
    #[inline(always)]
    fn reach(&self) -> T {
        self.reach
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
        if self.worst.is_some_and(|worst| candidate.key() > worst.key()) {
            return;
        }
        if self.k <= FEW {
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
