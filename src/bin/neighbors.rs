//! `neighbors`: SQL over Parquet files, with nearest neighbours. Runs the statements it is given,
//! one after the other, and stops at the first error.
//!
//! It is made for jobs; DataFusion's own shell is made for typing.

use std::cmp::Ordering;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use arrow::array::{Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use arrow::error::ArrowError;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use arrow::util::pretty::pretty_format_batches;
use arrow::{csv, json};
use clap::error::ErrorKind;
use clap::{Parser, Subcommand, ValueEnum};
use datafusion::common::utils::datafusion_strsim::levenshtein;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SendableRecordBatchStream;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion::sql::parser::{DFParser, ResetStatement, Statement};
use datafusion::sql::sqlparser::dialect::dialect_from_str;
use datafusion_neighbors::NeighborsOptions;
use futures::TryStreamExt;

/// Nearest neighbours and clusters of vectors, in SQL.
///
/// Files are tables: SELECT * FROM 'items.parquet'. DataFusion's settings are taken from the
/// environment (DATAFUSION_EXECUTION_TARGET_PARTITIONS=4) or from SET statements, and so are those of
/// neighbors (NEIGHBORS_DEVICE=cpu).
#[derive(Parser)]
#[command(version, arg_required_else_help = true, args_conflicts_with_subcommands = true)]
struct Cli {
    /// Statements to run, separated by semicolons; before those of files
    #[arg(short = 'c', long = "command", value_name = "SQL")]
    commands: Vec<String>,
    /// Files of statements to run
    #[arg(short, long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The form in which results are printed
    #[arg(long, value_enum, default_value_t)]
    output_format: Format,
    #[command(subcommand)]
    task: Option<Task>,
}

#[derive(Subcommand)]
enum Task {
    /// List the devices of this machine
    Devices,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Format {
    /// A table drawn in text
    #[default]
    Table,
    /// Comma-separated values with a header
    Csv,
    /// One JSON object a line
    Json,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // A call without arguments asks for help.
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return match write!(io::stdout(), "{}", error.render()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            };
        }
        Err(error) => error.exit(),
    };
    execute(&cli)
}

/// The allocator: jemalloc with huge pages, which it keeps for a while. Reading vectors allocates
/// large buffers for a short time, and each new page of 4 KiB costs one or two microseconds. Threads
/// share two arenas, so that they use each other's freed pages: with four arenas a core, a self-join
/// of 200,000 × 2 takes 10% more memory and 5% more time.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod allocator {
    #[global_allocator]
    static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

    const OPTIONS: &[u8] = b"narenas:2,thp:always,metadata_thp:auto,dirty_decay_ms:10000\0";

    /// Options that jemalloc reads when the program starts, before `_RJEM_MALLOC_CONF` of the
    /// environment.
    // SAFETY: jemalloc declares this symbol as `const char *`; the value is the address of a static
    // string that ends with a zero byte.
    #[allow(unsafe_code)]
    #[unsafe(export_name = "_rjem_malloc_conf")]
    static MALLOC_CONF: &[u8; OPTIONS.len()] = match OPTIONS.first_chunk() {
        Some(options) => options,
        None => unreachable!(),
    };
}

#[tokio::main]
async fn execute(cli: &Cli) -> ExitCode {
    let result = match cli.task {
        Some(Task::Devices) => print_devices(&mut io::stdout().lock()).map_err(Into::into),
        None => run(cli).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has closed the pipe.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let message = error.strip_backtrace();
            let line = message.split('\n').map(str::trim).collect::<Vec<_>>().join(" ");
            eprintln!("error: {}{}", line.trim(), sources(&error));
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &DataFusionError) -> bool {
    let kind = match error {
        DataFusionError::IoError(error) => error.kind(),
        DataFusionError::ArrowError(error, _) => match error.as_ref() {
            ArrowError::IoError(_, error) => error.kind(),
            // The CSV writer keeps only the text of the error.
            ArrowError::CsvError(text) if text.contains("Broken pipe") => return true,
            _ => return false,
        },
        _ => return false,
    };
    kind == io::ErrorKind::BrokenPipe
}

/// The causes of an external error; messages of DataFusion include theirs.
fn sources(error: &DataFusionError) -> String {
    let DataFusionError::External(external) = error.find_root() else {
        return String::new();
    };
    let mut all = String::new();
    let mut source = external.source();
    while let Some(cause) = source {
        all.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    all
}

async fn run(cli: &Cli) -> Result<()> {
    let config = SessionConfig::from_env()?
        .with_information_schema(true)
        .with_option_extension(NeighborsOptions::from_env()?);
    let ctx = SessionContext::new_with_config(config).enable_url_table();
    datafusion_neighbors::register_all(&ctx)?;
    for sql in &cli.commands {
        run_statements(&ctx, sql, cli.output_format).await.map_err(|e| explained(e, &ctx))?;
    }
    for file in &cli.files {
        let sql = std::fs::read_to_string(file).map_err(|error| {
            let message = format!("{}: {error}", file.display());
            DataFusionError::IoError(io::Error::new(error.kind(), message))
        })?;
        run_statements(&ctx, &sql, cli.output_format).await.map_err(|e| explained(e, &ctx))?;
    }
    Ok(())
}

/// Rewords an error that DataFusion reports for a missing file, or for a table function (possibly
/// misspelt) called as a scalar one.
fn explained(error: DataFusionError, ctx: &SessionContext) -> DataFusionError {
    let message = error.strip_backtrace();
    let meant = missing_file(&message).or_else(|| misplaced_function(&message, ctx));
    meant.map_or(error, DataFusionError::Plan)
}

fn missing_file(message: &str) -> Option<String> {
    let table = between(message, "table '", "' not found")?;
    // The path follows the names of a catalog and a schema.
    let path = table.splitn(3, '.').nth(2)?;
    let is_path = path.contains('/') || Path::new(path).extension().is_some();
    (is_path && !path.contains("://") && !Path::new(path).exists())
        .then(|| format!("there is neither a file nor a table '{path}'"))
}

fn misplaced_function(message: &str, ctx: &SessionContext) -> Option<String> {
    let name = between(message, "Invalid function '", "'")?;
    let state = ctx.state();
    let call = |name: &str| {
        let group = match state.window_functions().contains_key(name) {
            true => format!(", or with OVER: SELECT {name}(…) OVER (…) FROM …"),
            false => String::new(),
        };
        format!("is called as a table: SELECT * FROM {name}(…){group}")
    };
    if state.table_functions().contains_key(name) {
        return Some(format!("{name} {}", call(name)));
    }
    // DataFusion suggests scalar functions only.
    let suggested = between(message, "Did you mean '", "'").unwrap_or_default();
    let names = state.table_functions().keys();
    let (edits, meant) = names.map(|known| (levenshtein(known, name), known)).min()?;
    let is_nearer = match edits.cmp(&levenshtein(suggested, name)) {
        Ordering::Less => true,
        Ordering::Equal => meant != suggested && meant.chars().next() == name.chars().next(),
        Ordering::Greater => false,
    };
    (edits <= 2 && is_nearer)
        .then(|| format!("there is no function {name}; did you mean {meant}? It {}", call(meant)))
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    Some(text.split_once(before)?.1.split_once(after)?.0)
}

async fn run_statements(ctx: &SessionContext, sql: &str, format: Format) -> Result<()> {
    let dialect = ctx.state().config_options().sql_parser.dialect.to_string();
    let dialect = dialect_from_str(&dialect).ok_or_else(|| {
        DataFusionError::Configuration(format!("unknown SQL dialect '{dialect}'"))
    })?;
    for statement in DFParser::parse_sql_with_dialect(sql, dialect.as_ref())? {
        if let Statement::Reset(ResetStatement::Variable(name)) = &statement
            && name.to_string().starts_with("neighbors.")
        {
            // DataFusion resets its own settings only.
            ctx.sql(&format!("SET {name} = DEFAULT")).await?.collect().await?;
            continue;
        }
        let plan = ctx.state().statement_to_plan(statement).await?;
        let result = ctx.execute_logical_plan(plan).await?.execute_stream().await?;
        print(result, format, &mut io::stdout().lock()).await?;
    }
    Ok(())
}

async fn print(
    mut result: SendableRecordBatchStream,
    format: Format,
    out: &mut impl Write,
) -> Result<()> {
    let schema = result.schema();
    match format {
        Format::Table => {
            let mut batches: Vec<RecordBatch> = result.try_collect().await?;
            if !schema.fields().is_empty() {
                if batches.is_empty() {
                    batches.push(RecordBatch::new_empty(schema));
                }
                writeln!(out, "{}", pretty_format_batches(&batches)?)?;
            }
        }
        Format::Csv if !schema.fields().is_empty() => {
            let mut writer = csv::Writer::new(out);
            writer.write(&with_nested_as_text(&RecordBatch::new_empty(schema))?)?;
            while let Some(batch) = result.try_next().await? {
                writer.write(&with_nested_as_text(&batch)?)?;
            }
        }
        Format::Csv | Format::Json => {
            let mut writer = json::LineDelimitedWriter::new(out);
            while let Some(batch) = result.try_next().await? {
                writer.write(&batch)?;
            }
            writer.finish()?;
        }
    }
    Ok(())
}

/// Nested values as the text of a printed table: CSV has no lists, structs or maps.
fn with_nested_as_text(batch: &RecordBatch) -> Result<RecordBatch> {
    let (mut fields, mut columns) = (Vec::new(), Vec::new());
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        if !field.data_type().is_nested() {
            fields.push(field.clone());
            columns.push(column.clone());
            continue;
        }
        let options = FormatOptions::default();
        let formatter = ArrayFormatter::try_new(column, &options)?;
        let text = (0..column.len())
            .map(|row| column.is_valid(row).then(|| formatter.value(row).to_string()));
        fields.push(Arc::new(Field::new(field.name(), DataType::Utf8, true)));
        columns.push(Arc::new(text.collect::<StringArray>()));
    }
    Ok(RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?)
}

fn print_devices(out: &mut impl Write) -> io::Result<()> {
    for device in datafusion_neighbors::devices() {
        writeln!(out, "{:8} {}", device.name, device.description)?;
    }
    if let Some(reason) = datafusion_neighbors::why_no_gpu() {
        writeln!(out, "{:8} not available: {reason}", "cuda")?;
    }
    Ok(())
}
