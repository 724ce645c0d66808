//! Waiting queries: memory, limits, filters, and the phases of EXPLAIN ANALYZE.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, ListArray, RecordBatch, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Int32Type};
use arrow::util::pretty::pretty_format_batches;
use datafusion::common::stats::Precision;
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::execution::memory_pool::GreedyMemoryPool;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use datafusion::physical_plan::{ExecutionPlan, collect};
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_neighbors::register_all;
use futures::StreamExt;
use libtest_mimic::Failed;

use super::{session, table, text};
use crate::support::Rng;
use crate::support::trial::{Test, check, run};

/// The tests of this file.
pub const TESTS: [(&str, Test); 11] = [
    ("queries_twenty_times_the_pool", || run(queries_twenty_times_the_pool())),
    ("slices_of_lists_are_their_own_rows", || run(slices_of_lists())),
    ("long_texts_come_in_small_batches", || run(long_texts())),
    ("kmeans_shows_progress", || run(progress())),
    ("a_limit_searches_no_more_queries_than_it_needs", || run(limits())),
    ("a_reader_of_few_rows_waits_for_a_small_block", || run(small_blocks())),
    ("filters_reach_the_queries_and_the_rank", || run(filters())),
    ("volatile_and_foreign_filters_stay_above", || run(filters_that_stay())),
    ("filters_on_group_keys_go_below_window_forms", || run(filters_on_group_keys())),
    ("both_operators_have_statistics", || run(statistics())),
    ("phases_add_up_to_all_that_is_booked", || run(phases())),
];

/// Rows `id`, `v` in a Parquet file, so that no table holds them in memory.
async fn parquet(
    folder: &tempfile::TempDir,
    name: &str,
    rows: usize,
    dim: usize,
) -> Result<String, Failed> {
    let writer = session(SessionConfig::new())?;
    table(&writer, name, rows, dim, 1, 8192)?;
    let path = folder.path().join(format!("{name}.parquet"));
    let path = path.to_string_lossy();
    let copy = format!("COPY {name} TO '{path}' STORED AS PARQUET");
    writer.sql(&copy).await?.collect().await?;
    Ok(path.into_owned())
}

/// 30 MB of queries with 2 MB free beside the base.
async fn queries_twenty_times_the_pool() -> Result<(), Failed> {
    let folder = tempfile::TempDir::new()?;
    let queries = parquet(&folder, "q", 60_000, 128).await?;
    let base = parquet(&folder, "b", 300, 128).await?;
    let sql = format!(
        "SELECT count(*) AS n, sum(query_id * base_id % 1009) AS pairs, sum(CAST(distance * 1024 AS BIGINT)) AS far, \
         max(rank) AS last FROM knn_exact(queries => '{queries}', base => '{base}', k => 10)"
    );
    let mut expected = None;
    for (pool, batch_rows) in [(usize::MAX, 131_072), (2 << 20, 131_072), (2 << 20, 500)] {
        for batch_size in [8192, 500] {
            let pool = Arc::new(GreedyMemoryPool::new(pool));
            let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool).build_arc()?;
            let config = SessionConfig::new().with_target_partitions(1).with_batch_size(batch_size);
            let ctx = SessionContext::new_with_config_rt(config, runtime).enable_url_table();
            register_all(&ctx)?;
            ctx.sql(&format!("SET neighbors.batch_rows = {batch_rows}")).await?.collect().await?;
            let actual = text(&ctx, &sql).await?;
            let expected = expected.get_or_insert_with(|| actual.clone());
            check(
                actual.contains("600000") && actual == *expected,
                format!("{actual} {expected}"),
            )?;
        }
    }
    Ok(())
}

/// Lists of a type that is converted, each block a small slice of a large batch.
async fn slices_of_lists() -> Result<(), Failed> {
    let (rows, dim) = (20_000, 128);
    let mut rng = Rng(5);
    let values: Vec<_> = (0..rows * dim).map(|_| rng.below(100) as i32).collect();
    let lists = values.chunks(dim).map(|row| Some(row.iter().map(|x| Some(*x))));
    let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists));
    let item = Arc::new(Field::new_list_field(DataType::Int32, true));
    let id: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows as i64));
    let mut expected = None;
    for to in [
        DataType::FixedSizeList(item.clone(), dim as i32),
        DataType::List(item.clone()),
        DataType::LargeList(item.clone()),
        DataType::ListView(item.clone()),
    ] {
        let ctx = session(SessionConfig::new().with_batch_size(rows))?;
        let columns = [("id", id.clone()), ("v", cast(&lists, &to)?)];
        let all = RecordBatch::try_from_iter(columns)?;
        ctx.register_table("q", Arc::new(MemTable::try_new(all.schema(), vec![vec![all]])?))?;
        ctx.sql("SET neighbors.batch_rows = 64").await?.collect().await?;
        let sql = "SELECT sum(query_id * base_id % 1009), sum(CAST(distance * 1024 AS BIGINT)), count(*) \
                   FROM knn_exact(q, (SELECT * FROM q WHERE id % 100 = 7), 3)";
        let actual = text(&ctx, sql).await?;
        let expected = expected.get_or_insert_with(|| actual.clone());
        check(
            actual == *expected && actual.contains("60000"),
            format!("{to}: {actual} {expected}"),
        )?;
    }
    Ok(())
}

/// Rows `id`, `v`, `text`, with texts of `bytes` bytes.
fn texts(ctx: &SessionContext, name: &str, rows: usize, bytes: usize) -> Result<()> {
    let v = (0..rows).map(|row| Some([Some(row as i32)]));
    let columns: [(&str, ArrayRef); 3] = [
        ("id", Arc::new(Int64Array::from_iter_values(0..rows as i64))),
        ("v", Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(v))),
        ("text", Arc::new(StringArray::from_iter_values((0..rows).map(|_| "x".repeat(bytes))))),
    ];
    let all = RecordBatch::try_from_iter(columns)?;
    ctx.register_table(name, Arc::new(MemTable::try_new(all.schema(), vec![vec![all]])?))?;
    Ok(())
}

/// 160 rows with 16 MiB of text each would make a batch of 2.5 GiB.
async fn long_texts() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(1))?;
    ctx.sql("SET datafusion.execution.batch_size = 8192").await?.collect().await?;
    texts(&ctx, "q", 160, 1)?;
    texts(&ctx, "b", 2, 16 << 20)?;
    let frame = ctx.sql("SELECT base_text FROM knn_exact(q, b, 1)").await?;
    let mut batches = frame.execute_stream().await?;
    let (mut rows, mut bytes) = (0, 0);
    while let Some(batch) = batches.next().await.transpose()? {
        let text = batch.column(0).as_string::<i32>();
        let here = text.value_data().len();
        check(here <= 48 << 20, format!("a batch of {here} bytes"))?;
        rows += text.len();
        bytes += here;
    }
    check((rows, bytes) == (160, 160 << 24), format!("{rows} rows, {bytes} bytes"))?;
    // Short texts come in full batches.
    texts(&ctx, "short", 1000, 8)?;
    let short_batches =
        ctx.sql("SELECT base_text FROM knn_exact(q, short, 50)").await?.collect().await?;
    let rows: Vec<_> = short_batches.iter().map(RecordBatch::num_rows).collect();
    check(rows == [8000], format!("batches of {rows:?}"))
}

/// The operator of this name in a plan.
pub(super) fn operator(
    plan: &Arc<dyn ExecutionPlan>,
    name: &str,
) -> Option<Arc<dyn ExecutionPlan>> {
    if plan.name() == name {
        return Some(plan.clone());
    }
    plan.children().into_iter().find_map(|child| operator(child, name))
}

/// The rows of a query, and the number of queries searched.
async fn searched(ctx: &SessionContext, sql: &str) -> Result<(Vec<String>, usize), Failed> {
    let plan = ctx.sql(sql).await?.create_physical_plan().await?;
    let batches = collect(plan.clone(), ctx.task_ctx()).await?;
    let exec = operator(&plan, "KnnExec").ok_or("a plan without KnnExec")?;
    let metrics = exec.metrics().ok_or("no metrics")?;
    let queries = metrics.sum_by_name("query_rows").ok_or("no query_rows")?.as_usize();
    // Removes the padding of columns.
    let shown = pretty_format_batches(&batches)?.to_string().replace(' ', "");
    let rows = shown.lines().skip(3).filter(|line| line.starts_with('|'));
    Ok((rows.map(str::to_string).collect(), queries))
}

async fn limits() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(2))?;
    table(&ctx, "b", 400, 4, 1, 100)?;
    table(&ctx, "q", 5000, 4, 1, 1000)?;
    let some = "(SELECT id, CASE WHEN id % 3 = 2 AND id > 70 THEN v END AS v FROM q)";
    for (call, k, nulls) in [
        ("knn_exact(q, b, 5)".to_string(), 5, false),
        ("knn_exact(b, 5)".to_string(), 5, false),
        ("knn_exact(q, b, 1000)".to_string(), 400, false),
        (format!("knn_exact({some}, b, 5)"), 5, true),
    ] {
        let sql = format!("SELECT query_id, base_id, rank, distance FROM {call}");
        let (all, _) = searched(&ctx, &sql).await?;
        for (skip, fetch) in [(0_usize, 1), (0, 12), (7, 5), (3, 700)] {
            let (limited, queries) =
                searched(&ctx, &format!("{sql} LIMIT {fetch} OFFSET {skip}")).await?;
            let expected = &all[skip..skip + fetch];
            let same = limited == *expected;
            check(same, format!("{call} LIMIT {fetch} OFFSET {skip}: {limited:?} {expected:?}"))?;
            let needed = (skip + fetch).div_ceil(k);
            let exact = queries == needed || nulls && queries >= needed && queries < needed + 64;
            check(exact, format!("{call} LIMIT {fetch} OFFSET {skip}: {queries} of {needed}"))?;
        }
    }
    let shown = text(&ctx, "EXPLAIN SELECT base_id FROM knn_exact(q, b, 5) LIMIT 12").await?;
    check(shown.contains("fetch=12") && !shown.contains("LimitExec"), shown)
}

/// A limit that is not pushed into the operator still ends it after a small block.
async fn small_blocks() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(1))?;
    table(&ctx, "b", 400, 4, 1, 100)?;
    table(&ctx, "q", 60_000, 4, 1, 1000)?;
    let sql = "SELECT * FROM knn_exact(q, b, 5) WHERE base_id % 2 = 0 LIMIT 3";
    let (_, queries) = searched(&ctx, sql).await?;
    check(queries <= 3 * 1024, format!("{queries} queries searched"))?;
    let (_, queries) = searched(&ctx, "SELECT base_id FROM knn_exact(q, b, 5)").await?;
    check(queries == 60_000, format!("{queries} queries searched"))
}

async fn filters() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(2))?;
    table(&ctx, "b", 400, 4, 1, 100)?;
    table(&ctx, "q", 3000, 4, 1, 1000)?;
    let columns = "query_id, base_id, rank, distance";
    for (call, condition, k, queries) in [
        ("knn_exact(q, b, 5)", "query_id % 7 = 1", 5, 429),
        ("knn_exact(q, b, 5)", "query_id < 9 AND rank <= 2", 2, 9),
        ("knn_exact(q, b, 5)", "rank < 3", 2, 3000),
        ("knn_exact(q, b, 5)", "1 = rank", 1, 3000),
        ("knn_exact(q, b, 5)", "rank = 3 AND base_id < 200", 3, 3000),
        ("knn_exact(q, b, 5)", "rank BETWEEN 2 AND 3", 3, 3000),
        ("knn_exact(q, b, 5)", "rank IN (2, 4) OR rank = 1", 4, 3000),
        ("knn_exact(q, b, 5)", "rank <= 9", 5, 3000),
        ("knn_exact(q, b, 5)", "rank <= 0", 1, 3000),
        ("knn_exact(q, b, 5)", "rank <= 2 OR base_id = 3", 5, 3000),
        ("knn_exact(q, b, 5)", "rank >= 2", 5, 3000),
        ("knn_exact(q, b, 5)", "distance < 1 AND query_id = base_id", 5, 3000),
        ("knn_exact(b, 5)", "query_id < 9 AND rank <= 2", 2, 400),
    ] {
        let sql = format!("SELECT {columns} FROM {call} WHERE {condition} ORDER BY 1, 3");
        // Nothing is pushed below a limit.
        let whole = format!(
            "SELECT {columns} FROM (SELECT * FROM {call} LIMIT 1000000) WHERE {condition} ORDER BY 1, 3"
        );
        let (actual, expected) = (text(&ctx, &sql).await?, text(&ctx, &whole).await?);
        check(actual == expected, format!("{call} WHERE {condition}: {actual} {expected}"))?;
        let shown = text(&ctx, &format!("EXPLAIN {sql}")).await?;
        check(shown.contains(&format!("KnnExec: k={k},")), format!("{condition}: {shown}"))?;
        let (_, searched) = searched(&ctx, &sql).await?;
        check(searched == queries, format!("{condition}: {searched} queries searched"))?;
    }
    // A filter that the operator applies is removed, so that the limit is pushed down too.
    let shown = text(
        &ctx,
        "EXPLAIN SELECT n.base_id FROM knn_exact(q, b, 5) n WHERE n.query_id > 3 AND n.rank < 3 LIMIT 4",
    );
    let shown = shown.await?;
    check(shown.contains("fetch=4") && !shown.contains("LimitExec"), shown)
}

async fn filters_that_stay() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(1))?;
    table(&ctx, "b", 400, 4, 1, 100)?;
    table(&ctx, "q", 300, 4, 1, 100)?;
    for (call, condition) in [
        ("knn_exact(q, b, 5)", "query_id * random() < 10"),
        ("knn_exact(q, b, 5)", "rank <= 2 * random()"),
        ("knn_exact(q, b, 5)", "random() < 0.5"),
        ("(SELECT * FROM knn_exact(q, b, 5) WHERE random() < 0.5)", "base_id < 7"),
        ("knn_exact(q, b, 5)", "base_id < 7"),
        ("knn_exact(q, b, 5)", "distance < 2"),
        ("knn_exact(q, b, 5)", "query_id < base_id"),
        ("knn_exact(b, 5)", "query_id < 7"),
        ("(SELECT * FROM knn_exact(q, b, 5) LIMIT 9)", "query_id < 7"),
        ("(SELECT * FROM knn_exact(q, b, 5) LIMIT 9)", "rank < 2"),
        (
            "(SELECT *, row_number() OVER (ORDER BY distance) AS place FROM knn_exact(q, b, 5))",
            "rank < 2 AND query_id < 3",
        ),
    ] {
        let sql = format!("EXPLAIN SELECT * FROM {call} WHERE {condition}");
        let shown = text(&ctx, &sql).await?;
        let plan = shown.split("physical_plan").nth(1).unwrap_or_default();
        let (filter, search) = (plan.find("FilterExec"), plan.find("KnnExec: k=5,"));
        let above = filter.is_some_and(|at| search.is_some_and(|search| at < search));
        check(above && plan.matches("FilterExec").count() == 1, format!("{condition}: {shown}"))?;
    }
    Ok(())
}

/// Whether a filter is below a window form's operator, and whether one is above.
async fn filtered(ctx: &SessionContext, sql: &str) -> Result<(bool, bool), Failed> {
    let shown = text(ctx, &format!("EXPLAIN {sql}")).await?;
    let plan = shown.split("physical_plan").nth(1).unwrap_or_default();
    let operator = ["KMeansExec", "DbscanExec"].iter().filter_map(|name| plan.find(name)).min();
    let (above, below) = plan.split_at(operator.ok_or("no operator")?);
    Ok((below.contains("FilterExec"), above.contains("FilterExec")))
}

async fn filters_on_group_keys() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(2))?;
    table(&ctx, "b", 400, 4, 2, 100)?;
    let rows = "(SELECT id, id % 7 AS part, id % 3 AS other, random() AS x, v FROM b)";
    for call in ["kmeans(v, 3, 1)", "dbscan(v, 1, 3)"] {
        for (keys, condition, below, above) in [
            ("part", "part = 2", true, false),
            ("part", "part IN (1, 5) AND abs(part) > 1 AND id < 300", true, true),
            ("other, part", "part < other", true, false),
            ("part", "other = 1", false, true),
            ("part", "part = 2 OR other = 1", false, true),
            ("part", "part * random() < 1", false, true),
            ("part", "random() < 0.5", false, true),
            ("part", "label = 0", false, true),
            ("part % 2", "part % 2 = 1", false, true),
            ("x", "x < 0.5", true, false),
        ] {
            let whole = format!(
                "SELECT id, part, other, x, {call} OVER (PARTITION BY {keys}) AS label FROM {rows}"
            );
            let sql = format!("SELECT id, part, label FROM ({whole}) WHERE {condition} ORDER BY 1");
            let filters = filtered(&ctx, &sql).await?;
            let is_right = filters == (below, above);
            check(is_right, format!("{call}, {keys}, {condition}: {filters:?}"))?;
            if condition.contains("random") || keys == "x" {
                continue;
            }
            // Nothing is pushed below a limit.
            let limited = format!(
                "SELECT id, part, label FROM ({whole} LIMIT 100000) WHERE {condition} ORDER BY 1"
            );
            let (actual, expected) = (text(&ctx, &sql).await?, text(&ctx, &limited).await?);
            check(actual == expected, format!("{call}, {keys}, {condition}: {actual} {expected}"))?;
        }
    }
    // A condition on a key of both functions is pushed below both.
    let both = "SELECT id, part, kmeans(v, 2, 1) OVER (PARTITION BY part) AS a, dbscan(v, 1, 3) OVER (PARTITION BY part, other) AS b";
    let sql = format!("SELECT id, a, b FROM ({both} FROM {rows}) WHERE part = 3 ORDER BY 1");
    let filters = filtered(&ctx, &sql).await?;
    check(filters == (true, false), format!("both forms: {filters:?}"))?;
    let table_call = "SELECT * FROM kmeans(b, k => 3) WHERE random() < 0.5";
    let filters = filtered(&ctx, table_call).await?;
    check(filters == (false, true), format!("a table function: {filters:?}"))
}

async fn statistics() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(1))?;
    table(&ctx, "b", 400, 4, 1, 100)?;
    table(&ctx, "q", 300, 4, 1, 100)?;
    for (call, name, rows) in [
        ("knn_exact(q, b, 5)", "KnnExec", 1500),
        ("knn_exact(q, b, 5000)", "KnnExec", 120_000),
        ("knn_exact(b, 5000)", "KnnExec", 400 * 399),
        ("knn_exact(q, b, 5) LIMIT 7", "KnnExec", 7),
        ("kmeans(b, k => 3)", "KMeansExec", 400),
        ("kmeans_centroids(b, k => 3)", "KMeansExec", 3),
    ] {
        let plan = ctx.sql(&format!("SELECT * FROM {call}")).await?;
        let plan = plan.create_physical_plan().await?;
        let exec = operator(&plan, name).ok_or("not in the plan")?;
        let computed = StatisticsContext::new().compute(exec.as_ref(), &StatisticsArgs::new())?;
        let columns = (computed.column_statistics.len(), exec.schema().fields().len());
        check(columns.0 == columns.1, format!("{call}: {columns:?}"))?;
        let right = computed.num_rows == Precision::Inexact(rows);
        check(right, format!("{call}: {:?}, not {rows}", computed.num_rows))?;
    }
    Ok(())
}

/// The phases of an operator are all that it books: together they are its computing time and the
/// time in which it waits for its inputs. The next queries are searched in the background.
async fn phases() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new())?;
    table(&ctx, "b", 60_000, 16, 1, 8192)?;
    let knn = ["read_time", "prepare_time", "upload_time", "search_time", "emit_time"];
    let kmeans =
        ["read_time", "prepare_time", "seeding_time", "assign_time", "update_time", "emit_time"];
    let calls: [(&str, &str, &[&str]); 3] = [
        ("knn_exact((SELECT * FROM b WHERE id < 30000), b, k => 10)", "KnnExec", &knn),
        ("kmeans(b, k => 100, max_iterations => 20)", "KMeansExec", &kmeans),
        (
            "(SELECT id, kmeans(v, 9) OVER (PARTITION BY id % 100) AS label FROM b)",
            "KMeansExec",
            &kmeans,
        ),
    ];
    for (call, name, phases) in calls {
        let plan = ctx.sql(&format!("SELECT * FROM {call}")).await?;
        let plan = plan.create_physical_plan().await?;
        collect(plan.clone(), ctx.task_ctx()).await?;
        let exec = operator(&plan, name).ok_or("not in the plan")?;
        let metrics = exec.metrics().ok_or("no metrics")?;
        let time = |name: &str| metrics.sum_by_name(name).map(|time| time.as_usize());
        let times: Vec<_> = phases.iter().map(|phase| (*phase, time(phase))).collect();
        let missing = times.iter().any(|(_, time)| time.is_none());
        let sum: usize = times.iter().filter_map(|(_, time)| *time).sum();
        let booked = metrics.elapsed_compute().unwrap_or(0) + time("read_time").unwrap_or(0);
        // A time counts at least 1 ns when it is added to, also where nothing was done.
        check(
            !missing && sum.abs_diff(booked) < 1000,
            format!("{call} took {booked} ns, its phases {sum} ns: {times:?}"),
        )?;
        let work = if name == "KnnExec" { "search_time" } else { "assign_time" };
        check(time(work) > Some(0), format!("{call}: no {work} in {times:?}"))?;
        let ahead = time("ahead_time").unwrap_or(0);
        check(ahead > 0 || name != "KnnExec", format!("{call}: nothing was searched ahead"))?;
    }
    Ok(())
}

/// Metrics show the progress of k-means while it runs.
async fn progress() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(2))?;
    // Rounds that take far longer than a look at the metrics.
    table(&ctx, "p", 200_000, 24, 1, 100_000)?;
    ctx.sql("SET neighbors.device = 'cpu'").await?.collect().await?;
    let sql = "SELECT * FROM kmeans(p, k => 100, max_iterations => 12, tolerance => 0)";
    let plan = ctx.sql(sql).await?.create_physical_plan().await?;
    let exec = operator(&plan, "KMeansExec").ok_or("a plan without KMeansExec")?;
    let done = || {
        let metrics = exec.metrics()?;
        let of = |name| metrics.sum_by_name(name).map(|value| value.as_usize());
        Some((of("rounds_done")?, of("iterations")))
    };
    let running = tokio::spawn(collect(plan.clone(), ctx.task_ctx()));
    let mut seen = Vec::new();
    while !running.is_finished() {
        seen.extend(done());
        seen.dedup();
        tokio::task::yield_now().await;
    }
    running.await??;
    let (rounds, iterations) = done().ok_or("no metrics")?;
    check(iterations == Some(rounds), format!("{rounds} rounds, {iterations:?} iterations"))?;
    let before = seen.iter().any(|(now, all)| (1..rounds).contains(now) && all.is_none());
    check(before, format!("{rounds} rounds, seen {seen:?}"))
}
