//! Exact search: candidates from a device's approximate distances, reranked by exact distance.
//!
//! A device lists more candidates than requested, unless its sums are exact. Their exact distances
//! are computed and sorted: on the device, if it holds the whole base and it
//! [can](SearchDevice::new_exact_lists), or on the host. A list is certain if the error bounds of
//! the device's sums prove that every unlisted row is farther than the k-th neighbour. Queries with
//! uncertain lists, because of a large number of near-ties with the k-th neighbour, are searched
//! again: first for a longer list, then by sums in float64, which are exact distances, and finally
//! by the exact distances of all rows.

use std::sync::{Arc, OnceLock};

use super::error_bounds::{ErrorBounds, RowStats};
use super::search::StreamedSearch;
use crate::device::Host;
use crate::device::contract::{
    Definition, Distances, Enough, NO_ROW, Neighbors, Outcome, Pairing, QueryInput, QueryRows,
    RowUse, SearchDevice, Work,
};
use crate::device::cpu::ExactPairs;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::{ElementKind, Elements, Matrix};
use crate::memory::zeros;
use crate::metric::Metric;
use crate::parallel::{fill_on_threads, get_or_make, in_parallel};
use crate::rows::Rows;

/// Reranked rows per base row from which a base is examined for a device that reranks itself: that is
/// much faster than to read the base on the host. (Searches with 2.5 reranked rows per row of
/// 0.5M × 128 on an H200 took 20.0 ms with a first examination and 9.6 without; with 22, 41.9 and
/// 45.8: 2026-11-30.)
const RERANKED_FOR_A_ROW: usize = 8;

/// Queries per task that the host reranks.
const TASK: usize = 64;

/// Queries per task whose lists the host certifies, after the device has reranked them.
const CERTIFIED_TOGETHER: usize = 4096;

/// Base rows per task of an exhaustive search.
const ROWS_TOGETHER: usize = 8192;

/// Bytes of the base in float64 that are in memory at a time.
const WIDENED_BYTES: usize = 128 << 20;

/// Rows of each side that are sampled before all are examined.
const SAMPLE: usize = 256;

/// Largest and smallest number of queries that are searched again at a time.
const AGAIN_TOGETHER: usize = 4096;
const AGAIN_AT_LEAST: usize = 64;

/// Average number of moves per entry after which insertion sort is abandoned.
const MOVES: usize = 4;

/// Factor and increment of the length of a list that was uncertain.
const LONGER: (usize, usize) = (4, 64);

/// A base that is ready for exact searches on a device.
pub struct ExactSearch<D: SearchDevice> {
    search: StreamedSearch<D>,
    metric: Metric,
    k: usize,
    error_bounds: ErrorBounds,
    stats: OnceLock<RowStats>,
}

/// The exact top-k lists of some queries.
struct ExactLists {
    neighbors: Neighbors,
    /// Queries whose lists are uncertain: an unlisted row may be nearer.
    open: Vec<u32>,
}

impl<D: SearchDevice + Host> ExactSearch<D> {
    /// Uploads the base, as [searched](Rows::searched) under this metric, to the device, if it
    /// fits.
    ///
    /// # Errors
    /// Those of [`StreamedSearch::open`].
    pub fn open(device: Arc<D>, base: Rows, metric: Metric, k: usize, job: &Job) -> Result<Self> {
        let (k, error_bounds) = (k.min(base.len().max(1)), ErrorBounds::new(metric, base.matrix()));
        let searched = metric.searched(base.matrix().kind());
        let listed = k.saturating_add(error_bounds.more(k));
        let search = StreamedSearch::open(device, base, searched, listed, job)?;
        Ok(Self { search, metric, k, error_bounds, stats: OnceLock::new() })
    }

    /// The nearest neighbours of the queries, with distances in float64. `query_rows` says whether
    /// the queries are base rows themselves.
    ///
    /// # Errors
    /// Those of [`StreamedSearch::search`].
    pub fn search(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<Neighbors> {
        let queries = match query_rows {
            QueryRows::Separate => &queries.searched(self.metric, job)?,
            QueryRows::OfBase { first } => {
                let first = first as usize;
                &self.base().slice(first..first + queries.len())
            }
        };
        let are_sums_exact = self.are_sums_exact(queries);
        let ExactLists { mut neighbors, mut open } =
            self.by_device(queries, query_rows, are_sums_exact, job)?;
        let done = std::mem::take(&mut neighbors.last).len();
        // Blocks of queries reuse the same memory.
        let together = self.search.queries_together(self.listed());
        for first in (done..queries.len()).step_by(together) {
            let some = queries.slice(first..queries.len().min(first.saturating_add(together)));
            let lists = self.by_host(&some, query_rows.skip(first as u32), are_sums_exact, job)?;
            open.extend(lists.open.into_iter().map(|query| first as u32 + query));
            neighbors.append(lists.neighbors);
            if first == done {
                let more = (queries.len() - first - some.len()) * neighbors.per_query;
                neighbors.rows.reserve_exact(more);
                neighbors.distances.reserve_exact(more);
            }
        }
        // Limits the memory of the longer lists to that of the first search.
        let together = (queries.len() / (2 * LONGER.0)).clamp(AGAIN_AT_LEAST, AGAIN_TOGETHER);
        for some in open.chunks(together) {
            self.search_again(
                QueryInput { rows: queries, query_rows },
                some.to_vec(),
                &mut neighbors,
                job,
            )?;
        }
        Ok(neighbors)
    }

    /// Length of the candidate lists of a device.
    fn listed(&self) -> usize {
        self.k.saturating_add(self.error_bounds.more(self.k)).min(self.base().len().max(1))
    }

    /// Length of the candidate lists, and the margin within which rows beyond the k-th are listed.
    fn listed_for(&self, are_sums_exact: bool) -> (usize, Option<Enough>) {
        match are_sums_exact {
            true => (self.k, None),
            false => (self.listed(), self.error_bounds.enough(self.k)),
        }
    }

    /// The exact lists of the leading queries for which the device computes exact distances:
    /// [`Neighbors::last`] has one entry for each.
    fn by_device(
        &self,
        queries: &Rows,
        query_rows: QueryRows,
        are_sums_exact: bool,
        job: &Job,
    ) -> Result<ExactLists> {
        let none = Neighbors::none(ElementKind::F64);
        if self.base().matrix().kind() != ElementKind::F32 || self.base().is_empty() {
            return Ok(ExactLists { neighbors: none, open: Vec::new() });
        }
        let (listed, enough) = self.listed_for(are_sums_exact);
        let definition = Definition { metric: self.metric, k: self.k, are_sums_exact };
        let input = QueryInput { rows: queries, query_rows };
        let neighbors = self.search.search_by_definition(listed, enough, definition, input, job)?;
        let itself = usize::from(query_rows != QueryRows::Separate);
        let is_whole = listed >= self.base().len() - itself;
        if is_whole || are_sums_exact || neighbors.last.is_empty() {
            return Ok(ExactLists { neighbors, open: Vec::new() });
        }
        let pairs = self.exact_pairs(queries);
        let longest = self.error_bounds.needs_lengths().then(|| self.stats().longest);
        let (k, last, distances) = (neighbors.per_query, &neighbors.last, &neighbors.distances);
        let tasks = (0..last.len()).step_by(CERTIFIED_TOGETHER);
        let open = in_parallel(tasks, |first: usize| {
            job.check()?;
            let some = first..last.len().min(first + CERTIFIED_TOGETHER);
            let is_open = |query: &usize| {
                let lengths = longest.map_or(0.0, |longest| longest * pairs.length(*query));
                let (kth, last) = (distances.at(query * k + k - 1), f64::from(last[*query]));
                !last.is_nan() && !self.error_bounds.is_certain(kth, last, lengths)
            };
            Ok(some.filter(is_open).map(|query| query as u32).collect::<Vec<_>>())
        });
        let mut open = open.into_iter().collect::<Result<Vec<_>>>()?.concat();
        self.keep_inexact(queries, &self.error_bounds, &mut open, job)?;
        Ok(ExactLists { neighbors, open })
    }

    /// The exact lists of queries, with exact distances computed on the host, unless the device's
    /// sums are exact.
    fn by_host(
        &self,
        queries: &Rows,
        query_rows: QueryRows,
        are_sums_exact: bool,
        job: &Job,
    ) -> Result<ExactLists> {
        let (listed, enough) = self.listed_for(are_sums_exact);
        let lists = self.search.search_for(listed, enough, queries, query_rows, job)?;
        if lists.rows.is_empty() {
            let distances = Distances::F64(Vec::new());
            let neighbors = Neighbors { distances, ..lists };
            return Ok(ExactLists { neighbors, open: Vec::new() });
        }
        if are_sums_exact {
            let neighbors = self.as_exact(lists, query_rows, job)?;
            return Ok(ExactLists { neighbors, open: Vec::new() });
        }
        let input = QueryInput { rows: queries, query_rows };
        self.refine(input, lists, self.k, &self.error_bounds, job)
    }

    fn exact_pairs<'a>(&'a self, queries: &'a Rows) -> ExactPairs<'a> {
        self.search.device.host().exact_pairs(self.metric, queries, self.base())
    }

    fn base(&self) -> &Rows {
        &self.search.base
    }

    fn stats(&self) -> &RowStats {
        let needs_lengths = self.error_bounds.needs_lengths();
        get_or_make(&self.stats, || RowStats::of(self.base(), needs_lengths))
    }

    /// Whether the device's sums are exact distances, so that lists need no further rows and no
    /// reranking. Examines all rows only if that is less work.
    fn are_sums_exact(&self, queries: &Rows) -> bool {
        if self.error_bounds.is_definition() && self.metric != Metric::L2 {
            return true;
        }
        let is_fraction = self.metric == Metric::Jaccard;
        let reranked = queries.len().saturating_mul(self.listed());
        let is_examined = D::IS_HOST || self.stats.get().is_some();
        let for_a_row = if is_examined { 1 } else { RERANKED_FOR_A_ROW };
        let is_less = reranked / for_a_row < self.base().len();
        if is_fraction || !self.error_bounds.may_be_exact() || is_less {
            return false;
        }
        let first = |rows: &Rows| RowStats::of(&rows.slice(0..rows.len().min(SAMPLE)), false);
        self.error_bounds.is_exact(&first(self.base()), &first(queries))
            && self.error_bounds.is_exact(self.stats(), &RowStats::of(queries, false))
    }

    /// The lists of the device, whose sums are exact.
    fn as_exact(&self, lists: Neighbors, query_rows: QueryRows, job: &Job) -> Result<Neighbors> {
        let itself = usize::from(query_rows != QueryRows::Separate);
        let Neighbors { per_query: listed, mut rows, distances, work, .. } = lists;
        let k = self.k.min(self.base().len() - itself);
        let outcome = match self.metric.searched(self.base().matrix().kind()) {
            Metric::L2 => Outcome::Sum,
            _ => Outcome::of(self.metric),
        };
        let mut exact: Vec<f64> = zeros(rows.len() / listed * k);
        fill_on_threads(&mut exact, k, |first, part| {
            for (list, part) in (first..).zip(part.chunks_exact_mut(k.max(1))) {
                let sums = (list * listed..).map(|at| distances.at(at));
                part.iter_mut().zip(sums).for_each(|(to, sum)| *to = outcome.distance(sum));
            }
            job.check()
        })?;
        keep_first(&mut rows, listed, k);
        Ok(Neighbors::new(k, rows, Distances::F64(exact), work))
    }

    /// Reranks lists by exact distance, in memory that the search has reserved, and keeps
    /// the nearest `k` of each query.
    fn refine(
        &self,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        lists: Neighbors,
        k: usize,
        error_bounds: &ErrorBounds,
        job: &Job,
    ) -> Result<ExactLists> {
        let others = self.base().len() - usize::from(query_rows != QueryRows::Separate);
        let k = k.min(others);
        let Neighbors { per_query: listed, mut rows, distances: sums, mut work, .. } = lists;
        let mut distances: Vec<f64> = zeros(rows.len());
        let pairs = self.exact_pairs(queries);
        let longest = error_bounds.needs_lengths().then(|| self.stats().longest);
        let lists = rows.chunks_mut(TASK * listed).zip(distances.chunks_mut(TASK * listed));
        let open = in_parallel(lists.enumerate(), |(task, (rows, distances))| {
            job.check()?;
            let (mut sorted, mut buffer, mut open) = (Vec::new(), Vec::new(), Vec::new());
            let lists = rows.chunks_exact_mut(listed).zip(distances.chunks_exact_mut(listed));
            let mut lists = (task * TASK..).zip(lists).peekable();
            while let Some((query, (rows, distances))) = lists.next() {
                // While this list is reranked, the rows of the next one come from memory.
                if let Some((_, (next, _))) = lists.peek() {
                    pairs.prefetch(next);
                }
                let count = rows.iter().rposition(|row| *row != NO_ROW).map_or(0, |last| last + 1);
                pairs.compute(query, &rows[..count], &mut distances[..count], &mut buffer);
                sort(&mut rows[..count], &mut distances[..count], &mut sorted);
                let lengths = longest.map_or(0.0, |longest| longest * pairs.length(query));
                let last = sums.at(query * listed + listed - 1);
                // A list with empty entries has all rows that matter.
                let is_whole = count < listed || listed == others;
                if !is_whole && !error_bounds.is_certain(distances[k - 1], last, lengths) {
                    open.push(query as u32);
                }
            }
            Ok(open)
        });
        let mut open: Vec<u32> = open.into_iter().collect::<Result<Vec<_>>>()?.concat();
        self.keep_inexact(queries, error_bounds, &mut open, job)?;
        work.rechecked += rows.len() as u64;
        keep_first(&mut rows, listed, k);
        keep_first(&mut distances, listed, k);
        let neighbors = Neighbors::new(k, rows, Distances::F64(distances), work);
        Ok(ExactLists { neighbors, open })
    }

    /// Keeps the queries with uncertain lists whose sums are not exact either.
    fn keep_inexact(
        &self,
        queries: &Rows,
        error_bounds: &ErrorBounds,
        open: &mut Vec<u32>,
        job: &Job,
    ) -> Result<()> {
        if open.is_empty() || !error_bounds.may_be_exact() {
            return Ok(());
        }
        // A sample mostly suffices to show that sums cannot be exact.
        let few = RowStats::of(&self.base().slice(0..self.base().len().min(SAMPLE)), false);
        if !error_bounds.is_exact(&few, &few) {
            return Ok(());
        }
        let of_base = self.stats();
        let are_exact = |some: &Rows| error_bounds.is_exact(of_base, &RowStats::of(some, false));
        // If many queries are uncertain, test all queries at once first.
        if open.len() > SAMPLE && are_exact(queries) {
            open.clear();
        }
        let is_inexact = |query: &u32| {
            let query = *query as usize;
            !are_exact(&queries.slice(query..query + 1))
        };
        let inexact = in_parallel(open.chunks(TASK), |some: &[u32]| {
            job.check()?;
            Ok(some.iter().copied().filter(is_inexact).collect::<Vec<_>>())
        });
        *open = inexact.into_iter().collect::<Result<Vec<_>>>()?.concat();
        Ok(())
    }

    /// Searches queries with uncertain lists again.
    fn search_again(
        &self,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        mut open: Vec<u32>,
        all: &mut Neighbors,
        job: &Job,
    ) -> Result<()> {
        // Queries that are base rows are searched as separate rows here, and find themselves.
        let itself = usize::from(query_rows != QueryRows::Separate);
        let per_query = all.per_query + itself;
        let of_f64 = ErrorBounds::of_f64(self.metric);
        for way in [RetryStrategy::Longer, RetryStrategy::InF64, RetryStrategy::All] {
            if open.is_empty() || way == RetryStrategy::InF64 && !self.error_bounds.has_wider() {
                continue;
            }
            let _reserved = job.reserve("query block", queries.bytes_at(&open))?;
            let some = queries.at(&open, job)?;
            let separate = QueryInput { rows: &some, query_rows: QueryRows::Separate };
            let ExactLists { neighbors, open: uncertain } = match way {
                RetryStrategy::Longer => {
                    let k = per_query.saturating_mul(LONGER.0).saturating_add(LONGER.1);
                    let enough = self.error_bounds.enough(per_query);
                    let lists =
                        self.search.search_for(k, enough, &some, separate.query_rows, job)?;
                    self.refine(separate, lists, per_query, &self.error_bounds, job)?
                }
                RetryStrategy::InF64 => match self.search_in_f64(&some, per_query, job) {
                    // Skip this step for lack of memory.
                    Err(Error::HostMemory { .. } | Error::DeviceMemory { .. }) => continue,
                    lists => self.refine(separate, lists?, per_query, &of_f64, job)?,
                },
                RetryStrategy::All => {
                    let neighbors = self.search_all(&some, per_query, job)?;
                    ExactLists { neighbors, open: Vec::new() }
                }
            };
            all.work += neighbors.work;
            for (i, query) in open.iter().enumerate() {
                let self_row = query_rows.self_row(*query);
                let list = i * per_query..(i + 1) * per_query;
                let others = list.filter(|at| Some(neighbors.rows[*at]) != self_row);
                let places = *query as usize * all.per_query..;
                for (place, at) in places.zip(others).take(all.per_query) {
                    all.rows[place] = neighbors.rows[at];
                    all.distances.set(place, neighbors.distances.at(at));
                }
            }
            open = uncertain.into_iter().map(|i| open[i as usize]).collect();
        }
        Ok(())
    }

    /// A search by sums in float64; the base is widened piece by piece.
    fn search_in_f64(&self, queries: &Rows, k: usize, job: &Job) -> Result<Neighbors> {
        let (device, metric) = (&self.search.device, self.metric.searched(ElementKind::F64));
        let row_bytes = self.base().matrix().dim() * size_of::<f64>();
        let piece = (WIDENED_BYTES / row_bytes.max(1)).max(1).min(self.base().len());
        let bytes = (queries.len() + piece).saturating_mul(row_bytes);
        let _reserved = job.reserve("vectors in float64", bytes)?;
        let queries = device.rows(&widened(queries, job)?, metric);
        device.prepare(&queries, RowUse::Queries, job)?;
        let mut lists = device.new_lists(&queries, k)?;
        for first in (0..self.base().len()).step_by(piece) {
            let some = self.base().slice(first..self.base().len().min(first + piece));
            let some = device.rows(&widened(&some, job)?, metric);
            let pairing = Pairing { first_base: first as u32, ..Pairing::default() };
            job.retry_after_eviction(|| device.prepare(&some, RowUse::Base { k }, job))?;
            device.top_k(&queries, &some, &pairing, &mut lists, job)?;
        }
        device.download(lists, job)
    }

    /// An exhaustive search by exact distance.
    fn search_all(&self, queries: &Rows, k: usize, job: &Job) -> Result<Neighbors> {
        let pairs = self.exact_pairs(queries);
        let (mut rows, mut distances) = (Vec::new(), Vec::new());
        for query in 0..queries.len() {
            let parts: Vec<u32> = (0..self.base().len() as u32).step_by(ROWS_TOGETHER).collect();
            let parts = in_parallel(parts, |first| {
                job.check()?;
                let end = self.base().len().min(first as usize + ROWS_TOGETHER);
                let mut rows: Vec<u32> = (first..end as u32).collect();
                let mut distances = vec![0.0; rows.len()];
                pairs.compute(query, &rows, &mut distances, &mut Vec::new());
                sort(&mut rows, &mut distances, &mut Vec::new());
                Ok(distances.into_iter().zip(rows).take(k).collect::<Vec<_>>())
            });
            let mut nearest = parts.into_iter().collect::<Result<Vec<_>>>()?.concat();
            nearest.sort_unstable_by(in_order);
            nearest.truncate(k);
            distances.extend(nearest.iter().map(|(distance, _)| *distance));
            rows.extend(nearest.iter().map(|(_, row)| *row));
        }
        let pairs = (queries.len() * self.base().len()) as u64;
        let work = Work { pairs, rechecked: pairs, ..Work::default() };
        Ok(Neighbors::new(k, rows, Distances::F64(distances), work))
    }
}

/// A strategy for queries with uncertain lists.
#[derive(Clone, Copy, PartialEq)]
enum RetryStrategy {
    Longer,
    InF64,
    All,
}

/// The order of neighbours: by distance, then by row.
fn in_order(a: &(f64, u32), b: &(f64, u32)) -> std::cmp::Ordering {
    a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
}

/// Sorts a list, in the memory of `sorted`.
fn sort(rows: &mut [u32], distances: &mut [f64], sorted: &mut Vec<(f64, u32)>) {
    let list = distances.iter().copied().zip(rows.iter().copied());
    if list.clone().is_sorted_by(|a, b| in_order(a, b).is_le()) {
        return;
    }
    sorted.clear();
    sorted.extend(list);
    // Insertion sort: lists that a device has sorted are nearly in order.
    let mut moves = MOVES * sorted.len();
    for next in 1..sorted.len() {
        let mut place = next;
        while place > 0 && in_order(&sorted[place - 1], &sorted[place]).is_gt() {
            sorted.swap(place - 1, place);
            place -= 1;
        }
        moves = moves.saturating_sub(next - place);
        if moves == 0 {
            sorted.sort_unstable_by(in_order);
            break;
        }
    }
    for ((row, distance), next) in rows.iter_mut().zip(distances).zip(sorted) {
        (*distance, *row) = *next;
    }
}

/// Keeps the first `k` of every `listed` values.
fn keep_first<T: Copy>(values: &mut Vec<T>, listed: usize, k: usize) {
    if k < listed {
        let lists = values.len() / listed;
        (1..lists).for_each(|list| values.copy_within(list * listed..list * listed + k, list * k));
        values.truncate(lists * k);
    }
}

/// The vectors of the exact distance, in float64.
fn widened(rows: &Rows, job: &Job) -> Result<Rows> {
    let dim = rows.matrix().dim();
    let all: Vec<usize> = (0..rows.len()).step_by(ROWS_TOGETHER).collect();
    let parts = in_parallel(all, |first| {
        job.check()?;
        let some = first..rows.len().min(first + ROWS_TOGETHER);
        let vectors = some.filter_map(|row| rows.vector::<f32>(row));
        Ok(vectors.flat_map(|vector| vector.coordinates()).collect::<Vec<f64>>())
    });
    let values = parts.into_iter().collect::<Result<Vec<_>>>()?.concat();
    Ok(Rows::all(Arc::new(Matrix::new(Elements::F64(values), rows.len(), dim))))
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::device::contract::{Candidates, Capacity, Shape};
    use crate::device::cpu::CpuDevice;
    use crate::random::Random;

    type Searched = <CpuDevice as SearchDevice>::Rows;

    /// The CPU as a device that computes exact distances, of 50 queries at a time, `left` times
    /// before it runs out of memory.
    struct Measuring {
        cpu: CpuDevice,
        left: AtomicUsize,
        /// Number of calls of `forget_exact`.
        forgotten: AtomicUsize,
    }

    /// Lists, and for exact lists their queries, base and definition.
    type Lists = (<CpuDevice as SearchDevice>::Lists, Option<(Rows, Rows, Definition)>);

    impl Host for Measuring {}

    impl SearchDevice for Measuring {
        type Rows = (Searched, Rows);
        type Lists = Lists;

        fn capacity(&self, _: &Shape) -> Capacity {
            Capacity { base: 10_000, queries: 50 }
        }

        fn rows(&self, rows: &Rows, metric: Metric) -> Self::Rows {
            (self.cpu.rows(rows, metric), rows.clone())
        }

        fn slice(&self, rows: &Self::Rows, range: Range<usize>) -> Self::Rows {
            (self.cpu.slice(&rows.0, range.clone()), rows.1.slice(range))
        }

        fn prepare(&self, rows: &Self::Rows, for_use: RowUse, job: &Job) -> Result<()> {
            self.cpu.prepare(&rows.0, for_use, job)
        }

        fn new_lists(&self, queries: &Self::Rows, k: usize) -> Result<Lists> {
            Ok((self.cpu.new_lists(&queries.0, k)?, None))
        }

        fn new_exact_lists(
            &self,
            queries: &Self::Rows,
            base: &Self::Rows,
            k: usize,
            definition: Definition,
            _: &Job,
        ) -> Result<Option<Lists>> {
            if self.left.load(Ordering::Relaxed) == 0 {
                let device = String::new();
                return Err(Error::DeviceMemory { device, needed: 1, budget: 0 });
            }
            self.left.fetch_sub(1, Ordering::Relaxed);
            let of = (queries.1.clone(), base.1.clone(), definition);
            Ok(Some((self.cpu.new_lists(&queries.0, k)?, Some(of))))
        }

        fn forget_exact(&self, _: &Self::Rows) {
            self.forgotten.fetch_add(1, Ordering::Relaxed);
        }

        fn top_k(
            &self,
            queries: &Self::Rows,
            base: &Self::Rows,
            pairing: &Pairing<'_>,
            lists: &mut Lists,
            job: &Job,
        ) -> Result<()> {
            self.cpu.top_k(&queries.0, &base.0, pairing, &mut lists.0, job)
        }

        fn download(&self, (lists, of): Lists, job: &Job) -> Result<Neighbors> {
            let lists = self.cpu.download(lists, job)?;
            let Some((queries, base, Definition { metric, k, .. })) = of else { return Ok(lists) };
            let pairs = self.cpu.exact_pairs(metric, &queries, &base);
            let k = k.min(lists.per_query);
            let mut exact = Neighbors::new(k, Vec::new(), Distances::F64(Vec::new()), lists.work);
            for (query, list) in lists.rows.chunks(lists.per_query).enumerate() {
                let mut rows: Vec<u32> =
                    list.iter().copied().filter(|row| *row != NO_ROW).collect();
                let last = lists.distances.at((query + 1) * lists.per_query - 1) as f32;
                exact.last.push(if rows.len() < list.len() { f32::NAN } else { last });
                let mut distances = vec![0.0; rows.len()];
                pairs.compute(query, &rows, &mut distances, &mut Vec::new());
                sort(&mut rows, &mut distances, &mut Vec::new());
                exact.rows.extend(&rows[..k]);
                exact.distances.extend(Distances::F64(distances[..k].to_vec()));
            }
            Ok(exact)
        }

        fn distances_of(
            &self,
            queries: &Self::Rows,
            base: &Self::Rows,
            candidates: &Candidates<'_>,
            job: &Job,
        ) -> Result<Distances> {
            self.cpu.distances_of(&queries.0, &base.0, candidates, job)
        }
    }

    /// Rows with a large number of ties within f32 rounding errors.
    fn rows(count: usize, seed: u64) -> Rows {
        let mut random = Random::new(seed);
        let value = |i: usize| 1.0 + (i % 35) as f32 + 1e-6 * random.normal() as f32;
        let values = (0..count * 5).map(value).collect();
        Rows::all(Arc::new(Matrix::new(Elements::F32(values), count, 5)))
    }

    fn neighbors<D: SearchDevice + Host>(
        device: &Arc<D>,
        base: &Rows,
        queries: &Rows,
        query_rows: QueryRows,
        metric: Metric,
        k: usize,
    ) -> Neighbors {
        let (job, base) = (Job::default(), base.clone());
        let base = base.searched(metric, &job).expect("within no budget");
        let search = ExactSearch::open(device.clone(), base, metric, k, &job).expect("small");
        search.search(queries, query_rows, &job).expect("small")
    }

    #[test]
    fn distances_are_those_of_the_device_as_far_as_it_has_memory_and_then_the_hosts() {
        let (base, queries, of_base) =
            (rows(900, 1), rows(220, 2), QueryRows::OfBase { first: 100 });
        let self_queries = base.slice(100..320);
        let cpu = Arc::new(CpuDevice::new());
        for metric in [Metric::L2, Metric::L1, Metric::InnerProduct, Metric::Cosine] {
            for (queries, query_rows) in [(&queries, QueryRows::Separate), (&self_queries, of_base)]
            {
                for k in [1, 7, 130, 900] {
                    let expected = neighbors(&cpu, &base, queries, query_rows, metric, k);
                    for (blocks, left) in [(0, 0), (2, 0), (9, 4)] {
                        let device = Arc::new(Measuring {
                            cpu: CpuDevice::new(),
                            left: AtomicUsize::new(blocks),
                            forgotten: AtomicUsize::new(0),
                        });
                        let actual = neighbors(&device, &base, queries, query_rows, metric, k);
                        let named = format!("{metric}, k {k}, {query_rows:?}, {blocks} blocks");
                        assert_eq!(device.left.load(Ordering::Relaxed), left, "{named}");
                        // Its layouts are dropped once it runs out of memory.
                        let forgotten = device.forgotten.load(Ordering::Relaxed);
                        assert_eq!(forgotten, usize::from(left == 0), "{named}");
                        assert_eq!(actual.per_query, expected.per_query, "{named}");
                        assert!(actual.rows == expected.rows, "{named}");
                        assert!(actual.distances == expected.distances, "{named}");
                        assert!(actual.last.is_empty());
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_behind_the_sample_makes_sums_inexact() {
        let numbers = |count: usize, last: f32| {
            let whole = (0..count * 5 - 1).map(|i| (i % 35) as f32);
            let values = whole.chain([last]).collect();
            Rows::all(Arc::new(Matrix::new(Elements::F32(values), count, 5)))
        };
        let (device, job) = (Arc::new(CpuDevice::new()), Job::default());
        for (base, queries, expected) in [(3.0, 3.0, true), (0.1, 3.0, false), (3.0, 0.1, false)] {
            let (base, queries) = (numbers(900, base), numbers(600, queries));
            let open = |metric| ExactSearch::open(device.clone(), base.clone(), metric, 3, &job);
            let search = open(Metric::L2).expect("small");
            assert_eq!(search.are_sums_exact(&queries), expected);
            // Fewer pairs than rows are ranked without examining the rows.
            assert!(!search.are_sums_exact(&queries.slice(0..100)));
            // Directions have square roots.
            assert!(!open(Metric::Cosine).expect("small").are_sums_exact(&queries));
        }
    }

    #[test]
    fn queries_whose_sums_are_exact_are_not_searched_again() {
        let numbers = |count: usize, number: fn(usize) -> f32| {
            let values = (0..count * 5).map(number).collect();
            Rows::all(Arc::new(Matrix::new(Elements::F32(values), count, 5)))
        };
        let base = numbers(900, |i| (i % 35) as f32);
        // Every third query has values with too many digits for exact sums.
        let queries = numbers(1000, |i| if (i / 5).is_multiple_of(3) { 0.1 } else { 0.0 });
        let (device, job) = (Arc::new(CpuDevice::new()), Job::default());
        let search = ExactSearch::open(device, base, Metric::L1, 3, &job).expect("small");
        for count in [1000, SAMPLE as u32, 1, 0] {
            let mut open: Vec<u32> = (0..count).rev().collect();
            let expected: Vec<u32> =
                open.iter().copied().filter(|query| query.is_multiple_of(3)).collect();
            search
                .keep_inexact(&queries, &search.error_bounds, &mut open, &job)
                .expect("not cancelled");
            assert_eq!(open, expected);
        }
        job.cancel().cancel();
        let stopped = search.keep_inexact(&queries, &search.error_bounds, &mut vec![1, 2], &job);
        assert!(matches!(stopped, Err(Error::Cancelled)));
    }
}
