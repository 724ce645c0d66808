//! Counts the distinct rows of an input.

use std::collections::HashSet;

use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Metric;

/// Rows between two checks for cancellation.
const UNCHECKED: usize = 4096;

/// The number of distinct rows of positive weight, counted up to `most`. Zeros of both signs are
/// equal. For directions in f64, parallel rows are equal: unit vectors whose distance is within its
/// rounding error.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
pub(super) fn distinct_rows<T: Real>(
    values: &[T],
    metric: Metric,
    dim: usize,
    weights: Option<&[f64]>,
    most: usize,
    job: &Job,
) -> Result<usize> {
    let rows = most.min(values.len() / dim.max(1));
    // A hash set at half load, and the bits of each row.
    let bytes = rows * (2 * (size_of::<Vec<u64>>() + 1) + dim * size_of::<u64>());
    let _reserved = job.reserve("distinct rows", bytes)?;
    let bits = |row: &[T]| row.iter().map(|x| (*x + T::ZERO).to_f64().to_bits()).collect();
    let mut distinct: HashSet<Vec<u64>> = HashSet::new();
    let has_parallels = metric.is_of_directions() && T::MANTISSA == f64::MANTISSA_DIGITS;
    let mut directions: Vec<&[T]> = Vec::new();
    let rounding = T::EPSILON * T::from_f64(dim as f64 + 4.0);
    for (i, row) in values.chunks_exact(dim.max(1)).enumerate() {
        if i % UNCHECKED == 0 {
            job.check()?;
        }
        if weights.is_some_and(|weights| weights[i] == 0.0) {
            continue;
        }
        let is_new = distinct.insert(bits(row));
        if has_parallels && is_new {
            let is_parallel = |other: &&[T]| metric.distance(metric.sum_of(row, other)) <= rounding;
            if !directions.iter().any(is_parallel) {
                directions.push(row);
            }
        }
        let count = if has_parallels { directions.len() } else { distinct.len() };
        if count == most {
            return Ok(most);
        }
    }
    Ok(if has_parallels { directions.len() } else { distinct.len() })
}
