//! k-means: Lloyd's rounds of assigning every row to its nearest centroid and moving every centroid
//! to the mean of its rows.
//!
//! The answer depends on the rows, their order and the parameters alone: rows are assigned by the
//! exact search, which gives the same bits on every device, and means are taken of exact sums, which
//! come out the same in whatever order they are added up. A round that moves few rows changes the
//! sums by those rows only, without an error that builds up.
//!
//! Stopping, the tolerance and what becomes of empty clusters are those of scikit-learn's
//! `KMeans(algorithm="lloyd")`; so is the greedy k-means++ (Arthur and Vassilvitskii 2007, with
//! 2 + ⌊ln k⌋ candidates a step). k-means|| is Bahmani et al. 2012, with five rounds of 2 k
//! candidates.

mod groups;
mod lloyd;
mod start;

use std::ops::AddAssign;
use std::sync::Arc;
use std::time::Duration;

use self::groups::groups_of_reals;
use self::lloyd::Lloyd;
use crate::device::{AnyDevice, Cancel, Device, Distances, OnDevice, Work};
use crate::error::{Error, Result};
use crate::matrix::{ElementKind, Elements, Matrix, Rows};
use crate::metric::Metric;

/// What is asked of [`kmeans`].
#[derive(Debug, Clone, PartialEq)]
pub struct KMeansParams {
    pub(crate) k: usize,
    pub(crate) metric: Metric,
    /// Rounds at most.
    pub max_iterations: usize,
    /// Rounds end when the squared distances that the centroids moved add up to at most this
    /// multiple of the mean variance of the dimensions.
    pub tolerance: f64,
    /// Where the centroids start.
    pub init: Init,
    /// How often to start; the run of least inertia counts, the earlier one of equals.
    pub runs: usize,
    /// Of everything drawn at random.
    pub seed: u64,
}

/// How the first centroids are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Hash, Default)]
pub enum Init {
    /// Greedy k-means++.
    #[default]
    PlusPlus,
    /// k-means||.
    Parallel,
    /// Rows at random.
    Random,
    /// The rows of another matrix.
    Given,
}

impl Init {
    /// What SQL calls the methods that need no table.
    pub const NAMES: [(&'static str, Self); 3] =
        [("k-means++", Self::PlusPlus), ("k-means||", Self::Parallel), ("random", Self::Random)];
}

impl KMeansParams {
    /// scikit-learn's defaults but for `runs`: 300 rounds, tolerance 1e-4, greedy k-means++, one
    /// run.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `k` is 0 or too large to number clusters, or the metric is
    /// neither `l2` nor `cosine`.
    pub fn try_new(k: u64, metric: Metric) -> Result<Self> {
        if !matches!(metric, Metric::L2 | Metric::Cosine) {
            return Err(Error::InvalidArgument(format!(
                "kmeans: metric '{metric}'; accepted are l2, cosine"
            )));
        }
        let k = match usize::try_from(k) {
            Ok(k @ 1..) if u32::try_from(k).is_ok() => k,
            _ => {
                return Err(Error::InvalidArgument(format!(
                    "kmeans: k is {k}; accepted are 1 to {}",
                    u32::MAX
                )));
            }
        };
        let (max_iterations, tolerance) = (300, 1e-4);
        Ok(Self { k, metric, max_iterations, tolerance, init: Init::PlusPlus, runs: 1, seed: 0 })
    }

    /// Number of clusters.
    pub fn k(&self) -> usize {
        self.k
    }

    /// `l2` or `cosine`.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// What is added up: its inertia is that of the metric.
    fn cost(&self) -> Metric {
        if self.metric == Metric::L2 { Metric::SqEuclidean } else { self.metric }
    }
}

/// Rows in clusters.
#[derive(Debug, Clone)]
pub struct Clustering {
    /// The cluster of every row: that of the nearest centroid, the lower number of equals.
    pub labels: Vec<u32>,
    /// The distance of every row to that centroid.
    pub distances: Distances,
    /// The centroids, in the type of the rows.
    pub centroids: Arc<Matrix>,
    /// Rows in each cluster.
    pub sizes: Vec<u64>,
    /// For each cluster, weight times squared distance (`l2`) or times distance (`cosine`) of its
    /// rows, added up in their order.
    pub inertias: Vec<f64>,
    /// What it took.
    pub rounds: Rounds,
}

/// What the rounds took, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rounds {
    /// Rounds of the run that counts.
    pub iterations: usize,
    /// Rows that changed their cluster in its last round.
    pub moved: usize,
    /// Rows that were assigned, over all rounds and runs.
    pub assigned: u64,
    /// The sum of all inertias.
    pub inertia: f64,
    /// Time spent choosing the first centroids.
    pub seeding: Duration,
    /// Time spent assigning rows.
    pub assigning: Duration,
    /// Time spent on sums and means.
    pub updating: Duration,
    /// What the searches took.
    pub work: Work,
}

impl AddAssign for Rounds {
    /// Of clusterings side by side: the most rounds, the sum of everything else.
    fn add_assign(&mut self, other: Self) {
        self.iterations = self.iterations.max(other.iterations);
        self.moved += other.moved;
        self.assigned += other.assigned;
        self.inertia += other.inertia;
        self.seeding += other.seeding;
        self.assigning += other.assigning;
        self.updating += other.updating;
        self.work += other.work;
    }
}

impl Clustering {
    fn of_nothing(rows: &Rows) -> Self {
        let (kind, dim) = (rows.matrix().kind(), rows.matrix().dim());
        let (elements, distances) = match kind {
            ElementKind::F64 => (Elements::F64(vec![]), Distances::F64(vec![])),
            _ => (Elements::F32(vec![]), Distances::F32(vec![])),
        };
        Self {
            labels: vec![],
            distances,
            centroids: Arc::new(Matrix::new(elements, 0, dim)),
            sizes: vec![],
            inertias: vec![],
            rounds: Rounds::default(),
        }
    }

    /// The sum of all inertias.
    pub fn inertia(&self) -> f64 {
        self.inertias.iter().sum()
    }
}

/// Divide rows, prepared for the metric, into clusters.
///
/// `weights` has a weight from 0 for each row; without it, all weigh 1. `start` has the first
/// centroids, prepared as well, if the parameters say so. Without rows, there are no clusters.
///
/// # Errors
/// [`Error::InvalidArgument`] for parameters and weights that no rows could make valid,
/// [`Error::Unsatisfiable`] if there are fewer distinct rows than clusters, or first centroids of
/// another number or dimension; [`Error::Cancelled`]; what the device says.
pub fn kmeans(
    device: &AnyDevice,
    rows: &Rows,
    weights: Option<&[f64]>,
    start: Option<&Rows>,
    params: &KMeansParams,
    cancel: &Cancel,
) -> Result<Clustering> {
    struct Run<'a>(&'a Rows, Option<&'a [f64]>, Option<&'a Rows>, &'a KMeansParams, &'a Cancel);
    impl OnDevice for Run<'_> {
        type Output = Result<Clustering>;
        fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
            let Self(rows, weights, start, params, cancel) = self;
            match rows.matrix().kind() {
                ElementKind::F32 => {
                    Lloyd::<D, f32>::try_new(device, rows, weights, params, cancel)?.best(start)
                }
                ElementKind::F64 => {
                    Lloyd::<D, f64>::try_new(device, rows, weights, params, cancel)?.best(start)
                }
                ElementKind::Bits => {
                    Err(Error::InvalidArgument("kmeans: bits have no mean".to_string()))
                }
            }
        }
    }
    if rows.is_empty() {
        return Ok(Clustering::of_nothing(rows));
    }
    device.run(Run(rows, weights, start, params, cancel))
}

/// Divide each of many groups of consecutive rows into clusters by itself, as [`kmeans`] would, but
/// into no more than it has distinct rows. A group without rows has no clusters.
///
/// `ends` says where groups end; the first starts at 0, the last ends with the rows. Small groups are
/// started side by side on the host and go through their rounds in one job of the device.
///
/// # Errors
/// Those of [`kmeans`]; parameters may ask for one run, and not for given centroids.
pub fn kmeans_groups(
    device: &AnyDevice,
    rows: &Rows,
    ends: &[usize],
    params: &KMeansParams,
    cancel: &Cancel,
) -> Result<Vec<Clustering>> {
    #[derive(Clone, Copy)]
    struct Task<'a>(&'a Rows, &'a [usize], &'a KMeansParams, &'a Cancel);
    struct WithHost<'a, D>(&'a Arc<D>, Task<'a>);
    impl OnDevice for Task<'_> {
        type Output = Result<Vec<Clustering>>;
        fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
            AnyDevice::cpu().run(WithHost(device, self))
        }
    }
    impl<D: Device> OnDevice for WithHost<'_, D> {
        type Output = Result<Vec<Clustering>>;
        fn run<H: Device>(self, host: &Arc<H>) -> Self::Output {
            let Self(device, Task(rows, ends, params, cancel)) = self;
            let devices = (device, host);
            match rows.matrix().kind() {
                ElementKind::F32 => {
                    groups_of_reals::<D, H, f32>(devices, rows, ends, params, cancel)
                }
                ElementKind::F64 => {
                    groups_of_reals::<D, H, f64>(devices, rows, ends, params, cancel)
                }
                ElementKind::Bits => {
                    Err(Error::InvalidArgument("kmeans: bits have no mean".to_string()))
                }
            }
        }
    }
    if params.init == Init::Given || params.runs != 1 {
        let message = "kmeans: groups of rows take one run, and no given centroids";
        return Err(Error::InvalidArgument(message.to_string()));
    }
    device.run(Task(rows, ends, params, cancel))
}
