//! Counts distinct rows.

use std::collections::HashSet;

use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;

/// Rows between two checks for cancellation.
const UNCHECKED: usize = 4096;

/// The number of distinct rows of positive weight, counted up to `most`. Zeros of both signs are
/// equal.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
pub(super) fn distinct_rows<T: Real>(
    values: &[T],
    dim: usize,
    weights: Option<&[f64]>,
    most: usize,
    job: &Job,
) -> Result<usize> {
    let rows = most.min(values.len() / dim.max(1));
    // A table with room for twice as many entries, each with its row.
    let bytes = rows * (2 * (size_of::<Vec<u64>>() + 1) + dim * size_of::<u64>());
    let _reserved = job.reserve("distinct rows", bytes)?;
    let bits = |row: &[T]| row.iter().map(|x| (*x + T::ZERO).to_f64().to_bits()).collect();
    let mut distinct: HashSet<Vec<u64>> = HashSet::new();
    for (i, row) in values.chunks_exact(dim.max(1)).enumerate() {
        if i % UNCHECKED == 0 {
            job.check()?;
        }
        if weights.is_some_and(|weights| weights[i] == 0.0) {
            continue;
        }
        distinct.insert(bits(row));
        if distinct.len() == most {
            break;
        }
    }
    Ok(distinct.len())
}
