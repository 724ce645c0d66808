//! k-means by search: in every round the rows are queries, and the centroids are the base. The host
//! computes sums and means.
//!
//! Used by the CPU, and by other devices that have no better method for a problem.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use super::{ClusterMeans, Means, ResidentQueries, StreamedSearch};
use crate::device::contract::{
    Assigned, Assigner, Assignment, KMeansDevice, KMeansInput, KMeansProblem, KMeansSession,
    Labels, Moved, QueryRows, RoundsRun, StopReason, Work, centroid_shift, stop_reason,
};
use crate::device::cpu::CpuDevice;
use crate::device::cpu::kmeans::cluster_sums::{self, NewLabels};
use crate::device::{ClusterSums, Device};
use crate::error::{Error, Result};
use crate::job::{Job, Phase, Progress, Reserved};
use crate::matrix::{Matrix, Real};
use crate::metric::Metric;
use crate::parallel::{in_parallel, lock, threads};
use crate::random::Random;
use crate::rows::Rows;

/// Operations per round from which a problem uses all threads by itself.
pub const LARGE_PROBLEM: usize = 1 << 24;

/// Operations per round from which bounds on the rows are kept between rounds.
const WORTH_BOUNDS: usize = 1 << 20;

/// See the [module](self).
pub struct BySearch<'a, D: KMeansDevice, T> {
    search: CentroidSearch<D>,
    /// The rows of a single problem, on a device with its own memory.
    held: Option<ResidentQueries<D>>,
    problems: Vec<SearchedProblem<'a, T>>,
}

/// The search for the nearest centroid of each row.
struct CentroidSearch<D> {
    device: Arc<D>,
    metric: Metric,
    work: Mutex<Work>,
}

/// The rows of a problem, and its state.
struct SearchedProblem<'a, T> {
    rows: Rows,
    weights: Option<&'a [f64]>,
    given: KMeansProblem,
    state: Option<RunState<T>>,
    /// The assigner of rows in rounds: `None` before the device was asked, `Some(None)` if it has
    /// none.
    assigner: Option<Option<Box<dyn Assigner>>>,
    /// The sum of the costs of all rows about the origin, computed on first use.
    about_zero: Option<f64>,
}

struct RunState<T> {
    centroids: Vec<T>,
    sums: ClusterSums,
    /// The means of the sums after the last round.
    means: ClusterMeans,
    /// The clusters of the rows; `None` before the first assignment.
    clusters: Option<Clusters<T>>,
    /// Whether rows are assigned to the current centroids.
    is_assigned: bool,
    _reserved: Reserved,
    /// Memory of the wide sums, as of the last round.
    of_wide: Option<Reserved>,
}

/// The rows' assignment to clusters.
struct Clusters<T> {
    labels: Vec<u32>,
    /// The distance of each row from its centroid, if computed.
    costs: Option<Vec<T>>,
    /// The centroids of the assignment.
    centroids: Rows,
}

impl<'a, D: Device, T: Real> BySearch<'a, D, T> {
    /// A session whose searches run on `device`.
    pub fn open(device: &Arc<D>, input: KMeansInput<'a>, problems: Vec<KMeansProblem>) -> Self {
        let KMeansInput { rows, weights, metric } = input;
        let holds = problems.len() == 1 && device.info().memory.is_some();
        let problems = problems.into_iter().map(|given| SearchedProblem {
            rows: rows.slice(given.rows.clone()),
            weights: weights.map(|weights| &weights[given.rows.clone()]),
            given,
            state: None,
            assigner: None,
            about_zero: None,
        });
        let search = CentroidSearch { device: device.clone(), metric, work: Mutex::default() };
        let held = holds.then(ResidentQueries::new);
        Self { search, held, problems: problems.collect() }
    }

    /// Restores the state of a problem from another session.
    ///
    /// # Errors
    /// As for [`KMeansSession::start`].
    #[cfg(feature = "cuda")]
    pub fn restore(
        &mut self,
        problem: usize,
        centroids: Vec<T>,
        assignment: Assignment<T>,
        sums: ClusterSums,
        job: &Job,
    ) -> Result<()> {
        let dim = self.problems[problem].rows.matrix().dim();
        let Assignment { labels, costs } = assignment;
        let rows = rows_of(&centroids, dim);
        self.problems[problem].start(centroids, job)?;
        // The assigner's bounds are for other labels.
        self.problems[problem].assigner = None;
        let state = self.problems[problem].state_mut()?;
        let clusters = Clusters { labels, costs: Some(costs), centroids: rows };
        (state.clusters, state.sums) = (Some(clusters), sums);
        Ok(())
    }
}

impl<D: Device, T: Real> KMeansSession<T> for BySearch<'_, D, T> {
    fn seed(&mut self, problems: Vec<(usize, Random)>, job: &Job) -> Result<Vec<Vec<T>>> {
        let alone = problems.len() == 1;
        let seed = |(problem, mut random): (usize, Random), job: &Job| {
            let SearchedProblem { rows, weights, given, .. } = &self.problems[problem];
            let input = KMeansInput { rows, weights: *weights, metric: self.search.metric };
            self.search.device.plus_plus(input, given.k, &mut random, job)
        };
        if alone {
            return problems.into_iter().map(|problem| seed(problem, job)).collect();
        }
        let job = job.part();
        in_parallel(problems, |problem| seed(problem, &job)).into_iter().collect()
    }

    fn assign_to(&self, problem: usize, centroids: &[T], job: &Job) -> Result<Assignment<T>> {
        let rows = &self.problems[problem].rows;
        let centroids = rows_of(centroids, rows.matrix().dim());
        let (Clusters { labels, costs, .. }, _) =
            self.search.nearest(rows, None, None, centroids, None, job)?;
        Ok(Assignment { labels, costs: costs.ok_or_else(not_started)? })
    }

    fn start(&mut self, problem: usize, centroids: Vec<T>, job: &Job) -> Result<()> {
        self.problems[problem].start(centroids, job)
    }

    fn resume_from(&mut self, problem: usize, centroids: Vec<T>) -> Result<()> {
        let state = self.problems[problem].state_mut()?;
        (state.centroids, state.is_assigned) = (centroids, false);
        Ok(())
    }

    fn run(&mut self, problems: &[(usize, usize)], job: &Job) -> Result<Vec<RoundsRun>> {
        let Self { search, held, problems: all } = self;
        let mut held = held.as_mut();
        let limits: HashMap<usize, usize> = problems.iter().copied().collect();
        let chosen = all.iter_mut().enumerate();
        let chosen = chosen.filter_map(|(i, problem)| Some((i, problem, *limits.get(&i)?)));
        let (large, small): (Vec<_>, Vec<_>) =
            chosen.partition(|(_, problem, _)| limits.len() == 1 || problem.is_large());
        let mut runs = HashMap::new();
        for (i, problem, limit) in large {
            runs.insert(i, problem.run(search, held.as_deref_mut(), limit, job)?);
        }
        let part = job.part();
        let ran = in_parallel(small, |(i, problem, limit)| {
            Ok::<_, Error>((i, problem.run(search, None, limit, &part)?))
        });
        for ran in ran {
            let (i, run) = ran?;
            runs.insert(i, run);
        }
        Ok(problems.iter().filter_map(|(problem, _)| runs.get(problem).copied()).collect())
    }

    fn assign(&mut self, problem: usize, job: &Job) -> Result<()> {
        let Self { search, held, problems } = self;
        problems[problem].assign(search, held.as_mut(), job).map(drop)
    }

    fn labels(&mut self, problem: usize, _job: &Job) -> Result<Labels> {
        let SearchedProblem { state, assigner, .. } = &self.problems[problem];
        let clusters = state.as_ref().and_then(|state| state.clusters.as_ref());
        let Clusters { labels, costs, centroids } = clusters.ok_or_else(not_started)?;
        let undecided = match (costs, assigner) {
            (None, Some(Some(assigner))) => assigner.undecided(centroids, labels),
            _ => None,
        };
        Ok(Labels { labels: labels.clone(), undecided })
    }

    fn assignment(&mut self, problem: usize, job: &Job) -> Result<Assignment<T>> {
        let SearchedProblem { state, assigner, .. } = &mut self.problems[problem];
        let clusters = state.as_mut().and_then(|state| state.clusters.as_mut());
        let Clusters { labels, costs, centroids } = clusters.ok_or_else(not_started)?;
        let costs = match (&costs, &assigner) {
            (None, Some(Some(assigner))) => assigner.distances(centroids, labels, job)?.reals(),
            (costs, _) => costs.as_ref().cloned(),
        };
        Ok(Assignment { labels: labels.clone(), costs: costs.ok_or_else(not_started)? })
    }

    fn centroids(&mut self, problem: usize) -> Result<Vec<T>> {
        Ok(self.problems[problem].state_mut()?.centroids.clone())
    }

    fn sums(&mut self, problem: usize, _job: &Job) -> Result<ClusterSums> {
        Ok(self.problems[problem].state_mut()?.sums.clone())
    }

    fn take_work(&mut self) -> Result<Work> {
        Ok(std::mem::take(&mut self.search.lock()))
    }
}

/// The error of a call before [`KMeansSession::start`].
pub fn not_started() -> Error {
    Error::InvalidArgument("kmeans: a problem was not started".to_string())
}

/// Concatenated vectors as rows.
fn rows_of<T: Real>(values: &[T], dim: usize) -> Rows {
    Rows::all(Arc::new(Matrix::new(T::elements(values.to_vec()), values.len() / dim, dim)))
}

/// Reserves the memory of the wide sums, whose number is known only after a round.
fn reserve_wide(sums: &ClusterSums, reserved: &mut Option<Reserved>, job: &Job) -> Result<()> {
    let bytes = sums.wide_bytes();
    if bytes > reserved.as_ref().map_or(0, Reserved::bytes) {
        drop(reserved.take());
        *reserved = Some(job.reserve("cluster sums", bytes)?);
    }
    Ok(())
}

impl<D: Device> CentroidSearch<D> {
    /// The nearest of `centroids` for each row; the search starts from the row's previous nearest,
    /// if any. Also returns the rows whose nearest changed, if they had a previous one.
    fn nearest<T: Real>(
        &self,
        rows: &Rows,
        assigner: Option<&mut Box<dyn Assigner>>,
        held: Option<&mut ResidentQueries<D>>,
        centroids: Rows,
        before: Option<Vec<u32>>,
        job: &Job,
    ) -> Result<(Clusters<T>, Option<Vec<Moved>>)> {
        job.check()?;
        let had_labels = before.is_some();
        let mut labels = before.unwrap_or_default();
        if let Some(assigner) = assigner
            && let Some(Assigned { moved, work }) = assigner.assign(&centroids, &mut labels, job)?
        {
            *self.lock() += work;
            return Ok((Clusters { labels, costs: None, centroids }, had_labels.then_some(moved)));
        }
        let (device, base) = (self.device.clone(), centroids.clone());
        let search = StreamedSearch::open(device, base, self.metric, 1, job)?;
        let near = had_labels.then_some(labels.as_slice());
        let neighbors = search.search_held(rows, held, QueryRows::Separate, near, job)?;
        *self.lock() += neighbors.work;
        let moved = near.map(|before| cluster_sums::moved_rows(before, &neighbors.rows));
        let costs = Some(neighbors.distances.reals().ok_or_else(not_started)?);
        Ok((Clusters { labels: neighbors.rows, costs, centroids }, moved))
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        lock(&self.work)
    }
}

impl<T: Real> SearchedProblem<'_, T> {
    /// Number of operations of a round.
    fn operations(&self) -> usize {
        self.rows.len() * self.given.k * self.rows.matrix().dim()
    }

    fn is_large(&self) -> bool {
        self.operations() >= LARGE_PROBLEM
    }

    fn values(&self) -> &[T] {
        self.rows.reals().expect("a session has rows of its own type")
    }

    fn state_mut(&mut self) -> Result<&mut RunState<T>> {
        self.state.as_mut().ok_or_else(not_started)
    }

    fn start(&mut self, centroids: Vec<T>, job: &Job) -> Result<()> {
        let (k, dim, rows) = (self.given.k, self.rows.matrix().dim(), self.rows.len());
        let sums = match self.state.take() {
            Some(state) => state.sums.cleared(),
            None => ClusterSums::new(self.values(), self.weights, dim, k),
        };
        // Labels and distances before and after a round, those of blocks before they are
        // concatenated, moved rows, and the sums of each thread.
        let assignments = rows * (3 * (size_of::<u32>() + size_of::<T>()) + size_of::<Moved>());
        let sums_bytes = sums.bytes() * (2 + if self.is_large() { threads() } else { 0 });
        let means_bytes = k * (dim * size_of::<f64>() + size_of::<Option<f64>>());
        let bytes = assignments + sums_bytes + means_bytes + 3 * size_of_val(&*centroids);
        let reserved = job.reserve("cluster assignments", bytes)?;
        self.state = Some(RunState {
            centroids,
            sums,
            means: ClusterMeans::default(),
            clusters: None,
            is_assigned: false,
            _reserved: reserved,
            of_wide: None,
        });
        Ok(())
    }

    /// Assigns each row to its nearest centroid; returns the rows whose cluster changed, or `None`
    /// on the first assignment.
    fn assign<D: Device>(
        &mut self,
        search: &CentroidSearch<D>,
        held: Option<&mut ResidentQueries<D>>,
        job: &Job,
    ) -> Result<Option<Vec<Moved>>> {
        let is_worth_it = self.operations() >= WORTH_BOUNDS;
        let Self { rows, given, state, assigner, .. } = self;
        let state = state.as_mut().ok_or_else(not_started)?;
        if state.is_assigned {
            return Ok(state.clusters.as_ref().map(|_| Vec::new()));
        }
        job.enter(Phase::Assign);
        if is_worth_it && assigner.is_none() {
            *assigner = Some(search.device.assigner(rows, given.k, search.metric, job)?);
        }
        let assigner = assigner.as_mut().and_then(Option::as_mut);
        let before = state.clusters.take().map(|before| before.labels);
        let centroids = rows_of(&state.centroids, rows.matrix().dim());
        let (now, moved) = search.nearest(rows, assigner, held, centroids, before, job)?;
        (state.clusters, state.is_assigned) = (Some(now), true);
        Ok(moved)
    }

    fn run<D: Device>(
        &mut self,
        search: &CentroidSearch<D>,
        mut held: Option<&mut ResidentQueries<D>>,
        limit: usize,
        job: &Job,
    ) -> Result<RoundsRun> {
        let mut moved = self.rows.len();
        for round in 1..=limit {
            let of_round = self.assign(search, held.as_deref_mut(), job)?;
            job.enter(Phase::Update);
            let stop;
            (moved, stop) =
                self.update(of_round.as_deref(), search.metric, search.device.host(), job)?;
            job.rounds(|| self.progress(moved, search.metric));
            if let Some(stop) = stop {
                return Ok(RoundsRun { rounds: round, moved, stop });
            }
        }
        Ok(RoundsRun { rounds: limit, moved, stop: StopReason::Limit })
    }

    /// The progress of the last round.
    fn progress(&mut self, moved: usize, metric: Metric) -> Progress {
        let (values, weights, dim) = (self.values(), self.weights, self.rows.matrix().dim());
        let means = Means { values, dim, weights, metric };
        let about_zero = self.about_zero.unwrap_or_else(|| means.about_zero());
        let inertia =
            |state: &RunState<T>| means.inertia(about_zero, &state.means, &state.centroids);
        let inertia = self.state.as_ref().map(inertia);
        self.about_zero = Some(about_zero);
        Progress { rounds: 1, moved, inertia }
    }

    /// Moves centroids to the means of their rows; `moved` are the rows whose cluster changed, or
    /// `None` on the first assignment. Returns the number of moved rows, and the reason to stop, if
    /// any.
    fn update(
        &mut self,
        moved: Option<&[Moved]>,
        metric: Metric,
        host: CpuDevice,
        job: &Job,
    ) -> Result<(usize, Option<StopReason>)> {
        let (rows, weights, dim) = (self.rows.clone(), self.weights, self.rows.matrix().dim());
        let (tolerance, unit) = (self.given.tolerance, self.given.unit);
        let state = self.state_mut()?;
        let labels = &state.clusters.as_ref().ok_or_else(not_started)?.labels;
        host.move_rows(&rows, weights, NewLabels { labels, moved }, &mut state.sums, job)?;
        reserve_wide(&state.sums, &mut state.of_wide, job)?;
        let mut has_changed = vec![moved.is_none(); state.sums.clusters()];
        for (row, before) in moved.unwrap_or_default() {
            has_changed[*before as usize] = true;
            has_changed[labels[*row as usize] as usize] = true;
        }
        state.means.renew(&state.sums, |cluster| has_changed[cluster]);
        let moved = moved.map_or(rows.len(), <[_]>::len);
        let has_empty = !state.sums.empty().is_empty();
        let mut next = None;
        if moved > 0 && !has_empty {
            let values = rows.reals::<T>().expect("a session has rows of its own type");
            let means = Means { values, dim, weights, metric };
            next = Some(means.of(&state.means, labels, &state.centroids, job)?);
        }
        let shift = || {
            let next = next.as_deref().unwrap_or(&state.centroids);
            centroid_shift(&state.centroids, next, dim, unit)
        };
        let stop = stop_reason(moved, has_empty, shift, tolerance);
        if let Some(next) = next {
            (state.centroids, state.is_assigned) = (next, false);
        }
        Ok((moved, stop))
    }
}
