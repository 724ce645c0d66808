//! Rows in groups, by the values of columns.

use std::collections::HashMap;

use datafusion::arrow::array::{ArrayRef, RecordBatch};
use datafusion::arrow::row::{RowConverter, SortField};
use datafusion::common::internal_err;
use datafusion::error::Result;

use crate::job::{Job, Reserved};

/// Bytes of a group: its list, and its entry in a hash table that may be half full.
const PER_GROUP: usize = 128;

/// Rows in groups.
pub(super) struct Groups {
    /// The rows of every group, in the order of their first rows.
    pub groups: Vec<Vec<u32>>,
    _reserved: Vec<Reserved>,
}

/// The rows of every group, by the values of some columns; without columns, all rows are one group.
/// `positions` has the position of each row in the batches. NULLs are a group.
pub(super) fn groups_of(
    columns: &[String],
    batches: &[RecordBatch],
    positions: &[u32],
    job: &Job,
) -> Result<Groups> {
    let rows = job.reserve("groups", 2 * positions.len() * size_of::<u32>())?;
    let mut reserved = vec![rows];
    let Some(first) = batches.first().filter(|_| !columns.is_empty()) else {
        let groups = vec![(0..positions.len() as u32).collect()];
        return Ok(Groups { groups, _reserved: reserved });
    };
    let keys_of = |batch: &RecordBatch| -> Result<Vec<ArrayRef>> {
        let column = |name: &String| match batch.column_by_name(name) {
            Some(column) => Ok(column.clone()),
            None => internal_err!("input lost its column '{name}'"),
        };
        columns.iter().map(column).collect()
    };
    let fields = keys_of(first)?;
    let fields = fields.iter().map(|column| SortField::new(column.data_type().clone()));
    let converter = RowConverter::new(fields.collect())?;
    let (mut numbers, mut groups) = (HashMap::new(), Vec::<Vec<u32>>::new());
    let (mut start, mut next) = (0, 0);
    for batch in batches {
        job.check()?;
        let mut keys_bytes = 0;
        let keys = converter.convert_columns(&keys_of(batch)?)?;
        let end = start + batch.num_rows();
        while let Some(position) = positions.get(next).filter(|p| (**p as usize) < end) {
            let key = keys.row(*position as usize - start).as_ref().to_vec();
            let bytes = PER_GROUP + key.len();
            let number = *numbers.entry(key).or_insert_with(|| {
                keys_bytes += bytes;
                groups.push(Vec::new());
                groups.len() - 1
            });
            groups[number].push(next as u32);
            next += 1;
        }
        reserved.push(job.reserve("keys of groups", keys_bytes)?);
        start = end;
    }
    Ok(Groups { groups, _reserved: reserved })
}
