//! k-means: initial centroids, Lloyd's rounds, and their results.
//!
//! A session holds rows, and any number of *problems*: ranges of rows that are clustered separately.
//! Rows are uploaded once, however many runs and rounds follow.

use std::ops::Range;
use std::sync::Arc;

use super::super::cluster_sums::ClusterSums;
use super::{Distances, SearchDevice, Work};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::{ElementKind, Real};
use crate::metric::Metric;
use crate::random::Random;
use crate::rows::Rows;

/// Devices that k-means runs on.
pub trait KMeansDevice: SearchDevice {
    /// Makes rows ready for k-means; a device may begin to before `problems` returns what they are clustered as, which is
    /// expected to be of this shape.
    ///
    /// # Errors
    /// Those of `problems`, [`HostMemory`](crate::Error::HostMemory), and any error of the device. A lack of device
    /// memory is no error: rows are then sent again in every round.
    fn open_kmeans<'a, T: Real>(
        self: &Arc<Self>,
        input: KMeansInput<'a>,
        expected: KMeansShape,
        problems: impl FnOnce() -> Result<Vec<KMeansProblem>>,
        job: &Job,
    ) -> Result<Box<dyn KMeansSession<T> + 'a>>;

    /// `k` of any rows, chosen on the host as [`KMeansSession::seed`] chooses those of a problem.
    ///
    /// # Errors
    /// See [`KMeansSession::seed`].
    fn plus_plus<T: Real>(
        &self,
        input: KMeansInput<'_>,
        k: usize,
        random: &mut Random,
        job: &Job,
    ) -> Result<Vec<T>>;

    /// Makes ready what k-means of so many clusters needs besides such rows, if that takes time; `draws` says whether
    /// [`seed`](KMeansSession::seed) will be asked. What fails here fails again when it is needed.
    fn warm_kmeans(&self, _rows: KMeansKind, _k: usize, _draws: bool) {}

    /// What assigns rows to this many centroids faster than searches do, if there is such a thing.
    ///
    /// # Errors
    /// See [`KMeansSession::seed`].
    fn assigner(
        &self,
        _rows: &Rows,
        _k: usize,
        _metric: Metric,
        _job: &Job,
    ) -> Result<Option<Box<dyn Assigner>>> {
        Ok(None)
    }
}

/// What rows of k-means are.
#[derive(Debug, Clone, Copy)]
pub struct KMeansKind {
    /// Their elements, and how many of them a row has.
    pub elements: ElementKind,
    pub dim: usize,
    /// The metric whose distances are added up.
    pub metric: Metric,
    /// Whether rows have weights.
    pub has_weights: bool,
}

/// What a session will be asked for.
#[derive(Debug, Clone, Copy)]
pub struct KMeansShape {
    /// Problems, and clusters of each at most.
    pub problems: usize,
    pub k: usize,
    /// Whether [`KMeansSession::seed`] will be called.
    pub draws: bool,
}

/// Assigns the rows of a problem in every round, with what earlier rounds showed.
pub trait Assigner: Send + Sync {
    /// Sets the label of every row to the nearest of these centroids, the first in case of a tie. Labels are those that
    /// the last call left, or what a search found instead; none to begin anew. `None` if a search suits better: labels
    /// are then as they were.
    ///
    /// # Errors
    /// See [`KMeansSession::seed`]. Labels are then of no use.
    fn assign(
        &mut self,
        centroids: &Rows,
        labels: &mut Vec<u32>,
        job: &Job,
    ) -> Result<Option<Assigned>>;

    /// The distance of every row from a centroid.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    fn distances(&self, centroids: &Rows, labels: &[u32], job: &Job) -> Result<Distances>;

    /// The rows, ascending, for which the last call of [`assign`](Self::assign), which had these centroids and left these
    /// labels, may have found another centroid than the definition of a distance would. `None` if that is not known.
    fn undecided(&self, centroids: &Rows, labels: &[u32]) -> Option<Vec<u32>>;
}

/// A row whose label has changed, and its label before.
pub type Moved = (u32, u32);

/// What an [`Assigner`] did.
#[derive(Debug, Clone)]
pub struct Assigned {
    /// Rows that had another label before, ascending.
    pub moved: Vec<Moved>,
    /// The work it took.
    pub work: Work,
}

/// Rows to cluster.
#[derive(Debug, Clone, Copy)]
pub struct KMeansInput<'a> {
    /// The rows of all problems, prepared for the metric.
    pub rows: &'a Rows,
    /// For each row, its weight, at least 0; `None` if all weights are 1.
    pub weights: Option<&'a [f64]>,
    /// The metric whose distances are added up: `sqeuclidean`, or `cosine`.
    pub metric: Metric,
}

impl KMeansInput<'_> {
    /// What its rows are.
    #[cfg(feature = "cuda")]
    pub fn kind(self) -> KMeansKind {
        let matrix = self.rows.matrix();
        let (elements, dim) = (matrix.kind(), matrix.dim());
        KMeansKind { elements, dim, metric: self.metric, has_weights: self.weights.is_some() }
    }
}

/// Rows that are clustered by themselves, and their statistics.
#[derive(Debug, Clone)]
pub struct KMeansProblem {
    /// Their range among all rows.
    pub rows: Range<usize>,
    /// Number of clusters.
    pub k: usize,
    /// Rounds end when [`centroid_shift`] is at most this.
    pub tolerance: f64,
    /// A power of two. Squared differences of coordinates times this neither overflow nor vanish
    /// in float64.
    pub unit: f64,
    /// A point in the middle of the rows: of many rows, a few that are far away do not move it.
    pub origin: Vec<f64>,
    /// The largest difference of an element from the same element of `origin`.
    pub farthest: f64,
    /// The largest magnitude of an element.
    pub largest: f64,
}

/// A k-means run in progress. Elements are of the rows' type, `T`; problems are numbered as in the
/// list that the session was opened with.
///
/// All results have the same bits on every device.
pub trait KMeansSession<T>: Send + Sync {
    /// Initial centroids by greedy k-means++ (Arthur and Vassilvitskii 2007): 2 + ⌊ln k⌋ candidate
    /// rows at a time are drawn with a probability proportional to their shares, which are weight times
    /// distance from the nearest row chosen so far; the candidate that leaves the smallest sum of shares
    /// is chosen, the first in case of a tie. Returns one list of centroids for each problem of the call.
    ///
    /// Shares are multiplied by a power of two and rounded down to whole numbers, so that sums are exact.
    /// The power is the one that gives the largest share 52 bits, and is chosen anew after the first row,
    /// and whenever the sum falls below 2⁵⁰. A row is drawn by 53 random bits: the first one with which the
    /// sum of shares exceeds the sum of all times the bits / 2⁵³, rounded down. If nothing has a share, it is
    /// one of the rows of positive weight, by 64 random bits.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory), and any
    /// error of the device; so for the others.
    fn seed(&mut self, problems: Vec<(usize, Random)>, job: &Job) -> Result<Vec<Vec<T>>>;

    /// The nearest of these vectors, any number of them, for every row of a problem. Does not change
    /// the session.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn assign_to(&self, problem: usize, centroids: &[T], job: &Job) -> Result<Assignment<T>>;

    /// Sets the centroids of a problem. Afterwards no row is in a cluster.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn start(&mut self, problem: usize, centroids: Vec<T>, job: &Job) -> Result<()>;

    /// Sets the centroids of a problem. Rows stay in their clusters.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn resume_from(&mut self, problem: usize, centroids: Vec<T>) -> Result<()>;

    /// Runs Lloyd's rounds for some problems, at most the number given with each: assign every row to
    /// its nearest centroid, the first in case of a tie; move every centroid to the mean of its rows;
    /// stop as [`stop_reason`] says. Returns one result for each problem of the call.
    ///
    /// A problem whose rounds were stopped by an empty cluster may be resumed; any other is done: only
    /// its results may be asked for, or it is started again.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn run(&mut self, problems: &[(usize, usize)], job: &Job) -> Result<Vec<RoundsRun>>;

    /// Puts every row of a problem into the cluster of its nearest centroid.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn assign(&mut self, problem: usize, job: &Job) -> Result<()>;

    /// The cluster of every row of a problem, as [`assign`](Self::assign) left it. The session may forget them.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn labels(&mut self, problem: usize, job: &Job) -> Result<Labels>;

    /// The same with distances from the centroids that rows were assigned to.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn assignment(&mut self, problem: usize, job: &Job) -> Result<Assignment<T>>;

    /// The centroids of a problem, one after the other.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn centroids(&mut self, problem: usize) -> Result<Vec<T>>;

    /// The sums of a problem's clusters, as its last round left them.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn sums(&mut self, problem: usize, job: &Job) -> Result<ClusterSums>;

    /// The work done since the last call.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn take_work(&mut self) -> Result<Work>;
}

/// The nearest centroid of every row, as far as sums in the precision of the rows tell.
#[derive(Debug, Clone, PartialEq)]
pub struct Labels {
    /// Its number.
    pub labels: Vec<u32>,
    /// Rows of which another centroid may be the nearest by the definition of a distance, each once; `None` if that is
    /// not known.
    pub undecided: Option<Vec<u32>>,
}

/// The nearest centroid of every row.
#[derive(Debug, Clone, PartialEq)]
pub struct Assignment<T> {
    /// Its number.
    pub labels: Vec<u32>,
    /// Its distance, in the metric whose distances are added up.
    pub costs: Vec<T>,
}

/// The outcome of some rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundsRun {
    /// How many.
    pub rounds: usize,
    /// Rows that changed their cluster in the last one.
    pub moved: usize,
    /// Why there were no more.
    pub stop: StopReason,
}

/// Why rounds stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The limit on rounds was reached.
    Limit,
    /// No row moved.
    Stable,
    /// Centroids moved no more than the tolerance.
    Converged,
    /// After the last round's assignment a cluster has no row of positive weight. Rows are in their
    /// new clusters; centroids are those before the round.
    EmptyCluster,
}

/// Why rounds stop after one in which this many rows moved, if they do. `shift` is called only where
/// it decides.
pub fn stop_reason(
    moved: usize,
    has_empty_cluster: bool,
    shift: impl FnOnce() -> f64,
    tolerance: f64,
) -> Option<StopReason> {
    if moved == 0 {
        Some(StopReason::Stable)
    } else if has_empty_cluster {
        Some(StopReason::EmptyCluster)
    } else if shift() <= tolerance {
        Some(StopReason::Converged)
    } else {
        None
    }
}

/// The sum of the squared distances that centroids moved. Within each centroid, and then over all of
/// them, terms go round-robin to 32 partial sums, which are added pairwise. Coordinates are multiplied
/// by a power of two first, so that squares of float64 do not overflow.
pub fn centroid_shift<T: Real>(before: &[T], after: &[T], dim: usize, unit: f64) -> f64 {
    let pairs = before.chunks_exact(dim.max(1)).zip(after.chunks_exact(dim.max(1)));
    add_in_turns(pairs.map(|(before, after)| {
        let mut sums = [0.0; TURNS];
        let mut add = |before: &[T], after: &[T]| {
            for ((sum, a), b) in sums.iter_mut().zip(before).zip(after) {
                let way = b.to_f64() * unit - a.to_f64() * unit;
                *sum += way * way;
            }
        };
        let (most, last) = before.as_chunks::<TURNS>();
        let (most_after, last_after) = after.as_chunks::<TURNS>();
        most.iter().zip(most_after).for_each(|(before, after)| add(before, after));
        add(last, last_after);
        total(sums)
    }))
}

/// Sums that are formed side by side.
const TURNS: usize = 32;

fn add_in_turns(values: impl Iterator<Item = f64>) -> f64 {
    let mut sums = [0.0; TURNS];
    values.enumerate().for_each(|(i, value)| sums[i % TURNS] += value);
    total(sums)
}

fn total(mut sums: [f64; TURNS]) -> f64 {
    for distance in [16, 8, 4, 2, 1] {
        (0..distance).for_each(|i| sums[i] += sums[i + distance]);
    }
    sums[0]
}

/// Whether squared distances between vectors of elements up to `largest` never overflow float32: sums
/// stay below half of the largest number, which leaves room for their rounding.
pub fn squares_are_finite(dim: usize, largest: f64) -> bool {
    dim as f64 * (2.0 * largest).powi(2) < f64::from(f32::MAX) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_stop_for_the_first_reason_there_is() {
        let shift = || 1.0;
        assert_eq!(stop_reason(0, true, shift, 1.0), Some(StopReason::Stable));
        assert_eq!(stop_reason(1, true, shift, 1.0), Some(StopReason::EmptyCluster));
        assert_eq!(stop_reason(1, false, shift, 1.0), Some(StopReason::Converged));
        assert_eq!(stop_reason(1, false, shift, 0.9), None);
        assert_eq!(stop_reason(1, false, || f64::NAN, 0.9), None);
    }
}
