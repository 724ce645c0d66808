//! Output columns and batches shared by all operators.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Float64Array, RecordBatch};
use arrow::datatypes::SchemaRef;
use datafusion::error::Result;

use crate::device::Distances;

/// A column of distances.
pub(in crate::exec) fn array_of(distances: Distances) -> ArrayRef {
    match distances {
        Distances::F32(distances) => Arc::new(Float32Array::from(distances)),
        Distances::F64(distances) => Arc::new(Float64Array::from(distances)),
    }
}

/// A column of a range of distances.
pub(in crate::exec) fn slice_of(distances: &Distances, range: Range<usize>) -> ArrayRef {
    array_of(match distances {
        Distances::F32(distances) => Distances::F32(distances[range].to_vec()),
        Distances::F64(distances) => Distances::F64(distances[range].to_vec()),
    })
}

/// Output batches, each computed on demand.
pub(in crate::exec) type OutputBatches = Box<dyn Iterator<Item = Result<RecordBatch>> + Send>;

/// The batches of an input, extended by computed columns.
pub(in crate::exec) struct AddColumns<F> {
    batches: std::vec::IntoIter<RecordBatch>,
    /// The positions of the rows with vectors.
    positions: Vec<u32>,
    schema: SchemaRef,
    columns: F,
    /// The numbers of rows, and of rows with vectors, that have been output.
    start: usize,
    next: usize,
}

impl<F: FnMut(&[Option<u32>]) -> Vec<ArrayRef>> AddColumns<F> {
    /// `columns` computes the new columns of a batch. It receives, for each row, its index among
    /// the rows with vectors, or `None`.
    pub fn new(
        batches: Vec<RecordBatch>,
        positions: Vec<u32>,
        schema: SchemaRef,
        columns: F,
    ) -> Self {
        Self { batches: batches.into_iter(), positions, schema, columns, start: 0, next: 0 }
    }
}

impl<F: FnMut(&[Option<u32>]) -> Vec<ArrayRef>> Iterator for AddColumns<F> {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        let mut place = |row: usize| {
            let here = self.positions.get(self.next).is_some_and(|p| *p as usize == row);
            self.next += usize::from(here);
            here.then(|| (self.next - 1) as u32)
        };
        let rows = self.start..self.start + batch.num_rows();
        let places: Vec<Option<u32>> = rows.clone().map(&mut place).collect();
        self.start = rows.end;
        let mut columns = batch.columns().to_vec();
        columns.extend((self.columns)(&places));
        Some(RecordBatch::try_new(self.schema.clone(), columns).map_err(Into::into))
    }
}
