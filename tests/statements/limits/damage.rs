//! Index files that are damaged, by chance and on purpose: opening and reading a file is an error
//! or gives the original contents. If checksums are corrected after the damage, a crash is
//! excluded, and memory is limited to four times the file.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use datafusion::catalog::TableProvider;
use datafusion::common::{DFSchema, plan_datafusion_err};
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::CreateExternalTable;
use datafusion::object_store::ObjectStoreExt;
use datafusion::object_store::memory::InMemory;
use datafusion::object_store::path::Path;
use datafusion::physical_plan::collect;
use datafusion::prelude::SessionContext;
use futures::future::BoxFuture;
use libtest_mimic::Failed;
use twox_hash::XxHash64;

use crate::support::trial::check;
use crate::support::{DEADLINE, Rng};

/// The bytes of a file's header and footer.
const HEADER: usize = 12;
const FOOTER: usize = 36;

/// The statements that write the files to be damaged.
const FILES: [&str; 5] = [
    "COPY (SELECT value AS id, 'row ' || value AS title, CASE WHEN value % 9 = 2 THEN NULL ELSE [value % 7, value % 5, 1.5] END AS v FROM range(0, 70)) TO 'memory:///0.lsh' STORED AS LSH OPTIONS ('lsh.tables' '3', 'lsh.hashes' '2', 'lsh.width' '2')",
    "COPY (SELECT value AS id, [value % 7 + 1, value % 5, 2, 0] AS v FROM range(0, 40)) TO 'memory:///1.lsh' STORED AS LSH OPTIONS ('lsh.metric' 'cosine', 'lsh.tables' '2', 'lsh.hashes' '2', 'lsh.planes' 'trained', 'lsh.centre' 'true')",
    "COPY (SELECT arrow_cast('row', 'Dictionary(Int32, Utf8)') AS name, arrow_cast(chr(40 + value % 80) || chr(value % 11 + 50), 'Binary') AS b FROM range(0, 50)) TO 'memory:///2.lsh' STORED AS LSH OPTIONS ('lsh.metric' 'hamming', 'lsh.tables' '4', 'lsh.bits' '3', 'lsh.method' 'ewh')",
    "COPY (SELECT value AS id, CASE WHEN value % 8 = 5 THEN NULL ELSE range(value % 5, value % 11) END AS tokens FROM range(0, 60)) TO 'memory:///3.lsh' STORED AS LSH OPTIONS ('lsh.metric' 'jaccard', 'lsh.tables' '3', 'lsh.hashes' '2')",
    "COPY (SELECT value AS id, [sin(value), cos(value * 3), value % 17, 1] AS v FROM range(0, 3000)) TO 'memory:///4.lsh' STORED AS LSH OPTIONS ('lsh.tables' '4', 'lsh.hashes' '3', 'lsh.width' '2')",
];

const SEARCHES: [&str; 5] = [
    "SELECT * FROM knn_lsh(base => damaged, k => 2)",
    "SELECT * FROM knn_lsh(base => damaged, k => 2, box_radius => 0.1)",
    "SELECT * FROM knn_lsh(base => damaged, k => 2)",
    "SELECT * FROM knn_lsh(base => damaged, k => 2)",
    "SELECT * FROM knn_lsh(queries => (SELECT * FROM damaged LIMIT 50), base => damaged, k => 2)",
];

/// Damages files `times` times; `held` runs work and returns its outcome and its peak memory.
pub async fn by_chance<H>(times: u64, held: H) -> Result<(), Failed>
where
    H: AsyncFn(&dyn Fn() -> BoxFuture<'static, Outcome>) -> (Outcome, i64),
{
    // Caught panics are expected: their messages are suppressed.
    std::panic::set_hook(Box::new(|_| {}));
    let done = damaged(times, held).await;
    drop(std::panic::take_hook());
    done
}

async fn damaged<H>(times: u64, held: H) -> Result<(), Failed>
where
    H: AsyncFn(&dyn Fn() -> BoxFuture<'static, Outcome>) -> (Outcome, i64),
{
    let (ctx, store) = in_memory()?;
    let (mut files, mut rows, mut answers) = (Vec::new(), Vec::new(), Vec::new());
    // The peak memory of searches in undamaged files, mostly for planning.
    let mut usual = Vec::new();
    for (i, search) in SEARCHES.into_iter().enumerate() {
        files.push(written(&ctx, &store, i).await?);
        let Outcome { rows: Some(of_file), answer: Some(answer), .. } = look(&ctx, search).await
        else {
            return Err(format!("file {i} is an error as it was written").into());
        };
        rows.push(of_file);
        answers.push(answer);
        usual.push(most_held(&looking(&ctx, search), &held).await);
    }
    let (mut opened, mut read) = (0, 0);
    for seed in 0..times {
        let mut rng = Rng(seed);
        let which = rng.below(files.len() as u64) as usize;
        let other = &files[rng.below(files.len() as u64) as usize];
        let fits = rng.below(2) == 0;
        let damaged = damage(&files[which], other, fits, &mut rng);
        let size = damaged.len() as i64;
        store.put(&Path::from("damaged.lsh"), damaged.into()).await?;
        let work = looking(&ctx, SEARCHES[which]);
        let held = tokio::time::timeout(DEADLINE, held(&work)).await;
        let Ok((outcome, most)) = held else {
            return Err(format!("file {which}, seed {seed}: it does not end").into());
        };
        if !fits {
            let right = [rows[which].clone(), answers[which].clone()];
            for (answer, right) in
                [outcome.rows.as_ref(), outcome.answer.as_ref()].into_iter().zip(right)
            {
                let is_right = answer.is_none_or(|batch| *batch == right);
                check(is_right, format!("file {which}, seed {seed}: other rows"))?;
            }
        }
        let allowed = 4 * size + OTHERS + if outcome.opens { usual[which] } else { 0 };
        check(most <= allowed, format!("file {which}, seed {seed}: {most} bytes for {size}"))?;
        opened += u64::from(outcome.opens);
        read += u64::from(outcome.rows.is_some());
    }
    println!("{times} files: {opened} opened, {read} read");
    check(opened > times / 100, format!("only {opened} of {times} were opened"))
}

/// A file with correct checksums whose summary claims a million dimensions for vectors of 3: no
/// hash functions are allocated for them.
pub async fn other_dimensions<H>(held: H) -> Result<(), Failed>
where
    H: AsyncFn(&dyn Fn() -> BoxFuture<'static, Outcome>) -> (Outcome, i64),
{
    let (ctx, store) = in_memory()?;
    let file = written(&ctx, &store, 0).await?;
    let work = looking(&ctx, SEARCHES[0]);
    let usual = most_held(&work, &held).await;
    let mut parts = Parts::of(&file);
    parts.set("dimensions", "1000000");
    let size = file.len() as i64;
    store.put(&Path::from("damaged.lsh"), parts.file().into()).await?;
    let (outcome, most) = held(&work).await;
    check(outcome.opens && outcome.rows.is_some(), "its columns are not read")?;
    check(outcome.answer.is_none(), "a search finds something")?;
    check(most <= usual + 4 * size + OTHERS, format!("{most} bytes for {size}, usually {usual}"))
}

/// A session with an in-memory object store.
fn in_memory() -> Result<(SessionContext, Arc<InMemory>)> {
    let ctx = SessionContext::new();
    datafusion_neighbors::register_all(&ctx)?;
    let store = Arc::new(InMemory::new());
    let url = "memory:///".parse().map_err(|error| plan_datafusion_err!("{error}"))?;
    ctx.register_object_store(&url, store.clone());
    Ok((ctx, store))
}

/// Writes a file, and copies it to the location that is read next.
async fn written(ctx: &SessionContext, store: &InMemory, which: usize) -> Result<Vec<u8>> {
    ctx.sql(FILES[which]).await?.collect().await?;
    let file = store.get(&Path::from(format!("{which}.lsh"))).await?.bytes().await?;
    store.put(&Path::from("damaged.lsh"), file.clone().into()).await?;
    Ok(file.to_vec())
}

/// The peak memory of five runs.
async fn most_held<H>(work: &dyn Fn() -> BoxFuture<'static, Outcome>, held: &H) -> i64
where
    H: AsyncFn(&dyn Fn() -> BoxFuture<'static, Outcome>) -> (Outcome, i64),
{
    let mut most = 0;
    for _ in 0..5 {
        most = held(work).await.1.max(most);
    }
    most
}

/// Memory that is independent of the file and varies between runs.
const OTHERS: i64 = 1 << 20;

/// A function that opens, reads and searches the damaged file.
fn looking(
    ctx: &SessionContext,
    search: &'static str,
) -> impl Fn() -> BoxFuture<'static, Outcome> + use<> {
    let ctx = ctx.clone();
    move || {
        let ctx = ctx.clone();
        Box::pin(async move { look(&ctx, search).await })
    }
}

/// The outcome for a damaged file.
pub struct Outcome {
    opens: bool,
    rows: Option<RecordBatch>,
    answer: Option<RecordBatch>,
}

async fn look(ctx: &SessionContext, search: &str) -> Outcome {
    let Ok(table) = open(ctx, "memory:///damaged.lsh").await else {
        return Outcome { opens: false, rows: None, answer: None };
    };
    let rows = scan(ctx, table.clone()).await.ok();
    let answer = async {
        ctx.register_table("damaged", table)?;
        let frame = ctx.sql(search).await?;
        let schema = frame.schema().inner().clone();
        Ok::<_, DataFusionError>(concat_batches(&schema, &frame.collect().await?)?)
    };
    let answer = answer.await.ok();
    let _ = ctx.deregister_table("damaged");
    Outcome { opens: true, rows, answer }
}

async fn open(ctx: &SessionContext, location: &str) -> Result<Arc<dyn TableProvider>> {
    let schema = Arc::new(DFSchema::empty());
    let table = CreateExternalTable::builder("t", location, "LSH", schema).build();
    let state = ctx.state();
    state.table_factories()["LSH"].create(&state, &table).await
}

async fn scan(ctx: &SessionContext, table: Arc<dyn TableProvider>) -> Result<RecordBatch> {
    let state = ctx.state();
    let plan = table.scan(&state, None, &[], None).await?;
    let schema = plan.schema();
    Ok(concat_batches(&schema, &collect(plan, ctx.task_ctx()).await?)?)
}

/// A damaged copy of a file; if it `fits`, with the checksums and lengths corrected.
fn damage(file: &[u8], other: &[u8], fits: bool, rng: &mut Rng) -> Vec<u8> {
    let Some(mut parts) = fits.then(|| Parts::of(file)) else {
        return change(file.to_vec(), other, rng);
    };
    let others = Parts::of(other);
    match rng.below(8) {
        0 => parts.entries = change(parts.entries, &others.entries, rng),
        1 => {
            // Replaces a value by another of its kind.
            let text = String::from_utf8_lossy(&parts.entries).into_owned();
            let digits: Vec<usize> = text
                .bytes()
                .enumerate()
                .filter(|(_, b)| b.is_ascii_digit())
                .map(|(i, _)| i)
                .collect();
            let at = digits[rng.below(digits.len() as u64) as usize];
            parts.entries[at] = b'0' + rng.below(10) as u8;
        }
        2 => {
            let at = rng.below(parts.sections.len() as u64) as usize;
            parts.sections.remove(at);
        }
        3 => {
            let [a, b] = [0; 2].map(|_| rng.below(parts.sections.len() as u64) as usize);
            parts.sections.swap(a, b);
        }
        4 => {
            let [a, b] =
                [&parts.sections, &others.sections].map(|s| rng.below(s.len() as u64) as usize);
            parts.sections[a] = others.sections[b].clone();
        }
        _ => {
            let at = rng.below(parts.sections.len() as u64) as usize;
            let section = std::mem::take(&mut parts.sections[at]);
            parts.sections[at] = change(section, other, rng);
        }
    }
    parts.file()
}

/// The parts of a file, as the format is documented.
struct Parts {
    /// The number of entries, and their names and values.
    entries: Vec<u8>,
    sections: Vec<Vec<u8>>,
}

impl Parts {
    fn of(file: &[u8]) -> Self {
        let long = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap()) as usize;
        let number = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
        let footer = file.len() - FOOTER;
        let start = long(footer);
        let mut at = start + 4;
        for _ in 0..number(start) {
            at += 8 + number(at) + number(at + 4);
        }
        let entries = file[start..at].to_vec();
        let mut first = HEADER;
        let sections = (0..long(at)).map(|i| {
            let section: Range<usize> = first..first + long(at + 8 + 16 * i);
            first = section.end;
            file[section].to_vec()
        });
        Self { sections: sections.collect(), entries }
    }

    /// Replaces the value of a summary entry.
    fn set(&mut self, name: &str, value: &str) {
        let known = self.entries.windows(name.len()).position(|bytes| bytes == name.as_bytes());
        let at = known.expect("an entry of this name");
        // The lengths of the name and of the value precede both.
        let length = u32::from_le_bytes(self.entries[at - 4..at].try_into().unwrap()) as usize;
        let after = at + name.len();
        self.entries.splice(after..after + length, value.bytes());
        self.entries[at - 4..at].copy_from_slice(&(value.len() as u32).to_le_bytes());
    }

    fn file(self) -> Vec<u8> {
        let mut file = b"DFNLSH\r\n\x01\0\0\0".to_vec();
        let mut summary = self.entries;
        summary.extend((self.sections.len() as u64).to_le_bytes());
        for section in &self.sections {
            summary.extend((section.len() as u64).to_le_bytes());
            summary.extend(XxHash64::oneshot(0, section).to_le_bytes());
            file.extend(section);
        }
        let footer = [file.len() as u64, summary.len() as u64, XxHash64::oneshot(0, &summary)];
        file.extend(summary);
        footer.iter().for_each(|number| file.extend(number.to_le_bytes()));
        file.extend(b"\x01\0\0\0DFNLSH\r\n");
        file
    }
}

/// Bytes with one or several changes.
fn change(mut bytes: Vec<u8>, other: &[u8], rng: &mut Rng) -> Vec<u8> {
    for _ in 0..1 + rng.below(3) {
        if bytes.is_empty() {
            bytes.push(rng.below(256) as u8);
        }
        let all = bytes.len() as u64;
        let at = rng.below(all) as usize;
        let end = at + rng.below((all - at as u64).min(40) + 1) as usize;
        match rng.below(8) {
            0 | 1 => bytes[at] ^= 1 << rng.below(8),
            2 => bytes[at] = rng.below(256) as u8,
            3 => {
                let numbers = [
                    0,
                    1,
                    2,
                    7,
                    0x7f,
                    0xff,
                    0xffff,
                    u64::MAX,
                    i64::MAX as u64,
                    all,
                    all - 1,
                    all + 1,
                    1 << 31,
                    1 << 32,
                ];
                let number = numbers[rng.below(numbers.len() as u64) as usize].to_le_bytes();
                let width = [1, 2, 4, 8][rng.below(4) as usize].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&number[..width]);
            }
            4 => bytes.truncate(at),
            5 => drop(bytes.drain(at..end)),
            6 => {
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            _ => {
                let from = rng.below(other.len().max(1) as u64) as usize;
                let to = other.len().min(from + end - at);
                let part = other.get(from..to).unwrap_or_default().to_vec();
                bytes.splice(at..end, part);
            }
        }
    }
    bytes
}
