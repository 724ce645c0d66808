//! The inputs of k-means as rows, with their weights and groups.

use datafusion::arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, Float64Type};
use datafusion::common::{exec_err, internal_err};
use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryReservation;

use super::spec::KMeansSpec;
use crate::exec::collect::columns;
use crate::exec::side::Side;
use crate::exec::vectors::VectorReader;
use crate::job::Job;
use crate::matrix::Rows;

/// An input, read.
pub(super) struct Input {
    pub rows: Rows,
    /// The position of each row that has a vector.
    pub positions: Vec<u32>,
    pub weights: Option<Vec<f64>>,
    pub first: Option<Rows>,
}

impl Input {
    pub fn read(
        spec: &KMeansSpec,
        side: &Side,
        batches: &[RecordBatch],
        first: Option<(Side, Vec<RecordBatch>)>,
        reservation: &MemoryReservation,
        job: &Job,
    ) -> Result<Self> {
        let kind = side.kind;
        let metric = spec.params.metric();
        let mut reader = VectorReader::new("input", spec.vector.clone(), kind, metric);
        let mut weights = spec.weight.as_ref().map(|_| Vec::new());
        let mut seen = 0;
        for batch in batches {
            job.check()?;
            let vectors = columns(batch, &side.vector);
            if let (Some(weights), Some(name)) = (&mut weights, &spec.weight) {
                read_weights(name, batch, &vectors, seen, weights)?;
            }
            let before = reader.bytes();
            reader.append(&vectors)?;
            // The rows, and their copy on the device.
            reservation.try_grow(2 * (reader.bytes() - before))?;
            seen += batch.num_rows();
        }
        let (rows, positions) = reader.finish();
        let first = match first {
            Some((side, batches)) => {
                let vector = spec.init_vector.clone().unwrap_or_else(|| spec.vector.clone());
                let dim = (!rows.is_empty()).then(|| rows.matrix().dim());
                let reader = VectorReader::new("init", vector, kind, metric);
                let mut reader = reader.continuing(0, dim);
                for batch in &batches {
                    reader.append(&columns(batch, &side.vector))?;
                }
                Some(reader.finish().0)
            }
            None => None,
        };
        Ok(Self { rows, positions, weights, first })
    }
}

/// The weights of the rows of a batch that have vectors.
fn read_weights(
    name: &str,
    batch: &RecordBatch,
    vectors: &[ArrayRef],
    seen: usize,
    out: &mut Vec<f64>,
) -> Result<()> {
    let Some(column) = batch.column_by_name(name) else {
        return internal_err!("input lost its column '{name}'");
    };
    let column = cast(column, &DataType::Float64)?;
    let weights = column.as_primitive::<Float64Type>();
    for row in 0..batch.num_rows() {
        if vectors.iter().all(|vector| vector.is_null(row)) {
            continue;
        }
        let problem = match weights.is_valid(row).then(|| weights.value(row)) {
            Some(weight) if weight >= 0.0 && weight.is_finite() => {
                out.push(weight);
                continue;
            }
            Some(weight) => weight.to_string(),
            None => "NULL".to_string(),
        };
        let row = seen + row;
        return exec_err!(
            "row {row} of input, column \"{name}\": weight is {problem}; accepted are numbers from 0"
        );
    }
    Ok(())
}
