//! The functions in a session: other extensions, partitions, memory, cancellation, metrics.

mod cache;
mod embedding;
mod fallback;
mod partitions;
mod plans;
mod stored;
mod surface;
pub mod waiting;

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, FixedSizeListArray, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Float32Type, Int64Type, Schema};
use arrow::util::pretty::pretty_format_batches;
use async_trait::async_trait;
use datafusion::catalog::Session;
use datafusion::datasource::MemTable;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::context::QueryPlanner;
use datafusion::execution::memory_pool::FairSpillPool;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::logical_expr::LogicalPlan;
use datafusion::physical_plan::{ExecutionPlan, execute_stream};
use datafusion::prelude::{SessionConfig, SessionContext, lit};
use datafusion_neighbors::{KnnExact, KnnExt, Metric, register_all};
use futures::StreamExt;
use libtest_mimic::Failed;

use self::waiting::operator;
use crate::support::trial::{Test, check, run};
use crate::support::{DEADLINE, Rng, until};

/// The tests of this file.
pub const TESTS: &[(&str, Test)] = &[
    ("registering_twice_changes_nothing", || run(registering_twice())),
    ("dictionaries_of_vectors", || run(surface::dictionaries())),
    ("dictionaries_with_small_keys", || run(surface::dictionaries_with_small_keys())),
    ("a_planner_of_their_own", || run(surface::a_planner_of_their_own())),
    ("installing_twice_keeps_all_planners", || run(surface::installing_twice_keeps_all_planners())),
    ("paths_need_url_tables", || run(surface::paths_need_url_tables())),
    ("a_foreign_query_planner_is_refused", || run(foreign_planner())),
    ("a_host_without_relation_planners_calls_by_position", || run(by_position())),
    ("tensors_are_vectors", || run(tensors())),
    ("partitions_and_batches_change_nothing", || run(partitioned_inputs())),
    ("data_frames_give_what_sql_gives", || run(data_frames())),
    ("a_base_larger_than_the_pool_is_refused", || run(large_base())),
    ("queries_larger_than_the_pool_are_cut", || run(large_queries())),
    ("batches_that_share_buffers_are_counted_once", || run(shared_buffers())),
    ("queries_from_a_join_do_not_hang", || run(joined_queries())),
    ("a_dropped_stream_stops_the_search", || run(cancellation())),
    ("a_bad_row_gives_no_output", || run(bad_row())),
    ("explain_analyze_shows_the_work", || run(metrics())),
    ("plans_can_be_built_again", || run(plans::round_trips())),
    ("vectors_nobody_asks_for_are_left_out", || run(plans::vectors_that_nobody_asks_for())),
    ("indexes_find_what_built_tables_find", || run(stored::as_built())),
    ("indexes_are_one_file", || run(stored::one_file())),
    ("indexes_answer_for_every_plan", || run(stored::plans())),
    ("indexes_stay_and_go", || run(stored::residence())),
    ("indexes_larger_than_memory", || run(stored::table_by_table())),
    ("indexes_need_few_threads", stored::few_threads),
    ("indexes_in_use_stay", || run(stored::in_use())),
    ("indexes_are_written_whole", || run(stored::two_writers())),
    ("indexes_given_up_leave_nothing", || run(stored::given_up())),
    ("indexes_that_were_replaced_are_refused", || run(stored::replaced())),
    ("indexes_reach_a_recall", || run(stored::recall())),
    ("bases_that_repeat_are_found", || run(cache::repeated())),
    ("inputs_that_repeat_are_found", || run(cache::other_inputs())),
    ("indexes_in_memory_are_tables", || run(cache::index_as_table())),
    ("bases_that_are_unknown_are_read", || run(cache::never())),
    ("bases_of_changed_tables_are_read", || run(cache::changed_tables())),
    ("bases_of_changed_files_are_read", || run(cache::changed_files())),
    ("bases_give_way", || run(cache::memory())),
    ("bases_have_many_callers", || run(cache::callers())),
    ("partitions_are_ranges_of_the_queries", || run(partitions::concatenated())),
    ("partitions_need_memory", || run(partitions::memory())),
    ("partitions_serve_what_repartitions", || run(partitions::plans())),
    ("partitions_fail_together", || run(partitions::failures())),
    ("callers_may_be_workers_that_all_wait", embedding::workers_that_wait),
    ("statements_in_local_sets", embedding::local_sets),
    ("sessions_run_side_by_side", embedding::sessions_side_by_side),
    ("catalogs_may_wait_and_their_tasks_go_on", embedding::slow_catalogs),
];

/// The tests of this file that need a GPU.
pub const TESTS_OF_GPUS: &[(&str, Test)] =
    &[("the_cpu_goes_on_where_a_gpu_fails", || run(fallback::too_little_device_memory()))];

/// Registers a table of rows `id`, `v` with `parts` partitions and `batch` rows per batch.
fn table(
    ctx: &SessionContext,
    name: &str,
    rows: usize,
    dim: usize,
    parts: usize,
    batch: usize,
) -> Result<()> {
    let mut rng = Rng(11);
    let v =
        (0..rows).map(|_| Some((0..dim).map(|_| Some(rng.below(4) as f32)).collect::<Vec<_>>()));
    let v = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(
        v.collect::<Vec<_>>(),
        dim as i32,
    );
    let id = Int64Array::from_iter_values(0..rows as i64);
    let columns: [(&str, ArrayRef); 2] = [("id", Arc::new(id)), ("v", Arc::new(v))];
    let all = RecordBatch::try_from_iter(columns)?;
    let partitions = (0..parts).map(|part| {
        let (start, end) = (rows * part / parts, rows * (part + 1) / parts);
        (start..end).step_by(batch).map(|i| all.slice(i, batch.min(end - i))).collect()
    });
    ctx.register_table(name, Arc::new(MemTable::try_new(all.schema(), partitions.collect())?))?;
    Ok(())
}

async fn text(ctx: &SessionContext, sql: &str) -> Result<String> {
    Ok(pretty_format_batches(&ctx.sql(sql).await?.collect().await?)?.to_string())
}

fn session(config: SessionConfig) -> Result<SessionContext> {
    let ctx =
        SessionContext::new_with_config(config.set_str("datafusion.execution.batch_size", "100"));
    register_all(&ctx)?;
    Ok(ctx)
}

async fn registering_twice() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new())?;
    ctx.sql("SET neighbors.batch_rows = 7").await?.collect().await?;
    let before = ctx.state().relation_planners().len();
    register_all(&ctx)?;
    check(ctx.state().relation_planners().len() == before, "registered twice")?;
    let shown = text(&ctx, "SELECT value FROM information_schema.df_settings").await;
    check(shown.is_err(), "the session's own settings were changed")
}

#[derive(Debug)]
struct Foreign;

#[async_trait]
impl QueryPlanner for Foreign {
    async fn create_physical_plan(
        &self,
        _plan: &LogicalPlan,
        _session: &dyn Session,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Err(DataFusionError::NotImplemented("nothing".into()))
    }
}

async fn foreign_planner() -> Result<(), Failed> {
    let builder = SessionStateBuilder::new().with_default_features();
    let state = builder.with_query_planner(Arc::new(Foreign)).build();
    let error = register_all(&SessionContext::new_with_state(state)).expect_err("refused");
    check(error.to_string().contains("install"), error.to_string())
}

/// Hosts that support only plain table functions get the same rows.
async fn by_position() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(1))?;
    table(&ctx, "q", 20, 4, 1, 8)?;
    table(&ctx, "b", 200, 4, 1, 50)?;
    let plain = SessionStateBuilder::new_from_existing(ctx.state()).with_relation_planners(vec![]);
    let plain = SessionContext::new_with_state(plain.build());
    for call in [
        "knn_exact('q', 'b', 3, 'l1', 'v')",
        "knn_exact(q, public.b, 3)",
        "knn_exact('b', 3, 'cosine')",
        "knn_exact(b, 3, 'l2', ['id'])",
    ] {
        let sql = format!("SELECT * FROM {call} ORDER BY 1, rank");
        // Rows of zeros have no direction: both calls must report this.
        let (actual, expected) = (text(&plain, &sql).await, text(&ctx, &sql).await);
        match (actual, expected) {
            (Ok(actual), Ok(expected)) => check(actual == expected, format!("{call}: {actual}"))?,
            (Err(actual), Err(expected)) => {
                check(actual.to_string() == expected.to_string(), format!("{call}: {actual}"))?;
            }
            (actual, expected) => {
                return Err(format!("{call}: {actual:?}, not {expected:?}").into());
            }
        }
    }
    let error = text(&plain, "SELECT * FROM knn_exact(q, b)").await.expect_err("no k");
    check(error.to_string().contains("argument 'k' is missing"), error.to_string())
}

/// A column of Arrow's fixed-shape tensors is a column of vectors.
async fn tensors() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new())?;
    let points = [[0.0, 0.0, 0.0, 0.0], [0.0, 3.0, 4.0, 0.0], [0.0, 0.0, 0.0, 1.0]];
    let points = points.map(|point| Some(point.map(Some)));
    let points = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(points, 4);
    let metadata = [
        ("ARROW:extension:name", "arrow.fixed_shape_tensor"),
        ("ARROW:extension:metadata", "{\"shape\":[2,2]}"),
    ];
    let metadata = metadata.map(|(key, value)| (key.to_string(), value.to_string()));
    let field = Field::new("v", points.data_type().clone(), true).with_metadata(metadata.into());
    let schema = Arc::new(Schema::new(vec![Field::new("id", DataType::Int64, false), field]));
    let id = Int64Array::from_iter_values(0..3);
    let batch = RecordBatch::try_new(schema.clone(), vec![Arc::new(id), Arc::new(points)])?;
    ctx.register_table("t", Arc::new(MemTable::try_new(schema, vec![vec![batch]])?))?;
    let sql = "SELECT query_id, base_id, distance FROM knn_exact(t, k => 1) ORDER BY query_id";
    let batches = ctx.sql(sql).await?.collect().await?;
    let base = batches[0].column(1).as_primitive::<Int64Type>().values().to_vec();
    check(base == [2, 0, 0], format!("found {base:?}"))
}

/// Ties are decided by the order of the input, for any partitioning.
async fn partitioned_inputs() -> Result<(), Failed> {
    for (name, arguments) in [
        ("knn_exact", ""),
        ("knn_lsh", ""),
        ("knn_lsh", ", tables => 7, hashes => 5, width => 20, probes => 3"),
    ] {
        let sql = format!(
            "SELECT query_id, base_id, rank, distance FROM {name}(queries => (SELECT * FROM q WHERE id % 3 = 0), \
             base => (SELECT * FROM b WHERE id % 2 = 0), k => 9{arguments}) ORDER BY query_id, rank"
        );
        let mut expected = None;
        for (parts, batch, target, rows) in
            [(1, 5000, 1, 1000), (1, 7, 8, 10), (5, 100, 3, 1), (3, 64, 8, 33)]
        {
            let ctx = session(SessionConfig::new().with_target_partitions(target))?;
            ctx.sql(&format!("SET neighbors.batch_rows = {rows}")).await?.collect().await?;
            table(&ctx, "q", 60, 3, parts, batch)?;
            table(&ctx, "b", 3000, 3, parts, batch)?;
            let actual = text(&ctx, &sql).await?;
            let expected = expected.get_or_insert_with(|| actual.clone());
            check(
                actual == *expected && actual.lines().count() > 50,
                format!("{sql}: {parts} partitions, batches of {batch}, target {target}"),
            )?;
        }
    }
    parquet_partitions().await
}

/// The same for a Parquet file that several partitions read.
async fn parquet_partitions() -> Result<(), Failed> {
    let folder = tempfile::TempDir::new()?;
    let path = folder.path().join("b.parquet");
    let path = path.to_string_lossy();
    let writer = session(SessionConfig::new())?;
    writer
        .sql("SET datafusion.execution.parquet.max_row_group_size = 500")
        .await?
        .collect()
        .await?;
    table(&writer, "b", 20_000, 3, 1, 8192)?;
    let copy = format!("COPY (SELECT * FROM b ORDER BY id) TO '{path}' STORED AS PARQUET");
    writer.sql(&copy).await?.collect().await?;
    let sql = format!(
        "SELECT query_id, base_id, rank FROM knn_exact(queries => (SELECT * FROM '{path}' WHERE id < 20), \
         base => (SELECT * FROM '{path}' WHERE id % 2 = 0), k => 5) ORDER BY query_id, rank"
    );
    let mut expected = None;
    for target in [1, 2, 7] {
        let config = SessionConfig::new()
            .with_target_partitions(target)
            .set_u64("datafusion.optimizer.repartition_file_min_size", 1);
        let ctx = session(config)?.enable_url_table();
        for _ in 0..3 {
            let actual = text(&ctx, &sql).await?;
            let expected = expected.get_or_insert_with(|| actual.clone());
            check(actual == *expected, format!("{target} partitions of a file"))?;
        }
    }
    Ok(())
}

async fn data_frames() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(1))?;
    table(&ctx, "q", 20, 4, 1, 8)?;
    table(&ctx, "b", 200, 4, 1, 50)?;
    let params = KnnExact::k(4).metric(Metric::L1).vector("v");
    let (q, b) = (ctx.table("q").await?, ctx.table("b").await?);
    let two = q.knn_exact(b.clone(), params.clone())?.collect().await?;
    let sql = text(&ctx, "SELECT * FROM knn_exact(q, b, 4, 'l1', 'v')").await?;
    check(pretty_format_batches(&two)?.to_string() == sql, "two inputs")?;
    let itself = b.filter(lit(true))?.knn_exact_self(params)?.collect().await?;
    let sql = text(&ctx, "SELECT * FROM knn_exact(b, 4, 'l1')").await?;
    check(pretty_format_batches(&itself)?.to_string() == sql, "one input")
}

fn limited(bytes: usize) -> Result<SessionContext> {
    let pool = Arc::new(FairSpillPool::new(bytes));
    let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool).build_arc()?;
    let ctx =
        SessionContext::new_with_config_rt(SessionConfig::new().with_target_partitions(1), runtime);
    register_all(&ctx)?;
    Ok(ctx)
}

async fn large_base() -> Result<(), Failed> {
    let ctx = limited(1 << 20)?;
    table(&ctx, "b", 20_000, 64, 1, 1000)?;
    match text(&ctx, "SELECT count(*) FROM knn_exact(b, k => 3)").await {
        Err(error) if matches!(error.find_root(), DataFusionError::ResourcesExhausted(_)) => Ok(()),
        other => Err(format!("found {other:?}").into()),
    }
}

async fn large_queries() -> Result<(), Failed> {
    let ctx = limited(1 << 20)?;
    table(&ctx, "b", 300, 4, 1, 100)?;
    table(&ctx, "q", 20_000, 4, 1, 10_000)?;
    let shown = text(&ctx, "SELECT count(*) AS n FROM knn_exact(q, b, 20)").await?;
    check(shown.contains("400000"), shown)
}

/// Slices of one large batch: the pool counts the batch once, not once per slice.
async fn shared_buffers() -> Result<(), Failed> {
    let ctx = limited(16 << 20)?;
    table(&ctx, "b", 20_000, 32, 1, 20_000)?;
    let shown = text(&ctx, "SELECT count(*) AS n FROM knn_exact((SELECT * FROM b LIMIT 3), b, 5)");
    let shown = shown.await?;
    check(shown.contains("15"), shown)
}

/// The partitions of a join wait for each other.
async fn joined_queries() -> Result<(), Failed> {
    let folder = tempfile::TempDir::new()?;
    let config = SessionConfig::new()
        .with_target_partitions(4)
        .set_u64("datafusion.optimizer.repartition_file_min_size", 1);
    let ctx = session(config)?.enable_url_table();
    table(&ctx, "b", 5000, 4, 1, 1000)?;
    for part in 0..3 {
        let path = folder.path().join(format!("{part}.parquet"));
        let copy = format!(
            "COPY (SELECT * FROM b WHERE id % 3 = {part}) TO '{}' STORED AS PARQUET",
            path.to_string_lossy()
        );
        ctx.sql(&copy).await?.collect().await?;
    }
    let files = folder.path().to_string_lossy();
    ctx.sql(&format!("CREATE EXTERNAL TABLE files STORED AS PARQUET LOCATION '{files}/'"))
        .await?
        .collect()
        .await?;
    let sql = "SELECT count(*) AS n FROM knn_exact(queries => (SELECT f.id, f.v FROM \
               (SELECT id FROM b WHERE id < 50) s JOIN files f ON f.id = s.id), base => files, k => 1)";
    match tokio::time::timeout(DEADLINE, text(&ctx, sql)).await {
        Ok(shown) => {
            let shown = shown?;
            check(shown.contains("50"), shown)
        }
        Err(_) => Err("the search hangs".into()),
    }
}

/// A long search whose stream is dropped gives back its memory and its threads, and searches no more
/// queries.
async fn cancellation() -> Result<(), Failed> {
    const ROWS: usize = 400_000;
    let ctx = session(SessionConfig::new())?;
    // A base that stays is reserved.
    ctx.sql("SET neighbors.cache = '0'").await?.collect().await?;
    table(&ctx, "b", ROWS, 16, 1, 8192)?;
    let plan = ctx.sql("SELECT count(*) FROM knn_exact(b, k => 3)").await?;
    let plan = plan.create_physical_plan().await?;
    let exec = operator(&plan, "KnnExec").ok_or("a plan without KnnExec")?;
    let searched = || {
        let metrics = exec.metrics().unwrap_or_default();
        metrics.sum_by_name("query_rows").map_or(0, |queries| queries.as_usize())
    };
    let mut batches = execute_stream(plan.clone(), ctx.task_ctx())?;
    tokio::select! {
        _ = batches.next() => return Err("the search was too fast to be stopped".into()),
        () = until(|| searched() > 0) => {}
    }
    drop(batches);
    let pool = ctx.runtime_env().memory_pool.clone();
    let is_free = tokio::time::timeout(DEADLINE, until(|| pool.reserved() == 0)).await;
    check(is_free.is_ok(), "memory stays reserved")?;
    table(&ctx, "few", 1000, 4, 1, 1000)?;
    let next = text(&ctx, "SELECT count(*) AS n FROM knn_exact(few, k => 3)");
    let shown =
        tokio::time::timeout(DEADLINE, next).await.map_err(|_| "the next search hangs")??;
    check(shown.contains("3000"), shown)?;
    check(searched() < ROWS, format!("{} queries were searched", searched()))
}

async fn bad_row() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new())?;
    let sql = "SELECT * FROM knn_exact(queries => (SELECT * FROM (VALUES (1, [1.0, 2.0]), (2, [1.0])) t(id, v)), \
               base => (SELECT 7 AS id, [0.0, 0.0] AS v), k => 1)";
    let error = ctx.sql(sql).await?.collect().await.expect_err("a row of another length");
    let message = "row 1 of queries, column \"v\": dim mismatch: it has 1, the others 2";
    check(error.to_string().contains(message), error.to_string())?;
    check(matches!(error.find_root(), DataFusionError::Execution(_)), format!("{error:?}"))
}

async fn metrics() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new())?;
    table(&ctx, "b", 500, 4, 1, 100)?;
    ctx.sql("SET neighbors.device = 'cpu'").await?.collect().await?;
    let shown = text(&ctx, "EXPLAIN ANALYZE SELECT * FROM knn_exact(b, k => 3)").await?;
    let parts = [
        "KnnExec: k=3, metric=l2, device=cpu",
        "base_rows=500",
        "query_rows=500",
        "pairs_computed=",
        "pairs_rechecked=",
        "rows_redone=",
        "bytes_sent=",
        "transfer_time=",
        "kernel_time=",
        "output_rows=1.50 K",
    ];
    let missing: Vec<_> = parts.into_iter().filter(|part| !shown.contains(part)).collect();
    check(missing.is_empty(), format!("{missing:?} missing in {shown}"))?;
    // Two tables of one bucket: a row visits all rows, itself included, in both tables, and is
    // compared once with each other row.
    let one = "tables => 2, hashes => 1, width => 1e9, rounding => 'zero'";
    let shown =
        text(&ctx, &format!("EXPLAIN ANALYZE SELECT * FROM knn_lsh(b, k => 3, {one})")).await?;
    let parts = [
        "method=lsh (family=pstable, tables=2, hashes=1, width=1000000000, rounding=zero, probes=1, seed=0",
        "buckets=2, largest_bucket=500",
        "rows_visited=500.0 K",
        "pairs_computed=249.5 K",
        "share_compared=99.8% (249.5 K/250.0 K)",
        "queries_short=0",
        "hash_time=",
        "build_time=",
        "find_time=",
        "compare_time=",
        "tune_time=",
    ];
    let missing: Vec<_> = parts.into_iter().filter(|part| !shown.contains(part)).collect();
    check(missing.is_empty(), format!("{missing:?} missing in {shown}"))?;
    let shown = text(&ctx, "EXPLAIN ANALYZE SELECT * FROM knn_lsh(b, k => 3)").await?;
    let missing: Vec<_> = ["expected_recall=0.9", "expected_share="]
        .into_iter()
        .filter(|part| !shown.contains(part))
        .collect();
    check(missing.is_empty(), format!("{missing:?} missing in {shown}"))?;
    let none = "tables => 1, hashes => 26, width => 1e-3";
    let shown =
        text(&ctx, &format!("EXPLAIN ANALYZE SELECT * FROM knn_lsh(b, k => 3, {none})")).await?;
    // Rows alone in their buckets, or with fewer than three others.
    check(shown.contains("output_rows=867") && shown.contains("queries_short=355"), shown)
}
