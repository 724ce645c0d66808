//! First centroids of k-means++, for problems large enough for a device.

use datafusion_neighbors::AnyDevice;
use datafusion_neighbors::internals::algo::kmeans::{Clustering, KMeansParams, kmeans};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{Error, Metric};
use libtest_mimic::Failed;

use crate::support::{Kind, Rng, matrix_f32, matrix_f64};
use crate::{Check, Test};

/// The trials of this module.
pub fn trials() -> Vec<(String, Test)> {
    let mut all: Vec<(String, Test)> = Vec::new();
    for (i, kind) in Kind::ALL.into_iter().enumerate() {
        let rows = move |shape: usize, rows, dim| kind.rows(shape as u64, rows, dim);
        let run = move |device: &AnyDevice| same_rows(device, i, rows);
        all.push((format!("seeding::{kind:?}"), Box::new(run)));
    }
    let others: [(&str, Check); 4] = [
        ("rows_of_all_sizes", |device| same_rows(device, 1, of_all_sizes)),
        ("one_row_far_away", |device| same_rows(device, 2, one_far_away)),
        ("few_rows", few_rows),
        ("many_rows", many_rows),
    ];
    all.extend(others.map(|(name, run)| (format!("seeding::{name}"), Box::new(run) as Test)));
    all
}

/// The trials for each instruction set of a CPU.
pub fn trials_of_instructions() -> Vec<(String, Test)> {
    let named = |kind: Kind| {
        let run = move |device: &AnyDevice| few_of_each_way(device, kind);
        (format!("seeding::{kind:?}"), Box::new(run) as Test)
    };
    [Kind::Normal, Kind::Lattice, Kind::Duplicates].map(named).into()
}

/// On the CPU, rows of many dimensions have distance bounds from the start, other rows after some
/// centroids are chosen.
fn few_of_each_way(device: &AnyDevice, kind: Kind) -> Result<(), Failed> {
    for (count, dim, k) in [(8_000, 16, 140), (3_000, 40, 150), (500, 700, 60)] {
        let values = kind.rows(3, count, dim);
        for rows in [matrix_f32(&values, dim, Metric::L2), matrix_f64(&values, dim, Metric::L2)] {
            same(device, &rows, None, KMeansParams::try_new(k, Metric::L2)?)
                .map_err(|e| format!("dim {dim}, k {k}: {e:?}"))?;
        }
    }
    Ok(())
}

/// Rows, dimension, clusters: every strategy for comparing rows with candidates, and the limits
/// between strategies.
const SHAPES: [(usize, usize, u64); 8] = [
    (30_001, 3, 300),
    (20_000, 10, 100),
    (8_000, 16, 140),
    (5_000, 17, 200),
    (3_000, 40, 150),
    (2_500, 60, 800),
    (1_025, 130, 130),
    (500, 700, 60),
];

/// Compares the chosen rows with the CPU's, without and with weights, some of which are 0.
fn same_rows(
    device: &AnyDevice,
    kind: usize,
    rows_of: impl Fn(usize, usize, usize) -> Vec<Vec<f64>>,
) -> Result<(), Failed> {
    for (shape, (count, dim, k)) in SHAPES.into_iter().enumerate() {
        // The CPU is compared with itself in one shape only.
        if device.info().name == "cpu" && shape != kind % SHAPES.len() {
            continue;
        }
        let values = rows_of(shape, count, dim);
        let weights: Vec<f64> = (0..count).map(|row| [1.0, 0.25, 0.0, 7.5][row % 4]).collect();
        let weights = (kind + shape).is_multiple_of(2).then_some(weights.as_slice());
        for metric in [Metric::L2, Metric::Cosine] {
            for rows in [matrix_f32(&values, dim, metric), matrix_f64(&values, dim, metric)] {
                same(device, &rows, weights, KMeansParams::try_new(k, metric)?)
                    .map_err(|e| format!("{metric}, dim {dim}, k {k}: {e:?}"))?;
            }
        }
    }
    Ok(())
}

/// Rows whose sampling weights decrease by many powers of two.
fn of_all_sizes(shape: usize, count: usize, dim: usize) -> Vec<Vec<f64>> {
    let mut values = Kind::Normal.rows(shape as u64, count, dim);
    for (i, row) in values.iter_mut().enumerate() {
        row.iter_mut().for_each(|x| *x = f64::from((*x * 2f64.powi(-(i as i32 % 90))) as f32));
    }
    values
}

/// One outlier: quantisation steps that fit it would be useless for all other rows.
fn one_far_away(shape: usize, count: usize, dim: usize) -> Vec<Vec<f64>> {
    let mut values = Kind::Normal.rows(shape as u64, count, dim);
    values[count / 2].iter_mut().for_each(|x| *x = f64::from((*x * 1e12) as f32));
    values
}

/// Few rows, for tools that slow down every memory access; at the end, all rows have cost 0.
fn few_rows(device: &AnyDevice) -> Result<(), Failed> {
    for dim in [16, 65] {
        let count = (1 << 24) / dim / 40 + 1;
        let mut rng = Rng(dim as u64);
        let values: Vec<Vec<f64>> = (0..count)
            .map(|row| {
                let cluster = (row % 30) as f64 + f64::from(row < 10) * 0.25;
                (0..dim).map(|j| cluster + f64::from(j == 0) * rng.below(2) as f64).collect()
            })
            .collect();
        for rows in [matrix_f32(&values, dim, Metric::L2), matrix_f64(&values, dim, Metric::L2)] {
            same(device, &rows, None, KMeansParams::try_new(40, Metric::L2)?)?;
        }
    }
    Ok(())
}

/// More rows than one pass of a block of threads takes.
fn many_rows(device: &AnyDevice) -> Result<(), Failed> {
    for (count, dim, k) in [(700_000, 2, 13), (300_000, 20, 5)] {
        let mut rng = Rng(count as u64);
        let values: Vec<Vec<f64>> = (0..count)
            .map(|_| {
                let cluster = [0.0, 1000.0, 500.0][rng.below(3) as usize];
                (0..dim).map(|_| f64::from((cluster + rng.normal()) as f32)).collect()
            })
            .collect();
        for (rows, metric) in [
            (matrix_f32(&values, dim, Metric::L2), Metric::L2),
            (matrix_f64(&values, dim, Metric::L2), Metric::L2),
            (matrix_f32(&values, dim, Metric::Cosine), Metric::Cosine),
        ] {
            same(device, &rows, None, KMeansParams::try_new(k, metric)?)
                .map_err(|e| format!("dim {dim}: {e:?}"))?;
        }
    }
    Ok(())
}

/// Checks that the clusters after one round equal the CPU's.
fn same(
    device: &AnyDevice,
    rows: &Rows,
    weights: Option<&[f64]>,
    mut params: KMeansParams,
) -> Result<(), Failed> {
    (params.max_iterations, params.seed) = (1, 11);
    let run = |device: &AnyDevice| kmeans(device, rows, weights, None, &params, &Job::default());
    let clustering = match run(device) {
        Err(Error::Unsatisfiable(_)) => return Ok(()),
        other => other?,
    };
    let cpu = run(&AnyDevice::cpu())?;
    let bits = |x: &Clustering| (x.labels.clone(), x.distances.clone(), x.inertias.clone());
    if bits(&clustering) != bits(&cpu) || clustering.centroids != cpu.centroids {
        return Err("not what the CPU finds".into());
    }
    Ok(())
}
