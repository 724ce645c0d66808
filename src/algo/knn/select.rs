//! The nearest of each query's candidates.

use crate::device::Distances;
use crate::matrix::Real;
use crate::parallel::in_parallel;

/// Queries of a task.
const TASK: usize = 256;

/// The neighbours of some queries, list after list.
pub(super) struct Nearest {
    pub rows: Vec<u32>,
    pub distances: Distances,
    /// Neighbours of each query.
    pub counts: Vec<usize>,
}

/// The `k` nearest candidates of each query, by distance and then by row. Query `q` has the candidates
/// from `starts[q]` to `starts[q + 1]`; a candidate occurs once.
pub(super) fn select(
    (starts, rows): (&[usize], &[u32]),
    distances: Distances,
    k: usize,
) -> Nearest {
    match distances {
        Distances::F32(distances) => nearest((starts, rows), &distances, k),
        Distances::F64(distances) => nearest((starts, rows), &distances, k),
    }
}

fn nearest<T: Real>((starts, rows): (&[usize], &[u32]), distances: &[T], k: usize) -> Nearest {
    let queries = starts.len() - 1;
    let tasks: Vec<_> = (0..queries).step_by(TASK).collect();
    let found = in_parallel(tasks, |first| {
        let (mut own, mut found, mut counts) = (Vec::new(), Vec::new(), Vec::new());
        for query in first..queries.min(first + TASK) {
            own.clear();
            let candidates = starts[query]..starts[query + 1];
            own.extend(candidates.map(|i| (distances[i].key(rows[i]), distances[i], rows[i])));
            if own.len() > k {
                own.select_nth_unstable_by(k - 1, |a, b| a.0.cmp(&b.0));
                own.truncate(k);
            }
            own.sort_unstable_by(|a, b| a.0.cmp(&b.0));
            counts.push(own.len());
            found.extend(own.iter().map(|(_, distance, row)| (*distance, *row)));
        }
        (found, counts)
    });
    let (mut distances, mut rows, mut counts) = (Vec::new(), Vec::new(), Vec::new());
    for (own, own_counts) in found {
        distances.extend(own.iter().map(|(distance, _)| *distance));
        rows.extend(own.iter().map(|(_, row)| *row));
        counts.extend(own_counts);
    }
    Nearest { rows, distances: Distances::of(distances), counts }
}
