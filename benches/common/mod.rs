//! What the benches share: reading a workload.

use std::fs::File;
use std::path::Path;

use datafusion::arrow::array::{Array, ArrayRef};
use datafusion::parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use datafusion_neighbors::Metric;
use datafusion_neighbors::exec::{VectorColumn, VectorReader};
use datafusion_neighbors::matrix::{ElementKind, Rows};

/// The first so many rows of a workload's file, numbers as doubles if asked for.
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
