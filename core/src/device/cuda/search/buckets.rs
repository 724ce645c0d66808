//! Searches in LSH buckets, on a GPU.

use super::Sides;
use super::bucket_self_join::SelfJoinInput;
use super::contract_impl::MOST_ROOM;
use super::launch::SearchKernels;
use super::launch_bucket_self_join::JoinedTables;
use super::launch_buckets::{
    BucketKernels, BucketLists, BucketLookup, BucketSearchBuffers, DeviceSelfRows,
};
use super::rows::{CudaRows, wait_for};
use super::spec::{SearchSpec, device_dim};
use super::tables::{CudaTables, HomeBucketBuffer, hashed};
use crate::device::contract::{
    BucketTask, Buckets, Distances, Hashes, HashingDevice, NearestInBuckets, ProbeSet, Ranges,
    SelfRows, Starts, TableRows, TablesBuilt,
};
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::copiers::ReservedTail;
use crate::device::cuda::driver::download::Append;
use crate::device::cuda::driver::launch::{Counted, LaunchThrottle};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys;
use crate::device::cuda::hashing::{self, can_hash};
use crate::error::{Error, Result};
use crate::index::lsh::Family;
use crate::job::{Job, Phase};
use crate::matrix::{ElementKind, Real};
use crate::memory::{Pages, room, taking};
use crate::metric::Metric;

/// The fewest queries that fill a GPU.
const FEWEST_QUERIES: usize = 32;

/// Rows that a warp visits in about 0.1 s: longer work could not be cancelled in time.
const MOST_VISITED: f64 = 2_097_152.0;

/// With fewer queries than this, the host is faster if one of them visits more than `MANY_VISITED`
/// rows.
const FEW_QUERIES: usize = 4096;
const MANY_VISITED: f64 = 131_072.0;

/// The maximum k: longer lists leave too little shared memory for other warps.
const MOST_NEIGHBORS: usize = 4000;

/// The maximum number of rows of a base, so that the rows of 32 buckets are counted in 32 bits.
const MOST_ROWS: usize = 1 << 26;

/// The share of the memory (one in …) for the bit fields of all warps.
const SHARE_OF_FIELDS: u64 = 8;

/// The cost of visiting a row, in dimensions of a distance.
const VISIT: usize = 16;

impl HashingDevice for CudaDevice {
    type Rows = CudaRows;
    type HashTables = CudaTables;

    fn warm_hashing(&self, metric: Metric, kind: ElementKind, dim: usize, family: Family) {
        std::thread::scope(|scope| {
            let spec = SearchSpec::of_rows(kind, metric, dim);
            scope.spawn(move || BucketKernels::get(&self.gpu, spec));
            scope.spawn(move || SearchKernels::get(&self.gpu, spec));
            if family != Family::MinHash {
                hashing::warm(self, kind, family, dim);
            }
        });
    }

    fn accepts(&self, base: &CudaRows, search: &BucketTask<'_>) -> Result<bool> {
        let BucketTask { queries, k, hasher } = *search;
        Ok((1..=MOST_ROWS).contains(&base.rows.len())
            && hasher.is_none_or(|hasher| can_hash(&base.rows, hasher))
            && queries >= FEWEST_QUERIES
            && self.has_lists(base, k)?)
    }

    fn build_tables(
        &self,
        base: &CudaRows,
        hashes: &Hashes<'_>,
        is_queried: bool,
        job: &Job,
    ) -> Result<Option<TablesBuilt<CudaTables>>> {
        CudaTables::build(self, base, hashes, is_queried, job)
    }

    fn tables(&self, tables: &[TableRows<'_>], job: &Job) -> Result<CudaTables> {
        CudaTables::of(self, tables, job)
    }

    fn nearest_in_buckets(
        &self,
        queries: &CudaRows,
        base: &CudaRows,
        tables: &CudaTables,
        buckets: &Buckets<'_>,
        k: usize,
        job: &Job,
    ) -> Result<Option<NearestInBuckets>> {
        let kernels = &*base.bucket_kernels(&self.gpu)?;
        let search = BucketSearch { device: self, queries, base, tables, buckets, k, kernels, job };
        match base.rows.matrix().kind() {
            ElementKind::F64 => search.nearest::<f64>(),
            _ => search.nearest::<f32>(),
        }
    }
}

/// The type of distances on a GPU.
trait OnGpu: Real + cudarc::driver::DeviceRepr + Default {}

impl OnGpu for f32 {}
impl OnGpu for f64 {}

impl CudaDevice {
    /// Whether there is shared memory for lists of `k` neighbours.
    fn has_lists(&self, base: &CudaRows, k: usize) -> Result<bool> {
        Ok(k <= MOST_NEIGHBORS && base.bucket_kernels(&self.gpu)?.warps_of_block(k).is_some())
    }
}

/// A search in LSH buckets.
struct BucketSearch<'a> {
    device: &'a CudaDevice,
    queries: &'a CudaRows,
    base: &'a CudaRows,
    tables: &'a CudaTables,
    buckets: &'a Buckets<'a>,
    k: usize,
    kernels: &'a BucketKernels,
    job: &'a Job,
}

impl BucketSearch<'_> {
    /// The nearest neighbours; `None` if the host should search.
    fn nearest<T: OnGpu>(&self) -> Result<Option<NearestInBuckets>> {
        let Self { device, queries, tables, buckets, job, .. } = *self;
        let (visited, lookup) = match &buckets.probe_set {
            ProbeSet::Ranges(ranges) => {
                let of_query = |query| ranges.visited(query, buckets.tables) as f64;
                let visited: Vec<f64> = (0..buckets.queries).map(of_query).collect();
                (visited, self.given(ranges)?)
            }
            ProbeSet::Home => {
                if let Some(nearest) = self.joined::<T>()? {
                    return Ok(Some(nearest));
                }
                let most: u64 = tables.most_visits[..buckets.tables].iter().sum();
                if is_for_the_host(most as f64, tables, buckets.queries) {
                    return Ok(None);
                }
                (vec![tables.visits; buckets.queries], BucketLookup::Home)
            }
            ProbeSet::Hashed { probes } => {
                let plain = queries.plain(device, job)?;
                wait_for(&device.gpu, &plain.ready)?;
                let rows = hashed(queries, &plain.buffer);
                job.enter(Phase::Find);
                let Some(built) = tables.built() else {
                    unreachable!("only tables built here are probed by hash")
                };
                let Some((ranges, visited)) = built.find(device, &rows, *probes, job)? else {
                    return Ok(None);
                };
                job.enter(Phase::Compare);
                let count = buckets.queries * buckets.tables * probes;
                let visited = visited.into_iter().map(|visited| visited as f64).collect();
                (visited, BucketLookup::Given { count, ranges, starts: None })
            }
        };
        let most = visited.iter().copied().fold(0.0, f64::max);
        if is_for_the_host(most, tables, buckets.queries) {
            return Ok(None);
        }
        self.search::<T>(&visited, lookup).map(Some)
    }

    /// The lists of a self-join of the buckets, if the join pays.
    fn joined<T: OnGpu>(&self) -> Result<Option<NearestInBuckets>> {
        let Self { device, base, tables, buckets, k, kernels, job, .. } = *self;
        let (Some(self_rows), count) = (buckets.self_rows, buckets.queries) else {
            return Ok(None);
        };
        let join = &tables.self_join;
        // A join covers all tables.
        if buckets.tables != tables.tables
            || !join.pays(tables.table_rows, count, k, buckets.left_out)
        {
            return Ok(None);
        }
        let plain = base.plain(device, job)?;
        wait_for(&device.gpu, &plain.ready)?;
        let left_out = self.left_out()?;
        let matrix = base.rows.matrix();
        let home_buckets = tables.home_buckets(device, kernels)?;
        let input = SelfJoinInput {
            kernels,
            k,
            base: &plain.buffer,
            dim: device_dim(matrix.kind(), matrix.dim()),
            joining: JoinedTables {
                tables: tables.tables,
                table_rows: tables.table_rows,
                rows: tables.rows(),
                home_buckets: home_buckets.buffer(),
                left_out: left_out.as_ref(),
            },
            largest: &tables.most_visits[..buckets.tables],
            left_out: buckets.left_out,
        };
        let self_rows = self.self_rows(Some(self_rows), tables.table_rows)?;
        match join.lists(device, &input, &self_rows, count, job) {
            Ok(lists) => self.read_lists::<T>(&lists).map(Some),
            Err(Error::DeviceMemory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Searches the buckets of `lookup`, in which queries visit so many rows, in launches of
    /// bounded time.
    fn search<T: OnGpu>(&self, visited: &[f64], lookup: BucketLookup) -> Result<NearestInBuckets> {
        let Self { device, queries, base, tables, kernels, job, .. } = *self;
        let gpu = &device.gpu;
        let plain = Sides { queries, base }.plain(device, job)?;
        let sides = Sides { queries: &plain.queries.buffer, base: &plain.base.buffer };
        let home = match lookup {
            BucketLookup::Home => Some(tables.home_buckets(device, kernels)?),
            BucketLookup::Given { .. } => None,
        };
        let home = home.as_ref().map(HomeBucketBuffer::buffer);
        let mut search = self.buffers(lookup)?;
        let (rate, dim) = (&kernels.search_rate, search.dim + VISIT);
        let mut throttle = LaunchThrottle::default();
        let mut first = 0;
        while first < visited.len() {
            job.check()?;
            let most = rate.of_a_launch() / dim as f64;
            // At least one query for every warp: fewer take as long.
            let mut end = visited.len().min(first + search.workers);
            let mut rows: f64 = visited[first..end].iter().sum();
            while end < visited.len() && rows + visited[end] < most {
                rows += visited[end];
                end += 1;
            }
            let (stream, some) = (&gpu.compute, first..end);
            kernels.nearest_in_buckets(stream, sides, tables.rows(), home, &mut search, some)?;
            let operations = rows * dim as f64;
            let are_enough = end - first >= search.workers;
            let counted = if are_enough { Counted::Exactly } else { Counted::Guessed };
            throttle.launched(&gpu.compute, rate, operations, counted)?;
            first = end;
        }
        self.read_lists::<T>(&search.lists)
    }

    /// Reads lists from the device.
    fn read_lists<T: OnGpu>(&self, lists: &BucketLists) -> Result<NearestInBuckets> {
        let Self { device, kernels, job, .. } = *self;
        let (gpu, &BucketLists { queries, k, .. }) = (&device.gpu, lists);
        let allocate = |bytes| device.memory.allocate(&gpu.compute, bytes);
        let mut starts = allocate((queries + 1) * size_of::<u64>())?;
        kernels.add_up_lists(&gpu.compute, lists, &mut starts)?;
        let (mut rows, mut distances) = match queries * k {
            all if all <= MOST_ROOM => (room::<u32>(all), room::<T>(all)),
            _ => (Vec::new(), Vec::new()),
        };
        let pages = Pages::of_room(&rows).into_iter().chain(Pages::of_room(&distances));
        let read = || sys::read::<u64>(&gpu.compute, lists.work.slice(), 3);
        let work = taking(pages.collect(), read).map_err(sys::failed("cuMemcpyDtoHAsync"))?;
        let count = work[2] as usize;
        assert!(count <= queries * k);
        let on_host = if count == queries * k {
            Starts::Equal { lists: queries, each: k }
        } else {
            let on_host: Vec<u64> = device.read(&starts, queries + 1, job)?;
            let on_host: Vec<usize> = on_host.into_iter().map(|start| start as usize).collect();
            assert!(on_host.windows(2).all(|list| list[0] <= list[1] && list[1] - list[0] <= k));
            assert!(on_host[queries] == count);
            Starts::Each(on_host)
        };
        let mut closed = None;
        if count > 0 && count < queries * k {
            let mut rows = allocate(count * size_of::<u32>())?;
            let mut distances = allocate(count * size_of::<T>())?;
            let stream = &gpu.compute;
            kernels.close_gaps(stream, lists, &starts, count, &mut rows, &mut distances)?;
            closed = Some((rows, distances));
        }
        let (from_rows, from_distances) = match &closed {
            Some((rows, distances)) => (rows, distances),
            None => (&lists.rows, &lists.distances),
        };
        let to = ReservedTail::new(&mut rows, count);
        let to_rows = Append { from: from_rows.slice(), to };
        let to = ReservedTail::new(&mut distances, count);
        let to_distances = Append { from: from_distances.slice(), to };
        gpu.downloader.append_both(&gpu.compute, to_rows, to_distances, job)?;
        Ok(NearestInBuckets {
            rows,
            distances: Distances::of::<T>(distances),
            starts: on_host,
            visited: work[0],
            pairs: work[1],
        })
    }

    /// The buffers of a search on the device.
    fn buffers(&self, lookup: BucketLookup) -> Result<BucketSearchBuffers> {
        let Self { device, base, tables, buckets, k, kernels, .. } = *self;
        let (matrix, base_rows) = (base.rows.matrix(), base.rows.len());
        let queries = buckets.queries;
        assert!(buckets.tables <= tables.tables);
        assert!(base_rows == tables.table_rows);
        let words = BucketSearchBuffers::words(base_rows);
        let (_, warps) = kernels.warps_of_block(k).unwrap_or((0, 1));
        let fitting = (device.memory.unused() / SHARE_OF_FIELDS) as usize / (4 * words);
        let useful = kernels.warps_together().min(queries.next_multiple_of(warps));
        let workers = (useful.min(fitting) / warps).max(1) * warps;
        Ok(BucketSearchBuffers {
            base_rows,
            dim: device_dim(matrix.kind(), matrix.dim()),
            tables: tables.tables,
            probed_tables: buckets.tables,
            workers,
            buckets: lookup,
            self_rows: self.self_rows(buckets.self_rows, base_rows)?,
            left_out: self.left_out()?,
            seen: device.filled(workers * words * 4, 0)?,
            lists: BucketLists::new(device, queries, k, matrix.kind())?,
        })
    }

    /// The base rows that are the queries, of `base_rows` rows in all.
    fn self_rows(&self, queries: Option<SelfRows<'_>>, base_rows: usize) -> Result<DeviceSelfRows> {
        Ok(match queries {
            None => DeviceSelfRows::Separate,
            Some(SelfRows::From(first)) => DeviceSelfRows::From(first),
            Some(SelfRows::Each(rows)) => {
                assert!(rows.iter().all(|row| (*row as usize) < base_rows));
                DeviceSelfRows::Each(self.device.send_values(rows, self.job)?)
            }
        })
    }

    /// A bit for each base row that is left out, if there are any.
    fn left_out(&self) -> Result<Option<Buffer>> {
        let send = |bits| self.device.send_values(bits, self.job);
        self.buckets.left_out.map(send).transpose()
    }

    /// The buckets that were given for the queries.
    fn given(&self, ranges: &Ranges<'_>) -> Result<BucketLookup> {
        let (buckets, base_rows) = (self.buckets, self.base.rows.len());
        let send = |numbers: &[u32]| self.device.send_values(numbers, self.job);
        let count = ranges.all.len();
        let is_one_each = count == buckets.queries * buckets.tables
            && ranges.starts.iter().enumerate().all(|(i, start)| i == *start);
        let numbers: Vec<u32> =
            ranges.all.iter().flat_map(|range| [range.start, range.end]).collect();
        let is_of_base = |range: &[u32]| range[0] <= range[1] && range[1] as usize <= base_rows;
        assert!(numbers.chunks_exact(2).all(is_of_base) && u32::try_from(count).is_ok());
        let all = send(&numbers)?;
        let starts = match is_one_each {
            true => None,
            false => {
                let starts: Vec<u32> = ranges.starts.iter().map(|start| *start as u32).collect();
                Some(send(&starts)?)
            }
        };
        Ok(BucketLookup::Given { count, ranges: all, starts })
    }
}

/// Whether a query visits more rows than a GPU should search, so that the host takes over.
fn is_for_the_host(most: f64, tables: &CudaTables, queries: usize) -> bool {
    // If the host has no tables, building them would take longer.
    let is_few = queries < FEW_QUERIES && tables.built().is_none();
    most > if is_few { MANY_VISITED } else { MOST_VISITED }
}
