//! The primitives of a k-means session.

use std::collections::HashSet;
use std::sync::Arc;

use datafusion_neighbors::Metric;
use datafusion_neighbors::internals::device::{
    AnyDevice, Assignment, Device, KMeansInput, KMeansProblem, KMeansSession, KMeansShape,
    OnDevice, StopReason, centroid_shift,
};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::internals::matrix::{Elements, Matrix, Real};
use datafusion_neighbors::internals::random::Random;
use datafusion_neighbors::internals::rows::Rows;
use libtest_mimic::Failed;

use crate::kmeans::{SHAPES_OF_INSTRUCTIONS, mixed_rows};
use crate::support::lloyd::{exact_mean, lloyd, plus_plus, values_of};
use crate::support::{Kind, Rng, matrix_f32, matrix_f64, nearest_centroids, oracle};
use crate::{Check, Test};

/// The trials of this module.
pub fn trials() -> Vec<(String, Test)> {
    let all: [(&str, Check); 7] = [
        ("seeds_by_definition", seeds),
        ("assignments_by_definition", assignments),
        ("rows_between_centroids_are_undecided", between_centroids),
        ("sums_by_definition", sums),
        ("rounds_stop_at_the_tolerance", tolerances),
        ("problems_side_by_side", side_by_side),
        ("rows_are_sent_once", sent_once),
    ];
    all.map(|(name, run)| (format!("kmeans::{name}"), Box::new(run) as Test)).into()
}

type Open<'a, T> = (KMeansInput<'a>, Vec<KMeansProblem>, std::marker::PhantomData<T>);

/// Opens a session on a device and runs a function in it.
struct InSession<'a, T, F>(Open<'a, T>, F);

impl<T: Real, R, F> OnDevice for InSession<'_, T, F>
where
    F: FnOnce(&mut dyn KMeansSession<T>) -> Result<R, Failed>,
{
    type Output = Result<R, Failed>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        let Self((input, problems, _), run) = self;
        let k = problems.iter().map(|problem| problem.k).max().unwrap_or(0);
        let expected = KMeansShape { problems: problems.len(), k, draws: true };
        let mut session =
            device.open_kmeans::<T>(input, expected, || Ok(problems), &Job::default())?;
        run(session.as_mut())
    }
}

fn in_session<T: Real, R>(
    device: &AnyDevice,
    input: KMeansInput<'_>,
    problems: Vec<KMeansProblem>,
    run: impl FnOnce(&mut dyn KMeansSession<T>) -> Result<R, Failed>,
) -> Result<R, Failed> {
    device.run(InSession((input, problems, std::marker::PhantomData), run))
}

fn rows_of<T: Real>(values: &[Vec<f64>], dim: usize, metric: Metric) -> Rows {
    let rows = matrix_f32(values, dim, metric);
    if rows.reals::<T>().is_some() { rows } else { matrix_f64(values, dim, metric) }
}

fn all_of<T: Real>(rows: &Rows) -> Result<&[T], Failed> {
    Ok(rows.reals::<T>().ok_or("numbers")?)
}

fn as_rows<T: Real>(values: &[T], dim: usize) -> Rows {
    let count = values.len() / dim;
    let elements: Elements = T::elements(values.to_vec());
    Rows::all(Arc::new(Matrix::new(elements, count, dim)))
}

/// Seeding chooses the rows that k-means++ chooses.
fn seeds(device: &AnyDevice) -> Result<(), Failed> {
    seeds_of::<f32>(device)?;
    seeds_of::<f64>(device)
}

fn seeds_of<T: Real>(device: &AnyDevice) -> Result<(), Failed> {
    for (i, kind) in Kind::ALL.into_iter().enumerate() {
        for (count, dim, k, metric) in [
            (1, 2, 1, Metric::SqEuclidean),
            (1025, 3, 4, Metric::SqEuclidean),
            (1100, 7, 30, Metric::SqEuclidean),
            (2500, 33, 5, Metric::Cosine),
            (1300, 150, 9, Metric::SqEuclidean),
        ] {
            let rows = rows_of::<T>(&kind.rows(i as u64, count, dim), dim, metric);
            let weights: Vec<f64> = (0..count).map(|row| [1.0, 0.5, 3.0][row % 3]).collect();
            for weights in [None, Some(weights.as_slice())] {
                let input = KMeansInput { rows: &rows, weights, metric };
                let problem = KMeansProblem::new::<T>(input, 0..count, k, 1e-4, &Job::default())?;
                let random = || Random::new(i as u64);
                let seeds = in_session::<T, _>(device, input, vec![problem], |session| {
                    Ok(session.seed(vec![(0, random())], &Job::default())?.swap_remove(0))
                })?;
                let expected = plus_plus(&rows, weights, metric, k, random());
                let values = all_of::<T>(&rows)?;
                let expected = expected.into_iter().flat_map(|row| &values[row * dim..][..dim]);
                if !seeds.iter().eq(expected) {
                    return Err(format!("{kind:?}, {metric}: other rows are chosen").into());
                }
            }
        }
    }
    Ok(())
}

/// The nearest of arbitrary vectors, before and after rounds.
fn assignments(device: &AnyDevice) -> Result<(), Failed> {
    assignments_of::<f32>(device)?;
    assignments_of::<f64>(device)
}

fn assignments_of<T: Real>(device: &AnyDevice) -> Result<(), Failed> {
    for kind in Kind::ALL {
        for (dim, metric) in
            [(3, Metric::SqEuclidean), (20, Metric::SqEuclidean), (9, Metric::Cosine)]
        {
            let rows = rows_of::<T>(&kind.rows(1, 300, dim), dim, metric);
            let others = rows_of::<T>(&kind.rows(2, 40, dim), dim, metric);
            let input = KMeansInput { rows: &rows, weights: None, metric };
            let problem = KMeansProblem::new::<T>(input, 0..300, 5, 1e-4, &Job::default())?;
            let job = Job::default();
            in_session::<T, _>(device, input, vec![problem], |session| {
                let given = all_of::<T>(&others)?;
                let check = |assignment: Assignment<T>, vectors: &[T], when: &str| {
                    let vectors = as_rows(vectors, dim);
                    let (labels, costs) = oracle(&rows, &vectors, metric, 1, None);
                    let same =
                        labels == assignment.labels && costs.reals() == Some(assignment.costs);
                    same.then_some(()).ok_or(format!("{kind:?}, {metric}, dim {dim}: {when}"))
                };
                check(session.assign_to(0, given, &job)?, given, "before rounds")?;
                session.start(0, given[..5 * dim].to_vec(), &job)?;
                session.assign(0, &job)?;
                check(
                    session.assignment(0, &Job::default())?,
                    &given[..5 * dim],
                    "without rounds",
                )?;
                session.start(0, given[5 * dim..10 * dim].to_vec(), &job)?;
                session.run(&[(0, 3)], &job)?;
                session.assign(0, &job)?;
                let centroids = session.centroids(0)?;
                check(session.assignment(0, &Job::default())?, &centroids, "after rounds")?;
                check(session.assign_to(0, given, &job)?, given, "beside rounds")?;
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// A row whose label differs from the definition's is reported as undecided, before and after
/// rounds.
fn between_centroids(device: &AnyDevice) -> Result<(), Failed> {
    between_centroids_of::<f32>(device)?;
    between_centroids_of::<f64>(device)
}

fn between_centroids_of<T: Real>(device: &AnyDevice) -> Result<(), Failed> {
    let mut wrong = 0;
    for (count, dim, k) in SHAPES_OF_INSTRUCTIONS {
        let k = k as usize;
        for metric in [Metric::SqEuclidean, Metric::Cosine] {
            // In the plane, this number of directions is too dense for the vectors to be moved.
            if metric == Metric::Cosine && dim == 2 {
                continue;
            }
            let (values, moved) = halfway::<T>(count, dim, k, metric);
            let rows = rows_of::<T>(&values, dim, metric);
            let moved = rows_of::<T>(&moved, dim, metric);
            // Rows in the middle have weight 0, so that the means stay in place.
            let weights: Vec<f64> = (0..count).map(|row| f64::from(u8::from(row < k))).collect();
            let input = KMeansInput { rows: &rows, weights: Some(&weights), metric };
            let problem = KMeansProblem::new::<T>(input, 0..count, k, -1.0, &Job::default())?;
            let mislabelled = in_session::<T, _>(device, input, vec![problem], |session| {
                let job = Job::default();
                session.start(0, all_of::<T>(&rows.slice(0..k))?.to_vec(), &job)?;
                let without_rounds = wrong_labels(session, &rows, metric)?;
                session.start(0, all_of::<T>(&moved)?.to_vec(), &job)?;
                if session.run(&[(0, 20)], &job)?[0].stop == StopReason::EmptyCluster {
                    return Err("a vector is in the cluster of another".into());
                }
                Ok(without_rounds + wrong_labels(session, &rows, metric)?)
            });
            wrong += mislabelled.map_err(|e| format!("{metric}, dim {dim}, k {k}: {e:?}"))?;
        }
    }
    // At least one label must be wrong, or nothing was tested.
    if wrong == 0 { Err("no row is so near to the middle".into()) } else { Ok(()) }
}

/// `k` vectors; rows halfway between one of them and its nearest neighbour, up to a few units in
/// the last place; and the vectors moved slightly.
fn halfway<T: Real>(
    count: usize,
    dim: usize,
    k: usize,
    metric: Metric,
) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let vectors = matrix_f64(&Kind::Normal.rows(4, k, dim), dim, metric);
    let (nearest, _) = oracle(&vectors, &vectors, metric, 1, Some(0));
    let (mut values, mut rng) = (values_of(&vectors), Rng(9));
    let between = |from: &[f64], to: &[f64], part: f64| -> Vec<f64> {
        from.iter().zip(to).map(|(x, y)| x + part * (y - x)).collect()
    };
    let moved = (0..k).map(|i| between(&values[i], &values[(i + 1) % k], 1e-6)).collect();
    for row in k..count {
        let one = row % k;
        let part = 0.5 + 4.0 * T::EPSILON.to_f64() * (rng.uniform() - 0.5);
        let middle = between(&values[one], &values[nearest[one] as usize], part);
        values.push(middle);
    }
    (values, moved)
}

/// Assigns rows, and counts labels that differ from the definition's; the rows of all of these must
/// be reported as undecided.
fn wrong_labels<T: Real>(
    session: &mut dyn KMeansSession<T>,
    rows: &Rows,
    metric: Metric,
) -> Result<usize, Failed> {
    let (job, dim) = (Job::default(), rows.matrix().dim());
    session.assign(0, &job)?;
    // A repeated assignment changes nothing.
    session.assign(0, &job)?;
    let (labelled, centroids) = (session.labels(0, &job)?, session.centroids(0)?);
    if session.assignment(0, &job)?.labels != labelled.labels {
        return Err("other labels where there are costs".into());
    }
    let k = centroids.len() / dim;
    let centroids = Arc::new(Matrix::new(T::elements(centroids), k, dim));
    let definition = if metric == Metric::SqEuclidean { Metric::L2 } else { metric };
    let (expected, _) = nearest_centroids(rows, &centroids, definition);
    let is_wrong = |row: &u32| labelled.labels[*row as usize] != expected[*row as usize];
    let wrong: Vec<u32> = (0..rows.len() as u32).filter(is_wrong).collect();
    if let Some(undecided) = &labelled.undecided {
        let each: HashSet<&u32> = undecided.iter().collect();
        if each.len() != undecided.len() {
            return Err("a row is undecided more than once".into());
        }
        if let Some(row) = wrong.iter().find(|row| !each.contains(row)) {
            return Err(format!("row {row} is decided, and in another cluster").into());
        }
    }
    Ok(wrong.len())
}

/// Rows move between clusters, one of which is always empty: centroids are the means of their
/// current rows.
fn sums(device: &AnyDevice) -> Result<(), Failed> {
    sums_of::<f32>(device)?;
    sums_of::<f64>(device)
}

fn sums_of<T: Real>(device: &AnyDevice) -> Result<(), Failed> {
    const K: usize = 6;
    for case in 0..7 {
        for (copies, dim) in [(1, 3), (1, 17), (30, 2)] {
            let values = vec![mixed_rows(case, dim); copies].concat();
            let rows = rows_of::<T>(&values, dim, Metric::SqEuclidean);
            let count = rows.len();
            let weights: Vec<f64> = (0..count).map(|row| [1.0, 1e-25, 0.0, 0.3][row % 4]).collect();
            for weights in [None, Some(weights.as_slice())] {
                let input = KMeansInput { rows: &rows, weights, metric: Metric::SqEuclidean };
                let problem = KMeansProblem::new::<T>(input, 0..count, K, 0.0, &Job::default())?;
                let x = all_of::<T>(&rows)?;
                let mut rng = Rng(case);
                let job = Job::default();
                in_session::<T, _>(device, input, vec![problem], |session| {
                    for step in 0..3 {
                        // The last centroid is a copy of the first, and gets no rows.
                        let mut start: Vec<T> = (0..K - 1)
                            .flat_map(|_| {
                                x[rng.below(count as u64) as usize * dim..][..dim].to_vec()
                            })
                            .collect();
                        start.extend_from_within(..dim);
                        match step {
                            0 => session.start(0, start, &job)?,
                            _ => session.resume_from(0, start)?,
                        }
                        let run = session.run(&[(0, 1)], &job)?;
                        if run[0].stop != StopReason::EmptyCluster {
                            break;
                        }
                        check_sums(session, &rows, weights, K)
                            .map_err(|e| format!("case {case}, dim {dim}, step {step}: {e:?}"))?;
                    }
                    Ok(())
                })?;
            }
        }
    }
    Ok(())
}

fn check_sums<T: Real>(
    session: &mut dyn KMeansSession<T>,
    rows: &Rows,
    weights: Option<&[f64]>,
    k: usize,
) -> Result<(), Failed> {
    let (labels, sums) =
        (session.assignment(0, &Job::default())?.labels, session.sums(0, &Job::default())?);
    let x = values_of(rows);
    let weight = |row: usize| weights.map_or(1.0, |weights| weights[row]);
    for cluster in 0..k {
        let members = || (0..x.len()).filter(|row| labels[*row] as usize == cluster);
        let Some(mean) = sums.mean(cluster) else {
            if members().any(|row| weight(row) > 0.0) {
                return Err(format!("cluster {cluster} is empty").into());
            }
            continue;
        };
        for (j, mean) in mean.enumerate() {
            let expected = exact_mean(members().map(|row| (x[row][j], weight(row)))).0;
            if mean != expected {
                let at = format!("cluster {cluster}, dim {j}");
                return Err(format!("{at}: {mean:e} is not {expected:e}").into());
            }
        }
    }
    Ok(())
}

/// Rounds converge at a tolerance equal to the centroid shift, and not at the number below.
fn tolerances(device: &AnyDevice) -> Result<(), Failed> {
    for (count, dim, k) in [(1500, 3, 9), (1200, 20, 12), (600, 70, 5)] {
        let rows = matrix_f32(&Kind::Normal.rows(3, count, dim), dim, Metric::SqEuclidean);
        let start = rows.slice(0..k);
        let values = all_of::<f32>(&start)?;
        let mut before = values.to_vec();
        for round in 1..6 {
            let (_, after, rounds) = lloyd(&rows, None, &start, round);
            if rounds < round {
                break;
            }
            let after: Vec<f32> = after.into_iter().flatten().map(|x| x as f32).collect();
            let input = KMeansInput { rows: &rows, weights: None, metric: Metric::SqEuclidean };
            let mut problem = KMeansProblem::new::<f32>(input, 0..count, k, 0.0, &Job::default())?;
            let shift = centroid_shift(&before, &after, dim, problem.unit);
            for (tolerance, stop) in
                [(shift, StopReason::Converged), (shift.next_down(), StopReason::Limit)]
            {
                problem.tolerance = tolerance;
                let problems = vec![problem.clone()];
                let run = in_session::<f32, _>(device, input, problems, |session| {
                    let job = Job::default();
                    session.start(0, before.clone(), &job)?;
                    Ok(session.run(&[(0, 1)], &job)?[0])
                })?;
                if run.stop != stop {
                    let difference = format!("{:?} instead of {stop:?}", run.stop);
                    return Err(format!("dim {dim}, round {round}: {difference}").into());
                }
            }
            before = after;
        }
    }
    Ok(())
}

/// Problems of a shared session have the same results as alone.
fn side_by_side(device: &AnyDevice) -> Result<(), Failed> {
    for (i, kind) in Kind::ALL.into_iter().enumerate() {
        for dim in [2, 12, 40] {
            // One problem is large enough for the device alone.
            let sizes =
                [30, 7, 9000, 64, 200].map(|size| if i == 0 { size } else { size.min(200) });
            let values = kind.rows(i as u64, sizes.iter().sum(), dim);
            // Weights 0, and weights whose products underflow in float64.
            let weights = [[1.0; 3], [0.1, 2.0, 0.0], [1.0, 1e-308, 2.0]];
            for weights in weights {
                let weights: Vec<f64> = (0..values.len()).map(|row| weights[row % 3]).collect();
                let weights = weights.iter().any(|weight| *weight != 1.0).then_some(&*weights);
                let rows = matrix_f32(&values, dim, Metric::SqEuclidean);
                let metric = Metric::SqEuclidean;
                each_as_alone(device, KMeansInput { rows: &rows, weights, metric }, &sizes)
                    .map_err(|e| {
                        format!("{kind:?}, dim {dim}, weights {}: {e:?}", weights.is_some())
                    })?;
            }
        }
    }
    Ok(())
}

fn each_as_alone(
    device: &AnyDevice,
    input: KMeansInput<'_>,
    sizes: &[usize],
) -> Result<(), Failed> {
    let (dim, x) = (input.rows.matrix().dim(), all_of::<f32>(input.rows)?);
    let mut end = 0;
    let problems: Vec<_> = sizes
        .iter()
        .map(|size| {
            let k = if *size == 9000 { 1000 } else { 5 };
            end += size;
            KMeansProblem::new::<f32>(input, end - size..end, k, 1e-4, &Job::default())
        })
        .collect::<Result<_, _>>()?;
    let job = Job::default();
    let first = |problem: &KMeansProblem| x[problem.rows.start * dim..][..problem.k * dim].to_vec();
    let outcomes = in_session::<f32, _>(device, input, problems.clone(), |session| {
        for (i, problem) in problems.iter().enumerate() {
            session.start(i, first(problem), &job)?;
        }
        let rounds: Vec<_> = (0..problems.len()).map(|i| (i, 4)).collect();
        let runs = session.run(&rounds, &job)?;
        outcome(session, runs, &job)
    })?;
    for (i, problem) in problems.iter().enumerate() {
        let group = input.rows.slice(problem.rows.clone());
        let run = |device: &AnyDevice, input, one| {
            in_session::<f32, _>(device, input, vec![one], |session| {
                let seeds = session.seed(vec![(0, Random::new(7))], &job)?;
                session.start(0, first(problem), &job)?;
                let runs = session.run(&[(0, 4)], &job)?;
                Ok((seeds, outcome(session, runs, &job)?))
            })
        };
        let alone = KMeansProblem { rows: 0..group.len(), ..problem.clone() };
        let weights = input.weights.map(|weights| &weights[problem.rows.clone()]);
        let only = KMeansInput { rows: &group, weights, ..input };
        let (seeds, alone) = run(&AnyDevice::cpu(), only, alone)?;
        // A session with a single problem, which covers a part of the rows.
        if run(device, input, problem.clone())? != (seeds, alone.clone()) {
            return Err(format!("problem {i}: other rows count").into());
        }
        if alone[0] != outcomes[i] {
            return Err(format!("problem {i}: not as alone").into());
        }
    }
    Ok(())
}

type Outcome<T> = (datafusion_neighbors::internals::device::RoundsRun, Vec<T>, Assignment<T>);

fn outcome<T: Real>(
    session: &mut dyn KMeansSession<T>,
    runs: Vec<datafusion_neighbors::internals::device::RoundsRun>,
    job: &Job,
) -> Result<Vec<Outcome<T>>, Failed> {
    let one = |(i, run)| {
        session.assign(i, job)?;
        Ok((run, session.centroids(i)?, session.assignment(i, &Job::default())?))
    };
    runs.into_iter().enumerate().map(one).collect()
}

/// Rows and centroids are sent before the rounds, once.
fn sent_once(device: &AnyDevice) -> Result<(), Failed> {
    sent_once_of::<f32>(device)?;
    sent_once_of::<f64>(device)
}

fn sent_once_of<T: Real>(device: &AnyDevice) -> Result<(), Failed> {
    const ROUNDS: usize = 8;
    for metric in [Metric::SqEuclidean, Metric::Cosine] {
        for (count, dim) in [(1200, 8), (900, 33), (300, 1024)] {
            let rows = rows_of::<T>(&Kind::Normal.rows(2, count, dim), dim, metric);
            let all_weights: Vec<f64> = (0..count).map(|row| [0.0, 0.1, 2.0][row % 3]).collect();
            for weights in [None, Some(&*all_weights)] {
                let input = KMeansInput { rows: &rows, weights, metric };
                let k = count / 2;
                let problem = KMeansProblem::new::<T>(input, 0..count, k, -1.0, &Job::default())?;
                let first = all_of::<T>(&rows.slice(0..k))?.to_vec();
                let work = in_session::<T, _>(device, input, vec![problem], |session| {
                    let job = Job::default();
                    session.start(0, first, &job)?;
                    session.run(&[(0, ROUNDS)], &job)?;
                    session.assign(0, &job)?;
                    Ok(session.take_work()?)
                })?;
                let numbers = count * dim * size_of::<T>();
                let once = (numbers + weights.map_or(0, size_of_val)) as u64;
                if work.bytes_sent > once + once / 8 {
                    let context = format!("{metric}, dim {dim}, weights {}", weights.is_some());
                    return Err(format!("{context}: {} of {once}", work.bytes_sent).into());
                }
            }
        }
    }
    Ok(())
}
