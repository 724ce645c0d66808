//! Times `dbscan` on files of vectors, on any device.
//!
//! ```text
//! python3 -m benches.data.workloads dense8 target/workloads
//! cargo bench --profile dev --bench dbscan -- --dir target/workloads --task dense8:0.05:4
//! ```
//!
//! A task is `WORKLOAD:EPS:MIN_POINTS`, optionally followed by `:METRIC` and `:ROWS`. `kernels` is
//! the GPU's time from rows on the device to clusters on the device. Sampled rows are checked by
//! the definition: a row is core if enough rows are within eps, and is in the cluster of each core
//! row near it, or of the first such row if it is not core itself; otherwise the run ends.

mod common;

use std::time::Instant;

use clap::Parser;
use common::{Common, load};
use datafusion_neighbors::Metric;
use datafusion_neighbors::internals::algo::dbscan::{DbscanParams, Density, dbscan};
use datafusion_neighbors::internals::device::{AnyDevice, Within};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::internals::rows::Rows;
use rayon::prelude::*;

/// Time dbscan on named workloads.
#[derive(Parser)]
struct Options {
    #[command(flatten)]
    common: Common,
    /// Tasks to run: WORKLOAD:EPS:MIN_POINTS[:METRIC[:ROWS]]
    #[arg(long, value_delimiter = ',', default_value = "dense8:0.05:4")]
    task: Vec<String>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let device = options.common.open()?;
    println!(
        "{:36} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>10} {:>10}",
        "task",
        "rows",
        "clusters",
        "core",
        "border",
        "noise",
        "seconds",
        "kernels",
        "Mpairs",
        "again"
    );
    for task in &options.task {
        let parts: Vec<&str> = task.split(':').collect();
        let [name, eps, min_points, more @ ..] = &parts[..] else {
            return Err(format!("{task}: WORKLOAD:EPS:MIN_POINTS[:METRIC[:ROWS]]").into());
        };
        let metric: Metric = more.first().unwrap_or(&"l2").parse()?;
        let most = more.get(1).map_or(Ok(options.common.rows), |rows| rows.parse())?;
        let Some(path) = options.common.base(name) else { continue };
        // Rows as given: the device computes directions itself.
        let read_as = if metric.is_binary() { metric } else { Metric::L2 };
        let rows = load(&path, most, read_as, false)?;
        let params = DbscanParams::try_new(eps.parse()?, min_points.parse()?, metric)?;
        measure(task, &device, &rows, &params, &options)?;
    }
    Ok(())
}

fn measure(
    task: &str,
    device: &AnyDevice,
    rows: &Rows,
    params: &DbscanParams,
    options: &Options,
) -> Result<(), Box<dyn std::error::Error>> {
    let run = || {
        let clock = Instant::now();
        let density = dbscan(device, rows, None, &[rows.len()], params, &Job::default())?;
        Ok::<_, datafusion_neighbors::Error>((clock.elapsed().as_secs_f64(), density))
    };
    let runs = options.common.timed(run)?;
    let kernel = |density: &Density| density.work.work.kernel.as_secs_f64();
    let mut kernels: Vec<f64> = runs.iter().map(|(_, density)| kernel(density)).collect();
    kernels.sort_by(f64::total_cmp);
    let (seconds, density) = &runs[runs.len() / 2];
    check(rows, params, density, options.common.checked)?;
    println!(
        "{task:36} {:>8} {:>8} {:>8} {:>8} {:>8} {seconds:>8.4} {:>9.5} {:>10.1} {:>10}",
        rows.len(),
        density.count,
        density.core.iter().filter(|core| **core).count(),
        density.border_rows(),
        density.noise(),
        kernels[kernels.len() / 2],
        density.work.work.pairs as f64 / 1e6,
        density.work.work.rechecked,
    );
    Ok(())
}

/// Checks sampled rows against all other rows, by the definition.
fn check(
    rows: &Rows,
    params: &DbscanParams,
    density: &Density,
    checked: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let within = Within::new(params.metric(), params.eps());
    let holds = |i: usize, j: usize| {
        if let Some(words) = rows.words() {
            let row =
                |i: usize| words.chunks_exact(rows.matrix().width()).nth(i).unwrap_or_default();
            return within.holds_for_bits(row(i), row(j));
        }
        let dim = rows.matrix().dim();
        let row = |i: usize| &rows.reals::<f32>().unwrap_or_default()[i * dim..][..dim];
        within.holds(row(i), row(j))
    };
    let sample: Vec<usize> = (0..rows.len()).step_by(rows.len().div_ceil(checked.max(1))).collect();
    let wrong = sample.into_par_iter().find_map_any(|i| {
        let near: Vec<usize> = (0..rows.len()).filter(|j| *j == i || holds(i, *j)).collect();
        let is_core = near.len() as u64 >= params.min_points();
        let mut clusters = near.iter().filter(|j| density.core[**j]).map(|j| density.clusters[*j]);
        let is_right = density.core[i] == is_core
            && if is_core {
                clusters.all(|cluster| cluster.is_some() && cluster == density.clusters[i])
            } else {
                clusters.min().flatten() == density.clusters[i]
            };
        (!is_right).then(|| format!("row {i}: {:?}, {}", density.clusters[i], density.core[i]))
    });
    wrong.map_or(Ok(()), |wrong| Err(wrong.into()))
}
