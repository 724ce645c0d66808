//! The SQL interface: the contracts in `sql/*.slt` and the examples of pages, on every device of
//! this machine, and the functions in a session.
//!
//! Trials of a missing device are ignored.

mod numbers;
mod order;
mod pages;
mod session;
#[path = "../../support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Float16Type, Float32Type, Float64Type};
use arrow::util::display::array_value_to_string;
use async_trait::async_trait;
use datafusion::error::{DataFusionError, Result};
use datafusion::prelude::{SessionConfig, SessionContext};
use libtest_mimic::{Arguments, Failed, Trial};
use sqllogictest::{AsyncDB, DBOutput, DefaultColumnType, Runner};
use support::trial::run;

fn main() {
    // Paths in statements are relative to this folder.
    std::env::set_current_dir(support::files::root()).expect("the folder that has `sql`");
    let mut trials = Vec::new();
    for (device, available) in support::devices() {
        for file in files_with("slt") {
            let name = format!("{device}::{}", file_name(&file));
            let trial = Trial::test(name, move || contract(&file, device));
            trials.push(trial.with_ignored_flag(available.is_none()));
        }
        let readme = support::files::root().join("README.md");
        for page in files_with("md").into_iter().chain([readme]) {
            let name = format!("{device}::{}", file_name(&page));
            let trial = Trial::test(name, move || run(pages::run(&page, device)));
            trials.push(trial.with_ignored_flag(available.is_none()));
        }
    }
    let links = pages::links_lead_somewhere;
    trials.push(Trial::test("pages::links_lead_somewhere", links));
    let numbers = numbers::are_those_of_the_code;
    trials.push(Trial::test("pages::numbers_are_those_of_the_code", numbers));
    for (name, run) in session::TESTS {
        trials.push(Trial::test(format!("session::{name}"), *run));
    }
    let has_gpu =
        support::devices().iter().any(|(name, available)| *name == "cuda" && available.is_some());
    for (name, run) in session::TESTS_OF_GPUS {
        let trial = Trial::test(format!("session::{name}"), *run);
        trials.push(trial.with_ignored_flag(!has_gpu));
    }
    for (name, run) in session::waiting::TESTS {
        trials.push(Trial::test(format!("waiting::{name}"), run));
    }
    for (name, run) in order::TESTS {
        trials.push(Trial::test(format!("order::{name}"), run));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn files_with(extension: &str) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(support::files::root().join("sql")).expect("sql/ is there");
    let mut files: Vec<_> = folder.map(|entry| entry.expect("a readable entry").path()).collect();
    files.retain(|path| path.extension().is_some_and(|suffix| suffix == extension));
    files.sort();
    files
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn contract(file: &Path, device: &'static str) -> Result<(), Failed> {
    let runtime = tokio::runtime::Runtime::new()?;
    let _entered = runtime.enter();
    // Answers must be the same on several partitions and on one.
    for partitions in [4, 1] {
        let mut runner = Runner::new(|| Session::connect(device, partitions));
        let run = runner.run_file_async(file);
        runtime.block_on(run).map_err(|error| format!("{partitions} partitions: {error}"))?;
    }
    Ok(())
}

struct Session(SessionContext);

impl Session {
    async fn connect(device: &str, partitions: usize) -> Result<Self> {
        let config =
            SessionConfig::new().with_information_schema(true).with_target_partitions(partitions);
        let ctx = SessionContext::new_with_config(config).enable_url_table();
        datafusion_neighbors::register_all(&ctx)?;
        ctx.sql(&format!("SET neighbors.device = '{device}'")).await?.collect().await?;
        Ok(Self(ctx))
    }
}

#[async_trait]
impl AsyncDB for Session {
    type Error = DataFusionError;
    type ColumnType = DefaultColumnType;

    async fn run(&mut self, sql: &str) -> Result<DBOutput<DefaultColumnType>> {
        let result = self.0.sql(sql).await?;
        let types: Vec<_> =
            result.schema().fields().iter().map(|f| column_type(f.data_type())).collect();
        let batches = result.collect().await?;
        if types.is_empty() {
            return Ok(DBOutput::StatementComplete(0));
        }
        let mut rows = Vec::new();
        for batch in &batches {
            for row in 0..batch.num_rows() {
                rows.push(cells(batch, row)?);
            }
        }
        Ok(DBOutput::Rows { types, rows })
    }

    async fn shutdown(&mut self) {}

    fn engine_name(&self) -> &str {
        "datafusion"
    }
}

fn column_type(data_type: &DataType) -> DefaultColumnType {
    match data_type {
        data_type if data_type.is_integer() => DefaultColumnType::Integer,
        data_type if data_type.is_floating() => DefaultColumnType::FloatingPoint,
        _ => DefaultColumnType::Text,
    }
}

fn cells(batch: &RecordBatch, row: usize) -> Result<Vec<String>> {
    let cell = |column: &dyn Array| {
        if column.is_null(row) {
            return Ok("NULL".to_string());
        }
        Ok(match column.data_type() {
            DataType::Float16 => column.as_primitive::<Float16Type>().value(row).to_string(),
            DataType::Float32 => column.as_primitive::<Float32Type>().value(row).to_string(),
            DataType::Float64 => column.as_primitive::<Float64Type>().value(row).to_string(),
            _ => match array_value_to_string(column, row)? {
                empty if empty.is_empty() => "(empty)".to_string(),
                text => text,
            },
        })
    };
    batch.columns().iter().map(|column| cell(column.as_ref())).collect()
}
