//! Row weights from a column of numbers.

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type};
use datafusion::common::{exec_err, internal_err};
use datafusion::error::Result;

use super::input_columns::InputColumns;
use super::vector_column::shown;
use crate::exec::operator::streams::columns;
use crate::job::{Job, Reserved};

/// The weights of the rows with vectors, if there is a weight column, and their memory reservation.
///
/// # Errors
/// A weight that is negative, not finite or NULL, of a row with a vector;
/// [`HostMemory`](crate::Error::HostMemory).
pub(in crate::exec) fn weights(
    column: Option<&str>,
    batches: &[RecordBatch],
    input_columns: &InputColumns,
    job: &Job,
) -> Result<(Option<Vec<f64>>, Option<Reserved>)> {
    let Some(name) = column else { return Ok((None, None)) };
    let rows: usize = batches.iter().map(RecordBatch::num_rows).sum();
    let reserved = job.reserve("weights", rows * size_of::<f64>())?;
    let (mut weights, mut seen) = (Vec::with_capacity(rows), 0);
    for batch in batches {
        read(name, batch, &columns(batch, &input_columns.vector), seen, &mut weights)?;
        seen += batch.num_rows();
    }
    Ok((Some(weights), Some(reserved)))
}

/// Appends the weights of the rows with vectors of a batch.
fn read(
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
        let (row, name) = (seen + row, shown(name));
        return exec_err!(
            "row {row} of input, column \"{name}\": weight is {problem}; accepted are numbers from 0"
        );
    }
    Ok(())
}
