//! A top-k search of any size, processed on a device in pieces.
//!
//! The base is uploaded to the device once if it fits, and otherwise streamed through it in chunks for
//! every block of queries; the next chunk is uploaded while the current one is compared. A block of
//! queries keeps its lists on the device until it has been compared with all of the base. If the
//! device still runs out of memory, a resident base is dropped first, and then the pieces are halved.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::device::contract::{
    Definition, Enough, Neighbors, Pairing, QueryInput, QueryRows, RowUse, SearchDevice, Shape,
};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::ElementKind;
use crate::memory::{Pages, taking};
use crate::metric::Metric;
use crate::parallel::lock;
use crate::rows::Rows;

/// A base that is ready to be searched on a device.
///
/// Memory: on a device with its own memory, the base or two chunks of it, and the top-k lists of a
/// block of queries; on the host, the rows.
pub struct StreamedSearch<D: SearchDevice> {
    pub(super) device: Arc<D>,
    metric: Metric,
    /// Number of neighbours per query, at most the number of base rows.
    k: usize,
    pub(super) base: Rows,
    resident: Mutex<Option<Arc<D::Rows>>>,
}

/// Smallest number of rows in a piece: if it does not fit, the device is out of memory.
const SMALLEST_PIECE: usize = 128;

/// The queries of several searches, kept on the device between them while it has memory.
pub struct ResidentQueries<D: SearchDevice> {
    /// Consecutive blocks, each with its end position; `None` after the device ran out of memory.
    blocks: Option<Vec<(usize, D::Rows)>>,
}

impl<D: SearchDevice> ResidentQueries<D> {
    /// No blocks yet.
    pub fn new() -> Self {
        Self { blocks: Some(Vec::new()) }
    }

    /// The block that starts at `start`, and its end position.
    fn block(&self, start: usize) -> Option<&(usize, D::Rows)> {
        let blocks = self.blocks.as_ref()?;
        let place = blocks.partition_point(|(end, _)| *end <= start);
        let begins_there = place == 0 && start == 0 || place > 0 && blocks[place - 1].0 == start;
        blocks.get(place).filter(|_| begins_there)
    }

    /// Drops all blocks, and stops keeping any. Returns whether there were blocks.
    fn give_back(&mut self) -> bool {
        self.blocks.take().is_some_and(|blocks| !blocks.is_empty())
    }
}

/// The queries of one call, and the number of neighbours requested.
#[derive(Clone, Copy)]
struct SearchCall<'a> {
    query_rows: QueryRows,
    near: Option<&'a [u32]>,
    k: usize,
    enough: Option<Enough>,
}

/// The base of a block of queries.
enum BasePlacement<'a, R> {
    /// On the device.
    Resident(&'a R),
    /// On the host, to be streamed in chunks of this number of rows.
    Chunks(usize),
}

impl<D: SearchDevice> StreamedSearch<D> {
    /// Uploads the base to the device, if it fits.
    ///
    /// # Errors
    /// Any error of the device, and [`Error::TooManyRows`].
    pub fn open(device: Arc<D>, base: Rows, metric: Metric, k: usize, job: &Job) -> Result<Self> {
        if u32::try_from(base.len()).is_err() {
            return Err(Error::TooManyRows { input: "base", rows: base.len() as u64 });
        }
        let k = k.min(base.len().max(1));
        let search = Self { device, metric, k, base, resident: Mutex::default() };
        let Self { device, base, .. } = &search;
        let fits = || base.len() <= device.capacity(&search.shape()).base;
        while !base.is_empty() && !fits() && job.evict_from_device() {}
        if !base.is_empty() && fits() {
            let rows = device.rows(base, metric);
            match job.retry_after_eviction(|| device.prepare(&rows, RowUse::Base { k }, job)) {
                Ok(()) => *search.resident() = Some(Arc::new(rows)),
                Err(Error::DeviceMemory { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(search)
    }

    fn resident(&self) -> MutexGuard<'_, Option<Arc<D::Rows>>> {
        lock(&self.resident)
    }

    /// The top-k lists of the queries.
    ///
    /// `query_rows` says whether the queries are base rows themselves. `near` has, for each query,
    /// the number of a base row that is probably near: the result is the same, but found faster.
    ///
    /// # Errors
    /// [`Error::DimMismatch`], [`Error::Cancelled`], [`Error::DeviceMemory`] if not even the
    /// smallest pieces fit, and any other error of the device.
    pub fn search(
        &self,
        queries: &Rows,
        query_rows: QueryRows,
        near: Option<&[u32]>,
        job: &Job,
    ) -> Result<Neighbors> {
        self.search_held(queries, None, query_rows, near, job)
    }

    /// The same for `k` neighbours, whatever `k` the base was opened for; `enough` limits the part
    /// of each list that matters.
    ///
    /// # Errors
    /// Those of [`search`](Self::search).
    pub fn search_for(
        &self,
        k: usize,
        enough: Option<Enough>,
        queries: &Rows,
        query_rows: QueryRows,
        job: &Job,
    ) -> Result<Neighbors> {
        let k = k.min(self.base.len().max(1));
        self.search_call(queries, None, SearchCall { query_rows, near: None, k, enough }, job)
    }

    /// The same for queries whose blocks may be on the device, `held` since earlier searches of the
    /// same queries.
    ///
    /// # Errors
    /// Those of [`search`](Self::search).
    pub fn search_held(
        &self,
        queries: &Rows,
        held: Option<&mut ResidentQueries<D>>,
        query_rows: QueryRows,
        near: Option<&[u32]>,
        job: &Job,
    ) -> Result<Neighbors> {
        let call = SearchCall { query_rows, near, k: self.k, enough: None };
        self.search_call(queries, held, call, job)
    }

    /// The exact lists of the leading queries for which the device computes exact distances,
    /// possibly none; `listed` candidates per query have the smallest approximate distances.
    ///
    /// # Errors
    /// Those of [`search`](Self::search), except [`Error::DeviceMemory`] and [`Error::HostMemory`].
    pub(super) fn search_by_definition(
        &self,
        listed: usize,
        enough: Option<Enough>,
        definition: Definition,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        job: &Job,
    ) -> Result<Neighbors> {
        let none = Neighbors::none(ElementKind::F64);
        let Some(base) = self.resident().clone() else { return Ok(none) };
        let itself = usize::from(query_rows != QueryRows::Separate);
        let per_query = definition.k.min(self.base.len() - itself);
        if queries.is_empty() || per_query == 0 {
            return Ok(none);
        }
        self.base.check_queries(queries)?;
        let shape = Shape { k: listed, ..self.shape() };
        let together = self.device.capacity(&shape).queries.max(1);
        let mut neighbors =
            self.device.preallocate(ElementKind::F64, queries.len().saturating_mul(per_query));
        let pages = Pages::of_room(&neighbors.rows).into_iter().chain(neighbors.distances.pages());
        taking(pages.collect(), || {
            for start in (0..queries.len()).step_by(together) {
                let block = queries.slice(start..queries.len().min(start.saturating_add(together)));
                let pairing = Pairing {
                    first_base: 0,
                    queries: query_rows.skip(start as u32),
                    near: None,
                    enough,
                };
                match job.retry_after_eviction(|| {
                    let lists =
                        self.exact_lists(&block, &base, &pairing, listed, definition, job)?;
                    let append = |lists| self.device.download_after(&mut neighbors, lists, job);
                    lists.map(append).transpose()
                }) {
                    Ok(Some(())) => {}
                    Ok(None) => break,
                    // Exact distances on the host need less device memory.
                    Err(Error::DeviceMemory { .. } | Error::HostMemory { .. }) => {
                        self.device.forget_exact(&base);
                        break;
                    }
                    Err(other) => return Err(other),
                }
            }
            Ok(())
        })?;
        Ok(if neighbors.last.is_empty() { none } else { neighbors })
    }

    /// The exact lists of a block; `None` if exact distances are left to the host.
    fn exact_lists(
        &self,
        block: &Rows,
        base: &D::Rows,
        pairing: &Pairing<'_>,
        listed: usize,
        definition: Definition,
        job: &Job,
    ) -> Result<Option<D::Lists>> {
        let device = &self.device;
        let queries = match pairing.queries {
            QueryRows::OfBase { first } => {
                device.slice(base, first as usize..first as usize + block.len())
            }
            QueryRows::Separate => device.rows(block, self.metric),
        };
        let mut lists = device.new_exact_lists(&queries, base, listed, definition, job)?;
        if let Some(lists) = &mut lists {
            device.top_k(&queries, base, pairing, lists, job)?;
        }
        Ok(lists)
    }

    fn search_call(
        &self,
        queries: &Rows,
        held: Option<&mut ResidentQueries<D>>,
        call: SearchCall<'_>,
        job: &Job,
    ) -> Result<Neighbors> {
        let kind = self.base.matrix().kind();
        if queries.is_empty() || self.base.is_empty() {
            return Ok(Neighbors::none(kind));
        }
        self.base.check_queries(queries)?;
        let itself = usize::from(call.query_rows != QueryRows::Separate);
        let per_query = call.k.min(self.base.len() - itself);
        let mut neighbors = self.device.preallocate(kind, queries.len().saturating_mul(per_query));
        let pages = Pages::of_room(&neighbors.rows).into_iter().chain(neighbors.distances.pages());
        taking(pages.collect(), || self.search_blocks(queries, held, call, &mut neighbors, job))?;
        Ok(neighbors)
    }

    /// The top-k lists of the queries, block by block.
    fn search_blocks(
        &self,
        queries: &Rows,
        mut held: Option<&mut ResidentQueries<D>>,
        SearchCall { query_rows, near, k, enough }: SearchCall<'_>,
        neighbors: &mut Neighbors,
        job: &Job,
    ) -> Result<()> {
        let shape = Shape { k, ..self.shape() };
        let capacity = self.device.capacity(&shape);
        if let Some(held) = &mut held
            && held.block(0).is_none()
            && queries.len() > capacity.base
        {
            held.give_back();
        }
        let mut pieces = Pieces { base: capacity.base, queries: capacity.queries.max(1) };
        let mut start = 0;
        while start < queries.len() {
            let known = held.as_ref().and_then(|held| held.block(start));
            let end = queries.len().min(start.saturating_add(pieces.queries));
            let end = known.map_or(end, |(end, _)| *end);
            let call = SearchCall {
                query_rows: query_rows.skip(start as u32),
                near: near.map(|near| &near[start..end]),
                k,
                enough,
            };
            let resident = self.resident().clone();
            let new = known.is_none().then(|| {
                let block = queries.slice(start..end);
                self.device.rows(&block, self.metric)
            });
            let Some(block) = new.as_ref().or(known.map(|(_, rows)| rows)) else {
                unreachable!("a block is held, or new")
            };
            let base = match resident.as_deref() {
                Some(rows) => BasePlacement::Resident(rows),
                None => BasePlacement::Chunks(pieces.base),
            };
            match job.retry_after_eviction(|| {
                self.search_block(block, end - start, call, &base, neighbors, job)
            }) {
                Ok(()) => {
                    if let (Some(new), Some(blocks)) =
                        (new, held.as_mut().and_then(|held| held.blocks.as_mut()))
                    {
                        blocks.push((end, new));
                    }
                    start = end;
                }
                Err(Error::DeviceMemory { .. })
                    if held.as_mut().is_some_and(|held| held.give_back()) => {}
                Err(Error::DeviceMemory { .. }) if resident.is_some() => {
                    *self.resident() = None;
                    pieces.base = self.device.capacity(&shape).base;
                }
                Err(error @ Error::DeviceMemory { .. }) => {
                    pieces = pieces.halved(end - start, self.base.len()).ok_or(error)?;
                }
                Err(other) => return Err(other),
            }
        }
        Ok(())
    }

    /// Number of queries that are searched together, with lists of length `k`.
    pub fn queries_together(&self, k: usize) -> usize {
        self.device.capacity(&Shape { k, ..self.shape() }).queries.max(1)
    }

    fn shape(&self) -> Shape {
        let matrix = self.base.matrix();
        Shape { kind: matrix.kind(), dim: matrix.dim(), k: self.k, base: self.base.len() }
    }

    fn search_block(
        &self,
        block: &D::Rows,
        count: usize,
        SearchCall { query_rows, near, k, enough }: SearchCall<'_>,
        base: &BasePlacement<'_, D::Rows>,
        neighbors: &mut Neighbors,
        job: &Job,
    ) -> Result<()> {
        let (device, metric) = (&self.device, self.metric);
        let of_base;
        let queries = match (query_rows, base) {
            (QueryRows::OfBase { first }, BasePlacement::Resident(base)) => {
                // The queries are rows of the base, which is already on the device.
                device.prepare(base, RowUse::Base { k }, job)?;
                of_base = device.slice(base, first as usize..first as usize + count);
                &of_base
            }
            _ => block,
        };
        device.prepare(queries, RowUse::Queries, job)?;
        // The threshold is valid only for a base in one piece.
        let enough = enough.filter(|_| matches!(base, BasePlacement::Resident(_)));
        let pairing = |first_base| Pairing { first_base, queries: query_rows, near, enough };
        if let (BasePlacement::Resident(base), 1, QueryRows::Separate) = (base, k, query_rows) {
            neighbors.append(device.nearest_one(queries, base, &pairing(0), job)?);
            return Ok(());
        }
        let mut lists = device.new_lists(queries, k)?;
        let base_rows = match base {
            BasePlacement::Resident(base) => {
                device.top_k(queries, base, &pairing(0), &mut lists, job)?;
                return device.download_after(neighbors, lists, job);
            }
            BasePlacement::Chunks(rows) => *rows,
        };
        let mut chunks = (0..self.base.len()).step_by(base_rows.max(1)).map(|first| {
            let end = self.base.len().min(first.saturating_add(base_rows));
            let chunk = device.rows(&self.base.slice(first..end), metric);
            device.prepare(&chunk, RowUse::Base { k }, job)?;
            Ok::<_, Error>((first as u32, chunk))
        });
        let mut next = chunks.next().transpose()?;
        while let Some((first, chunk)) = next {
            device.top_k(queries, &chunk, &pairing(first), &mut lists, job)?;
            job.check()?;
            next = chunks.next().transpose()?;
        }
        device.download_after(neighbors, lists, job)
    }
}

/// Number of rows on each side that are uploaded together.
#[derive(Clone, Copy)]
struct Pieces {
    base: usize,
    queries: usize,
}

impl Pieces {
    /// Half of the sizes just tried; `None` if they are the smallest.
    fn halved(self, tried_queries: usize, tried_base: usize) -> Option<Self> {
        let queries = self.queries.min(tried_queries);
        let base = self.base.min(tried_base);
        (queries > SMALLEST_PIECE || base > SMALLEST_PIECE).then(|| Self {
            queries: (queries / 2).max(SMALLEST_PIECE.min(queries)),
            base: (base / 2).max(SMALLEST_PIECE.min(base)),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::device::contract::{Candidates, Capacity, Distances};
    use crate::device::cpu::CpuDevice;
    use crate::matrix::{Matrix, Real};
    use crate::random::Random;

    type CpuRows = <CpuDevice as SearchDevice>::Rows;

    /// The CPU with little memory: `queries` query rows at a time, and `left` preparations of
    /// queries until it is out of memory once.
    struct Little {
        cpu: CpuDevice,
        queries: usize,
        left: AtomicUsize,
        sent: AtomicUsize,
    }

    impl SearchDevice for Little {
        type Rows = (CpuRows, AtomicUsize);
        type Lists = <CpuDevice as SearchDevice>::Lists;

        fn capacity(&self, _: &Shape) -> Capacity {
            Capacity { base: 10_000, queries: self.queries }
        }

        fn rows(&self, rows: &Rows, metric: Metric) -> Self::Rows {
            (self.cpu.rows(rows, metric), AtomicUsize::new(0))
        }

        fn slice(&self, rows: &Self::Rows, range: Range<usize>) -> Self::Rows {
            (self.cpu.slice(&rows.0, range), AtomicUsize::new(0))
        }

        fn prepare(&self, rows: &Self::Rows, for_use: RowUse, job: &Job) -> Result<()> {
            if for_use == RowUse::Queries && rows.1.fetch_add(1, Ordering::Relaxed) == 0 {
                self.sent.fetch_add(1, Ordering::Relaxed);
                if self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
                    let device = String::new();
                    return Err(Error::DeviceMemory { device, needed: 1, budget: 0 });
                }
            }
            self.cpu.prepare(&rows.0, for_use, job)
        }

        fn new_lists(&self, queries: &Self::Rows, k: usize) -> Result<Self::Lists> {
            self.cpu.new_lists(&queries.0, k)
        }

        fn top_k(
            &self,
            queries: &Self::Rows,
            base: &Self::Rows,
            pairing: &Pairing<'_>,
            lists: &mut Self::Lists,
            job: &Job,
        ) -> Result<()> {
            self.cpu.top_k(&queries.0, &base.0, pairing, lists, job)
        }

        fn download(&self, lists: Self::Lists, job: &Job) -> Result<Neighbors> {
            self.cpu.download(lists, job)
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

    #[test]
    fn queries_that_are_held_are_sent_once_and_given_back_without_memory() {
        let (mut random, job) = (Random::new(2), Job::default());
        let mut rows = |count: usize| {
            let values = (0..count * 3).map(|_| random.normal() as f32).collect();
            Rows::all(Arc::new(Matrix::new(f32::elements(values), count, 3)))
        };
        let (queries, bases) = (rows(1000), [rows(20), rows(20), rows(20)]);
        // Out of memory never, in the second block of the first search, and in the first: blocks
        // are then sent once more, and again by every later search.
        for (left, blocks) in [(usize::MAX, 4), (1, 13), (0, 13)] {
            let (left, sent) = (AtomicUsize::new(left), AtomicUsize::new(0));
            let device = Arc::new(Little { cpu: CpuDevice::new(), queries: 256, left, sent });
            let mut held = ResidentQueries::new();
            for base in &bases {
                let of_cpu = StreamedSearch::open(
                    Arc::new(CpuDevice::new()),
                    base.clone(),
                    Metric::SqEuclidean,
                    1,
                    &job,
                );
                let expected = of_cpu.unwrap().search(&queries, QueryRows::Separate, None, &job);
                let (base, metric) = (base.clone(), Metric::SqEuclidean);
                let search = StreamedSearch::open(device.clone(), base, metric, 1, &job).unwrap();
                let (separate, held) = (QueryRows::Separate, Some(&mut held));
                let neighbors = search.search_held(&queries, held, separate, None, &job).unwrap();
                let expected = expected.unwrap();
                assert_eq!(
                    (neighbors.rows, neighbors.distances),
                    (expected.rows, expected.distances)
                );
            }
            assert_eq!(device.sent.load(Ordering::Relaxed), blocks);
        }
    }
}
