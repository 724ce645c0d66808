//! Limits that operators keep: memory that a session's pool grants, and the time until cancelled work
//! ends.
//!
//! An allocator counts the bytes of this process, and a pool those that are reserved. Inputs are made
//! batch by batch while they are read, so that what is held is the operators'.

mod damage;
#[path = "support/mod.rs"]
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::SeqCst};

use datafusion::arrow::array::{
    ArrayRef, FixedSizeListArray, Float32Array, Int64Array, RecordBatch,
};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::catalog::streaming::StreamingTable;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::memory_pool::{
    GreedyMemoryPool, MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation,
};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_neighbors::algo::dbscan::{DbscanParams, dbscan};
use datafusion_neighbors::algo::kmeans::{Init, KMeansParams, kmeans, kmeans_groups};
use datafusion_neighbors::algo::knn::{KnnParams, LshParams, Method, open_base};
use datafusion_neighbors::device::{AnyDevice, QueryRows};
use datafusion_neighbors::job::Job;
use datafusion_neighbors::matrix::Rows;
use datafusion_neighbors::{Error, Metric};
use futures::StreamExt;
use support::{Kind, matrix_bits, matrix_f32, matrix_f64};

const MB: i64 = 1 << 20;

/// What may be held without being reserved: small things, a batch on its way, and a tenth.
const SLACK: i64 = 16 * MB;

static HELD: AtomicI64 = AtomicI64::new(0);
static RESERVED: AtomicI64 = AtomicI64::new(0);

/// While it is on, the extremes since it was switched on.
static WATCHING: AtomicBool = AtomicBool::new(false);
static BASELINE: AtomicI64 = AtomicI64::new(0);
static MOST_HELD: AtomicI64 = AtomicI64::new(0);
static MOST_RESERVED: AtomicI64 = AtomicI64::new(0);
static MOST_UNRESERVED: AtomicI64 = AtomicI64::new(0);

struct Counting;

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as i64, SeqCst);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may be there while one is copied to the other.
        count(size as i64);
        HELD.fetch_sub(layout.size() as i64, SeqCst);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(place, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: i64) {
    let held = HELD.fetch_add(bytes, SeqCst) + bytes;
    if bytes >= 4096 && WATCHING.load(SeqCst) {
        let held = held - BASELINE.load(SeqCst);
        MOST_HELD.fetch_max(held, SeqCst);
        MOST_UNRESERVED.fetch_max(held - held / 10 - RESERVED.load(SeqCst), SeqCst);
    }
}

/// A pool that tells the allocator what is reserved.
#[derive(Debug)]
struct Watched(GreedyMemoryPool);

impl fmt::Display for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "watched")
    }
}

impl Watched {
    fn note(&self) {
        let reserved = self.0.reserved() as i64;
        RESERVED.store(reserved, SeqCst);
        MOST_RESERVED.fetch_max(reserved, SeqCst);
    }
}

impl MemoryPool for Watched {
    fn name(&self) -> &str {
        "watched"
    }

    fn register(&self, consumer: &MemoryConsumer) {
        self.0.register(consumer);
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        self.0.unregister(consumer);
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        self.0.grow(reservation, additional);
        self.note();
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        self.0.shrink(reservation, shrink);
        self.note();
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        let grown = self.0.try_grow(reservation, additional);
        self.note();
        grown
    }

    fn reserved(&self) -> usize {
        self.0.reserved()
    }

    fn memory_limit(&self) -> MemoryLimit {
        self.0.memory_limit()
    }
}

/// Rows that are made when they are read.
#[derive(Debug)]
struct Made {
    schema: SchemaRef,
    rows: usize,
    dim: usize,
}

/// Rows of a batch.
const BATCH: usize = 8192;

impl Made {
    fn new(rows: usize, dim: usize) -> Self {
        let item = Arc::new(Field::new_list_field(DataType::Float32, false));
        let schema = Schema::new(vec![
            Field::new("id", DataType::Int64, false),
            Field::new("part", DataType::Int64, false),
            Field::new("v", DataType::FixedSizeList(item, dim as i32), false),
        ]);
        Self { schema: Arc::new(schema), rows, dim }
    }
}

/// Numbers that nobody mistakes for whole ones.
fn number(i: u64) -> f32 {
    let mixed = (i.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed ^ mixed >> 29) >> 40) as f32 / 1000.3
}

impl PartitionStream for Made {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let (schema, rows, dim) = (self.schema.clone(), self.rows, self.dim);
        let batches = (0..rows).step_by(BATCH).map(move |first| {
            let end = rows.min(first + BATCH);
            let values = (first * dim..end * dim).map(|i| number(i as u64));
            let values: ArrayRef = Arc::new(Float32Array::from_iter_values(values));
            let DataType::FixedSizeList(item, _) = schema.field(2).data_type() else {
                return Err(DataFusionError::Internal("vectors".to_string()));
            };
            let v = FixedSizeListArray::try_new(item.clone(), dim as i32, values, None)?;
            let id = Int64Array::from_iter_values(first as i64..end as i64);
            let part = Int64Array::from_iter_values((first..end).map(|i| (i / 7 % 40) as i64));
            Ok(RecordBatch::try_new(
                schema.clone(),
                vec![Arc::new(id), Arc::new(part), Arc::new(v)],
            )?)
        });
        let schema = self.schema.clone();
        Box::pin(RecordBatchStreamAdapter::new(schema, futures::stream::iter(batches)))
    }
}

/// A session with a pool of this many bytes, and tables of so many rows.
fn session(pool: i64, tables: &[(&str, usize, usize)]) -> Result<SessionContext> {
    let pool = Arc::new(Watched(GreedyMemoryPool::new(pool as usize)));
    let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool).build_arc()?;
    let config = SessionConfig::new().with_target_partitions(2);
    let ctx = SessionContext::new_with_config_rt(config, runtime);
    datafusion_neighbors::register_all(&ctx)?;
    for (name, rows, dim) in tables {
        let made = Made::new(*rows, *dim);
        let table = StreamingTable::try_new(made.schema.clone(), vec![Arc::new(made)])?;
        ctx.register_table(*name, Arc::new(table))?;
    }
    Ok(ctx)
}

/// What a statement held and reserved.
#[derive(Debug)]
struct Seen {
    rows: Result<usize>,
    held: i64,
    reserved: i64,
    unreserved: i64,
    left: i64,
}

/// Runs a statement, batch after batch.
async fn watch(ctx: &SessionContext, sql: &str) -> Seen {
    BASELINE.store(HELD.load(SeqCst), SeqCst);
    for most in [&MOST_HELD, &MOST_RESERVED, &MOST_UNRESERVED] {
        most.store(0, SeqCst);
    }
    WATCHING.store(true, SeqCst);
    let rows = async {
        let mut batches = ctx.sql(sql).await?.execute_stream().await?;
        let mut rows = 0;
        while let Some(batch) = batches.next().await.transpose()? {
            rows += batch.num_rows();
        }
        Ok(rows)
    };
    let rows = rows.await;
    WATCHING.store(false, SeqCst);
    Seen {
        rows,
        held: MOST_HELD.load(SeqCst),
        reserved: MOST_RESERVED.load(SeqCst),
        unreserved: MOST_UNRESERVED.load(SeqCst),
        left: RESERVED.load(SeqCst),
    }
}

/// Statements that fit, and how many rows they give.
const FITTING: &[(&str, usize)] = &[
    ("SELECT query_id FROM knn_exact(baskets, k => 5, metric => 'jaccard')", 100_000),
    (
        "SELECT query_id FROM knn_lsh(baskets, k => 1, metric => 'jaccard', tables => 4, hashes => 9)",
        20_000,
    ),
    ("SELECT query_id FROM knn_lsh(queries => few, base => many, k => 10)", 197_556),
    (
        "SELECT query_id FROM knn_lsh(few, k => 5, tables => 20, hashes => 6, planes => 'orthogonal', probes => 8)",
        100_000,
    ),
    ("SELECT query_id FROM knn_lsh(few, k => 5, tables => 3, hashes => 1, width => 1e9)", 100_000),
    ("SELECT * FROM knn_exact(queries => few, base => many, k => 10)", 200_000),
    // Of a table in memory it is known how many rows it has, if not how many a limit leaves.
    ("SELECT * FROM knn_exact(queries => few, base => whole, k => 2)", 40_000),
    (
        "SELECT * FROM knn_exact(queries => few, base => (SELECT * FROM whole LIMIT 900), k => 2)",
        40_000,
    ),
    ("SELECT query_id, base_id, distance FROM knn_exact(many, few, k => 3)", 360_000),
    ("SELECT * FROM knn_exact(base => few, k => 100)", 2_000_000),
    ("SELECT * FROM knn_exact(few, low, k => 5, vector => 'v')", 0),
    (
        "SELECT id, cluster_id FROM kmeans(many, k => 64, max_iterations => 3, init => 'random')",
        120_000,
    ),
    ("SELECT * FROM kmeans(low, k => 20, max_iterations => 3)", 400_000),
    ("SELECT * FROM kmeans_centroids(many, k => 300, max_iterations => 2, init => 'random')", 300),
    ("SELECT id, kmeans(v, 3) OVER (PARTITION BY part) FROM low", 400_000),
    // Many groups of few rows.
    (
        "SELECT id, kmeans(v, 2) OVER (PARTITION BY id / 4) FROM (SELECT id, v FROM low LIMIT 80000)",
        80_000,
    ),
    ("SELECT * FROM dbscan(low, eps => 400, min_points => 3)", 400_000),
    ("SELECT id, cluster_id FROM dbscan(low, eps => 1e6, weight => part)", 400_000),
    ("SELECT id, cluster_id FROM dbscan(few, eps => 0.01, metric => 'cosine')", 20_000),
    ("SELECT id, dbscan(v, 2000, 4) OVER (PARTITION BY part) FROM low", 400_000),
    (
        concat!(
            "COPY many TO '",
            env!("CARGO_TARGET_TMPDIR"),
            "/many.lsh' STORED AS LSH OPTIONS ('lsh.tables' '9', 'lsh.hashes' '6', 'lsh.width' '900')"
        ),
        1,
    ),
    // More bytes of planes than of rows.
    (
        concat!(
            "COPY (SELECT id, v FROM few LIMIT 60) TO '",
            env!("CARGO_TARGET_TMPDIR"),
            "/planes.lsh' STORED AS LSH OPTIONS ('lsh.planes' 'trained', 'lsh.tables' '600', 'lsh.hashes' '15')"
        ),
        1,
    ),
];

const TABLES: &[(&str, usize, usize)] =
    &[("many", 120_000, 128), ("few", 20_000, 128), ("low", 400_000, 8)];

/// Tests that look at the whole process run one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn memory_is_reserved_before_it_is_taken() {
    let _alone = alone();
    runtime().block_on(reserved_before_taken());
}

async fn reserved_before_taken() {
    let mut wrong = Vec::new();
    let mut note = |holds: bool, what: &str, sql: &str, seen: &Seen| {
        if !holds {
            wrong.push(format!("{sql}: {what}: {seen:?}"));
        }
    };
    let ctx = session(4 << 30, TABLES).unwrap();
    let baskets =
        "CREATE TABLE baskets AS SELECT id, range(id % 9000, id % 9000 + 90) AS v FROM few";
    for table in [baskets, "CREATE TABLE whole AS SELECT * FROM many"] {
        ctx.sql(table).await.unwrap().collect().await.unwrap();
    }
    // What is made once per process is nobody's.
    for (sql, _) in FITTING {
        let _ = watch(&ctx, sql).await;
    }
    for (sql, rows) in FITTING {
        let seen = watch(&ctx, sql).await;
        println!(
            "{sql}: held {} MB, reserved {} MB, not reserved {} MB",
            seen.held / MB,
            seen.reserved / MB,
            seen.unreserved / MB
        );
        match (&seen.rows, rows) {
            (Err(_), 0) => {}
            (Ok(found), rows) => note(found == rows, "another number of rows", sql, &seen),
            (Err(_), _) => note(false, "an error", sql, &seen),
        }
        note(seen.unreserved <= SLACK, "held more than was reserved", sql, &seen);
        let allowed = seen.held + seen.held / 10 + SLACK;
        note(seen.reserved <= allowed, "reserved more than was held", sql, &seen);
        note(seen.left == 0, "still reserved", sql, &seen);
    }
    for (sql, _) in FITTING.iter().filter(|(sql, _)| sql.contains("kmeans")) {
        for pool in [8 * MB, 30 * MB, 70 * MB] {
            let ctx = session(pool, TABLES).unwrap();
            let seen = watch(&ctx, sql).await;
            let kind = seen.rows.as_ref().err().map(DataFusionError::find_root);
            let exhausted = matches!(kind, None | Some(DataFusionError::ResourcesExhausted(_)));
            note(exhausted, "an error of another kind", sql, &seen);
            note(seen.held < pool + 64 * MB, "held more than the pool", sql, &seen);
            note(seen.left == 0, "still reserved", sql, &seen);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Work that can be cancelled.
type Work<'a> = (&'a str, Box<dyn Fn(&Job) -> Result<(), Error> + Sync + 'a>);

/// Searches and clusterings of every kind, on a device, each of them long enough to be interrupted.
/// A GPU gets `larger` times the rows.
fn works(device: &AnyDevice, larger: usize) -> Vec<Work<'_>> {
    let rows = move |seed, count: usize, dim| Kind::Normal.rows(seed, count * larger, dim);
    let search = move |base: Rows, queries: Rows, k, metric| {
        move |job: &Job| {
            let params = KnnParams::try_new(k, metric)?;
            open_base(device, base.clone(), params, Method::Exact, job)?
                .search(&queries, QueryRows::Separate, job)
                .map(drop)
        }
    };
    let hashed = move |base: Rows, tables, hashes, width| {
        move |job: &Job| {
            let params = KnnParams::try_new(10, Metric::L2)?;
            let mut lsh = LshParams::try_new(Metric::L2, None)?;
            (lsh.tables, lsh.hashes, lsh.width) = (tables, hashes, width);
            let all = QueryRows::OfBase { first: 0 };
            let queries = base.clone();
            let method = Method::Lsh { params: &lsh, queries, query_rows: all, training: None };
            open_base(device, base.clone(), params, method, job)?.search(&base, all, job).map(drop)
        }
    };
    let wide = rows(1, 30_000, 128);
    let single = matrix_f32(&wide, 128, Metric::L2);
    let double = matrix_f64(&wide[..larger * 12_000], 128, Metric::L2);
    let l1 = matrix_f32(&wide[..larger * 20_000], 128, Metric::L1);
    let (bits, few_bits) =
        (matrix_bits(3, larger * 60_000, 512), matrix_bits(4, larger * 6000, 512));
    let clusters = move |rows: Rows, k, init, ends: Option<Vec<usize>>| {
        move |job: &Job| {
            let mut params = KMeansParams::try_new(k, Metric::L2)?;
            (params.init, params.max_iterations, params.tolerance) = (init, 8, 0.0);
            match &ends {
                Some(ends) => kmeans_groups(device, &rows, ends, &params, job).map(drop),
                None => kmeans(device, &rows, None, None, &params, job).map(drop),
            }
        }
    };
    let low = matrix_f32(&rows(7, 400_000, 8), 8, Metric::L2);
    let dense = move |rows: Rows, eps, min_points| {
        move |job: &Job| {
            let params = DbscanParams::try_new(eps, min_points, Metric::L2)?;
            dbscan(device, &rows, None, &[rows.len()], &params, job).map(drop)
        }
    };
    let part = low.slice(0..50_000);
    let groups: Vec<usize> = (1..=2000 * larger).map(|i| i * 200).collect();
    vec![
        ("search", Box::new(search(single.clone(), single.clone(), 10, Metric::L2))),
        (
            "search of f64",
            Box::new(search(double.clone(), double.slice(0..larger * 6000), 10, Metric::L2)),
        ),
        (
            "search of l1",
            Box::new(search(l1.clone(), l1.slice(0..larger * 10_000), 10, Metric::L1)),
        ),
        ("search of bits", Box::new(search(bits, few_bits, 10, Metric::Hamming))),
        (
            "long lists",
            Box::new(search(single.clone(), single.slice(0..larger * 600), 8000, Metric::L2)),
        ),
        ("k-means++", Box::new(clusters(single.clone(), 20, Init::PlusPlus, None))),
        ("k-means||", Box::new(clusters(single.clone(), 100, Init::Parallel, None))),
        ("rounds", Box::new(clusters(low.clone(), 256, Init::Random, None))),
        ("rounds of many", Box::new(clusters(single.clone(), 1000, Init::Random, None))),
        ("rounds of f64", Box::new(clusters(double, 300, Init::Random, None))),
        ("hashing", Box::new(hashed(part.clone(), Some(40), Some(8), Some(1.5)))),
        ("hashing, chosen", Box::new(hashed(part.clone(), None, None, None))),
        ("dbscan of many dimensions", Box::new(dense(single, 15.0, 40))),
        ("dbscan", Box::new(dense(part.clone(), 0.9, 40))),
        ("dbscan of core rows", Box::new(dense(part.clone(), 1.2, 2))),
        ("dbscan of one cluster", Box::new(dense(low.clone(), 100.0, 5))),
        ("groups", Box::new(clusters(low, 10, Init::PlusPlus, Some(groups)))),
    ]
}

/// Moments at which each work is cancelled, and how often at most.
const MOMENTS: u32 = 10;
const TRIES: usize = 3;

#[test]
fn cancelled_work_ends_soon() {
    let _alone = alone();
    let mut wrong = Vec::new();
    for (name, device) in support::devices() {
        let Some(device) = device else { continue };
        let (most, larger) = if name == "cpu" { (100, 1) } else { (200, 6) };
        let most = Duration::from_millis(most);
        for (what, work) in works(&device, larger) {
            // Kernels are compiled once.
            work(&Job::default()).unwrap();
            let start = Instant::now();
            work(&Job::default()).unwrap();
            let whole = start.elapsed();
            let longest = (0..MOMENTS).map(|i| {
                let latency = || latency(&work, whole * i / MOMENTS);
                // Other processes may be in the way of one.
                (0..TRIES).map(|_| latency()).find_or_least(most)
            });
            let longest = longest.max().unwrap_or_default();
            println!("{name}, {what}: {whole:.2?}, ends within {longest:.2?}");
            // Where other processes take nearly all of the machine, everything takes longer.
            if longest > most.max(whole / 50) {
                wrong.push(format!("{name}, {what}: went on for {longest:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// How long work goes on that is cancelled after some time.
fn latency(work: &(dyn Fn(&Job) -> Result<(), Error> + Sync), after: Duration) -> Duration {
    let job = Job::default();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| work(&job));
        std::thread::sleep(after);
        let cancelled = Instant::now();
        job.cancel().cancel();
        match running.join().unwrap() {
            Ok(()) | Err(Error::Cancelled) => cancelled.elapsed(),
            Err(error) => panic!("{error}"),
        }
    })
}

trait FindOrLeast {
    /// The first that is no longer than this, or the least.
    fn find_or_least(self, most: Duration) -> Duration;
}

impl<I: Iterator<Item = Duration>> FindOrLeast for I {
    fn find_or_least(self, most: Duration) -> Duration {
        let mut least = Duration::MAX;
        for found in self {
            least = least.min(found);
            if found <= most {
                break;
            }
        }
        least
    }
}

#[test]
fn a_dropped_stream_returns_at_once_and_what_it_held_soon() {
    let _alone = alone();
    runtime().block_on(async {
        let ctx = session(4 << 30, TABLES).unwrap();
        for (sql, _) in FITTING {
            for after in [0, 30, 100, 300, 700] {
                let Ok(frame) = ctx.sql(sql).await else { continue };
                let mut batches = frame.execute_stream().await.unwrap();
                let waited = Duration::from_millis(after);
                let _ =
                    tokio::time::timeout(waited, async { while batches.next().await.is_some() {} })
                        .await;
                let start = Instant::now();
                drop(batches);
                let dropped = start.elapsed();
                assert!(dropped < Duration::from_millis(100), "{sql}: {dropped:?} to drop it");
                while RESERVED.load(SeqCst) > 0 {
                    let since = start.elapsed();
                    assert!(since < Duration::from_secs(1), "{sql}, after {waited:?}: held");
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
        }
    });
}

/// Damaged files that are tried; `DAMAGED_FILES` in the environment is another number.
const DAMAGED: u64 = 2000;

#[test]
fn damaged_indexes_are_errors() {
    let _alone = alone();
    let times = std::env::var("DAMAGED_FILES").ok().and_then(|times| times.parse().ok());
    runtime().block_on(damage::run(times.unwrap_or(DAMAGED), most_held)).unwrap();
}

#[test]
fn an_index_of_other_dimensions_takes_no_memory_for_them() {
    let _alone = alone();
    runtime().block_on(damage::other_dimensions(most_held)).unwrap();
}

/// What becomes of a file, and the most memory that is held meanwhile.
async fn most_held(
    work: &dyn Fn() -> futures::future::BoxFuture<'static, damage::Outcome>,
) -> (damage::Outcome, i64) {
    BASELINE.store(HELD.load(SeqCst), SeqCst);
    MOST_HELD.store(0, SeqCst);
    WATCHING.store(true, SeqCst);
    let done = work().await;
    WATCHING.store(false, SeqCst);
    (done, MOST_HELD.load(SeqCst))
}
