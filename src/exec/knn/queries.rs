//! The queries of a [`KnnExec`](super::KnnExec): batches as they come, cut into blocks that fit in
//! memory.
//!
//! A block reserves memory for its rows and their lists before it reads them, and ends where the
//! session's pool refuses more. So queries may be larger than the pool: a block needs room for
//! [`SMALLEST_BLOCK`] rows only. The batch that is being read is in memory already, whatever the
//! pool says; it is reserved while the pool has room for it.

use std::sync::Arc;

use arrow::array::RecordBatch;
use datafusion::common::utils::memory::RecordBatchMemoryCounter;
use datafusion::error::Result;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::memory_pool::MemoryReservation;
use futures::StreamExt;
use futures::stream::BoxStream;

use super::output::Carried;
use crate::exec::collect::{Receive, blocking, columns, in_turn};
use crate::exec::idle::{grow, release_idle};
use crate::exec::phases::Phases;
use crate::exec::side::Side;
use crate::exec::vectors::VectorReader;
use crate::job::{Phase, Watch};

/// The fewest queries worth a search of their own when memory is short.
pub(super) const SMALLEST_BLOCK: usize = 64;

/// Rows for which a block reserves memory at first, unless it is to have fewer.
const FIRST_ROWS: usize = 1024;

/// Reserves memory for the requested rows, or for fewer if the pool refuses, but for at least
/// [`SMALLEST_BLOCK`].
///
/// # Errors
/// That of the pool if it refuses even this minimum.
pub(super) fn reserve(
    reservation: &MemoryReservation,
    bytes_per_row: usize,
    mut rows: usize,
) -> Result<usize> {
    loop {
        match reservation.try_resize(rows.saturating_mul(bytes_per_row)) {
            Ok(()) => return Ok(rows),
            Err(_) if release_idle() => {}
            Err(_) if rows > SMALLEST_BLOCK => rows = (rows / 2).max(SMALLEST_BLOCK),
            Err(refused) => return Err(refused),
        }
    }
}

/// The queries, as they come.
pub(super) struct Queries {
    side: Side,
    stream: BoxStream<'static, Result<RecordBatch>>,
    /// The rows of the last batch that no block has taken yet.
    rest: Option<RecordBatch>,
    /// The vectors of that batch, while the pool grants them.
    in_hand: MemoryReservation,
    phases: Phases,
    /// Whether the last batch was read.
    pub ended: bool,
    /// Rows read into blocks.
    pub seen: u64,
}

/// Queries to be searched together, while they are collected.
pub(super) struct Filling {
    pub reader: VectorReader,
    pub carried: Carried,
    /// The buffers of the columns that are carried along.
    kept: RecordBatchMemoryCounter,
    columns: MemoryReservation,
    rows: MemoryReservation,
    /// What rows of different sizes have.
    sets: MemoryReservation,
    /// Bytes of a row and of its list.
    bytes_per_row: usize,
    /// Rows that memory is reserved for.
    capacity: usize,
    /// The pool refuses to let it grow.
    full: bool,
}

impl Queries {
    pub fn new(
        side: Side,
        streams: Vec<SendableRecordBatchStream>,
        reservation: &MemoryReservation,
        phases: Phases,
    ) -> Self {
        let stream = in_turn(streams, 1, &(Arc::new(Ok) as Receive<_>));
        let in_hand = reservation.new_empty();
        Self { side, stream, rest: None, in_hand, phases, ended: false, seen: 0 }
    }

    /// Begins a block; each row with its list takes `bytes_per_row` bytes.
    pub fn begin(&self, reader: VectorReader, bytes_per_row: usize) -> Filling {
        Filling {
            reader,
            carried: Carried::new(self.side.carried.len()),
            kept: RecordBatchMemoryCounter::new(),
            columns: self.in_hand.new_empty(),
            rows: self.in_hand.new_empty(),
            sets: self.in_hand.new_empty(),
            bytes_per_row,
            capacity: 0,
            full: false,
        }
    }

    /// Reads on until the block has `target` rows with vectors, or all there are, or all that
    /// memory allows.
    pub async fn fill(&mut self, mut block: Filling, target: usize) -> Result<Filling> {
        while block.reader.len() < target && !block.full {
            self.phases.enter(Phase::Read);
            let batch = self.next_batch().await;
            self.phases.enter(Phase::Prepare);
            let Some(batch) = batch? else {
                break;
            };
            let room = match self.hold(&mut block, &batch)? {
                true => self.room(&mut block, target, batch.num_rows())?,
                false => 0,
            };
            let room = self.room_for_sets(&block, &batch, room)?;
            if room == 0 {
                block.full = true;
                self.rest = Some(batch);
                break;
            }
            let taken = batch.slice(0, room);
            let left = batch.num_rows() - taken.num_rows();
            self.rest = (left > 0).then(|| batch.slice(taken.num_rows(), left));
            drop(batch);
            self.seen += taken.num_rows() as u64;
            let side = self.side.clone();
            block = blocking(move || {
                block.reader.reserve(block.capacity, 0);
                block.reader.append(&columns(&taken, &side.vector))?;
                block.carried.push(columns(&taken, &side.carried), taken.num_rows());
                // Releases the memory from which the rows have moved.
                block.rows.resize(block.capacity.saturating_mul(block.bytes_per_row));
                Ok(block)
            })
            .await?;
            if self.rest.is_none() {
                self.in_hand.free();
            }
        }
        Ok(block)
    }

    /// The rest of the last batch, or the next one that has rows.
    async fn next_batch(&mut self) -> Result<Option<RecordBatch>> {
        if let Some(rest) = self.rest.take() {
            return Ok(Some(rest));
        }
        while !self.ended {
            match self.stream.next().await.transpose()? {
                Some(batch) if batch.num_rows() == 0 => {}
                Some(batch) => {
                    let vectors = batch.project(&self.side.vector)?;
                    let bytes = RecordBatchMemoryCounter::new().count_batch(&vectors);
                    // It is in memory, granted or not.
                    if self.in_hand.try_resize(bytes).is_err() {
                        self.in_hand.free();
                    }
                    return Ok(Some(batch));
                }
                None => self.ended = true,
            }
        }
        Ok(None)
    }

    /// Whether the block may hold on to the columns that a batch carries along. Those of its first
    /// batch are in memory anyway, and cannot be held in part.
    fn hold(&self, block: &mut Filling, batch: &RecordBatch) -> Result<bool> {
        let bytes = block.kept.count_batch(&batch.project(&self.side.carried)?);
        Ok(grow(&block.columns, bytes).is_ok() || block.carried.is_empty())
    }

    /// How many rows the block has memory for, given a batch of `batch` rows.
    fn room(&self, block: &mut Filling, target: usize, batch: usize) -> Result<usize> {
        let held = block.reader.len();
        let wanted = target.min(held.saturating_add(batch));
        if wanted > block.capacity {
            let more = wanted.max(2 * block.capacity).max(FIRST_ROWS).min(target);
            if let Err(refused) = block.grow(more) {
                // The reservation for the batch in memory must not get in the way.
                self.in_hand.free();
                if block.grow(more).is_err() && block.capacity == 0 {
                    return Err(refused);
                }
            }
        }
        Ok(block.capacity.min(target).saturating_sub(held))
    }

    /// How many rows of a batch, at most `room`, the block has memory for if they are sets.
    fn room_for_sets(&self, block: &Filling, batch: &RecordBatch, room: usize) -> Result<usize> {
        let mut room = room.min(batch.num_rows());
        while room > 0 {
            let rows = columns(&batch.slice(0, room), &self.side.vector);
            let bytes = block.reader.bytes_of_tokens(&rows);
            if bytes == 0 {
                break;
            }
            let mut refused = grow(&block.sets, bytes).err();
            if refused.is_some() && block.len() == 0 {
                // The reservation for the batch in memory must not get in the way.
                self.in_hand.free();
                refused = grow(&block.sets, bytes).err();
            }
            room = match refused {
                None => break,
                Some(_) if block.len() > 0 => 0,
                Some(refused) if room == 1 => return Err(refused),
                Some(_) => room / 2,
            };
        }
        Ok(room)
    }
}

impl Filling {
    /// Reserves memory for `rows` rows in all, or for fewer if the pool refuses.
    ///
    /// # Errors
    /// That of the pool if it does not even grant [`SMALLEST_BLOCK`] more.
    fn grow(&mut self, rows: usize) -> Result<()> {
        let mut more = rows - self.capacity;
        loop {
            // Rows move when the buffer grows: for a moment they are in memory twice.
            let bytes = (2 * self.capacity + more).saturating_mul(self.bytes_per_row);
            match self.rows.try_resize(bytes) {
                Ok(()) => break,
                Err(_) if release_idle() => {}
                Err(_) if more > SMALLEST_BLOCK => more = (more / 2).max(SMALLEST_BLOCK),
                Err(refused) => return Err(refused),
            }
        }
        self.capacity += more;
        Ok(())
    }

    /// Rows with vectors.
    pub fn len(&self) -> usize {
        self.reader.len()
    }

    /// Reduces the reservation to what the block keeps while it is searched and output.
    pub fn settle(&self) {
        self.rows.resize(self.len().saturating_mul(self.bytes_per_row));
        // Buffers that have grown are cut back to what is used, at least half.
        self.sets.resize(self.sets.size() / 2);
    }

    /// The rows, the carried columns, and the reservations held as long as the block exists.
    pub fn into_parts(self) -> (VectorReader, Carried, [MemoryReservation; 3]) {
        (self.reader, self.carried, [self.columns, self.rows, self.sets])
    }
}
