//! What clustering keeps about rows: the sums of groups of them, and how far each is from what was
//! chosen so far.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::matrix::{Elements, Real, Rows};
use crate::metric::Metric;

use super::{Cancel, Distances, Work, in_parallel};

/// Sums of rows in groups, in whole numbers: they come out the same in whatever order rows are added
/// and taken away.
///
/// A coordinate counts in steps of a power of two, from the mean of all rows on, so that the sum of
/// all of them takes 62 bits. A mean errs by at most a step: the largest coordinate times the number
/// of rows times 2⁻⁶¹.
#[derive(Debug, Clone)]
pub struct Groups {
    pub(super) origin: Vec<f64>,
    pub(super) per_unit: f64,
    pub(super) per_weight: f64,
    pub(super) sums: Vec<i64>,
    pub(super) weights: Vec<i64>,
}

impl Groups {
    /// `k` groups without rows, for sums of these values, row by row, with these weights, from this
    /// origin on.
    ///
    /// # Errors
    /// [`Error::Unsatisfiable`] if values are so large that float64 cannot hold their sum.
    pub fn try_new<T: Real>(
        values: &[T],
        weights: Option<&[f64]>,
        origin: Vec<f64>,
        k: usize,
    ) -> Result<Self> {
        let dim = origin.len();
        let rows = values.len() / dim.max(1);
        const BLOCK: usize = 4096;
        let blocks = values.chunks(BLOCK * dim.max(1)).enumerate().collect();
        let largest = in_parallel(blocks, |(block, values): (usize, &[T])| {
            let reach = |(i, row): (usize, &[T])| {
                let weight = weights.map_or(1.0, |weights| weights[block * BLOCK + i]);
                let far = row.iter().zip(&origin).map(|(x, o)| (x.to_f64() - o).abs());
                weight * far.fold(0.0, f64::max)
            };
            values.chunks_exact(dim.max(1)).enumerate().map(reach).fold(0.0, f64::max)
        });
        let largest = largest.into_iter().fold(0.0, f64::max);
        let heaviest = weights.map_or(1.0, |weights| weights.iter().copied().fold(0.0, f64::max));
        let steps = |largest: f64| {
            let bits = (largest * rows as f64).log2().ceil();
            if largest == 0.0 { 1.0 } else { 2f64.powi(61 - bits.clamp(-900.0, 900.0) as i32) }
        };
        if !(largest * rows as f64 <= 1e270 && heaviest * rows as f64 <= 1e270) {
            let message = "kmeans: vectors or weights too large to be added up";
            return Err(Error::Unsatisfiable(message.to_string()));
        }
        Ok(Self {
            origin,
            per_unit: steps(largest),
            per_weight: steps(heaviest),
            sums: vec![0; k * dim],
            weights: vec![0; k],
        })
    }

    /// The same groups without rows.
    pub fn cleared(&self) -> Self {
        let (sums, weights) = (vec![0; self.sums.len()], vec![0; self.weights.len()]);
        Self { origin: self.origin.clone(), sums, weights, ..*self }
    }

    /// Move a row from one group, if it was in any, to another.
    #[inline(always)]
    pub fn shift<T: Real>(&mut self, row: &[T], weight: f64, from: Option<u32>, to: u32) {
        let heavy = (weight * self.per_weight).round_ties_even() as i64;
        self.weights[to as usize] += heavy;
        if let Some(from) = from {
            self.weights[from as usize] -= heavy;
        }
        let (dim, steps) = (self.origin.len(), weight * self.per_unit);
        let whole =
            |(x, origin): (&T, &f64)| ((x.to_f64() - origin) * steps).round_ties_even() as i64;
        for (sum, pair) in
            self.sums[to as usize * dim..][..dim].iter_mut().zip(row.iter().zip(&self.origin))
        {
            *sum += whole(pair);
        }
        if let Some(from) = from {
            for (sum, pair) in
                self.sums[from as usize * dim..][..dim].iter_mut().zip(row.iter().zip(&self.origin))
            {
                *sum -= whole(pair);
            }
        }
    }

    /// Add what another one has.
    pub fn absorb(&mut self, other: &Self) {
        self.sums.iter_mut().zip(&other.sums).for_each(|(a, b)| *a += b);
        self.weights.iter_mut().zip(&other.weights).for_each(|(a, b)| *a += b);
    }

    /// The groups of no weight, ascending.
    pub fn empty(&self) -> Vec<usize> {
        (0..self.weights.len()).filter(|group| self.weights[*group] == 0).collect()
    }

    /// The weighted mean of a group's rows; `None` if they have no weight.
    pub fn mean(&self, group: usize) -> Option<impl Iterator<Item = f64>> {
        let (dim, weight) = (self.origin.len(), self.weights[group]);
        let total = weight as f64 / self.per_weight * self.per_unit;
        let sums = self.sums[group * dim..][..dim].iter().zip(&self.origin);
        (weight != 0).then(|| sums.map(move |(sum, origin)| origin + *sum as f64 / total))
    }
}

/// The squared distances that centroids moved, added up: in each centroid and then over all of them
/// by 32 sums that take turns, added up in pairs.
pub fn shift<T: Real>(before: &[T], after: &[T], dim: usize) -> f64 {
    let pairs = before.chunks_exact(dim.max(1)).zip(after.chunks_exact(dim.max(1)));
    add_in_turns(pairs.map(|(before, after)| {
        let ways = before.iter().zip(after).map(|(a, b)| b.to_f64() - a.to_f64());
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

/// Rows that stay on a device, with what Lloyd's rounds know about them: the cluster of each, and
/// the sums of [`Groups`]. Everything comes out as it would on the host, bit by bit.
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
    /// [`Error::Cancelled`] if the flag is raised, between some rounds and others.
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
    fn groups(&mut self) -> Result<Groups>;

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
    pub empty: Groups,
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

    /// The weight of a row times its cost.
    fn share(&self, row: usize) -> f64 {
        let weight = self.weights.as_ref().map_or(1.0, |weights| weights[row]);
        match &self.costs {
            None => weight,
            Some(Distances::F32(costs)) => weight * f64::from(costs[row]),
            Some(Distances::F64(costs)) => weight * costs[row],
        }
    }

    /// A row, with a probability in proportion to weight times cost, for a number from 0 to 1.
    pub fn draw(&self, unit: f64) -> u32 {
        let total: f64 = self.totals.iter().sum();
        let mut left = unit * total;
        let mut last = 0;
        for (block, sum) in self.totals.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
            let rows = block * SPREAD_BLOCK..self.rows.len().min((block + 1) * SPREAD_BLOCK);
            if left >= *sum {
                left -= sum;
                last = rows.end - 1;
                continue;
            }
            for row in rows {
                let share = self.share(row);
                if share > 0.0 {
                    last = row;
                    if left < share {
                        return row as u32;
                    }
                    left -= share;
                }
            }
        }
        // Rounding has eaten up the end, or nothing costs anything.
        let any = (unit * self.rows.len() as f64) as usize;
        if total > 0.0 { last as u32 } else { any.min(self.rows.len() - 1) as u32 }
    }
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
