//! Times `knn_exact` on the named workloads, on any device, and checks the answers.
//!
//! ```text
//! python3 -m benches.data.workloads sift128 target/workloads
//! cargo bench --profile dev --bench knn -- --dir target/workloads --only sift128
//! ```
//!
//! `seconds` is a whole search with the base on the device: queries sent, neighbours returned.
//! `kernel` is the part of it spent computing. The results of sampled queries are compared with the
//! definition, computed one pair at a time; a wrong row or distance ends the run.
//! A final table in Markdown compares the times with peers' (`--peers`), with the device's peak
//! performance (`--flops`, `--bandwidth`; not for bits, which are not multiplied) and with whole
//! statements (`--program`).
//! With `--hashed`, `knn_lsh` builds its tables and searches them, on `friedman10` only; the time
//! excludes sending the rows.

#[path = "common/beside.rs"]
mod beside;
mod common;
#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use beside::{Beside, Measured, reading};
use clap::Parser;
use common::{Common, Phases, load};
use datafusion_neighbors::Metric;
use datafusion_neighbors::internals::algo::knn::{KnnParams, LshParams, Method, open_base};
use datafusion_neighbors::internals::device::{AnyDevice, Distances, Neighbors, QueryRows};
use datafusion_neighbors::internals::job::{Job, Phase, Watch as _};
use datafusion_neighbors::internals::rows::Rows;

/// Workload, k, metric, and whether it is a self-join.
type Task = (&'static str, usize, Metric, bool);

const TASKS: &[Task] = &[
    ("friedman10", 5, Metric::L2, true),
    ("higgs28", 5, Metric::L2, true),
    ("sift128", 2, Metric::L2, false),
    ("sift128", 10, Metric::L2, false),
    ("sift128", 100, Metric::L2, false),
    ("sift128", 1024, Metric::L2, false),
    ("embed384", 10, Metric::Cosine, false),
    ("gist960", 10, Metric::L2, false),
    ("deep96", 10, Metric::L2, false),
    ("bits512", 10, Metric::Hamming, false),
];

/// Time knn_exact on named workloads.
#[derive(Parser)]
struct Options {
    #[command(flatten)]
    common: Common,
    /// Maximum number of queries
    #[arg(long, default_value_t = usize::MAX)]
    queries: usize,
    /// Approximate search by hashing (knn_lsh)
    #[arg(long)]
    hashed: bool,
    /// Vectors as float64
    #[arg(long)]
    doubles: bool,
    #[command(flatten)]
    beside: Beside,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let device = options.common.open()?;
    println!(
        "{:11} {:>5} {:>9} {:>9} {:>10} {:>10} {:>9} {:>8} {:>10} {:>9} {:>6}",
        "workload",
        "k",
        "queries",
        "base",
        "seconds",
        "kernel",
        "Gpairs/s",
        "GFLOP/s",
        "rechecked",
        "redone",
        "errors"
    );
    let mut measured = Vec::new();
    let mut loaded: Option<(&str, Rows, Rows)> = None;
    for task in TASKS {
        let (name, _, metric, itself) = *task;
        let Some(base) = options.common.base(name) else { continue };
        if loaded.as_ref().is_none_or(|(last, _, _)| *last != name) {
            drop(loaded.take());
            let base = load(&base, options.common.rows, metric, options.doubles)?;
            let queries = match itself {
                true => base.clone(),
                false => load(
                    &options.common.dir.join(format!("{name}-query.parquet")),
                    options.queries,
                    metric,
                    options.doubles,
                )?,
            };
            loaded = Some((name, base, queries));
        }
        if let (Some((_, base, _)), true) = (&loaded, options.hashed) {
            if name == "friedman10" {
                measure_hashed(&device, base, &options)?;
            }
            continue;
        }
        if let Some((_, base, queries)) = &loaded {
            let queries = queries.slice(0..queries.len().min(options.queries));
            measured.push(measure(&device, task, base, &queries, &options)?);
        }
    }
    options.beside.print(&options.common.device.to_string(), &measured)
}

fn measure(
    device: &AnyDevice,
    &(name, k, metric, itself): &Task,
    base: &Rows,
    queries: &Rows,
    options: &Options,
) -> Result<Measured, Box<dyn std::error::Error>> {
    let params = KnnParams::try_new(k as u64, metric)?;
    let search = open_base(device, base.clone(), params, Method::Exact, &Job::default())?;
    let of_base = QueryRows::OfBase { first: 0 };
    let query_rows = if itself { of_base } else { QueryRows::Separate };
    let run = || {
        let start = Instant::now();
        let neighbors = search.search(queries, query_rows, &Job::default())?.neighbors;
        Ok::<_, datafusion_neighbors::Error>((start.elapsed().as_secs_f64(), neighbors))
    };
    let runs = options.common.timed(run)?;
    let (seconds, neighbors) = &runs[runs.len() / 2];
    let (seconds, kernel) = (*seconds, neighbors.work.kernel.as_secs_f64());
    let on_cpu = device.info().memory.is_none();
    let pairs = queries.len() as f64 * base.len() as f64;
    let flops = 2.0 * base.matrix().dim() as f64 * pairs;
    let errors = errors(neighbors, queries, base, metric, k, itself, options.common.checked);
    println!(
        "{name:11} {k:>5} {:>9} {:>9} {seconds:>10.4} {kernel:>10.4} {:>9.2} {:>8.0} {:>10} {:>9} {errors:>6}",
        queries.len(),
        base.len(),
        pairs / seconds / 1e9,
        flops / seconds / 1e9,
        neighbors.work.rechecked,
        neighbors.work.redone,
    );
    if errors > 0 {
        return Err(format!("{name}, k = {k}: {errors} wrong lists").into());
    }
    let row_bytes = base.matrix().kind().bytes() * base.matrix().kind().width(base.matrix().dim());
    let read = (queries.len() + base.len()) * row_bytes + queries.len() * neighbors.per_query * 8;
    let file = options.common.dir.join(format!("{name}-base.parquet"));
    Ok(Measured {
        workload: name,
        k,
        seconds,
        kernels: if on_cpu { seconds } else { kernel },
        floor: if metric.is_binary() { (0.0, 0.0) } else { (flops, read as f64) },
        statement: statement((name, k, metric, itself), &file),
        reading: reading(&file, metric.is_binary()),
    })
}

/// The SQL statement that does the same from Parquet.
fn statement((name, k, metric, itself): Task, base: &Path) -> String {
    let of = |file: &Path| format!("(SELECT id, v FROM '{}')", file.display());
    let queries = base.with_file_name(format!("{name}-query.parquet"));
    let queries = if itself { String::new() } else { format!("queries => {}, ", of(&queries)) };
    format!(
        "SELECT count(*), min(distance), max(distance) FROM knn_exact({queries}base => {}, k => {k}, metric => '{}')",
        of(base),
        metric.name(),
    )
}

/// Measures a self-join with `knn_lsh`, from rows on the device to neighbours on the host.
fn measure_hashed(
    device: &AnyDevice,
    base: &Rows,
    options: &Options,
) -> Result<(), Box<dyn std::error::Error>> {
    const K: usize = 5;
    let of_base = QueryRows::OfBase { first: 0 };
    let mut lsh = LshParams::try_new(Metric::L2, None)?;
    (lsh.tables, lsh.hashes, lsh.width) = (Some(40), Some(11), Some(1.05));
    lsh.check(None)?;
    let run = || {
        let phases = Arc::new(Phases::default());
        let job = Job::default().with_watch(phases.clone());
        let start = Instant::now();
        let params = KnnParams::try_new(K as u64, Metric::L2)?;
        let (queries, query_rows) = (base.slice(0..0), of_base);
        let method = Method::Lsh { params: &lsh, queries, query_rows, training: None };
        let search = open_base(device, base.clone(), params, method, &job)?;
        let result = search.search(base, of_base, &job)?;
        let all = start.elapsed().as_secs_f64();
        phases.enter(Phase::Emit);
        let of = |phase| phases.seconds(phase);
        let shown = (of(Phase::Hash), of(Phase::Build), of(Phase::Compare));
        Ok::<_, datafusion_neighbors::Error>((all - of(Phase::Upload), (shown, result)))
    };
    let runs = options.common.timed(run)?;
    let (seconds, ((hash, build, compare), result)) = &runs[runs.len() / 2];
    let step = base.len().div_ceil(options.common.checked.max(1)).max(1);
    let (mut near, mut all) = (0, 0);
    for query in (0..base.len()).step_by(step) {
        let query_row = base.slice(query..query + 1);
        let (_, exact) = support::exact_oracle(&query_row, base, Metric::L2, K, Some(query));
        let list = match &result.starts {
            Some(starts) => starts[query]..starts[query + 1],
            None => query * K..(query + 1) * K,
        };
        let Distances::F64(distances) = &result.neighbors.distances else {
            return Err("distances are float64".into());
        };
        for (row, distance) in result.neighbors.rows[list.clone()].iter().zip(&distances[list]) {
            let of_pair = support::exact_of_pair(base, base, Metric::L2, query, *row as usize);
            if *distance != of_pair || *row as usize == query {
                return Err(format!("rows {query} and {row}: {distance} is not {of_pair}").into());
            }
            near += usize::from(*distance <= exact[K - 1]);
        }
        all += K;
    }
    println!(
        "friedman10 hashed: {seconds:.4} s (hash {hash:.4}, build {build:.4}, compare {compare:.4}), recall {:.3} of {all}",
        near as f64 / all as f64,
    );
    Ok(())
}

/// The number of sampled queries whose result differs from the definition.
fn errors(
    neighbors: &Neighbors,
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    k: usize,
    itself: bool,
    checked: usize,
) -> usize {
    let step = queries.len().div_ceil(checked.max(1)).max(1);
    let wrong = (0..queries.len()).step_by(step).filter(|q| {
        let query = queries.slice(*q..q + 1);
        let (rows, distances) =
            support::exact_oracle(&query, base, metric, k, itself.then_some(*q));
        let list = q * neighbors.per_query..(q + 1) * neighbors.per_query;
        let is_same = match &neighbors.distances {
            Distances::F64(shown) => shown[list.clone()] == distances[..],
            Distances::F32(_) => false,
        };
        !is_same || neighbors.rows[list] != rows[..]
    });
    wrong.count()
}
