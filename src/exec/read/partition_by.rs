//! Grouping of rows by the values of columns (PARTITION BY).

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::row::{RowConverter, SortField};
use datafusion::common::internal_err;
use datafusion::error::Result;

use crate::error::Error;
use crate::job::{Job, Reserved};
use crate::rows::Rows;

/// Bytes per group: its size, its start, and an entry in a hash table that may be half full.
const PER_GROUP: usize = 128;

/// The assignment of rows to groups.
struct GroupAssignment {
    /// The group number of each row; groups are numbered in the order of their first rows.
    numbers: Vec<u32>,
    /// The number of rows of each group.
    sizes: Vec<usize>,
    reserved: Vec<Reserved>,
}

impl GroupAssignment {
    /// The row numbers in group order.
    fn order(&self) -> Vec<u32> {
        let starts = self.sizes.iter().scan(0, |end, size| {
            *end += size;
            Some(*end - size)
        });
        let (mut next, mut order) = (starts.collect::<Vec<_>>(), vec![0; self.numbers.len()]);
        for (row, number) in (0..).zip(&self.numbers) {
            let place = &mut next[*number as usize];
            order[*place] = row;
            *place += 1;
        }
        order
    }
}

/// Rows in group order: all rows of one group are consecutive.
pub(in crate::exec) struct GroupedRows {
    pub rows: Rows,
    /// The end of each group in `rows`.
    pub ends: Vec<usize>,
    /// The original position of each row.
    pub order: Vec<u32>,
    /// Whether `rows` is a reordered copy of the given rows.
    pub are_copied: bool,
    _reserved: Vec<Reserved>,
}

impl GroupedRows {
    /// Groups rows by the values of columns; without columns, all rows are one group. `positions`
    /// has the position of each row in the batches. NULL is a group of its own. Rows already in
    /// group order are not copied.
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
        let mut groups = groups_of(columns, batches, positions, job)?;
        let mut reserve = |bytes| {
            groups.reserved.push(job.reserve("rows in PARTITION BY order", bytes)?);
            Ok::<_, Error>(())
        };
        reserve(rows.len() * size_of::<u32>())?;
        let are_copied = !groups.numbers.is_sorted();
        if are_copied {
            reserve(rows.bytes())?;
        }
        let order = groups.order();
        let rows = match are_copied {
            true => Rows::all(Arc::new(rows.gather(&order, job)?)),
            false => rows,
        };
        let GroupAssignment { sizes, reserved, .. } = groups;
        let ends = sizes.iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        });
        Ok(Self { rows, ends: ends.collect(), order, are_copied, _reserved: reserved })
    }

    /// Values per row, given in group order, in the original order of the rows.
    pub fn in_order<T: Copy + Default>(&self, values: impl Iterator<Item = T>) -> Vec<T> {
        let mut out = vec![T::default(); self.order.len()];
        self.order.iter().zip(values).for_each(|(row, value)| out[*row as usize] = value);
        out
    }
}

/// Assigns every row to its group.
fn groups_of(
    columns: &[String],
    batches: &[RecordBatch],
    positions: &[u32],
    job: &Job,
) -> Result<GroupAssignment> {
    let rows = positions.len();
    let mut reserved = vec![job.reserve("PARTITION BY groups", size_of_val(positions))?];
    let Some(first) = batches.first().filter(|_| !columns.is_empty()) else {
        return Ok(GroupAssignment { numbers: vec![0; rows], sizes: vec![rows], reserved });
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
    let (mut known, mut sizes) = (HashMap::<Vec<u8>, u32>::new(), Vec::new());
    let (mut numbers, mut start) = (Vec::with_capacity(rows), 0);
    for batch in batches {
        job.check()?;
        let mut keys_bytes = 0;
        let keys = converter.convert_columns(&keys_of(batch)?)?;
        let end = start + batch.num_rows();
        while let Some(position) = positions.get(numbers.len()).filter(|p| (**p as usize) < end) {
            let key = keys.row(*position as usize - start);
            let number = known.get(key.as_ref()).copied().unwrap_or_else(|| {
                let key = key.as_ref().to_vec();
                keys_bytes += PER_GROUP + key.len();
                sizes.push(0);
                *known.entry(key).or_insert(sizes.len() as u32 - 1)
            });
            sizes[number as usize] += 1;
            numbers.push(number);
        }
        reserved.push(job.reserve("PARTITION BY keys", keys_bytes)?);
        start = end;
    }
    Ok(GroupAssignment { numbers, sizes, reserved })
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int32Array, StringArray};

    use super::*;
    use crate::matrix::{Elements, Matrix};
    use crate::random::Random;

    #[test]
    fn rows_stay_in_order_within_groups_that_are_in_the_order_of_their_first_rows() {
        let (job, mut random) = (Job::default(), Random::new(1));
        for (count, keys) in [(1, 1), (1_000, 1), (1_000, 30), (50_000, 7), (5_000, 5_000)] {
            let number = |random: &mut Random| random.below(keys + 1).checked_sub(1);
            let mut of_row: Vec<_> = (0..count).map(|_| number(&mut random)).collect();
            for is_sorted in [false, true] {
                if is_sorted {
                    of_row.sort_unstable();
                }
                let batches = of_row.chunks(400).map(|keys| {
                    let a = keys.iter().map(|key| key.map(|key| key as i32 / 2));
                    let b = keys.iter().map(|key| key.map(|key| format!("{}", key % 2)));
                    let a: ArrayRef = Arc::new(a.collect::<Int32Array>());
                    let b: ArrayRef = Arc::new(b.collect::<StringArray>());
                    RecordBatch::try_from_iter([("b", b), ("a", a)]).unwrap()
                });
                let batches: Vec<_> = batches.collect();
                // Some rows have no vector.
                let positions = (0..count as u32).filter(|at| at % 11 != 3);
                let positions: Vec<u32> = positions.collect();
                let values = positions.iter().flat_map(|at| [*at as f32, 0.5, 1.5]).collect();
                let matrix = Matrix::new(Elements::F32(values), positions.len(), 3);
                let rows = Rows::all(Arc::new(matrix));
                let columns = ["a".to_string(), "b".to_string()];
                let grouped = GroupedRows::new(&columns, &batches, rows, &positions, &job).unwrap();
                let mut expected: Vec<(Option<u64>, Vec<u32>)> = Vec::new();
                for (row, at) in positions.iter().enumerate() {
                    let key = of_row[*at as usize];
                    let known = expected.iter_mut().find(|(known, _)| *known == key);
                    match known {
                        Some((_, rows)) => rows.push(row as u32),
                        None => expected.push((key, vec![row as u32])),
                    }
                }
                let order: Vec<u32> = expected.iter().flat_map(|(_, rows)| rows).copied().collect();
                let sizes = expected.iter().map(|(_, rows)| rows.len());
                let starts = std::iter::once(0).chain(grouped.ends.iter().copied());
                assert!(sizes.eq(grouped.ends.iter().zip(starts).map(|(end, start)| end - start)));
                assert_eq!(grouped.are_copied, !order.is_sorted());
                let values: &[f32] = grouped.rows.reals().unwrap();
                let firsts = order.iter().map(|row| positions[*row as usize] as f32);
                assert!(firsts.eq(values.iter().step_by(3).copied()));
                assert!(values.chunks_exact(3).all(|row| row[1..] == [0.5, 1.5]));
                let back = grouped.in_order(grouped.order.iter().copied());
                assert!(back.into_iter().eq(0..positions.len() as u32));
                assert_eq!(grouped.order, order);
            }
        }
    }
}
