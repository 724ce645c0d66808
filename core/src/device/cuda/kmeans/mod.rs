//! k-means on a GPU: each problem takes the strategy (`Strategy`) that suits its rows.
//!
//! | strategy | for | how |
//! |---|---|---|
//! | [`Resident`] | rows of up to 1,024 dimensions | rows stay on the GPU, which runs all rounds |
//! | batched | up to 32 dimensions, small problems beside others | one block per problem, all rounds in few launches |
//! | by search | everything else | rows are searched in every round, the host computes sums |
//! | on the host | small problems beside others that are not batched | the CPU |
//!
//! First centroids are chosen on the GPU under every strategy, unless a problem is small.
//!
//! A problem falls back to the general strategies when its own gives up: centroids so far away that
//! squares overflow, too many centroids equally near, weighted elements beyond the range of
//! float64, too little memory.

mod contract_impl;
mod fp16;
mod hamerly;
mod kernels;
mod launch_batched;
mod resident;
mod rounds;
mod row_type;
mod seeding;
mod sorted;
mod structs;
mod sums;
mod swizzled_tiles;
mod workspace;

use std::collections::HashMap;
use std::sync::Arc;

use self::kernels::{AssignStrategy, BatchedKernels, MOST_ROWS, assign_strategy, is_large};
use self::launch_batched::{BATCHED_DIM, BatchedProblem, BatchedWorkspace};
use self::resident::{Resident, ResidentInput};
use self::row_type::{RowType, UploadedRows};
use self::seeding::SeedingInput;
use super::device::CudaDevice;
use super::driver::memory::Buffer;
use super::driver::upload::elapsed;
use crate::device::ClusterSums;
use crate::device::compose::{BySearch, KMeansOnHost, host_session, not_started, sums_of};
use crate::device::contract::{
    Assignment, KMeansInput, KMeansProblem, KMeansSession, Labels, RoundsRun, StopReason, Work,
    squares_are_finite,
};
use crate::error::{Error, Result};
use crate::job::{Job, Phase};
use crate::matrix::Real;
use crate::parallel::in_parallel;
use crate::random::Random;
use crate::rows::Rows;

/// A session on a GPU.
struct CudaKMeans<'a, T> {
    device: Arc<CudaDevice>,
    input: KMeansInput<'a>,
    /// The type of GPU-resident rows, if rows may stay on the GPU.
    row_type: Option<RowType>,
    problems: Vec<ProblemState<'a, T>>,
    by_search: BySearch<'a, CudaDevice, T>,
    on_host: KMeansOnHost<'a, T>,
    /// The work of strategies that were given up.
    work: Work,
}

struct ProblemState<'a, T> {
    given: KMeansProblem,
    rows: Rows,
    weights: Option<&'a [f64]>,
    /// The strategy that suits the rows, and the current one.
    suits: Strategy,
    strategy: Strategy,
    /// The state before the last rounds: centroids, and the assignment with its sums, if any.
    begun: (Vec<T>, Option<(Assignment<T>, ClusterSums)>),
    empty: Option<ClusterSums>,
    /// Its rows on the GPU, if they were sent for seeding.
    uploaded: Option<Buffer>,
    resident: Option<Resident>,
    /// Centroids and labels of a problem that is done and no longer on the GPU.
    done: Option<(Vec<T>, Labels)>,
}

/// See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strategy {
    Resident(AssignStrategy),
    Batched,
    BySearch,
    OnHost,
}

impl<'a, T: Real> CudaKMeans<'a, T> {
    fn open(
        device: &Arc<CudaDevice>,
        input: KMeansInput<'a>,
        problems: Vec<KMeansProblem>,
        mut uploaded: Option<Buffer>,
        work: Work,
    ) -> Self {
        let row_type = RowType::of(input.kind());
        let (dim, is_alone) = (input.rows.matrix().dim(), problems.len() == 1);
        let suits = |problem: &KMeansProblem| {
            let (rows, k) = (problem.rows.len(), problem.k);
            let are_usual = problem.unit == 1.0 && squares_are_finite(dim, problem.largest);
            let fitting = row_type.filter(|_| rows <= MOST_ROWS && are_usual);
            let resident =
                fitting.and_then(|row_type| assign_strategy(row_type, k, device.gpu.limits));
            match (is_alone || is_large(rows, k, dim), resident) {
                (true, Some(strategy)) => Strategy::Resident(strategy),
                (true, None) => Strategy::BySearch,
                (false, _) if fitting.is_some() && dim <= BATCHED_DIM => Strategy::Batched,
                (false, _) => Strategy::OnHost,
            }
        };
        let all = problems.iter().map(|given| ProblemState {
            given: given.clone(),
            rows: input.rows.slice(given.rows.clone()),
            weights: input.weights.map(|weights| &weights[given.rows.clone()]),
            suits: suits(given),
            strategy: suits(given),
            begun: (Vec::new(), None),
            empty: None,
            // Only for a problem that has all rows.
            uploaded: uploaded.take().filter(|_| given.rows == (0..input.rows.len())),
            resident: None,
            done: None,
        });
        Self {
            device: device.clone(),
            input,
            row_type,
            problems: all.collect(),
            by_search: BySearch::open(device, input, problems.clone()),
            on_host: host_session(input, problems.clone()),
            work,
        }
    }

    /// The type of GPU-resident rows.
    fn row_type(&self) -> Result<RowType> {
        self.row_type.ok_or_else(not_started)
    }

    /// The session of a problem that takes a general strategy.
    fn general(&mut self, problem: usize) -> &mut dyn KMeansSession<T> {
        match self.problems[problem].strategy {
            Strategy::OnHost => &mut self.on_host,
            _ => &mut self.by_search,
        }
    }

    /// Whether the first centroids of a problem are chosen on the GPU.
    fn can_seed(&self, problem: usize) -> bool {
        let ProblemState { given, rows, .. } = &self.problems[problem];
        is_large(rows.len(), given.k, rows.matrix().dim())
            && seeding::can_seed(&self.device, rows, given.k)
    }

    /// Chooses the first centroids of a problem on the GPU.
    fn seed_there(&mut self, problem: usize, random: Random, job: &Job) -> Result<Vec<T>> {
        let (is_alone, metric) = (self.problems.len() == 1, self.input.metric);
        let ProblemState { given, rows, weights, strategy, uploaded, resident, .. } =
            &mut self.problems[problem];
        let input = SeedingInput { rows, weights: *weights, metric, problem: given };
        let (centroids, sent, work) =
            seeding::choose(&self.device, &input, uploaded.take(), random, job)?;
        self.work += work;
        // Rows of several problems might not fit, and a resident problem has its own.
        if is_alone && resident.is_none() && matches!(strategy, Strategy::Resident(_)) {
            *uploaded = Some(sent);
        }
        Ok(centroids)
    }

    /// Switches a problem from its own strategy to the general one, which repeats its last rounds.
    fn give_up(&mut self, problem: usize, job: &Job) -> Result<()> {
        let state = &mut self.problems[problem];
        let is_batched = state.strategy == Strategy::Batched;
        state.strategy = if is_batched { Strategy::OnHost } else { Strategy::BySearch };
        let (centroids, clusters) = (state.begun.0.clone(), state.begun.1.take());
        self.forget(problem)?;
        match clusters {
            Some((assignment, sums)) => {
                self.by_search.restore(problem, centroids, assignment, sums, job)
            }
            None => self.general(problem).start(problem, centroids, job),
        }
    }

    /// Removes a problem from the GPU.
    fn forget(&mut self, problem: usize) -> Result<()> {
        if let Some(mut resident) = self.problems[problem].resident.take() {
            self.work += resident.take_work()?;
        }
        Ok(())
    }

    /// Runs rounds of a resident problem.
    fn run_resident(
        &mut self,
        problem: usize,
        strategy: AssignStrategy,
        limit: usize,
        job: &Job,
    ) -> Result<RoundsRun> {
        job.enter(Phase::Assign);
        let is_alone = self.problems.len() == 1;
        let (row_type, state) = (self.row_type()?, &mut self.problems[problem]);
        let device = self.device.clone();
        let opened = job
            .retry_after_eviction(|| state.resident(&device, row_type, strategy, job).map(|_| ()));
        let run = match opened
            .and_then(|()| state.resident(&device, row_type, strategy, job)?.run(limit, job))
        {
            Ok(run) => run,
            Err(Error::DeviceMemory { .. }) => None,
            Err(error) => return Err(error),
        };
        let Some(run) = run else {
            self.give_up(problem, job)?;
            return self.run_general(problem, limit, job);
        };
        if run.stop == StopReason::EmptyCluster {
            let (assignment, sums) = (self.assignment(problem, job)?, self.sums(problem, job)?);
            self.problems[problem].begun.1 = Some((assignment, sums));
        } else if !is_alone {
            // The next problem may need the memory.
            self.assign(problem, job)?;
            let done = (self.centroids(problem)?, self.labels(problem, job)?);
            self.forget(problem)?;
            self.problems[problem].done = Some(done);
        }
        Ok(run)
    }

    fn run_general(&mut self, problem: usize, limit: usize, job: &Job) -> Result<RoundsRun> {
        let run = self.general(problem).run(&[(problem, limit)], job)?;
        run.first().copied().ok_or_else(not_started)
    }

    /// Runs all rounds of a batch of problems; `None` for those that the GPU does not support.
    fn run_batched(
        &mut self,
        batch: &[(usize, usize)],
        job: &Job,
    ) -> Result<Vec<Option<RoundsRun>>> {
        let limit = batch.iter().map(|(_, limit)| *limit).max().unwrap_or(0);
        let of_batch =
            self.problems.iter_mut().filter(|problem| problem.strategy == Strategy::Batched);
        let made = in_parallel(of_batch, |problem: &mut ProblemState<'_, T>| {
            job.check()?;
            problem.empty();
            Ok::<_, Error>(())
        });
        made.into_iter().collect::<Result<()>>()?;
        let jobs = batch.iter().map(|(problem, _)| self.problems[*problem].batched_problem());
        let jobs: Vec<BatchedProblem<T>> = jobs.collect();
        let gpu = &self.device.gpu;
        let kernels = BatchedKernels::get(gpu, self.row_type()?)?;
        let (buffer, mut sent) = self.device.send_rows(self.input.rows, job)?;
        sent.bytes_sent += self.input.weights.map_or(0, size_of_val) as u64;
        let weights = self.input.weights.map(|all| self.device.send_values(all, job));
        let (count, weights) = (self.input.rows.len(), weights.transpose()?);
        let rows = UploadedRows { rows: buffer, count, weights };
        let begin = gpu.timestamp()?;
        let mut workspace = BatchedWorkspace::new(&kernels, &self.device, rows, &jobs)?;
        workspace.run(&kernels, limit, job)?;
        let end = gpu.timestamp()?;
        let results = workspace.finish(&jobs, gpu, job)?;
        self.work += Work { kernel: elapsed(&begin, &end)?, ..sent };
        let runs = batch.iter().zip(results).map(|((problem, _), (status, result))| {
            let stop = status.stop_reason().unwrap_or(StopReason::Limit);
            if stop == StopReason::EmptyCluster || status.is_given_up() {
                return None;
            }
            self.problems[*problem].done = Some((result.centroids, result.labels));
            let (rounds, moved) = (status.iterations as usize, status.moved_last as usize);
            Some(RoundsRun { rounds, moved, stop })
        });
        Ok(runs.collect())
    }
}

impl<T: Real> ProblemState<'_, T> {
    /// The resident state of the problem, on the GPU.
    fn resident(
        &mut self,
        device: &CudaDevice,
        row_type: RowType,
        strategy: AssignStrategy,
        job: &Job,
    ) -> Result<&mut Resident> {
        if self.resident.is_none() {
            let empty = self.empty();
            let input = ResidentInput {
                rows: &self.rows,
                uploaded: self.uploaded.take(),
                weights: self.weights,
                problem: &self.given,
                empty: &empty,
            };
            let mut resident = Resident::open(device, input, row_type, strategy, job)?;
            resident.start(&self.begun.0)?;
            self.resident = Some(resident);
        }
        self.resident.as_mut().ok_or_else(not_started)
    }

    /// Empty sums of the problem's clusters.
    fn empty(&mut self) -> ClusterSums {
        let (k, dim) = (self.given.k, self.rows.matrix().dim());
        let values: &[T] = self.rows.reals().expect("a session has rows of its own type");
        self.empty.get_or_insert_with(|| ClusterSums::new(values, self.weights, dim, k)).clone()
    }

    fn batched_problem(&mut self) -> BatchedProblem<T> {
        BatchedProblem {
            rows: self.given.rows.clone(),
            empty: self.empty(),
            tolerance: self.given.tolerance,
            centroids: self.begun.0.clone(),
        }
    }
}

impl<T: Real> KMeansSession<T> for CudaKMeans<'_, T> {
    fn seed(&mut self, problems: Vec<(usize, Random)>, job: &Job) -> Result<Vec<Vec<T>>> {
        let mut seeds = HashMap::new();
        let (there, mut here): (Vec<_>, Vec<_>) =
            problems.iter().cloned().partition(|(problem, _)| self.can_seed(*problem));
        for (problem, random) in there {
            match job.retry_after_eviction(|| self.seed_there(problem, random.clone(), job)) {
                Ok(centroids) => drop(seeds.insert(problem, centroids)),
                Err(Error::DeviceMemory { .. }) => here.push((problem, random)),
                Err(error) => return Err(error),
            }
        }
        let numbers: Vec<_> = here.iter().map(|(problem, _)| *problem).collect();
        seeds.extend(numbers.into_iter().zip(self.on_host.seed(here, job)?));
        problems.iter().map(|(i, _)| seeds.remove(i).ok_or_else(not_started)).collect()
    }

    fn assign_to(&self, problem: usize, centroids: &[T], job: &Job) -> Result<Assignment<T>> {
        match self.problems[problem].suits {
            Strategy::OnHost | Strategy::Batched => self.on_host.assign_to(problem, centroids, job),
            _ => self.by_search.assign_to(problem, centroids, job),
        }
    }

    fn start(&mut self, problem: usize, centroids: Vec<T>, job: &Job) -> Result<()> {
        let state = &mut self.problems[problem];
        // Means of rows lie between their rows, and so do all later centroids.
        let largest =
            centroids.iter().map(|x| x.to_f64().abs()).fold(state.given.largest, f64::max);
        let fits = squares_are_finite(state.rows.matrix().dim(), largest);
        state.strategy = match state.suits {
            Strategy::Resident(_) if !fits => Strategy::BySearch,
            Strategy::Batched if !fits => Strategy::OnHost,
            suits => suits,
        };
        (state.begun, state.done) = ((centroids, None), None);
        match state.strategy {
            Strategy::Resident(_) => match &mut state.resident {
                Some(resident) => resident.start(&state.begun.0),
                None => Ok(()),
            },
            Strategy::Batched => Ok(()),
            Strategy::BySearch | Strategy::OnHost => {
                let centroids = state.begun.0.clone();
                state.uploaded = None;
                self.general(problem).start(problem, centroids, job)
            }
        }
    }

    fn resume_from(&mut self, problem: usize, centroids: Vec<T>) -> Result<()> {
        let state = &mut self.problems[problem];
        match (state.strategy, &mut state.resident) {
            (Strategy::Resident(_), Some(resident)) => {
                resident.resume_from(&centroids)?;
                state.begun.0 = centroids;
                Ok(())
            }
            _ => self.general(problem).resume_from(problem, centroids),
        }
    }

    fn run(&mut self, problems: &[(usize, usize)], job: &Job) -> Result<Vec<RoundsRun>> {
        let mut runs = vec![None; problems.len()];
        let all = |strategy: Strategy, session: &Self| -> Vec<usize> {
            let has = |i: &usize| session.problems[problems[*i].0].strategy == strategy;
            (0..problems.len()).filter(has).collect()
        };
        let batch = all(Strategy::Batched, self);
        if !batch.is_empty() {
            job.check()?;
            let limits: Vec<_> = batch.iter().map(|i| problems[*i]).collect();
            let ran = match self.run_batched(&limits, job) {
                Err(Error::DeviceMemory { .. }) => vec![None; limits.len()],
                ran => ran?,
            };
            for ((i, (problem, _)), run) in batch.iter().zip(limits).zip(ran) {
                runs[*i] = run;
                if run.is_none() {
                    self.give_up(problem, job)?;
                }
            }
        }
        let hosted: Vec<_> = all(Strategy::OnHost, self);
        let limits: Vec<_> = hosted.iter().map(|i| problems[*i]).collect();
        for (i, run) in hosted.iter().zip(self.on_host.run(&limits, job)?) {
            runs[*i] = Some(run);
        }
        for (i, (problem, limit)) in problems.iter().enumerate() {
            match self.problems[*problem].strategy {
                Strategy::Resident(strategy) => {
                    runs[i] = Some(self.run_resident(*problem, strategy, *limit, job)?);
                }
                Strategy::BySearch => runs[i] = Some(self.run_general(*problem, *limit, job)?),
                Strategy::Batched | Strategy::OnHost => {}
            }
        }
        runs.into_iter().map(|run| run.ok_or_else(not_started)).collect()
    }

    fn assign(&mut self, problem: usize, job: &Job) -> Result<()> {
        let (row_type, state) = (self.row_type, &mut self.problems[problem]);
        if state.done.is_some() {
            return Ok(());
        }
        match state.strategy {
            Strategy::Resident(strategy) => {
                let row_type = row_type.ok_or_else(not_started)?;
                match state.resident(&self.device, row_type, strategy, job) {
                    Ok(resident) => {
                        if resident.assign(job)? {
                            return Ok(());
                        }
                        state.begun = (resident.centroids()?, None);
                    }
                    Err(Error::DeviceMemory { .. }) => {}
                    Err(error) => return Err(error),
                }
                self.give_up(problem, job)?;
            }
            // A problem without rounds is not worth a launch.
            Strategy::Batched => self.give_up(problem, job)?,
            Strategy::BySearch | Strategy::OnHost => {}
        }
        self.general(problem).assign(problem, job)
    }

    fn labels(&mut self, problem: usize, job: &Job) -> Result<Labels> {
        let state = &mut self.problems[problem];
        if let Some((_, labels)) = &state.done {
            return Ok(labels.clone());
        }
        match (state.strategy, &mut state.resident) {
            (Strategy::Resident(_), Some(resident)) => resident.labels(job),
            _ => self.general(problem).labels(problem, job),
        }
    }

    fn assignment(&mut self, problem: usize, job: &Job) -> Result<Assignment<T>> {
        if let Some((centroids, _)) = &self.problems[problem].done {
            return self.assign_to(problem, centroids, job);
        }
        let state = &mut self.problems[problem];
        match (state.strategy, &mut state.resident) {
            (Strategy::Resident(_), Some(resident)) => resident.assignment(job),
            _ => self.general(problem).assignment(problem, job),
        }
    }

    fn centroids(&mut self, problem: usize) -> Result<Vec<T>> {
        let state = &mut self.problems[problem];
        if let Some((centroids, _)) = &state.done {
            return Ok(centroids.clone());
        }
        match (state.strategy, &mut state.resident) {
            (Strategy::Resident(_), Some(resident)) => resident.centroids(),
            (Strategy::Resident(_) | Strategy::Batched, _) => Ok(state.begun.0.clone()),
            _ => self.general(problem).centroids(problem),
        }
    }

    fn sums(&mut self, problem: usize, job: &Job) -> Result<ClusterSums> {
        let state = &mut self.problems[problem];
        if state.done.is_some() {
            let empty = state.empty();
            let labels = state.done.as_ref().map_or(&[][..], |(_, done)| &done.labels);
            return sums_of(&state.rows, state.weights, labels, empty, job);
        }
        match (state.strategy, &mut state.resident) {
            (Strategy::Resident(_), Some(resident)) => resident.sums(job),
            (Strategy::Resident(_) | Strategy::Batched, _) => Ok(state.empty()),
            _ => self.general(problem).sums(problem, job),
        }
    }

    fn take_work(&mut self) -> Result<Work> {
        let mut work = std::mem::take(&mut self.work);
        work += self.by_search.take_work()?;
        work += self.on_host.take_work()?;
        for resident in self.problems.iter_mut().filter_map(|problem| problem.resident.as_mut()) {
            work += resident.take_work()?;
        }
        Ok(work)
    }
}
