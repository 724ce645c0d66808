//! Reading the rows of batches, with memory reserved in advance.

use std::any::Any;
use std::sync::Arc;

use arrow::array::RecordBatch;

use super::input_columns::InputColumns;
use super::vector_reader::{Run, VectorReader};
use crate::error::Error;
use crate::exec::operator::streams::columns;
use crate::job::{Job, Reserved};
use crate::rows::Rows;

/// A reader of batches that reserves memory before it allocates.
pub(in crate::exec) struct BatchReader {
    reader: VectorReader,
    /// The expected number of rows, and of tokens if the rows are sets.
    rows: usize,
    tokens: usize,
    reserved: Option<Reserved>,
}

/// Rows, and their memory reservation.
pub struct ReadRows {
    pub rows: Rows,
    /// The position of each row with a vector.
    pub positions: Vec<u32>,
    pub reserved: Option<Reserved>,
}

/// Rows that the cache of the session may share, and their memory.
pub struct CachedRows {
    pub rows: Rows,
    /// The position of each row with a vector.
    pub positions: Vec<u32>,
    _memory: Arc<dyn Any + Send + Sync>,
}

impl CachedRows {
    pub fn new(rows: Rows, positions: Vec<u32>, memory: Arc<dyn Any + Send + Sync>) -> Self {
        Self { rows, positions, _memory: memory }
    }
}

impl ReadRows {
    /// Finishes `reader`, and shrinks its reservation to the rows.
    pub fn of(reader: VectorReader, mut reserved: Option<Reserved>) -> Self {
        let (rows, positions) = reader.finish();
        if let Some(reserved) = &mut reserved {
            // NULL vectors and duplicate tokens take no memory.
            reserved.shrink_to(rows.bytes() + size_of_val(&positions[..]));
        }
        Self { rows, positions, reserved }
    }
}

impl BatchReader {
    /// A reader for these batches.
    pub fn new(
        reader: VectorReader,
        batches: &[RecordBatch],
        input_columns: &InputColumns,
    ) -> Self {
        Self::after(0, reader.on_all_cores(), batches, input_columns)
    }

    /// A reader for these batches after `rows` earlier rows, which are not sets.
    pub fn after<'a>(
        rows: usize,
        reader: VectorReader,
        batches: impl IntoIterator<Item = &'a RecordBatch>,
        input_columns: &InputColumns,
    ) -> Self {
        let mut reading = Self { reader, rows, tokens: 0, reserved: None };
        for batch in batches {
            reading.rows += batch.num_rows();
            reading.tokens += reading.reader.tokens_in(&columns(batch, &input_columns.vector));
        }
        reading
    }

    /// Reads the vectors of the next batch.
    ///
    /// # Errors
    /// Invalid rows; [`HostMemory`](crate::Error::HostMemory);
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn append(
        &mut self,
        batch: &RecordBatch,
        input_columns: &InputColumns,
        job: &Job,
    ) -> Result<(), Error> {
        job.check()?;
        if self.tokens > 0 {
            self.reserve(job)?;
        }
        self.reader.append(&columns(batch, &input_columns.vector))?;
        // The first row with a vector determines the length of rows.
        if self.reader.len() > 0 {
            self.reserve(job)?;
        }
        Ok(())
    }

    /// Appends a run of rows of another reader.
    ///
    /// # Errors
    /// [`HostMemory`](crate::Error::HostMemory), [`TooManyRows`](crate::Error::TooManyRows).
    pub fn append_read(&mut self, other: &VectorReader, run: &Run, job: &Job) -> Result<(), Error> {
        if run.end() > run.start {
            self.reserve(job)?;
        }
        self.reader.append_read(other, run)
    }

    fn reserve(&mut self, job: &Job) -> Result<(), Error> {
        if self.reserved.is_none() {
            let bytes = self.reader.bytes_of(self.rows) + self.tokens * size_of::<i64>();
            self.reserved = Some(job.reserve("rows", bytes)?);
            self.reader.reserve(self.rows, self.tokens);
        }
        Ok(())
    }

    /// The rows.
    pub fn finish(self) -> ReadRows {
        ReadRows::of(self.reader, self.reserved)
    }
}
