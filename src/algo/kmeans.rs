//! k-means: Lloyd's rounds of assigning every row to its nearest centroid and moving every centroid
//! to the mean of its rows.
//!
//! The answer depends on the rows, their order and the parameters alone: rows are assigned by the
//! exact search, which gives the same bits on every device, and means are taken of sums in whole
//! numbers, which come out the same in whatever order they are added up. A round that moves few rows
//! changes the sums by those rows only, without an error that builds up.
//!
//! Stopping, the tolerance and what becomes of empty clusters are those of scikit-learn's
//! `KMeans(algorithm="lloyd")`; so is the greedy k-means++ (Arthur and Vassilvitskii 2007, with
//! 2 + ⌊ln k⌋ candidates a step). k-means|| is Bahmani et al. 2012, with five rounds of 2 k
//! candidates.

use std::collections::HashSet;
use std::ops::AddAssign;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::knn::{Knn, KnnParams};
use crate::device::{
    AnyDevice, Cancel, CpuDevice, Device, Distances, End, GroupEnd, GroupStart, Groups, OnDevice,
    Resident, Spread, Work, in_parallel, shift,
};
use crate::error::{Error, Result};
use crate::matrix::{ElementKind, Elements, Matrix, Real, Rows};
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
/// centroids, prepared as well, if the parameters say so.
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
    struct Run<'a>(&'a Rows, &'a [usize], &'a KMeansParams, &'a Cancel);
    impl OnDevice for Run<'_> {
        type Output = Result<Vec<Clustering>>;
        fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
            let Self(rows, ends, params, cancel) = self;
            match rows.matrix().kind() {
                ElementKind::F32 => groups_of_reals::<D, f32>(device, rows, ends, params, cancel),
                ElementKind::F64 => groups_of_reals::<D, f64>(device, rows, ends, params, cancel),
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
    device.run(Run(rows, ends, params, cancel))
}

/// Operations of a round from which a group has the device for itself.
const LARGE_GROUP: usize = 1 << 24;

fn groups_of_reals<D: Device, T: Real>(
    device: &Arc<D>,
    rows: &Rows,
    ends: &[usize],
    params: &KMeansParams,
    cancel: &Cancel,
) -> Result<Vec<Clustering>> {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let groups: Vec<_> = starts.zip(ends).map(|(start, end)| rows.slice(start..*end)).collect();
    let dim = rows.matrix().dim();
    let params = in_parallel(groups.iter().collect(), |rows: &Rows| {
        let k = distinct_rows::<T>(rows.reals().unwrap_or_default(), dim, params.k);
        KMeansParams { k, ..params.clone() }
    });
    let is_large = |rows: &Rows, k: usize| rows.len() * k * dim >= LARGE_GROUP;
    let cpu = Arc::new(CpuDevice::new());
    let mut small = Vec::new();
    let mut found: Vec<Option<Clustering>> = vec![None; groups.len()];
    for (group, (rows, params)) in groups.iter().zip(&params).enumerate() {
        if params.k == 0 {
            found[group] = Some(Clustering::of_nothing(rows));
        } else if is_large(rows, params.k) {
            let lloyd = Lloyd::<D, T>::try_new(device, rows, None, params, cancel)?;
            found[group] = Some(lloyd.best(None)?);
        } else {
            small.push(group);
        }
    }
    let started = in_parallel(small.clone(), |group| {
        let mut lloyd =
            Lloyd::<CpuDevice, T>::try_new(&cpu, &groups[group], None, &params[group], cancel)?;
        let centroids = lloyd.start(0, None)?;
        Ok::<_, Error>((lloyd, centroids))
    });
    let started = started.into_iter().collect::<Result<Vec<_>>>()?;
    let limit = params.first().map_or(1, |params| params.max_iterations);
    let (done, work) = if params.first().is_some_and(|p| p.cost() == Metric::SqEuclidean) {
        let starts = started.iter().zip(&small).map(|((lloyd, centroids), group)| GroupStart {
            rows: ends[*group] - groups[*group].len()..ends[*group],
            empty: lloyd.empty.clone(),
            tolerance: lloyd.tolerance,
            centroids: singles(centroids),
        });
        device.rounds_of_groups(rows, &starts.collect::<Vec<_>>(), limit)?
    } else {
        (vec![None; small.len()], Work::default())
    };
    let finish = |((mut lloyd, centroids), done): ((Lloyd<'_, CpuDevice, T>, Vec<T>), _)| {
        let settled = match done {
            Some(GroupEnd { centroids, labels, costs, iterations, moved }) => {
                lloyd.rounds.assigned += (iterations as u64 + 1) * labels.len() as u64;
                let last = Assigned { labels, costs: reals(costs) };
                Settled { centroids: reals(centroids), last, iterations, moved }
            }
            None => lloyd.rounds_by_search(centroids)?,
        };
        Ok::<_, Error>(lloyd.clusters(settled))
    };
    let finished = in_parallel(started.into_iter().zip(done).collect(), finish);
    for (group, clustering) in small.iter().zip(finished) {
        found[*group] = Some(clustering?);
    }
    let mut found: Vec<Clustering> = found.into_iter().flatten().collect();
    if let Some(first) = small.first() {
        found[*first].rounds.work += work;
    }
    Ok(found)
}

/// Numbers as a device that computes in float32 has them: no others get there.
fn singles<T: Real>(values: &[T]) -> Vec<f32> {
    values.iter().map(|x| x.to_f64() as f32).collect()
}

fn reals<T: Real>(values: Vec<f32>) -> Vec<T> {
    values.into_iter().map(|x| T::from_f64(f64::from(x))).collect()
}

/// One input on its way through all runs.
struct Lloyd<'a, D, T> {
    device: &'a Arc<D>,
    rows: &'a Rows,
    values: &'a [T],
    dim: usize,
    weights: Option<&'a [f64]>,
    params: &'a KMeansParams,
    cancel: &'a Cancel,
    /// Squared distances that the centroids may still move in the last round.
    tolerance: f64,
    /// Sums of no rows.
    empty: Groups,
    /// The rows on the device, if rounds run there.
    resident: Option<Box<dyn Resident>>,
    rounds: Rounds,
}

/// Centroids to which all rows are assigned, at the end of the rounds.
struct Settled<T> {
    centroids: Vec<T>,
    last: Assigned<T>,
    iterations: usize,
    moved: usize,
}

/// The nearest centroid of every row, and what it costs to be there.
struct Assigned<T> {
    labels: Vec<u32>,
    costs: Vec<T>,
}

impl<'a, D: Device, T: Real> Lloyd<'a, D, T> {
    fn try_new(
        device: &'a Arc<D>,
        rows: &'a Rows,
        weights: Option<&'a [f64]>,
        params: &'a KMeansParams,
        cancel: &'a Cancel,
    ) -> Result<Self> {
        let dim = rows.matrix().dim();
        let values = rows.reals::<T>().unwrap_or_default();
        if params.max_iterations == 0 || params.runs == 0 {
            let message = "kmeans: max_iterations and runs are counted from 1";
            return Err(Error::InvalidArgument(message.to_string()));
        }
        if !(params.tolerance >= 0.0 && params.tolerance.is_finite()) {
            let found = params.tolerance;
            return Err(Error::InvalidArgument(format!(
                "kmeans: tolerance is {found}; accepted are numbers from 0"
            )));
        }
        check_weights(weights, rows.len())?;
        let (needed, found) = (params.k, distinct_rows(values, dim, params.k));
        if found < needed {
            return Err(Error::Unsatisfiable(format!(
                "kmeans: k is {needed}, but the input has only {found} distinct vectors"
            )));
        }
        let (means, variance) = moments(values, dim);
        let empty = Groups::try_new(values, weights, means, params.k)?;
        let (tolerance, rounds) = (params.tolerance * variance, Rounds::default());
        let resident = match (weights, params.cost()) {
            (None, Metric::SqEuclidean) => device.reside(rows, &empty, tolerance)?,
            _ => None,
        };
        Ok(Self {
            device,
            rows,
            values,
            dim,
            weights,
            params,
            cancel,
            tolerance,
            empty,
            resident,
            rounds,
        })
    }

    /// The run of least inertia.
    fn best(mut self, start: Option<&Rows>) -> Result<Clustering> {
        let runs = if self.params.init == Init::Given { 1 } else { self.params.runs };
        let mut best: Option<Clustering> = None;
        for run in 0..runs {
            let centroids = self.start(run, start)?;
            let found = self.lloyd(centroids)?;
            let all = found.rounds;
            let best = match &mut best {
                Some(best) if best.inertia() <= found.inertia() => best,
                other => other.insert(found),
            };
            let Rounds { iterations, moved, inertia, .. } = best.rounds;
            best.rounds = Rounds { iterations, moved, inertia, ..all };
        }
        best.ok_or_else(|| Error::InvalidArgument("kmeans: no runs".to_string()))
    }

    /// The first centroids of a run.
    fn start(&mut self, run: usize, given: Option<&Rows>) -> Result<Vec<T>> {
        let (clock, assigning) = (Instant::now(), self.rounds.assigning);
        let seed = self.params.seed.wrapping_add((run as u64).wrapping_mul(0xa076_1d64_78bd_642f));
        let centroids = match self.params.init {
            Init::Given => self.given(given)?,
            Init::Random => self.at_random(&mut Random(seed)),
            Init::PlusPlus => self.plus_plus(self.rows, self.weights, &mut Random(seed))?,
            Init::Parallel => self.parallel(&mut Random(seed))?,
        };
        // k-means|| assigns rows as well; that is no round.
        self.rounds.assigning = assigning;
        self.rounds.seeding += clock.elapsed();
        Ok(centroids)
    }

    /// Rounds from these centroids on.
    fn lloyd(&mut self, centroids: Vec<T>) -> Result<Clustering> {
        let settled = match self.resident.take() {
            Some(mut resident) => {
                let settled = self.rounds_on_device(resident.as_mut(), &centroids)?;
                self.resident = Some(resident);
                settled
            }
            None => None,
        };
        let settled = match settled {
            Some(settled) => settled,
            None => self.rounds_by_search(centroids)?,
        };
        Ok(self.clusters(settled))
    }

    /// What a run has found. Times and counts are those of all runs so far.
    fn clusters(&self, settled: Settled<T>) -> Clustering {
        let Settled { centroids, last, iterations, moved } = settled;
        let k = self.params.k;
        let (mut sizes, mut inertias) = (vec![0; k], vec![0.0; k]);
        for (row, (label, cost)) in last.labels.iter().zip(&last.costs).enumerate() {
            sizes[*label as usize] += 1;
            inertias[*label as usize] += self.weight(row) * cost.to_f64();
        }
        let distance = |cost: T| if self.params.metric == Metric::L2 { cost.sqrt() } else { cost };
        let distances = Distances::of(last.costs.into_iter().map(distance).collect());
        let centroids = Arc::new(Matrix::new(T::elements(centroids), k, self.dim));
        let inertia = inertias.iter().sum();
        let rounds = Rounds { iterations, moved, inertia, ..self.rounds };
        Clustering { labels: last.labels, distances, centroids, sizes, inertias, rounds }
    }

    /// Rounds in which every row is searched for on the device, and centroids move on the host.
    fn rounds_by_search(&mut self, mut centroids: Vec<T>) -> Result<Settled<T>> {
        let mut groups = self.empty.clone();
        let mut before: Option<Assigned<T>> = None;
        let (mut iterations, mut moved) = (0, self.rows.len());
        let last = loop {
            let near = before.as_ref().map(|before| before.labels.as_slice());
            let now = self.assign(&centroids, near)?;
            if iterations == self.params.max_iterations {
                break now;
            }
            iterations += 1;
            let clock = Instant::now();
            let old = before.as_ref().map(|before| before.labels.as_slice());
            moved = match old {
                Some(old) => old.iter().zip(&now.labels).filter(|(a, b)| a != b).count(),
                None => self.rows.len(),
            };
            if moved == 0 {
                break now;
            }
            self.device.regroup(self.rows, self.weights, (old, &now.labels), &mut groups);
            let next = self.means(&groups, &now, &centroids);
            let moved_by = shift(&centroids, &next, self.dim);
            centroids = next;
            self.rounds.updating += clock.elapsed();
            if moved_by <= self.tolerance {
                break self.assign(&centroids, Some(&now.labels))?;
            }
            before = Some(now);
        };
        Ok(Settled { centroids, last, iterations, moved })
    }

    /// Rounds that stay on the device, but for those that leave a cluster empty. `None` if the
    /// device gives up.
    fn rounds_on_device(
        &mut self,
        resident: &mut dyn Resident,
        start: &[T],
    ) -> Result<Option<Settled<T>>> {
        let clock = Instant::now();
        resident.start(&singles(start))?;
        let (mut iterations, mut moved) = (0, self.rows.len());
        while iterations < self.params.max_iterations {
            let stretch = resident.run(self.params.max_iterations - iterations, self.cancel)?;
            iterations += stretch.rounds;
            moved = stretch.moved;
            match stretch.end {
                End::Crowded => return Ok(None),
                End::EmptyCluster => {
                    let (labels, costs) = resident.assigned()?;
                    let now = Assigned { labels, costs: reals(costs) };
                    let centroids: Vec<T> = reals(resident.centroids()?);
                    let next = self.means(&resident.groups()?, &now, &centroids);
                    let moved_by = shift(&centroids, &next, self.dim);
                    resident.go_on(&singles(&next))?;
                    if moved_by <= self.tolerance {
                        break;
                    }
                }
                End::Limit | End::Stable | End::Converged => break,
            }
        }
        if !resident.assign()? {
            return Ok(None);
        }
        let (labels, costs) = resident.assigned()?;
        let last = Assigned { labels, costs: reals(costs) };
        let centroids = reals(resident.centroids()?);
        self.rounds.assigned += self.rows.len() as u64 * (iterations as u64 + 1);
        self.rounds.work += resident.take_work()?;
        self.rounds.assigning += clock.elapsed();
        Ok(Some(Settled { centroids, last, iterations, moved }))
    }

    fn weight(&self, row: usize) -> f64 {
        self.weights.map_or(1.0, |weights| weights[row])
    }

    /// The nearest of these centroids for every row, which may have been near one of them before.
    fn assign(&mut self, centroids: &[T], near: Option<&[u32]>) -> Result<Assigned<T>> {
        self.cancel.check()?;
        let clock = Instant::now();
        let count = centroids.len() / self.dim;
        let matrix = Matrix::new(T::elements(centroids.to_vec()), count, self.dim);
        let params = KnnParams::try_new(1, self.params.cost())?;
        let search = Knn::try_new(self.device.clone(), Rows::all(Arc::new(matrix)), params)?;
        let found = search.search_near(self.rows, None, near, self.cancel)?;
        self.rounds.assigned += self.rows.len() as u64;
        self.rounds.work += found.work;
        self.rounds.assigning += clock.elapsed();
        let costs = found.distances.reals().unwrap_or_default();
        Ok(Assigned { labels: found.rows, costs })
    }

    /// The mean of every cluster. An empty one takes the row that is farthest from its own centroid,
    /// the earlier of equals, out of that cluster.
    fn means(&self, groups: &Groups, now: &Assigned<T>, before: &[T]) -> Vec<T> {
        let empty = groups.empty();
        let mut alike = self.alike(&now.labels);
        let mut changed;
        let mut groups = groups;
        if !empty.is_empty() {
            changed = groups.clone();
            let mut farthest: Vec<usize> =
                (0..self.rows.len()).filter(|row| self.weight(*row) > 0.0).collect();
            let key = |row: &usize| std::cmp::Reverse(now.costs[*row].key(u32::MAX - *row as u32));
            let wanted = empty.len().min(farthest.len());
            if wanted < farthest.len() {
                farthest.select_nth_unstable_by_key(wanted - 1, key);
            }
            farthest.truncate(wanted);
            farthest.sort_unstable_by_key(key);
            for (cluster, row) in empty.into_iter().zip(farthest) {
                let values = &self.values[row * self.dim..][..self.dim];
                let from = now.labels[row];
                changed.shift(values, self.weight(row), Some(from), cluster as u32);
                alike[cluster] = Some(row);
            }
            groups = &changed;
        }
        let mut centroids = before.to_vec();
        for (cluster, centroid) in centroids.chunks_exact_mut(self.dim).enumerate() {
            let Some(mean) = groups.mean(cluster) else { continue };
            if let Some(row) = alike[cluster] {
                centroid.copy_from_slice(self.row(row));
                continue;
            }
            let old = centroid.to_vec();
            for (to, x) in centroid.iter_mut().zip(mean) {
                *to = T::from_f64(x);
            }
            // Directions that cancel out have no mean: the cluster stays where it was.
            if self.params.metric.prepare(centroid).is_err() {
                centroid.copy_from_slice(&old);
            }
        }
        centroids
    }

    /// For each cluster of one vector, however often it is there, the first row that is it: its mean
    /// is the vector, without rounding.
    fn alike(&self, labels: &[u32]) -> Vec<Option<usize>> {
        let mut first = vec![None; self.params.k];
        let mut mixed = vec![false; self.params.k];
        for (row, label) in labels.iter().map(|label| *label as usize).enumerate() {
            if !mixed[label] {
                let first = *first[label].get_or_insert(row);
                mixed[label] = self.row(first) != self.row(row);
            }
        }
        first.into_iter().zip(mixed).map(|(first, mixed)| first.filter(|_| !mixed)).collect()
    }

    fn row(&self, row: usize) -> &[T] {
        &self.values[row * self.dim..][..self.dim]
    }

    fn given(&self, start: Option<&Rows>) -> Result<Vec<T>> {
        let Some(values) = start.and_then(|start| start.reals::<T>()) else {
            let message = "kmeans: no first centroids, or of another type than the rows";
            return Err(Error::InvalidArgument(message.to_string()));
        };
        let (found, dim) = start.map_or((0, 0), |start| (start.len(), start.matrix().dim()));
        if found != self.params.k || dim != self.dim {
            let (k, own) = (self.params.k, self.dim);
            return Err(Error::Unsatisfiable(format!(
                "kmeans: init has {found} centroids of dimension {dim}; wanted are {k} of {own}"
            )));
        }
        Ok(values.to_vec())
    }

    /// Different vectors at random.
    fn at_random(&self, random: &mut Random) -> Vec<T> {
        let mut left: Vec<u32> = (0..self.rows.len() as u32).collect();
        let mut chosen: Vec<T> = Vec::with_capacity(self.params.k * self.dim);
        let mut distinct: HashSet<Vec<u64>> = HashSet::new();
        while chosen.len() < self.params.k * self.dim {
            let at = random.below(left.len() as u64) as usize;
            let row = self.row(left.swap_remove(at) as usize);
            if distinct.insert(row.iter().map(|x| (*x + T::ZERO).to_f64().to_bits()).collect()) {
                chosen.extend_from_slice(row);
            }
        }
        chosen
    }

    /// Greedy k-means++ among some rows.
    fn plus_plus(
        &self,
        rows: &Rows,
        weights: Option<&[f64]>,
        random: &mut Random,
    ) -> Result<Vec<T>> {
        let values = rows.reals::<T>().unwrap_or_default();
        let metric = self.params.cost();
        let trials = 2 + (self.params.k as f64).ln() as usize;
        let mut spread = Spread::new(rows, weights, metric);
        let mut chosen: Vec<T> = Vec::with_capacity(self.params.k * self.dim);
        while chosen.len() < self.params.k * self.dim {
            self.cancel.check()?;
            let first = chosen.is_empty();
            let candidates: Vec<u32> = if first {
                vec![spread.draw(random.unit())]
            } else {
                (0..trials).map(|_| spread.draw(random.unit())).collect()
            };
            let best = self.device.spread(&mut spread, &candidates);
            chosen.extend_from_slice(&values[best as usize * self.dim..][..self.dim]);
        }
        Ok(chosen)
    }

    /// k-means||: a few rounds that draw many rows each, thinned out by k-means++.
    fn parallel(&mut self, random: &mut Random) -> Result<Vec<T>> {
        const ROUNDS: usize = 5;
        let wanted = 2.0 * self.params.k as f64;
        let spread = Spread::new(self.rows, self.weights, self.params.cost());
        let mut candidates = vec![spread.draw(random.unit())];
        let mut costs = self.assign(&self.at(&candidates), None)?.costs;
        for _ in 0..ROUNDS {
            let total: f64 =
                costs.iter().enumerate().map(|(row, x)| self.weight(row) * x.to_f64()).sum();
            if total <= 0.0 {
                break;
            }
            let drawn: Vec<u32> = (costs.iter().enumerate())
                .filter(|(row, cost)| {
                    random.unit() < wanted * self.weight(*row) * cost.to_f64() / total
                })
                .map(|(row, _)| row as u32)
                .collect();
            if drawn.is_empty() {
                continue;
            }
            let nearer = self.assign(&self.at(&drawn), None)?.costs;
            costs.iter_mut().zip(nearer).for_each(|(cost, nearer)| *cost = cost.min(nearer));
            candidates.extend(drawn);
        }
        let labels = self.assign(&self.at(&candidates), None)?.labels;
        let mut weights = vec![0.0; candidates.len()];
        for (row, label) in labels.into_iter().enumerate() {
            weights[label as usize] += self.weight(row);
        }
        let distinct = weights.iter().filter(|weight| **weight > 0.0).count();
        if distinct < self.params.k {
            // Too few were drawn: choose among all rows instead.
            return self.plus_plus(self.rows, self.weights, random);
        }
        let matrix = Matrix::new(T::elements(self.at(&candidates)), candidates.len(), self.dim);
        self.plus_plus(&Rows::all(Arc::new(matrix)), Some(&weights), random)
    }

    fn at(&self, rows: &[u32]) -> Vec<T> {
        rows.iter().flat_map(|row| self.row(*row as usize).iter().copied()).collect()
    }
}

/// How many different rows there are, counted up to `most`. Zeros of both signs are equal.
fn distinct_rows<T: Real>(values: &[T], dim: usize, most: usize) -> usize {
    let bits = |row: &[T]| row.iter().map(|x| (*x + T::ZERO).to_f64().to_bits()).collect();
    let mut distinct: HashSet<Vec<u64>> = HashSet::new();
    for row in values.chunks_exact(dim.max(1)) {
        distinct.insert(bits(row));
        if distinct.len() == most {
            break;
        }
    }
    distinct.len()
}

/// A weight from 0 for each row, and not all of them 0.
fn check_weights(weights: Option<&[f64]>, rows: usize) -> Result<()> {
    let Some(weights) = weights else { return Ok(()) };
    if weights.len() != rows {
        let found = weights.len();
        return Err(Error::InvalidArgument(format!("kmeans: {found} weights for {rows} vectors")));
    }
    if let Some(bad) = weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
        return Err(Error::InvalidArgument(format!(
            "kmeans: a weight is {bad}; accepted are numbers from 0"
        )));
    }
    if weights.iter().all(|w| *w == 0.0) {
        return Err(Error::Unsatisfiable("kmeans: all weights are 0".to_string()));
    }
    Ok(())
}

/// The mean of every dimension, and the mean of their variances.
fn moments<T: Real>(values: &[T], dim: usize) -> (Vec<f64>, f64) {
    let means = mean_of(values, dim, |x, _| x);
    let variances = mean_of(values, dim, |x, j| (x - means[j]).powi(2));
    (means, variances.iter().sum::<f64>() / dim.max(1) as f64)
}

/// For every dimension, the mean of what `share` makes of the elements, in float64: added up in order
/// within blocks of rows, and block by block.
fn mean_of<T: Real>(
    values: &[T],
    dim: usize,
    share: impl Fn(f64, usize) -> f64 + Sync + Send,
) -> Vec<f64> {
    const BLOCK: usize = 4096;
    let blocks = in_parallel(values.chunks(BLOCK * dim.max(1)).collect(), |block: &[T]| {
        let mut sums = vec![0.0; dim];
        for row in block.chunks_exact(dim.max(1)) {
            for (j, (sum, x)) in sums.iter_mut().zip(row).enumerate() {
                *sum += share(x.to_f64(), j);
            }
        }
        sums
    });
    let mut means = vec![0.0; dim];
    for sums in blocks {
        means.iter_mut().zip(sums).for_each(|(mean, sum)| *mean += sum);
    }
    let rows = (values.len() / dim.max(1)).max(1) as f64;
    means.iter_mut().for_each(|mean| *mean /= rows);
    means
}

/// Steele, Lea and Flood's SplitMix64: the same numbers for a seed for ever.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to below 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From 0 to below a bound.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}
