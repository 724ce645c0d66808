//! The rows of batches.

use arrow::array::RecordBatch;

use super::collect::columns;
use super::side::Side;
use super::vectors::{Run, VectorReader};
use crate::error::Error;
use crate::job::{Job, Reserved};
use crate::rows::Rows;

/// Rows that are read batch by batch, in memory that is reserved before it is taken.
pub(super) struct Reading {
    reader: VectorReader,
    /// Rows of all batches, and integers of their sets.
    rows: usize,
    tokens: usize,
    reserved: Option<Reserved>,
}

/// Rows, and their memory reservation.
pub(super) struct Read {
    pub rows: Rows,
    /// The position of each row that has a vector.
    pub positions: Vec<u32>,
    pub reserved: Option<Reserved>,
}

impl Read {
    /// What a reader has read.
    pub fn of(reader: VectorReader, mut reserved: Option<Reserved>) -> Self {
        let (rows, positions) = reader.finish();
        if let Some(reserved) = &mut reserved {
            // Rows without a vector, and integers that were given twice.
            reserved.shrink_to(rows.bytes() + size_of_val(&positions[..]));
        }
        Self { rows, positions, reserved }
    }
}

impl Reading {
    /// Nothing read yet of these batches.
    pub fn new(reader: VectorReader, batches: &[RecordBatch], side: &Side) -> Self {
        Self::after(0, reader.on_all_cores(), batches, side)
    }

    /// The same after so many rows that are not sets.
    pub fn after<'a>(
        rows: usize,
        reader: VectorReader,
        batches: impl IntoIterator<Item = &'a RecordBatch>,
        side: &Side,
    ) -> Self {
        let mut reading = Self { reader, rows, tokens: 0, reserved: None };
        for batch in batches {
            reading.rows += batch.num_rows();
            reading.tokens += reading.reader.tokens_in(&columns(batch, &side.vector));
        }
        reading
    }

    /// Reads the vectors of the next batch.
    ///
    /// # Errors
    /// Rows that cannot be compared; [`HostMemory`](crate::Error::HostMemory);
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn append(&mut self, batch: &RecordBatch, side: &Side, job: &Job) -> Result<(), Error> {
        job.check()?;
        if self.tokens > 0 {
            self.reserve(job)?;
        }
        self.reader.append(&columns(batch, &side.vector))?;
        // The first row with a vector determines the length of rows.
        if self.reader.len() > 0 {
            self.reserve(job)?;
        }
        Ok(())
    }

    /// Appends rows that another reader has read.
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
    pub fn finish(self) -> Read {
        Read::of(self.reader, self.reserved)
    }
}
