//! The rows of an input that has been collected completely.

use datafusion::arrow::array::RecordBatch;
use datafusion::error::Result;

use super::collect::columns;
use super::side::Side;
use super::vectors::VectorReader;
use crate::job::{Job, Reserved};
use crate::matrix::Rows;

/// Rows that are read batch by batch, in memory that is reserved before it is taken.
pub(super) struct Reading {
    reader: VectorReader,
    /// Rows of all batches.
    expected: usize,
    reserved: Option<Reserved>,
    /// Of what rows of different sizes have.
    of_sets: Option<Reserved>,
}

/// Rows, and their memory reservation.
pub(super) struct Read {
    pub rows: Rows,
    /// The position of each row that has a vector.
    pub positions: Vec<u32>,
    pub reserved: Option<Reserved>,
}

impl Reading {
    /// Nothing read yet; the batches have `expected` rows in all.
    pub fn new(reader: VectorReader, expected: usize) -> Self {
        Self { reader, expected, reserved: None, of_sets: None }
    }

    /// Reads the vectors of the next batch.
    ///
    /// # Errors
    /// Rows that cannot be compared; [`HostMemory`](crate::Error::HostMemory);
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn append(&mut self, batch: &RecordBatch, side: &Side, job: &Job) -> Result<()> {
        job.check()?;
        let columns = columns(batch, &side.vector);
        self.of_sets = self.reader.reserve_sets(&columns, self.of_sets.take(), job)?;
        self.reader.append(&columns)?;
        // The first row with a vector determines the length of rows.
        if self.reserved.is_none() && self.reader.len() > 0 {
            let bytes = self.reader.bytes_of(self.expected);
            self.reserved = Some(job.reserve("rows", bytes)?);
            self.reader.reserve(self.expected);
        }
        Ok(())
    }

    /// The rows.
    pub fn finish(self) -> Read {
        let (rows, positions) = self.reader.finish();
        let mut reserved = self.reserved;
        if let (Some(all), Some(mut of_sets)) = (&mut reserved, self.of_sets) {
            of_sets.shrink_to(rows.bytes());
            all.add(of_sets);
        }
        Read { rows, positions, reserved }
    }
}
