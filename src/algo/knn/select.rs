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

/// The `k` nearest of both lists of each query. What is in both occurs once.
pub(super) fn merge(one: Nearest, other: Nearest, k: usize) -> Nearest {
    let (mut rows, mut starts) = (Vec::new(), vec![0]);
    let mut from = Vec::with_capacity(one.rows.len() + other.rows.len());
    let mut firsts = (0, 0);
    for counts in one.counts.iter().zip(&other.counts) {
        let lists =
            (&one.rows[firsts.0..firsts.0 + counts.0], &other.rows[firsts.1..firsts.1 + counts.1]);
        rows.extend(lists.0);
        from.extend(firsts.0..firsts.0 + counts.0);
        for (i, row) in lists.1.iter().enumerate().filter(|(_, row)| !lists.0.contains(row)) {
            rows.push(*row);
            from.push(one.rows.len() + firsts.1 + i);
        }
        starts.push(rows.len());
        firsts = (firsts.0 + counts.0, firsts.1 + counts.1);
    }
    let mut distances = one.distances;
    distances.extend(other.distances);
    let distances = match distances {
        Distances::F32(all) => Distances::F32(from.iter().map(|i| all[*i]).collect()),
        Distances::F64(all) => Distances::F64(from.iter().map(|i| all[*i]).collect()),
    };
    select((&starts, &rows), distances, k)
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
            select((&starts, &rows), Distances::F32(distances), 6)
        };
        let one = of(&[&all[..9], &all[10..12], &[]]);
        let other = of(&[&all[4..30], &[], &all[5..8]]);
        let (merged, wanted) = (merge(one, other, 6), of(&[&all[..30], &all[10..12], &all[5..8]]));
        assert_eq!((merged.rows, merged.counts), (wanted.rows, wanted.counts));
        let (Distances::F32(merged), Distances::F32(wanted)) = (merged.distances, wanted.distances)
        else {
            panic!("another type");
        };
        assert_eq!(merged, wanted);
    }
}
