//! Nearest neighbours by hashing: candidates are the rows that share a bucket with the query in some
//! table; their distances are exact.

use std::ops::Range;
use std::sync::Arc;

use super::choose::choose;
use super::finder::{Finder, FinderBase};
use super::found::{Found, HashedWork, Index, KnnSearch};
use super::hashing::LshParams;
use super::params::KnnParams;
use super::places::{Places, joined};
use super::ready::{Hashing, hasher};
use super::sample::training;
use super::select::{Nearest, merge, select};
use super::sent::SentTables;
use crate::device::{
    Buckets, Candidates, Device, Distances, NearestInBuckets, Neighbors, QueryRows, RowUse, Work,
};
use crate::error::{Error, Result};
use crate::job::{Job, Phase, Reserved};
use crate::matrix::{ElementKind, Rows};
use crate::metric::Metric;
use crate::parallel::{in_parallel, threads};

/// Places of buckets, and candidates, that are in memory at a time.
const PLACES_TOGETHER: usize = 1 << 21;
const CANDIDATES_TOGETHER: usize = 1 << 22;

/// A base in tables of hashes.
pub(super) struct LshSearch<D: Device> {
    pub among: Among<D>,
    pub finder: Finder,
    pub sent: Arc<SentTables<D>>,
    pub index: Index,
}

/// What compares queries with the candidates among a base.
pub(super) struct Among<D: Device> {
    pub base: Arc<Base<D>>,
    pub k: usize,
    /// How many rows count.
    pub counting: usize,
}

/// The rows of a base, on a device.
pub(super) struct Base<D: Device> {
    device: Arc<D>,
    metric: Metric,
    pub rows: Rows,
    on_device: D::Rows,
}

impl<D: Device> Base<D> {
    /// Puts rows on a device.
    pub fn new(device: &Arc<D>, rows: Rows, metric: Metric, job: &Job) -> Result<Self> {
        if u32::try_from(rows.len()).is_err() {
            return Err(Error::TooManyRows { input: "base", rows: rows.len() as u64 });
        }
        let on_device = device.rows(&rows, metric);
        device.prepare(&on_device, RowUse::Gather, job)?;
        Ok(Self { device: device.clone(), metric, rows, on_device })
    }

    /// The device.
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }
}

/// The parameters with all their values.
pub(super) struct Ready {
    pub hashing: Hashing,
    /// The recall and the share of a sample, if they were chosen by it.
    pub expected: Option<(f64, f64)>,
    /// Until the tables are built: the rows that planes are trained on.
    pub _reserved: Option<Reserved>,
}

/// Chooses free parameters for queries like these; planes are trained on these rows or a sample of the
/// base.
pub(super) fn ready<D: Device>(
    device: &Arc<D>,
    (base, queries, trained_on): (&Rows, (&Rows, QueryRows), Option<&Rows>),
    (params, lsh): (KnnParams, &LshParams),
    job: &Job,
) -> Result<Ready> {
    let metric = params.metric();
    if base.is_empty() {
        let hashing = Hashing::any(lsh, metric, base.matrix().dim());
        return Ok(Ready { hashing, expected: None, _reserved: None });
    }
    job.enter(Phase::Tune);
    let (trained_on, reserved) = training(lsh, base, trained_on, job)?;
    let _reserved = Some(reserved);
    let hasher = hasher(lsh, metric, base, &trained_on, job)?;
    match Hashing::given(lsh, metric, &hasher) {
        Some(hashing) => Ok(Ready { hashing, expected: None, _reserved }),
        None => {
            let chosen = choose(device, base, (params, lsh, &hasher), queries, job)?;
            let expected = Some((chosen.recall, chosen.share));
            Ok(Ready { hashing: chosen.hashing, expected, _reserved })
        }
    }
}

impl<D: Device> LshSearch<D> {
    /// Chooses free parameters for queries like these, and builds the tables; planes are trained on
    /// these rows or a sample of the base.
    pub fn open(
        device: &Arc<D>,
        (rows, queries, trained_on): (Rows, (&Rows, QueryRows), Option<&Rows>),
        (params, lsh): (KnnParams, &LshParams),
        job: &Job,
    ) -> Result<Self> {
        let inputs = (&rows, queries, trained_on);
        let Ready { hashing, expected, _reserved } = ready(device, inputs, (params, lsh), job)?;
        let used = hashing.params(lsh);
        let of_finder = FinderBase {
            rows: rows.clone(),
            is_queried: queries.1 != QueryRows::Separate,
            selection: None,
            hashed: rows.matrix().kind(),
        };
        let finder = Finder::build(hashing, lsh, of_finder, job)?;
        let base = Arc::new(Base::new(device, rows, params.metric(), job)?);
        let (buckets, largest) = finder.sizes();
        let index = Index { params: used, expected, buckets, largest };
        let counting = base.rows.len();
        let (among, sent) = (Among { base, k: params.k(), counting }, Arc::default());
        Ok(Self { among, finder, sent, index })
    }
}

impl<D: Device> Among<D> {
    /// The neighbours of queries whose buckets are known, of which `first` is the first.
    fn compare(
        &self,
        (queries, query_rows): (&Rows, QueryRows),
        (finder, places): (&Finder, &Places),
        (first, end, bound): (usize, usize, usize),
        job: &Job,
    ) -> Result<(Nearest, u64)> {
        job.enter(Phase::Find);
        let per_candidate = 2 * size_of::<u32>() + size_of::<f64>();
        let _reserved = job.reserve("candidates", bound * per_candidate)?;
        let step = (end - first).div_ceil(4 * threads()).max(1);
        let tasks: Vec<_> = (first..end).step_by(step).collect();
        let found = in_parallel(tasks, |from| {
            finder.candidates(places, from..end.min(from + step), query_rows, job)
        });
        let (rows, starts) = joined(found, bound)?;
        job.enter(Phase::Compare);
        let Base { device, metric, on_device, .. } = &*self.base;
        let is_part = self.counting < self.base.rows.len();
        let queries = match query_rows {
            QueryRows::OfBase { first: row } if !is_part => {
                let row = row as usize;
                device.slice(on_device, row + first..row + end)
            }
            _ => device.rows(&queries.slice(first..end), *metric),
        };
        let candidates = Candidates::new(&starts, &rows);
        let distances = device.among(&queries, on_device, &candidates, job)?;
        Ok((select((&starts, &rows), distances, self.k), rows.len() as u64))
    }

    /// As many queries as have at most so many candidates together, but one at least: where they end,
    /// the rows in their buckets, and an upper bound on their candidates.
    fn few(&self, places: &Places, queries: Range<usize>, most: usize) -> (usize, u64, usize) {
        let (mut to, mut all, mut bound) = (queries.start, 0, 0);
        while to < queries.end {
            let visited = places.visited(to);
            let more = bound + visited.min(self.base.rows.len());
            if to > queries.start && more > most {
                break;
            }
            all += visited as u64;
            (to, bound) = (to + 1, more);
        }
        (to, all, bound)
    }

    /// The neighbours of queries that look at these buckets, or at those in which they are themselves, if
    /// the device finds them there.
    fn in_buckets(
        &self,
        (queries, query_rows): (&Rows, QueryRows),
        (finder, places): (&Finder, Option<&Places>),
        (sent, left_out): (&SentTables<D>, Option<&[u64]>),
        job: &Job,
    ) -> Result<Option<Part>> {
        let (tables, rows) = finder.counts();
        let visited = match places {
            Some(places) => (0..queries.len()).map(|query| places.visited(query) as u64).sum(),
            None => {
                // At least: large buckets are visited more often than small ones.
                let of_query = tables as f64 * rows as f64 / finder.sizes().0.max(1) as f64;
                (queries.len() as f64 * of_query) as u64
            }
        };
        let Base { device, metric, on_device: base, .. } = &*self.base;
        let k = self.k.min(self.counting);
        if k == 0 || !device.finds_in_buckets(base, queries.len(), k)? {
            return Ok(None);
        }
        let Some(tables_sent) = sent.get((device, finder), visited, job)? else { return Ok(None) };
        job.enter(Phase::Compare);
        let ranges = places.map(Places::ranges);
        let of_ranges =
            ranges.map_or(0, |ranges| size_of_val(ranges.all) + 4 * ranges.starts.len());
        let bytes = of_ranges + queries.len() * (size_of::<u32>() + size_of::<f64>());
        let _reserved = match job.reserve("queries of a device", bytes) {
            Err(Error::HostMemory { .. }) => return Ok(None),
            reserved => reserved?,
        };
        let own = finder.own(queries.len(), query_rows);
        let own = own.as_deref();
        let buckets = Buckets { queries: queries.len(), tables, ranges, own, left_out };
        let sides = (&device.rows(queries, *metric), base);
        match device.nearest_in_buckets(sides, &tables_sent, &buckets, k, job) {
            Ok(found) => Ok(found.map(|found| {
                let NearestInBuckets { rows, distances, counts, visited, pairs } = found;
                Part { nearest: Nearest { rows, distances, counts }, visited, pairs }
            })),
            Err(Error::DeviceMemory { .. }) => {
                sent.give_up();
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The neighbours that are among the candidates of a finder, whose tables may be on the device.
    pub fn search(
        &self,
        (finder, sent): (&Finder, Option<&SentTables<D>>),
        (queries, query_rows): (&Rows, QueryRows),
        job: &Job,
    ) -> Result<Part> {
        let base = &self.base.rows;
        base.check_queries(queries)?;
        let mut all = Part::new(base.matrix().kind());
        let queries = &queries.slice(0..if base.is_empty() { 0 } else { queries.len() });
        let left_out = finder.left_out();
        let sent = sent.filter(|_| !finder.scores()).map(|sent| (sent, left_out.as_deref()));
        if let (Some(sent), true) = (sent, finder.looks_at_own())
            && let Some(found) =
                self.in_buckets((queries, query_rows), (finder, None), sent, job)?
        {
            return Ok(found);
        }
        let mut wave = finder.together(PLACES_TOGETHER, None);
        let mut start = 0;
        while start < queries.len() {
            job.enter(Phase::Find);
            let some = queries.slice(start..queries.len().min(start + wave));
            let query_rows = query_rows.skip(start as u32);
            let places = finder.places(&some, query_rows, job)?;
            let (most, bytes) = places.most();
            let _reserved = job.reserve("buckets of queries", bytes)?;
            wave = finder.together(PLACES_TOGETHER, Some((some.len(), most)));
            start += some.len();
            if let Some(sent) = sent {
                let tables = (finder, Some(&places));
                if let Some(found) = self.in_buckets((&some, query_rows), tables, sent, job)? {
                    all.visited += found.visited;
                    all.add(found.nearest, found.pairs);
                    continue;
                }
            }
            let (mut from, mut most) = (0, CANDIDATES_TOGETHER);
            while from < some.len() {
                let (to, visited, bound) = self.few(&places, from..some.len(), most);
                let (found, part) = ((finder, &places), (from, to, bound));
                match self.compare((&some, query_rows), found, part, job) {
                    Ok((nearest, pairs)) => {
                        all.visited += visited;
                        all.add(nearest, pairs);
                        from = to;
                    }
                    // Fewer at a time, then.
                    Err(Error::HostMemory { .. }) if to > from + 1 => most = bound / 2,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(all)
    }

    /// What was found in all tables.
    pub fn finish(&self, found: Part, query_rows: QueryRows) -> Found {
        let itself = usize::from(query_rows != QueryRows::Separate);
        found.finish(self.k.min(self.counting.saturating_sub(itself)))
    }
}

impl<D: Device> KnnSearch for LshSearch<D> {
    fn search(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<Found> {
        let tables = (&self.finder, Some(&*self.sent));
        let found = self.among.search(tables, (queries, query_rows), job)?;
        Ok(self.among.finish(found, query_rows))
    }

    fn index(&self) -> Option<&Index> {
        Some(&self.index)
    }
}

/// What queries have found in some tables.
pub struct Part {
    nearest: Nearest,
    visited: u64,
    pairs: u64,
}

impl Part {
    fn new(kind: ElementKind) -> Self {
        let (distances, rows, counts) = (Distances::none(kind), Vec::new(), Vec::new());
        Self { nearest: Nearest { rows, distances, counts }, visited: 0, pairs: 0 }
    }

    fn add(&mut self, nearest: Nearest, pairs: u64) {
        self.nearest.rows.extend(nearest.rows);
        self.nearest.distances.extend(nearest.distances);
        self.nearest.counts.extend(nearest.counts);
        self.pairs += pairs;
    }

    /// The same with what the same queries have found in other tables.
    pub(super) fn with(self, other: Self, k: usize, job: &Job) -> Result<Self> {
        let nearest = merge(self.nearest, other.nearest, k, job)?;
        let (visited, pairs) = (self.visited + other.visited, self.pairs + other.pairs);
        Ok(Self { nearest, visited, pairs })
    }

    /// What was found, where a query can have `per_query` neighbours.
    fn finish(self, per_query: usize) -> Found {
        let Nearest { rows, distances, counts } = self.nearest;
        let short = counts.iter().filter(|count| **count < per_query).count() as u64;
        let work = Work { pairs: self.pairs, ..Work::default() };
        let mut starts = vec![0];
        starts.extend(counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        }));
        let neighbors = Neighbors { per_query, rows, distances, work };
        let hashed = HashedWork { visited: self.visited, short };
        Found { neighbors, starts: Some(starts), hashed }
    }
}
