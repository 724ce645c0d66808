//! Searches in LSH buckets, on a GPU.

use super::bucket_self_join::SelfJoinInput;
use super::contract_impl::MOST_ROOM;
use super::launch::SearchKernels;
use super::launch_bucket_self_join::JoinedTables;
use super::launch_buckets::{
    BucketKernels, BucketLists, BucketLookup, BucketSearchBuffers, DeviceSelfRows,
};
use super::rows::{CudaRows, wait_for};
use super::spec::{SearchKernelSpec, device_dim, real_bytes};
use super::tables::{CudaTables, OwnRanges, hashed};
use crate::device::contract::{
    BucketTask, Buckets, Distances, Hashes, HashingDevice, NearestInBuckets, ProbeSet, Ranges,
    SelfRows, Starts, TableRows, TablesBuilt,
};
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::launch::{Counted, LaunchThrottle};
use crate::device::cuda::driver::sys;
use crate::device::cuda::hashing::{self, can_hash};
use crate::error::{Error, Result};
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

    fn warm_hashing(&self, metric: Metric, kind: ElementKind, dim: usize, hashes: bool) {
        std::thread::scope(|scope| {
            let spec = SearchKernelSpec::of_rows(kind, metric, dim);
            scope.spawn(move || BucketKernels::get(&self.gpu, spec));
            scope.spawn(move || SearchKernels::get(&self.gpu, spec));
            if hashes {
                hashing::warm(self, kind);
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
        let sides = (queries, base);
        match base.rows.matrix().kind() {
            ElementKind::F64 => self.nearest::<f64>(sides, tables, buckets, k, job),
            _ => self.nearest::<f32>(sides, tables, buckets, k, job),
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

    fn nearest<T: OnGpu>(
        &self,
        (queries, base): (&CudaRows, &CudaRows),
        tables: &CudaTables,
        buckets: &Buckets<'_>,
        k: usize,
        job: &Job,
    ) -> Result<Option<NearestInBuckets>> {
        let kernels = base.bucket_kernels(&self.gpu)?;
        let (visited, lookup) = match &buckets.probe_set {
            ProbeSet::Ranges(ranges) => {
                let of_query = |query| ranges.visited(query, buckets.tables) as f64;
                let visited: Vec<f64> = (0..buckets.queries).map(of_query).collect();
                (visited, self.given(buckets, ranges, base.rows.len(), job)?)
            }
            ProbeSet::Home => {
                if let Some(found) = self.joined::<T>(base, tables, buckets, (k, &kernels), job)? {
                    return Ok(Some(found));
                }
                let most: u64 = tables.most_visits[..buckets.tables].iter().sum();
                if is_for_the_host(most as f64, tables, buckets.queries) {
                    return Ok(None);
                }
                (vec![tables.visits; buckets.queries], BucketLookup::Own)
            }
            ProbeSet::Hashed { probes } => {
                let plain = queries.plain(self, job)?;
                wait_for(&self.gpu, &plain.ready)?;
                let Some(built) = tables.built() else { return Ok(None) };
                let rows = hashed(queries, &plain.buffer);
                job.enter(Phase::Find);
                let Some((ranges, visited)) = built.find(self, (&rows, *probes), job)? else {
                    return Ok(None);
                };
                job.enter(Phase::Compare);
                let count = buckets.queries * buckets.tables * probes;
                let visited = visited.into_iter().map(|visited| visited as f64).collect();
                (visited, BucketLookup::Given(count, ranges, None))
            }
        };
        let most = visited.iter().copied().fold(0.0, f64::max);
        if is_for_the_host(most, tables, buckets.queries) {
            return Ok(None);
        }
        let found = (buckets, &visited[..], lookup);
        self.search::<T>((queries, base), tables, found, (k, &kernels), job).map(Some)
    }

    /// The lists of a self-join of the buckets, if the join pays.
    fn joined<T: OnGpu>(
        &self,
        base: &CudaRows,
        tables: &CudaTables,
        buckets: &Buckets<'_>,
        (k, kernels): (usize, &BucketKernels),
        job: &Job,
    ) -> Result<Option<NearestInBuckets>> {
        let (Some(own), count) = (buckets.own, buckets.queries) else { return Ok(None) };
        // A join covers all tables.
        let is_of_all = buckets.tables == tables.tables;
        if !is_of_all || !tables.self_join.pays(tables.table_rows, count, (k, buckets.left_out)) {
            return Ok(None);
        }
        let plain = base.plain(self, job)?;
        wait_for(&self.gpu, &plain.ready)?;
        let send = |bytes: &[u8]| self.send(&[bytes], job);
        let left_out = buckets.left_out.map(|bits| send(sys::bytes_of(bits))).transpose()?;
        let matrix = base.rows.matrix();
        let of_rows = tables.own_buckets(self, kernels)?;
        let of = SelfJoinInput {
            base: &plain.buffer,
            dim: device_dim(matrix.kind(), matrix.dim()),
            joining: JoinedTables {
                tables: tables.tables,
                table_rows: tables.table_rows,
                rows: tables.rows(),
                own: of_rows.buffer(),
                left_out: left_out.as_ref(),
            },
            largest: &tables.most_visits[..buckets.tables],
            left_out: buckets.left_out,
        };
        let own = self.own(Some(own), tables.table_rows, job)?;
        match tables.self_join.lists(self, (&of, k, kernels), (&own, count), job) {
            Ok(taken) => self.read_lists::<T>((&taken, kernels), (count, k), job).map(Some),
            Err(Error::DeviceMemory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn search<T: OnGpu>(
        &self,
        (queries, base): (&CudaRows, &CudaRows),
        tables: &CudaTables,
        (buckets, visited, lookup): (&Buckets<'_>, &[f64], BucketLookup),
        (k, kernels): (usize, &BucketKernels),
        job: &Job,
    ) -> Result<NearestInBuckets> {
        let Self { gpu, .. } = self;
        let plain = (queries.plain(self, job)?, base.plain(self, job)?);
        wait_for(gpu, &plain.0.ready)?;
        wait_for(gpu, &plain.1.ready)?;
        let own = match lookup {
            BucketLookup::Own => Some(tables.own_buckets(self, kernels)?),
            BucketLookup::Given(..) => None,
        };
        let mut search = self.in_buckets(base, tables, (buckets, lookup), (k, kernels), job)?;
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
            let sides = (&plain.0.buffer, &plain.1.buffer);
            let of_tables = (tables.rows(), own.as_ref().map(OwnRanges::buffer));
            let some = (&mut search, first..end);
            kernels.nearest_in_buckets(&gpu.compute, sides, of_tables, some)?;
            let operations = rows * dim as f64;
            let are_enough = end - first >= search.workers;
            let counted = if are_enough { Counted::Exactly } else { Counted::Guessed };
            throttle.launched(&gpu.compute, rate, operations, counted)?;
            first = end;
        }
        self.read_lists::<T>((&search.taken, kernels), (search.queries, k), job)
    }

    /// Reads the lists of `queries` queries, of up to k neighbours each.
    fn read_lists<T: OnGpu>(
        &self,
        (taken, kernels): (&BucketLists, &BucketKernels),
        (queries, k): (usize, usize),
        job: &Job,
    ) -> Result<NearestInBuckets> {
        let allocate = |bytes| self.memory.allocate(&self.gpu.compute, bytes);
        let mut starts = allocate((queries + 1) * size_of::<u64>())?;
        kernels.add_up_lists(&self.gpu.compute, (taken, queries), &mut starts)?;
        let (mut rows, mut distances) = match queries * k {
            all if all <= MOST_ROOM => (room::<u32>(all), room::<T>(all)),
            _ => (Vec::new(), Vec::new()),
        };
        let pages = Pages::of_room(&rows).into_iter().chain(Pages::of_room(&distances));
        let read = || sys::read::<u64>(&self.gpu.compute, taken.work.slice(), 3);
        let work = taking(pages.collect(), read).map_err(sys::failed("cuMemcpyDtoHAsync"))?;
        let count = work[2] as usize;
        assert!(count <= queries * k);
        let on_host = if count == queries * k {
            Starts::Equal { lists: queries, each: k }
        } else {
            let on_host: Vec<u64> = self.read(&starts, queries + 1, job)?;
            let on_host: Vec<usize> = on_host.into_iter().map(|start| start as usize).collect();
            assert!(on_host.windows(2).all(|list| list[0] <= list[1] && list[1] - list[0] <= k));
            assert!(on_host[queries] == count);
            Starts::Each(on_host)
        };
        let mut closed = None;
        if count > 0 && count < queries * k {
            let mut found = allocate(count * size_of::<u32>())?;
            let mut distances = allocate(count * size_of::<T>())?;
            let to = (&mut found, &mut distances);
            kernels.close_gaps(&self.gpu.compute, (taken, queries, k), (&starts, count), to)?;
            closed = Some((found, distances));
        }
        let (found, how_far) = match &closed {
            Some((found, how_far)) => (found, how_far),
            None => (&taken.found, &taken.distances),
        };
        let to = ((found.slice(), &mut rows), (how_far.slice(), &mut distances));
        self.gpu.downloader.append_both(&self.gpu.compute, to.0, to.1, count, job)?;
        Ok(NearestInBuckets {
            rows,
            distances: Distances::of::<T>(distances),
            starts: on_host,
            visited: work[0],
            pairs: work[1],
        })
    }

    /// The buffers of a search on the device.
    fn in_buckets(
        &self,
        base: &CudaRows,
        tables: &CudaTables,
        (buckets, lookup): (&Buckets<'_>, BucketLookup),
        (k, kernels): (usize, &BucketKernels),
        job: &Job,
    ) -> Result<BucketSearchBuffers> {
        let Self { gpu, memory, .. } = self;
        let (matrix, base_rows) = (base.rows.matrix(), base.rows.len());
        let queries = buckets.queries;
        assert!(buckets.tables <= tables.tables);
        assert!(base_rows == tables.table_rows);
        let words = BucketSearchBuffers::words(base_rows);
        let (_, warps) = kernels.warps_of_block(k).unwrap_or((0, 1));
        let fitting = (memory.unused() / SHARE_OF_FIELDS) as usize / (4 * words);
        let wanted = kernels.warps_together().min(queries.next_multiple_of(warps));
        let workers = (wanted.min(fitting) / warps).max(1) * warps;
        let real = real_bytes(matrix.kind());
        Ok(BucketSearchBuffers {
            queries,
            base_rows,
            dim: device_dim(matrix.kind(), matrix.dim()),
            k,
            tables: (tables.tables, buckets.tables),
            workers,
            buckets: lookup,
            own: self.own(buckets.own, base_rows, job)?,
            left_out: buckets
                .left_out
                .map(|bits| self.send(&[sys::bytes_of(bits)], job))
                .transpose()?,
            seen: self.filled(workers * words * 4, 0)?,
            taken: BucketLists {
                found: memory.allocate(&gpu.compute, queries * k * 4)?,
                distances: memory.allocate(&gpu.compute, queries * k * real)?,
                counts: self.filled(queries * 4, 0)?,
                work: self.filled(24, 0)?,
            },
        })
    }

    /// The base rows that are the queries, of `base_rows` rows in all.
    fn own(
        &self,
        own: Option<SelfRows<'_>>,
        base_rows: usize,
        job: &Job,
    ) -> Result<DeviceSelfRows> {
        Ok(match own {
            None => DeviceSelfRows::Separate,
            Some(SelfRows::From(first)) => DeviceSelfRows::From(first),
            Some(SelfRows::Each(rows)) => {
                assert!(rows.iter().all(|row| (*row as usize) < base_rows));
                DeviceSelfRows::Each(self.send(&[sys::bytes_of(rows)], job)?)
            }
        })
    }

    /// The buckets that were given for the queries.
    fn given(
        &self,
        buckets: &Buckets<'_>,
        ranges: &Ranges<'_>,
        base_rows: usize,
        job: &Job,
    ) -> Result<BucketLookup> {
        let count = ranges.all.len();
        let is_one_each = count == buckets.queries * buckets.tables
            && ranges.starts.iter().enumerate().all(|(i, start)| i == *start);
        let numbers: Vec<u32> =
            ranges.all.iter().flat_map(|range| [range.start, range.end]).collect();
        let is_of_base = |range: &[u32]| range[0] <= range[1] && range[1] as usize <= base_rows;
        assert!(numbers.chunks_exact(2).all(is_of_base) && u32::try_from(count).is_ok());
        let all = self.send(&[sys::bytes_of(&numbers[..])], job)?;
        let starts = match is_one_each {
            true => None,
            false => {
                let starts: Vec<u32> = ranges.starts.iter().map(|start| *start as u32).collect();
                Some(self.send(&[sys::bytes_of(&starts[..])], job)?)
            }
        };
        Ok(BucketLookup::Given(count, all, starts))
    }
}

/// Whether a query visits more rows than a GPU should search, so that the host takes over.
fn is_for_the_host(most: f64, tables: &CudaTables, queries: usize) -> bool {
    // If the host has no tables, building them would take longer.
    let is_few = queries < FEW_QUERIES && tables.built().is_none();
    most > if is_few { MANY_VISITED } else { MOST_VISITED }
}
