//! k-means: initial centroids, Lloyd's rounds, and their results.
//!
//! A session holds rows, and any number of *problems*: ranges of rows that are clustered
//! separately. Rows are uploaded once for all runs and rounds.

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

/// The primitives of k-means.
pub trait KMeansDevice: SearchDevice {
    /// Opens a session. A device may prepare the rows before `problems` returns; the problems are
    /// expected to have the shape `expected`.
    ///
    /// # Errors
    /// Those of `problems`, [`HostMemory`](crate::Error::HostMemory), and any error of the device.
    /// A lack of device memory is no error: rows are then sent again in every round.
    fn open_kmeans<'a, T: Real>(
        self: &Arc<Self>,
        input: KMeansInput<'a>,
        expected: KMeansShape,
        problems: impl FnOnce() -> Result<Vec<KMeansProblem>>,
        job: &Job,
    ) -> Result<Box<dyn KMeansSession<T> + 'a>>;

    /// `k` of the rows, chosen on the host as [`KMeansSession::seed`] chooses those of a problem.
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

    /// Compiles and loads the code of k-means with `k` clusters for such rows, ahead of its use;
    /// `draws` says whether [`seed`](KMeansSession::seed) will be called, `metric` how rows that the
    /// rounds leave undecided are compared. Errors are ignored here, and occur again on use.
    fn warm_kmeans(&self, _rows: KMeansKind, _metric: Metric, _k: usize, _draws: bool) {}

    /// An assigner that is faster than searches for `k` centroids, if the device has one.
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

/// The type of the rows of k-means.
#[derive(Debug, Clone, Copy)]
pub struct KMeansKind {
    /// Element type.
    pub elements: ElementKind,
    /// Number of dimensions.
    pub dim: usize,
    /// The metric whose distances are summed.
    pub metric: Metric,
    /// Whether rows have weights.
    pub has_weights: bool,
}

/// The expected shape of a session.
#[derive(Debug, Clone, Copy)]
pub struct KMeansShape {
    /// Number of problems.
    pub problems: usize,
    /// The largest number of clusters of a problem.
    pub k: usize,
    /// Whether [`KMeansSession::seed`] will be called.
    pub draws: bool,
}

/// Assigns the rows of a problem in every round, with bounds kept from earlier rounds.
pub trait Assigner: Send + Sync {
    /// Sets the label of each row to its nearest centroid, the first in case of a tie. `labels` are
    /// those of the last call or of a search in its place; empty for a new run. `None` if a search
    /// is faster; labels are then unchanged.
    ///
    /// # Errors
    /// See [`KMeansSession::seed`]. Labels are then undefined.
    fn assign(
        &mut self,
        centroids: &Rows,
        labels: &mut Vec<u32>,
        job: &Job,
    ) -> Result<Option<Assigned>>;

    /// The distance of each row from the centroid of its label.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    fn distances(&self, centroids: &Rows, labels: &[u32], job: &Job) -> Result<Distances>;

    /// The rows, ascending, for which the last call of [`assign`](Self::assign), with these
    /// centroids and resulting labels, may differ from the nearest centroid by exact distance.
    /// `None` if unknown.
    fn undecided(&self, centroids: &Rows, labels: &[u32]) -> Option<Vec<u32>>;
}

/// A row whose label has changed, and its label before.
pub type Moved = (u32, u32);

/// The result of an [`Assigner`].
#[derive(Debug, Clone)]
pub struct Assigned {
    /// Rows whose label changed, ascending.
    pub moved: Vec<Moved>,
    /// Counters of the work.
    pub work: Work,
}

/// The rows of k-means.
#[derive(Debug, Clone, Copy)]
pub struct KMeansInput<'a> {
    /// The rows of all problems, prepared for the metric.
    pub rows: &'a Rows,
    /// For each row, its weight, at least 0; `None` if all weights are 1.
    pub weights: Option<&'a [f64]>,
    /// The metric whose distances are summed: `sqeuclidean`, or `cosine`.
    pub metric: Metric,
}

impl KMeansInput<'_> {
    /// The type of the rows.
    #[cfg(feature = "cuda")]
    pub fn kind(self) -> KMeansKind {
        let matrix = self.rows.matrix();
        let (elements, dim) = (matrix.kind(), matrix.dim());
        KMeansKind { elements, dim, metric: self.metric, has_weights: self.weights.is_some() }
    }
}

/// Rows that are clustered separately, and their statistics.
#[derive(Debug, Clone)]
pub struct KMeansProblem {
    /// The range of rows.
    pub rows: Range<usize>,
    /// Number of clusters.
    pub k: usize,
    /// Rounds end when [`centroid_shift`] is at most this.
    pub tolerance: f64,
    /// A power of two. Squared differences of coordinates times this neither overflow nor underflow
    /// in float64.
    pub unit: f64,
    /// A central point of the rows, robust against outliers.
    pub origin: Vec<f64>,
    /// The largest absolute difference of an element from the same element of `origin`.
    pub farthest: f64,
    /// The largest absolute element.
    pub largest: f64,
}

/// A k-means run in progress. Elements are of the rows' type, `T`; problems are numbered as in the
/// list that the session was opened with.
///
/// All results have the same bits on every device.
pub trait KMeansSession<T>: Send + Sync {
    /// Initial centroids by greedy k-means++ (Arthur and Vassilvitskii 2007). Each step draws
    /// `2 + ⌊ln k⌋` candidate rows with probabilities proportional to their shares: weight times
    /// distance from the nearest centroid chosen before. The candidate that leaves the smallest sum
    /// of shares is chosen, the first in case of a tie. Returns one list of centroids for each
    /// problem of the call.
    ///
    /// Shares are multiplied by a power of two and rounded down to integers, so that sums are
    /// exact. The power gives the largest share 52 bits, and is chosen anew after the first row,
    /// and whenever the sum falls below 2⁵⁰. A row is drawn by 53 random bits `b`: the first row
    /// whose prefix sum of shares exceeds ⌊total · b / 2⁵³⌋. If all shares are 0, a row of positive
    /// weight is drawn uniformly, by 64 random bits.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory), and any
    /// error of the device; the same for the other methods.
    fn seed(&mut self, problems: Vec<(usize, Random)>, job: &Job) -> Result<Vec<Vec<T>>>;

    /// For each row of a problem, the nearest of `centroids`, which may be of any number. Does not
    /// change the session.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn assign_to(&self, problem: usize, centroids: &[T], job: &Job) -> Result<Assignment<T>>;

    /// Sets the centroids of a problem, and removes all rows from their clusters.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn start(&mut self, problem: usize, centroids: Vec<T>, job: &Job) -> Result<()>;

    /// Sets the centroids of a problem. Rows stay in their clusters.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn resume_from(&mut self, problem: usize, centroids: Vec<T>) -> Result<()>;

    /// Runs Lloyd's rounds for problems, each with a limit on its rounds: assign every row to its
    /// nearest centroid, the first in case of a tie; move every centroid to the mean of its rows;
    /// stop according to [`stop_reason`]. Returns one result for each problem of the call.
    ///
    /// A problem whose rounds were stopped by an empty cluster may be resumed. After any other
    /// stop, only its results may be requested, or a new start.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn run(&mut self, problems: &[(usize, usize)], job: &Job) -> Result<Vec<RoundsRun>>;

    /// Assigns every row of a problem to its nearest centroid.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn assign(&mut self, problem: usize, job: &Job) -> Result<()>;

    /// The cluster of each row of a problem after [`assign`](Self::assign). The session may then
    /// drop them.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn labels(&mut self, problem: usize, job: &Job) -> Result<Labels>;

    /// The cluster of each row of a problem, and its distance from the centroid.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn assignment(&mut self, problem: usize, job: &Job) -> Result<Assignment<T>>;

    /// The centroids of a problem, one after the other.
    ///
    /// # Errors
    /// See [`seed`](Self::seed).
    fn centroids(&mut self, problem: usize) -> Result<Vec<T>>;

    /// The cluster sums of a problem after its last round.
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

/// The nearest centroid of each row, up to rounding errors in the element type of the rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Labels {
    /// The number of the centroid.
    pub labels: Vec<u32>,
    /// Rows, each once, for which another centroid may be nearer by exact distance; `None` if
    /// unknown.
    pub undecided: Option<Vec<u32>>,
}

/// The nearest centroid of each row.
#[derive(Debug, Clone, PartialEq)]
pub struct Assignment<T> {
    /// The number of the centroid.
    pub labels: Vec<u32>,
    /// The distance from it, in the metric whose distances are summed.
    pub costs: Vec<T>,
}

/// The outcome of a call of [`KMeansSession::run`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundsRun {
    /// Number of rounds.
    pub rounds: usize,
    /// Number of rows that changed their cluster in the last round.
    pub moved: usize,
    /// The reason for the stop.
    pub stop: StopReason,
}

/// The reason why rounds stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The limit on rounds was reached.
    Limit,
    /// No row changed its cluster.
    Stable,
    /// The shift of the centroids is within the tolerance.
    Converged,
    /// The last round's assignment left a cluster without rows of positive weight. Rows are in
    /// their new clusters; centroids are those before the round.
    EmptyCluster,
}

/// The reason to stop after a round in which `moved` rows changed their cluster, if any. `shift` is
/// called only if it decides.
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

/// The sum of the squared shifts of all centroids. Within each centroid, and then over all of them,
/// terms go round-robin to 32 partial sums, which are added pairwise. Coordinates are multiplied by
/// the power of two `unit` first, so that squares do not overflow in float64.
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

/// Number of independent partial sums.
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

/// Whether squared distances between vectors of elements up to `largest` never overflow float32:
/// sums stay below half of the largest number, with the other half as room for rounding errors.
#[allow(dead_code, reason = "some devices sum in float64 only")]
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
