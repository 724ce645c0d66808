//! Rows in groups, by the values of columns.

use std::collections::HashMap;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, RecordBatch};
use datafusion::arrow::row::{RowConverter, SortField};
use datafusion::common::internal_err;
use datafusion::error::Result;

use crate::job::{Job, Reserved};
use crate::matrix::Rows;

/// Bytes of a group: its list, and its entry in a hash table that may be half full.
const PER_GROUP: usize = 128;

/// Rows in groups.
struct Groups {
    /// The rows of every group, in the order of their first rows.
    groups: Vec<Vec<u32>>,
    reserved: Vec<Reserved>,
}

/// Rows, group by group.
pub(super) struct Grouped {
    pub rows: Rows,
    /// Where each group ends.
    pub ends: Vec<usize>,
    /// The positions that the rows had before.
    pub order: Vec<u32>,
    /// Whether the rows are others than those given.
    pub are_copied: bool,
    _reserved: Vec<Reserved>,
}

impl Grouped {
    /// Rows in groups by the values of some columns; without columns, all rows are one group.
    /// `positions` has the position of each row in the batches. NULLs are a group. Rows that are group by
    /// group already are not copied.
    ///
    /// # Errors
    /// [`HostMemory`](crate::Error::HostMemory), [`Cancelled`](crate::Error::Cancelled).
    pub fn new(
        columns: &[String],
        batches: &[RecordBatch],
        rows: Rows,
        positions: &[u32],
        job: &Job,
    ) -> Result<Self> {
        let Groups { groups, mut reserved } = groups_of(columns, batches, positions, job)?;
        reserved.push(job.reserve("rows by groups", rows.len() * size_of::<u32>())?);
        let order = groups.concat();
        let are_copied = !order.is_sorted();
        let rows = if are_copied {
            reserved.push(job.reserve("rows by groups", rows.bytes())?);
            Rows::all(Arc::new(rows.gather(&order, job)?))
        } else {
            rows
        };
        let ends = groups.iter().scan(0, |end, rows| {
            *end += rows.len();
            Some(*end)
        });
        Ok(Self { rows, ends: ends.collect(), order, are_copied, _reserved: reserved })
    }

    /// What was found for the rows, group by group, in the order that the rows had before.
    pub fn in_order<T: Copy + Default>(&self, found: impl Iterator<Item = T>) -> Vec<T> {
        let mut out = vec![T::default(); self.order.len()];
        self.order.iter().zip(found).for_each(|(row, value)| out[*row as usize] = value);
        out
    }
}

/// The rows of every group.
fn groups_of(
    columns: &[String],
    batches: &[RecordBatch],
    positions: &[u32],
    job: &Job,
) -> Result<Groups> {
    let rows = job.reserve("groups", 2 * positions.len() * size_of::<u32>())?;
    let mut reserved = vec![rows];
    let Some(first) = batches.first().filter(|_| !columns.is_empty()) else {
        let groups = vec![(0..positions.len() as u32).collect()];
        return Ok(Groups { groups, reserved });
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
    Ok(Groups { groups, reserved })
}
