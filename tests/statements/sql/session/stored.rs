//! Indexes as tables: searches find the same neighbours as with tables built for the query, for any
//! plan, element type and memory limit. Indexes stay in memory, and are released on demand.

use std::sync::Arc;

use datafusion::common::plan_datafusion_err;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryPool};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_neighbors::register_all;
use libtest_mimic::Failed;
use tempfile::TempDir;

use super::{check, session, text};
use crate::support::{DEADLINE, until};

/// Kinds of hash tables: a metric, the options of an index, and the same options as arguments.
const KINDS: [(&str, &str, &str); 9] = [
    (
        "l2",
        "'lsh.tables' '5', 'lsh.hashes' '4', 'lsh.width' '1.5', 'lsh.rounding' 'zero'",
        "tables => 5, hashes => 4, width => 1.5, rounding => 'zero'",
    ),
    (
        "sqeuclidean",
        "'lsh.tables' '3', 'lsh.hashes' '2', 'lsh.width' '2', 'lsh.probes' '3'",
        "tables => 3, hashes => 2, width => 2, probes => 3",
    ),
    (
        "l1",
        "'lsh.tables' '4', 'lsh.hashes' '2', 'lsh.width' '9', 'lsh.seed' '4'",
        "tables => 4, hashes => 2, width => 9, seed => 4",
    ),
    ("cosine", "'lsh.tables' '4', 'lsh.hashes' '5'", "tables => 4, hashes => 5"),
    (
        "pearson",
        "'lsh.tables' '4', 'lsh.hashes' '3', 'lsh.planes' 'orthogonal', 'lsh.probes' '2'",
        "tables => 4, hashes => 3, planes => 'orthogonal', probes => 2",
    ),
    (
        "l2",
        "'lsh.family' 'hyperplane', 'lsh.tables' '2', 'lsh.hashes' '4', 'lsh.planes' 'trained', 'lsh.box_radius' '0.7'",
        "family => 'hyperplane', tables => 2, hashes => 4, planes => 'trained', box_radius => 0.7",
    ),
    (
        "cosine",
        "'lsh.tables' '2', 'lsh.hashes' '3', 'lsh.planes' 'trained', 'lsh.centre' 'true', 'lsh.box_radius' '0.3'",
        "tables => 2, hashes => 3, planes => 'trained', centre => true, box_radius => 0.3",
    ),
    (
        "hamming",
        "'lsh.tables' '6', 'lsh.hashes' '7', 'lsh.probes' '4'",
        "tables => 6, hashes => 7, probes => 4",
    ),
    ("jaccard", "'lsh.tables' '6', 'lsh.hashes' '2'", "tables => 6, hashes => 2"),
];

/// Vector types of the base and of the queries.
const TYPES: [(&str, &str); 4] = [
    ("List(Float32)", "List(Float32)"),
    ("FixedSizeList(4 x Float64)", "List(Float32)"),
    ("List(Float16)", "LargeList(Float64)"),
    ("LargeList(Int32)", "List(Float32)"),
];

fn rows(first: usize, count: usize, list_type: &str) -> String {
    // Integers, which all types hold.
    format!(
        "SELECT value AS id, 'row ' || value AS title, value % 3 AS price, \
         arrow_cast(chr(33 + value * 7 % 90) || chr(40 + value * 31 % 80) || chr(33 + value % 9), 'Binary') AS b, \
         CASE WHEN value % 31 = 5 THEN NULL ELSE arrow_cast([value % 7 + 1, value * 13 % 11, value * 5 % 8, value * 3 % 4 + 12], '{list_type}') END AS v \
         FROM range({first}, {})",
        first + count
    )
}

async fn execute(ctx: &SessionContext, sql: &str) -> Result<()> {
    ctx.sql(sql).await?.collect().await.map(|_| ())
}

/// Writes a table as an index and opens it.
async fn index(
    ctx: &SessionContext,
    name: &str,
    of: &str,
    folder: &TempDir,
    options: &str,
) -> Result<()> {
    let file = folder.path().join(format!("{name}.lsh"));
    let file = file.to_string_lossy();
    execute(ctx, &format!("COPY {of} TO '{file}' STORED AS LSH OPTIONS ({options})")).await?;
    execute(ctx, &format!("DROP TABLE IF EXISTS {name}")).await?;
    execute(ctx, &format!("CREATE EXTERNAL TABLE {name} STORED AS LSH LOCATION '{file}'")).await
}

/// All kinds of hash tables and vector types, with and without queries, filtered or not.
pub async fn as_built() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    for (i, (of_base, of_queries)) in TYPES.into_iter().enumerate() {
        let ctx = session(SessionConfig::new().with_target_partitions(1 + i))?;
        execute(&ctx, &format!("CREATE TABLE items AS {}", rows(0, 500, of_base))).await?;
        execute(&ctx, &format!("CREATE TABLE queries AS {}", rows(777, 60, of_queries))).await?;
        for (metric, options, arguments) in KINDS {
            let vector = if matches!(metric, "hamming" | "jaccard") { "b" } else { "v" };
            let options = format!("'lsh.metric' '{metric}', 'lsh.vector' '{vector}', {options}");
            index(&ctx, "stored", "items", &folder, &options).await?;
            let with = format!("k => 3, metric => '{metric}', vector => '{vector}'");
            let is_of_rows = arguments.contains("trained");
            for some in ["", "WHERE price = 1 AND id > 40", "WHERE id % 2 = 0"] {
                // Planes trained on the rows differ if rows are left out.
                if is_of_rows && !some.is_empty() {
                    continue;
                }
                for queries in ["", "queries => queries, "] {
                    let call = |base: &str, arguments: &str| {
                        format!(
                            "SELECT query_id, base_id, base_title, rank, distance FROM knn_lsh({queries}base => (SELECT * FROM {base} {some}), {with}{arguments}) ORDER BY query_id, rank"
                        )
                    };
                    let expected = text(&ctx, &call("items", &format!(", {arguments}"))).await?;
                    let actual = text(&ctx, &call("stored", "")).await?;
                    check(
                        actual == expected,
                        format!(
                            "{of_base}: {options} {some} {queries}:\n{actual}\nbut built\n{expected}"
                        ),
                    )?;
                    let plan = text(&ctx, &format!("EXPLAIN {}", call("stored", ""))).await?;
                    check(plan.contains("index="), format!("no index is used:\n{plan}"))?;
                }
            }
        }
    }
    Ok(())
}

/// The file is the same, byte for byte, for any number of partitions; shells can validate options.
pub async fn one_file() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let mut files = Vec::new();
    for (partitions, batch) in [(1, "8192"), (2, "100"), (7, "1000")] {
        let config = SessionConfig::new().with_target_partitions(partitions);
        let ctx =
            session(config.set_str("datafusion.execution.batch_size", batch))?.enable_url_table();
        let parts = folder.path().join("parts");
        for (name, first) in [("b", 0), ("a", 9000)].into_iter().filter(|_| files.is_empty()) {
            let rows = rows(first, 7000, "List(Float32)");
            execute(&ctx, &format!("COPY ({rows}) TO '{}/{name}.parquet'", parts.display()))
                .await?;
        }
        let file = folder.path().join(format!("{partitions}.lsh"));
        let of = format!("(SELECT id, title, v FROM '{}/' WHERE price < 2)", parts.display());
        execute(&ctx, &format!("COPY {of} TO '{}' STORED AS LSH", file.display())).await?;
        files.push(std::fs::read(file)?);
        let mut options = ctx.state().default_table_options();
        options.set("lsh.tables", "5")?;
        check(options.set("lsh.trees", "5").is_err(), "an unknown option")?;
    }
    check(files.windows(2).all(|pair| pair[0] == pair[1]), "another file")
}

/// The answer is the same for every plan that reads the index's rows.
pub async fn plans() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let options = "'lsh.vector' 'v', 'lsh.tables' '5', 'lsh.hashes' '3', 'lsh.width' '3'";
    let arguments = "tables => 5, hashes => 3, width => 3";
    for (partitions, order) in [(1, "exact"), (4, "exact"), (4, "any")] {
        let config = SessionConfig::new().with_target_partitions(partitions);
        let ctx = session(config)?;
        execute(&ctx, &format!("SET neighbors.input_order = '{order}'")).await?;
        execute(&ctx, &format!("CREATE TABLE items AS {}", rows(0, 3000, "List(Float32)"))).await?;
        execute(&ctx, &format!("CREATE TABLE queries AS {}", rows(5000, 40, "List(Float32)")))
            .await?;
        index(&ctx, "stored", "(SELECT * FROM items ORDER BY id)", &folder, options).await?;
        execute(&ctx, "CREATE VIEW seen AS SELECT v AS place, id * 2 AS twice, id, price FROM stored WHERE price > 0").await?;
        let of = |base: &str| {
            format!("FROM knn_lsh(queries => (SELECT id, v FROM queries), base => {base}, k => 4")
        };
        for (base, plain) in [
            ("(SELECT v, id, price FROM stored WHERE price > 0)", "price > 0"),
            (
                "(SELECT x.v, x.id FROM stored AS x WHERE x.price + x.id % 2 > 1)",
                "price + id % 2 > 1",
            ),
            (
                "(SELECT * FROM (SELECT v, id, title || '!' AS t FROM stored WHERE id > 9) WHERE t LIKE '%1!')",
                "id > 9 AND title LIKE '%1'",
            ),
            ("(SELECT v, id FROM stored WHERE array_length(v) = 4 AND v[1] < 4)", "v[1] < 4"),
            (
                "(SELECT id, v FROM stored WHERE id > (SELECT avg(id) FROM queries) / 3)",
                "id > (SELECT avg(id) FROM queries) / 3",
            ),
            (
                "(WITH few AS (SELECT id, v FROM stored WHERE id < 1000) SELECT * FROM few WHERE id >= 100)",
                "id < 1000 AND id >= 100",
            ),
        ] {
            let columns = "SELECT query_id, base_id, rank, distance";
            let stored_sql = format!(
                "{columns} {}, base_vector => 'v', query_vector => 'v') ORDER BY 1, 3",
                of(base)
            );
            let base = format!("(SELECT id, v FROM items WHERE {plain} ORDER BY id)");
            let built_sql = format!("{columns} {}, {arguments}) ORDER BY 1, 3", of(&base));
            let plan = text(&ctx, &format!("EXPLAIN {stored_sql}")).await?;
            check(
                plan.contains("index="),
                format!("{partitions}, {order}: no index is used:\n{plan}"),
            )?;
            let (actual, expected) =
                (text(&ctx, &stored_sql).await?, text(&ctx, &built_sql).await?);
            // A memory table's rows may be reordered above a subquery: with 'any', other rows may
            // win ties.
            let may_differ = order == "any" && plain.contains("SELECT");
            check(
                actual == expected || may_differ,
                format!("{partitions}, {order}, {plain}:\n{actual}\nbut built\n{expected}"),
            )?;
        }
        let stored_sql = format!(
            "SELECT query_id, base_twice / 2 AS id, rank {}, base_vector => 'place', query_vector => 'v') ORDER BY 1, 3",
            of("seen")
        );
        let built_sql = format!(
            "SELECT query_id, base_id AS id, rank {}, {arguments}) ORDER BY 1, 3",
            of("(SELECT id, v FROM items WHERE price > 0 ORDER BY id)")
        );
        check(text(&ctx, &stored_sql).await? == text(&ctx, &built_sql).await?, "a view")?;
        // Reordered or repeated rows, or other vectors, are not those of the index.
        for base in [
            "(SELECT id, v FROM stored ORDER BY price, id)",
            "(SELECT id, v FROM stored UNION ALL SELECT id, v FROM stored)",
            "(SELECT id, array_reverse(v) AS v FROM stored)",
            "(SELECT s.id, s.v FROM stored s JOIN queries q ON s.id = q.id)",
            "(SELECT max(id) AS id, v FROM stored GROUP BY v)",
        ] {
            let call = format!("SELECT * {}, {arguments})", of(base));
            let plan = text(&ctx, &format!("EXPLAIN {call}")).await?;
            check(!plan.contains("index="), format!("an index is used:\n{plan}"))?;
            execute(&ctx, &call).await?;
        }
    }
    Ok(())
}

/// A session with a memory pool of `bytes` bytes, and the pool.
fn limited(bytes: usize) -> Result<(SessionContext, Arc<dyn MemoryPool>)> {
    let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(bytes));
    let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool.clone()).build_arc()?;
    let ctx = SessionContext::new_with_config_rt(SessionConfig::new(), runtime);
    register_all(&ctx)?;
    Ok((ctx, pool))
}

const OPTIONS: &str = "'lsh.vector' 'v', 'lsh.tables' '40', 'lsh.hashes' '3', 'lsh.width' '3'";

const CALL: &str = "SELECT sum(base_id * rank), sum(distance), count(*) FROM knn_lsh(queries => (SELECT id, v FROM stored WHERE id < 50), base => stored, k => 4, vector => 'v')";

/// An index is loaded once, counted in the pool, and released when memory is needed or the table is
/// dropped.
pub async fn residence() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let (ctx, pool) = limited(24 << 20)?;
    let items = format!("({})", rows(0, 20_000, "List(Float32)"));
    index(&ctx, "stored", &items, &folder, OPTIONS).await?;
    check(
        pool.reserved() == 0,
        format!("{} bytes for an index that is not used", pool.reserved()),
    )?;
    let expected = text(&ctx, CALL).await?;
    let held = pool.reserved();
    check(held > 20_000 * 40 * 12, format!("only {held} bytes are counted"))?;
    let shown = text(&ctx, &format!("EXPLAIN ANALYZE {CALL}")).await?;
    check(shown.contains("(resident)"), format!("it is loaded again:\n{shown}"))?;
    check(text(&ctx, CALL).await? == expected, "another answer")?;
    check(pool.reserved() == held, format!("{held} bytes, then {}", pool.reserved()))?;
    // More memory than is free beside the index.
    let large = format!(
        "SELECT count(*) FROM knn_exact(queries => ({}), base => ({}), k => 1, vector => 'v')",
        rows(0, 10, "List(Float64)"),
        rows(0, 300_000, "List(Float64)")
    );
    execute(&ctx, "SET neighbors.device = 'cpu'").await?;
    // Memory here is of no use to a session of another pool.
    let (other, _) = limited(1 << 20)?;
    check(text(&other, &large).await.is_err(), "a small pool holds a large base")?;
    check(pool.reserved() == held, "another session's pool has taken the index")?;
    execute(&ctx, &large).await?;
    check(pool.reserved() < held, "nothing was given up")?;
    // Joins that need up to the whole pool, and cannot spill.
    let (alone, _) = limited(24 << 20)?;
    let mut has_given_way = false;
    for rows in (1..20).map(|i| i * 100_000) {
        let join = format!(
            "SELECT count(*) FROM range(0, {rows}) a JOIN range(0, {rows}) b ON a.value = b.value"
        );
        check(text(&ctx, CALL).await? == expected, "another answer")?;
        let Ok(without) = text(&alone, &join).await else { break };
        check(text(&ctx, &join).await? == without, format!("another answer of {rows} rows"))?;
        has_given_way |= pool.reserved() < held;
    }
    check(has_given_way, "no join needed the memory of the index")?;
    execute(&ctx, &large).await?;
    let shown = text(&ctx, &format!("EXPLAIN ANALYZE {CALL}")).await?;
    check(shown.contains("(loaded)"), format!("it was given up, but\n{shown}"))?;
    check(text(&ctx, CALL).await? == expected, "another answer after it was given up")?;
    execute(&ctx, "DROP TABLE stored").await?;
    check(pool.reserved() == 0, format!("{} bytes for a table that is gone", pool.reserved()))
}

/// If memory does not hold all hash tables, they are loaded in turn, and the answer is the same.
pub async fn table_by_table() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let (ctx, _) = limited(1 << 30)?;
    let items = format!("({})", rows(0, 20_000, "List(Float32)"));
    let boxes = "'lsh.vector' 'v', 'lsh.family' 'hyperplane', 'lsh.planes' 'orthogonal', 'lsh.tables' '30', 'lsh.hashes' '4', 'lsh.box_radius' '0.5'";
    let scored = "'lsh.vector' 'b', 'lsh.metric' 'hamming', 'lsh.method' 'ewh', 'lsh.tables' '40', 'lsh.bits' '12', 'lsh.score' '11'";
    let near = "'lsh.vector' 'v', 'lsh.family' 'hyperplane', 'lsh.tables' '40', 'lsh.hashes' '1', 'lsh.probes' '2'";
    let files = [("stored", OPTIONS), ("boxes", boxes), ("scored", scored), ("near", near)];
    for (name, options) in files {
        index(&ctx, name, &items, &folder, options).await?;
    }
    let sums = "SELECT sum(base_id * rank), sum(query_id), sum(distance), count(*) FROM knn_lsh";
    let statements = [
        CALL.to_string(),
        format!(
            "{sums}(base => (SELECT * FROM stored WHERE price = 1), k => 3, vector => 'v', tables => 30)"
        ),
        format!(
            "{sums}(queries => (SELECT id, v FROM boxes WHERE id < 90), base => boxes, k => 3, vector => 'v')"
        ),
        format!(
            "{sums}(queries => (SELECT id, v FROM stored), base => (SELECT * FROM stored WHERE id < 0), k => 3, vector => 'v', recall => 0.9)"
        ),
        format!(
            "{sums}(queries => (SELECT id, b FROM scored WHERE id < 9), base => scored, k => 3, vector => 'b', tables => 2)"
        ),
        // The queries are far away: many distances are equal in float32.
        format!(
            "{sums}(queries => (SELECT id, arrow_cast([0, 0, 0, 3000000], 'List(Float32)') AS v FROM near WHERE id < 3), base => near, k => 4, vector => 'v')"
        ),
    ];
    let (small, pool) = limited(7 << 20)?;
    for (name, _) in files {
        let file = folder.path().join(format!("{name}.lsh"));
        let location = file.display();
        execute(
            &small,
            &format!("CREATE EXTERNAL TABLE {name} STORED AS LSH LOCATION '{location}'"),
        )
        .await?;
    }
    let shown = text(&small, &format!("EXPLAIN ANALYZE {CALL}")).await?;
    check(shown.contains("(table by table)"), format!("there is memory for all:\n{shown}"))?;
    for sql in statements {
        let (actual, expected) = (text(&small, &sql).await?, text(&ctx, &sql).await?);
        check(actual == expected, format!("{sql}:\n{actual}\nbut with all tables\n{expected}"))?;
    }
    let all = format!(
        "{sums}(queries => (SELECT id, b FROM scored WHERE id < 9), base => scored, k => 3, vector => 'b')"
    );
    let refused = text(&small, &all).await.err().map(|error| error.to_string());
    let says = refused.as_ref().is_some_and(|error| error.contains("ask for fewer tables"));
    check(says, format!("{refused:?}"))?;
    check(pool.reserved() < 7 << 20, "memory is lost")
}

/// A single thread for blocking work suffices.
pub fn few_threads() -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(1)
        .enable_all()
        .build()?;
    let (done, waits) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        done.send(runtime.block_on(async {
            residence().await?;
            table_by_table().await
        }))
    });
    match waits.recv_timeout(5 * DEADLINE) {
        Ok(result) => {
            let _ = thread.join();
            result
        }
        Err(_) => Err("it hangs".into()),
    }
}

/// A running search keeps its index although memory is needed.
pub async fn in_use() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let (ctx, pool) = limited(64 << 20)?;
    let items = format!("({})", rows(0, 20_000, "List(Float32)"));
    index(&ctx, "stored", &items, &folder, OPTIONS).await?;
    let call = "SELECT query_id FROM knn_lsh(base => stored, k => 1, vector => 'v')";
    let mut running = ctx.sql(call).await?.execute_stream().await?;
    let first = futures::StreamExt::next(&mut running).await.transpose()?;
    check(first.is_some(), "no rows")?;
    let held = pool.reserved();
    let too_large = format!(
        "SELECT count(*) FROM knn_exact(base => ({}), k => 1, vector => 'v')",
        rows(0, 3_000_000, "List(Float64)")
    );
    check(execute(&ctx, &too_large).await.is_err(), "it is not too large")?;
    check(pool.reserved() >= held, format!("{held} bytes, then {}", pool.reserved()))?;
    drop(running);
    Ok(())
}

/// Two writers of one file: one of them wins as a whole, and no other file remains.
pub async fn two_writers() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let ctx = session(SessionConfig::new())?;
    let file = folder.path().join("one.lsh").display().to_string();
    let write = |rows_of: usize, ctx: SessionContext, file: String| async move {
        let sql = format!(
            "COPY ({}) TO '{file}' STORED AS LSH OPTIONS ('lsh.vector' 'v', 'lsh.tables' '9', 'lsh.hashes' '3', 'lsh.width' '2')",
            rows(0, rows_of, "List(Float32)")
        );
        ctx.sql(&sql).await?.collect().await
    };
    for _ in 0..4 {
        let one = tokio::spawn(write(2000, ctx.clone(), file.clone()));
        let other = tokio::spawn(write(3000, ctx.clone(), file.clone()));
        let join = |error| plan_datafusion_err!("{error}");
        one.await.map_err(join)??;
        other.await.map_err(join)??;
        execute(&ctx, "DROP TABLE IF EXISTS one").await?;
        execute(&ctx, &format!("CREATE EXTERNAL TABLE one STORED AS LSH LOCATION '{file}'"))
            .await?;
        let count = text(&ctx, "SELECT count(*), max(id) FROM one").await?;
        check(count.contains("| 2000     | 1999") || count.contains("| 3000     | 2999"), count)?;
        execute(&ctx, "SELECT * FROM knn_lsh(base => one, k => 2, vector => 'v')").await?;
    }
    let left: Vec<_> =
        std::fs::read_dir(folder.path())?.flatten().map(|file| file.file_name()).collect();
    check(left == ["one.lsh"], format!("left are {left:?}"))
}

/// A cancelled statement leaves neither a file nor its parts behind.
pub async fn given_up() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let ctx = session(SessionConfig::new())?;
    execute(&ctx, &format!("CREATE TABLE items AS {}", rows(0, 40_000, "List(Float32)"))).await?;
    let file = folder.path().join("one.lsh").display().to_string();
    let sql = format!(
        "COPY items TO '{file}' STORED AS LSH OPTIONS ('lsh.tables' '200', 'lsh.hashes' '3', 'lsh.width' '2')"
    );
    let files = || std::fs::read_dir(folder.path()).into_iter().flatten().flatten();
    let written = || files().filter_map(|file| Some(file.metadata().ok()?.len())).sum::<u64>();
    // Cancelled before anything is written, when a file exists, and when much of it is written.
    for least in [None, Some(0), Some(1), Some(1 << 20), Some(4 << 20)] {
        let reached = until(|| least.is_none_or(|least| files().count() > 0 && written() >= least));
        let writing = ctx.sql(&sql).await?.collect();
        let is_written = tokio::select! {
            done = writing => done.map(|_| true)?,
            () = reached => false,
        };
        if is_written {
            std::fs::remove_file(&file)?;
            continue;
        }
        check(!std::path::Path::new(&file).exists(), "a file that is not whole has its name")?;
        let gone = tokio::time::timeout(DEADLINE, until(|| files().count() == 0)).await;
        check(gone.is_ok(), "what was written stays")?;
    }
    Ok(())
}

/// The recall is reached with the stored tables.
pub async fn recall() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let ctx = session(SessionConfig::new())?;
    let rows = "(SELECT value AS id, value % 3 AS price, [sin(value * 0.7), cos(value * 1.3), sin(value * 2.9), cos(value * 0.11), sin(value * 3.3)] AS v FROM range(0, 6000))";
    execute(&ctx, &format!("CREATE TABLE items AS SELECT * FROM {rows}")).await?;
    index(&ctx, "stored", "items", &folder, "'lsh.recall' '0.97'").await?;
    for some in ["", "WHERE price = 1"] {
        for recall_target in [0.5, 0.9] {
            let sql = format!(
                "SELECT 1000 * count(l.rank) / count(*) AS found FROM knn_exact(base => (SELECT * FROM items {some}), k => 5) e \
                 LEFT JOIN knn_lsh(base => (SELECT * FROM stored {some}), k => 5, recall => {recall_target}) l ON e.query_id = l.query_id AND e.base_id = l.base_id"
            );
            let shown = text(&ctx, &sql).await?;
            let permille = shown
                .lines()
                .nth(3)
                .and_then(|line| line.trim_matches(['|', ' ']).parse::<f64>().ok());
            check(
                permille.is_some_and(|share| share >= 1000.0 * recall_target - 20.0),
                format!("{some} {recall_target}: {permille:?}"),
            )?;
        }
    }
    Ok(())
}

/// An index whose file was replaced is an error, also if all that a statement needs is in memory.
pub async fn replaced() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let ctx = session(SessionConfig::new())?;
    execute(&ctx, &format!("CREATE TABLE items AS {}", rows(0, 200, "List(Float32)"))).await?;
    execute(&ctx, &format!("CREATE TABLE others AS {}", rows(5, 200, "List(Float32)"))).await?;
    let options = "'lsh.vector' 'v', 'lsh.tables' '3', 'lsh.hashes' '2', 'lsh.width' '2'";
    index(&ctx, "stored", "items", &folder, options).await?;
    let sql = "SELECT * FROM knn_lsh(base => stored, k => 2) ORDER BY query_id, rank";
    let before = text(&ctx, sql).await?;
    check(text(&ctx, sql).await? == before, "another answer")?;
    let file = folder.path().join("stored.lsh");
    let (bytes, changed) = (std::fs::read(&file)?, std::fs::metadata(&file)?.modified()?);
    for of in ["others", "items"] {
        let copy = format!("COPY {of} TO '{}' STORED AS LSH OPTIONS ({options})", file.display());
        execute(&ctx, &copy).await?;
        // Neither its size nor its time tells.
        std::fs::File::options().write(true).open(&file)?.set_modified(changed)?;
        match (text(&ctx, sql).await, of) {
            (Err(error), "others") => {
                check(error.to_string().contains("was replaced"), error.to_string())?;
            }
            (Ok(after), "items") => check(after == before, "another answer")?,
            (other, _) => return Err(format!("{of}: {other:?}").into()),
        }
    }
    check(std::fs::read(&file)? == bytes, "an index of the same rows is another file")?;
    std::fs::remove_file(&file)?;
    let error = text(&ctx, sql).await.expect_err("the file is gone");
    check(error.to_string().contains("index '"), error.to_string())
}
