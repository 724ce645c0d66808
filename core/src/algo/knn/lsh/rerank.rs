//! Reranks the candidates of queries by the distances that a device computes, and keeps the
//! nearest.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::candidates::CandidateGenerator;
use super::gpu::table_residency::ResidentTables;
use super::probed_buckets::{ProbedBuckets, ProbedQueries, concat_lists};
use crate::algo::knn::top_k::{NearestLists, merge, select_top_k};
use crate::device::{
    Candidates, Device, Distances, ErrorBounds, NearestInBuckets, QueryInput, QueryRows, RowStats,
    RowUse, Starts,
};
use crate::error::{Error, Result};
use crate::job::{Job, Phase, Reserved};
use crate::matrix::ElementKind;
use crate::metric::Metric;
use crate::parallel::{get_or_make, in_parallel, threads};
use crate::rows::Rows;

/// Buckets, and candidates, in memory at a time.
const PROBED_BUCKETS_TOGETHER: usize = 1 << 21;
const CANDIDATES_TOGETHER: usize = 1 << 22;

/// A reranker: compares queries with their candidates in a base.
pub(super) struct Reranker<D: Device> {
    pub base: Arc<DeviceBase<D>>,
    /// Number of neighbours requested.
    pub k: usize,
    /// Number of candidates per query whose exact distances are computed: those with the smallest
    /// device distances.
    pub listed: usize,
    pub filter: ErrorBounds,
    /// Number of selected rows.
    pub counting: usize,
}

/// The rows of a base, on a device.
pub(super) struct DeviceBase<D: Device> {
    pub device: Arc<D>,
    pub metric: Metric,
    pub rows: Rows,
    pub on_device: D::Rows,
    stats: OnceLock<RowStats>,
}

impl<D: Device> DeviceBase<D> {
    /// Puts rows on a device.
    pub fn new(device: &Arc<D>, rows: Rows, metric: Metric, job: &Job) -> Result<Self> {
        if u32::try_from(rows.len()).is_err() {
            return Err(Error::TooManyRows { input: "base", rows: rows.len() as u64 });
        }
        let on_device = device.rows(&rows, metric.searched(rows.matrix().kind()));
        device.prepare(&on_device, RowUse::Gather, job)?;
        let (device, stats) = (device.clone(), OnceLock::new());
        Ok(Self { device, metric, rows, on_device, stats })
    }

    /// Norms and ranges of the values of all rows.
    pub fn stats(&self) -> &RowStats {
        let needs_lengths = self.metric == Metric::InnerProduct;
        get_or_make(&self.stats, || RowStats::of(&self.rows, needs_lengths))
    }

    /// Queries on the device.
    pub fn queries(&self, queries: &Rows) -> D::Rows {
        self.device.rows(queries, self.metric.searched(queries.matrix().kind()))
    }
}

impl<D: Device> Reranker<D> {
    /// Keeps `k` neighbours per query; `counting` rows of the base are selected.
    pub fn new(base: Arc<DeviceBase<D>>, k: usize, counting: usize) -> Self {
        let filter = ErrorBounds::new(base.metric, base.rows.matrix());
        let listed = k.saturating_add(filter.more(k));
        Self { base, k, listed, filter, counting }
    }

    /// Doubles the length of candidate lists: if tables are read in several passes, every uncertain
    /// list costs another pass over all tables.
    pub fn with_longer_lists(self) -> Self {
        Self { listed: self.listed.saturating_mul(2).saturating_add(64), ..self }
    }

    /// The nearest neighbours of the queries `some`, which have at most `bound` candidates in their
    /// buckets `probed`; and the number of candidates.
    fn compare(
        &self,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        generator: &CandidateGenerator,
        probed: &ProbedBuckets,
        some: Range<usize>,
        bound: usize,
        job: &Job,
    ) -> Result<(NearestLists, u64)> {
        job.enter(Phase::Find);
        let per_candidate = 2 * size_of::<u32>() + size_of::<f64>();
        let _reserved = job.reserve("candidate lists", bound * per_candidate)?;
        let step = some.len().div_ceil(4 * threads()).max(1);
        let tasks: Vec<_> = some.clone().step_by(step).collect();
        let lists = in_parallel(tasks, |from| {
            generator.candidates(probed, from..some.end.min(from + step), query_rows, job)
        });
        let (rows, starts) = concat_lists(lists)?;
        job.enter(Phase::Compare);
        let DeviceBase { device, on_device, .. } = &*self.base;
        let is_part = self.counting < self.base.rows.len();
        let queries = match query_rows {
            QueryRows::OfBase { first } if !is_part => {
                let first = first as usize;
                device.slice(on_device, first + some.start..first + some.end)
            }
            _ => self.base.queries(&queries.slice(some)),
        };
        let candidates = Candidates::new(&starts, &rows);
        let distances = device.distances_of(&queries, on_device, &candidates, job)?;
        Ok((select_top_k(&candidates, distances, self.listed), rows.len() as u64))
    }

    /// The longest run of queries with at most `most` candidates, but at least one query. Returns
    /// its end, the rows in its buckets with duplicates, and an upper bound on its candidates.
    fn queries_within(
        &self,
        probed: &ProbedBuckets,
        queries: Range<usize>,
        most: usize,
    ) -> (usize, u64, usize) {
        let (mut to, mut all, mut bound) = (queries.start, 0, 0);
        while to < queries.end {
            let visited = probed.visited(to);
            let more = bound + visited.min(self.base.rows.len());
            if to > queries.start && more > most {
                break;
            }
            all += visited as u64;
            (to, bound) = (to + 1, more);
        }
        (to, all, bound)
    }

    /// The nearest neighbours among the candidates of a generator, whose tables may be on the
    /// device.
    pub fn search(
        &self,
        generator: &CandidateGenerator,
        resident_tables: &ResidentTables<D>,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        job: &Job,
    ) -> Result<PartialTopK> {
        let base = &self.base.rows;
        base.check_queries(queries)?;
        let mut all = PartialTopK::new(base.matrix().kind());
        let queries = &queries.slice(0..if base.is_empty() { 0 } else { queries.len() });
        let probe = self.device_probe(generator, resident_tables);
        if generator.probes_home_buckets()
            && let Some(probe) = &probe
            && let Some(lists) =
                probe.search(QueryInput { rows: queries, query_rows }, None, job)?
        {
            return Ok(lists);
        }
        let mut wave = generator.together(PROBED_BUCKETS_TOGETHER, None);
        let mut start = 0;
        while start < queries.len() {
            job.enter(Phase::Find);
            let some = queries.slice(start..queries.len().min(start + wave));
            let here = QueryInput { rows: &some, query_rows: query_rows.skip(start as u32) };
            let (probed, _reserved) = match reserved_buckets(generator, here, job) {
                // Retry with half of the queries.
                Err(Error::HostMemory { .. }) if some.len() > 1 => {
                    wave = some.len() / 2;
                    continue;
                }
                buckets => buckets?,
            };
            let (most_buckets, _) = probed.most();
            let last = ProbedQueries { queries: some.len(), most_buckets };
            wave = generator.together(PROBED_BUCKETS_TOGETHER, Some(last));
            start += some.len();
            if let Some(probe) = &probe
                && let Some(lists) = probe.search(here, Some(&probed), job)?
            {
                all.extend(lists);
                continue;
            }
            self.compare_all(here, generator, &probed, &mut all, job)?;
        }
        Ok(all)
    }

    /// Appends the neighbours of queries whose buckets are known, in blocks of queries that fit
    /// into memory.
    fn compare_all(
        &self,
        queries: QueryInput<'_>,
        generator: &CandidateGenerator,
        probed: &ProbedBuckets,
        all: &mut PartialTopK,
        job: &Job,
    ) -> Result<()> {
        let (mut from, mut most) = (0, CANDIDATES_TOGETHER);
        while from < queries.rows.len() {
            let (to, visited, bound) = self.queries_within(probed, from..queries.rows.len(), most);
            match self.compare(queries, generator, probed, from..to, bound, job) {
                Ok((nearest, pairs)) => {
                    all.visited += visited;
                    all.add(nearest, pairs);
                    from = to;
                }
                // Retry with a smaller block.
                Err(Error::HostMemory { .. }) if to > from + 1 => most = bound / 2,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The buckets that queries probe, and their reserved memory.
pub(super) fn reserved_buckets(
    generator: &CandidateGenerator,
    QueryInput { rows: queries, query_rows }: QueryInput<'_>,
    job: &Job,
) -> Result<(ProbedBuckets, Reserved)> {
    let reserve = |bytes| job.reserve("bucket lists of queries", bytes);
    let expected = generator.bytes_of_probed_buckets(queries.len());
    let mut reserved = reserve(expected)?;
    let probed = generator.probed_buckets(queries, query_rows, job)?;
    let (_, bytes) = probed.most();
    if expected == 0 {
        reserved = reserve(bytes)?;
    }
    reserved.shrink_to(bytes);
    Ok((probed, reserved))
}

/// Candidate lists of queries from a subset of the tables.
pub struct PartialTopK {
    pub(super) nearest: NearestLists,
    pub(super) visited: u64,
    pub(super) pairs: u64,
}

impl From<NearestInBuckets> for PartialTopK {
    fn from(nearest: NearestInBuckets) -> Self {
        let NearestInBuckets { rows, distances, starts, visited, pairs } = nearest;
        Self { nearest: NearestLists { rows, distances, starts }, visited, pairs }
    }
}

impl PartialTopK {
    pub(super) fn new(kind: ElementKind) -> Self {
        let (distances, rows) = (Distances::none(kind), Vec::new());
        let starts = Starts::Equal { lists: 0, each: 0 };
        Self { nearest: NearestLists { rows, distances, starts }, visited: 0, pairs: 0 }
    }

    /// Appends the lists of the next queries.
    pub(super) fn extend(&mut self, next: Self) {
        if self.nearest.starts.lists() == 0 {
            let (visited, pairs) = (self.visited + next.visited, self.pairs + next.pairs);
            *self = Self { visited, pairs, ..next };
            return;
        }
        self.visited += next.visited;
        self.add(next.nearest, next.pairs);
    }

    fn add(&mut self, nearest: NearestLists, pairs: u64) {
        self.nearest.rows.extend(nearest.rows);
        self.nearest.distances.extend(nearest.distances);
        self.nearest.starts.extend(nearest.starts);
        self.pairs += pairs;
    }

    /// Merges the lists of the same queries from other tables.
    pub(super) fn with(self, other: Self, k: usize, job: &Job) -> Result<Self> {
        let nearest = merge(self.nearest, other.nearest, k, job)?;
        let (visited, pairs) = (self.visited + other.visited, self.pairs + other.pairs);
        Ok(Self { nearest, visited, pairs })
    }
}
