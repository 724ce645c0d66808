//! The time of statements that repeat a base, from Rust: one query at a time, by one caller and by
//! many, from a table in memory, from a Parquet file and with a [`KnnIndex`].
//!
//! ```text
//! cargo bench --profile dev --bench again -- --rows 200000 --dim 64 --callers 16
//! ```
//!
//! `first` reads the base, `again` is the median of the following statements, whose vector is in the
//! text (with `--queries`, several vectors in a table), and `prepared` of those with `$1`; `planned` is
//! the part of `prepared` before execution. `callers` is the number of prepared statements a second
//! that all callers get together. Every answer is compared with that of the index.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use arrow::array::{ArrayRef, AsArray, FixedSizeListArray, Float32Array, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Float32Type, Float64Type, Int64Type, UInt32Type};
use clap::Parser;
use datafusion::common::ScalarValue;
use datafusion::datasource::MemTable;
use datafusion::logical_expr::LogicalPlan;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_neighbors::internals::random::Random;
use datafusion_neighbors::{AnyDevice, DeviceChoice, KnnExact, KnnIndex, register_all};
use parquet::arrow::ArrowWriter;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Time repeated statements.
#[derive(Parser, Clone)]
struct Options {
    /// cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
    /// Rows of the base
    #[arg(long, default_value_t = 200_000)]
    rows: usize,
    /// Dimension
    #[arg(long, default_value_t = 64)]
    dim: usize,
    /// Neighbours of a query
    #[arg(long, default_value_t = 10)]
    k: usize,
    /// Queries of a statement
    #[arg(long, default_value_t = 1)]
    queries: usize,
    /// Statements of a caller
    #[arg(long, default_value_t = 40)]
    runs: usize,
    /// Callers at a time
    #[arg(long, default_value_t = 16)]
    callers: usize,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// Rows of a batch of the base.
const BATCH: usize = 8192;

fn main() -> Outcome<()> {
    let options = Options::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(run(options))
}

async fn run(options: Options) -> Outcome<()> {
    let Options { rows, dim, k, .. } = options;
    let device = AnyDevice::choose(options.device, 0, 0.0)?;
    println!("{}: {}", device.info().name, device.info().description);
    let all = batch(0..rows, dim, 1)?;
    let base: Vec<_> =
        (0..rows).step_by(BATCH).map(|at| all.slice(at, BATCH.min(rows - at))).collect();
    let index = KnnIndex::build(&device, &base, &KnnExact::k(k as u64).vector("v"))?;
    let queries: Vec<_> = (0..options.runs)
        .map(|run| Ok(batch(0..options.queries, dim, 2 + run as u64)?.column(1).clone()))
        .collect::<Outcome<_>>()?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("base.parquet");
    let mut writer = ArrowWriter::try_new(File::create(&path)?, all.schema(), None)?;
    base.iter().try_for_each(|batch| writer.write(batch))?;
    writer.close()?;
    // A younger file could change without a trace, and would be read every time.
    let minute_ago = SystemTime::now() - Duration::from_secs(60);
    File::options().write(true).open(&path)?.set_modified(minute_ago)?;

    let of_index = |run: usize| {
        let start = Instant::now();
        let found = index.search(&queries[run])?;
        Ok::<_, datafusion_neighbors::Error>((start.elapsed(), found))
    };
    of_index(0)?;
    let (times, expected): (Vec<_>, Vec<_>) = (0..options.runs)
        .map(of_index)
        .collect::<Result<Vec<_>, _>>()?
        .into_iter()
        .map(|(time, found)| (time, answer(&found, "base", "distance")))
        .unzip();
    println!(
        "{:9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "base", "first", "again", "prepared", "planned", "callers"
    );
    let again = milliseconds(times);
    println!("{:9} {:>9} {again:>9.3} {:>9} {:>9} {:>9}", "index", "", "", "", "");

    for name in ["memory", "parquet"] {
        let ctx = SessionContext::new_with_config(SessionConfig::new()).enable_url_table();
        register_all(&ctx)?;
        ctx.sql(&format!("SET neighbors.device = '{}'", options.device)).await?.collect().await?;
        let relation = match name {
            "memory" => {
                let table = MemTable::try_new(all.schema(), vec![base.clone()])?;
                ctx.register_table("base", Arc::new(table))?;
                "base".to_string()
            }
            _ => format!("(SELECT * FROM '{}')", path.display()),
        };
        let sql = |queries: &str| {
            format!(
                "SELECT base_id, distance FROM knn_exact(queries => {queries}, base => {relation}, k => {k})"
            )
        };
        // One vector is written into the statement; several are in a table.
        let text = |run: usize| {
            if options.queries > 1 {
                return format!("queries{run}");
            }
            let vector = queries[run].as_fixed_size_list().value(0);
            let numbers = vector.as_primitive::<Float32Type>().values().iter();
            let shown: Vec<_> = numbers.map(f32::to_string).collect();
            let (shown, vector_type) =
                (shown.join(", "), format!("FixedSizeList({dim} x Float32)"));
            format!("(SELECT arrow_cast([{shown}], '{vector_type}') AS v)")
        };
        for (run, vectors) in queries.iter().enumerate() {
            let vectors = RecordBatch::try_from_iter([("v", vectors.clone())])?;
            ctx.register_batch(format!("queries{run}"), vectors)?;
        }
        let statement = |run: usize| {
            let (ctx, sql, expected) = (ctx.clone(), sql(&text(run)), expected[run].clone());
            async move {
                let start = Instant::now();
                let found = ctx.sql(&sql).await?.collect().await?;
                let time = start.elapsed();
                check(&found, &expected)?;
                Outcome::Ok(time)
            }
        };
        let first = statement(0).await?;
        let mut times = Vec::new();
        for run in 0..options.runs {
            times.push(statement(run).await?);
        }
        let again = milliseconds(times);
        print!("{name:9} {:>9.1} {again:>9.3}", first.as_secs_f64() * 1e3);
        if options.queries > 1 {
            println!();
            continue;
        }
        let plan = ctx.state().create_logical_plan(&sql("$1")).await?;
        let plan = Arc::new(ctx.state().optimize(&plan)?);
        let mut times = (Vec::new(), Vec::new());
        for run in 0..options.runs {
            let (planned, whole) = prepared(&ctx, &plan, &queries[run], &expected[run]).await?;
            times.0.push(whole);
            times.1.push(planned);
        }
        let (whole, planned) = (milliseconds(times.0), milliseconds(times.1));
        let start = Instant::now();
        let callers = (0..options.callers).map(|caller| {
            let (ctx, plan) = (ctx.clone(), plan.clone());
            let (queries, expected) = (queries.clone(), expected.clone());
            tokio::spawn(async move {
                for run in 0..queries.len() {
                    let run = (run + caller) % queries.len();
                    prepared(&ctx, &plan, &queries[run], &expected[run]).await?;
                }
                Outcome::Ok(())
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            caller.await??;
        }
        let statements = (options.callers * options.runs) as f64 / start.elapsed().as_secs_f64();
        println!(" {whole:>9.3} {planned:>9.3} {statements:>9.0}");
    }
    Ok(())
}

/// Runs a prepared statement for one vector; returns the time of planning, and of all.
async fn prepared(
    ctx: &SessionContext,
    plan: &Arc<LogicalPlan>,
    query: &ArrayRef,
    expected: &[(u32, f64)],
) -> Outcome<(Duration, Duration)> {
    let start = Instant::now();
    let vector = ScalarValue::FixedSizeList(Arc::new(query.as_fixed_size_list().clone()));
    let plan = LogicalPlan::clone(plan).with_param_values(vec![vector])?;
    let frame = ctx.execute_logical_plan(plan).await?;
    let task = Arc::new(frame.task_ctx());
    let plan = frame.create_physical_plan().await?;
    let planned = start.elapsed();
    let found = datafusion::physical_plan::collect(plan, task).await?;
    let whole = start.elapsed();
    check(&found, expected)?;
    Ok((planned, whole))
}

/// Rows `id`, `v` of uniform numbers.
fn batch(ids: std::ops::Range<usize>, dim: usize, seed: u64) -> Outcome<RecordBatch> {
    let mut random = Random::new(seed);
    let values: Float32Array = (0..ids.len() * dim).map(|_| Some(random.unit() as f32)).collect();
    let item = Arc::new(Field::new("item", DataType::Float32, true));
    let vectors = FixedSizeListArray::try_new(item, dim as i32, Arc::new(values), None)?;
    let ids = Int64Array::from_iter_values(ids.map(|id| id as i64));
    let columns: [(&str, ArrayRef); 2] = [("id", Arc::new(ids)), ("v", Arc::new(vectors))];
    Ok(RecordBatch::try_from_iter(columns)?)
}

/// The rows and distances of an answer of the index.
fn answer(found: &RecordBatch, row: &str, distance: &str) -> Vec<(u32, f64)> {
    let rows = found[row].as_primitive::<UInt32Type>().values();
    let distances = found[distance].as_primitive::<Float64Type>().values();
    rows.iter().copied().zip(distances.iter().copied()).collect()
}

fn check(found: &[RecordBatch], expected: &[(u32, f64)]) -> Outcome<()> {
    let of_batch = |batch: &RecordBatch| {
        let rows = batch.column(0).as_primitive::<Int64Type>().values().to_vec();
        let distances = batch.column(1).as_primitive::<Float64Type>().values().to_vec();
        rows.into_iter().map(|row| row as u32).zip(distances)
    };
    let found: Vec<_> = found.iter().flat_map(of_batch).collect();
    if found == expected { Ok(()) } else { Err(format!("{found:?} is not {expected:?}").into()) }
}

/// The median in milliseconds.
fn milliseconds(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}
