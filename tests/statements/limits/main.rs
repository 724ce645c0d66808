//! Limits that operators keep: memory granted by a session's pool, also if a statement fails or is
//! dropped.
//!
//! An allocator counts the bytes of this process, and a pool the reserved bytes. Inputs are
//! generated batch by batch while they are read, so that the memory held belongs to the operators.
#![allow(unsafe_code)] // an allocator

mod damage;
#[path = "../../support/mod.rs"]
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};

use arrow::array::{ArrayRef, AsArray, FixedSizeListArray, Float32Array, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
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
use futures::StreamExt;
use support::{DEADLINE, until};

const MB: i64 = 1 << 20;

/// The memory that may be held without a reservation, besides a tenth: small allocations and the
/// current batch.
const SLACK: i64 = 16 * MB;

static HELD: AtomicI64 = AtomicI64::new(0);
static RESERVED: AtomicI64 = AtomicI64::new(0);

/// Whether extremes are recorded, and the extremes since recording began.
static WATCHING: AtomicBool = AtomicBool::new(false);
static BASELINE: AtomicI64 = AtomicI64::new(0);
static MOST_HELD: AtomicI64 = AtomicI64::new(0);
static MOST_RESERVED: AtomicI64 = AtomicI64::new(0);
static MOST_UNRESERVED: AtomicI64 = AtomicI64::new(0);

struct Counting;

// SAFETY: passes every call on to the system's allocator, which fulfils the trait's contract;
// counting neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller guarantees that the layout has a non-zero size.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller guarantees that the layout has a non-zero size.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as i64, SeqCst);
        // SAFETY: the caller guarantees that the block was allocated here, by `System`, with this
        // layout, and is not used any more.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks may exist while one is copied to the other.
        count(size as i64);
        HELD.fetch_sub(layout.size() as i64, SeqCst);
        // SAFETY: the caller guarantees that the block was allocated here, by `System`, with this
        // layout, and that the new size is not zero.
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

/// The number of reservations requested.
static ASKED: AtomicUsize = AtomicUsize::new(0);

/// While closed, computing threads can neither reserve nor release memory, so their work cannot
/// end.
static IS_CLOSED: Mutex<bool> = Mutex::new(false);
static OPENED: Condvar = Condvar::new();

fn close(is_closed: bool) {
    *IS_CLOSED.lock().unwrap_or_else(PoisonError::into_inner) = is_closed;
    OPENED.notify_all();
}

fn wait_while_closed() {
    let thread = std::thread::current();
    if thread.name().is_some_and(|name| name.starts_with("neighbors-")) {
        let is_closed = IS_CLOSED.lock().unwrap_or_else(PoisonError::into_inner);
        drop(OPENED.wait_while(is_closed, |is_closed| *is_closed));
    }
}

/// A memory pool that records the reserved bytes.
#[derive(Debug)]
struct Watched(GreedyMemoryPool);

impl fmt::Display for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "watched")
    }
}

impl Watched {
    fn note(&self) {
        wait_while_closed();
        // Serialised, so that the last value read is the last one stored.
        static NOTING: Mutex<()> = Mutex::new(());
        let _noting = NOTING.lock().unwrap_or_else(PoisonError::into_inner);
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
        ASKED.fetch_add(1, SeqCst);
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

/// A table whose rows are generated when they are read.
#[derive(Debug)]
struct Made {
    schema: SchemaRef,
    rows: usize,
    dim: usize,
}

/// The number of rows of a batch.
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

/// Pseudo-random numbers other than integers.
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

/// A session with a pool of `pool` bytes, and generated tables, each with a name, a number of rows
/// and a dimension.
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

/// The memory held and reserved by a statement.
#[derive(Debug)]
struct Seen {
    rows: Result<usize>,
    held: i64,
    reserved: i64,
    unreserved: i64,
    left: i64,
}

/// Runs a statement and drops each batch.
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

/// Statements that fit in memory, and the number of rows that they return.
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
    // The number of rows of an in-memory table is known, but not that of a limit over it.
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
    // The hyperplanes take more bytes than the rows.
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

/// A lock for tests that measure the whole process.
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
    let no_cache = "SET neighbors.cache = '0'";
    for statement in [baskets, "CREATE TABLE whole AS SELECT * FROM many", no_cache] {
        ctx.sql(statement).await.unwrap().collect().await.unwrap();
    }
    // The first run allocates memory that lives as long as the process.
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
            (Ok(counted), rows) => note(counted == rows, "another number of rows", sql, &seen),
            (Err(_), _) => note(false, "an error", sql, &seen),
        }
        note(seen.unreserved <= SLACK, "held more than was reserved", sql, &seen);
        let allowed = seen.held + seen.held / 10 + SLACK;
        note(seen.reserved <= allowed, "reserved more than was held", sql, &seen);
        note(seen.left == 0, "still reserved", sql, &seen);
    }
    // With a cache, the bases that stay are still reserved, and nothing else.
    ctx.sql("SET neighbors.cache = '1G'").await.unwrap().collect().await.unwrap();
    for (sql, _) in FITTING.iter().filter(|(sql, _)| sql.contains("knn_")) {
        let seen = watch(&ctx, sql).await;
        let listed = "SELECT CAST(coalesce(sum(host_bytes), 0) AS BIGINT) FROM neighbors_cache()";
        let listed = ctx.sql(listed).await.unwrap().collect().await.unwrap();
        let bytes = listed[0].column(0).as_primitive::<Int64Type>().value(0);
        note(seen.left as i64 == bytes, &format!("{bytes} bytes are listed"), sql, &seen);
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

/// The numbers of requested reservations after which a statement's stream is dropped.
const MOMENTS: [usize; 5] = [0, 1, 4, 12, 40];

#[test]
fn a_dropped_stream_returns_at_once_and_gives_back_what_it_held() {
    let _alone = alone();
    runtime().block_on(async {
        let ctx = session(4 << 30, TABLES).unwrap();
        for (sql, _) in FITTING {
            for moment in MOMENTS {
                let Ok(frame) = ctx.sql(sql).await else { continue };
                ASKED.store(0, SeqCst);
                let mut batches = frame.execute_stream().await.unwrap();
                tokio::select! {
                    () = async { while batches.next().await.is_some() {} } => {}
                    () = until(|| ASKED.load(SeqCst) >= moment) => {}
                }
                assert!(returns_at_once(batches), "{sql}, {moment}: dropping waits for the work");
                let is_free = until(|| RESERVED.load(SeqCst) == 0);
                let is_free = tokio::time::timeout(DEADLINE, is_free).await;
                assert!(is_free.is_ok(), "{sql}, {moment}: memory stays reserved");
            }
        }
    });
}

/// Drops a stream while its work cannot end, and returns whether the drop returns.
fn returns_at_once(batches: SendableRecordBatchStream) -> bool {
    close(true);
    let (done, dropped) = mpsc::channel();
    let runtime = tokio::runtime::Handle::current();
    std::thread::spawn(move || {
        let _entered = runtime.enter();
        drop(batches);
        let _ = done.send(());
    });
    let returns = dropped.recv_timeout(DEADLINE).is_ok();
    close(false);
    returns
}

/// The threads of this process.
#[cfg(target_os = "linux")]
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Statements at the same time: how many threads they start, and whether small ones wait for a large
/// one.
#[cfg(target_os = "linux")]
#[test]
fn statements_at_the_same_time_share_the_threads() {
    const CALLERS: usize = 32;
    let _alone = alone();
    let cores = std::thread::available_parallelism().unwrap().get();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(cores).enable_all().build().unwrap();
    // Workers of the runtime begin when they have something to do.
    runtime.block_on(async { tokio::spawn(async {}).await.unwrap() });
    let before = threads();
    runtime.block_on(async {
        let ctx = SessionContext::new();
        datafusion_neighbors::register_all(&ctx).unwrap();
        let rows = "SELECT value AS id, [cos(value), sin(value * 7), value % 101, value % 7] AS v";
        for (name, count) in [("items", 200_000), ("many", 60_000)] {
            let sql = format!("CREATE TABLE {name} AS {rows} FROM generate_series(1, {count})");
            ctx.sql(&sql).await.unwrap().collect().await.unwrap();
        }
        let small =
            "SELECT base_id FROM knn_exact(queries => [0.5, 0.25, $1, 3.0], base => items, k => 5)";
        ctx.sql(&format!("PREPARE small AS {small}")).await.unwrap().collect().await.unwrap();
        let small = |ctx: SessionContext, i: usize| async move {
            let start = std::time::Instant::now();
            let sql = format!("EXECUTE small({}.0)", i % 101);
            let rows = ctx.sql(&sql).await.unwrap().collect().await.unwrap();
            assert_eq!(rows.iter().map(RecordBatch::num_rows).sum::<usize>(), 5);
            start.elapsed()
        };
        // All of them need the base at the same time; it is read once.
        let cold = (0..CALLERS).map(|caller| tokio::spawn(small(ctx.clone(), caller)));
        for caller in cold.collect::<Vec<_>>() {
            caller.await.unwrap();
        }
        let bases = ctx.sql("SELECT hits FROM neighbors_cache").await.unwrap();
        let bases = bases.collect().await.unwrap();
        let hits = bases[0].column(0).as_primitive::<Int64Type>().values();
        assert_eq!(hits[..], [CALLERS as i64 - 1]);
        let callers = (0..CALLERS).map(|caller| {
            let ctx = ctx.clone();
            tokio::spawn(async move {
                for i in 0..20 {
                    small(ctx.clone(), caller + i).await;
                }
            })
        });
        let callers: Vec<_> = callers.collect();
        let mut most = 0;
        while !callers.iter().all(tokio::task::JoinHandle::is_finished) {
            most = most.max(threads());
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        for caller in callers {
            caller.await.unwrap();
        }
        let limit = before + cores + CALLERS;
        assert!(most <= limit, "{most} threads, {before} of them before");
        let median = async |ctx: &SessionContext| {
            let mut times = Vec::new();
            for i in 0..21 {
                times.push(small(ctx.clone(), i).await);
            }
            times.sort_unstable();
            times[10]
        };
        let alone = median(&ctx).await;
        let large = "SELECT count(*) FROM knn_exact(many, k => 1000, metric => 'l1')";
        let large = ctx.sql(large).await.unwrap();
        let large = tokio::spawn(async move { large.collect().await.unwrap() });
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        let beside = median(&ctx).await;
        assert!(!large.is_finished(), "the large statement is too small");
        assert!(beside <= 10 * alone, "{alone:?} alone, {beside:?} beside a large statement");
        large.abort();
    });
}

/// The number of damaged files to try; `DAMAGED_FILES` in the environment overrides it.
const DAMAGED: u64 = 2000;

#[test]
fn damaged_indexes_are_errors() {
    let _alone = alone();
    let times = std::env::var("DAMAGED_FILES").ok().and_then(|times| times.parse().ok());
    runtime().block_on(damage::by_chance(times.unwrap_or(DAMAGED), most_held)).unwrap();
}

#[test]
fn an_index_of_other_dimensions_takes_no_memory_for_them() {
    let _alone = alone();
    runtime().block_on(damage::other_dimensions(most_held)).unwrap();
}

/// Runs work, and returns its outcome and its peak memory.
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
