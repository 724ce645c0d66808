//! Whole runs of k-means.

use std::sync::Arc;

use datafusion_neighbors::AnyDevice;
use datafusion_neighbors::internals::algo::kmeans::{
    Clustering, Init, KMeansParams, kmeans, kmeans_groups, kmeans_partial,
};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::internals::matrix::{Elements, Matrix};
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{Error, Metric};
use libtest_mimic::Failed;

use crate::rounding;
use crate::support::lloyd::{exact_mean, lloyd, unit_of, values_of};
use crate::support::{Kind, Rng, matrix_f32, matrix_f64, nearest_centroids};
use crate::{Check, Test};

/// The trials of this module.
pub fn trials() -> Vec<(String, Test)> {
    let mut all: Vec<(String, Test)> = Vec::new();
    for kind in Kind::ALL {
        let run = move |device: &AnyDevice| clusters(device, kind, &CLUSTER_SHAPES);
        all.push((format!("kmeans::{kind:?}"), Box::new(run)));
    }
    let others: [(&str, Check); 8] = [
        ("partial_rounds", partial_rounds),
        ("many_rounds", many_rounds),
        ("many_candidates", many_candidates),
        ("groups", groups),
        ("means_are_exact", exact_means),
        ("rounds_by_definition", rounds_by_definition),
        ("rows_without_weight", weightless),
        ("weights_of_every_size", weighted),
    ];
    let others = others.into_iter().chain(rounding::trials());
    all.extend(others.map(|(name, run)| (format!("kmeans::{name}"), Box::new(run) as Test)));
    all
}

/// The trials for each instruction set of a CPU.
pub fn trials_of_instructions() -> Vec<(String, Test)> {
    let named = |kind: Kind| {
        let run = move |device: &AnyDevice| clusters(device, kind, &SHAPES_OF_INSTRUCTIONS);
        (format!("kmeans::{kind:?}"), Box::new(run) as Test)
    };
    let mut all: Vec<_> = [Kind::Normal, Kind::Lattice, Kind::FarAway].map(named).into();
    all.push(("kmeans::many_candidates".to_string(), Box::new(many_candidates)));
    all
}

/// Rows, dimension, clusters: every strategy by which a device assigns rows, and the limits between
/// strategies.
const CLUSTER_SHAPES: [(usize, usize, u64); 18] = [
    (40, 1, 3),
    (300, 3, 7),
    (9000, 2, 130),
    (1100, 8, 33),
    (800, 10, 65),
    (700, 11, 64),
    (500, 33, 20),
    (390, 58, 300),
    (260, 59, 257),
    (900, 96, 129),
    (600, 128, 70),
    (400, 129, 9),
    (700, 130, 300),
    (300, 257, 70),
    (300, 634, 40),
    (129, 635, 20),
    (150, 1024, 65),
    (100, 1025, 5),
];

/// The same, one shape per strategy by which a CPU assigns rows in rounds: all pairs in integers, a
/// bound per row, bounds per row and centroid, and candidate lists, which AVX-512 uses for smaller
/// problems.
pub const SHAPES_OF_INSTRUCTIONS: [(usize, usize, u64); 5] =
    [(9001, 8, 16), (9000, 2, 130), (600, 128, 70), (390, 58, 300), (500, 40, 400)];

/// Labels are those of the nearest centroids by the definition, and the whole result equals the
/// CPU's bit for bit.
fn clusters(device: &AnyDevice, kind: Kind, shapes: &[(usize, usize, u64)]) -> Result<(), Failed> {
    for (i, (rows, dim, k)) in shapes.iter().copied().enumerate() {
        let mut values = kind.rows(i as u64, rows, dim);
        if i % 2 == 1 {
            values.iter_mut().flatten().for_each(|x| *x /= 3.0);
        }
        for metric in [Metric::L2, Metric::Cosine] {
            for rows in [matrix_f32(&values, dim, metric), matrix_f64(&values, dim, metric)] {
                // Every other centroid is a copy, and gets no rows.
                let copies = rows.slice(0..k as usize / 2);
                let copies = doubled(&copies, k as usize);
                for start in [None, Some(&copies)] {
                    let mut params = KMeansParams::try_new(k, metric)?;
                    (params.max_iterations, params.seed) = (12, 5);
                    if start.is_some() {
                        params.init = Init::Given;
                    }
                    let context = format!("{metric}, dim {dim}, k {k}, given {}", start.is_some());
                    same_clusters(device, &rows, start, &params)
                        .map_err(|e| format!("{context}: {e:?}"))?;
                }
            }
        }
    }
    Ok(())
}

/// A round over a part of the rows is the same on every device.
fn partial_rounds(device: &AnyDevice) -> Result<(), Failed> {
    for (seed, kind) in (0..).zip(Kind::ALL) {
        for (count, dim, k) in [(0, 3, 2), (500, 3, 7), (3000, 40, 20), (70_000, 8, 100)] {
            let values = kind.rows(seed, count.max(k), dim);
            let weights: Vec<f64> = (0..count).map(|row| (row % 5) as f64 * 0.3).collect();
            let metric = if seed % 2 == 0 { Metric::L2 } else { Metric::Cosine };
            for rows in [matrix_f32(&values, dim, metric), matrix_f64(&values, dim, metric)] {
                let all = rows.averaged(metric, &Job::default())?;
                let first: Vec<u32> = (0..k as u32).collect();
                let centroids = Arc::new(all.gather(&first, &Job::default())?);
                let params = KMeansParams::try_new(k as u64, metric)?;
                let weights = (seed % 3 == 0).then_some(weights.as_slice());
                let round = |device: &AnyDevice| {
                    let (rows, job) = (all.slice(0..count), Job::default());
                    let number = |row: usize| row as u64;
                    kmeans_partial(device, &rows, weights, &centroids, number, &params, &job)
                };
                let (actual, expected) = (round(device)?, round(&AnyDevice::cpu())?);
                if actual.to_bytes() != expected.to_bytes() {
                    return Err(format!("{kind:?}, {count} rows, dim {dim}, k {k}").into());
                }
            }
        }
    }
    Ok(())
}

/// A few long runs, which reach kernels that only later rounds launch, and are short enough for
/// tools that slow down every memory access.
fn many_rounds(device: &AnyDevice) -> Result<(), Failed> {
    for (count, dim, k) in [(1500, 3, 9), (1200, 20, 12), (4000, 24, 40), (500, 200, 12)] {
        for outlier in [1.0, 1e3, 1e15] {
            let mut values = Kind::Normal.rows(1, count, dim);
            values[count - 1].iter_mut().for_each(|x| *x *= outlier);
            for metric in [Metric::L2, Metric::Cosine] {
                for rows in [matrix_f32(&values, dim, metric), matrix_f64(&values, dim, metric)] {
                    let start = rows.slice(0..k as usize);
                    let mut params = KMeansParams::try_new(k, metric)?;
                    (params.init, params.tolerance, params.max_iterations) = (Init::Given, 0.0, 20);
                    let clustering =
                        kmeans(device, &rows, None, Some(&start), &params, &Job::default())?;
                    // Rows of many dimensions, and directions, converge early.
                    let is_long = metric == Metric::L2 && dim < 100;
                    if is_long && clustering.rounds.iterations <= 16 {
                        return Err(
                            format!("{} rounds are too few", clustering.rounds.iterations).into()
                        );
                    }
                    same_clusters(device, &rows, Some(&start), &params)
                        .map_err(|e| format!("{metric}, dim {dim}, outlier {outlier:e}: {e:?}"))?;
                }
            }
        }
    }
    Ok(())
}

/// Integer rows have many equally near centroids. The candidates that rounded products leave open
/// exceed one part of a device's work.
fn many_candidates(device: &AnyDevice) -> Result<(), Failed> {
    for (count, dim, k) in [(700, 12, 600), (2000, 16, 300), (1300, 48, 500), (300, 140, 290)] {
        let values = Kind::Lattice.rows(3, count, dim);
        let mut params = KMeansParams::try_new(k, Metric::L2)?;
        (params.init, params.tolerance, params.max_iterations) = (Init::Given, 0.0, 3);
        for rows in [matrix_f32(&values, dim, Metric::L2), matrix_f64(&values, dim, Metric::L2)] {
            same_clusters(device, &rows, Some(&rows.slice(0..k as usize)), &params)
                .map_err(|e| format!("dim {dim}, k {k}: {e:?}"))?;
        }
    }
    Ok(())
}

/// Groups of many sizes in one job have the same clusters as each group alone.
fn groups(device: &AnyDevice) -> Result<(), Failed> {
    for (i, (kind, dim, k)) in [
        (Kind::Normal, 2, 5),
        (Kind::Lattice, 3, 9),
        (Kind::Duplicates, 8, 4),
        (Kind::FarAway, 32, 7),
        (Kind::SignedZeros, 1, 3),
        (Kind::Normal, 40, 3),
        (Kind::AllEqual, 4, 2),
        (Kind::Huge, 6, 5),
        (Kind::Subnormal, 5, 3),
    ]
    .into_iter()
    .enumerate()
    {
        // One group is large enough for the device alone.
        let sizes = (0..300).map(|i| i * 7 % 41).chain([0, 30_000, 1]);
        let sizes: Vec<usize> = if i == 0 { sizes.collect() } else { sizes.take(300).collect() };
        let ends: Vec<usize> = sizes
            .iter()
            .scan(0, |end, size| {
                *end += size;
                Some(*end)
            })
            .collect();
        let mut values = kind.rows(i as u64, *ends.last().unwrap_or(&0), dim);
        values.iter_mut().flatten().for_each(|x| *x /= 3.0);
        for metric in [Metric::L2, Metric::Cosine] {
            for rows in [matrix_f32(&values, dim, metric), matrix_f64(&values, dim, metric)] {
                for init in [Init::PlusPlus, Init::Random] {
                    let mut params = KMeansParams::try_new(k, metric)?;
                    (params.seed, params.init) = (3, init);
                    let clusterings =
                        kmeans_groups(device, &rows, &ends, &params, &Job::default())?;
                    if clusterings.len() != ends.len() {
                        return Err(
                            format!("{} of {} groups", clusterings.len(), ends.len()).into()
                        );
                    }
                    for ((size, end), clustering) in sizes.iter().zip(&ends).zip(clusterings) {
                        let group = rows.slice(end - size..*end);
                        same_group(&group, &params, &clustering)
                            .map_err(|e| format!("{metric} {kind:?} dim {dim}, {size}: {e:?}"))?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Rows of many magnitudes, whose means need exact sums.
pub fn mixed_rows(case: u64, dim: usize) -> Vec<Vec<f64>> {
    let mut rng = Rng(case * 100 + dim as u64);
    let mut rows: Vec<Vec<f64>> =
        (0..400).map(|_| (0..dim).map(|_| rng.normal()).collect()).collect();
    for (i, row) in rows.iter_mut().enumerate() {
        for (j, x) in row.iter_mut().enumerate() {
            *x *= match case {
                // One huge row beside tiny ones.
                0 if i == 77 => 1e17,
                0 => 1e-5,
                // Large values in one dimension.
                1 if i % 50 == 3 && j == 0 => 1e12,
                1 => 1e-9,
                // Magnitudes that vary by element, by row, and by dimension.
                2 => 2f64.powi(rng.below(90) as i32 - 60),
                3 => 2f64.powi((i % 80) as i32 - 40),
                4 => 10f64.powi(j as i32 % 30 - 20),
                // Clusters far apart, with a common offset.
                5 => 1.0 + 1e6 * (i % 3) as f64,
                // Subnormal numbers beside normal ones.
                _ => [1.0, 1e-41, 1e-30][i % 3],
            };
            *x = f64::from(*x as f32);
        }
    }
    if case == 5 {
        rows.iter_mut().flatten().for_each(|x| *x = f64::from((*x + 1e7) as f32));
    }
    rows
}

/// After convergence, centroids are the means of their rows, within 4 units in the last place of
/// the float64 sum of magnitudes; those of float32 are the rounded means.
fn exact_means(device: &AnyDevice) -> Result<(), Failed> {
    for case in 0..7 {
        for (dim, k) in [(1, 1), (3, 4), (8, 9), (40, 5), (130, 3)] {
            let values = mixed_rows(case, dim);
            let mut wide = values.clone();
            if case == 0 {
                // Beyond the range of float32.
                wide[77].iter_mut().for_each(|x| *x *= 1e23);
            }
            for rows in [matrix_f32(&values, dim, Metric::L2), matrix_f64(&wide, dim, Metric::L2)] {
                let mut rng = Rng(case);
                let tiny = (0..rows.len()).map(|i| [1.0, 1e-25, 0.0, 3e-7][i % 4]);
                let any = (0..rows.len()).map(|_| 2f64.powi(-(rng.below(200) as i32)));
                for weights in [None, Some(tiny.collect::<Vec<_>>()), Some(any.collect())] {
                    let mut params = KMeansParams::try_new(k, Metric::L2)?;
                    (params.tolerance, params.init) = (0.0, Init::Random);
                    let job = Job::default();
                    let weights = weights.as_deref();
                    let clustering = kmeans(device, &rows, weights, None, &params, &job)?;
                    if clustering.rounds.moved != 0 || clustering.sizes.contains(&0) {
                        continue;
                    }
                    check_means(&rows, weights, &clustering)
                        .map_err(|e| format!("case {case}, dim {dim}, k {k}: {e:?}"))?;
                }
            }
        }
    }
    Ok(())
}

fn check_means(
    rows: &Rows,
    weights: Option<&[f64]>,
    clustering: &Clustering,
) -> Result<(), Failed> {
    let (x, means) = (values_of(rows), values_of(&Rows::all(clustering.centroids.clone())));
    let weight = |row: usize| weights.map_or(1.0, |weights| weights[row]);
    for (cluster, mean) in means.iter().enumerate() {
        let members = || (0..x.len()).filter(|row| clustering.labels[*row] as usize == cluster);
        if members().all(|row| weight(row) == 0.0) {
            continue;
        }
        for (j, mean) in mean.iter().enumerate() {
            let (expected, size) = exact_mean(members().map(|row| (x[row][j], weight(row))));
            let is_right = if rows.reals::<f32>().is_some() {
                *mean == f64::from(expected as f32)
            } else {
                (mean - expected).abs() <= 4.0 * unit_of(size)
            };
            if !is_right {
                return Err(
                    format!("cluster {cluster}, dim {j}: {mean:e} is not {expected:e}").into()
                );
            }
        }
    }
    Ok(())
}

/// Whole runs equal a plain implementation of Lloyd's algorithm.
fn rounds_by_definition(device: &AnyDevice) -> Result<(), Failed> {
    for (i, kind) in Kind::ALL.into_iter().enumerate() {
        for (count, dim, k) in [(60, 1, 4), (300, 5, 12), (150, 12, 20), (120, 70, 6)] {
            let values = kind.rows(i as u64, count, dim);
            let weights: Vec<f64> = (0..count).map(|row| [1.0, 0.25, 0.0, 7.5][row % 4]).collect();
            for rows in [matrix_f32(&values, dim, Metric::L2), matrix_f64(&values, dim, Metric::L2)]
            {
                // Half of the centroids are duplicates, and lose their rows.
                for start in [rows.slice(0..k), doubled(&rows.slice(0..k), k)] {
                    for weights in [None, Some(weights.as_slice())] {
                        let mut params = KMeansParams::try_new(k as u64, Metric::L2)?;
                        (params.tolerance, params.init) = (0.0, Init::Given);
                        params.max_iterations = 15;
                        let job = Job::default();
                        let clustering =
                            match kmeans(device, &rows, weights, Some(&start), &params, &job) {
                                Err(Error::Unsatisfiable(_)) => continue,
                                other => other?,
                            };
                        let (labels, centroids, rounds) = lloyd(&rows, weights, &start, 15);
                        let context = format!(
                            "{kind:?}, dim {dim}, k {k}, weights {}, f32 {}",
                            weights.is_some(),
                            rows.reals::<f32>().is_some()
                        );
                        if clustering.rounds.iterations != rounds {
                            let actual = clustering.rounds.iterations;
                            return Err(format!("{context}: {actual} rounds of {rounds}").into());
                        }
                        if values_of(&Rows::all(clustering.centroids.clone())) != centroids {
                            return Err(format!("{context}: other centroids").into());
                        }
                        if clustering.labels != labels {
                            return Err(format!("{context}: other labels").into());
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// Rows of weight 0 are in clusters without influencing them: only distinct vectors of positive
/// weight are first centroids, and only they count as distinct.
fn weightless(device: &AnyDevice) -> Result<(), Failed> {
    let values = Kind::Normal.rows(8, 200, 3);
    for rows in [matrix_f32(&values, 3, Metric::L2), matrix_f64(&values, 3, Metric::L2)] {
        for heavy in [1, 2, 9] {
            // Every vector of positive weight occurs twice.
            let weight = |row: usize| if row % 100 < heavy { 2.0 } else { 0.0 };
            let weights: Vec<f64> = (0..400).map(weight).collect();
            let twice =
                rows.gather(&(0..400).map(|row| row % 100).collect::<Vec<u32>>(), &Job::default())?;
            let twice = Rows::all(Arc::new(twice));
            for init in [Init::PlusPlus, Init::Parallel, Init::Random] {
                let run = |k: usize| {
                    let mut params = KMeansParams::try_new(k as u64, Metric::L2)?;
                    params.init = init;
                    kmeans(device, &twice, Some(&weights), None, &params, &Job::default())
                };
                let clustering = run(heavy)?;
                let mut centroids = values_of(&Rows::all(clustering.centroids.clone()));
                let mut expected = values_of(&rows.slice(0..heavy));
                centroids.sort_by(|a, b| a[0].total_cmp(&b[0]));
                expected.sort_by(|a, b| a[0].total_cmp(&b[0]));
                if centroids != expected {
                    return Err(format!("{init:?}: the centroids are not the heavy rows").into());
                }
                match run(heavy + 1) {
                    Err(Error::Unsatisfiable(text))
                        if text.contains(&format!("{heavy} distinct")) => {}
                    other => return Err(format!("{init:?}: {other:?} for too many").into()),
                }
            }
        }
    }
    Ok(())
}

/// Weights that are integers, 0, of every magnitude, or so small that products underflow in
/// float64.
fn weighted(device: &AnyDevice) -> Result<(), Failed> {
    for (count, dim, k) in CLUSTER_SHAPES {
        let mut rng = Rng(dim as u64);
        let values: Vec<Vec<f64>> =
            (0..count).map(|_| (0..dim).map(|_| rng.normal() / 3.0).collect()).collect();
        for metric in [Metric::L2, Metric::Cosine] {
            for rows in [matrix_f32(&values, dim, metric), matrix_f64(&values, dim, metric)] {
                for kind in 0..4 {
                    let mut weight = |row: usize| match kind {
                        0 => [1.0, 2.0, 5.0][row % 3],
                        1 => [0.1, 0.0, 0.7, 0.3][row % 4],
                        2 => rng.uniform() * 2f64.powi(rng.below(400) as i32 - 200),
                        _ => [1.0, 1e-308, 0.5][row % 3],
                    };
                    let weights: Vec<f64> = (0..count).map(&mut weight).collect();
                    let mut params = KMeansParams::try_new(k, metric)?;
                    (params.init, params.tolerance, params.max_iterations) = (Init::Given, 0.0, 6);
                    let (weights, start) = (Some(&*weights), rows.slice(0..k as usize));
                    same_weighted_clusters(device, &rows, weights, Some(&start), &params)
                        .map_err(|e| format!("{metric}, dim {dim}, weights {kind}: {e:?}"))?;
                }
            }
        }
    }
    Ok(())
}

fn same_group(rows: &Rows, params: &KMeansParams, clustering: &Clustering) -> Result<(), Failed> {
    let k = clustering.sizes.len() as u64;
    if k == 0 {
        return if rows.is_empty() { Ok(()) } else { Err("rows without clusters".into()) };
    }
    let mut alone = KMeansParams::try_new(k, params.metric())?;
    (alone.seed, alone.init) = (params.seed, params.init);
    let job = Job::default();
    if let Ok(more) = KMeansParams::try_new(k + 1, params.metric())
        && k < params.k() as u64
        && kmeans(&AnyDevice::cpu(), rows, None, None, &more, &job).is_ok()
    {
        return Err(format!("{k} clusters where there are more distinct rows").into());
    }
    let alone = kmeans(&AnyDevice::cpu(), rows, None, None, &alone, &job)?;
    let bits = |x: &Clustering| {
        let rounds = (x.rounds.iterations, x.rounds.moved);
        (x.labels.clone(), x.distances.clone(), x.sizes.clone(), x.inertias.clone(), rounds)
    };
    if bits(&alone) != bits(clustering) || alone.centroids != clustering.centroids {
        return Err("not what it is alone".into());
    }
    Ok(())
}

/// The first rows, repeated up to `count` rows, each vector twice.
fn doubled(rows: &Rows, count: usize) -> Rows {
    let dim = rows.matrix().dim();
    let twice = |i: usize| (i / 2 % rows.len().max(1)) * dim;
    let elements = match (rows.reals::<f32>(), rows.reals::<f64>()) {
        (Some(x), _) => {
            Elements::F32((0..count).flat_map(|i| &x[twice(i)..][..dim]).copied().collect())
        }
        (_, Some(x)) => {
            Elements::F64((0..count).flat_map(|i| &x[twice(i)..][..dim]).copied().collect())
        }
        _ => unreachable!("numbers"),
    };
    Rows::all(Arc::new(Matrix::new(elements, count, dim)))
}

pub fn same_clusters(
    device: &AnyDevice,
    rows: &Rows,
    start: Option<&Rows>,
    params: &KMeansParams,
) -> Result<(), Failed> {
    same_weighted_clusters(device, rows, None, start, params)
}

fn same_weighted_clusters(
    device: &AnyDevice,
    rows: &Rows,
    weights: Option<&[f64]>,
    start: Option<&Rows>,
    params: &KMeansParams,
) -> Result<(), Failed> {
    let run = |device: &AnyDevice| kmeans(device, rows, weights, start, params, &Job::default());
    let clustering = match run(device) {
        Err(Error::Unsatisfiable(_)) => return Ok(()),
        other => other?,
    };
    let cpu = run(&AnyDevice::cpu())?;
    let rounds = |x: &Clustering| (x.rounds.iterations, x.rounds.moved);
    if rounds(&clustering) != rounds(&cpu) {
        return Err(
            format!("rounds {:?}, on the CPU {:?}", rounds(&clustering), rounds(&cpu)).into()
        );
    }
    let bits = |x: &Clustering| {
        (x.labels.clone(), x.distances.clone(), x.sizes.clone(), x.inertias.clone())
    };
    if bits(&clustering) != bits(&cpu) || clustering.centroids != cpu.centroids {
        return Err("not what the CPU finds".into());
    }
    let (labels, distances) = nearest_centroids(rows, &clustering.centroids, params.metric());
    if labels != clustering.labels || distances != clustering.distances {
        return Err("not the nearest by the definition".into());
    }
    Ok(())
}
