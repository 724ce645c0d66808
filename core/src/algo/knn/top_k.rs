//! Top-k selection from candidate lists, and merging of top-k lists.

use crate::device::{Candidates, Distances, Starts};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::parallel::in_parallel;

/// Queries per task.
const TASK: usize = 256;

/// Top-k lists of queries, one after the other.
pub(super) struct NearestLists {
    pub rows: Vec<u32>,
    pub distances: Distances,
    /// Start of each query's list.
    pub starts: Starts,
}

/// The `k` nearest of each query's distinct candidates, by distance and then by row.
pub(super) fn select_top_k(
    candidates: &Candidates<'_>,
    distances: Distances,
    k: usize,
) -> NearestLists {
    match distances {
        Distances::F32(distances) => nearest(candidates, &distances, k),
        Distances::F64(distances) => nearest(candidates, &distances, k),
    }
}

fn nearest<T: Real>(candidates: &Candidates<'_>, distances: &[T], k: usize) -> NearestLists {
    let (starts, rows) = (candidates.starts(), candidates.rows());
    let queries = starts.len() - 1;
    let tasks: Vec<_> = (0..queries).step_by(TASK).collect();
    let of_tasks = in_parallel(tasks, |first| {
        let (mut list, mut lists, mut counts) = (Vec::new(), Vec::new(), Vec::<usize>::new());
        for query in first..queries.min(first + TASK) {
            list.clear();
            let candidates = starts[query]..starts[query + 1];
            list.extend(candidates.map(|i| (distances[i].key(rows[i]), distances[i], rows[i])));
            if list.len() > k {
                list.select_nth_unstable_by(k - 1, |a, b| a.0.cmp(&b.0));
                list.truncate(k);
            }
            list.sort_unstable_by(|a, b| a.0.cmp(&b.0));
            counts.push(list.len());
            lists.extend(list.iter().map(|(_, distance, row)| (*distance, *row)));
        }
        (lists, counts)
    });
    let (mut distances, mut rows, mut starts) = (Vec::new(), Vec::new(), vec![0]);
    for (lists, counts) in of_tasks {
        let mut end = rows.len();
        starts.extend(counts.into_iter().map(|count| {
            end += count;
            end
        }));
        distances.extend(lists.iter().map(|(distance, _)| *distance));
        rows.extend(lists.iter().map(|(_, row)| *row));
    }
    NearestLists { rows, distances: Distances::of(distances), starts: Starts::Each(starts) }
}

/// Merges two top-k lists of each query, both sorted by distance and then by row. A row in both
/// occurs once.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled).
pub(super) fn merge(
    one: NearestLists,
    other: NearestLists,
    k: usize,
    job: &Job,
) -> Result<NearestLists> {
    match (one.distances, other.distances) {
        (Distances::F32(a), Distances::F32(b)) => {
            let one = TypedLists::new(a, one.rows, one.starts);
            merged(&one, &TypedLists::new(b, other.rows, other.starts), k, job)
        }
        (Distances::F64(a), Distances::F64(b)) => {
            let one = TypedLists::new(a, one.rows, one.starts);
            merged(&one, &TypedLists::new(b, other.rows, other.starts), k, job)
        }
        _ => unreachable!("distances of one search have one type"),
    }
}

/// Top-k lists whose distances have a known type.
struct TypedLists<T> {
    distances: Vec<T>,
    rows: Vec<u32>,
    /// Start of each list, and end of the last.
    starts: Vec<usize>,
}

impl<T: Real> TypedLists<T> {
    fn new(distances: Vec<T>, rows: Vec<u32>, starts: Starts) -> Self {
        Self { distances, rows, starts: starts.into_vec() }
    }

    /// The sort key of an entry; `None` at the end of its list.
    fn key(&self, entry: usize, end: usize) -> Option<T::Key> {
        (entry < end).then(|| self.distances[entry].key(self.rows[entry]))
    }
}

fn merged<T: Real>(
    one: &TypedLists<T>,
    other: &TypedLists<T>,
    k: usize,
    job: &Job,
) -> Result<NearestLists> {
    let (mut distances, mut rows) =
        (Vec::with_capacity(one.rows.len()), Vec::with_capacity(one.rows.len()));
    let mut starts = Vec::with_capacity(one.starts.len());
    starts.push(0);
    let (mut i, mut j) = (0, 0);
    let ends = one.starts.iter().copied().zip(other.starts.iter().copied()).skip(1);
    for (query, (one_end, other_end)) in ends.enumerate() {
        if query % TASK == 0 {
            job.check()?;
        }
        let start = rows.len();
        while rows.len() < start + k && (i < one_end || j < other_end) {
            let (a, b) = (one.key(i, one_end), other.key(j, other_end));
            let is_one = b.as_ref().is_none_or(|b| a.as_ref().is_some_and(|a| a <= b));
            let (list, entry) = if is_one { (one, i) } else { (other, j) };
            distances.push(list.distances[entry]);
            rows.push(list.rows[entry]);
            // A row in both lists has one distance, and therefore equal keys.
            let is_both = a == b;
            i += usize::from(is_one);
            j += usize::from(!is_one || is_both);
        }
        (i, j) = (one_end, other_end);
        starts.push(rows.len());
    }
    Ok(NearestLists { rows, distances: Distances::of(distances), starts: Starts::Each(starts) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_lists_are_those_of_all_candidates() {
        let all: Vec<(u32, f32)> = (0..40).map(|row| (row, (row * 7 % 11) as f32)).collect();
        let of = |lists: &[&[(u32, f32)]]| {
            let candidates = lists.concat();
            let rows: Vec<u32> = candidates.iter().map(|(row, _)| *row).collect();
            let distances = candidates.iter().map(|(_, distance)| *distance).collect();
            let mut starts = vec![0];
            lists.iter().for_each(|list| starts.push(starts[starts.len() - 1] + list.len()));
            select_top_k(&Candidates::new(&starts, &rows), Distances::F32(distances), 6)
        };
        let one = of(&[&all[..9], &all[10..12], &[]]);
        let other = of(&[&all[4..30], &[], &all[5..8]]);
        let merged = merge(one, other, 6, &Job::default()).unwrap();
        let expected = of(&[&all[..30], &all[10..12], &all[5..8]]);
        assert_eq!((merged.rows, merged.starts), (expected.rows, expected.starts));
        let (Distances::F32(merged), Distances::F32(expected)) =
            (merged.distances, expected.distances)
        else {
            panic!("another type");
        };
        assert_eq!(merged, expected);
    }
}
