//! Inputs that are read completely, and their rows.

use std::sync::Arc;

use datafusion::arrow::array::RecordBatch;
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::ExecutionPlan;
use futures::StreamExt;

use super::collect::{Held, columns, computing, exact_rows, execute_all, held_in_turn};
use super::inputs::has_limit;
use super::phases::Phases;
use super::side::Side;
use super::vectors::VectorReader;
use crate::error::Error;
use crate::job::{Job, Phase, Reserved, Watch};
use crate::matrix::{ElementKind, Rows};

/// Batches that are taken together, if they are there.
const TOGETHER: usize = 64;

/// The columns of an input, and its partitions.
pub(super) struct Input {
    pub side: Side,
    pub streams: Vec<SendableRecordBatchStream>,
    /// How many rows it has, if statistics are exact.
    rows: Option<usize>,
}

impl Input {
    /// Starts to read a plan.
    pub fn start(
        side: &Side,
        plan: &Arc<dyn ExecutionPlan>,
        context: &Arc<TaskContext>,
    ) -> Result<Self> {
        let rows = exact_rows(plan).filter(|_| !has_limit(plan));
        Ok(Self { side: side.clone(), streams: execute_all(plan, context)?, rows })
    }
}

/// What is kept of batches whose vectors have been read.
pub(super) trait Keep: Send + 'static {
    fn keep(&mut self, batch: RecordBatch, side: &Side);
}

/// The rows of an input, and what is kept of its batches.
///
/// Where it is known how many rows there are, vectors are copied to their place while the next batches come; otherwise
/// once all are there.
pub(super) async fn read_rows<K: Keep>(
    Input { side, streams, rows }: Input,
    (reader, kept): (VectorReader, K),
    held: &Arc<Held>,
    (phases, job): (&Phases, &Job),
) -> Result<(Read, K)> {
    let rows = rows.filter(|_| side.kind != ElementKind::Sets).unwrap_or(0);
    let mut batches = held_in_turn(streams, held).ready_chunks(TOGETHER);
    let reading = Reading::expecting(reader, rows);
    let mut collecting = Collecting { reading, side, kept };
    let mut waiting = Vec::new();
    while let Some(some) = batches.next().await {
        let some = some.into_iter().collect::<Result<Vec<_>>>()?;
        if !waiting.is_empty() || !collecting.reading.expects(&some[0]) {
            waiting.extend(some);
            continue;
        }
        phases.enter(Phase::Prepare);
        let job = job.clone();
        (collecting, waiting) = computing(move || {
            let mut some = some.into_iter();
            while let Some(batch) = some.next() {
                if !collecting.reading.expects(&batch) {
                    return Ok((collecting, std::iter::once(batch).chain(some).collect()));
                }
                collecting.take(batch, &job)?;
            }
            Ok((collecting, Vec::new()))
        })
        .await?;
        phases.enter(Phase::Read);
    }
    phases.enter(Phase::Prepare);
    let job = job.clone();
    computing(move || {
        if !waiting.is_empty() {
            collecting.reading.expect(&waiting, &collecting.side, &job)?;
        }
        for batch in waiting {
            collecting.take(batch, &job)?;
        }
        Ok((collecting.reading.finish(), collecting.kept))
    })
    .await
}

/// An input that is being read.
struct Collecting<K> {
    side: Side,
    reading: Reading,
    kept: K,
}

impl<K: Keep> Collecting<K> {
    fn take(&mut self, batch: RecordBatch, job: &Job) -> Result<()> {
        self.reading.append(&batch, &self.side, job)?;
        self.kept.keep(batch, &self.side);
        Ok(())
    }
}

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
    fn expecting(reader: VectorReader, rows: usize) -> Self {
        let reader = reader.on_all_cores();
        Self { reader, seen: 0, rows, tokens: 0, is_guess: true, reserved: None }
    }

    /// Whether the batch's rows are expected.
    fn expects(&self, batch: &RecordBatch) -> bool {
        self.seen + batch.num_rows() <= self.rows
    }

    /// Expects these batches, and no more.
    ///
    /// # Errors
    /// [`HostMemory`](crate::Error::HostMemory).
    fn expect(&mut self, batches: &[RecordBatch], side: &Side, job: &Job) -> Result<()> {
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
