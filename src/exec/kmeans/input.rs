//! The inputs of k-means as rows, with their weights and groups.

use datafusion::arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, Float64Type};
use datafusion::common::{exec_err, internal_err};
use datafusion::error::Result;

use super::spec::KMeansSpec;
use crate::exec::collect::columns;
use crate::exec::rows::{Read, Reading};
use crate::exec::side::Side;
use crate::exec::vectors::VectorReader;
use crate::job::{Job, Reserved};
use crate::matrix::Rows;

/// An input, read.
pub(super) struct Input {
    pub rows: Rows,
    /// The position of each row that has a vector.
    pub positions: Vec<u32>,
    pub weights: Option<Vec<f64>>,
    pub first: Option<Rows>,
    _reserved: [Option<Reserved>; 3],
}

impl Input {
    pub fn read(
        spec: &KMeansSpec,
        side: &Side,
        batches: &[RecordBatch],
        first: Option<(Side, Vec<RecordBatch>)>,
        job: &Job,
    ) -> Result<Self> {
        let kind = side.kind;
        let metric = spec.params.metric();
        let reader = VectorReader::new("input", spec.vector.clone(), kind, metric);
        let all = batches.iter().map(RecordBatch::num_rows).sum();
        let mut reading = Reading::new(reader, all);
        let weighs = spec.weight.as_ref().map(|_| all);
        let of_weights = weighs.map(|all| job.reserve("weights", all * size_of::<f64>()));
        let of_weights = of_weights.transpose()?;
        let mut weights = weighs.map(Vec::with_capacity);
        let mut seen = 0;
        for batch in batches {
            if let (Some(weights), Some(name)) = (&mut weights, &spec.weight) {
                read_weights(name, batch, &columns(batch, &side.vector), seen, weights)?;
            }
            reading.append(batch, side, job)?;
            seen += batch.num_rows();
        }
        let Read { rows, positions, reserved } = reading.finish();
        let mut of_first = None;
        let first = match first {
            Some((side, batches)) => {
                let vector = spec.init_vector.clone().unwrap_or_else(|| spec.vector.clone());
                let dim = (!rows.is_empty()).then(|| rows.matrix().dim());
                let reader = VectorReader::new("init", vector, kind, metric);
                let all = batches.iter().map(RecordBatch::num_rows).sum();
                let mut reading = Reading::new(reader.continuing(0, dim), all);
                for batch in &batches {
                    reading.append(batch, &side, job)?;
                }
                let read = reading.finish();
                of_first = read.reserved;
                Some(read.rows)
            }
            None => None,
        };
        let _reserved = [reserved, of_weights, of_first];
        Ok(Self { rows, positions, weights, first, _reserved })
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
