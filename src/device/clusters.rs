//! What clustering keeps about rows: the sums of groups of them, and how far each is from what was
//! chosen so far.

use std::ops::Range;
use std::sync::Arc;

use super::sums::{ExactSums, Scaled, Steps};
use super::{Cancel, Distances, Work};
use crate::error::Result;
use crate::matrix::{Elements, Real, Rows};
use crate::metric::Metric;

/// The rows of clusters added up, exactly: nothing depends on the order in which rows are added and
/// taken away, and what other clusters and dimensions hold makes no difference.
///
/// A mean is the sum of weight times coordinate, each product rounded once to the 53 bits of float64,
/// over the sum of the weights: sums are exact until each is rounded to float64, and so is the
/// quotient. It errs by at most 4 units in the last place (float64) of Σ w |x| / Σ w.
#[derive(Debug, Clone)]
pub struct ClusterSums {
    /// Rows that weigh anything.
    pub(super) counts: Vec<i64>,
    pub(super) sums: ExactSums,
    /// Where rows do not all weigh 1.
    weights: Option<ExactSums>,
}

impl ClusterSums {
    /// `k` clusters without rows, for these values, row by row, with these weights.
    pub fn new<T: Real>(values: &[T], weights: Option<&[f64]>, dim: usize, k: usize) -> Self {
        let sums = ExactSums::new(Arc::new(Steps::choose(values, dim, weights)), k);
        let weights =
            weights.map(|weights| ExactSums::new(Arc::new(Steps::choose(weights, 1, None)), k));
        Self { counts: vec![0; k], sums, weights }
    }

    /// The same clusters without rows.
    pub fn cleared(&self) -> Self {
        let weights = self.weights.as_ref().map(ExactSums::cleared);
        Self { counts: vec![0; self.counts.len()], sums: self.sums.cleared(), weights }
    }

    /// Move a row from one cluster, if it was in any, to another.
    #[inline(always)]
    pub fn shift<T: Real>(&mut self, row: &[T], weight: f64, from: Option<u32>, to: u32) {
        if weight == 0.0 {
            return;
        }
        let (from, to) = (from.map(|from| from as usize), to as usize);
        self.counts[to] += 1;
        if let Some(from) = from {
            self.counts[from] -= 1;
        }
        self.sums.shift(row, weight, from, to);
        if let Some(weights) = &mut self.weights {
            weights.shift(&[weight], 1.0, from, to);
        }
    }

    /// Add what another one has.
    pub fn absorb(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(a, b)| *a += b);
        self.sums.absorb(&other.sums);
        if let (Some(weights), Some(other)) = (&mut self.weights, &other.weights) {
            weights.absorb(other);
        }
    }

    /// The clusters of no weight, ascending.
    pub fn empty(&self) -> Vec<usize> {
        (0..self.counts.len()).filter(|cluster| self.counts[*cluster] == 0).collect()
    }

    /// The weighted mean of a cluster's rows; `None` if they have no weight.
    pub fn mean(&self, cluster: usize) -> Option<impl Iterator<Item = f64>> {
        let count = self.counts[cluster];
        let weight = match &self.weights {
            Some(weights) => weights.total(cluster, 0),
            None => Scaled::whole(count),
        };
        let mean = move |column| self.sums.total(cluster, column).over(weight);
        (count != 0).then(|| (0..self.sums.width()).map(mean))
    }
}

/// Whether no squared distance overflows float32 between vectors of elements up to `largest`: sums
/// stay below half of the largest number, which leaves room for their rounding.
pub fn squares_are_finite(dim: usize, largest: f64) -> bool {
    dim as f64 * (2.0 * largest).powi(2) < f64::from(f32::MAX) / 2.0
}

/// The squared distances that centroids moved, added up: in each centroid and then over all of them
/// by 32 sums that take turns, added up in pairs. Coordinates are multiplied by a power of two first,
/// so that squares of float64 do not overflow.
pub fn shift<T: Real>(before: &[T], after: &[T], dim: usize, unit: f64) -> f64 {
    let pairs = before.chunks_exact(dim.max(1)).zip(after.chunks_exact(dim.max(1)));
    add_in_turns(pairs.map(|(before, after)| {
        let ways = before.iter().zip(after).map(|(a, b)| b.to_f64() * unit - a.to_f64() * unit);
        add_in_turns(ways.map(|way| way * way))
    }))
}

fn add_in_turns(values: impl Iterator<Item = f64>) -> f64 {
    let mut sums = [0.0; 32];
    values.enumerate().for_each(|(i, value)| sums[i % 32] += value);
    for apart in [16, 8, 4, 2, 1] {
        (0..apart).for_each(|i| sums[i] += sums[i + apart]);
    }
    sums[0]
}

/// What is known about rows before they stay on a device.
#[derive(Debug, Clone, Copy)]
pub struct LloydStart<'a> {
    /// Sums of no rows, as many as there are clusters.
    pub empty: &'a ClusterSums,
    /// A point amid the rows, …
    pub origin: &'a [f64],
    /// … and the largest difference of an element from its own.
    pub farthest: f64,
    /// Squared distances that the centroids may still move in the last round.
    pub tolerance: f64,
}

/// Rows that stay on a device, with what Lloyd's rounds know about them: the cluster of each, and
/// the [`ClusterSums`]. Everything comes out as it would on the host, bit by bit.
pub trait Resident: Send {
    /// Begin with these centroids; no row is in a cluster.
    ///
    /// # Errors
    /// What the device says; so for all others.
    fn start(&mut self, centroids: &[f32]) -> Result<()>;

    /// Go on with other centroids; rows are in the clusters they are in.
    ///
    /// # Errors
    /// See [`start`](Self::start).
    fn go_on(&mut self, centroids: &[f32]) -> Result<()>;

    /// Rounds of assigning all rows and moving all centroids, `limit` of them unless one of
    /// [`End`] comes first.
    ///
    /// # Errors
    /// [`Error::Cancelled`](crate::Error::Cancelled) if the flag is raised, between some rounds and others.
    fn run(&mut self, limit: usize, cancel: &Cancel) -> Result<Stretch>;

    /// Put every row into the cluster of its nearest centroid. False if that cannot be done here.
    ///
    /// # Errors
    /// See [`start`](Self::start).
    fn assign(&mut self) -> Result<bool>;

    /// The cluster of every row, and its squared distance to that centroid.
    ///
    /// # Errors
    /// See [`start`](Self::start).
    fn assigned(&mut self) -> Result<(Vec<u32>, Vec<f32>)>;

    /// The centroids.
    ///
    /// # Errors
    /// See [`start`](Self::start).
    fn centroids(&mut self) -> Result<Vec<f32>>;

    /// The sums of all clusters.
    ///
    /// # Errors
    /// See [`start`](Self::start).
    fn sums(&mut self) -> Result<ClusterSums>;

    /// What it took since the last time somebody asked.
    ///
    /// # Errors
    /// See [`start`](Self::start).
    fn take_work(&mut self) -> Result<Work>;
}

/// A group of rows that is to be divided into clusters by itself.
#[derive(Debug, Clone)]
pub struct GroupStart {
    /// Which of all rows it has.
    pub rows: Range<usize>,
    /// Sums of no rows, as many as there are clusters.
    pub empty: ClusterSums,
    /// Squared distances that the centroids may still move in the last round.
    pub tolerance: f64,
    /// The first centroids.
    pub centroids: Vec<f32>,
}

/// A group of rows after all rounds.
#[derive(Debug, Clone)]
pub struct GroupEnd {
    /// The centroids.
    pub centroids: Vec<f32>,
    /// For each row, the cluster of the nearest one, …
    pub labels: Vec<u32>,
    /// … and its squared distance.
    pub costs: Vec<f32>,
    /// Rounds.
    pub iterations: usize,
    /// Rows that changed their cluster in the last one.
    pub moved: usize,
}

/// Some rounds on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// How many.
    pub rounds: usize,
    /// Rows that changed their cluster in the last one.
    pub moved: usize,
    /// Why there were no more.
    pub end: End,
}

/// Why rounds ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// There were as many as asked for.
    Limit,
    /// No row moved.
    Stable,
    /// Centroids moved no more than the tolerance.
    Converged,
    /// Rows were assigned and added up in a last round, after which a cluster is empty; the
    /// centroids are those of before.
    EmptyCluster,
    /// Too many centroids are equally near to rows. What the device has is useless; start again
    /// elsewhere.
    Crowded,
}

/// How far every row is from the nearest of those chosen so far.
#[derive(Debug, Clone)]
pub struct Spread {
    pub(super) rows: Rows,
    pub(super) weights: Option<Vec<f64>>,
    pub(super) metric: Metric,
    /// Nothing before the first one was chosen.
    pub(super) costs: Option<Distances>,
    /// For each block of rows, weight times cost, added up in order.
    pub(super) totals: Vec<f64>,
}

/// Rows whose costs are added up one after the other.
pub(super) const SPREAD_BLOCK: usize = 1024;

impl Spread {
    /// Nothing chosen yet. The metric's distances are added up.
    pub fn new(rows: &Rows, weights: Option<&[f64]>, metric: Metric) -> Self {
        let weights = weights.map(<[f64]>::to_vec);
        let blocks = (0..rows.len()).step_by(SPREAD_BLOCK);
        let total = |start: usize| match &weights {
            Some(weights) => weights[start..].iter().take(SPREAD_BLOCK).sum(),
            None => (rows.len() - start).min(SPREAD_BLOCK) as f64,
        };
        let totals = blocks.map(total).collect();
        Self { rows: rows.clone(), weights, metric, costs: None, totals }
    }

    fn weight(&self, row: usize) -> f64 {
        self.weights.as_ref().map_or(1.0, |weights| weights[row])
    }

    /// The weight of a row times its cost.
    fn share(&self, row: usize) -> f64 {
        let weight = self.weight(row);
        match &self.costs {
            None => weight,
            Some(Distances::F32(costs)) => share(weight, f64::from(costs[row])),
            Some(Distances::F64(costs)) => share(weight, costs[row]),
        }
    }

    /// A row, with a probability in proportion to weight times cost, for a number from 0 to 1.
    pub fn draw(&self, unit: f64) -> u32 {
        let total: f64 = self.totals.iter().sum();
        let mut left = unit * total;
        let mut last = None;
        for (block, sum) in self.totals.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
            last = Some(block);
            if left >= *sum {
                left -= sum;
                continue;
            }
            for row in self.block(block) {
                let share = self.share(row);
                if share > 0.0 && left < share {
                    return row as u32;
                }
                left -= share;
            }
        }
        // Rounding has eaten up the end, or nothing costs anything.
        let of_block = |block| self.block(block).rev().find(|row| self.share(*row) > 0.0);
        last.and_then(of_block).map_or_else(|| self.any(unit), |row| row as u32)
    }

    fn block(&self, block: usize) -> Range<usize> {
        block * SPREAD_BLOCK..self.rows.len().min((block + 1) * SPREAD_BLOCK)
    }

    /// A row that weighs something, all with the same probability.
    fn any(&self, unit: f64) -> u32 {
        let all = self.rows.len();
        let of = |count: usize| ((unit * count as f64) as usize).min(count.saturating_sub(1));
        if self.weights.is_none() {
            return of(all) as u32;
        }
        let heavy = || (0..all).filter(|row| self.weight(*row) > 0.0);
        heavy().nth(of(heavy().count())).unwrap_or(0) as u32
    }
}

/// Weight times cost; a row without weight costs nothing, however far it is.
pub(super) fn share(weight: f64, cost: f64) -> f64 {
    if weight == 0.0 { 0.0 } else { weight * cost }
}

impl Distances {
    /// Distances of one type.
    pub fn of<T: Real>(values: Vec<T>) -> Self {
        match T::elements(values) {
            Elements::F32(values) => Self::F32(values),
            Elements::F64(values) => Self::F64(values),
            Elements::Bits(_) => unreachable!("distances are numbers"),
        }
    }

    /// The distances, if they are of this type.
    pub fn reals<T: Real>(self) -> Option<Vec<T>> {
        let elements = match self {
            Self::F32(values) => Elements::F32(values),
            Self::F64(values) => Elements::F64(values),
        };
        T::slice(&elements).map(<[T]>::to_vec)
    }
}
