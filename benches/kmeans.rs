//! Times `kmeans` on the named workloads, on any device: a fixed number of rounds from fixed first
//! centroids.
//!
//! ```text
//! python3 -m benches.data.workloads balls8 target/workloads
//! cargo bench --profile dev --bench kmeans -- --dir target/workloads --only balls8
//! ```
//!
//! A final table in Markdown compares the times with peers' (`--peers`), with the device's peak
//! performance (`--flops`, `--bandwidth`) and with whole statements, which choose their first
//! centroids (`--program`).
//!
//! The first centroids are every (n / K)-th row. `assign` and `update` are the time of all rounds;
//! rows are assigned once more than centroids are updated, since the labels belong to the returned
//! centroids. `uncertain` is the share of rows whose nearest centroid a GPU's rounded products left
//! open. The inertia is computed again in float64 from the labels and the centroids, and every
//! sampled row must be in the cluster of its nearest centroid; otherwise the run ends.

#[path = "common/beside.rs"]
mod beside;
mod common;

use std::sync::Arc;
use std::time::Instant;

use beside::{Beside, Measured, reading};
use clap::Parser;
use common::{Common, Phases, load};
use datafusion_neighbors::AnyDevice;
use datafusion_neighbors::Metric;
use datafusion_neighbors::internals::algo::kmeans::{Clustering, Init, KMeansParams, kmeans};
use datafusion_neighbors::internals::job::{Job, Phase, Watch as _};
use datafusion_neighbors::internals::matrix::{Elements, Matrix};
use datafusion_neighbors::internals::rows::Rows;

struct Task {
    workload: &'static str,
    clusters: usize,
    rounds: usize,
}

const TASKS: [Task; 4] = [
    Task { workload: "balls8", clusters: 256, rounds: 50 },
    Task { workload: "sift128", clusters: 1024, rounds: 20 },
    Task { workload: "embed384", clusters: 1024, rounds: 20 },
    Task { workload: "deep96", clusters: 4096, rounds: 20 },
];

/// Time kmeans on named workloads.
#[derive(Parser)]
struct Options {
    #[command(flatten)]
    common: Common,
    /// Factor by which one of the rows is farther from 0 than in the file
    #[arg(long, default_value_t = 1.0)]
    outlier: f32,
    #[command(flatten)]
    beside: Beside,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let device = options.common.open()?;
    println!(
        "{:8} {:>9} {:>5} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>14}",
        "workload",
        "rows",
        "K",
        "rounds",
        "seconds",
        "assign",
        "update",
        "kernels",
        "ms/round",
        "uncertain",
        "inertia"
    );
    let mut measured = Vec::new();
    for task in TASKS {
        if let Some(path) = options.common.base(task.workload) {
            let mut rows = load(&path, options.common.rows, Metric::L2, false)?;
            if options.outlier != 1.0 {
                rows = with_outlier(&rows, options.outlier)?;
            }
            measured.push(measure(&task, &device, &rows, &options)?);
        }
    }
    options.beside.print(&options.common.device.to_string(), &measured)
}

/// The rows, one of them multiplied by `times`.
fn with_outlier(rows: &Rows, times: f32) -> Result<Rows, Box<dyn std::error::Error>> {
    let (count, dim) = (rows.len(), rows.matrix().dim());
    let mut values = rows.reals::<f32>().ok_or("vectors of f32")?.to_vec();
    values[count / 3 * dim..][..dim].iter_mut().for_each(|x| *x *= times);
    Ok(Rows::all(Arc::new(Matrix::new(Elements::F32(values), count, dim))))
}

fn measure(
    task: &Task,
    device: &AnyDevice,
    rows: &Rows,
    options: &Options,
) -> Result<Measured, Box<dyn std::error::Error>> {
    let &Task { workload: name, clusters: k, rounds } = task;
    let (dim, step) = (rows.matrix().dim(), rows.len() / k);
    let values = rows.reals::<f32>().ok_or("vectors of f32")?;
    let start: Vec<f32> = (0..k).flat_map(|i| &values[i * step * dim..][..dim]).copied().collect();
    let start = Rows::all(Arc::new(Matrix::new(Elements::F32(start), k, dim)));
    let mut params = KMeansParams::try_new(k as u64, Metric::L2)?;
    (params.init, params.max_iterations, params.tolerance) = (Init::Given, rounds, 0.0);
    let run = || {
        let phases = Arc::new(Phases::default());
        let job = Job::default().with_watch(phases.clone());
        let clock = Instant::now();
        let clustering = kmeans(device, rows, None, Some(&start), &params, &job)?;
        let seconds = clock.elapsed().as_secs_f64();
        phases.enter(Phase::Emit);
        Ok::<_, datafusion_neighbors::Error>((seconds, (clustering, phases)))
    };
    let runs = options.common.timed(run)?;
    let (seconds, (clustering, phases)) = &runs[runs.len() / 2];
    let inertia = check(values, dim, clustering)?;
    println!(
        "{name:8} {:>9} {k:>5} {:>6} {seconds:>9.4} {:>9.4} {:>9.4} {:>9.5} {:>9.3} {:>8.2}% {inertia:>14.6e}",
        rows.len(),
        clustering.rounds.iterations,
        phases.seconds(Phase::Assign),
        phases.seconds(Phase::Update),
        clustering.rounds.work.kernel.as_secs_f64(),
        1000.0 * seconds / clustering.rounds.iterations as f64,
        100.0 * clustering.rounds.work.redone as f64
            / (rows.len() * clustering.rounds.iterations) as f64,
    );
    let elements = (clustering.rounds.iterations * rows.len() * dim) as f64;
    // Peers' times exclude transfers.
    let on_cpu = device.info().memory.is_none();
    let rounds_alone = if on_cpu { *seconds } else { clustering.rounds.work.kernel.as_secs_f64() };
    let file = options.common.dir.join(format!("{name}-base.parquet"));
    let statement = format!(
        "SELECT count(*), count(DISTINCT cluster_id) FROM kmeans((SELECT v FROM '{}'), k => {k}, max_iterations => {rounds})",
        file.display(),
    );
    Ok(Measured {
        workload: name,
        k,
        seconds: rounds_alone,
        kernels: rounds_alone,
        // The product of each row and centroid, and each row read in half precision.
        floor: (2.0 * elements * k as f64, 2.0 * elements),
        statement,
        reading: reading(&file, false),
    })
}

/// Computes the inertia again, and checks it and the labels.
fn check(
    values: &[f32],
    dim: usize,
    clustering: &Clustering,
) -> Result<f64, Box<dyn std::error::Error>> {
    let Elements::F32(centroids) = clustering.centroids.elements() else {
        return Err("centroids of f32".into());
    };
    let square = |row: &[f32], label: u32| -> f64 {
        let centroid = &centroids[label as usize * dim..][..dim];
        row.iter().zip(centroid).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
    };
    let rows = values.chunks_exact(dim);
    let inertia: f64 = rows.clone().zip(&clustering.labels).map(|(row, l)| square(row, *l)).sum();
    if (inertia - clustering.inertia()).abs() > 1e-5 * inertia {
        return Err(format!("inertia {} is not {inertia}", clustering.inertia()).into());
    }
    let sample = rows.zip(&clustering.labels).step_by((clustering.labels.len() / 1000).max(1));
    for (row, label) in sample {
        let cost = square(row, *label);
        let nearer =
            (0..clustering.centroids.rows() as u32).find(|l| square(row, *l) < cost * 0.99999);
        if let Some(nearer) = nearer {
            return Err(format!("a row of cluster {label} is nearer to {nearer}").into());
        }
    }
    Ok(inertia)
}
