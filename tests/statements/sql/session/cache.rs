//! Bases that stay between statements: what repeats is found, what changed is not, and memory that
//! others need is released.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arrow::array::{RecordBatch, UInt32Array};
use arrow::compute::{concat_batches, take_record_batch};
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryPool};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_neighbors::{AnyDevice, KnnExact, KnnIndex, Metric, register_all};
use futures::StreamExt;
use futures::future::try_join_all;
use libtest_mimic::Failed;
use tempfile::TempDir;

use super::{check, session, table, text};

async fn execute(ctx: &SessionContext, sql: &str) -> Result<()> {
    ctx.sql(sql).await?.collect().await.map(|_| ())
}

/// A number that a statement returns.
async fn number(ctx: &SessionContext, sql: &str) -> Result<i64> {
    let shown = text(ctx, sql).await?;
    let of_line = |line: &str| line.trim_matches(['|', ' ']).parse().ok();
    Ok(shown.lines().filter_map(of_line).next_back().unwrap_or(-1))
}

/// The number of bases in memory, and how often one was found there.
async fn cached(ctx: &SessionContext) -> Result<(i64, i64)> {
    let bases = number(ctx, "SELECT count(*) FROM neighbors_cache()").await?;
    Ok((bases, number(ctx, "SELECT coalesce(sum(hits), 0) FROM neighbors_cache").await?))
}

/// Runs a statement; its answer must be that of a session without a cache over the same tables.
async fn same(ctx: &SessionContext, sql: &str) -> Result<(), Failed> {
    let without = SessionContext::new_with_state(ctx.state());
    execute(&without, "SET neighbors.cache = '0'").await?;
    let (actual, expected) = (text(ctx, sql).await, text(&without, sql).await);
    let shown = |of: &Result<String>| match of {
        Ok(text) => text.clone(),
        Err(error) => error.strip_backtrace(),
    };
    let (actual, expected) = (shown(&actual), shown(&expected));
    check(actual == expected, format!("{sql}:\n{actual}\nnot\n{expected}"))
}

/// Repeated bases: one base with any queries, `k` and columns of its own; each `metric`, element type,
/// filter and projection is another one.
pub async fn repeated() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(3))?;
    table(&ctx, "b", 3000, 6, 3, 100)?;
    execute(&ctx, "CREATE TABLE q AS SELECT id, v FROM b WHERE id < 40").await?;
    execute(&ctx, "CREATE VIEW odd AS SELECT * FROM b WHERE id % 2 = 1").await?;
    let of = |base: &str, rest: &str| {
        format!(
            "SELECT * FROM knn_exact(queries => q, base => {base}, {rest}) ORDER BY query_id, rank"
        )
    };
    // A statement, the number of bases after it, and whether one of them was found.
    let steps = [
        (of("b", "k => 3"), 1, false),
        (of("b", "k => 3"), 1, true),
        (of("b", "k => 7"), 1, true),
        (of("(SELECT * FROM b)", "k => 3"), 1, true),
        (of("b", "k => 3, metric => 'l1'"), 2, false),
        (of("b", "k => 3").replace("=> q", "=> (SELECT id, arrow_cast(v, 'List(Float64)') AS v FROM q)"), 3, false),
        (of("odd", "k => 3"), 4, false),
        (of("(SELECT id, v FROM b WHERE id % 2 = 1)", "k => 3"), 4, true),
        (of("(SELECT id, v FROM b WHERE id % 2 = 0)", "k => 3"), 5, false),
        (of("(SELECT id + 1 AS id, v FROM b)", "k => 3"), 6, false),
        (of("(SELECT id + 2 AS id, v FROM b)", "k => 3"), 7, false),
        ("SELECT * FROM knn_exact(b, k => 2) ORDER BY 1, rank".to_string(), 7, true),
        ("SELECT * FROM knn_lsh(q, b, k => 2, tables => 3, hashes => 2, width => 3) ORDER BY 1, rank".to_string(), 7, true),
        ("SELECT * FROM knn_lsh(q, b, k => 2) ORDER BY 1, rank".to_string(), 7, true),
    ];
    let mut hits = 0;
    for (sql, bases, is_found) in steps {
        same(&ctx, &sql).await?;
        hits += i64::from(is_found);
        let (actual, found) = cached(&ctx).await?;
        check((actual, found) == (bases, hits), format!("{sql}: {actual} bases, {found} hits"))?;
    }
    tables().await?;
    let plan = text(&ctx, &format!("EXPLAIN {}", of("b", "k => 3"))).await?;
    check(plan.contains("base=resident [v]"), plan)?;
    let plan = text(&ctx, &format!("EXPLAIN ANALYZE {}", of("b", "k => 3"))).await?;
    check(plan.contains("base=resident [v] ("), plan)?;
    let other = format!("EXPLAIN ANALYZE {}", of("b", "k => 3, metric => 'sqeuclidean'"));
    let plan = text(&ctx, &other).await?;
    check(plan.contains("base=[v]"), plan)
}

/// Tables of `knn_lsh`: they are found where all parameters are given and the same.
async fn tables() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new())?;
    table(&ctx, "b", 3000, 6, 3, 100)?;
    execute(&ctx, "CREATE TABLE q AS SELECT id, v FROM b WHERE id < 40").await?;
    let given = "tables => 3, hashes => 2, width => 3";
    let planes = "planes => 'trained', tables => 3, hashes => 2, metric => 'cosine'";
    // Each statement is run with and without a cache, and then explained.
    for (rest, is_found) in [
        (given.to_string(), true),
        (format!("{given}, seed => 1"), true),
        (format!("{given}, probes => 4"), true),
        (planes.to_string(), true),
        (format!("{planes}, training => (SELECT * FROM q WHERE array_max(v) > 0)"), true),
        (format!("{planes}, training => (SELECT * FROM q WHERE random() < 2)"), false),
        ("recall => 0.5".to_string(), false),
    ] {
        let valid = "(SELECT * FROM b WHERE array_max(v) > 0)";
        let sql =
            format!("SELECT * FROM knn_lsh(queries => {valid}, base => {valid}, k => 2, {rest})");
        same(&ctx, &format!("{sql} ORDER BY 1, rank, distance, base_id")).await?;
        let shown = text(&ctx, &format!("EXPLAIN ANALYZE {sql}")).await?;
        let index = if is_found { "index=resident" } else { "index=built" };
        check(
            shown.contains("base=resident") && shown.contains(index),
            format!("{rest}: {shown}"),
        )?;
    }
    Ok(())
}

/// Queries that repeat, rows of training and first centroids: they are found from the third, or from
/// the second statement on, until their table changes.
pub async fn other_inputs() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(3))?;
    table(&ctx, "q", 9000, 6, 3, 100)?;
    execute(&ctx, "CREATE TABLE b AS SELECT * FROM q WHERE id % 4 < 2").await?;
    execute(&ctx, "CREATE TABLE c AS SELECT * FROM b WHERE id < 20 AND id % 2 = 1").await?;
    execute(&ctx, "CREATE TABLE short AS SELECT arrow_cast([id, 1], 'List(Float32)') AS v FROM b")
        .await?;
    let all = "SELECT * FROM knn_exact(q, b, k => 3) ORDER BY 1, rank, distance, base_id";
    let grouped = "SELECT base_id % 7, count(*) FROM knn_exact(q, b, k => 3) GROUP BY 1 ORDER BY 1";
    let valid = "(SELECT * FROM b WHERE array_max(v) > 0)";
    let trained = format!(
        "SELECT count(*), sum(distance) FROM knn_lsh({valid}, k => 2, planes => 'trained', tables => 3, \
         hashes => 2, metric => 'cosine', training => (SELECT * FROM c WHERE array_max(v) > 0))"
    );
    let clusters = "SELECT id, cluster_id FROM kmeans(q, k => (SELECT count(*) FROM c WHERE v IS NOT NULL), init => c) ORDER BY 1";
    let k = number(&ctx, "SELECT count(*) FROM c WHERE v IS NOT NULL").await?;
    let clusters = clusters.replace("(SELECT count(*) FROM c WHERE v IS NOT NULL)", &k.to_string());
    // A statement, the number of inputs in memory after it, and how many were found there.
    let steps = [
        (all, 1, 0),
        (all, 2, 1),
        (all, 2, 2),
        // Without `query_id`, these are other queries.
        (grouped, 2, 1),
        (grouped, 3, 1),
        (grouped, 3, 2),
        // Few of the rows are searched.
        ("SELECT query_id FROM knn_exact(q, b, k => 1) LIMIT 5", 4, 0),
        // Parameters are tuned on the stream of queries.
        ("SELECT count(*) FROM knn_lsh(q, b, k => 1, recall => 0.5)", 4, 1),
        ("SELECT * FROM knn_exact(q, short, k => 1)", 5, 1),
        (&trained, 7, 0),
        (&trained, 7, 2),
        (&clusters, 8, 0),
        (&clusters, 8, 1),
        ("SELECT * FROM kmeans(short, k => 2, init => c)", 8, 1),
    ];
    let (mut hits, mut wrong) = (0, String::new());
    for (sql, inputs, found) in steps {
        same(&ctx, sql).await?;
        let (actual, all) = cached(&ctx).await?;
        if (actual, all - hits) != (inputs, found) {
            wrong += &format!("{sql}: {actual} inputs, {} found\n", all - hits);
        }
        hits = all;
    }
    check(wrong.is_empty(), wrong)?;
    // Where both do not fit, queries give way.
    execute(&ctx, "CREATE OR REPLACE TABLE b AS SELECT * FROM b").await?;
    let of_query = "SELECT * FROM knn_exact((SELECT * FROM q WHERE id < 3), b, k => 3) ORDER BY 1, rank, distance, base_id";
    same(&ctx, of_query).await?;
    let bytes =
        number(&ctx, "SELECT host_bytes FROM neighbors_cache ORDER BY last_use DESC LIMIT 1")
            .await?;
    execute(&ctx, &format!("SET neighbors.cache = '{}'", bytes + 60_000)).await?;
    for _ in 0..4 {
        same(&ctx, all).await?;
        let plan = text(&ctx, &format!("EXPLAIN ANALYZE {all}")).await?;
        check(plan.contains("base=resident"), format!("{bytes} bytes: {plan}"))?;
    }
    execute(&ctx, "SET neighbors.cache = 'auto'").await?;
    for change in
        ["INSERT INTO q SELECT * FROM q WHERE id < 5", "INSERT INTO c SELECT * FROM b WHERE id = 2"]
    {
        execute(&ctx, change).await?;
        for sql in [all, grouped, &trained, &clusters, all] {
            same(&ctx, sql).await?;
        }
    }
    Ok(())
}

/// A [`KnnIndex`] as a table: the first statement finds its base prepared.
pub async fn index_as_table() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(3))?;
    table(&ctx, "b", 9000, 6, 3, 100)?;
    execute(&ctx, "CREATE TABLE q AS SELECT id, v FROM b WHERE id < 40").await?;
    let batches = ctx.table("b").await?.collect().await?;
    let one = concat_batches(&batches[0].schema(), &batches)?;
    execute(&ctx, "DROP TABLE b").await?;
    for (batches, device) in [(batches, "cpu"), (vec![one], "auto")] {
        execute(&ctx, &format!("SET neighbors.device = '{device}'")).await?;
        let params = KnnExact::k(3).metric(Metric::SqEuclidean).vector("v");
        let index = KnnIndex::build(&AnyDevice::cpu(), &batches, &params)?;
        // The same rows in arrays of their own.
        let take_all = |batch: &RecordBatch| {
            take_record_batch(batch, &UInt32Array::from_iter_values(0..batch.num_rows() as u32))
        };
        let copies = batches.iter().map(take_all).collect::<std::result::Result<Vec<_>, _>>()?;
        ctx.deregister_table("copy")?;
        let copy = MemTable::try_new(copies[0].schema(), vec![copies])?;
        ctx.register_table("copy", Arc::new(copy))?;
        drop(batches);
        ctx.register_table("i", Arc::new(index.clone()))?;
        // A statement, the number of bases after it, and whether its base was there at first.
        let steps = [
            ("knn_exact(q, i, k => 3, metric => 'sqeuclidean')", 1, true),
            ("knn_exact(q, i, k => 5, metric => 'sqeuclidean')", 1, true),
            ("knn_exact(i, k => 2, metric => 'sqeuclidean')", 1, true),
            ("knn_exact(q, (SELECT v, id FROM i), k => 3, metric => 'sqeuclidean')", 2, false),
            (
                "knn_exact(q, (SELECT * FROM i WHERE id % 2 = 0), k => 3, metric => 'sqeuclidean')",
                3,
                false,
            ),
            ("knn_exact(q, i, k => 3)", 4, false),
        ];
        let without = SessionContext::new_with_state(ctx.state());
        execute(&without, "SET neighbors.cache = '0'").await?;
        let mut wrong = String::new();
        for (from, bases, is_found) in steps {
            let before = cached(&ctx).await?.1;
            let sql = format!("SELECT * FROM {from} ORDER BY query_id, rank, base_id");
            let of_copy = sql.replace("(i,", "(copy,").replace(" i,", " copy,");
            let of_copy = of_copy.replace("FROM i", "FROM copy");
            let (actual, expected) = (text(&ctx, &sql).await?, text(&without, &of_copy).await?);
            check(actual == expected, format!("{sql}:\n{actual}\nnot\n{expected}"))?;
            same(&ctx, &sql).await?;
            let plan = text(&ctx, &format!("EXPLAIN {sql}")).await?;
            let (actual, hits) = cached(&ctx).await?;
            if (actual, hits - before) != (bases, 1 + i64::from(is_found)) {
                wrong += &format!("{sql}: {actual} bases, {} found\n{plan}\n", hits - before);
            }
        }
        check(wrong.is_empty(), wrong)?;
        ctx.deregister_table("i")?;
        check(cached(&ctx).await?.0 > 0, "the index still exists")?;
        drop(index);
        let left = text(&ctx, "SELECT count(*) FROM neighbors_cache").await?;
        check(left.contains("| 0 "), left)?;
    }
    Ok(())
}

/// Inputs that are read every time.
pub async fn never() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let csv = folder.path().join("b.csv");
    std::fs::write(&csv, "id,x,y\n1,0,0\n2,3,4\n3,0,1\n")?;
    let ctx = session(SessionConfig::new())?;
    table(&ctx, "b", 300, 4, 2, 40)?;
    let csv = csv.to_string_lossy();
    execute(&ctx, &format!("CREATE EXTERNAL TABLE c STORED AS CSV LOCATION '{csv}' OPTIONS ('format.has_header' 'true')")).await?;
    for (column, base) in [
        ("id", "knn_exact((SELECT * FROM b WHERE random() < 2), k => 2)"),
        ("u", "knn_exact((SELECT id, v, uuid() AS u FROM b), k => 2)"),
        ("id", "knn_exact((SELECT * FROM b LIMIT 100), k => 2)"),
        ("id", "knn_exact((SELECT * FROM b WHERE id IN (SELECT id + 1 FROM b)), k => 2)"),
        ("id", "knn_exact((SELECT * FROM b WHERE id < (SELECT max(id) FROM b)), k => 2)"),
        ("id", "knn_exact((SELECT min(id) AS id, v FROM b GROUP BY v), k => 2)"),
        ("id", "knn_exact(c, k => 2, vector => ['x', 'y'])"),
    ] {
        for _ in 0..2 {
            execute(&ctx, &format!("SELECT max(base_{column}) FROM {base}")).await?;
        }
        let (bases, _) = cached(&ctx).await?;
        check(bases == 0, format!("{base} stays"))?;
    }
    execute(&ctx, "SET neighbors.cache = '0'").await?;
    execute(&ctx, "SELECT count(*) FROM knn_exact(b, k => 2)").await?;
    check(cached(&ctx).await?.0 == 0, "a base stays in a cache of no bytes")?;
    execute(&ctx, "SET neighbors.cache = '1K'").await?;
    execute(&ctx, "SELECT count(*) FROM knn_exact(b, k => 2)").await?;
    check(cached(&ctx).await?.0 == 0, "a base stays in a cache that is too small")?;
    let with =
        "WITH neighbors_cache AS (SELECT 7 AS a) SELECT max(a) FROM neighbors_cache AS of_with";
    check(number(&ctx, with).await? == 7, "the table hides a CTE")?;
    execute(&ctx, "CREATE VIEW listed AS SELECT count(*) FROM neighbors_cache AS c").await?;
    execute(&ctx, "SET neighbors.cache = 'auto'").await?;
    execute(&ctx, "SELECT count(*) FROM knn_exact(b, k => 2)").await?;
    check(number(&ctx, "SELECT * FROM listed").await? == 1, "a view keeps an old list")?;
    std::fs::write(folder.path().join("short.parquet"), b"PAR1")?;
    let short = folder.path().join("short.parquet");
    let short = short.to_string_lossy();
    let table =
        format!("CREATE EXTERNAL TABLE s (x FLOAT, y FLOAT) STORED AS PARQUET LOCATION '{short}'");
    execute(&ctx, &table).await?;
    let read = execute(&ctx, "SELECT * FROM knn_exact(s, k => 1, vector => ['x', 'y'])").await;
    check(read.is_err(), "four bytes are no Parquet file")?;
    let refused = execute(&ctx, "SET neighbors.cache = 'much'").await.expect_err("no size");
    check(
        refused.to_string().contains("accepted are auto, bytes, or numbers with K, M or G"),
        refused.to_string(),
    )
}

/// Tables that change are never answered from old rows; a dropped table leaves nothing.
pub async fn changed_tables() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(2))?;
    table(&ctx, "b", 500, 4, 2, 64)?;
    let sql = "SELECT * FROM knn_exact((SELECT * FROM b), k => 4) ORDER BY query_id, rank";
    for change in [
        "INSERT INTO b SELECT id + 1000, v FROM b WHERE id < 7",
        "INSERT INTO b SELECT id + 2000, v FROM b WHERE id < 7",
        "CREATE OR REPLACE TABLE b AS SELECT id + 1 AS id, v FROM b",
        "CREATE OR REPLACE TABLE b AS SELECT id, v FROM b WHERE id % 3 > 0",
    ] {
        same(&ctx, sql).await?;
        same(&ctx, sql).await?;
        let (bases, hits) = cached(&ctx).await?;
        check(bases == 1 && hits > 0, format!("{bases} bases, {hits} hits before {change}"))?;
        execute(&ctx, change).await?;
        same(&ctx, sql).await?;
        let (bases, hits) = cached(&ctx).await?;
        check(bases == 1 && hits == 0, format!("{bases} bases, {hits} hits after {change}"))?;
    }
    execute(&ctx, "DROP TABLE b").await?;
    check(cached(&ctx).await?.0 == 0, "a dropped table stays")
}

/// Writes a Parquet file, in place of the same file if it exists, and sets when it was changed.
async fn write(ctx: &SessionContext, rows: &str, path: &Path, changed: SystemTime) -> Result<()> {
    let folder = TempDir::new()?;
    let new = folder.path().join("new.parquet");
    let copy = format!("COPY ({rows}) TO '{}' STORED AS PARQUET", new.to_string_lossy());
    execute(ctx, &copy).await?;
    std::fs::copy(new, path)?;
    Ok(File::options().write(true).open(path)?.set_modified(changed)?)
}

/// Files that change are never answered from old rows, not even if size and time stay the same.
pub async fn changed_files() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let (file, other) = (folder.path().join("1.parquet"), folder.path().join("2.parquet"));
    let writer = session(SessionConfig::new())?;
    table(&writer, "b", 4000, 4, 1, 1000)?;
    let hour_ago = SystemTime::now() - Duration::from_secs(3600);
    let rows = |add: usize| format!("SELECT id + {add} AS id, v FROM b ORDER BY id");
    write(&writer, &rows(0), &file, hour_ago).await?;
    let config = SessionConfig::new()
        .with_target_partitions(3)
        .set_u64("datafusion.optimizer.repartition_file_min_size", 1);
    let ctx = session(config)?.enable_url_table();
    let of_folder = format!("'{}'", folder.path().join("*.parquet").to_string_lossy());
    // DataFusion keeps the listing of a folder: then no base of a file that has changed since stays.
    for (name, is_listed) in [(format!("'{}'", file.to_string_lossy()), false), (of_folder, true)] {
        write(&writer, &rows(0), &file, hour_ago).await?;
        let base = format!("(SELECT * FROM {name} WHERE id % 2 = 0)");
        let sql = format!(
            "SELECT * FROM knn_exact((SELECT * FROM {name} WHERE id < 30), {base}, k => 4) ORDER BY query_id, rank"
        );
        let steps: [(&str, usize, SystemTime, bool); 5] = [
            ("the same", 0, hour_ago, true),
            // Same size, same time: another footer.
            ("another content", 10, hour_ago, false),
            ("another time", 10, hour_ago + Duration::from_secs(1), false),
            ("the same again", 10, hour_ago + Duration::from_secs(1), true),
            ("a smaller file", 100_000_000_000, hour_ago, false),
        ];
        same(&ctx, &sql).await?;
        let mut before = cached(&ctx).await?;
        check(before.0 == 1, format!("{name} does not stay"))?;
        for (what, add, changed, is_found) in steps {
            write(&writer, &rows(add), &file, changed).await?;
            same(&ctx, &sql).await?;
            let after = cached(&ctx).await?;
            let expected = if is_found { before.1 + 1 } else { 0 };
            let is_known = is_listed || after == (1, expected);
            check(is_known, format!("{name}, {what}: {after:?} after {before:?}"))?;
            before = after;
        }
        // A file that is younger than a tick may change within it.
        write(&writer, &rows(7), &file, SystemTime::now()).await?;
        same(&ctx, &sql).await?;
        check(cached(&ctx).await?.0 == 0, format!("{name}: a young file stays"))?;
    }
    // A file more in the folder.
    write(&writer, &rows(0), &file, hour_ago).await?;
    let sql = format!(
        "SELECT * FROM knn_exact('{}', k => 2) ORDER BY query_id, rank",
        folder.path().join("*.parquet").to_string_lossy()
    );
    same(&ctx, &sql).await?;
    write(&writer, &rows(50_000), &other, hour_ago).await?;
    same(&ctx, &sql).await?;
    same(&session(SessionConfig::new())?.enable_url_table(), &sql).await
}

/// A session whose pool has a limit.
fn limited(bytes: usize) -> Result<(SessionContext, Arc<dyn MemoryPool>)> {
    let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(bytes));
    let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool.clone()).build_arc()?;
    let config = SessionConfig::new().with_target_partitions(1);
    let ctx = SessionContext::new_with_config_rt(config, runtime);
    register_all(&ctx)?;
    Ok((ctx, pool))
}

/// Bases are reserved, and give way to operators of DataFusion, to other bases and to a smaller pool;
/// they end with their session.
pub async fn memory() -> Result<(), Failed> {
    const LIMIT: usize = 24 << 20;
    let (ctx, pool) = limited(LIMIT)?;
    table(&ctx, "b", 20_000, 32, 1, 1000)?;
    table(&ctx, "c", 20_000, 32, 1, 1000)?;
    let of = |base: &str| {
        format!(
            "SELECT count(*) AS n FROM knn_exact((SELECT * FROM {base} LIMIT 5), {base}, k => 3)"
        )
    };
    execute(&ctx, &of("b")).await?;
    let held = pool.reserved();
    check(held > 20_000 * 32 * 4 && held < LIMIT / 4, format!("{held} bytes stay"))?;
    let shown = number(&ctx, "SELECT host_bytes FROM neighbors_cache").await?;
    check(shown as usize == held, format!("{shown} bytes shown, {held} reserved"))?;
    // Two do not fit in a quarter of the pool.
    execute(&ctx, &of("c")).await?;
    check(cached(&ctx).await? == (1, 0), "the older one stays")?;
    execute(&ctx, "SET neighbors.cache = '12M'").await?;
    execute(&ctx, &of("b")).await?;
    execute(&ctx, &of("c")).await?;
    check(cached(&ctx).await?.0 == 2, "two bases stay in 12M")?;
    // Joins that need up to the whole pool, and cannot spill.
    let (alone, _) = limited(LIMIT)?;
    let (mut answered, mut refused) = (0, 0);
    for rows in (1..40).map(|i| i * 50_000) {
        let join = format!(
            "SELECT count(*) FROM range(0, {rows}) a JOIN range(0, {rows}) b ON a.value = b.value"
        );
        execute(&ctx, &of("b")).await?;
        execute(&ctx, &of("c")).await?;
        let (without, with) = (number(&alone, &join).await, number(&ctx, &join).await);
        match (without, with) {
            (Ok(expected), Ok(actual)) if expected == actual => answered += 1,
            (Err(_), _) => refused += 1,
            (Ok(_), with) => return Err(format!("{rows} rows: {with:?}").into()),
        }
        if refused > 0 {
            break;
        }
    }
    check(answered > 0 && refused > 0, format!("{answered} answered, {refused} refused"))?;
    check(cached(&ctx).await?.0 < 2, "nothing was evicted")?;
    // The pool is replaced.
    for limit in ["16M", "20M"] {
        execute(&ctx, &of("b")).await?;
        execute(&ctx, &format!("SET datafusion.runtime.memory_limit = '{limit}'")).await?;
        execute(&ctx, &of("b")).await?;
        check(pool.reserved() == 0, format!("{} bytes stay in the old pool", pool.reserved()))?;
        execute(&ctx, &of("b")).await?;
        execute(&ctx, &of("b")).await?;
        let found = cached(&ctx).await?;
        check(found.0 == 1 && found.1 > 0, format!("the cache is lost with {limit}: {found:?}"))?;
    }
    let pool = ctx.runtime_env().memory_pool.clone();
    check(pool.reserved() > 0, "nothing is reserved")?;
    let plan = ctx.sql(&of("b")).await?.create_physical_plan().await?;
    drop(ctx);
    check(pool.reserved() == 0, "bases outlive their session")?;
    // A plan of that session still runs, without a cache.
    let (other, _) = limited(LIMIT)?;
    let rows = datafusion::physical_plan::collect(plan, other.task_ctx()).await?;
    check(rows.len() == 1 && rows[0].num_rows() == 1, "no answer")
}

/// Many callers at once, with tables that change and statements that are given up.
pub async fn callers() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(2))?;
    table(&ctx, "b", 4000, 8, 2, 500)?;
    table(&ctx, "c", 4000, 8, 2, 500)?;
    let expected = {
        let ctx = session(SessionConfig::new())?;
        execute(&ctx, "SET neighbors.cache = '0'").await?;
        table(&ctx, "b", 4000, 8, 2, 500)?;
        text(
            &ctx,
            "SELECT * FROM knn_exact((SELECT * FROM b WHERE id < 9), b, k => 5) ORDER BY 1, rank",
        )
        .await?
    };
    let call = |i: usize| {
        let (ctx, expected) = (ctx.clone(), expected.clone());
        async move {
            let base = ["b", "c"][i % 2];
            let sql = format!(
                "SELECT * FROM knn_exact((SELECT * FROM {base} WHERE id < 9), {base}, k => 5) ORDER BY 1, rank"
            );
            for round in 0..10 {
                match (i + round) % 5 {
                    // Given up after the first batch, or before.
                    0 => {
                        let all = format!("SELECT * FROM knn_exact({base}, k => 5)");
                        let mut stream = ctx.sql(&all).await?.execute_stream().await?;
                        if round % 2 == 0 {
                            stream.next().await.transpose()?;
                        }
                    }
                    1 if i == 1 => {
                        let limit = if round % 2 == 0 { "auto" } else { "300K" };
                        execute(&ctx, &format!("SET neighbors.cache = '{limit}'")).await?;
                    }
                    _ => {
                        let actual = text(&ctx, &sql).await?;
                        if actual != expected {
                            return Err(datafusion::error::DataFusionError::Internal(actual));
                        }
                    }
                }
            }
            Ok(())
        }
    };
    try_join_all((0..16).map(|i| tokio::spawn(call(i))))
        .await?
        .into_iter()
        .collect::<Result<()>>()?;
    execute(&ctx, "SET neighbors.cache = 'auto'").await?;
    for _ in 0..2 {
        same(&ctx, "SELECT * FROM knn_exact(b, k => 5) ORDER BY 1, rank").await?;
    }
    check(cached(&ctx).await?.1 > 0, "nothing was found")
}
