//! The rows of an input that has been collected completely.

use datafusion::arrow::array::RecordBatch;
use datafusion::error::Result;

use super::collect::columns;
use super::side::Side;
use super::vectors::VectorReader;
use crate::error::Error;
use crate::job::{Job, Reserved};
use crate::matrix::Rows;

/// Rows that are read batch by batch, in memory that is reserved before it is taken.
pub(super) struct Reading {
    reader: VectorReader,
    /// Rows of the batches read.
    seen: usize,
    /// Rows of all batches, and integers of their sets.
    rows: usize,
    tokens: usize,
    /// Whether it is not known for certain that there are as many rows.
    is_guess: bool,
    reserved: Option<Reserved>,
}

/// Rows, and their memory reservation.
pub(super) struct Read {
    pub rows: Rows,
    /// The position of each row that has a vector.
    pub positions: Vec<u32>,
    pub reserved: Option<Reserved>,
}

impl Reading {
    /// Nothing read yet of these batches.
    pub fn new(reader: VectorReader, batches: &[RecordBatch], side: &Side) -> Self {
        let mut reading = Self::expecting(reader, 0);
        reading.count(batches, side);
        reading
    }

    /// Nothing read yet of so many rows, which are not sets.
    pub fn expecting(reader: VectorReader, rows: usize) -> Self {
        let reader = reader.on_all_cores();
        Self { reader, seen: 0, rows, tokens: 0, is_guess: true, reserved: None }
    }

    /// Whether the batch's rows are expected.
    pub fn expects(&self, batch: &RecordBatch) -> bool {
        self.seen + batch.num_rows() <= self.rows
    }

    /// Expects these batches, and no more.
    ///
    /// # Errors
    /// [`HostMemory`](crate::Error::HostMemory).
    pub fn expect(&mut self, batches: &[RecordBatch], side: &Side, job: &Job) -> Result<()> {
        self.count(batches, side);
        // Rows move: for a moment they are in memory twice.
        let _before = self.reserved.take();
        if self.reader.len() > 0 {
            self.reserve(job)?;
        }
        Ok(())
    }

    fn count(&mut self, batches: &[RecordBatch], side: &Side) {
        self.is_guess = false;
        self.rows = self.seen + batches.iter().map(RecordBatch::num_rows).sum::<usize>();
        let tokens = |batch| self.reader.tokens_in(&columns(batch, &side.vector));
        self.tokens = batches.iter().map(tokens).sum();
    }

    /// Reads the vectors of the next batch.
    ///
    /// # Errors
    /// Rows that cannot be compared; [`HostMemory`](crate::Error::HostMemory);
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn append(&mut self, batch: &RecordBatch, side: &Side, job: &Job) -> Result<()> {
        job.check()?;
        if self.tokens > 0 {
            self.reserve(job)?;
        }
        self.reader.append(&columns(batch, &side.vector))?;
        self.seen += batch.num_rows();
        // The first row with a vector determines the length of rows.
        if self.reader.len() == 0 {
            return Ok(());
        }
        match self.reserve(job) {
            // There may be fewer than were expected.
            Err(Error::HostMemory { .. }) if self.seen < self.rows && self.is_guess => {
                self.rows = self.seen;
                Ok(())
            }
            reserved => Ok(reserved?),
        }
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
        let (rows, positions) = self.reader.finish();
        let mut reserved = self.reserved;
        if let Some(reserved) = &mut reserved {
            // Rows without a vector, and integers that were given twice.
            reserved.shrink_to(rows.bytes() + size_of_val(&positions[..]));
        }
        Read { rows, positions, reserved }
    }
}
