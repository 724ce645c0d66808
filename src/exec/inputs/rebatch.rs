//! Rows in batches of equal size, independent of the input's batches.

use std::collections::VecDeque;

use arrow::array::{Array, RecordBatch};
use arrow::compute::BatchCoalescer;
use arrow::datatypes::SchemaRef;
use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryReservation;
use futures::StreamExt;
use futures::stream::BoxStream;

use super::settings::BATCH_ROWS;
use crate::exec::operator::dictionaries::{narrowed, widened, widened_schema};
use crate::exec::operator::evictable::grow;

/// Cuts rows into batches of [`BATCH_ROWS`]; smaller ones if the keys of a dictionary cannot number
/// the values of as many rows.
pub(super) struct Rebatch {
    rows: BoxStream<'static, Result<RecordBatch>>,
    schema: SchemaRef,
    /// The number of rows still to be output.
    left: usize,
    /// The rest of a large batch, which is cut next.
    rest: Option<RecordBatch>,
    /// Copies of small batches, with 32-bit dictionary keys, and their reservation.
    coalescer: BatchCoalescer,
    memory: MemoryReservation,
    /// Complete batches, with the dictionary keys of the schema.
    complete: VecDeque<RecordBatch>,
    ended: bool,
}

impl Rebatch {
    /// Cuts rows of this schema; at most `fetch` rows are output.
    pub fn new(
        rows: BoxStream<'static, Result<RecordBatch>>,
        schema: SchemaRef,
        fetch: Option<usize>,
        memory: MemoryReservation,
    ) -> Self {
        let coalescer = BatchCoalescer::new(widened_schema(&schema), BATCH_ROWS);
        let left = fetch.unwrap_or(usize::MAX);
        let complete = VecDeque::new();
        Self { rows, schema, left, rest: None, coalescer, memory, complete, ended: false }
    }

    /// The next batch; `None` after the last.
    pub async fn next(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            if let Some(batch) = self.coalescer.next_completed_batch() {
                self.complete.extend(narrowed(&batch, &self.schema)?);
            }
            if let Some(batch) = self.complete.pop_front() {
                if self.coalescer.is_empty() && self.complete.is_empty() {
                    self.memory.free();
                }
                return Ok(Some(batch));
            }
            if self.ended {
                return Ok(None);
            }
            let next = match self.rest.take() {
                Some(rest) => Some(rest),
                None => self.rows.next().await.transpose()?.map(|batch| self.counted(batch)),
            };
            match next {
                // Batches that are large enough are sliced, not copied.
                Some(batch) if batch.num_rows() >= BATCH_ROWS && self.coalescer.is_empty() => {
                    return Ok(Some(self.front(batch, BATCH_ROWS)));
                }
                Some(batch) => {
                    let room = BATCH_ROWS - self.coalescer.get_buffered_rows() % BATCH_ROWS;
                    let batch = widened(&self.front(batch, room), &self.coalescer.schema())?;
                    grow(&self.memory, slice_bytes(&batch)?)?;
                    self.coalescer.push_batch(batch)?;
                }
                None => self.ended = true,
            }
            self.ended |= self.left == 0 && self.rest.is_none();
            if self.ended {
                self.coalescer.finish_buffered_batch()?;
            }
        }
    }

    /// Truncates a batch to the limit.
    fn counted(&mut self, batch: RecordBatch) -> RecordBatch {
        let rows = batch.num_rows().min(self.left);
        self.left -= rows;
        if rows == batch.num_rows() { batch } else { batch.slice(0, rows) }
    }

    /// The first `rows` rows of a batch; the rest is kept for the next call.
    fn front(&mut self, batch: RecordBatch, rows: usize) -> RecordBatch {
        if batch.num_rows() <= rows {
            return batch;
        }
        self.rest = Some(batch.slice(rows, batch.num_rows() - rows));
        batch.slice(0, rows)
    }
}

/// The bytes of the rows of a batch, without unused parts of shared buffers.
fn slice_bytes(batch: &RecordBatch) -> Result<usize> {
    let bytes = batch.columns().iter().map(|column| column.to_data().get_slice_memory_size());
    Ok(bytes.sum::<Result<usize, _>>()?)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, DictionaryArray, Int8Array, StringViewArray, StructArray};
    use arrow::datatypes::{Field, Int8Type};
    use arrow::util::display::array_value_to_string;
    use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool, UnboundedMemoryPool};

    use super::*;

    /// As many rows as 8-bit keys have values, each with a text of its own, numbered from `first`:
    /// as a column, and in a struct.
    fn batch(first: usize) -> RecordBatch {
        let texts = (first..first + 128).map(|number| format!("number {number}"));
        let texts = StringViewArray::from_iter_values(texts);
        let keys = Int8Array::from_iter_values(0..=i8::MAX);
        let codes: ArrayRef = Arc::new(DictionaryArray::<Int8Type>::new(keys, Arc::new(texts)));
        let field = Arc::new(Field::new("code", codes.data_type().clone(), true));
        let inside: ArrayRef = Arc::new(StructArray::from(vec![(field, codes.clone())]));
        RecordBatch::try_from_iter([("code", codes), ("item", inside)]).unwrap()
    }

    /// The output batches for these input batches.
    async fn cut(batches: Vec<RecordBatch>, fetch: Option<usize>) -> Vec<RecordBatch> {
        let pool: Arc<dyn MemoryPool> = Arc::new(UnboundedMemoryPool::default());
        let memory = MemoryConsumer::new("test").register(&pool);
        let schema = batches[0].schema();
        let rows = futures::stream::iter(batches.into_iter().map(Ok)).boxed();
        let (mut rebatch, mut parts) = (Rebatch::new(rows, schema, fetch, memory), Vec::new());
        while let Some(batch) = rebatch.next().await.unwrap() {
            parts.push(batch);
        }
        assert_eq!(pool.reserved(), 0);
        parts
    }

    /// Small batches are joined up to the number of values that 8-bit keys can number.
    #[tokio::test]
    async fn small_keys_number_the_values_of_a_batch() {
        for (firsts, fetch, sizes) in [
            (vec![0, 0, 0], None, vec![384]),
            (vec![0, 128, 0], Some(300), vec![75, 75, 75, 75]),
            (vec![0; 65], None, vec![8192, 128]),
        ] {
            let parts = cut(firsts.iter().map(|first| batch(*first)).collect(), fetch).await;
            assert_eq!(parts.iter().map(RecordBatch::num_rows).collect::<Vec<_>>(), sizes);
            let rows = firsts.iter().flat_map(|first| *first..first + 128);
            let mut expected = rows.map(|number| format!("number {number}"));
            for part in parts {
                assert_eq!(part.schema(), batch(0).schema());
                for row in 0..part.num_rows() {
                    let text = expected.next().unwrap();
                    let [code, item] =
                        [0, 1].map(|i| array_value_to_string(part.column(i), row).unwrap());
                    assert_eq!((code, item), (text.clone(), format!("{{code: {text}}}")));
                }
            }
        }
    }
}
