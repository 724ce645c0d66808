//! The output of a [`KnnExec`](super::KnnExec): lists of neighbours, and the columns that both
//! inputs carry along, as batches.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, OffsetSizeTrait, RecordBatch};
use arrow::datatypes::{DataType, SchemaRef};
use arrow::error::ArrowError;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::memory_pool::MemoryReservation;

use crate::device::Neighbors;
use crate::exec::operator::dictionaries::interleaved;
use crate::exec::operator::output::slice_of;

/// The maximum bytes of carried columns in a batch, unless one row has more. The input stores a text
/// once, the output once per neighbour: without a bound, a batch of long texts could exceed memory,
/// and the 2 GiB that 32-bit offsets address.
const BATCH_BYTES: usize = 32 << 20;

/// The carried columns of an input, one piece per batch.
pub(super) struct Carried {
    /// For each column, its pieces.
    columns: Vec<Vec<ArrayRef>>,
    /// The first row of each piece.
    starts: Vec<usize>,
    /// The number of rows of every piece but the last, if it is the same for all.
    each: Option<usize>,
    rows: usize,
    /// An upper bound on the bytes of any row.
    largest: usize,
    /// The position of each row that has a vector.
    pub positions: Vec<u32>,
}

impl Carried {
    /// No pieces yet of `columns` columns.
    pub fn new(columns: usize) -> Self {
        let columns = vec![Vec::new(); columns];
        Self { columns, starts: Vec::new(), each: None, rows: 0, largest: 0, positions: Vec::new() }
    }

    /// Whether it has no piece yet.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Appends the columns of a batch of `rows` rows.
    pub fn push(&mut self, batch: Vec<ArrayRef>, rows: usize) {
        if let Some(last) = self.starts.last() {
            let before = self.rows - last;
            let is_first = self.starts.len() == 1;
            let as_before = self.each.filter(|each| *each == before);
            self.each = if is_first { Some(before) } else { as_before };
        }
        self.starts.push(self.rows);
        self.rows += rows;
        let mut largest = 0;
        for (pieces, array) in self.columns.iter_mut().zip(batch) {
            let rows = if is_fixed(array.data_type()) { array.len().min(1) } else { array.len() };
            largest += (0..rows).map(|row| bytes(array.as_ref(), row..row + 1)).max().unwrap_or(0);
            pieces.push(array);
        }
        self.largest = self.largest.max(largest);
    }

    /// The bytes of all carried columns of a row with a vector.
    fn row_bytes(&self, row: usize) -> usize {
        let (piece, row) = self.place(row);
        self.columns.iter().map(|pieces| bytes(pieces[piece].as_ref(), row..row + 1)).sum()
    }

    /// The piece of a row with a vector, and the row's position in it.
    fn place(&self, row: usize) -> (usize, usize) {
        let position = self.positions[row] as usize;
        let piece = match self.each {
            _ if self.starts.len() == 1 => 0,
            Some(each @ 1..) => (position / each).min(self.starts.len() - 1),
            _ => self.starts.partition_point(|start| *start <= position) - 1,
        };
        (piece, position - self.starts[piece])
    }

    /// The values of all columns for these rows with vectors.
    fn take(&self, rows: impl Iterator<Item = usize>) -> Result<Vec<ArrayRef>> {
        if self.columns.is_empty() {
            return Ok(Vec::new());
        }
        let places: Vec<_> = rows.map(|row| self.place(row)).collect();
        self.columns.iter().map(|pieces| Ok(interleaved(pieces, &places)?)).collect()
    }
}

/// Whether all values of this type have the same number of bytes.
fn is_fixed(column: &DataType) -> bool {
    column.is_primitive()
        || matches!(
            column,
            DataType::Boolean
                | DataType::FixedSizeBinary(_)
                | DataType::Utf8View
                | DataType::BinaryView
                | DataType::Dictionary(..)
        )
}

/// The bytes that copies of these rows take. Buffers of views and dictionaries are shared.
fn bytes(array: &dyn Array, rows: Range<usize>) -> usize {
    fn between<O: OffsetSizeTrait>(offsets: &[O], rows: Range<usize>) -> Range<usize> {
        offsets[rows.start].as_usize()..offsets[rows.end].as_usize()
    }
    match array.data_type() {
        DataType::Utf8 => between(array.as_string::<i32>().value_offsets(), rows).len(),
        DataType::LargeUtf8 => between(array.as_string::<i64>().value_offsets(), rows).len(),
        DataType::Binary => between(array.as_binary::<i32>().value_offsets(), rows).len(),
        DataType::LargeBinary => between(array.as_binary::<i64>().value_offsets(), rows).len(),
        DataType::List(_) => {
            let list = array.as_list::<i32>();
            bytes(list.values().as_ref(), between(list.value_offsets(), rows))
        }
        DataType::LargeList(_) => {
            let list = array.as_list::<i64>();
            bytes(list.values().as_ref(), between(list.value_offsets(), rows))
        }
        DataType::Map(..) => {
            let map = array.as_map();
            bytes(map.entries(), between(map.value_offsets(), rows))
        }
        DataType::FixedSizeList(_, dim) => {
            let (list, dim) = (array.as_fixed_size_list(), *dim as usize);
            bytes(list.values().as_ref(), rows.start * dim..rows.end * dim)
        }
        DataType::Struct(_) => {
            let fields = array.as_struct().columns();
            fields.iter().map(|field| bytes(field.as_ref(), rows.clone())).sum()
        }
        DataType::ListView(_) => {
            let list = array.as_list_view::<i32>();
            let row = |row| {
                bytes(list.values().as_ref(), view(list.value_offsets(), list.value_sizes(), row))
            };
            rows.filter(|row| list.is_valid(*row)).map(row).sum()
        }
        DataType::LargeListView(_) => {
            let list = array.as_list_view::<i64>();
            let row = |row| {
                bytes(list.values().as_ref(), view(list.value_offsets(), list.value_sizes(), row))
            };
            rows.filter(|row| list.is_valid(*row)).map(row).sum()
        }
        DataType::FixedSizeBinary(width) => rows.len() * *width as usize,
        other => rows.len() * other.primitive_width().unwrap_or(16),
    }
}

/// The range of a row's values in a list view.
fn view<O: OffsetSizeTrait>(offsets: &[O], sizes: &[O], row: usize) -> Range<usize> {
    let start = offsets[row].as_usize();
    start..start + sizes[row].as_usize()
}

/// The neighbours of a block of queries, output batch by batch.
pub(super) struct Batches {
    pub schema: SchemaRef,
    /// The columns of the base.
    pub base: Arc<Carried>,
    /// The columns of the queries; in a self-join of the base, the base has them.
    pub queries: Option<Arc<Carried>>,
    /// The row of the first query among those columns.
    pub first_query: usize,
    pub neighbors: Neighbors,
    /// The start of each query's list, if their lengths differ.
    pub starts: Option<Vec<usize>>,
    /// The number of neighbours that have been output.
    pub next: usize,
    pub batch_size: usize,
    /// Reservations for the queries' columns and for the lists.
    pub _reservations: Arc<Vec<MemoryReservation>>,
}

impl Batches {
    /// The next batch, of at most `most` rows; `None` after the last.
    pub fn next(&mut self, most: usize) -> Result<Option<RecordBatch>> {
        loop {
            let range = self.next..self.end(most);
            if range.is_empty() {
                return Ok(None);
            }
            let (rows, end) = (range.len(), range.end);
            match self.batch(range) {
                // The pieces have dictionaries of their own, whose values together exceed the keys:
                // halve the batch.
                Err(DataFusionError::ArrowError(error, _))
                    if rows > 1 && matches!(*error, ArrowError::DictionaryKeyOverflowError) =>
                {
                    self.batch_size = rows.div_ceil(2);
                }
                batch => {
                    self.next = end;
                    return batch.map(Some);
                }
            }
        }
    }

    /// The end of the next batch.
    fn end(&self, most: usize) -> usize {
        let end = self.neighbors.rows.len().min(self.next + self.batch_size.min(most));
        let (queries, base) = self.carried();
        let most = (queries.largest + base.largest).saturating_mul(end - self.next);
        if most <= BATCH_BYTES {
            return end;
        }
        let mut bytes = 0;
        for (i, (query, _)) in (self.next..end).zip(self.places(self.next..end)) {
            bytes += queries.row_bytes(query);
            bytes += base.row_bytes(self.neighbors.rows[i] as usize);
            if bytes > BATCH_BYTES && i > self.next {
                return i;
            }
        }
        end
    }

    /// The carried columns of the queries and of the base.
    fn carried(&self) -> (&Carried, &Carried) {
        (self.queries.as_deref().unwrap_or(&self.base), &self.base)
    }

    fn batch(&self, range: Range<usize>) -> Result<RecordBatch> {
        let (queries, base) = self.carried();
        let mut columns = queries.take(self.places(range.clone()).map(|(query, _)| query))?;
        let rows = &self.neighbors.rows[range.clone()];
        columns.extend(base.take(rows.iter().map(|row| *row as usize))?);
        let ranks = self.places(range.clone()).map(|(_, place)| place as i64 + 1);
        columns.push(Arc::new(ranks.collect::<Int64Array>()));
        columns.push(slice_of(&self.neighbors.distances, range));
        Ok(RecordBatch::try_new(self.schema.clone(), columns)?)
    }

    /// The query of each of these neighbours, and its position in the query's list, from 0.
    fn places(&self, range: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
        let per_query = self.neighbors.per_query.max(1);
        let mut query = match &self.starts {
            Some(starts) => starts.partition_point(|start| *start <= range.start) - 1,
            None => range.start / per_query,
        };
        range.map(move |i| {
            let (start, end) = match &self.starts {
                Some(starts) => {
                    while starts[query + 1] <= i {
                        query += 1;
                    }
                    (starts[query], starts[query + 1])
                }
                None => (query * per_query, (query + 1) * per_query),
            };
            let place = (self.first_query + query, i - start);
            query += usize::from(i + 1 == end);
            place
        })
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{DictionaryArray, Int8Array, ListArray, StringArray, StructArray};
    use arrow::buffer::OffsetBuffer;
    use arrow::compute::cast;
    use arrow::datatypes::{Field, Int8Type, Schema};
    use arrow::util::display::array_value_to_string;

    use super::*;
    use crate::device::{Distances, Work};

    /// A dictionary column of as many rows as 8-bit keys have values, each with a text of its own.
    fn piece(number: usize, values: &DataType) -> ArrayRef {
        let texts: StringArray = (0..128).map(|row| Some(format!("{number} {row}"))).collect();
        let texts = cast(&texts, values).unwrap();
        let keys = Int8Array::from_iter_values(0..=i8::MAX);
        Arc::new(DictionaryArray::<Int8Type>::new(keys, texts))
    }

    fn in_struct(codes: ArrayRef) -> ArrayRef {
        let field = Arc::new(Field::new("code", codes.data_type().clone(), true));
        Arc::new(StructArray::from(vec![(field, codes)]))
    }

    fn in_list(codes: ArrayRef) -> ArrayRef {
        let item = Arc::new(Field::new_list_field(codes.data_type().clone(), true));
        let offsets = OffsetBuffer::from_repeated_length(1, codes.len());
        Arc::new(ListArray::try_new(item, offsets, codes, None).unwrap())
    }

    /// The column itself, and as the only child of a struct and of a list.
    const SHAPES: [fn(ArrayRef) -> ArrayRef; 3] = [|codes| codes, in_struct, in_list];

    #[test]
    fn rows_are_found_in_pieces_of_any_length() {
        let all: [&[usize]; 5] = [&[7], &[4, 4, 4, 1], &[3, 3, 1, 4], &[2, 0, 5], &[1, 6, 6]];
        for lengths in all {
            let (mut carried, mut expected) = (Carried::new(0), Vec::new());
            for (piece, rows) in lengths.iter().enumerate() {
                carried.push(Vec::new(), *rows);
                expected.extend((0..*rows).map(|row| (piece, row)));
            }
            carried.positions = (0..expected.len() as u32).collect();
            let places: Vec<_> = (0..expected.len()).map(|row| carried.place(row)).collect();
            assert_eq!(places, expected, "{lengths:?}");
        }
    }

    #[test]
    fn small_keys_number_the_values_of_few_rows() {
        for values in [DataType::Utf8, DataType::Utf8View] {
            for shape in SHAPES {
                numbers_the_values_of_few_rows(|number| shape(piece(number, &values)));
            }
        }
    }

    fn numbers_the_values_of_few_rows(piece: impl Fn(usize) -> ArrayRef) {
        let mut base = Carried::new(1);
        (0..3).for_each(|number| base.push(vec![piece(number)], 128));
        base.positions = (0..384).collect();
        let coded = piece(0).data_type().clone();
        let schema = Schema::new(vec![
            Field::new("query_text", coded.clone(), true),
            Field::new("base_text", coded.clone(), true),
            Field::new("rank", DataType::Int64, false),
            Field::new("distance", DataType::Float32, false),
        ]);
        let rows = (0..384).rev().collect();
        let distances = Distances::F32(vec![0.0; 384]);
        let neighbors = Neighbors::new(1, rows, distances, Work::default());
        let mut batches = Batches {
            schema: Arc::new(schema),
            base: Arc::new(base),
            queries: None,
            first_query: 0,
            neighbors,
            starts: None,
            next: 0,
            batch_size: 8192,
            _reservations: Arc::default(),
        };
        let mut row = 0;
        while let Some(batch) = batches.next(usize::MAX).unwrap() {
            for i in 0..batch.num_rows() {
                for (column, row) in [(0, row), (1, 383 - row)] {
                    let shown = array_value_to_string(batch.column(column), i).unwrap();
                    let text = format!("{} {}", row / 128, row % 128);
                    let forms = [text.clone(), format!("{{code: {text}}}"), format!("[{text}]")];
                    assert!(forms.contains(&shown), "{coded}: {shown}");
                }
                row += 1;
            }
        }
        assert_eq!(row, 384, "{coded}");
    }
}
