//! How many different rows there are.

use std::collections::HashSet;

use crate::matrix::Real;

/// How many different rows of positive weight there are, counted up to `most`. Zeros of both signs
/// are equal.
pub(super) fn distinct_rows<T: Real>(
    values: &[T],
    dim: usize,
    weights: Option<&[f64]>,
    most: usize,
) -> usize {
    let bits = |row: &[T]| row.iter().map(|x| (*x + T::ZERO).to_f64().to_bits()).collect();
    let mut distinct: HashSet<Vec<u64>> = HashSet::new();
    for (i, row) in values.chunks_exact(dim.max(1)).enumerate() {
        if weights.is_some_and(|weights| weights[i] == 0.0) {
            continue;
        }
        distinct.insert(bits(row));
        if distinct.len() == most {
            break;
        }
    }
    distinct.len()
}
