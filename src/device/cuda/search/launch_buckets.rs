//! The launches of searches in LSH buckets, and the memory that they share. The rules of all
//! launches are in `launch`.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, PushKernelArg};

use super::launch::{FETCH_PENALTY, per_cycle};
use super::spec::{SearchKernelSpec, entry_bytes, real_bytes, scalar_bytes};
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{
    Rate, address, allow_shared, check_size, config, function,
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

/// The same struct as in `kernels/search/buckets.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct BucketSearch {
    table_rows: u64,
    words: u64,
    first: u32,
    end: u32,
    tables: u32,
    dim: u32,
    k: u32,
    slots: u32,
    is_own: u32,
    probes: u32,
    own: OwnRowsOnDevice,
}

/// The same struct as in `kernels/search/buckets.cuh`, which documents it; an address on the device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct OwnRowsOnDevice {
    listed: u64,
    first: u32,
    padding: u32,
}

// SAFETY: a C struct of integers without padding, laid out as the kernels', as asserted below.
unsafe impl DeviceRepr for BucketSearch {}
// SAFETY: a C struct of integers without padding, laid out as the kernels', as asserted below.
unsafe impl DeviceRepr for OwnRowsOnDevice {}

assert_layout!(OwnRowsOnDevice, 16, { listed: 0, first: 8, padding: 12 });
assert_layout!(BucketSearch, 64, {
    table_rows: 0, words: 8, first: 16, end: 20, tables: 24, dim: 28, k: 32, slots: 36, is_own: 40,
    probes: 44, own: 48,
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
    /// The rows of `queries` queries, each one of `base_rows` rows, as an argument of kernels.
    pub(super) fn on_device(
        &self,
        stream: &Arc<CudaStream>,
        (queries, rows): (usize, usize),
    ) -> OwnRowsOnDevice {
        let (listed, first) = match self {
            Self::Separate => (0, NOBODY),
            Self::From(first) => {
                assert!(*first as usize + queries <= rows);
                (0, *first)
            }
            Self::Each(buffer) => {
                check_size(buffer, queries, 4);
                (address(stream, buffer), NOBODY)
            }
        };
        OwnRowsOnDevice { listed, first, padding: 0 }
    }
}

/// A search in buckets, on the device.
pub(super) struct BucketSearchBuffers {
    pub(super) queries: usize,
    pub(super) base_rows: usize,
    /// Elements of a row.
    pub(super) dim: usize,
    pub(super) k: usize,
    /// The number of tables, and of those that are probed.
    pub(super) tables: (usize, usize),
    /// Warps with a bit field.
    pub(super) workers: usize,
    /// The buckets that queries probe.
    pub(super) buckets: BucketLookup,
    pub(super) own: DeviceSelfRows,
    /// A bit for each base row that is left out, in words of 64.
    pub(super) left_out: Option<Buffer>,
    /// A bit for each base row and warp; all zero.
    pub(super) seen: Buffer,
    pub(super) taken: BucketLists,
}

/// The lists of queries.
pub(super) struct BucketLists {
    /// Per query `k` rows and distances, and the number of neighbours.
    pub(super) found: Buffer,
    pub(super) distances: Buffer,
    pub(super) counts: Buffer,
    /// Three u64: visited rows, compared pairs, and the neighbours in all lists, once these are
    /// summed.
    pub(super) work: Buffer,
}

/// The buckets that queries probe, as ranges of two u32 each.
pub(super) enum BucketLookup {
    /// The query's own bucket in each table.
    Own,
    /// The number of ranges; the ranges; and per query and table the position of its first range,
    /// then the end of the last, of u32: `None` if the number of ranges is the same for all.
    Given(usize, Buffer, Option<Buffer>),
}

/// The tables for which the bucket of each row is determined.
pub(super) struct OwnBuckets<'a> {
    /// The number of tables, and of rows in each.
    pub(super) tables: usize,
    pub(super) table_rows: usize,
    /// The rows of all tables, of u32.
    pub(super) rows: &'a Buffer,
    /// The number of buckets, and their first positions in their tables, of u32.
    pub(super) buckets: (usize, &'a Buffer),
    /// Per table the number of its first bucket, then the number of all buckets, of u64.
    pub(super) first_bucket: &'a Buffer,
}

impl BucketSearchBuffers {
    /// 32-bit words of a warp's bit field.
    pub(super) fn words(base_rows: usize) -> usize {
        base_rows.div_ceil(32)
    }

    /// Ranges per query and table, if all have the same number.
    fn probes(&self) -> usize {
        match self.buckets {
            BucketLookup::Given(count, _, None) => count / (self.queries * self.tables.1).max(1),
            BucketLookup::Given(..) | BucketLookup::Own => 1,
        }
    }

    /// Checks the sizes of all buffers.
    fn check(&self, kind: ElementKind) {
        let Self { queries, base_rows, k, tables: (tables, looked_at), workers, .. } = *self;
        assert!(looked_at <= tables && looked_at > 0);
        self.left_out.iter().for_each(|bits| check_size(bits, base_rows.div_ceil(64), 8));
        check_size(&self.seen, workers * Self::words(base_rows), 4);
        self.taken.check((queries, k), kind);
        match &self.buckets {
            BucketLookup::Own => assert!(!matches!(self.own, DeviceSelfRows::Separate)),
            BucketLookup::Given(count, ranges, starts) => {
                check_size(ranges, *count, 8);
                match starts {
                    Some(starts) => check_size(starts, queries * looked_at + 1, 4),
                    None => assert!(*count == queries * looked_at * self.probes()),
                }
            }
        }
    }
}

impl BucketLists {
    /// Checks the sizes of all buffers.
    pub(super) fn check(&self, (queries, k): (usize, usize), kind: ElementKind) {
        check_size(&self.found, queries * k, 4);
        check_size(&self.distances, queries * k, real_bytes(kind));
        check_size(&self.counts, queries, 4);
        check_size(&self.work, 2, 8);
    }
}

/// The kernels of searches in LSH buckets, of one [`SearchKernelSpec`], loaded on a device.
#[derive(Debug)]
pub(super) struct BucketKernels {
    spec: SearchKernelSpec,
    shared_limit: usize,
    pub(super) multiprocessors: usize,
    nearest_in_buckets: CudaFunction,
    find_own_buckets: CudaFunction,
    pub(super) join_buckets: CudaFunction,
    /// Variants of `join_buckets` for rows of few elements and up to 8 or 16 neighbours.
    pub(super) join_for_8: CudaFunction,
    pub(super) join_for_16: CudaFunction,
    pub(super) take_lists: CudaFunction,
    pub(super) add_visits: CudaFunction,
    pub(super) add_up_lists: CudaFunction,
    pub(super) close_gaps: CudaFunction,
    /// Pairs × dimensions per second: of a search, and of a self-join.
    pub(super) search_rate: Arc<Rate>,
    pub(super) join_rate: Arc<Rate>,
}

/// The slowdown of pairs if adjacent threads compare with the same rows.
const JOIN_PENALTY: f64 = 2.0;

impl BucketKernels {
    /// The kernels for such rows and a metric, compiled and loaded by the first caller.
    pub(super) fn get(gpu: &Gpu, spec: SearchKernelSpec) -> Result<Arc<Self>> {
        static LOADED: LazyLock<Once<(usize, SearchKernelSpec), BucketKernels>> =
            LazyLock::new(Once::default);
        LOADED.get((gpu.ordinal, spec), || Self::load(gpu, spec))
    }

    fn load(gpu: &Gpu, spec: SearchKernelSpec) -> Result<Self> {
        let module = gpu.load(&spec.program("search_buckets.cu"))?;
        let (limits, function) = (&gpu.limits, |name| function(&module, name));
        let per_cycle = per_cycle(&spec, limits);
        let kernels = Self {
            spec,
            shared_limit: limits.shared,
            multiprocessors: limits.multiprocessors,
            nearest_in_buckets: function("nearest_in_buckets")?,
            find_own_buckets: function("find_own_buckets")?,
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

    /// The compile-time parameters of the kernels.
    pub(super) fn spec(&self) -> &SearchKernelSpec {
        &self.spec
    }

    /// Entries per warp, and warps of a block; `None` if not even one warp fits.
    pub(super) fn warps_of_block(&self, k: usize) -> Option<(usize, usize)> {
        let slots = (k + ROOM).next_power_of_two();
        let bytes = slots.checked_mul(entry_bytes(self.spec().kind()))?;
        let warps = (BLOCK_SHARED / bytes).clamp(1, MOST_WARPS);
        (bytes <= self.shared_limit).then_some((slots, warps))
    }

    /// Resident warps of the device.
    pub(super) fn warps_together(&self) -> usize {
        self.multiprocessors * WARPS_TOGETHER
    }

    /// Searches for the neighbours of some queries. `rows` has the rows of all tables, of u32,
    /// `own` the bucket of each of them, as two u32.
    pub(super) fn nearest_in_buckets(
        &self,
        stream: &Arc<CudaStream>,
        (queries, base): (&Buffer, &Buffer),
        (rows, own): (&Buffer, Option<&Buffer>),
        (search, some): (&mut BucketSearchBuffers, Range<usize>),
    ) -> Result<()> {
        let Some((slots, warps)) = self.warps_of_block(search.k) else {
            unreachable!("the entries of a warp fit")
        };
        let kind = self.spec().kind();
        let BucketSearchBuffers { dim, k, base_rows, workers, tables: (_, looked_at), .. } =
            *search;
        check_size(queries, search.queries * dim, scalar_bytes(kind));
        check_size(base, base_rows * dim, scalar_bytes(kind));
        check_size(rows, search.tables.0 * base_rows, 4);
        assert!(some.end <= search.queries && k > 0);
        search.check(kind);
        let (ranges, starts) = match (&search.buckets, own) {
            (BucketLookup::Given(_, ranges, starts), _) => (ranges, starts.as_ref()),
            (BucketLookup::Own, Some(own)) => {
                check_size(own, search.tables.0 * base_rows, 8);
                (own, None)
            }
            (BucketLookup::Own, None) => unreachable!("rows have buckets of their own"),
        };
        let blocks = (workers / warps).min(some.len().div_ceil(warps));
        assert!(blocks > 0);
        let given = BucketSearch {
            table_rows: base_rows as u64,
            words: BucketSearchBuffers::words(base_rows) as u64,
            first: some.start as u32,
            end: some.end as u32,
            tables: looked_at as u32,
            dim: dim as u32,
            k: k as u32,
            slots: slots as u32,
            is_own: u32::from(matches!(search.buckets, BucketLookup::Own)),
            probes: search.probes() as u32,
            own: search.own.on_device(stream, (search.queries, base_rows)),
        };
        let null = 0u64;
        let mut launch = stream.launch_builder(&self.nearest_in_buckets);
        launch.arg(queries.slice()).arg(base.slice()).arg(rows.slice()).arg(ranges.slice());
        for optional in [starts, search.left_out.as_ref()] {
            match optional {
                Some(buffer) => launch.arg(buffer.slice()),
                None => launch.arg(&null),
            };
        }
        let BucketLists { found, distances, counts, work } = &mut search.taken;
        launch.arg(search.seen.slice_mut()).arg(found.slice_mut()).arg(distances.slice_mut());
        launch.arg(counts.slice_mut()).arg(work.slice_mut()).arg(&given);
        let shared = warps * slots * entry_bytes(kind);
        // SAFETY: sizes are checked above; ranges are of rows of their tables, and these of the base,
        // as the caller has checked. A warp has a field of bits and entries of its own: there are
        // `workers` fields, and `slots` entries for each warp of a block.
        unsafe { launch.launch(config(blocks, 32 * warps, shared)) }
            .map_err(failed("nearest_in_buckets"))?;
        Ok(())
    }

    /// Finds the bucket of each row in each table.
    pub(super) fn find_own_buckets(
        &self,
        stream: &Arc<CudaStream>,
        found: &mut Buffer,
        of: &OwnBuckets<'_>,
    ) -> Result<()> {
        const THREADS: usize = 256;
        let OwnBuckets { tables, table_rows, rows, buckets: (count, buckets), first_bucket } = *of;
        check_size(rows, tables * table_rows, 4);
        check_size(buckets, count, 4);
        check_size(first_bucket, tables + 1, 8);
        check_size(found, tables * table_rows, 8);
        let (all_rows, all_tables) = (table_rows as u32, tables as u32);
        let mut grid = config(table_rows.div_ceil(THREADS), THREADS, 0);
        grid.grid_dim.1 = tables.min(65_535) as u32;
        let mut launch = stream.launch_builder(&self.find_own_buckets);
        launch.arg(rows.slice()).arg(buckets.slice()).arg(first_bucket.slice());
        launch.arg(found.slice_mut()).arg(&all_rows).arg(&all_tables);
        // SAFETY: each table has `table_rows` rows of the base, each once, and a bucket that begins at
        // its first row, as the caller has checked; sizes are checked above.
        unsafe { launch.launch(grid) }.map_err(failed("find_own_buckets"))?;
        Ok(())
    }
}
