//! The queries of a [`KnnExec`](super::KnnExec): batches as they come, cut into blocks that fit in
//! memory.
//!
//! A block reserves memory for its rows and their lists before it reads them, and ends where the
//! session's pool refuses more. So queries may be larger than the pool: a block needs room for
//! [`SMALLEST_BLOCK`] rows only. The batch that is being read is in memory in any case; it is
//! reserved while the pool has room.

use std::sync::Arc;

use arrow::array::RecordBatch;
use datafusion::common::utils::memory::RecordBatchMemoryCounter;
use datafusion::error::Result;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::memory_pool::MemoryReservation;
use futures::StreamExt;
use futures::stream::BoxStream;

use super::output::Carried;
use crate::exec::operator::evictable::{MemoryOf, evict_idle, grow};
use crate::exec::operator::phases::Phases;
use crate::exec::operator::streams::{Receive, columns, computing, ordered_batches};
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Phase, Watch};

/// The minimum number of queries of a search when memory is short.
pub(super) const SMALLEST_BLOCK: usize = 64;

/// Bytes of queries and lists that are appended without another thread.
const AT_ONCE: usize = 1 << 20;

/// The number of rows of a block's first reservation, or its target if that is smaller.
const FIRST_ROWS: usize = 1024;

/// Reserves memory for `rows` rows, or, if the pool refuses, for fewer, down to [`SMALLEST_BLOCK`].
/// Returns their number.
///
/// # Errors
/// The error of the pool if it refuses this minimum.
pub(super) fn reserve(
    reservation: &MemoryReservation,
    bytes_per_row: usize,
    mut rows: usize,
) -> Result<usize> {
    loop {
        match reservation.try_resize(rows.saturating_mul(bytes_per_row)) {
            Ok(()) => return Ok(rows),
            Err(_) if evict_idle(MemoryOf::Host) => {}
            Err(_) if rows > SMALLEST_BLOCK => rows = (rows / 2).max(SMALLEST_BLOCK),
            Err(refused) => return Err(refused),
        }
    }
}

/// The stream of queries.
pub(super) struct QueryStream {
    input_columns: InputColumns,
    stream: BoxStream<'static, Result<RecordBatch>>,
    /// The rows of the last batch that are not yet in a block.
    rest: Option<RecordBatch>,
    /// The reservation of that batch's vectors, while the pool grants it.
    in_hand: MemoryReservation,
    phases: Phases,
    /// Whether the last batch was read.
    pub ended: bool,
    /// The number of rows read into blocks.
    pub seen: u64,
}

/// A block of queries while it is filled.
pub(super) struct Filling {
    pub reader: VectorReader,
    pub carried: Carried,
    /// Counts the buffers of the carried columns, each once.
    buffer_counter: RecordBatchMemoryCounter,
    columns: MemoryReservation,
    rows: MemoryReservation,
    /// The reservation of sets, whose rows differ in size.
    sets: MemoryReservation,
    /// The maximum bytes of carried columns and sets.
    pub most_bytes: usize,
    /// Bytes of a query and of its list.
    bytes_per_row: usize,
    /// The number of rows that memory is reserved for.
    capacity: usize,
    /// Whether the pool refuses to let it grow.
    full: bool,
}

impl QueryStream {
    pub fn new(
        input_columns: InputColumns,
        streams: Vec<SendableRecordBatchStream>,
        reservation: &MemoryReservation,
        phases: Phases,
    ) -> Self {
        let stream = ordered_batches(streams, 1, &(Arc::new(Ok) as Receive<_>));
        let in_hand = reservation.new_empty();
        Self { input_columns, stream, rest: None, in_hand, phases, ended: false, seen: 0 }
    }

    /// Begins a block; each row with its list takes `bytes_per_row` bytes.
    pub fn begin(&self, reader: VectorReader, bytes_per_row: usize) -> Filling {
        Filling {
            reader,
            carried: Carried::new(self.input_columns.carried.len()),
            buffer_counter: RecordBatchMemoryCounter::new(),
            columns: self.in_hand.new_empty(),
            rows: self.in_hand.new_empty(),
            sets: self.in_hand.new_empty(),
            most_bytes: usize::MAX,
            bytes_per_row,
            capacity: 0,
            full: false,
        }
    }

    /// Reads until the block has `target` rows with vectors, the input ends, or the pool refuses
    /// more.
    pub async fn fill(&mut self, mut block: Filling, target: usize) -> Result<Filling> {
        while block.reader.len() < target && !block.full {
            if block.columns.size().saturating_add(block.sets.size()) > block.most_bytes {
                break;
            }
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
            let input_columns = self.input_columns.clone();
            let bytes = taken.num_rows().saturating_mul(block.bytes_per_row);
            let append = move || {
                block.reader.reserve(block.capacity, 0);
                block.reader.append(&columns(&taken, &input_columns.vector))?;
                block.carried.push(columns(&taken, &input_columns.carried), taken.num_rows());
                // Releases the old buffer's reservation after rows have moved to a larger one.
                block.rows.resize(block.capacity.saturating_mul(block.bytes_per_row));
                Ok(block)
            };
            block = if bytes <= AT_ONCE { append()? } else { computing(append).await? };
            if self.rest.is_none() {
                self.in_hand.free();
            }
        }
        Ok(block)
    }

    /// The rest of the last batch, or the next non-empty batch.
    async fn next_batch(&mut self) -> Result<Option<RecordBatch>> {
        if let Some(rest) = self.rest.take() {
            return Ok(Some(rest));
        }
        while !self.ended {
            match self.stream.next().await.transpose()? {
                Some(batch) if batch.num_rows() == 0 => {}
                Some(batch) => {
                    let vectors = batch.project(&self.input_columns.vector)?;
                    let bytes = RecordBatchMemoryCounter::new().count_batch(&vectors);
                    // The batch is in memory whether the pool grants it or not.
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

    /// Whether the pool grants the carried columns of a batch. The first batch of a block is
    /// accepted in any case, since it is in memory and cannot be held in part.
    fn hold(&self, block: &mut Filling, batch: &RecordBatch) -> Result<bool> {
        let bytes = block.buffer_counter.count_batch(&batch.project(&self.input_columns.carried)?);
        Ok(grow(&block.columns, bytes).is_ok() || block.carried.is_empty())
    }

    /// The number of further rows that the block has memory for, given a batch of `batch` rows.
    fn room(&self, block: &mut Filling, target: usize, batch: usize) -> Result<usize> {
        let held = block.reader.len();
        let rows = target.min(held.saturating_add(batch));
        if rows > block.capacity {
            let more = rows.max(2 * block.capacity).max(FIRST_ROWS).min(target);
            if let Err(refused) = block.grow(more) {
                // Releases the reservation of the batch in memory, and tries once more.
                self.in_hand.free();
                if block.grow(more).is_err() && block.capacity == 0 {
                    return Err(refused);
                }
            }
        }
        Ok(block.capacity.min(target).saturating_sub(held))
    }

    /// The number of rows of a batch, at most `room`, that the block has memory for if they are
    /// sets.
    fn room_for_sets(&self, block: &Filling, batch: &RecordBatch, room: usize) -> Result<usize> {
        let mut room = room.min(batch.num_rows());
        while room > 0 {
            let rows = columns(&batch.slice(0, room), &self.input_columns.vector);
            let bytes = block.reader.bytes_of_tokens(&rows);
            if bytes == 0 {
                break;
            }
            let mut refused = grow(&block.sets, bytes).err();
            if refused.is_some() && block.len() == 0 {
                // Releases the reservation of the batch in memory, and tries once more.
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
    /// Reserves memory for `rows` rows in all, or, if the pool refuses, for fewer.
    ///
    /// # Errors
    /// The error of the pool if it refuses [`SMALLEST_BLOCK`] more rows.
    fn grow(&mut self, rows: usize) -> Result<()> {
        let mut more = rows - self.capacity;
        loop {
            // While the buffer grows, its rows are in memory twice.
            let bytes = (2 * self.capacity + more).saturating_mul(self.bytes_per_row);
            match self.rows.try_resize(bytes) {
                Ok(()) => break,
                Err(_) if evict_idle(MemoryOf::Host) => {}
                Err(_) if more > SMALLEST_BLOCK => more = (more / 2).max(SMALLEST_BLOCK),
                Err(refused) => return Err(refused),
            }
        }
        self.capacity += more;
        Ok(())
    }

    /// The number of rows with vectors.
    pub fn len(&self) -> usize {
        self.reader.len()
    }

    /// Shrinks the reservations to the block's size while it is searched and output.
    pub fn settle(&self) {
        self.rows.resize(self.len().saturating_mul(self.bytes_per_row));
        // Buffers that grew by doubling are shrunk to their contents, at least half.
        self.sets.resize(self.sets.size() / 2);
    }

    /// The rows, the carried columns, and the reservations, which live as long as the block.
    pub fn into_parts(self) -> (VectorReader, Carried, [MemoryReservation; 3]) {
        (self.reader, self.carried, [self.columns, self.rows, self.sets])
    }
}
