//! Nearest neighbours by hashing: candidates are the rows that share a bucket with the query in some
//! table; their distances are exact.

use std::sync::Arc;

use super::choose::choose;
use super::finder::{Finder, Places};
use super::found::{Found, HashedWork, Index, KnnSearch};
use super::hashing::LshParams;
use super::params::KnnParams;
use super::ready::{Hashing, hasher};
use super::sample::training;
use super::select::{Nearest, select};
use crate::device::{Candidates, Device, Distances, Neighbors, QueryRows, RowUse, Work};
use crate::error::{Error, Result};
use crate::job::{Job, Phase};
use crate::matrix::{ElementKind, Rows};
use crate::metric::Metric;
use crate::parallel::{in_parallel, threads};

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
    finder: Finder,
    index: Index,
}

impl<D: Device> LshSearch<D> {
    /// Chooses free parameters for queries like these, and builds the tables; planes are trained on
    /// these rows or a sample of the base.
    pub fn open(
        device: &Arc<D>,
        (base, queries, trained_on): (Rows, (&Rows, QueryRows), Option<&Rows>),
        (params, lsh): (KnnParams, &LshParams),
        job: &Job,
    ) -> Result<Self> {
        if u32::try_from(base.len()).is_err() {
            return Err(Error::TooManyRows { input: "base", rows: base.len() as u64 });
        }
        let (k, metric) = (params.k(), params.metric());
        let mut _reserved = None;
        let (hashing, expected) = if base.is_empty() {
            (Hashing::any(lsh, metric, base.matrix().dim()), None)
        } else {
            job.enter(Phase::Tune);
            let (trained_on, reserved) = training(lsh, &base, trained_on, job)?;
            // Until the tables are built.
            _reserved = Some(reserved);
            let hasher = hasher(lsh, metric, &base, &trained_on, job)?;
            match Hashing::given(lsh, metric, &hasher) {
                Some(hashing) => (hashing, None),
                None => {
                    let chosen = choose(device, &base, (params, lsh, &hasher), queries, job)?;
                    (chosen.hashing, Some((chosen.recall, chosen.share)))
                }
            }
        };
        let used = hashing.params(lsh);
        let is_queried = queries.1 != QueryRows::Separate;
        let finder = Finder::build(hashing, lsh, (&base, is_queried), job)?;
        let on_device = device.rows(&base, metric);
        device.prepare(&on_device, RowUse::Gather, job)?;
        let (buckets, largest) = finder.sizes();
        let index = Index { params: used, expected, buckets, largest };
        Ok(Self { device: device.clone(), metric, k, base, on_device, finder, index })
    }

    /// The neighbours of queries whose buckets are known, of which `first` is the first.
    fn compare(
        &self,
        (queries, query_rows): (&Rows, QueryRows),
        places: &Places,
        (first, end, bound): (usize, usize, usize),
        job: &Job,
    ) -> Result<(Nearest, u64)> {
        job.enter(Phase::Find);
        let per_candidate = 2 * size_of::<u32>() + size_of::<f64>();
        let _reserved = job.reserve("candidates", bound * per_candidate)?;
        let step = (end - first).div_ceil(4 * threads()).max(1);
        let tasks: Vec<_> = (first..end).step_by(step).collect();
        let found = in_parallel(tasks, |from| {
            self.finder.candidates(places, from..end.min(from + step), query_rows, job)
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
                let row = row as usize;
                self.device.slice(&self.on_device, row + first..row + end)
            }
            QueryRows::Separate => self.device.rows(&queries.slice(first..end), self.metric),
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
        let mut wave = self.finder.together(PLACES_TOGETHER, None);
        let queries_searched = if self.base.is_empty() { 0 } else { queries.len() };
        let mut start = 0;
        while start < queries_searched {
            job.enter(Phase::Find);
            let some = queries.slice(start..queries_searched.min(start + wave));
            let query_rows = query_rows.skip(start as u32);
            let places = self.finder.places(&some, query_rows, job)?;
            let (most, bytes) = places.most();
            let _reserved = job.reserve("buckets of queries", bytes)?;
            wave = self.finder.together(PLACES_TOGETHER, Some((some.len(), most)));
            start += some.len();
            let mut from = 0;
            while from < some.len() {
                // As many as have few candidates together, but one at least.
                let (mut to, mut bound) = (from, 0);
                while to < some.len() {
                    let visited = places.visited(to);
                    let more = bound + visited.min(self.base.len());
                    if to > from && more > CANDIDATES_TOGETHER {
                        break;
                    }
                    all.hashed.visited += visited as u64;
                    (to, bound) = (to + 1, more);
                }
                let (nearest, pairs) =
                    self.compare((&some, query_rows), &places, (from, to, bound), job)?;
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
