//! Assembles the rows of all partitions into one matrix while they are read.
//!
//! Partitions are read concurrently. If the row count of each partition is known, every batch is
//! copied to its final place on arrival. If only the total is known, the partitions are copied one
//! after the other. Batches whose place is not known yet are buffered.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::RecordBatch;
use datafusion::common::DataFusionError;
use datafusion::error::Result;

use super::batch_reader::{BatchReader, ReadRows};
use super::input_columns::InputColumns;
use super::vector_reader::{Run, VectorReader};
use crate::error::Error;
use crate::exec::operator::streams::{Arrived, BatchReservation, columns};
use crate::job::{Job, Reserved};

/// The assembler of an input's matrix, while its partitions arrive.
pub(in crate::exec) struct RowAssembler {
    input_columns: InputColumns,
    /// The length of the vectors, if their type determines it.
    dim: Option<usize>,
    reader: VectorReader,
    /// The total number of rows, or 0 if it is unknown.
    rows: usize,
    parts: Vec<PartitionProgress>,
    retention: Retention,
    reserved: Option<Reserved>,
    /// The first partition that failed.
    failed: Option<(usize, Failure)>,
}

/// The progress of a partition.
#[derive(Default)]
struct PartitionProgress {
    run: Run,
    /// The row range reserved for the partition, if it is known.
    room: Option<Range<usize>>,
    waiting: VecDeque<RecordBatch>,
    has_ended: bool,
    retained: Vec<RecordBatch>,
}

enum Failure {
    /// An invalid row, numbered within the partition.
    Row(Error),
    Read(DataFusionError),
}

/// The numbers of rows that are known before the input is read.
pub(in crate::exec) struct KnownRows {
    /// The number of all rows; 0 if it is unknown.
    pub all: usize,
    /// The number of rows of each partition.
    pub of_partitions: Option<Vec<usize>>,
}

/// The treatment of batches after their vectors have been copied.
pub(in crate::exec) struct Retention {
    /// Whether the vector columns are dropped and their memory released.
    pub omits_vectors: bool,
    pub held: Arc<BatchReservation>,
}

impl Retention {
    fn retain(&self, batch: RecordBatch, input_columns: &InputColumns) -> RecordBatch {
        if !self.omits_vectors {
            return batch;
        }
        let Ok(carried) = batch.project(&input_columns.carried) else {
            unreachable!("the columns of an input are there")
        };
        let vectors = columns(&batch, &input_columns.vector);
        drop(batch);
        self.held.release(vectors);
        carried
    }
}

impl PartitionProgress {
    fn is_over(&self) -> bool {
        self.has_ended && self.waiting.is_empty()
    }

    /// The number of rows that have arrived.
    fn rows(&self) -> u64 {
        let waiting = self.waiting.iter().map(RecordBatch::num_rows).sum::<usize>();
        self.run.seen + waiting as u64
    }

    fn open(&mut self, room: Range<usize>) {
        self.run.start = room.start;
        self.room = Some(room);
    }

    /// Buffers all further batches.
    fn close(&mut self) {
        if self.run.end() == self.run.start {
            // Nothing has been copied yet, and the start was computed from expected counts, which
            // may be wrong.
            self.run.start = 0;
        }
        self.room = Some(self.run.start..self.run.start);
    }
}

impl RowAssembler {
    /// The initial state for an input of `partitions` partitions, whose vectors have `dim` elements if
    /// their type determines it.
    pub fn new(
        input_columns: InputColumns,
        dim: Option<usize>,
        partitions: usize,
        KnownRows { all: rows, of_partitions }: KnownRows,
        reader: VectorReader,
        retention: Retention,
    ) -> Self {
        let reader = reader.on_all_cores();
        let mut parts: Vec<_> = (0..partitions).map(|_| PartitionProgress::default()).collect();
        match of_partitions {
            Some(rows) => {
                let mut start = 0;
                for (part, rows) in parts.iter_mut().zip(rows) {
                    part.open(start..start + rows);
                    start += rows;
                }
            }
            None => parts.first_mut().into_iter().for_each(|part| part.open(0..rows)),
        }
        Self { input_columns, dim, reader, rows, parts, retention, reserved: None, failed: None }
    }

    /// Records a batch, the end or an error of a partition.
    pub fn receive(&mut self, (partition, batch): Arrived) {
        match batch {
            // A row after the first failure cannot change the result.
            _ if self.failed.as_ref().is_some_and(|(failed, _)| *failed <= partition) => {}
            Some(Ok(batch)) => self.parts[partition].waiting.push_back(batch),
            Some(Err(error)) => self.fail(partition, Failure::Read(error)),
            None => {
                self.parts[partition].has_ended = true;
                self.open_next(partition);
            }
        }
    }

    fn fail(&mut self, partition: usize, failure: Failure) {
        // Batches that arrived before a read error may have a bad row.
        let later = partition + usize::from(matches!(failure, Failure::Read(_)));
        self.parts[later..].iter_mut().for_each(|part| part.waiting.clear());
        self.failed = Some((partition, failure));
    }

    /// Whether the remaining batches cannot change the result: an error is known, and all earlier
    /// partitions have ended.
    pub fn is_done(&self) -> bool {
        let before = self.failed.as_ref().map(|(partition, _)| &self.parts[..*partition]);
        before.is_some_and(|before| before.iter().all(|part| part.has_ended))
    }

    /// Starts the partition after one that has ended.
    fn open_next(&mut self, partition: usize) {
        for i in partition..self.parts.len() {
            let (part, end) = (&self.parts[i], self.parts[i].run.end());
            let is_over = part.room.is_some() && part.is_over();
            match self.parts.get_mut(i + 1) {
                Some(next) if is_over && next.room.is_none() => next.open(end..self.rows),
                _ => break,
            }
        }
    }

    /// The first partition whose next batch can be copied.
    pub fn next(&self) -> Option<usize> {
        let mut are_over = true;
        self.parts.iter().position(|part| {
            let is_first = are_over;
            are_over &= part.is_over();
            let (Some(batch), Some(room)) = (part.waiting.front(), &part.room) else {
                return false;
            };
            let fits = part.run.seen as usize + batch.num_rows() <= room.len();
            // The first row of the input determines the length of all.
            fits && (is_first || self.dim.is_some() || self.reader.knows_dim())
        })
    }

    /// Copies the vectors of all batches whose place is known.
    ///
    /// # Errors
    /// [`Cancelled`](Error::Cancelled). Invalid rows are reported by [`finish`](Self::finish).
    pub fn place(&mut self, job: &Job) -> Result<()> {
        while let Some(partition) = self.next() {
            job.check()?;
            let Some(batch) = self.parts[partition].waiting.pop_front() else { break };
            let vectors = columns(&batch, &self.input_columns.vector);
            self.reader.learn_dim(self.dim, &vectors);
            if !self.has_room(job)? {
                self.parts[partition].waiting.push_front(batch);
                break;
            }
            let part = &mut self.parts[partition];
            self.reader.turn_to(&mut part.run);
            let read = self.reader.append(&vectors);
            self.reader.turn_to(&mut part.run);
            drop(vectors);
            match read {
                Err(error @ Error::BadRow { .. }) => {
                    self.fail(partition, Failure::Row(error));
                    continue;
                }
                read => read?,
            }
            part.retained.push(self.retention.retain(batch, &self.input_columns));
            self.has_room(job)?;
            self.open_next(partition);
        }
        Ok(())
    }

    /// Whether the matrix is allocated, or cannot be yet because the vectors' length is unknown.
    /// Row counts of files may be wrong, even larger than any memory: if the allocation fails, all
    /// batches are buffered.
    fn has_room(&mut self, job: &Job) -> Result<bool> {
        if self.reserved.is_some() || !self.reader.knows_dim() || self.rows == 0 {
            return Ok(true);
        }
        // Positions are in vectors that grow by doubling, and in the final vector.
        let positions = 2 * self.rows * size_of::<u32>();
        match job.try_reserve(self.reader.bytes_of(self.rows).saturating_add(positions)) {
            Some(reserved) if self.reader.reserve_numbers(self.rows) => {
                self.reserved = Some(reserved);
                Ok(true)
            }
            _ => {
                self.rows = 0;
                self.parts.iter_mut().for_each(PartitionProgress::close);
                Ok(false)
            }
        }
    }

    /// The rows and the retained batches, once all partitions have ended.
    ///
    /// # Errors
    /// Invalid rows; [`HostMemory`](Error::HostMemory); [`Cancelled`](Error::Cancelled).
    pub fn finish(mut self, job: &Job) -> Result<(ReadRows, Vec<RecordBatch>)> {
        self.place(job)?;
        let Some((partition, failure)) = self.failed.take() else { return Ok(self.joined(job)?) };
        self.parts.truncate(partition + 1);
        let before = self.parts[..partition].iter().map(PartitionProgress::rows).sum::<u64>();
        // Buffered rows precede the failure.
        if self.parts.iter().any(|part| !part.waiting.is_empty())
            && let Err(error @ (Error::BadRow { .. } | Error::Cancelled)) = self.joined(job)
        {
            return Err(error.into());
        }
        Err(match failure {
            Failure::Row(Error::BadRow { input, column, row, problem }) => {
                Error::BadRow { input, column, row: before + row, problem }.into()
            }
            Failure::Row(error) => error.into(),
            Failure::Read(error) => error,
        })
    }

    fn joined(self, job: &Job) -> Result<(ReadRows, Vec<RecordBatch>), Error> {
        let Self { input_columns, mut reader, parts, retention, reserved, .. } = self;
        let mut retained = Vec::new();
        if parts.iter().all(|part| part.waiting.is_empty()) {
            let runs = parts.into_iter().map(|part| {
                retained.extend(part.retained);
                part.run
            });
            reader.join(runs);
            let reserved = match reserved {
                None => job.reserve("rows", reader.bytes_of(reader.len()))?,
                Some(reserved) => reserved,
            };
            return Ok((ReadRows::of(reader, Some(reserved)), retained));
        }
        let waiting = parts.iter().flat_map(|part| &part.waiting);
        // Rows that were already placed are copied, so they are in memory twice for a moment.
        let placed = parts.iter().map(|part| part.run.seen as usize).sum();
        let mut reading = BatchReader::after(placed, reader.anew(), waiting, &input_columns);
        for part in parts {
            reading.append_read(&reader, &part.run, job)?;
            retained.extend(part.retained);
            for batch in part.waiting {
                reading.append(&batch, &input_columns, job)?;
                retained.push(retention.retain(batch, &input_columns));
            }
        }
        drop((reader, reserved));
        Ok((reading.finish(), retained))
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, AsArray, FixedSizeListArray, Int32Array, ListArray};
    use arrow::datatypes::{Float32Type, Int32Type};
    use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool, UnboundedMemoryPool};

    use super::*;
    use crate::exec::read::vector_column::VectorColumn;
    use crate::job::Budget;
    use crate::matrix::ElementKind;
    use crate::metric::Metric;
    use crate::random::Random;

    type List = Option<Vec<Option<f32>>>;

    /// A batch of two columns: lists of two numbers, and row numbers.
    fn batch(lists: &[List], first: usize, is_fixed: bool) -> RecordBatch {
        let of = lists.iter().cloned();
        let vectors: ArrayRef = match is_fixed {
            true => Arc::new(FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(of, 2)),
            false => Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(of)),
        };
        let ids: Int32Array = (first as i32..).take(lists.len()).collect();
        RecordBatch::try_from_iter_with_nullable([
            ("v", vectors, true),
            ("id", Arc::new(ids) as ArrayRef, false),
        ])
        .unwrap()
    }

    /// Random partitions of batches.
    fn partitions(random: &mut Random, is_fixed: bool) -> Vec<Vec<RecordBatch>> {
        let (mut row, count) = (0, 1 + random.below(5));
        let mut rows = |random: &mut Random| {
            let count = random.below(4) as usize;
            let list = |i| (random.below(4) > 0).then(|| vec![Some((row + i) as f32), Some(1.0)]);
            let lists: Vec<List> = (0..count).map(list).collect();
            row += count;
            batch(&lists, row - count, is_fixed)
        };
        (0..count).map(|_| (0..random.below(4)).map(|_| rows(random)).collect()).collect()
    }

    /// The total number of rows, and the number of each partition.
    fn counts(parts: &[Vec<RecordBatch>]) -> (usize, Vec<usize>) {
        let of = |part: &Vec<RecordBatch>| part.iter().map(RecordBatch::num_rows).sum();
        let each: Vec<usize> = parts.iter().map(of).collect();
        (each.iter().sum(), each)
    }

    fn input_columns(batch: &RecordBatch) -> InputColumns {
        let column = VectorColumn::Whole("v".to_string());
        InputColumns::try_new("input", &column, batch.schema().fields()).unwrap()
    }

    fn reader() -> VectorReader {
        let column = VectorColumn::Whole("v".to_string());
        VectorReader::new("input", column, ElementKind::F32, Metric::L2)
    }

    /// Passes the batches on in a random order that keeps the order within each partition.
    fn placed(
        parts: &[Vec<Result<RecordBatch, &'static str>>],
        known: KnownRows,
        random: &mut Random,
        job: &Job,
    ) -> Result<(ReadRows, Vec<RecordBatch>)> {
        let pool: Arc<dyn MemoryPool> = Arc::new(UnboundedMemoryPool::default());
        let reservation = Arc::new(MemoryConsumer::new("test").register(&pool));
        let retention =
            Retention { omits_vectors: true, held: Arc::new(BatchReservation::new(reservation)) };
        let first = parts.iter().flatten().find_map(|batch| batch.as_ref().ok());
        let first = first.cloned().unwrap_or_else(|| batch(&[], 0, true));
        let input_columns = input_columns(&first);
        let dim = input_columns.known_dim(first.schema().fields());
        let mut assembler =
            RowAssembler::new(input_columns, dim, parts.len(), known, reader(), retention);
        let mut left: Vec<_> = parts.iter().map(|part| part.iter()).enumerate().collect();
        while !left.is_empty() && !assembler.is_done() {
            let at = random.below(left.len() as u64) as usize;
            let (partition, next) = (left[at].0, left[at].1.next());
            let next = next.map(|next| match next {
                Ok(batch) => Ok(batch.clone()),
                Err(error) => Err(DataFusionError::Execution((*error).to_string())),
            });
            if !matches!(next, Some(Ok(_))) {
                drop(left.remove(at));
            }
            assembler.receive((partition, next));
            if random.below(2) == 0 {
                assembler.place(job)?;
            }
        }
        assembler.finish(job)
    }

    #[test]
    fn rows_are_in_order_whatever_order_they_come_in() {
        let job = Job::default();
        for seed in 0..3000 {
            let random = &mut Random::new(seed);
            let is_fixed = random.below(2) == 0;
            let parts = partitions(random, is_fixed);
            let all: Vec<_> = parts.iter().flatten().cloned().collect();
            let mut expected = reader();
            all.iter().for_each(|batch| expected.append(&[batch.column(0).clone()]).unwrap());
            let (expected, positions) = expected.finish();
            let (rows, mut of_parts) = counts(&parts);
            let (all, of_partitions) = match random.below(4) {
                0 => (0, None),
                1 => (rows, None),
                2 => (rows, Some(of_parts)),
                _ => {
                    // Wrong row counts in metadata.
                    let last = of_parts.len() - 1;
                    of_parts.swap(0, last);
                    (rows, Some(of_parts))
                }
            };
            let parts: Vec<Vec<_>> =
                parts.into_iter().map(|part| part.into_iter().map(Ok).collect()).collect();
            let known = KnownRows { all, of_partitions };
            let (read, retained) = placed(&parts, known, random, &job).unwrap();
            assert_eq!(read.positions, positions, "seed {seed}");
            assert_eq!(read.rows.reals::<f32>(), expected.reals::<f32>(), "seed {seed}");
            let ids =
                |batch: &RecordBatch| batch.column(0).as_primitive::<Int32Type>().values().to_vec();
            let ids: Vec<i32> = retained.iter().flat_map(ids).collect();
            assert!(ids.into_iter().eq(0..rows as i32), "seed {seed}");
            assert!(retained.iter().all(|batch| batch.num_columns() == 1));
        }
    }

    #[test]
    fn the_first_failure_is_told() {
        let job = Job::default();
        for seed in 0..3000 {
            let random = &mut Random::new(seed);
            let is_fixed = random.below(2) == 0;
            let parts = partitions(random, is_fixed);
            let (rows, of_parts) = counts(&parts);
            // Some rows are not finite, and some partitions fail before their end.
            let (mut first, mut row) = (None, 0);
            let mut failing = Vec::new();
            for part in &parts {
                let mut of_part = Vec::new();
                for good in part {
                    let bad = (random.below(4) == 0 && good.num_rows() > 0)
                        .then(|| random.below(good.num_rows() as u64) as usize);
                    let lists =
                        |i| Some(vec![Some(if bad == Some(i) { f32::NAN } else { 1.0 }); 2]);
                    let lists: Vec<List> = (0..good.num_rows()).map(lists).collect();
                    of_part.push(Ok(batch(&lists, row, is_fixed)));
                    first = first.or(bad.map(|bad| Some((row + bad) as u64)));
                    row += good.num_rows();
                }
                if random.below(6) == 0 {
                    of_part.push(Err("cannot be read"));
                    first = first.or(Some(None));
                }
                failing.push(of_part);
            }
            let (all, of_partitions) = match random.below(3) {
                0 => (0, None),
                1 => (rows, None),
                _ => (rows, Some(of_parts)),
            };
            let known = KnownRows { all, of_partitions };
            let outcome = placed(&failing, known, random, &job).map(drop);
            let told = match &outcome {
                Ok(()) => None,
                Err(error) if error.to_string().contains("cannot be read") => Some(None),
                Err(error) => {
                    let text = error.to_string();
                    let row = text.split("row ").nth(1).and_then(|text| text.split(' ').next());
                    Some(Some(row.unwrap().parse().unwrap()))
                }
            };
            assert_eq!(told, first, "seed {seed}");
        }
    }

    /// Metadata that claim more rows than any memory holds.
    #[test]
    fn rows_that_are_only_claimed_take_no_memory() {
        let (dim, claimed, job) = (1 << 15, u32::MAX as usize, Job::default());
        let list = |row: i32| Some(vec![Some(row as f32); dim]);
        let of = |first: i32| {
            let lists = [list(first), None, list(first + 1)];
            let lists =
                FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(lists, 1 << 15);
            RecordBatch::try_from_iter_with_nullable([("v", Arc::new(lists) as ArrayRef, true)])
        };
        let parts = [0, 2].map(|first| vec![Ok(of(first).unwrap())]);
        for of_parts in [None, Some(vec![claimed - 3, 3]), Some(vec![3, claimed - 3])] {
            let random = &mut Random::new(7);
            let known = KnownRows { all: claimed, of_partitions: of_parts };
            let (read, retained) = placed(&parts, known, random, &job).unwrap();
            assert_eq!((read.positions, retained.len()), (vec![0, 2, 3, 5], 2));
            let values: &[f32] = read.rows.reals().unwrap();
            assert!(values.chunks(dim).map(|row| row[dim - 1]).eq([0.0, 1.0, 2.0, 3.0]));
            let none = [0, 2].map(|first| vec![Ok(of(first).unwrap().slice(0, 0))]);
            let known = KnownRows { all: claimed, of_partitions: Some(vec![claimed - 3, 3]) };
            let (read, _) = placed(&none, known, random, &job).unwrap();
            assert!(read.rows.is_empty());
        }
    }

    struct Nothing;

    impl Budget for Nothing {
        fn grow(&self, _: usize) -> std::result::Result<(), String> {
            Err("there is none".to_string())
        }

        fn shrink(&self, _: usize) {}
    }

    #[test]
    fn without_memory_nothing_is_taken() {
        let job = Job::default().with_budget(Arc::new(Nothing));
        let list = || Some(vec![Some(1.0), Some(2.0)]);
        let one = |is_fixed| vec![Ok(batch(&[list(), None], 0, is_fixed))];
        for (seed, is_fixed) in (0..40).flat_map(|seed| [(seed, true), (seed, false)]) {
            let counts = [(0, None), (4, None), (4, Some(vec![2, 2])), (4, Some(vec![4, 0]))];
            for (all, of_partitions) in counts {
                let known = KnownRows { all, of_partitions };
                let parts = match known.of_partitions.as_ref().map(|rows| rows[0]) {
                    Some(4) => {
                        vec![one(is_fixed).into_iter().chain(one(is_fixed)).collect(), vec![]]
                    }
                    _ => vec![one(is_fixed), one(is_fixed)],
                };
                let outcome = placed(&parts, known, &mut Random::new(seed), &job).map(drop);
                let error = outcome.unwrap_err().to_string();
                assert!(error.contains("out of memory for rows"), "{error}");
            }
            let known = KnownRows { all: 2, of_partitions: None };
            let outcome = placed(&[one(is_fixed)], known, &mut Random::new(seed), &job);
            assert!(outcome.is_err());
        }
    }
}
