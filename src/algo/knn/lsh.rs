//! Nearest neighbours by hashing: candidates are the rows that share a bucket with the query in some
//! table; their distances are exact.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::choose::choose;
use super::found::{Found, HashedWork, Index, KnnSearch};
use super::hashing::{Hashing, LshParams};
use super::params::KnnParams;
use super::select::{Nearest, select};
use crate::device::{Candidates, Device, Distances, Neighbors, QueryRows, RowUse, Work};
use crate::error::{Error, Result};
use crate::index::lsh::{Family, SlotOutOfRange, Table, TableFunctions};
use crate::job::{Job, Phase, Reserved};
use crate::matrix::{ElementKind, Rows};
use crate::metric::Metric;
use crate::parallel::{in_parallel, threads};

/// Rows hashed by a task.
const ROWS_TOGETHER: usize = 8192;

/// Queries that are hashed together.
const QUERIES_TOGETHER: usize = 64;

/// Places of buckets, and candidates, that are in memory at a time.
const PLACES_TOGETHER: usize = 1 << 21;
const CANDIDATES_TOGETHER: usize = 1 << 22;

/// A base in tables of hashes.
pub(super) struct LshSearch<D: Device> {
    device: Arc<D>,
    metric: Metric,
    k: usize,
    base: Rows,
    on_device: D::Rows,
    hashing: Hashing,
    tables: Vec<(TableFunctions, Table)>,
    index: Index,
    /// Sets of rows that are empty, for reuse.
    seen: Mutex<Vec<Vec<u64>>>,
    _reserved: Reserved,
}

impl<D: Device> LshSearch<D> {
    /// Chooses free parameters for queries like these, and builds the tables.
    pub fn open(
        device: &Arc<D>,
        base: Rows,
        (params, lsh): (KnnParams, &LshParams),
        queries: (&Rows, QueryRows),
        job: &Job,
    ) -> Result<Self> {
        if u32::try_from(base.len()).is_err() {
            return Err(Error::TooManyRows { input: "base", rows: base.len() as u64 });
        }
        let (k, metric) = (params.k(), params.metric());
        let dim = base.matrix().dim();
        if lsh.family == Family::Bits && !base.is_empty() && lsh.hashes.is_some_and(|n| n > dim) {
            let hashes = lsh.hashes.unwrap_or(0);
            return Err(Error::Unsatisfiable(format!(
                "knn_lsh: hashes is {hashes}, but rows have only {dim} bits to sample"
            )));
        }
        let (hashing, expected) = match Hashing::given(lsh, metric) {
            Some(hashing) => (hashing, None),
            None if base.is_empty() => (Hashing::any(lsh, metric), None),
            None => {
                job.enter(Phase::Tune);
                let chosen = choose(device, &base, (params, lsh), queries, job)?;
                (chosen.hashing, Some((chosen.recall, chosen.share)))
            }
        };
        let (kept, more) = Table::bytes(base.len());
        let numbers = dim * hashing.hashes.next_multiple_of(8) * size_of::<f64>();
        let seen = threads() * base.len().div_ceil(64) * size_of::<u64>();
        let built = hashing.tables * (kept + numbers) + seen;
        let together = threads().min(hashing.tables);
        let mut reserved = job.reserve("tables of hashes", built + together * more)?;
        let tables = if base.is_empty() { vec![] } else { build(&hashing, &base, job)? };
        reserved.shrink_to(built);
        let on_device = device.rows(&base, metric);
        device.prepare(&on_device, RowUse::Gather, job)?;
        let sizes = tables.iter().map(|(_, table)| table.sizes());
        let (buckets, largest) =
            sizes.fold((0, 0), |(all, most), (n, size)| (all + n, most.max(size)));
        let index = Index { params: hashing.params(lsh), expected, buckets, largest };
        let (device, seen) = (device.clone(), Mutex::default());
        Ok(Self {
            device,
            metric,
            k,
            base,
            on_device,
            hashing,
            tables,
            index,
            seen,
            _reserved: reserved,
        })
    }

    /// Buckets that a query looks at.
    fn per_query(&self) -> usize {
        self.tables.len() * self.hashing.probes
    }

    /// For each query and table, the buckets it looks at.
    fn buckets(&self, queries: &Rows, job: &Job) -> Result<Vec<Range<u32>>> {
        let per_query = self.per_query();
        let tasks: Vec<_> = (0..queries.len()).step_by(QUERIES_TOGETHER).collect();
        let found = in_parallel(tasks, |first| {
            job.check()?;
            let rows = queries.slice(first..queries.len().min(first + QUERIES_TOGETHER));
            // Fewer than asked for where there are no more.
            let mut buckets = vec![0..0; rows.len() * per_query];
            let mut keys = Vec::new();
            for (i, (functions, table)) in self.tables.iter().enumerate() {
                let (signature, probes) = (&self.hashing.signature, self.hashing.probes);
                let values = functions.values(&rows);
                let wholes = signature.wholes(&values, functions);
                let wholes = wholes.map_err(|SlotOutOfRange| self.hashing.out_of_range())?;
                let count = functions.count();
                let of_rows = values.chunks_exact(count).zip(wholes.chunks_exact(count));
                for (row, of_row) in of_rows.enumerate() {
                    keys.clear();
                    signature.keys(of_row, functions, probes, &mut keys);
                    let to = row * per_query + i * probes;
                    for (bucket, key) in buckets[to..].iter_mut().zip(&keys) {
                        let found = table.bucket(*key);
                        *bucket = found.start as u32..found.end as u32;
                    }
                }
            }
            Ok::<_, Error>(buckets)
        });
        let found: Result<Vec<_>> = found.into_iter().collect();
        Ok(found?.concat())
    }

    /// The rows in the buckets of some queries, each once and ascending by bucket, without the query
    /// itself; and for each query how many.
    fn candidates(
        &self,
        buckets: &[Range<u32>],
        (first, query_rows): (usize, QueryRows),
        job: &Job,
    ) -> Result<(Vec<u32>, Vec<usize>)> {
        let lock = || self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen = lock().pop().unwrap_or_else(|| vec![0; self.base.len().div_ceil(64)]);
        let (mut rows, mut counts) = (Vec::new(), Vec::new());
        let per_query = self.per_query();
        for (query, buckets) in buckets.chunks_exact(per_query).enumerate() {
            let start = rows.len();
            for ((_, table), buckets) in
                self.tables.iter().zip(buckets.chunks_exact(self.hashing.probes))
            {
                job.check()?;
                for bucket in buckets {
                    for row in table.rows(bucket.start as usize..bucket.end as usize) {
                        let (word, bit) = (&mut seen[*row as usize / 64], 1 << (row % 64));
                        if *word & bit == 0 {
                            *word |= bit;
                            rows.push(*row);
                        }
                    }
                }
            }
            for row in &rows[start..] {
                seen[*row as usize / 64] = 0;
            }
            let itself = rows[start..]
                .iter()
                .position(|row| query_rows.is_same(first + query, u64::from(*row)));
            itself.map(|at| rows.swap_remove(start + at));
            counts.push(rows.len() - start);
        }
        lock().push(seen);
        Ok((rows, counts))
    }

    /// The neighbours of queries whose buckets are known, of which `first` is the first.
    fn compare(
        &self,
        (queries, query_rows): (&Rows, QueryRows),
        buckets: &[Range<u32>],
        (first, bound): (usize, usize),
        job: &Job,
    ) -> Result<(Nearest, u64)> {
        job.enter(Phase::Find);
        let per_candidate = 2 * size_of::<u32>() + size_of::<f64>();
        let _reserved = job.reserve("candidates", bound * per_candidate)?;
        let per_query = self.per_query();
        let count = buckets.len() / per_query;
        let step = count.div_ceil(4 * threads()).max(1);
        let tasks: Vec<_> = (0..count).step_by(step).collect();
        let found = in_parallel(tasks, |from| {
            let own = &buckets[from * per_query..count.min(from + step) * per_query];
            self.candidates(own, (first + from, query_rows), job)
        });
        let (mut rows, mut starts) = (Vec::with_capacity(bound), vec![0]);
        for found in found {
            let (own, counts) = found?;
            let mut end = rows.len();
            starts.extend(counts.iter().map(|count| {
                end += count;
                end
            }));
            rows.extend(own);
        }
        job.enter(Phase::Compare);
        let queries = match query_rows {
            QueryRows::OfBase { first: row } => {
                let start = row as usize + first;
                self.device.slice(&self.on_device, start..start + count)
            }
            QueryRows::Separate => {
                self.device.rows(&queries.slice(first..first + count), self.metric)
            }
        };
        let candidates = Candidates::new(&starts, &rows);
        let distances = self.device.among(&queries, &self.on_device, &candidates, job)?;
        Ok((select((&starts, &rows), distances, self.k), rows.len() as u64))
    }
}

impl<D: Device> KnnSearch for LshSearch<D> {
    fn search(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<Found> {
        let dims = (queries.matrix().dim(), self.base.matrix().dim());
        if !queries.is_empty() && !self.base.is_empty() && dims.0 != dims.1 {
            return Err(Error::DimMismatch { queries: dims.0, base: dims.1 });
        }
        let mut all = All::new(self.base.matrix().kind());
        let itself = usize::from(query_rows != QueryRows::Separate);
        let others = self.base.len().saturating_sub(itself);
        let per_query = self.per_query();
        let wave = (PLACES_TOGETHER / per_query.max(1)).max(1);
        let queries_searched = if self.base.is_empty() { 0 } else { queries.len() };
        for start in (0..queries_searched).step_by(wave) {
            job.enter(Phase::Find);
            let some = queries.slice(start..queries_searched.min(start + wave));
            let buckets = self.buckets(&some, job)?;
            let query_rows = query_rows.skip(start as u32);
            let mut from = 0;
            while from < some.len() {
                // As many as have few candidates together, but one at least.
                let (mut to, mut bound) = (from, 0);
                while to < some.len() {
                    let own = &buckets[to * per_query..(to + 1) * per_query];
                    let visited: usize = own.iter().map(Range::len).sum();
                    let more = bound + visited.min(self.base.len());
                    if to > from && more > CANDIDATES_TOGETHER {
                        break;
                    }
                    all.hashed.visited += visited as u64;
                    (to, bound) = (to + 1, more);
                }
                let own = &buckets[from * per_query..to * per_query];
                let (nearest, pairs) =
                    self.compare((&some, query_rows), own, (from, bound), job)?;
                all.add(nearest, pairs, self.k.min(others));
                from = to;
            }
        }
        Ok(all.finish(self.k.min(others)))
    }

    fn index(&self) -> Option<&Index> {
        Some(&self.index)
    }
}

/// The lists of all queries of a call.
struct All {
    rows: Vec<u32>,
    distances: Distances,
    starts: Vec<usize>,
    hashed: HashedWork,
    pairs: u64,
}

impl All {
    fn new(kind: ElementKind) -> Self {
        let distances = Distances::none(kind);
        let hashed = HashedWork::default();
        Self { rows: Vec::new(), distances, starts: vec![0], hashed, pairs: 0 }
    }

    fn add(&mut self, nearest: Nearest, pairs: u64, wanted: usize) {
        let mut end = self.rows.len();
        for count in nearest.counts {
            end += count;
            self.starts.push(end);
            self.hashed.short += u64::from(count < wanted);
        }
        self.rows.extend(nearest.rows);
        self.distances.extend(nearest.distances);
        self.pairs += pairs;
    }

    fn finish(self, per_query: usize) -> Found {
        let work = Work { pairs: self.pairs, ..Work::default() };
        let neighbors = Neighbors { per_query, rows: self.rows, distances: self.distances, work };
        Found { neighbors, starts: Some(self.starts), hashed: self.hashed }
    }
}

/// Hashes the base, and sorts its rows into tables.
fn build(hashing: &Hashing, base: &Rows, job: &Job) -> Result<Vec<(TableFunctions, Table)>> {
    let dim = base.matrix().dim();
    let mut tables = Vec::with_capacity(hashing.tables);
    let numbers: Vec<usize> = (0..hashing.tables).collect();
    for numbers in numbers.chunks(threads()) {
        job.enter(Phase::Hash);
        let functions = in_parallel(numbers.to_vec(), |table| hashing.functions(table, dim));
        let parts = (0..base.len()).step_by(ROWS_TOGETHER);
        let tasks: Vec<_> =
            functions.iter().flat_map(|of| parts.clone().map(move |at| (of, at))).collect();
        let keys = in_parallel(tasks, |(functions, first)| {
            job.check()?;
            let rows = base.slice(first..base.len().min(first + ROWS_TOGETHER));
            hashing.keys(&rows, functions)
        });
        let keys: Result<Vec<Vec<u64>>> = keys.into_iter().collect();
        let keys = keys?;
        job.enter(Phase::Build);
        let parts = base.len().div_ceil(ROWS_TOGETHER);
        let of_table = |table: usize| keys[table * parts..(table + 1) * parts].concat();
        let built = in_parallel((0..numbers.len()).collect(), |table| Table::new(&of_table(table)));
        tables.extend(functions.into_iter().zip(built));
        job.check()?;
    }
    Ok(tables)
}
