//! Ground truth for sampled queries, and recall against it.
//!
//! Ties with the k-th neighbour count as correct, up to k neighbours in all.

use std::ops::Range;
use std::sync::Arc;

use crate::algo::knn::params::KnnParams;
use crate::device::{Device, ExactSearch, Neighbors, QueryRows};
use crate::error::Result;
use crate::job::Job;
use crate::rows::Rows;

/// Largest number of ranks of a query that are checked.
const RANKS: usize = 10;

/// Number of rows after the k-th neighbour among which ties with it are searched, and largest number
/// of checked ties.
const TIED: usize = 64;

/// The ground truth of all sampled queries.
pub(super) struct GroundTruth {
    /// The checked rows of each query, one query after the other.
    pub rows: Rows,
    lists: Vec<CheckedRows>,
    /// Number of neighbours of a query.
    pub per_query: usize,
}

/// The checked rows of one query.
struct CheckedRows {
    /// Their positions in `GroundTruth::rows`, nearest first.
    positions: Range<usize>,
    /// Number of checked rows nearer than the k-th neighbour; all of them, if no row after the k-th
    /// ties with it.
    nearer: usize,
    /// Number of neighbours represented by each nearer row, and by each tied row.
    weights: [f64; 2],
}

impl GroundTruth {
    /// Largest number of checked rows of a query.
    pub const MOST_ROWS: usize = RANKS + TIED;

    /// The ground truth of `queries`; `self_rows` has the base row that each query is, if any.
    ///
    /// # Errors
    /// Those of the exact search.
    pub fn new<D: Device>(
        device: &Arc<D>,
        base: &Rows,
        queries: &Rows,
        self_rows: &[Option<u32>],
        params: KnnParams,
        job: &Job,
    ) -> Result<Self> {
        let itself = usize::from(self_rows.iter().any(Option::is_some));
        let per_query = params.k().min(base.len().saturating_sub(itself));
        let search = |more: usize| -> Result<Neighbors> {
            let count = per_query + itself + more;
            let (device, base) = (device.clone(), base.clone());
            let search = ExactSearch::open(device, base, params.metric(), count, job)?;
            search.search(queries, QueryRows::Separate, job)
        };
        let mut neighbors = others(search(1)?, self_rows);
        if per_query > 0 && neighbors.iter().any(|list| ties(list, per_query) > 0) {
            neighbors = others(search(TIED)?, self_rows);
        }
        let (lists, rows) = Self::checked_rows(&neighbors, per_query);
        let rows = Rows::all(Arc::new(base.gather(&rows, job)?));
        Ok(Self { rows, lists, per_query })
    }

    /// Selects the checked rows among `neighbors`, the neighbours of each query with their distances,
    /// nearest first.
    fn checked_rows(
        neighbors: &[Vec<(u32, f64)>],
        per_query: usize,
    ) -> (Vec<CheckedRows>, Vec<u32>) {
        let (mut lists, mut rows) = (Vec::new(), Vec::new());
        for list in neighbors {
            let end = per_query + ties(list, per_query);
            let nearer = match per_query.checked_sub(1) {
                Some(last) if end > per_query => list.partition_point(|row| row.1 < list[last].1),
                _ => per_query,
            };
            let (tied, start) = (end - nearer, rows.len());
            let ranks = (nearer.min(RANKS), tied.min(TIED));
            let of_tied = spread(tied, ranks.1).map(|rank| nearer + rank);
            rows.extend(spread(nearer, ranks.0).chain(of_tied).map(|rank| list[rank].0));
            let weight = |all: usize, ranks: usize| all as f64 / ranks.max(1) as f64;
            let weights = [weight(nearer, ranks.0), weight(tied, ranks.1)];
            lists.push(CheckedRows { positions: start..rows.len(), nearer: ranks.0, weights });
        }
        (lists, rows)
    }

    /// The share of all neighbours, ties included, that is checked.
    pub fn share(&self) -> f64 {
        let all = |list: &CheckedRows| {
            let tied = list.positions.len() - list.nearer;
            list.nearer as f64 * list.weights[0] + tied as f64 * list.weights[1]
        };
        let all: f64 = self.lists.iter().map(all).sum();
        if all > 0.0 { (self.rows.len() as f64 / all).min(1.0) } else { 1.0 }
    }

    /// Positions of a query's checked rows in `rows`.
    pub fn positions(&self, query: usize) -> Range<usize> {
        self.lists[query].positions.clone()
    }

    /// The recall of each query; `hits` says for each checked row whether it was found.
    pub fn recalls(&self, hits: &[bool]) -> Vec<f64> {
        let count = |hits: &[bool]| hits.iter().filter(|hit| **hit).count() as f64;
        let recall = |list: &CheckedRows| {
            let (nearer, tied) = hits[list.positions.clone()].split_at(list.nearer);
            let right = count(nearer) * list.weights[0] + count(tied) * list.weights[1];
            (right / self.per_query.max(1) as f64).min(1.0)
        };
        self.lists.iter().map(recall).collect()
    }
}

/// Number of rows after the k-th neighbour that are equally far away.
fn ties(rows: &[(u32, f64)], per_query: usize) -> usize {
    let Some(last) = per_query.checked_sub(1) else { return 0 };
    rows[per_query..].iter().take_while(|row| row.1 == rows[last].1).count()
}

/// `count` of the numbers below `all`, evenly spaced.
fn spread(all: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |i| (2 * i + 1) * all / (2 * count))
}

/// The neighbours of each query with their distances, without the query itself.
fn others(neighbors: Neighbors, self_rows: &[Option<u32>]) -> Vec<Vec<(u32, f64)>> {
    let Neighbors { per_query, rows, distances, .. } = neighbors;
    let of_query = |(query, self_row): (usize, &Option<u32>)| {
        let list = query * per_query..(query + 1) * per_query;
        let list = list.map(|at| (rows[at], distances.at(at)));
        list.filter(|(row, _)| Some(*row) != *self_row).collect()
    };
    self_rows.iter().enumerate().map(of_query).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::{Elements, Matrix};

    /// The ground truth of the query 0 in a base of non-negative numbers.
    fn ground_truth(base: &[f32], k: usize) -> GroundTruth {
        let mut neighbors: Vec<_> = (0..).zip(base.iter().copied().map(f64::from)).collect();
        neighbors.sort_by(|a, b| a.1.total_cmp(&b.1));
        let per_query = k.min(neighbors.len());
        let (lists, rows) = GroundTruth::checked_rows(&[neighbors], per_query);
        let numbers = Elements::F32(rows.iter().map(|row| base[*row as usize]).collect());
        GroundTruth {
            rows: Rows::all(Arc::new(Matrix::new(numbers, rows.len(), 1))),
            lists,
            per_query,
        }
    }

    #[test]
    fn rows_as_far_as_the_last_count_as_much() {
        // Two rows are nearer than the fourth neighbour; five are as far away.
        let truth = ground_truth(&[3.0, 1.0, 3.0, 9.0, 3.0, 2.0, 3.0, 3.0], 4);
        assert_eq!(truth.positions(0), 0..7);
        assert_eq!(truth.share(), 1.0);
        let recall = |hits: [u8; 7]| truth.recalls(&hits.map(|hit| hit == 1))[0];
        assert_eq!(recall([1, 1, 0, 0, 0, 1, 1]), 1.0);
        assert_eq!(recall([1, 0, 1, 1, 1, 1, 1]), 1.0);
        assert_eq!(recall([0, 0, 1, 1, 0, 1, 0]), 0.75);
        assert_eq!(recall([1, 1, 0, 0, 0, 0, 0]), 0.5);
    }

    #[test]
    fn without_ties_ranks_stand_for_others() {
        let base: Vec<f32> = (0..40).map(|i| i as f32).collect();
        let all = ground_truth(&base, 10);
        assert_eq!((all.positions(0), all.share()), (0..10, 1.0));
        let some = ground_truth(&base, 30);
        assert_eq!(some.positions(0), 0..10);
        assert!(some.share() < 1.0);
        assert_eq!(some.recalls(&[true; 10]), [1.0]);
        let half: Vec<bool> = (0..10).map(|i| i % 2 == 0).collect();
        assert_eq!(some.recalls(&half), [0.5]);
        let fewer = ground_truth(&base[..3], 30);
        assert_eq!((fewer.positions(0), fewer.per_query), (0..3, 3));
        assert_eq!(ground_truth(&[], 3).recalls(&[]), [0.0]);
    }
}
