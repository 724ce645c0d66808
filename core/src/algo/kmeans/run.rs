//! Lloyd's algorithm: takes problems through runs and rounds, all in one session of a device.

use std::ops::Range;
use std::sync::Arc;

use super::clustering::{Clustering, Rounds};
use super::distinct::distinct_rows;
use super::initial::initial;
use super::input::ProblemInput;
use super::params::{Init, KMeansParams};
use crate::device::{
    Device, KMeansInput, KMeansProblem, KMeansSession, KMeansShape, Means, NearestCentroids,
    OnDevice, StopReason, centroid_shift, sums_by_label,
};
use crate::error::{Error, Result};
use crate::job::{Job, Phase};
use crate::matrix::{ElementKind, Matrix, Real};
use crate::metric::Metric;
use crate::parallel::in_parallel;
use crate::rows::Rows;

/// Bytes of a problem besides its rows, dimensions and clusters: here, in the session, and in its
/// result, with the allocator's overhead for about twenty small allocations.
const PER_PROBLEM: usize = 2048;

/// The progress of a problem's run.
struct RunProgress {
    iterations: usize,
    moved: usize,
    is_done: bool,
}

/// Clusters the rows of each problem separately.
pub(super) struct KMeansTask<'a> {
    pub rows: &'a Rows,
    pub weights: Option<&'a [f64]>,
    /// The end of each problem among the rows; the first starts at 0, the last ends with the rows.
    pub ends: &'a [usize],
    /// The initial centroids for [`Init::Given`].
    pub given: Option<&'a Rows>,
    pub params: &'a KMeansParams,
    /// Whether a problem has at most as many clusters as it has distinct rows of positive weight,
    /// instead of `params.k`.
    pub clamps: bool,
    pub job: &'a Job,
}

impl OnDevice for KMeansTask<'_> {
    type Output = Result<Vec<Clustering>>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        match self.rows.matrix().kind() {
            ElementKind::F64 => best_runs::<D, f64>(device, self),
            _ => best_runs::<D, f32>(device, self),
        }
    }
}

/// The best run of each problem.
fn best_runs<D: Device, T: Real>(
    device: &Arc<D>,
    KMeansTask { rows, weights, ends, given, params, clamps, job }: KMeansTask<'_>,
) -> Result<Vec<Clustering>> {
    params.check()?;
    let rows = &rows.averaged(params.metric, job)?;
    let given = given.map(|given| given.averaged(params.metric, job)).transpose()?;
    let wrong_type = || Error::InvalidArgument("kmeans: bits have no mean".to_string());
    let values = rows.reals::<T>().ok_or_else(wrong_type)?;
    let input = KMeansInput { rows, weights, metric: params.cost() };
    let ranges: Vec<_> = ranges_to(ends).collect();
    let bytes = bytes_of_problems::<T>(&ranges, rows.matrix().dim(), params.k);
    let _reserved = job.reserve("results of k-means", bytes)?;
    let expected =
        KMeansShape { problems: ranges.len(), k: params.k, draws: params.init == Init::PlusPlus };
    let mut inputs = Vec::new();
    let problems = || {
        let of_problems = in_parallel(ranges, |range| {
            let k = clusters(input, values, range.clone(), params, clamps, job)?;
            let problem = KMeansProblem::new::<T>(input, range, k, params.tolerance, job)?;
            let of_problem = ProblemInput::new(&problem, input, values, params);
            Ok((problem, of_problem))
        });
        let of_problems = of_problems.into_iter().collect::<Result<Vec<_>>>()?;
        let problems: Vec<_>;
        (problems, inputs) = of_problems.into_iter().filter(|(problem, _)| problem.k > 0).unzip();
        job.check()?;
        Ok(problems)
    };
    let mut session = device.open_kmeans::<T>(input, expected, problems, job)?;
    let runs = if params.init == Init::Given { 1 } else { params.runs };
    let mut best: Vec<Option<Clustering>> = vec![None; inputs.len()];
    for run in 0..runs {
        job.enter(Phase::Seed);
        let centroids = initial(&inputs, &**device, session.as_mut(), given.as_ref(), run, job)?;
        let clusterings = lloyd(&inputs, device, session.as_mut(), centroids, job)?;
        best.iter_mut().zip(clusterings).for_each(|(best, next)| keep_better(best, next));
    }
    let mut best = best.into_iter().flatten();
    let mut best: Vec<Clustering> = ranges_to(ends)
        .map(|range| if range.is_empty() { None } else { best.next() })
        .map(|best| best.unwrap_or_else(|| Clustering::of_nothing(rows)))
        .collect();
    if let Some(first) = best.first_mut() {
        first.rounds.work += session.take_work()?;
    }
    Ok(best)
}

/// Keeps the clustering with the smaller inertia, the first in case of a tie.
fn keep_better(best: &mut Option<Clustering>, next: Clustering) {
    let assigned = best.as_ref().map_or(0, |best| best.rounds.assigned) + next.rounds.assigned;
    let best = match best {
        Some(best) if best.inertia() <= next.inertia() => best,
        other => other.insert(next),
    };
    best.rounds.assigned = assigned;
}

/// Consecutive ranges with these ends, the first from 0 on.
fn ranges_to(ends: &[usize]) -> impl Iterator<Item = Range<usize>> {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    starts.zip(ends).map(|(start, end)| start..*end)
}

/// Bytes of problems and their results, without their rows and rounds.
fn bytes_of_problems<T>(ranges: &[Range<usize>], dim: usize, k: usize) -> usize {
    let clusters: usize = ranges.iter().map(|range| range.len().min(k)).sum();
    // The origin, the steps of sums and their inverses, and a row in steps and parts.
    let per_problem = PER_PROBLEM + 5 * dim * size_of::<f64>();
    let per_cluster = dim * size_of::<T>() + size_of::<u64>() + size_of::<f64>();
    ranges.len() * per_problem + clusters * per_cluster
}

/// The number of clusters of a range of rows; 0 without distinct rows of positive weight.
fn clusters<T: Real>(
    input: KMeansInput<'_>,
    values: &[T],
    rows: Range<usize>,
    params: &KMeansParams,
    clamps: bool,
    job: &Job,
) -> Result<usize> {
    let dim = input.rows.matrix().dim();
    let weights = input.weights.map(|weights| &weights[rows.clone()]);
    let values = &values[rows.start * dim..rows.end * dim];
    let distinct = distinct_rows(values, params.cost(), dim, weights, params.k, job)?;
    if distinct < params.k && !clamps {
        let (k, weighing) = (params.k, if weights.is_some() { " of positive weight" } else { "" });
        return Err(Error::Unsatisfiable(format!(
            "kmeans: k is {k}, but the input has only {distinct} distinct vectors{weighing}"
        )));
    }
    Ok(distinct)
}

/// Lloyd's rounds of all problems, from `centroids` on.
fn lloyd<D: Device, T: Real>(
    inputs: &[ProblemInput<'_, T>],
    device: &Arc<D>,
    session: &mut (dyn KMeansSession<T> + '_),
    centroids: Vec<Vec<T>>,
    job: &Job,
) -> Result<Vec<Clustering>> {
    job.enter(Phase::Assign);
    for (problem, centroids) in centroids.into_iter().enumerate() {
        job.check()?;
        session.start(problem, centroids, job)?;
    }
    let progress = |input: &ProblemInput<'_, T>| RunProgress {
        iterations: 0,
        moved: input.rows.len(),
        is_done: false,
    };
    let mut all: Vec<_> = inputs.iter().map(progress).collect();
    loop {
        let open = all.iter().enumerate().filter(|(_, progress)| !progress.is_done);
        let limit = |(i, progress): (usize, &RunProgress)| {
            (i, inputs[i].params.max_iterations - progress.iterations)
        };
        let open: Vec<_> = open.map(limit).collect();
        if open.is_empty() {
            break;
        }
        for ((i, limit), run) in open.iter().zip(session.run(&open, job)?) {
            let progress = &mut all[*i];
            progress.iterations += run.rounds;
            progress.moved = run.moved;
            progress.is_done = match run.stop {
                StopReason::EmptyCluster => {
                    let is_done = inputs[*i].fill_empty_clusters(*i, session, job)?;
                    is_done || run.rounds == *limit
                }
                StopReason::Limit | StopReason::Stable | StopReason::Converged => true,
            };
        }
    }
    job.enter(Phase::Assign);
    let last = |(i, progress): (usize, RunProgress)| {
        job.check()?;
        session.assign(i, job)?;
        Ok((&inputs[i], progress, session.labels(i, job)?, session.centroids(i)?))
    };
    let all: Vec<_> = all.into_iter().enumerate().map(last).collect::<Result<_>>()?;
    let part = job.part();
    let clusterings = in_parallel(all, |(input, progress, labels, centroids)| {
        let centroids = Arc::new(Matrix::new(T::elements(centroids), input.params.k, input.dim));
        let (rows, metric) = (&input.rows, input.params.metric);
        let nearest = NearestCentroids::of(device, rows, &centroids, metric, labels, &part)?;
        input.clustering(nearest, centroids, &progress, &part)
    });
    clusterings.into_iter().collect()
}

impl<T: Real> ProblemInput<'_, T> {
    /// Moves all centroids, and those of empty clusters to rows far from their own centroids;
    /// returns whether the shift is within the tolerance.
    fn fill_empty_clusters(
        &self,
        problem: usize,
        session: &mut (dyn KMeansSession<T> + '_),
        job: &Job,
    ) -> Result<bool> {
        let before = session.centroids(problem)?;
        let (sums, now) = (session.sums(problem, job)?, session.assignment(problem, job)?);
        let Self { values, dim, weights, .. } = *self;
        let metric = self.params.cost();
        let means = Means { values, dim, weights, metric };
        let next = means.with_empty_filled(&sums, &now, &before, job)?;
        let shift = centroid_shift(&before, &next, dim, self.unit);
        session.resume_from(problem, next)?;
        Ok(shift <= self.tolerance)
    }

    /// The result of a run.
    fn clustering(
        &self,
        NearestCentroids { labels, distances, work }: NearestCentroids,
        centroids: Arc<Matrix>,
        progress: &RunProgress,
        job: &Job,
    ) -> Result<Clustering> {
        let k = self.params.k;
        let mut sizes = vec![0; k];
        labels.iter().for_each(|label| sizes[*label as usize] += 1);
        let is_squared = self.params.metric == Metric::L2;
        let cost = |row: usize| match (self.weight(row), distances[row]) {
            // A row of weight 0 costs nothing at any distance.
            (0.0, _) => (0.0, 0.0),
            (weight, distance) if is_squared => (distance * distance, weight),
            (weight, distance) => (distance, weight),
        };
        let inertias = sums_by_label(labels.len(), k, |row| labels[row] as usize, cost, job)?;
        let rounds = Rounds {
            iterations: progress.iterations,
            moved: progress.moved,
            assigned: self.rows.len() as u64 * (progress.iterations as u64 + 1),
            inertia: inertias.iter().sum(),
            work,
        };
        Ok(Clustering { labels, distances, centroids, sizes, inertias, rounds })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::algo::kmeans::kmeans;
    use crate::device::AnyDevice;
    use crate::job::{Progress, Watch};
    use crate::random::Random;

    #[derive(Default)]
    struct Told(Mutex<Vec<Progress>>);

    impl Watch for Told {
        fn enter(&self, _: Phase) {}

        fn rounds(&self, progress: Progress) {
            self.0.lock().unwrap().push(progress);
        }
    }

    #[test]
    fn inertias_are_those_of_the_rows_in_any_order() {
        let (count, dim, k, mut random) = (70_000, 2, 4_usize, Random::new(5));
        // Weights that grow, and some that are 0.
        let weights: Vec<f64> = (0..count).map(|row| (row - row % 9) as f64 / 7.0).collect();
        for metric in [Metric::L2, Metric::Cosine] {
            let mut values: Vec<f32> = (0..count * dim).map(|_| random.normal() as f32).collect();
            values.chunks_exact_mut(dim).for_each(|row| metric.prepare(row).unwrap_or(()));
            let params = KMeansParams {
                max_iterations: 3,
                init: Init::Given,
                ..KMeansParams::try_new(k as u64, metric).unwrap()
            };
            let rows = |values: &[f32]| {
                let count = values.len() / dim;
                Rows::all(Arc::new(Matrix::new(f32::elements(values.to_vec()), count, dim)))
            };
            let given = rows(&values[..k * dim]);
            let run = |values: &[f32], weights: &[f64]| {
                let (device, job) = (AnyDevice::cpu(), Job::default());
                kmeans(&device, &rows(values), Some(weights), Some(&given), &params, &job).unwrap()
            };
            let clustering = run(&values, &weights);
            let (mut sizes, mut inertias) = (vec![0; k], vec![0.0; k]);
            for ((label, distance), weight) in
                clustering.labels.iter().zip(&clustering.distances).zip(&weights)
            {
                let cost = if metric == Metric::L2 { distance * distance } else { *distance };
                sizes[*label as usize] += 1;
                inertias[*label as usize] += weight * cost;
            }
            assert_eq!(clustering.sizes, sizes, "{metric}");
            for (inertia, expected) in clustering.inertias.iter().zip(&inertias) {
                assert!((inertia - expected).abs() <= 1e-11 * expected, "{metric}: {inertia}");
            }
            let backwards: Vec<f32> = values.chunks_exact(dim).rev().flatten().copied().collect();
            let of_backwards: Vec<f64> = weights.iter().rev().copied().collect();
            let other = run(&backwards, &of_backwards);
            assert_eq!(other.inertias, clustering.inertias, "{metric}");
            assert_eq!(other.centroids, clustering.centroids, "{metric}");
            assert_eq!(other.rounds.iterations, clustering.rounds.iterations, "{metric}");
        }
    }

    #[test]
    fn rounds_are_told_with_the_inertia_after_each() {
        for (metric, offset, weighs) in
            [(Metric::L2, 1000.0, false), (Metric::L2, 0.0, true), (Metric::Cosine, 0.5, true)]
        {
            let (dim, mut random) = (5, Random::new(7));
            let mut value = |i: usize| ((i % 35 / dim) as f64 + random.normal() + offset) as f32;
            let mut values: Vec<f32> = (0..4000 * dim).map(&mut value).collect();
            values.chunks_exact_mut(dim).for_each(|row| metric.prepare(row).unwrap_or(()));
            let rows = Rows::all(Arc::new(Matrix::new(f32::elements(values), 4000, dim)));
            let weights: Option<Vec<f64>> =
                weighs.then(|| (0..4000).map(|row| (row % 3) as f64).collect());
            let params =
                KMeansParams { tolerance: 0.0, ..KMeansParams::try_new(7, metric).unwrap() };
            let told = Arc::new(Told::default());
            let job = Job::default().with_watch(told.clone());
            let clustering =
                kmeans(&AnyDevice::cpu(), &rows, weights.as_deref(), None, &params, &job);
            let rounds = clustering.unwrap().rounds;
            let told = told.0.lock().unwrap();
            assert_eq!(told.iter().map(|told| told.rounds).sum::<usize>(), rounds.iterations);
            assert!(told.len() > 3);
            let inertias: Vec<f64> = told.iter().map(|told| told.inertia.unwrap()).collect();
            let close = 1e-9 * rounds.inertia;
            assert!(inertias.windows(2).all(|both| both[1] <= both[0] + close), "{inertias:?}");
            let last = told.last().unwrap();
            assert_eq!(last.moved, rounds.moved, "{metric}");
            assert!(inertias[0] > (1.0 + 1e-6) * rounds.inertia, "{metric}: {inertias:?}");
            let (last, inertia) = (inertias[inertias.len() - 1], rounds.inertia);
            assert!((last - inertia).abs() <= 1e-5 * inertia, "{metric}: {last} and {inertia}");
        }
    }
}
