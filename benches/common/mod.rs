//! Shared code of the benches: their options, reading a workload, and timing phases.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use arrow::array::{Array, ArrayRef};
use clap::Args;
use datafusion_neighbors::Metric;
use datafusion_neighbors::internals::exec::{VectorColumn, VectorReader};
use datafusion_neighbors::internals::job::{Phase, Watch};
use datafusion_neighbors::internals::matrix::ElementKind;
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{AnyDevice, DeviceChoice};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// The options of all benches on workloads.
#[derive(Args)]
pub struct Common {
    /// Folder of the Parquet files
    #[arg(long, default_value = "target/workloads")]
    pub dir: PathBuf,
    /// Workloads to run, separated by commas; by default all whose files are there
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    pub device: DeviceChoice,
    /// Strategy of a GPU for comparing pairs, instead of the fastest one: scanned, filtered or
    /// warps
    #[arg(long)]
    way: Option<String>,
    /// Bytes of the GPU's memory to use
    #[arg(long, default_value_t = 0)]
    device_memory: u64,
    /// Maximum number of rows
    #[arg(long, default_value_t = usize::MAX)]
    pub rows: usize,
    /// Timed runs, of which the median is shown
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Number of rows or queries whose results are compared with the definition
    #[arg(long, default_value_t = 20)]
    pub checked: usize,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

impl Common {
    /// Opens the device, and prints its name.
    pub fn open(&self) -> Result<AnyDevice, Box<dyn std::error::Error>> {
        let mut device = AnyDevice::choose(self.device, self.device_memory, 0.0)?;
        if let Some(requested) = &self.way {
            let way = device.test_variants().into_iter().find(|(name, _)| name == requested);
            device = way.ok_or_else(|| format!("this device has no way '{requested}'"))?.1;
        }
        let info = device.info();
        println!("{}: {}", info.name, info.description);
        Ok(device)
    }

    /// The file of a workload's base, if it is there and the workload is to be run.
    pub fn base(&self, workload: &str) -> Option<PathBuf> {
        let path = self.dir.join(format!("{workload}-base.parquet"));
        let is_chosen = self.only.is_empty() || self.only.iter().any(|only| only == workload);
        (is_chosen && path.exists()).then_some(path)
    }

    /// The results of the runs after the first, by their seconds; their median is in the middle.
    pub fn timed<R, E>(&self, run: impl Fn() -> Result<(f64, R), E>) -> Result<Vec<(f64, R)>, E> {
        run()?;
        let mut runs = (0..self.runs.max(1)).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
        runs.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(runs)
    }
}

/// The first `rows` rows of a workload's file; with `doubles`, as float64.
pub fn load(
    path: &Path,
    rows: usize,
    metric: Metric,
    doubles: bool,
) -> Result<Rows, Box<dyn std::error::Error>> {
    let kind = match (metric.is_binary(), doubles) {
        (true, _) => ElementKind::Bits,
        (false, false) => ElementKind::F32,
        (false, true) => ElementKind::F64,
    };
    let column = VectorColumn::Whole("v".to_string());
    let mut reader = VectorReader::new("base", column, kind, metric);
    let mut left = rows;
    let batches = ParquetRecordBatchReaderBuilder::try_new(File::open(path)?)?.build()?;
    for batch in batches {
        let batch = batch?;
        let column: &ArrayRef = batch.column_by_name("v").ok_or("no column v")?;
        let column = column.slice(0, column.len().min(left));
        left -= column.len();
        reader.append(&[column])?;
        if left == 0 {
            break;
        }
    }
    Ok(reader.finish().0)
}

/// The time that a job spends in each phase.
#[derive(Default)]
#[allow(dead_code, reason = "used by some benches")]
pub struct Phases(Mutex<Spent>);

#[derive(Default)]
#[allow(dead_code, reason = "used by some benches")]
struct Spent {
    now: Option<(Phase, Instant)>,
    times: HashMap<Phase, Duration>,
}

impl Watch for Phases {
    fn enter(&self, phase: Phase) {
        let mut spent = self.0.lock().expect("no panic");
        let last = spent.now.replace((phase, Instant::now()));
        if let Some((phase, since)) = last {
            *spent.times.entry(phase).or_default() += since.elapsed();
        }
    }
}

#[allow(dead_code, reason = "used by some benches")]
impl Phases {
    /// Seconds of a phase.
    pub fn seconds(&self, phase: Phase) -> f64 {
        self.0.lock().expect("no panic").times.get(&phase).map_or(0.0, Duration::as_secs_f64)
    }
}
