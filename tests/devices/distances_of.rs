//! Distances of given candidate pairs.

use std::sync::Arc;

use datafusion_neighbors::internals::device::{AnyDevice, Candidates, Device, Distances, OnDevice};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{Error, Metric};
use libtest_mimic::Failed;

use crate::Test;
use crate::support::{Kind, Rng, matrix_bits, matrix_f32, matrix_f64, oracle_of_pair};

/// Numbers of queries and base rows, dim.
const SHAPES: &[(usize, usize, usize)] = &[
    (1, 1, 1),
    (3, 5, 2),
    (40, 300, 7),
    (33, 129, 16),
    (20, 70, 31),
    (20, 70, 32),
    (20, 70, 33),
    (300, 1000, 65),
    (5, 50, 960),
];

/// The trials of this module.
pub fn trials() -> Vec<(String, Test)> {
    let mut all: Vec<(String, Test)> = Vec::new();
    for metric in Metric::ALL.into_iter().filter(|metric| !metric.is_binary()) {
        for kind in Kind::ALL {
            let run = move |device: &AnyDevice| numbers(device, metric, kind);
            all.push((format!("distances_of::{metric}::{kind:?}"), Box::new(run)));
        }
    }
    for metric in [Metric::Hamming, Metric::Jaccard] {
        all.push((format!("distances_of::{metric}"), Box::new(move |device| bits(device, metric))));
    }
    all.push(("distances_of::many_pairs".to_string(), Box::new(many)));
    all.push(("distances_of::refused".to_string(), Box::new(refused)));
    all
}

fn numbers(device: &AnyDevice, metric: Metric, kind: Kind) -> Result<(), Failed> {
    for (i, &(queries, base, dim)) in SHAPES.iter().enumerate() {
        // Rows of a single element have no correlation.
        if dim == 1 && metric == Metric::Pearson {
            continue;
        }
        let (x, y) = (kind.rows(i as u64, queries, dim), kind.rows(500 + i as u64, base, dim));
        check(device, &matrix_f32(&x, dim, metric), &matrix_f32(&y, dim, metric), metric)?;
        check(device, &matrix_f64(&x, dim, metric), &matrix_f64(&y, dim, metric), metric)?;
    }
    Ok(())
}

fn bits(device: &AnyDevice, metric: Metric) -> Result<(), Failed> {
    for (i, &(queries, base, dim)) in SHAPES.iter().enumerate() {
        let (x, y) = (matrix_bits(i as u64, queries, dim), matrix_bits(99 + i as u64, base, dim));
        check(device, &x, &y, metric)?;
    }
    Ok(())
}

/// More pairs than a CPU task or a block of threads takes.
fn many(device: &AnyDevice) -> Result<(), Failed> {
    let base = matrix_f32(&Kind::Normal.rows(3, 3000, 9), 9, Metric::L2);
    let (starts, rows) = candidates(7, 2000, 3000, 300);
    compare(device, &base.slice(500..2500), &base, Metric::L2, &starts, &rows)
}

/// Invalid candidates are errors.
fn refused(device: &AnyDevice) -> Result<(), Failed> {
    let rows = matrix_f32(&Kind::Normal.rows(3, 10, 4), 4, Metric::L2);
    let job = Job::default();
    for (starts, candidates) in [(vec![0, 1], vec![10]), (vec![0, 0, 1], vec![1])] {
        let candidates = Candidates::new(&starts, &candidates);
        let one = rows.slice(0..1);
        let task =
            DistancesOf { queries: &one, base: &rows, metric: Metric::L2, candidates, job: &job };
        match device.run(task) {
            Err(Error::InvalidArgument(_)) => {}
            other => return Err(format!("{starts:?}: {other:?}").into()),
        }
    }
    job.cancel().cancel();
    let candidates = Candidates::new(&[0, 1], &[1]);
    let one = rows.slice(0..1);
    let task =
        DistancesOf { queries: &one, base: &rows, metric: Metric::L2, candidates, job: &job };
    match device.run(task) {
        Err(Error::Cancelled) => Ok(()),
        other => Err(format!("expected a cancellation, found {other:?}").into()),
    }
}

/// Up to `most` base rows per query, possibly repeated; some queries have none.
fn candidates(seed: u64, queries: usize, base: usize, most: u64) -> (Vec<usize>, Vec<u32>) {
    let mut rng = Rng(seed);
    let (mut starts, mut rows) = (vec![0], Vec::new());
    for _ in 0..queries {
        let count = if rng.below(3) == 0 { 0 } else { rng.below(most) };
        rows.extend((0..count).map(|_| rng.below(base as u64) as u32));
        starts.push(rows.len());
    }
    (starts, rows)
}

fn check(device: &AnyDevice, queries: &Rows, base: &Rows, metric: Metric) -> Result<(), Failed> {
    let (starts, rows) = candidates(base.len() as u64, queries.len(), base.len(), 70);
    compare(device, queries, base, metric, &starts, &rows)?;
    // The queries are a slice of the base.
    let slice = base.len() / 2..base.len();
    let (starts, rows) = candidates(5, slice.len(), base.len(), 20);
    compare(device, &base.slice(slice), base, metric, &starts, &rows)
}

fn compare(
    device: &AnyDevice,
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    starts: &[usize],
    rows: &[u32],
) -> Result<(), Failed> {
    let (candidates, job) = (Candidates::new(starts, rows), Job::default());
    let distances = device.run(DistancesOf { queries, base, metric, candidates, job: &job })?;
    let pairs = candidates.pairs_from(0);
    let expected: Vec<f64> =
        pairs.map(|(q, row)| oracle_of_pair(queries, base, metric, q, row as usize)).collect();
    let expected = match distances {
        Distances::F32(_) => Distances::F32(expected.into_iter().map(|x| x as f32).collect()),
        Distances::F64(_) => Distances::F64(expected),
    };
    if distances != expected {
        let (queries, base, dim) = (queries.len(), base.len(), base.matrix().dim());
        let case = format!("{metric}, {queries} queries × {base} base × dim {dim}");
        return Err(format!("{case}: distances differ").into());
    }
    Ok(())
}

struct DistancesOf<'a> {
    queries: &'a Rows,
    base: &'a Rows,
    metric: Metric,
    candidates: Candidates<'a>,
    job: &'a Job,
}

impl OnDevice for DistancesOf<'_> {
    type Output = datafusion_neighbors::Result<Distances>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        let Self { queries, base, metric, candidates, job } = self;
        let (queries, base) = (device.rows(queries, metric), device.rows(base, metric));
        device.distances_of(&queries, &base, &candidates, job)
    }
}
