//! What a query waits for: memory, limits, filters, and how EXPLAIN ANALYZE books the time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use datafusion::arrow::array::{ArrayRef, Int64Array, ListArray, RecordBatch};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, Field, Int32Type};
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::execution::memory_pool::GreedyMemoryPool;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_neighbors::register_all;
use libtest_mimic::Failed;

use super::{Test, check, run, session, table, text};
use crate::support::Rng;

/// The tests of this file.
pub const TESTS: [(&str, Test); 2] = [
    ("queries_twenty_times_the_pool", || run(queries_twenty_times_the_pool())),
    ("slices_of_lists_convert_their_own_values", || run(slices_of_lists())),
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

/// 30 MB of queries where 2 MB are free beside the base.
async fn queries_twenty_times_the_pool() -> Result<(), Failed> {
    let folder = tempfile::TempDir::new()?;
    let queries = parquet(&folder, "q", 60_000, 128).await?;
    let base = parquet(&folder, "b", 300, 128).await?;
    let sql = format!(
        "SELECT count(*) AS n, sum(query_id * base_id % 1009) AS pairs, sum(distance) AS far, \
         max(rank) AS last FROM knn_exact(queries => '{queries}', base => '{base}', k => 10)"
    );
    let mut wanted = None;
    for (pool, batch_rows) in [(usize::MAX, 131_072), (2 << 20, 131_072), (2 << 20, 500)] {
        for batch_size in [8192, 500] {
            let pool = Arc::new(GreedyMemoryPool::new(pool));
            let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool).build_arc()?;
            let config = SessionConfig::new().with_target_partitions(1).with_batch_size(batch_size);
            let ctx = SessionContext::new_with_config_rt(config, runtime).enable_url_table();
            register_all(&ctx)?;
            ctx.sql(&format!("SET neighbors.batch_rows = {batch_rows}")).await?.collect().await?;
            let found = text(&ctx, &sql).await?;
            let wanted = wanted.get_or_insert_with(|| found.clone());
            check(found.contains("600000") && found == *wanted, format!("{found} {wanted}"))?;
        }
    }
    Ok(())
}

/// Lists of a type that is converted, each block a small slice of one large batch.
async fn slices_of_lists() -> Result<(), Failed> {
    let (rows, dim) = (20_000, 128);
    let mut rng = Rng(5);
    let values: Vec<_> = (0..rows * dim).map(|_| rng.below(100) as i32).collect();
    let lists = values.chunks(dim).map(|row| Some(row.iter().map(|x| Some(*x))));
    let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists));
    let item = Arc::new(Field::new_list_field(DataType::Int32, true));
    let id: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows as i64));
    let mut wanted = None;
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
        let sql = "SELECT sum(query_id * base_id % 1009), sum(distance), count(*) \
                   FROM knn_exact(q, (SELECT * FROM q WHERE id % 100 = 7), 3)";
        let start = Instant::now();
        let found = text(&ctx, sql).await?;
        let wanted = wanted.get_or_insert_with(|| found.clone());
        check(found == *wanted && found.contains("60000"), format!("{to}: {found} {wanted}"))?;
        // Converted whole for each of 313 slices, this takes many times as long.
        check(start.elapsed() < Duration::from_secs(10), format!("{to}: {:?}", start.elapsed()))?;
    }
    Ok(())
}
