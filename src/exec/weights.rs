//! The weights of rows, from a column of numbers.

use datafusion::arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, Float64Type};
use datafusion::common::{exec_err, internal_err};
use datafusion::error::Result;

use super::collect::columns;
use super::side::Side;
use crate::job::{Job, Reserved};

/// Weights that are read batch by batch, if there is a column of them.
pub(super) struct Weights<'a> {
    column: Option<&'a str>,
    read: Vec<f64>,
    /// Rows seen so far.
    seen: usize,
    reserved: Option<Reserved>,
}

impl<'a> Weights<'a> {
    /// Nothing read yet; the batches have `expected` rows in all.
    pub fn new(column: Option<&'a str>, expected: usize, job: &Job) -> Result<Self> {
        let expected = column.map(|_| expected);
        let reserved = expected.map(|rows| job.reserve("weights", rows * size_of::<f64>()));
        let reserved = reserved.transpose()?;
        let read = Vec::with_capacity(expected.unwrap_or(0));
        Ok(Self { column, read, seen: 0, reserved })
    }

    /// Reads the weights of the next batch.
    ///
    /// # Errors
    /// A weight that is no finite number from 0, of a row that has a vector.
    pub fn append(&mut self, batch: &RecordBatch, side: &Side) -> Result<()> {
        if let Some(name) = self.column {
            let vectors = columns(batch, &side.vector);
            read(name, batch, &vectors, self.seen, &mut self.read)?;
        }
        self.seen += batch.num_rows();
        Ok(())
    }

    /// The weights of the rows that have vectors, and their memory reservation.
    pub fn finish(self) -> (Option<Vec<f64>>, Option<Reserved>) {
        (self.column.map(|_| self.read), self.reserved)
    }
}

/// The weights of the rows of a batch that have vectors.
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
        let row = seen + row;
        return exec_err!(
            "row {row} of input, column \"{name}\": weight is {problem}; accepted are numbers from 0"
        );
    }
    Ok(())
}
