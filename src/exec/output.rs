//! What all operators put out.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Float32Array, Float64Array, RecordBatch, UInt32Array};
use datafusion::arrow::compute::take;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::error::Result;

use crate::device::Distances;

/// Distances as a column.
pub(super) fn array_of(distances: Distances) -> ArrayRef {
    match distances {
        Distances::F32(distances) => Arc::new(Float32Array::from(distances)),
        Distances::F64(distances) => Arc::new(Float64Array::from(distances)),
    }
}

/// The batches of an input with more columns, which have a value for each row that has a vector, and
/// are NULL for the others. `positions` says where rows with vectors are in the batches.
pub(super) fn add_columns(
    batches: Vec<RecordBatch>,
    new: &[ArrayRef],
    positions: &[u32],
    schema: &SchemaRef,
) -> Result<Vec<RecordBatch>> {
    let (mut start, mut next) = (0, 0);
    let mut widened = Vec::with_capacity(batches.len());
    for batch in batches {
        let end = start + batch.num_rows();
        // For each row of the batch, which row with a vector it is.
        let places: UInt32Array = (start..end)
            .map(|position| {
                let here = positions.get(next).is_some_and(|p| *p as usize == position);
                here.then(|| {
                    next += 1;
                    (next - 1) as u32
                })
            })
            .collect();
        let mut columns = batch.columns().to_vec();
        for new in new {
            columns.push(take(new, &places, None)?);
        }
        widened.push(RecordBatch::try_new(schema.clone(), columns)?);
        start = end;
    }
    Ok(widened)
}
