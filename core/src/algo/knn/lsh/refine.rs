//! Refines reranked lists: ranks their rows by exact distances, as
//! [`ExactSearch`](crate::device::ExactSearch) does for all rows.

use std::ops::Range;

use super::candidates::CandidateGenerator;
use super::rerank::{PartialTopK, Reranker, reserved_buckets};
use crate::algo::knn::search::{LshWork, SearchResult};
use crate::algo::knn::top_k::NearestLists;
use crate::device::{
    Candidates, Device, Distances, ExactPairs, Neighbors, QueryInput, QueryRows, RowStats, Starts,
    Work,
};
use crate::error::Result;
use crate::job::Job;
use crate::parallel::in_parallel;
use crate::rows::Rows;

/// Queries per task.
const TASK: usize = 64;

/// The nearest neighbours of the queries of a task.
#[derive(Default)]
struct RefinedLists {
    rows: Vec<u32>,
    distances: Vec<f64>,
    counts: Vec<usize>,
    /// Queries whose top-k lists are uncertain: a candidate that was not refined may be nearer.
    open: Vec<u32>,
}

impl<D: Device> Reranker<D> {
    /// Refines the candidates found in all tables; returns the nearest neighbours, nearest first,
    /// and the queries whose lists are uncertain.
    pub(super) fn finish(
        &self,
        lists: PartialTopK,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        job: &Job,
    ) -> Result<(SearchResult, Vec<u32>)> {
        let itself = usize::from(query_rows != QueryRows::Separate);
        let per_query = self.k.min(self.counting.saturating_sub(itself));
        let PartialTopK { nearest, visited, pairs } = lists;
        let NearestLists { rows, distances: sums, starts } = nearest;
        let work = Work { pairs, rechecked: rows.len() as u64, ..Work::default() };
        let starts = starts.into_vec();
        let lists = Candidates::new(&starts, &rows);
        let longest = self.filter.needs_lengths().then(|| self.base.stats().longest);
        let tasks: Vec<_> = (0..starts.len() - 1).step_by(TASK).collect();
        let refined = in_parallel(tasks, |first| {
            job.check()?;
            let some = first..(first + TASK).min(starts.len() - 1);
            Ok(self.refine(queries, longest, some, &lists, &sums))
        });
        let (mut all, mut ends) = (RefinedLists::default(), vec![0]);
        for part in refined {
            let RefinedLists { rows, distances, counts, open } = part?;
            for count in counts {
                ends.push(ends[ends.len() - 1] + count);
            }
            all.rows.extend(rows);
            all.distances.extend(distances);
            all.open.extend(open);
        }
        if !all.open.is_empty() && self.filter.may_be_exact() {
            let of_base = self.base.stats();
            all.open.retain(|query| {
                let query = *query as usize;
                !self
                    .filter
                    .is_exact(of_base, &RowStats::of(&queries.slice(query..query + 1), false))
            });
        }
        let starts = Starts::Each(ends);
        let short = starts.shorter(per_query) as u64;
        let is_equal = short == 0 && per_query > 0;
        let starts = (!is_equal).then(|| starts.into_vec());
        let distances = Distances::F64(all.distances);
        let neighbors = Neighbors::new(per_query, all.rows, distances, work);
        let lsh = LshWork { visited, short };
        Ok((SearchResult { neighbors, starts, lsh }, all.open))
    }

    /// Refines the candidate lists of the queries in `some`, which hold the candidates with the
    /// smallest device distances.
    fn refine(
        &self,
        queries: &Rows,
        longest: Option<f64>,
        some: Range<usize>,
        lists: &Candidates<'_>,
        sums: &Distances,
    ) -> RefinedLists {
        let (base, starts, rows) = (&self.base, lists.starts(), lists.rows());
        let pairs = base.device.host().exact_pairs(base.metric, queries, &base.rows);
        let (mut refined, mut buffer) = (RefinedLists::default(), Vec::new());
        for query in some {
            let list = starts[query]..starts[query + 1];
            let nearest = nearest(&pairs, query, &rows[list.clone()], self.k, &mut buffer);
            if list.len() == self.listed {
                let lengths = longest.map_or(0.0, |longest| longest * pairs.length(query));
                let kth = nearest.last().map_or(0.0, |(distance, _)| *distance);
                if !self.filter.is_certain(kth, sums.at(list.end - 1), lengths) {
                    refined.open.push(query as u32);
                }
            }
            refined.counts.push(nearest.len());
            refined.distances.extend(nearest.iter().map(|(distance, _)| *distance));
            refined.rows.extend(nearest.iter().map(|(_, row)| *row));
        }
        refined
    }

    /// Searches the queries in `some` again in the tables of `generator`, and computes the exact
    /// distances of all their candidates.
    pub(super) fn by_definition(
        &self,
        generator: &CandidateGenerator,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        some: &[u32],
        job: &Job,
    ) -> Result<PartialTopK> {
        let base = &self.base;
        let pairs = base.device.host().exact_pairs(base.metric, queries, &base.rows);
        let part = job.part();
        generator.make_home_buckets(&part);
        let of_queries = in_parallel(some.to_vec(), |query| {
            part.check()?;
            let at = query as usize;
            let (one, query_rows) = (queries.slice(at..at + 1), query_rows.skip(query));
            let one = QueryInput { rows: &one, query_rows };
            let (probed, _reserved) = reserved_buckets(generator, one, &part)?;
            let rows = generator.candidates(&probed, 0..1, query_rows, &part)?.items;
            Ok((nearest(&pairs, at, &rows, self.k, &mut Vec::new()), rows.len() as u64))
        });
        let (mut rows, mut distances, mut starts, mut pairs) = (Vec::new(), Vec::new(), vec![0], 0);
        for of_query in of_queries {
            let (nearest, candidates) = of_query?;
            distances.extend(nearest.iter().map(|(distance, _)| *distance));
            rows.extend(nearest.iter().map(|(_, row)| *row));
            starts.push(rows.len());
            pairs += candidates;
        }
        let (distances, starts) = (Distances::F64(distances), Starts::Each(starts));
        Ok(PartialTopK { nearest: NearestLists { rows, distances, starts }, visited: 0, pairs })
    }

    /// Replaces the top-k lists of the queries in `some`, each of length `k`, by the results of
    /// [`by_definition`](Self::by_definition) over all tables.
    pub(super) fn settle(
        &self,
        result: &mut SearchResult,
        some: &[u32],
        by_definition: PartialTopK,
    ) {
        let PartialTopK { nearest: NearestLists { rows, distances, starts }, pairs, .. } =
            by_definition;
        for (query, from) in some.iter().zip(starts.into_vec()) {
            let query = *query as usize;
            let to = result.starts.as_ref().map_or(query * self.k, |starts| starts[query]);
            for i in 0..self.k {
                result.neighbors.rows[to + i] = rows[from + i];
                result.neighbors.distances.set(to + i, distances.at(from + i));
            }
        }
        result.neighbors.work.rechecked += pairs;
    }
}

/// The `k` nearest of `rows` by exact distance, ties going to the lower row.
fn nearest(
    pairs: &ExactPairs<'_>,
    query: usize,
    rows: &[u32],
    k: usize,
    buffer: &mut Vec<f64>,
) -> Vec<(f64, u32)> {
    let mut distances = vec![0.0; rows.len()];
    pairs.compute(query, rows, &mut distances, buffer);
    let mut all: Vec<_> = distances.into_iter().zip(rows.iter().copied()).collect();
    all.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    all.truncate(k);
    all
}
