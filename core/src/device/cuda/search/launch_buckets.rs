//! The kernels of LSH buckets, the launches of searches in them, and the memory that these share.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use cudarc::driver::{CudaFunction, CudaStream, PushKernelArg};

use super::Sides;
use super::launch::{FETCH_PENALTY, per_cycle};
use super::spec::{SearchSpec, entry_bytes, real_bytes, scalar_bytes};
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{
    Rate, address, address_or_null, allow_shared, check_size, config, function,
};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::modules::Once;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::matrix::ElementKind;

/// The least shared memory of a block: with fewer warps per block, a multiprocessor holds more
/// blocks.
const BLOCK_SHARED: usize = 16 << 10;

/// The maximum warps of a block, and of a multiprocessor.
const MOST_WARPS: usize = 8;
const WARPS_TOGETHER: usize = 32;

/// The fewest candidates that a warp collects beside its neighbours before sorting.
const ROOM: usize = 48;

/// Threads of a block of `close_gaps`.
const CLOSING: usize = 256;

/// Lists whose lengths a block sums, and a thread.
const ADDING: usize = 4096;
const OF_A_THREAD: usize = 4;

/// The same struct as in `kernels/search/buckets.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct BucketSearchOnDevice {
    table_rows: u64,
    words: u64,
    first: u32,
    end: u32,
    tables: u32,
    dim: u32,
    k: u32,
    slots: u32,
    is_home: u32,
    probes: u32,
    self_rows: SelfRowsOnDevice,
}

/// The same struct as in `kernels/search/buckets.cuh`, which documents it; an address on the device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct SelfRowsOnDevice {
    listed: u64,
    first: u32,
    padding: u32,
}

kernel_struct!(SelfRowsOnDevice, 16, { listed: 0, first: 8, padding: 12 });
kernel_struct!(BucketSearchOnDevice, 64, {
    table_rows: 0, words: 8, first: 16, end: 20, tables: 24, dim: 28, k: 32, slots: 36, is_home: 40,
    probes: 44, self_rows: 48,
});

/// The number of no row.
const NOBODY: u32 = u32::MAX;

/// The base rows that are the queries.
pub(super) enum DeviceSelfRows {
    /// Queries are not base rows.
    Separate,
    /// This row and its successors.
    From(u32),
    /// The listed rows, of u32.
    Each(Buffer),
}

impl DeviceSelfRows {
    /// The base rows that are the queries, as an argument of kernels. `count`: of queries, and of
    /// base rows.
    pub(super) fn on_device(
        &self,
        stream: &Arc<CudaStream>,
        count: Sides<usize>,
    ) -> SelfRowsOnDevice {
        let (listed, first) = match self {
            Self::Separate => (0, NOBODY),
            Self::From(first) => {
                assert!(*first as usize + count.queries <= count.base);
                (0, *first)
            }
            Self::Each(buffer) => {
                check_size(buffer, count.queries, 4);
                (address(stream, buffer), NOBODY)
            }
        };
        SelfRowsOnDevice { listed, first, padding: 0 }
    }
}

/// A search in buckets, on the device.
pub(super) struct BucketSearchBuffers {
    pub(super) base_rows: usize,
    /// Elements of a row.
    pub(super) dim: usize,
    /// The number of tables, and of those that are probed.
    pub(super) tables: usize,
    pub(super) probed_tables: usize,
    /// Warps with a bit field.
    pub(super) workers: usize,
    /// The buckets that queries probe.
    pub(super) buckets: BucketLookup,
    pub(super) self_rows: DeviceSelfRows,
    /// A bit for each base row that is left out, in words of 64.
    pub(super) left_out: Option<Buffer>,
    /// A bit for each base row and warp; all zero.
    pub(super) seen: Buffer,
    pub(super) lists: BucketLists,
}

/// The lists of queries.
pub(super) struct BucketLists {
    pub(super) queries: usize,
    pub(super) k: usize,
    /// Per query `k` rows and distances, and the number of neighbours.
    pub(super) rows: Buffer,
    pub(super) distances: Buffer,
    pub(super) counts: Buffer,
    /// Three u64: visited rows, compared pairs, and the neighbours in all lists, once these are
    /// summed.
    pub(super) work: Buffer,
}

/// The buckets that queries probe, as ranges of two u32 each.
pub(super) enum BucketLookup {
    /// The query's home bucket in each table.
    Home,
    /// Ranges, and their number. `starts`: per query and table the position of its first range,
    /// then the end of the last, of u32; `None` if the number of ranges is the same for all.
    Given { count: usize, ranges: Buffer, starts: Option<Buffer> },
}

/// The buckets of tables.
pub(super) struct BucketStarts {
    /// The number of buckets, and their first positions in their tables, of u32.
    pub(super) count: usize,
    pub(super) starts: Buffer,
    /// Per table the number of its first bucket, then the number of all buckets, of u64.
    pub(super) first_bucket: Buffer,
}

/// The tables for which the bucket of each row is determined.
pub(super) struct HomeBucketInput<'a> {
    /// The number of tables, and of rows in each.
    pub(super) tables: usize,
    pub(super) table_rows: usize,
    /// The rows of all tables, of u32.
    pub(super) rows: &'a Buffer,
    pub(super) buckets: &'a BucketStarts,
}

impl BucketSearchBuffers {
    /// 32-bit words of a warp's bit field.
    pub(super) fn words(base_rows: usize) -> usize {
        base_rows.div_ceil(32)
    }

    /// Ranges per query and table, if all have the same number.
    fn probes(&self) -> usize {
        match self.buckets {
            BucketLookup::Given { count, starts: None, .. } => {
                count / (self.lists.queries * self.probed_tables).max(1)
            }
            BucketLookup::Given { .. } | BucketLookup::Home => 1,
        }
    }

    /// Checks the sizes of all buffers.
    fn check(&self, kind: ElementKind) {
        let Self { base_rows, tables, probed_tables, workers, .. } = *self;
        let queries = self.lists.queries;
        assert!(probed_tables <= tables && probed_tables > 0);
        self.left_out.iter().for_each(|bits| check_size(bits, base_rows.div_ceil(64), 8));
        check_size(&self.seen, workers * Self::words(base_rows), 4);
        self.lists.check(kind);
        match &self.buckets {
            BucketLookup::Home => assert!(!matches!(self.self_rows, DeviceSelfRows::Separate)),
            BucketLookup::Given { count, ranges, starts } => {
                check_size(ranges, *count, 8);
                match starts {
                    Some(starts) => check_size(starts, queries * probed_tables + 1, 4),
                    None => assert!(*count == queries * probed_tables * self.probes()),
                }
            }
        }
    }
}

impl BucketLists {
    /// Allocates empty lists of up to `k` neighbours.
    pub(super) fn new(
        device: &CudaDevice,
        queries: usize,
        k: usize,
        kind: ElementKind,
    ) -> Result<Self> {
        let allocate = |bytes: usize| device.memory.allocate(&device.gpu.compute, bytes);
        Ok(Self {
            queries,
            k,
            rows: allocate(queries * k * 4)?,
            distances: allocate(queries * k * real_bytes(kind))?,
            counts: device.filled(queries * 4, 0)?,
            work: device.filled(24, 0)?,
        })
    }

    /// Checks the sizes of all buffers.
    pub(super) fn check(&self, kind: ElementKind) {
        let Self { queries, k, .. } = *self;
        check_size(&self.rows, queries * k, 4);
        check_size(&self.distances, queries * k, real_bytes(kind));
        check_size(&self.counts, queries, 4);
        check_size(&self.work, 2, 8);
    }
}

/// The kernels of searches in LSH buckets, of one [`SearchSpec`], loaded on a device.
#[derive(Debug)]
pub(super) struct BucketKernels {
    pub(super) spec: SearchSpec,
    shared_limit: usize,
    pub(super) multiprocessors: usize,
    nearest_in_buckets: CudaFunction,
    find_home_buckets: CudaFunction,
    pub(super) join_buckets: CudaFunction,
    /// Variants of `join_buckets` for rows of few elements and up to 8 or 16 neighbours.
    pub(super) join_for_8: CudaFunction,
    pub(super) join_for_16: CudaFunction,
    pub(super) take_lists: CudaFunction,
    pub(super) add_visits: CudaFunction,
    add_up_lists: CudaFunction,
    close_gaps: CudaFunction,
    /// Pairs × dimensions per second: of a search, and of a self-join.
    pub(super) search_rate: Arc<Rate>,
    pub(super) join_rate: Arc<Rate>,
}

/// The slowdown of pairs if adjacent threads compare with the same rows.
const JOIN_PENALTY: f64 = 2.0;

impl BucketKernels {
    /// The kernels for such rows and a metric, compiled and loaded by the first caller.
    pub(super) fn get(gpu: &Gpu, spec: SearchSpec) -> Result<Arc<Self>> {
        static LOADED: LazyLock<Once<(usize, SearchSpec), BucketKernels>> =
            LazyLock::new(Once::default);
        LOADED.get((gpu.ordinal, spec), || Self::load(gpu, spec))
    }

    fn load(gpu: &Gpu, spec: SearchSpec) -> Result<Self> {
        let module = gpu.load(&spec.program("search_buckets.cu"))?;
        let (limits, function) = (&gpu.limits, |name| function(&module, name));
        let per_cycle = per_cycle(&spec, limits);
        let kernels = Self {
            spec,
            shared_limit: limits.shared,
            multiprocessors: limits.multiprocessors,
            nearest_in_buckets: function("nearest_in_buckets")?,
            find_home_buckets: function("find_home_buckets")?,
            join_buckets: function("join_buckets")?,
            join_for_8: function("join_for_8")?,
            join_for_16: function("join_for_16")?,
            take_lists: function("take_lists")?,
            add_visits: function("add_visits")?,
            add_up_lists: function("add_up_lists")?,
            close_gaps: function("close_gaps")?,
            search_rate: Arc::new(limits.rate(per_cycle / FETCH_PENALTY)),
            join_rate: Arc::new(limits.rate(per_cycle / JOIN_PENALTY)),
        };
        allow_shared(&kernels.nearest_in_buckets, limits.shared)?;
        Ok(kernels)
    }

    /// Entries per warp, and warps of a block; `None` if not even one warp fits.
    pub(super) fn warps_of_block(&self, k: usize) -> Option<(usize, usize)> {
        let slots = (k + ROOM).next_power_of_two();
        let bytes = slots.checked_mul(entry_bytes(self.spec.kind))?;
        let warps = (BLOCK_SHARED / bytes).clamp(1, MOST_WARPS);
        (bytes <= self.shared_limit).then_some((slots, warps))
    }

    /// Resident warps of the device.
    pub(super) fn warps_together(&self) -> usize {
        self.multiprocessors * WARPS_TOGETHER
    }

    /// Searches for the neighbours of some queries. `rows` has the rows of all tables, of u32,
    /// `home_buckets` the bucket of each of them, as two u32.
    pub(super) fn nearest_in_buckets(
        &self,
        stream: &Arc<CudaStream>,
        sides: Sides<&Buffer>,
        rows: &Buffer,
        home_buckets: Option<&Buffer>,
        search: &mut BucketSearchBuffers,
        some: Range<usize>,
    ) -> Result<()> {
        let BucketSearchBuffers { dim, base_rows, workers, tables, probed_tables, .. } = *search;
        let BucketLists { queries, k, .. } = search.lists;
        let Some((slots, warps)) = self.warps_of_block(k) else {
            unreachable!("the entries of a warp fit")
        };
        let kind = self.spec.kind;
        check_size(sides.queries, queries * dim, scalar_bytes(kind));
        check_size(sides.base, base_rows * dim, scalar_bytes(kind));
        check_size(rows, tables * base_rows, 4);
        assert!(some.end <= queries && k > 0);
        search.check(kind);
        let (ranges, starts) = match (&search.buckets, home_buckets) {
            (BucketLookup::Given { ranges, starts, .. }, _) => (ranges, starts.as_ref()),
            (BucketLookup::Home, Some(home_buckets)) => {
                check_size(home_buckets, tables * base_rows, 8);
                (home_buckets, None)
            }
            (BucketLookup::Home, None) => unreachable!("rows have buckets of their own"),
        };
        let blocks = (workers / warps).min(some.len().div_ceil(warps));
        assert!(blocks > 0);
        let given = BucketSearchOnDevice {
            table_rows: base_rows as u64,
            words: BucketSearchBuffers::words(base_rows) as u64,
            first: some.start as u32,
            end: some.end as u32,
            tables: probed_tables as u32,
            dim: dim as u32,
            k: k as u32,
            slots: slots as u32,
            is_home: u32::from(matches!(search.buckets, BucketLookup::Home)),
            probes: search.probes() as u32,
            self_rows: search.self_rows.on_device(stream, Sides { queries, base: base_rows }),
        };
        let starts = address_or_null(stream, starts);
        let left_out = address_or_null(stream, search.left_out.as_ref());
        let mut launch = stream.launch_builder(&self.nearest_in_buckets);
        launch.arg(sides.queries.slice()).arg(sides.base.slice());
        launch.arg(rows.slice()).arg(ranges.slice()).arg(&starts).arg(&left_out);
        let BucketLists { rows, distances, counts, work, .. } = &mut search.lists;
        launch.arg(search.seen.slice_mut()).arg(rows.slice_mut()).arg(distances.slice_mut());
        launch.arg(counts.slice_mut()).arg(work.slice_mut()).arg(&given);
        let shared = warps * slots * entry_bytes(kind);
        // SAFETY: sizes are checked above; ranges are of rows of their tables, and these of the base,
        // as the caller has checked. A warp has a field of bits and entries of its own: there are
        // `workers` fields, and `slots` entries for each warp of a block.
        unsafe { launch.launch(config(blocks, 32 * warps, shared)) }
            .map_err(failed("nearest_in_buckets"))
            .map(drop)
    }

    /// Finds the bucket of each row in each table.
    pub(super) fn find_home_buckets(
        &self,
        stream: &Arc<CudaStream>,
        home_buckets: &mut Buffer,
        of: &HomeBucketInput<'_>,
    ) -> Result<()> {
        const THREADS: usize = 256;
        let HomeBucketInput { tables, table_rows, rows, buckets } = *of;
        let BucketStarts { count, starts, first_bucket } = buckets;
        check_size(rows, tables * table_rows, 4);
        check_size(starts, *count, 4);
        check_size(first_bucket, tables + 1, 8);
        check_size(home_buckets, tables * table_rows, 8);
        let (all_rows, all_tables) = (table_rows as u32, tables as u32);
        let mut grid = config(table_rows.div_ceil(THREADS), THREADS, 0);
        grid.grid_dim.1 = tables.min(65_535) as u32;
        let mut launch = stream.launch_builder(&self.find_home_buckets);
        launch.arg(rows.slice()).arg(starts.slice()).arg(first_bucket.slice());
        launch.arg(home_buckets.slice_mut()).arg(&all_rows).arg(&all_tables);
        // SAFETY: each table has `table_rows` rows of the base, each once, and a bucket that begins at
        // its first row, as the caller has checked; sizes are checked above.
        unsafe { launch.launch(grid) }.map_err(failed("find_home_buckets")).map(drop)
    }

    /// The first position of each list once lists are contiguous, then the end of the last, as u64.
    pub(super) fn add_up_lists(
        &self,
        stream: &Arc<CudaStream>,
        lists: &BucketLists,
        starts: &mut Buffer,
    ) -> Result<()> {
        let queries = lists.queries;
        check_size(&lists.counts, queries, 4);
        check_size(starts, queries + 1, 8);
        check_size(&lists.work, 3, 8);
        let count = queries as u32;
        let neighbors = address(stream, &lists.work) + 16;
        let mut launch = stream.launch_builder(&self.add_up_lists);
        launch.arg(lists.counts.slice()).arg(starts.slice_mut()).arg(&neighbors).arg(&count);
        // SAFETY: `counts` has an element for each query, `starts` one more, and the address is of
        // the third of the three counters of `work`, as checked above.
        unsafe { launch.launch(config((queries + 1).div_ceil(ADDING), ADDING / OF_A_THREAD, 0)) }
            .map_err(failed("add_up_lists"))
            .map(drop)
    }

    /// Makes the rows and distances of lists contiguous: `starts` has the first position of each
    /// list, then the end of the last, as u64.
    pub(super) fn close_gaps(
        &self,
        stream: &Arc<CudaStream>,
        lists: &BucketLists,
        starts: &Buffer,
        all: usize,
        rows: &mut Buffer,
        distances: &mut Buffer,
    ) -> Result<()> {
        let (&BucketLists { queries, k, .. }, kind) = (lists, self.spec.kind);
        lists.check(kind);
        check_size(starts, queries + 1, 8);
        check_size(rows, all, 4);
        check_size(distances, all, real_bytes(kind));
        let (count, per_query) = (queries as u32, k as u32);
        let mut launch = stream.launch_builder(&self.close_gaps);
        launch.arg(lists.rows.slice()).arg(lists.distances.slice()).arg(starts.slice());
        launch.arg(rows.slice_mut()).arg(distances.slice_mut()).arg(&count).arg(&per_query);
        // SAFETY: sizes are checked above; lists have up to k neighbours, and end where the next
        // begins, the last at `all`, as the caller has checked.
        unsafe { launch.launch(config((queries * k).div_ceil(CLOSING), CLOSING, 0)) }
            .map_err(failed("close_gaps"))
            .map(drop)
    }
}
