//! The `neighbors` program, as users start it.
//!
//! Trials of a missing device are ignored.

#[path = "../support/files.rs"]
mod files;

use std::path::Path;
use std::process::{Command, Output};

use files::root;
use libtest_mimic::{Arguments, Failed, Trial};
use tempfile::TempDir;

/// A test.
type Test = fn() -> Result<(), Failed>;

const TESTS: [(&str, Test); 11] = [
    ("stops_at_the_first_error", stops_at_the_first_error),
    ("starts_in_every_way", starts_in_every_way),
    ("files_and_formats", files_and_formats),
    ("copies_to_parquet", copies_to_parquet),
    ("compressed_files", compressed_files),
    ("settings_of_the_environment", settings_of_the_environment),
    ("lists_devices", lists_devices),
    ("resets_settings", resets_settings),
    ("nested_columns_in_csv", nested_columns_in_csv),
    ("explains_what_is_not_there", explains_what_is_not_there),
    ("prints_help", prints_help),
];

fn main() {
    let has_gpu = succeed(neighbors(&["devices"])).is_ok_and(|list| list.contains("cuda:0"));
    let mut trials = Vec::new();
    for (device, is_there) in [("cpu", true), ("cuda", has_gpu)] {
        let trial = Trial::test(format!("{device}::tour"), move || tour(device));
        trials.push(trial.with_ignored_flag(!is_there));
    }
    trials.extend(TESTS.map(|(name, run)| Trial::test(format!("program::{name}"), run)));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// A command that starts the program in the folder of the package.
fn neighbors(args: &[&str]) -> Command {
    let program = std::env::var("CARGO_BIN_EXE_neighbors");
    let mut command = Command::new(program.as_deref().unwrap_or(env!("CARGO_BIN_EXE_neighbors")));
    command.args(args).current_dir(root());
    command
}

fn succeed(mut command: Command) -> Result<String, Failed> {
    let Output { status, stdout, stderr } = command.output()?;
    if !status.success() {
        return Err(format!("{status}: {}", String::from_utf8_lossy(&stderr)).into());
    }
    Ok(String::from_utf8(stdout)?)
}

fn expect(actual: &str, expected: &str) -> Result<(), Failed> {
    if actual == expected {
        Ok(())
    } else {
        Err(format!("found {actual:?}, wanted {expected:?}").into())
    }
}

/// The tour: digits classified by their neighbours, half-moons as clusters, and a heading above
/// each table.
fn tour(device: &str) -> Result<(), Failed> {
    let device = format!("SET neighbors.device = '{device}'");
    let printed = succeed(neighbors(&["-c", &device, "-f", "sql/tour.sql"]))?;
    if !printed.contains("98.61") {
        return Err("the accuracy is not 98.61%".into());
    }
    let lines = |start: &str| printed.lines().filter(|line| line.starts_with(start)).count();
    // A table has three horizontal rules, and so has the heading's table above it.
    if lines("+") != 2 * 3 * lines("| step ") {
        return Err("a table has no heading".into());
    }
    let moons = ["| 0    | 1          | 400    |", "| 1    | 0          | 380    |"];
    if !moons.iter().all(|moon| printed.contains(moon)) {
        return Err("a moon is not a cluster".into());
    }
    let last = printed.rsplit("recall_percent").next().unwrap_or_default();
    let recall = last.lines().nth(2).and_then(|line| line.split('|').nth(1));
    match recall.and_then(|recall| recall.trim().parse::<f64>().ok()) {
        Some(recall) if recall >= 90.0 => Ok(()),
        other => Err(format!("the recall is {other:?}").into()),
    }
}

fn stops_at_the_first_error() -> Result<(), Failed> {
    let Output { status, stdout, stderr } = neighbors(&[
        "--output-format",
        "csv",
        "-c",
        "SELECT 1 AS a; SELECT nothing; SELECT 2 AS b",
    ])
    .output()?;
    expect(&String::from_utf8(stdout)?, "a\n1\n")?;
    let stderr = String::from_utf8(stderr)?;
    if status.success() || !stderr.starts_with("error: ") || stderr.lines().count() != 1 {
        return Err(format!("{status}: {stderr}").into());
    }
    Ok(())
}

/// Started by name, with allocator settings, and through the dynamic loader.
fn starts_in_every_way() -> Result<(), Failed> {
    let args = ["--output-format", "csv", "-c", "SELECT 1 AS a"];
    expect(&succeed(neighbors(&args))?, "a\n1\n")?;
    let mut with_settings = neighbors(&args);
    with_settings.env("_RJEM_MALLOC_CONF", "thp:never");
    expect(&succeed(with_settings)?, "a\n1\n")?;
    let loaders = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];
    for loader in loaders.into_iter().filter(|loader| Path::new(loader).exists()) {
        let mut command = Command::new(loader);
        command.arg(neighbors(&[]).get_program()).args(args).current_dir(root());
        expect(&succeed(command)?, "a\n1\n")?;
    }
    Ok(())
}

fn files_and_formats() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let job = folder.path().join("job.sql");
    std::fs::write(
        &job,
        "CREATE TABLE t AS VALUES (1, [0, 0]), (2, [3, 4]);\nSELECT query_column1 AS q, base_column1 AS b, distance FROM knn_exact(t, k => 1) ORDER BY q;",
    )?;
    let job = job.to_string_lossy();
    let csv = succeed(neighbors(&["-f", &job, "--output-format", "csv"]))?;
    expect(&csv, "q,b,distance\n1,2,5.0\n2,1,5.0\n")?;
    let json = succeed(neighbors(&["-f", &job, "--output-format", "json"]))?;
    expect(&json, "{\"q\":1,\"b\":2,\"distance\":5.0}\n{\"q\":2,\"b\":1,\"distance\":5.0}\n")?;
    let empty = succeed(neighbors(&["-c", "SELECT 1 AS a WHERE false", "--output-format", "csv"]))?;
    expect(&empty, "a\n")
}

fn copies_to_parquet() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let out = folder.path().join("out.parquet");
    let out = out.to_string_lossy();
    let digits = "(SELECT id, pixels FROM 'sql/data/digits.parquet')";
    let copy = format!("COPY (SELECT * FROM knn_exact({digits}, k => 3)) TO '{out}'");
    succeed(neighbors(&["-c", &copy]))?;
    let count = format!("SELECT count(*) AS n, min(rank) AS low, max(rank) AS high FROM '{out}'");
    let printed = succeed(neighbors(&["-c", &count, "--output-format", "csv"]))?;
    expect(&printed, "n,low,high\n5391,1,3\n")
}

/// Files written by COPY are read by their extensions.
fn compressed_files() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let rows = "SELECT * FROM (VALUES (1, 0, 0), (2, 3, 4), (3, 0, 1)) AS t(id, x, y)";
    for (format, compression) in
        [("csv", "gz"), ("json", "gz"), ("csv", "bz2"), ("csv", "xz"), ("csv", "zst")]
    {
        let file = folder.path().join(format!("points.{format}.{compression}"));
        let file = file.to_string_lossy();
        let copy = format!(
            "COPY ({rows}) TO '{file}' STORED AS {format} OPTIONS ('format.compression' '{compression}')"
        );
        succeed(neighbors(&["-c", &copy]))?;
        let search = format!(
            "SELECT query_id, base_id, distance \
             FROM knn_exact('{file}', k => 1, metric => 'sqeuclidean', vector => ['x', 'y']) \
             ORDER BY query_id"
        );
        let printed = succeed(neighbors(&["-c", &search, "--output-format", "csv"]))?;
        expect(&printed, "query_id,base_id,distance\n1,3,1.0\n2,3,18.0\n3,1,1.0\n")?;
    }
    Ok(())
}

fn settings_of_the_environment() -> Result<(), Failed> {
    let show = ["-c", "SHOW datafusion.execution.target_partitions", "--output-format", "csv"];
    let mut command = neighbors(&show);
    command.env("DATAFUSION_EXECUTION_TARGET_PARTITIONS", "7");
    expect(&succeed(command)?, "name,value\ndatafusion.execution.target_partitions,7\n")?;
    let show = ["-c", "SHOW neighbors.device", "--output-format", "csv"];
    let mut command = neighbors(&show);
    command.env("NEIGHBORS_DEVICE", "cpu");
    expect(&succeed(command)?, "name,value\nneighbors.device,cpu\n")?;
    let Output { status, stderr, .. } = neighbors(&show).env("NEIGHBORS_DEVICE", "tpu").output()?;
    let stderr = String::from_utf8(stderr)?;
    if status.success() || !stderr.contains("NEIGHBORS_DEVICE") || !stderr.contains("tpu") {
        return Err(format!("{status}: {stderr}").into());
    }
    Ok(())
}

fn resets_settings() -> Result<(), Failed> {
    let sql = "SET neighbors.seed = 9; RESET neighbors.seed; SHOW neighbors.seed";
    let printed = succeed(neighbors(&["-c", sql, "--output-format", "csv"]))?;
    expect(&printed, "name,value\nneighbors.seed,0\n")
}

fn nested_columns_in_csv() -> Result<(), Failed> {
    let sql = "SELECT 1 AS a, [1.5, 2.5] AS v, named_struct('b', 2) AS s, NULL::INT[] AS n";
    let printed = succeed(neighbors(&["-c", sql, "--output-format", "csv"]))?;
    expect(&printed, "a,v,s,n\n1,\"[1.5, 2.5]\",{b: 2},\n")
}

fn explains_what_is_not_there() -> Result<(), Failed> {
    let no_file = "there is neither a file nor a table 'sql/data/digit.parquet'";
    let cases = [
        ("SELECT * FROM 'sql/data/digit.parquet'", no_file),
        ("SELECT * FROM knn_exact('sql/data/digit.parquet', k => 1)", no_file),
        ("SELECT * FROM nothing", "table 'datafusion.public.nothing' not found"),
        (
            "SELECT kmeans('sql/data/digits.parquet', 2)",
            "kmeans is called as a table: SELECT * FROM kmeans(…), or with OVER: SELECT kmeans(…) OVER (…) FROM …",
        ),
        ("SELECT knn_exact(1)", "knn_exact is called as a table: SELECT * FROM knn_exact(…)"),
        (
            "SELECT knn_exat('sql/data/digits.parquet', k => 1)",
            "there is no function knn_exat; did you mean knn_exact? It is called as a table: SELECT * FROM knn_exact(…)",
        ),
        (
            "SELECT kmean('sql/data/digits.parquet', 2)",
            "there is no function kmean; did you mean kmeans? It is called as a table: SELECT * FROM kmeans(…), or with OVER: SELECT kmeans(…) OVER (…) FROM …",
        ),
        ("SELECT means(1)", "Invalid function 'means'. Did you mean 'mean'?"),
        (
            "SELECT * FROM knn_exat('sql/data/digits.parquet', k => 2)",
            "there is no table function knn_exat; did you mean knn_exact?",
        ),
    ];
    for (sql, message) in cases {
        let stderr = String::from_utf8(neighbors(&["-c", sql]).output()?.stderr)?;
        expect(&stderr, &format!("error: Error during planning: {message}\n"))?;
    }
    Ok(())
}

fn prints_help() -> Result<(), Failed> {
    let calls: [&[&str]; 4] = [&[], &["-h"], &["--help"], &["help"]];
    for args in calls {
        let Output { status, stdout, stderr } = neighbors(args).output()?;
        let stdout = String::from_utf8(stdout)?;
        if !status.success() || !stdout.contains("Usage: ") || !stderr.is_empty() {
            return Err(format!("{args:?}: {status}: {stdout:?}").into());
        }
    }
    Ok(())
}

fn lists_devices() -> Result<(), Failed> {
    let printed = succeed(neighbors(&["devices"]))?;
    let names: Vec<_> = printed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    match names.as_slice() {
        ["cpu", second, ..] if second.starts_with("cuda") => Ok(()),
        _ => Err(format!("found {printed:?}").into()),
    }
}
