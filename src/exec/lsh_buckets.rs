//! LSH buckets of rows, batch by batch.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, ListArray, StructArray, UInt64Array, UInt64Builder};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, FieldRef, Fields};

use crate::algo::knn::{LshParams, bucket_keys};
use crate::error::Result;
use crate::exec::read::vector_column::VectorColumn;
use crate::exec::read::vector_reader::VectorReader;
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// The fields of a bucket: the number of its hash table, from 0, and its key, NULL for a NULL
/// vector.
pub fn bucket_fields() -> Fields {
    Fields::from(vec![
        Field::new("table", DataType::Int64, false),
        Field::new("bucket", DataType::UInt64, true),
    ])
}

/// An element of a list of buckets.
pub fn bucket_field() -> FieldRef {
    Arc::new(Field::new_list_field(DataType::Struct(bucket_fields()), false))
}

/// The bucket of every row in each hash table, as lists of `table` and `bucket`.
///
/// # Errors
/// Rows of different lengths or not comparable by the metric; parameters that these rows cannot
/// meet.
pub fn row_buckets(
    columns: &[ArrayRef],
    vector: &VectorColumn,
    kind: ElementKind,
    metric: Metric,
    params: &LshParams,
) -> Result<ArrayRef> {
    let all = columns.first().map_or(0, |column| column.len());
    let mut reader = VectorReader::new("items", vector.clone(), kind, metric).for_search();
    reader.append(columns)?;
    let (rows, positions) = reader.finish();
    let keys = bucket_keys(params, metric, &rows)?;
    let tables = params.tables.unwrap_or(0);
    let mut buckets = UInt64Builder::with_capacity(all * tables);
    let mut next = positions.iter().map(|position| *position as usize).enumerate().peekable();
    for row in 0..all {
        match next.next_if(|(_, position)| *position == row) {
            Some((at, _)) => keys.iter().for_each(|keys| buckets.append_value(keys[at])),
            None => buckets.append_nulls(tables),
        }
    }
    let numbers: Int64Array = (0..all).flat_map(|_| 0..tables as i64).collect();
    let buckets: UInt64Array = buckets.finish();
    let columns: Vec<ArrayRef> = vec![Arc::new(numbers), Arc::new(buckets)];
    let values = StructArray::new(bucket_fields(), columns, None);
    let offsets = OffsetBuffer::from_lengths(std::iter::repeat_n(tables, all));
    Ok(Arc::new(ListArray::new(bucket_field(), offsets, Arc::new(values), None)))
}
