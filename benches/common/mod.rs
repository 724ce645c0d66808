//! Shared code of the benches: opening a device, reading a workload, and timing phases.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use arrow::array::{Array, ArrayRef};
use datafusion_neighbors::Metric;
use datafusion_neighbors::internals::exec::{VectorColumn, VectorReader};
use datafusion_neighbors::internals::job::{Phase, Watch};
use datafusion_neighbors::internals::matrix::ElementKind;
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{AnyDevice, DeviceChoice};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// A device with a memory limit; `way` selects a strategy for comparing pairs instead of the
/// device's own choice.
#[allow(dead_code, reason = "used by some benches")]
pub fn device(
    choice: DeviceChoice,
    memory: u64,
    way: Option<&str>,
) -> Result<AnyDevice, Box<dyn std::error::Error>> {
    let device = AnyDevice::choose(choice, memory, 0.0)?;
    let Some(requested) = way else { return Ok(device) };
    let way = device.test_variants().into_iter().find(|(name, _)| *name == requested);
    Ok(way.ok_or_else(|| format!("this device has no way '{requested}'"))?.1)
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
