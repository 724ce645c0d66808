//! The exact neighbours of sampled queries, and how much of what an exact search returns was found.
//!
//! Rows that are as far away as the last neighbour of a query are as right as it: they are wanted too, though
//! only as many of them count as there is room for.

use std::ops::Range;
use std::sync::Arc;

use crate::device::{Device, ExactSearch, Neighbors, QueryRows};
use crate::error::Result;
use crate::job::Job;
use crate::metric::Metric;
use crate::rows::Rows;

/// Ranks of a query that are looked for.
const RANKS: usize = 10;

/// Rows behind the last rank that are looked at where some are as far away as it, and rows as far away
/// that are looked for.
const TIED: usize = 64;

/// The neighbours of all queries.
pub(super) struct Wanted {
    /// For each query the rows that are looked for, one query after the other.
    pub rows: Rows,
    lists: Vec<List>,
    /// Neighbours that a query has.
    pub per_query: usize,
}

/// The rows that are looked for, for one query.
struct List {
    /// Their places; the nearest comes first.
    places: Range<usize>,
    /// How many of them are nearer than the last neighbour; all, if no other row is as far away as it.
    nearer: usize,
    /// Rows that each of those stands for, and each of the others.
    weights: [f64; 2],
}

impl Wanted {
    /// Rows that are looked for, for one query, at most.
    pub const MOST_ROWS: usize = RANKS + TIED;

    /// The neighbours of queries, of which `own` says which base rows they are.
    ///
    /// # Errors
    /// Those of the exact search.
    pub fn new<D: Device>(
        device: &Arc<D>,
        (base, queries): (&Rows, &Rows),
        own: &[Option<u32>],
        (metric, k): (Metric, usize),
        job: &Job,
    ) -> Result<Self> {
        let itself = usize::from(own.iter().any(Option::is_some));
        let per_query = k.min(base.len().saturating_sub(itself));
        let search = |more: usize| -> Result<Neighbors> {
            let count = per_query + itself + more;
            let search = ExactSearch::open(device.clone(), base.clone(), metric, count, job)?;
            search.search(queries, QueryRows::Separate, job)
        };
        let mut found = others(search(1)?, own);
        if per_query > 0 && found.iter().any(|list| ties(list, per_query) > 0) {
            found = others(search(TIED)?, own);
        }
        let (lists, rows) = Self::looked_for(&found, per_query);
        let rows = Rows::all(Arc::new(base.gather(&rows, job)?));
        Ok(Self { rows, lists, per_query })
    }

    /// Which of the rows found for each query are looked for, with their distances, nearest first.
    fn looked_for(found: &[Vec<(u32, f64)>], per_query: usize) -> (Vec<List>, Vec<u32>) {
        let (mut lists, mut rows) = (Vec::new(), Vec::new());
        for list in found {
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
            lists.push(List { places: start..rows.len(), nearer: ranks.0, weights });
        }
        (lists, rows)
    }

    /// The share of all neighbours that are looked for.
    pub fn share(&self) -> f64 {
        let all = |list: &List| {
            let tied = list.places.len() - list.nearer;
            list.nearer as f64 * list.weights[0] + tied as f64 * list.weights[1]
        };
        let all: f64 = self.lists.iter().map(all).sum();
        if all > 0.0 { (self.rows.len() as f64 / all).min(1.0) } else { 1.0 }
    }

    /// The places of a query's rows.
    pub fn places(&self, query: usize) -> Range<usize> {
        self.lists[query].places.clone()
    }

    /// The recall of each query, if of all rows these were found.
    pub fn recalls(&self, found: &[bool]) -> Vec<f64> {
        let count = |found: &[bool]| found.iter().filter(|found| **found).count() as f64;
        let recall = |list: &List| {
            let (nearer, tied) = found[list.places.clone()].split_at(list.nearer);
            let right = count(nearer) * list.weights[0] + count(tied) * list.weights[1];
            (right / self.per_query.max(1) as f64).min(1.0)
        };
        self.lists.iter().map(recall).collect()
    }
}

/// How many rows behind the last neighbour are as far away as it.
fn ties(rows: &[(u32, f64)], per_query: usize) -> usize {
    let Some(last) = per_query.checked_sub(1) else { return 0 };
    rows[per_query..].iter().take_while(|row| row.1 == rows[last].1).count()
}

/// `count` of the numbers below `all`, evenly spread.
fn spread(all: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |i| (2 * i + 1) * all / (2 * count))
}

/// The rows found for each query with their distances, without itself.
fn others(found: Neighbors, own: &[Option<u32>]) -> Vec<Vec<(u32, f64)>> {
    let all: Vec<(u32, f64)> =
        found.rows.iter().enumerate().map(|(at, row)| (*row, found.distances.at(at))).collect();
    let per_query = found.per_query;
    let of_query = |(query, own): (usize, &Option<u32>)| {
        let list = &all[query * per_query..][..per_query];
        list.iter().copied().filter(|(row, _)| Some(*row) != *own).collect()
    };
    own.iter().enumerate().map(of_query).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::{Elements, Matrix};

    /// The neighbours of the number 0 among these, which are not negative.
    fn wanted(base: &[f32], k: usize) -> Wanted {
        let mut found: Vec<_> = (0..).zip(base.iter().copied().map(f64::from)).collect();
        found.sort_by(|a, b| a.1.total_cmp(&b.1));
        let per_query = k.min(found.len());
        let (lists, rows) = Wanted::looked_for(&[found], per_query);
        let numbers = Elements::F32(rows.iter().map(|row| base[*row as usize]).collect());
        Wanted { rows: Rows::all(Arc::new(Matrix::new(numbers, rows.len(), 1))), lists, per_query }
    }

    #[test]
    fn rows_as_far_as_the_last_count_as_much() {
        // Two are nearer than the last of four; five are as far away as it.
        let wanted = wanted(&[3.0, 1.0, 3.0, 9.0, 3.0, 2.0, 3.0, 3.0], 4);
        assert_eq!(wanted.places(0), 0..7);
        assert_eq!(wanted.share(), 1.0);
        let recall = |found: [u8; 7]| wanted.recalls(&found.map(|found| found == 1))[0];
        assert_eq!(recall([1, 1, 0, 0, 0, 1, 1]), 1.0);
        assert_eq!(recall([1, 0, 1, 1, 1, 1, 1]), 1.0);
        assert_eq!(recall([0, 0, 1, 1, 0, 1, 0]), 0.75);
        assert_eq!(recall([1, 1, 0, 0, 0, 0, 0]), 0.5);
    }

    #[test]
    fn without_ties_ranks_stand_for_others() {
        let base: Vec<f32> = (0..40).map(|i| i as f32).collect();
        let all = wanted(&base, 10);
        assert_eq!((all.places(0), all.share()), (0..10, 1.0));
        let some = wanted(&base, 30);
        assert_eq!(some.places(0), 0..10);
        assert!(some.share() < 1.0);
        assert_eq!(some.recalls(&[true; 10]), [1.0]);
        let half: Vec<bool> = (0..10).map(|i| i % 2 == 0).collect();
        assert_eq!(some.recalls(&half), [0.5]);
        let fewer = wanted(&base[..3], 30);
        assert_eq!((fewer.places(0), fewer.per_query), (0..3, 3));
        assert_eq!(wanted(&[], 3).recalls(&[]), [0.0]);
    }
}
