//! The output of a [`KnnExec`](super::KnnExec): lists of neighbours, and the columns that both
//! inputs carry along, as batches.

use std::ops::Range;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Float32Array, Float64Array, Int64Array, RecordBatch};
use datafusion::arrow::compute::interleave;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryReservation;

use super::knn_spec::Side;
use super::work::columns;
use crate::device::{Distances, Neighbors};

/// The columns carried along by an input, in as many pieces as there were batches.
pub(super) struct Carried {
    /// For each column, its pieces.
    columns: Vec<Vec<ArrayRef>>,
    /// Where each piece begins.
    starts: Vec<usize>,
    rows: usize,
    /// The position of each row that has a vector.
    pub positions: Vec<u32>,
}

impl Carried {
    pub fn new(side: &Side) -> Self {
        let columns = vec![Vec::new(); side.carried.len()];
        Self { columns, starts: Vec::new(), rows: 0, positions: Vec::new() }
    }

    /// Whether nothing was taken yet.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Take the carried columns of a batch.
    pub fn push(&mut self, batch: &RecordBatch, side: &Side) {
        self.starts.push(self.rows);
        self.rows += batch.num_rows();
        for (pieces, array) in self.columns.iter_mut().zip(columns(batch, &side.carried)) {
            pieces.push(array);
        }
    }

    /// Where a row with a vector is: the piece, and the row in it.
    fn place(&self, row: usize) -> (usize, usize) {
        let position = self.positions[row] as usize;
        let piece = self.starts.partition_point(|start| *start <= position) - 1;
        (piece, position - self.starts[piece])
    }

    /// The values of all columns for these rows with vectors.
    fn take(&self, rows: impl Iterator<Item = usize>) -> Result<Vec<ArrayRef>> {
        let places: Vec<_> = rows.map(|row| self.place(row)).collect();
        self.columns
            .iter()
            .map(|pieces| {
                let pieces: Vec<_> = pieces.iter().map(AsRef::as_ref).collect();
                Ok(interleave(&pieces, &places)?)
            })
            .collect()
    }
}

/// The neighbours of a block of queries, turned into batches one at a time.
pub(super) struct Batches {
    pub schema: SchemaRef,
    /// The columns of the queries; in a join of the base with itself, the base has them.
    pub queries: Option<Carried>,
    /// The row of the base that is the first query, in a join of the base with itself.
    pub first_query: usize,
    pub neighbors: Neighbors,
    /// The neighbours that are out already.
    pub next: usize,
    pub batch_size: usize,
    /// Of the queries' columns and of the lists.
    pub _reservations: Vec<MemoryReservation>,
}

impl Batches {
    /// The next batch; `None` after the last.
    pub fn next(&mut self, base: &Carried) -> Result<Option<RecordBatch>> {
        let total = self.neighbors.rows.len();
        let range = self.next..total.min(self.next + self.batch_size);
        self.next = range.end;
        (!range.is_empty()).then(|| self.batch(base, range)).transpose()
    }

    fn batch(&self, base: &Carried, range: Range<usize>) -> Result<RecordBatch> {
        let k = self.neighbors.per_query;
        let queries = self.queries.as_ref().unwrap_or(base);
        let mut columns = queries.take(range.clone().map(|i| self.first_query + i / k))?;
        let rows = &self.neighbors.rows[range.clone()];
        columns.extend(base.take(rows.iter().map(|row| *row as usize))?);
        let ranks = range.clone().map(|i| (i % k) as i64 + 1);
        columns.push(Arc::new(ranks.collect::<Int64Array>()));
        columns.push(match &self.neighbors.distances {
            Distances::F32(x) => Arc::new(Float32Array::from(x[range].to_vec())),
            Distances::F64(x) => Arc::new(Float64Array::from(x[range].to_vec())),
        });
        Ok(RecordBatch::try_new(self.schema.clone(), columns)?)
    }
}
