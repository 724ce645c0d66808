//! The order of inputs: the same answer for every setting, number of files, declared order and run.
//!
//! Labels of k-means come in the order of the input, so that one query shows both. The data has few
//! distinct vectors, few groups and sums that depend on the order of summation, so that ties are
//! everywhere.

mod kinds;
mod random;

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, FixedSizeListArray, Float64Array, Int64Array, RecordBatch};
use arrow::compute::concat_batches;
use arrow::datatypes::{Float32Type, Int64Type};
use arrow::util::pretty::pretty_format_batches;
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryPool};
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_neighbors::register_all;
use libtest_mimic::Failed;
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use tempfile::TempDir;

use crate::support::Rng;
use crate::support::trial::{Test, check, run};

/// The tests of this folder.
pub const TESTS: [(&str, Test); 14] = [
    ("every_kind_of_input_has_one_order", || run(kinds::all())),
    ("random_inputs_have_one_order", || run(random::all())),
    ("sorted_files_are_read_in_turn", || run(sorted_files())),
    ("distinct_rows_have_one_order", || run(distinct())),
    ("other_windows_change_no_labels", || run(windows())),
    ("statistics_reach_joins_and_counts", || run(statistics())),
    ("a_trailing_order_by_is_kept", || run(trailing_order())),
    ("equal_rows_stay_in_order", || run(stable())),
    ("joins_stream_their_left_side", || run(joins())),
    ("limits_read_no_more_than_they_need", || run(limits())),
    ("waiting_batches_are_reserved", || run(memory())),
    ("unbounded_inputs_are_refused", || run(unbounded())),
    ("explain_shows_what_is_inside", || run(explain())),
    ("any_order_leaves_the_plan_alone", || run(any())),
];

/// More rows than a batch of 8192.
const ROWS: usize = 10_000;

/// Rows `id`, `g` (5 groups), `f` (numbers whose sum depends on their order) and `v`.
fn rows(seed: u64, rows: usize) -> Result<RecordBatch> {
    let mut rng = Rng(seed);
    let mut below = |n: u64| rng.below(n);
    let g = Int64Array::from_iter_values((0..rows).map(|_| below(5) as i64));
    let f = Float64Array::from_iter_values((0..rows).map(|_| match below(3) {
        0 => 1e15,
        1 => -1e15,
        _ => below(1000) as f64 / 7.0,
    }));
    let v = (0..rows).map(|_| Some([below(3), below(3), below(3)].map(|x| Some(x as f32))));
    let v = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(v.collect::<Vec<_>>(), 3);
    let id = Int64Array::from_iter_values(0..rows as i64);
    let columns: [(&str, ArrayRef); 4] =
        [("id", Arc::new(id)), ("g", Arc::new(g)), ("f", Arc::new(f)), ("v", Arc::new(v))];
    Ok(RecordBatch::try_from_iter(columns)?)
}

/// Consecutive parts of a batch, the first much larger than the others.
fn parts(batch: &RecordBatch, parts: usize) -> Vec<RecordBatch> {
    let rows = batch.num_rows();
    let start = |part: usize| match part {
        0 => 0,
        part => rows / 2 + (rows - rows / 2) * (part - 1) / (parts - 1).max(1),
    };
    let end = |part: usize| if part + 1 == parts { rows } else { start(part + 1) };
    (0..parts).map(|part| batch.slice(start(part), end(part) - start(part))).collect()
}

/// Writes files of consecutive rows, whose names are in the order of rows.
fn write(folder: &Path, batch: &RecordBatch, files: usize) -> Result<(), Failed> {
    std::fs::create_dir_all(folder)?;
    for (i, part) in parts(batch, files).iter().enumerate() {
        let properties = WriterProperties::builder().set_max_row_group_row_count(Some(700));
        let file = std::fs::File::create(folder.join(format!("part-{i:02}.parquet")))?;
        let mut writer = ArrowWriter::try_new(file, part.schema(), Some(properties.build()))?;
        writer.write(part)?;
        writer.close()?;
    }
    Ok(())
}

/// The storage of the tables, and the settings of the session.
#[derive(Debug, Clone, Copy)]
struct Layout {
    /// The number of files of each table; 0 for tables in memory.
    files: usize,
    sorted: bool,
    settings: &'static [(&'static str, &'static str)],
}

const TARGET: &str = "datafusion.execution.target_partitions";
const BATCH: &str = "datafusion.execution.batch_size";
const MIN_SIZE: &str = "datafusion.optimizer.repartition_file_min_size";

/// The layouts that are compared with the first.
const LAYOUTS: [Layout; 6] = [
    Layout { files: 1, sorted: false, settings: &[(TARGET, "1")] },
    Layout { files: 4, sorted: false, settings: &[(TARGET, "4"), (BATCH, "100"), (MIN_SIZE, "1")] },
    Layout {
        files: 11,
        sorted: false,
        settings: &[
            (TARGET, "7"),
            (MIN_SIZE, "1"),
            ("datafusion.optimizer.prefer_hash_join", "false"),
            ("datafusion.execution.collect_statistics", "false"),
        ],
    },
    Layout { files: 5, sorted: true, settings: &[(TARGET, "4"), (MIN_SIZE, "1")] },
    Layout {
        files: 1,
        sorted: false,
        settings: &[
            (TARGET, "3"),
            (BATCH, "1000"),
            (MIN_SIZE, "1"),
            ("datafusion.execution.parquet.pushdown_filters", "true"),
            ("datafusion.execution.sort_in_place_threshold_bytes", "100"),
        ],
    },
    Layout { files: 0, sorted: false, settings: &[(TARGET, "5"), (BATCH, "77")] },
];

/// A session with the tables `t` and `s`, whose files are in a temporary folder.
struct Stored {
    ctx: SessionContext,
    layout: Layout,
    _folder: TempDir,
}

impl Stored {
    async fn new(layout: Layout) -> Result<Self, Failed> {
        Self::with(layout, Arc::default()).await
    }

    async fn with(layout: Layout, runtime: Arc<RuntimeEnv>) -> Result<Self, Failed> {
        let mut config = SessionConfig::new();
        for (name, value) in layout.settings {
            config = config.set_str(name, value);
        }
        let ctx = SessionContext::new_with_config_rt(config, runtime);
        register_all(&ctx)?;
        let folder = TempDir::new()?;
        for (name, batch) in [("t", rows(1, ROWS)?), ("s", rows(2, 300)?)] {
            if layout.files == 0 {
                let partitions = parts(&batch, 3).into_iter().map(|part| {
                    let rows = part.num_rows();
                    let cut = (0..rows).step_by(999);
                    cut.map(|start| part.slice(start, 999.min(rows - start))).collect()
                });
                let table = MemTable::try_new(batch.schema(), partitions.collect())?;
                ctx.register_table(name, Arc::new(table))?;
                continue;
            }
            let path = folder.path().join(name);
            write(&path, &batch, layout.files)?;
            let path = path.to_string_lossy();
            let order = if layout.sorted { "WITH ORDER (id)" } else { "" };
            let create = format!(
                "CREATE EXTERNAL TABLE {name} STORED AS PARQUET {order} LOCATION '{path}/'"
            );
            ctx.sql(&create).await?.collect().await?;
        }
        ctx.sql("CREATE VIEW near AS SELECT * FROM t WHERE g < 2 ORDER BY g").await?;
        Ok(Self { ctx, layout, _folder: folder })
    }

    async fn all() -> Result<Vec<Self>, Failed> {
        let mut all = Vec::new();
        for layout in LAYOUTS {
            all.push(Self::new(layout).await?);
        }
        Ok(all)
    }

    async fn batches(&self, sql: &str) -> Result<Vec<RecordBatch>, Failed> {
        let failed = |error| format!("{sql}: {error}");
        Ok(self.ctx.sql(sql).await.map_err(failed)?.collect().await.map_err(failed)?)
    }

    async fn text(&self, sql: &str) -> Result<String, Failed> {
        Ok(pretty_format_batches(&self.batches(sql).await?)?.to_string())
    }

    async fn whole(&self, sql: &str) -> Result<Option<RecordBatch>, Failed> {
        let batches = self.batches(sql).await?;
        let Some(first) = batches.first() else { return Ok(None) };
        Ok(Some(concat_batches(&first.schema(), &batches)?))
    }

    /// The integers of the first column.
    async fn numbers(&self, sql: &str) -> Result<Vec<i64>, Failed> {
        let batches = self.batches(sql).await?;
        let columns = batches.iter().map(|b| b.column(0).as_primitive::<Int64Type>().values());
        Ok(columns.flat_map(|values| values.to_vec()).collect())
    }
}

/// Fails if the rows of an input, their order, their labels or the neighbours among them differ
/// between layouts or runs. `with` is a prefix of the query.
async fn compare(stored: &[Stored], with: &str, input: &str) -> Result<(), Failed> {
    let labels = format!(
        "{with} SELECT * FROM kmeans(({input}), k => 4, seed => 7, max_iterations => 2, \
         vector => 'v')"
    );
    let neighbors = format!(
        "{with} SELECT query_id, rank, distance, base_id FROM knn_exact(queries => \
         (SELECT id, v FROM s LIMIT 3), base => ({input}), k => 9, vector => 'v')"
    );
    let hashed = format!(
        "{with} SELECT query_id, rank, distance, base_id FROM knn_lsh(queries => \
         (SELECT id, v FROM s LIMIT 3), base => ({input}), k => 9, vector => 'v', tables => 4, \
         hashes => 2, width => 3)"
    );
    // LSH parameters are tuned on a sample, which depends on the order of rows.
    let chosen = format!(
        "{with} SELECT query_id, rank, distance, base_id FROM knn_lsh(queries => \
         (SELECT id, v FROM s LIMIT 3), base => ({input}), k => 9, vector => 'v')"
    );
    let density = format!(
        "{with} SELECT * FROM dbscan(({input}), eps => 0.5, min_points => 3, vector => 'v')"
    );
    // Labels already show the order of the input. So neighbours and density are compared in two
    // layouts only, and for inputs with vectors of three dimensions.
    let searched = ["t.id, t.v FROM", "SELECT * FROM t", "DISTINCT g, v"]
        .iter()
        .any(|part| input.contains(part));
    let few = if searched { 2 } else { 0 };
    let chosen = (chosen, if input.contains("t.id, t.v FROM") { 2 } else { 0 });
    let statements =
        [(labels, stored.len()), (neighbors, few), (hashed, few), chosen, (density, few)];
    for (sql, layouts) in statements.into_iter().filter(|(_, layouts)| *layouts > 0) {
        let expected = stored[0].whole(&sql).await?;
        for other in &stored[1..layouts] {
            let actual = other.whole(&sql).await?;
            check(actual == expected, format!("{sql}\n{:?}", other.layout))?;
        }
    }
    Ok(())
}

/// Files that are known to be sorted are distributed by size.
async fn sorted_files() -> Result<(), Failed> {
    let sorted = Stored::new(LAYOUTS[3]).await?;
    let ids = sorted.numbers("SELECT id FROM kmeans(t, k => 3, seed => 1)").await?;
    check(ids == (0..ROWS as i64).collect::<Vec<_>>(), "rows are not in the order of files")?;
    // The same if the order is declared in the files.
    let folder = TempDir::new()?;
    let folder = folder.path().to_string_lossy();
    for file in 0..5 {
        let (low, high) = (2000 * file, 2000 * file + 2000);
        let copy = format!(
            "COPY (SELECT * FROM t WHERE id >= {low} AND id < {high} ORDER BY id) \
             TO '{folder}/{file}.parquet'"
        );
        sorted.batches(&copy).await?;
    }
    let create = format!("CREATE EXTERNAL TABLE c STORED AS PARQUET LOCATION '{folder}/'");
    sorted.batches(&create).await?;
    let ids = sorted.numbers("SELECT id FROM kmeans(c, k => 3, seed => 1)").await?;
    check(ids == (0..ROWS as i64).collect::<Vec<_>>(), "rows are not in the order of copies")?;
    // Folders with partition values are also read in the order of their paths.
    let folder = TempDir::new()?;
    let folder = folder.path().to_string_lossy();
    let copy = format!("COPY t TO '{folder}/' STORED AS PARQUET PARTITIONED BY (g)");
    sorted.batches(&copy).await?;
    let create = format!(
        "CREATE EXTERNAL TABLE h STORED AS PARQUET PARTITIONED BY (g) LOCATION '{folder}/'"
    );
    for input in
        ["h", "(SELECT * FROM h WHERE g <> '2' AND f > 0)", "(SELECT DISTINCT id, v FROM h)"]
    {
        let mut expected = None;
        for layout in &LAYOUTS[..3] {
            let stored = Stored::new(*layout).await?;
            stored.batches(&create).await?;
            let actual = stored.whole(&format!("SELECT * FROM kmeans({input}, k => 3)")).await?;
            let first = expected.get_or_insert_with(|| actual.clone());
            check(actual == *first, format!("{input}: folders are not read in turn, {layout:?}"))?;
        }
    }
    Ok(())
}

/// DISTINCT gives the same answer in every run, from both functions.
async fn distinct() -> Result<(), Failed> {
    let stored = Stored::new(LAYOUTS[1]).await?;
    let input = "(SELECT DISTINCT id, v FROM t), k => 5, seed => 7";
    let labels = "SELECT cluster_id, count(*) AS size";
    let labels = format!("{labels} FROM kmeans({input}) GROUP BY cluster_id ORDER BY cluster_id");
    let centroids = format!("SELECT cluster_id, size FROM kmeans_centroids({input}) ORDER BY 1");
    let expected = stored.text(&labels).await?;
    for _ in 0..3 {
        check(stored.text(&labels).await? == expected, "labels differ between runs")?;
        check(stored.text(&centroids).await? == expected, "centroids differ from labels")?;
    }
    Ok(())
}

/// Labels are independent of other window functions beside them.
async fn windows() -> Result<(), Failed> {
    let ours = "kmeans(v, 4, 7) OVER () AS label";
    for stored in [Stored::new(LAYOUTS[0]).await?, Stored::new(LAYOUTS[1]).await?] {
        let alone = format!("SELECT id, {ours} FROM t ORDER BY id");
        let alone = stored.text(&alone).await?;
        for beside in [
            "count(*) OVER (PARTITION BY g)",
            "row_number() OVER (ORDER BY g, id DESC)",
            "sum(f) OVER (PARTITION BY g ORDER BY id), lag(id) OVER (ORDER BY v[1], id)",
            "kmeans(v, 3, 5) OVER (PARTITION BY g), count(*) OVER (PARTITION BY g)",
        ] {
            for columns in [format!("{ours}, {beside}"), format!("{beside}, {ours}")] {
                let sql =
                    format!("SELECT id, label FROM (SELECT id, {columns} FROM t) ORDER BY id");
                check(stored.text(&sql).await? == alone, format!("{sql}: other labels"))?;
            }
        }
    }
    Ok(())
}

async fn statistics() -> Result<(), Failed> {
    let stored = Stored::new(LAYOUTS[1]).await?;
    let plan = stored
        .text("EXPLAIN FORMAT INDENT SELECT * FROM kmeans((SELECT count(*) AS n, [1.0] AS v FROM t), k => 1)")
        .await?;
    check(plan.contains("PlaceholderRowExec"), format!("count(*) scans:\n{plan}"))?;
    stored.batches("SET datafusion.explain.show_statistics = true").await?;
    let plan = stored.text("EXPLAIN FORMAT INDENT SELECT * FROM kmeans(t, k => 3)").await?;
    let input = plan.lines().find(|line| line.contains("DataSourceExec")).unwrap_or_default();
    check(input.contains("Rows=Exact(10000)"), format!("no statistics:\n{plan}"))?;
    // Statistics of files omit NaN.
    let folder = TempDir::new()?;
    let folder = folder.path().to_string_lossy();
    let numbers = "SELECT value AS id, CASE WHEN value % 9 = 4 THEN 'NaN'::DOUBLE ELSE value * 1.0 \
                   END AS f FROM generate_series(0, 999)";
    stored.batches(&format!("COPY ({numbers}) TO '{folder}/n.parquet'")).await?;
    let path = format!("'{folder}/n.parquet'");
    stored.batches(&format!("CREATE EXTERNAL TABLE n STORED AS PARQUET LOCATION {path}")).await?;
    stored.batches(&format!("CREATE TABLE in_memory AS {numbers}")).await?;
    let mut rows = Vec::new();
    for table in ["n", "in_memory"] {
        let input = format!(
            "(SELECT id, [id * 1.0] AS v FROM {table} WHERE (SELECT max(f) FROM {table}) > 1000)"
        );
        rows.push(ids(&stored, "", &input).await?.len());
    }
    check(rows[0] == rows[1], format!("{rows:?} rows, by where the column is stored"))
}

/// The ids of an input, in the order of its rows.
async fn ids(stored: &Stored, with: &str, input: &str) -> Result<Vec<i64>, Failed> {
    let sql = format!("{with} SELECT id FROM kmeans({input}, k => 3, seed => 1, vector => 'v')");
    stored.numbers(&sql).await
}

/// The ids of `t` ordered by a key; rows with equal keys stay in the order of files.
fn sorted_by<K: Ord>(key: impl Fn(i64, i64) -> Option<K>) -> Result<Vec<i64>, Failed> {
    let all = rows(1, ROWS)?;
    let g = all.column(1).as_primitive::<Int64Type>().values().to_vec();
    let keys = g.iter().enumerate().filter_map(|(id, g)| Some((key(*g, id as i64)?, id as i64)));
    let mut keys: Vec<_> = keys.collect();
    keys.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(keys.into_iter().map(|(_, id)| id).collect())
}

async fn trailing_order() -> Result<(), Failed> {
    let expected = sorted_by(|g, id| Some((g, -id)))?;
    let near = sorted_by(|g, _| (g < 2).then_some(g))?;
    for layout in [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3]] {
        let stored = Stored::new(layout).await?;
        stored.ctx.sql("CREATE VIEW sorted AS SELECT * FROM t ORDER BY g, id DESC").await?;
        for (with, input) in [
            ("", "(SELECT * FROM t ORDER BY g, id DESC)"),
            ("", "(SELECT id, v FROM t ORDER BY g, id DESC)"),
            ("", "(SELECT id, v FROM (SELECT * FROM t ORDER BY g, id DESC))"),
            ("", "(SELECT * FROM (SELECT * FROM t ORDER BY g, id DESC) WHERE id >= 0)"),
            ("", "(SELECT * FROM (SELECT id, v FROM (SELECT * FROM t ORDER BY g, id DESC)))"),
            ("WITH c AS (SELECT * FROM t ORDER BY g, id DESC)", "c"),
            ("WITH c AS (SELECT id, v FROM t ORDER BY g, id DESC)", "(SELECT * FROM c)"),
            ("", "sorted"),
            ("", "(SELECT id, v FROM sorted)"),
        ] {
            let listed = ids(&stored, with, input).await?;
            check(listed == expected, format!("{with} {input}: the order is lost, {layout:?}"))?;
        }
        check(ids(&stored, "", "near").await? == near, "the order of a view is lost")?;
        let window =
            "SELECT id, kmeans(v, 3, 1) OVER () AS l FROM (SELECT * FROM t ORDER BY g, id DESC)";
        check(stored.numbers(window).await? == expected, "the order is lost below a window")?;
    }
    Ok(())
}

/// Rows with equal keys stay in input order.
async fn stable() -> Result<(), Failed> {
    let all = sorted_by(|g, _| Some(-g))?;
    let g = rows(1, ROWS)?.column(1).as_primitive::<Int64Type>().clone();
    let key = |id: i64| g.value(id as usize);
    for layout in LAYOUTS {
        let stored = Stored::new(layout).await?;
        let listed = ids(&stored, "", "(SELECT * FROM t ORDER BY g DESC)").await?;
        check(listed == all, format!("ORDER BY is not stable, {layout:?}"))?;
        let listed = ids(&stored, "", "(SELECT * FROM t ORDER BY g DESC LIMIT 3000)").await?;
        check(listed == all[..3000], format!("LIMIT is not stable, {layout:?}"))?;
        let numbered = "(SELECT * FROM (SELECT *, row_number() OVER (ORDER BY g DESC) AS n FROM t) \
                        ORDER BY n)";
        let listed = ids(&stored, "", numbered).await?;
        check(listed == all, format!("row_number() is not stable, {layout:?}"))?;
        // A limit takes the first rows, whatever operators follow.
        let first = |from, to| sorted_by(|g, id| (from..to).contains(&id).then_some(-g));
        let mut topped = sorted_by(|g, _| Some(g))?;
        topped.truncate(2100);
        topped.sort_by_key(|id| (key(*id), -id));
        for (limited, expected) in [
            (
                "(SELECT * FROM (SELECT * FROM t LIMIT 100 OFFSET 1) ORDER BY g DESC)",
                first(1, 101)?,
            ),
            ("(SELECT * FROM (SELECT * FROM t LIMIT 9000) ORDER BY g DESC)", first(0, 9000)?),
            ("(SELECT * FROM (SELECT * FROM t OFFSET 9900) ORDER BY g DESC)", first(9900, 10_000)?),
            (
                "(SELECT * FROM (SELECT * FROM t WHERE id > 10 LIMIT 70) ORDER BY g DESC)",
                first(11, 81)?,
            ),
            (
                "(SELECT * FROM (SELECT *, row_number() OVER (ORDER BY g DESC) AS n \
                 FROM (SELECT * FROM t LIMIT 100 OFFSET 1)) ORDER BY n)",
                first(1, 101)?,
            ),
            ("(SELECT * FROM (SELECT * FROM t ORDER BY g LIMIT 2100) ORDER BY g, id DESC)", topped),
            (
                "(SELECT q AS id, [q * 1.0, m] AS v FROM (SELECT id % 50 AS q, min(id % 2) AS m \
                 FROM t GROUP BY id % 50 ORDER BY m LIMIT 20))",
                (0..20).map(|i| 2 * i).collect(),
            ),
            // A join's dynamic filter removes no rows before a limit counts them.
            (
                "(SELECT a.id, a.v FROM (SELECT * FROM t WHERE g <> 1 LIMIT 100) AS a \
                 JOIN (SELECT id + 5000 AS far FROM s) AS b ON a.id = b.far)",
                vec![],
            ),
            (
                "(SELECT a.id, a.v FROM (SELECT t.id, t.v FROM t JOIN s ON t.g = s.g LIMIT 10) AS a \
                 JOIN (SELECT id + 5000 AS far FROM s) AS b ON a.id = b.far)",
                vec![],
            ),
            (
                "(SELECT * FROM (SELECT * FROM t WHERE g <> 1 LIMIT 100) \
                 WHERE id IN (SELECT id + 5000 FROM s))",
                vec![],
            ),
        ] {
            let listed = ids(&stored, "", limited).await?;
            check(listed == expected, format!("{limited}: other rows, {layout:?}"))?;
        }
    }
    Ok(())
}

/// The output of a join has the order of its left side, whichever side is larger.
async fn joins() -> Result<(), Failed> {
    for layout in [LAYOUTS[0], LAYOUTS[2]] {
        let stored = Stored::new(layout).await?;
        for (join, count) in [
            ("SELECT t.id, t.v FROM t JOIN s ON t.id = s.id", 300),
            ("SELECT t.id, t.v FROM s JOIN t ON t.id = s.id", 300),
            ("SELECT t.id, t.v FROM t LEFT JOIN s ON t.id = s.id", ROWS),
            ("SELECT t.id, t.v FROM s RIGHT JOIN t ON t.id = s.id", ROWS),
            ("SELECT t.id, t.v FROM t WHERE id IN (SELECT id FROM s)", 300),
            ("SELECT t.id, t.v FROM t WHERE id % 3000 IN (SELECT id FROM s)", 1200),
        ] {
            let listed = ids(&stored, "", &format!("({join})")).await?;
            check(listed.is_sorted() && listed.len() == count, format!("{join}: other pairs"))?;
        }
        let plan = stored.text("EXPLAIN FORMAT INDENT SELECT * FROM kmeans((SELECT t.* FROM t JOIN s USING (id)), k => 3)");
        let plan = plan.await?;
        let scans: Vec<_> = plan.lines().filter(|line| line.contains("DataSourceExec")).collect();
        check(scans.len() == 2 && scans[0].contains("/s/"), format!("built on t:\n{plan}"))?;
    }
    Ok(())
}

async fn limits() -> Result<(), Failed> {
    let stored = Stored::new(LAYOUTS[2]).await?;
    for (input, most) in [
        ("SELECT * FROM t LIMIT 1", 2000),
        ("SELECT * FROM t WHERE g < 3 LIMIT 5", 2000),
        ("SELECT g AS id, v FROM t WHERE g < 3 LIMIT 5 OFFSET 2", 2000),
        // All partitions of a join are started, even if a limit needs few rows.
        ("SELECT t.id, t.v FROM t JOIN s ON t.id = s.id LIMIT 2", 20_000),
        (
            "SELECT * FROM (SELECT t.id, t.v FROM t JOIN s ON t.id = s.id) WHERE id > 1 LIMIT 2",
            20_000,
        ),
        (
            "SELECT t.id, t.v FROM t JOIN s ON t.id = s.id UNION ALL SELECT id, v FROM t LIMIT 3",
            20_000,
        ),
    ] {
        let sql = format!("EXPLAIN ANALYZE SELECT id FROM kmeans(({input}), k => 1)");
        let plan = stored.text(&sql).await?;
        let scan = plan.lines().find(|line| line.contains("DataSourceExec")).unwrap_or_default();
        let read = scan.split("output_rows=").nth(1).unwrap_or_default();
        let read = read.split([',', ' ']).next().unwrap_or_default().parse::<f64>();
        check(read.is_ok_and(|read| read <= most as f64), format!("{input}: {plan}"))?;
    }
    Ok(())
}

/// Batches that are read ahead are reserved, and take a small part of the pool.
async fn memory() -> Result<(), Failed> {
    let input = "SELECT min(id) AS id, count(*) AS n, [sum(f)] AS v FROM t GROUP BY id % 7";
    let sql = format!("EXPLAIN ANALYZE SELECT id FROM kmeans(({input}), k => 2)");
    for bytes in [64 << 20, 1 << 20] {
        let pool = Arc::new(GreedyMemoryPool::new(bytes));
        let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool.clone()).build_arc()?;
        let stored = Stored::with(LAYOUTS[2], runtime).await?;
        let plan = stored.text(&sql).await?;
        check(pool.reserved() == 0, "bytes stay reserved")?;
        let peak = plan.split("peak_bytes_ahead=").nth(1).unwrap_or_default();
        let peak = peak.split([',', ']']).next().unwrap_or_default();
        let bounded = match peak.strip_suffix(" K") {
            Some(thousands) => {
                thousands.parse().is_ok_and(|k: f64| k * 1000.0 <= bytes as f64 / 16.0 + 10.0)
            }
            None => peak == "0",
        };
        check(bounded, format!("{peak} bytes are ahead of {bytes}"))?;
        // Seven concurrent sorts would reserve more than the pool has.
        let sorted = "EXPLAIN SELECT * FROM kmeans((SELECT id, v FROM t ORDER BY g), k => 2)";
        let plan = stored.text(sorted).await?;
        check(!plan.contains("SortPreservingMerge"), plan)?;
    }
    Ok(())
}

async fn unbounded() -> Result<(), Failed> {
    let stored = Stored::new(LAYOUTS[1]).await?;
    let folder = TempDir::new()?;
    let path = folder.path().join("u.csv");
    std::fs::write(&path, "1,2\n3,4\n")?;
    let path = path.to_string_lossy();
    let create = format!(
        "CREATE UNBOUNDED EXTERNAL TABLE u (x DOUBLE, y DOUBLE) STORED AS CSV LOCATION '{path}'"
    );
    stored.batches(&create).await?;
    for order in ["exact", "any"] {
        stored.batches(&format!("SET neighbors.input_order = '{order}'")).await?;
        for (call, name) in [
            ("kmeans(u, k => 1, vector => ['x', 'y'])", "input"),
            ("knn_exact(u, k => 1, vector => ['x', 'y'])", "base"),
            ("knn_exact(u, (SELECT 1.0 AS x, 2.0 AS y), k => 1, vector => ['x', 'y'])", "queries"),
        ] {
            let sql = format!("SELECT * FROM {call}");
            let error = match stored.text(&sql).await {
                Ok(plan) => return Err(format!("{call} is planned: {plan}").into()),
                Err(error) => format!("{error:?}"),
            };
            let message = format!("argument '{name}' is unbounded");
            check(error.contains(&message), format!("{call}: {error}"))?;
        }
    }
    Ok(())
}

/// The operators of a plan, indented by depth, with the number of partitions read concurrently.
fn shape(plan: &str) -> Vec<String> {
    let operators = || plan.lines().filter(|line| line.contains("Exec"));
    let least = operators().map(indent).min().unwrap_or_default();
    let shown = operators().map(|line| {
        let name = line.rsplit_once('|').map_or(line, |(line, _)| line);
        let start = indent(line);
        let rest = &name[start..];
        let operator = rest.split([':', ' ', ',']).next().unwrap_or_default();
        let groups = rest.split("file_groups={").nth(1).and_then(|g| g.split(':').next());
        let partitions = rest.split("partitions=").nth(1).filter(|_| !rest.contains("groups"));
        let partitions = partitions.and_then(|p| p.split([',', ' ']).next());
        let note = groups.or(partitions).map(|note| format!(" {note}")).unwrap_or_default();
        format!("{}{operator}{note}", " ".repeat(start - least))
    });
    shown.collect()
}

/// The position of the first character of a plan line.
fn indent(line: &str) -> usize {
    let cell = line.rfind("| ").filter(|_| line.starts_with('|') && line.ends_with('|'));
    let cell = match cell {
        Some(_) => line[1..].find('|').map_or(0, |bar| bar + 2),
        None => 0,
    };
    cell + line[cell..].len() - line[cell..].trim_start().len()
}

/// Plans show the operators that run in parallel.
async fn explain() -> Result<(), Failed> {
    let stored = Stored::new(LAYOUTS[1]).await?;
    let plans: [(&str, &[&str]); 6] = [
        (
            "SELECT * FROM kmeans((SELECT id + 1 AS id, v FROM t WHERE g < 3), k => 2)",
            &[
                "KMeansExec",
                "  InputExec 4",
                "    ProjectionExec",
                "      FilterExec",
                "        DataSourceExec 4 groups",
            ],
        ),
        (
            "SELECT * FROM kmeans((SELECT min(id) AS id, [sum(f)] AS v FROM t WHERE g < 3 \
             GROUP BY g), k => 2)",
            &[
                "KMeansExec",
                "  InputExec 1",
                "    ProjectionExec",
                "      AggregateExec",
                "        OrderedConcatExec 4",
                "          FilterExec",
                "            DataSourceExec 4 groups",
            ],
        ),
        (
            "SELECT * FROM kmeans((SELECT t.id, t.v FROM t JOIN s ON t.id = s.id), k => 2)",
            &[
                "KMeansExec",
                "  InputExec 1",
                "    OrderedConcatExec 4",
                "      HashJoinExec",
                "        OrderedConcatExec 4",
                "          DataSourceExec 4 groups",
                "        DataSourceExec 4 groups",
            ],
        ),
        (
            "SELECT * FROM kmeans((SELECT t.id, t.v FROM t LEFT JOIN s ON t.id = s.id), k => 2)",
            &[
                "KMeansExec",
                "  InputExec 1",
                "    HashJoinExec",
                "      OrderedConcatExec 4",
                "        DataSourceExec 4 groups",
                "      OrderedConcatExec 4",
                "        DataSourceExec 4 groups",
            ],
        ),
        (
            "SELECT * FROM kmeans((SELECT min(id) AS id, [sum(id) * 1.0] AS v, count(*) AS n \
             FROM t WHERE g < 3 GROUP BY g), k => 2)",
            &[
                "KMeansExec",
                "  InputExec 1",
                "    ProjectionExec",
                "      AggregateExec",
                "        OrderedConcatExec 4",
                "          AggregateExec",
                "            FilterExec",
                "              DataSourceExec 4 groups",
            ],
        ),
        (
            "SELECT * FROM knn_exact(queries => (SELECT * FROM s WHERE g > (SELECT min(g) FROM s)), \
             base => (SELECT id, v FROM t UNION ALL SELECT id, v FROM s ORDER BY id), k => 2)",
            &[
                "KnnExec",
                "  InputExec 4",
                "    ScalarSubqueryExec",
                "      FilterExec",
                "        DataSourceExec 4 groups",
                "      ProjectionExec",
                "        PlaceholderRowExec",
                "  InputExec 1",
                "    ProjectionExec",
                "      SortPreservingMergeExec",
                "        SortExec",
                "          RowNumberExec",
                "            UnionExec",
                "              DataSourceExec 4 groups",
                "              DataSourceExec 4 groups",
            ],
        ),
    ];
    for (sql, expected) in plans {
        let plan = stored.text(&format!("EXPLAIN FORMAT INDENT {sql}")).await?;
        let actual = shape(&plan);
        check(actual == expected, format!("{sql}: {actual:#?}"))?;
    }
    let (sql, _) = plans[1];
    let plan = stored.text(&format!("EXPLAIN ANALYZE {sql}")).await?;
    for operator in ["OrderedConcatExec", "FilterExec", "DataSourceExec", "AggregateExec"] {
        let line = plan.lines().find(|line| line.contains(operator)).unwrap_or_default();
        let metrics = line.matches("metrics=[output_rows=").count();
        check(metrics == 1, format!("{operator} shows no metrics:\n{plan}"))?;
    }
    let tree = stored.text(&format!("EXPLAIN FORMAT TREE {sql}")).await?;
    check(tree.contains("01: ·Aggregate") && tree.contains("OrderedConcat"), tree)
}

async fn any() -> Result<(), Failed> {
    let stored = Stored::new(LAYOUTS[1]).await?;
    let sql = "EXPLAIN FORMAT INDENT SELECT * FROM kmeans((SELECT * FROM t WHERE g < 3), k => 3)";
    check(stored.text(sql).await?.contains("InputExec"), "the input is not planned by itself")?;
    stored.batches("SET neighbors.input_order = 'any'").await?;
    let plan = stored.text(sql).await?;
    check(!plan.contains("InputExec") && !plan.contains("OrderedConcatExec"), plan)?;
    let count =
        stored.numbers("SELECT count(*) FROM kmeans((SELECT * FROM t WHERE g < 3), k => 3)");
    check(count.await?[0] > 0, "no rows")
}
