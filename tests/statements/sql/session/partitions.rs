//! The output partitions of a search: concatenated, they are the output of a single one.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryPool};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_neighbors::plan::KnnExec;
use datafusion_neighbors::register_all;
use futures::future::try_join_all;
use futures::{StreamExt, TryStreamExt};
use libtest_mimic::Failed;

use super::waiting::operator;
use super::{check, session, table, text};
use crate::support::DEADLINE;

/// The order in which partitions are executed and read.
#[derive(Debug, Clone, Copy)]
enum Reading {
    AtOnce,
    OneByOne,
    LastFirst,
}

const READINGS: [Reading; 3] = [Reading::AtOnce, Reading::OneByOne, Reading::LastFirst];

/// The rows of each partition.
async fn rows(
    ctx: &SessionContext,
    plan: &Arc<dyn ExecutionPlan>,
    reading: Reading,
) -> Result<Vec<RecordBatch>> {
    let partitions = plan.output_partitioning().partition_count();
    let context = &ctx.task_ctx();
    let one = |partition| async move {
        let batches = plan.execute(partition, context.clone())?.try_collect::<Vec<_>>().await?;
        Ok::<_, DataFusionError>(concat_batches(&plan.schema(), &batches)?)
    };
    let read = async {
        let mut read = Vec::new();
        match reading {
            Reading::AtOnce => read = try_join_all((0..partitions).map(one)).await?,
            Reading::OneByOne => {
                for partition in 0..partitions {
                    read.push(one(partition).await?);
                }
            }
            Reading::LastFirst => {
                for partition in (0..partitions).rev() {
                    read.insert(0, one(partition).await?);
                }
            }
        }
        Ok(read)
    };
    match tokio::time::timeout(DEADLINE, read).await {
        Ok(read) => read,
        Err(_) => Err(DataFusionError::Execution(format!("it hangs, read {reading:?}"))),
    }
}

/// The search of a statement.
async fn search(ctx: &SessionContext, sql: &str) -> Result<Arc<dyn ExecutionPlan>, Failed> {
    let plan = ctx.sql(sql).await?.create_physical_plan().await?;
    Ok(operator(&plan, "KnnExec").ok_or("a plan without KnnExec")?.clone())
}

/// The same search in several partitions.
fn split(plan: &Arc<dyn ExecutionPlan>, partitions: usize) -> Result<Arc<dyn ExecutionPlan>> {
    let search = plan.downcast_ref::<KnnExec>();
    let search = search.ok_or_else(|| DataFusionError::Internal("no KnnExec".to_string()))?;
    Ok(Arc::new(search.with_partitions(partitions)?))
}

const QUERIES: &str = "(SELECT id, CASE WHEN id % 7 = 3 THEN NULL ELSE v END AS v FROM q)";

/// Any partitions, read in any order, of searches of every kind.
pub async fn concatenated() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(2))?;
    table(&ctx, "q", 30_000, 3, 3, 700)?;
    table(&ctx, "b", 20_000, 3, 2, 1000)?;
    table(&ctx, "few", 900, 3, 1, 100)?;
    table(&ctx, "tiny", 20, 3, 1, 7)?;
    table(&ctx, "none", 0, 3, 1, 100)?;
    let closed = "tables => 3, hashes => 4, width => 4";
    for (sql, filled) in [
        (format!("knn_exact(queries => {QUERIES}, base => few, k => 4)"), 4),
        ("knn_exact(b, k => 3)".to_string(), 3),
        ("knn_exact(queries => q, base => tiny, k => 2000, metric => 'sqeuclidean')".to_string(), 4),
        (format!("knn_lsh(queries => {QUERIES}, base => b, k => 2, {closed})"), 4),
        (format!("knn_lsh(b, k => 2, {closed})"), 3),
        (format!("knn_lsh(queries => {QUERIES}, base => few, k => 2, recall => 0.8)"), 4),
        ("knn_exact(queries => few, base => b, k => 2)".to_string(), 1),
        ("knn_exact(queries => q, base => none, k => 2)".to_string(), 0),
        ("knn_exact(queries => none, base => b, k => 2)".to_string(), 0),
        ("knn_exact(queries => (SELECT id, arrow_cast(v, 'List(Float64)') AS v FROM q), base => few, k => 1, metric => 'l1')".to_string(), 4),
    ] {
        let plan = search(&ctx, &format!("SELECT * FROM {sql}")).await?;
        let whole = rows(&ctx, &plan, Reading::AtOnce).await?;
        for (partitions, reading) in [2, 4, 9].into_iter().zip(READINGS) {
            let several = split(&plan, partitions)?;
            // A plan may be executed again.
            for _ in 0..if partitions == 2 { 2 } else { 1 } {
                let read = rows(&ctx, &several, reading).await?;
                let all = concat_batches(&plan.schema(), &read)?;
                let shown = format!("{sql}: {partitions} partitions, {reading:?}");
                check(all == whole[0], shown.clone())?;
                let full = read.iter().filter(|rows| rows.num_rows() > 0).count();
                check(full == filled.min(partitions), format!("{shown}: {full} have rows"))?;
            }
        }
    }
    Ok(())
}

/// A pool that has no room for all queries, or for lists of all partitions.
pub async fn memory() -> Result<(), Failed> {
    let tables = |ctx: &SessionContext| {
        table(ctx, "q", 30_000, 3, 2, 500)?;
        table(ctx, "few", 500, 3, 1, 100)
    };
    let unlimited = session(SessionConfig::new())?;
    tables(&unlimited)?;
    for (bytes, sql, filled) in [
        (32 << 20, "knn_exact(queries => q, base => few, k => 5)", 3),
        (3 << 20, "knn_exact(queries => q, base => few, k => 5)", 1),
        (64 << 20, "knn_exact(q, k => 5)", 3),
        (7 << 20, "knn_exact(q, k => 40)", 1),
    ] {
        let pool = Arc::new(GreedyMemoryPool::new(bytes));
        let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool.clone()).build_arc()?;
        let ctx = SessionContext::new_with_config_rt(SessionConfig::new(), runtime);
        register_all(&ctx)?;
        ctx.sql("SET neighbors.cache = '0'").await?.collect().await?;
        tables(&ctx)?;
        let sql = format!("SELECT * FROM {sql}");
        let whole = rows(&unlimited, &search(&unlimited, &sql).await?, Reading::AtOnce).await?;
        for reading in READINGS {
            let several = split(&search(&ctx, &sql).await?, 3)?;
            let read = rows(&ctx, &several, reading).await?;
            let full = read.iter().filter(|rows| rows.num_rows() > 0).count();
            check(full == filled, format!("{sql} in {bytes} bytes: {full} have rows"))?;
            check(
                concat_batches(&several.schema(), &read)? == whole[0],
                format!("{sql}: {bytes}"),
            )?;
            drop(several);
            check(pool.reserved() == 0, format!("{} bytes stay reserved", pool.reserved()))?;
        }
    }
    Ok(())
}

/// Statements whose rows are repartitioned, and others.
pub async fn plans() -> Result<(), Failed> {
    let config = SessionConfig::new().with_target_partitions(3);
    let ctx = session(config)?;
    table(&ctx, "q", 30_000, 3, 2, 700)?;
    table(&ctx, "few", 900, 3, 1, 100)?;
    for (sql, partitions) in [
        ("SELECT base_id % 5, count(*) FROM knn_exact(q, few, 4) GROUP BY 1", 3),
        ("SELECT base_id % 5, count(*) FROM knn_exact(q, few, 4) WHERE rank > 1 GROUP BY 1", 3),
        ("SELECT count(*) FROM knn_exact(q, k => 2) a JOIN few ON a.base_id = few.id", 3),
        // The rows are collected.
        ("SELECT count(*) FROM knn_exact(q, k => 2) a JOIN q ON a.base_id = q.id", 1),
        ("SELECT base_id % 5, count(*) FROM knn_exact(few, k => 4) GROUP BY 1", 1),
        (
            "SELECT count(*) FROM (SELECT base_id FROM knn_exact(q, few, 4) LIMIT 9000) GROUP BY base_id",
            1,
        ),
        ("SELECT base_id, rank FROM knn_exact(q, few, 4)", 1),
        ("SELECT * FROM knn_exact(q, few, 4) ORDER BY distance LIMIT 4", 1),
    ] {
        let search = search(&ctx, sql).await?;
        let actual = search.output_partitioning().partition_count();
        let shown = text(&ctx, &format!("EXPLAIN {sql}")).await?;
        check(actual == partitions, format!("{sql}: {actual} partitions\n{shown}"))?;
    }
    let sql = "SELECT base_id % 5 AS g, count(*) AS n, sum(rank) AS r FROM knn_exact(q, few, 4) \
               GROUP BY 1 ORDER BY 1";
    let actual = text(&ctx, sql).await?;
    let other = session(SessionConfig::new().with_target_partitions(1))?;
    table(&other, "q", 30_000, 3, 2, 700)?;
    table(&other, "few", 900, 3, 1, 100)?;
    check(actual == text(&other, sql).await?, actual)?;
    let shown = text(&ctx, &format!("EXPLAIN ANALYZE {sql}")).await?;
    for part in ["partitions=3", "base_rows=900", "query_rows=30.00 K", "output_rows=120.0 K"] {
        check(shown.contains(part), format!("{part} missing in {shown}"))?;
    }
    Ok(())
}

/// A query of another length fails all partitions, and a partition that is dropped no other one.
pub async fn failures() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new())?;
    table(&ctx, "q", 30_000, 3, 1, 700)?;
    table(&ctx, "few", 900, 3, 1, 100)?;
    let ragged =
        "(SELECT id, CASE WHEN id = 20000 THEN [1.0] ELSE [1.0, 2.0, 3.0] END AS v FROM q)";
    let sql = format!("SELECT * FROM knn_exact(queries => {ragged}, base => few, k => 1)");
    let several = split(&search(&ctx, &sql).await?, 3)?;
    let context = ctx.task_ctx();
    for partition in 0..3 {
        let mut batches = several.execute(partition, context.clone())?;
        let error = match tokio::time::timeout(DEADLINE, batches.next()).await {
            Ok(Some(Err(error))) => error.to_string(),
            other => return Err(format!("partition {partition}: {other:?}").into()),
        };
        check(error.contains("row 20000 of queries"), error)?;
    }
    let plan = search(&ctx, "SELECT * FROM knn_exact(q, k => 2)").await?;
    let whole = rows(&ctx, &plan, Reading::AtOnce).await?;
    let several = split(&plan, 3)?;
    let streams = (0..3).map(|partition| several.execute(partition, context.clone()));
    let mut streams = streams.collect::<Result<Vec<_>>>()?;
    // The second one holds the turn or waits for it.
    let first = tokio::time::timeout(DEADLINE, streams[1].next()).await?;
    check(matches!(first, Some(Ok(_))), "no first batch")?;
    drop(streams.remove(1));
    let last = tokio::time::timeout(DEADLINE, streams.remove(1).try_collect::<Vec<_>>()).await??;
    let last = concat_batches(&plan.schema(), &last)?;
    let start = whole[0].num_rows() - last.num_rows();
    check(last == whole[0].slice(start, last.num_rows()), "other rows")
}
