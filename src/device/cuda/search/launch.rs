//! Every kernel launch of a search: one function per kernel, which checks the sizes that the
//! kernel relies on and picks its grid.
//!
//! All launches share these rules: buffers are borrowed for the call, and kernels run later. A
//! buffer outlives its kernels because dropping it only retires it (see `driver::memory`), and
//! streams order the kernels of one list. Buffers are distinct allocations, so `__restrict__`
//! holds; sizes in bytes are checked before each launch against the kernel's accesses.
#![allow(unsafe_code)]

use std::sync::{Arc, LazyLock};

use cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg,
};

use super::passes::PANEL;
use super::spec::{SearchKernelSpec, entry_bytes, real_bytes, scalar_bytes};
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{
    Limits, Rate, address, allow_shared, check_size, config, function,
};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::modules::Once;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::matrix::ElementKind;

/// Threads of a block with a thread per list entry.
const THREADS: usize = 256;

/// The fewest lists of a merging launch: fewer keep no device busy.
pub(super) const LEAST_MERGED: usize = 64;

/// Warps of a block of `merge_by_warp`, one per query, and the maximum shared memory of that block.
pub(super) const WARPS: usize = 8;
pub(super) const WARPS_SHARED: usize = 32 << 10;

/// The kernels of one [`SearchKernelSpec`], loaded on a device.
#[derive(Debug)]
pub(super) struct SearchKernels {
    spec: SearchKernelSpec,
    pub(super) shared_limit: usize,
    pub(super) multiprocessors: usize,
    pack: CudaFunction,
    scan: CudaFunction,
    pub(super) scan_least: CudaFunction,
    pub(super) bound_lists: CudaFunction,
    pub(super) lengthen_lists: CudaFunction,
    pub(super) find_short: CudaFunction,
    clear_lists: CudaFunction,
    merge_by_warp: CudaFunction,
    merge_by_block: CudaFunction,
    merge_in_place: CudaFunction,
    pub(super) search_again: CudaFunction,
    gather: CudaFunction,
    take_queries: CudaFunction,
    pub(super) among: CudaFunction,
    pub(super) measure_lists: CudaFunction,
    pub(super) rank_by_warp: CudaFunction,
    pub(super) rank_by_block: CudaFunction,
    pub(super) unpack: CudaFunction,
    /// Pairs × dimensions per second.
    scan_rate: Arc<Rate>,
    /// The same for pairs of rows anywhere in memory, and for these by the definition.
    among_rate: Arc<Rate>,
    exact_rate: Arc<Rate>,
    /// Entries × steps of a sort per second, in shared memory and in global memory.
    merge_rates: [Arc<Rate>; 2],
}

/// A piece of rows that is being packed, and its destination. See `kernels/search/pack.cuh`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    /// Rows in the piece.
    pub(super) rows: u32,
    /// Consecutive elements of each.
    pub(super) dims: u32,
    /// Position of the first row and of the first element.
    pub(super) first_row: u32,
    pub(super) first_dim: u32,
    /// Elements of a row in a panel.
    pub(super) stored_dim: u32,
    /// Panels that rows are dealt to; 0 to fill panels in order.
    pub(super) deal_to: u32,
    /// Whether to negate the elements.
    pub(super) negate: bool,
}

/// The lists of a block of queries. See `Lists` in `kernels/search/merge.cuh`.
pub(super) struct ListBuffers {
    pub(super) queries: usize,
    pub(super) k: usize,
    pub(super) slots: usize,
    pub(super) entries: Buffer,
    pub(super) worst: Buffer,
    pub(super) reach: Buffer,
    pub(super) counts: Buffer,
    pub(super) overflowed: Buffer,
    pub(super) overflowed_count: Buffer,
    pub(super) redone: Buffer,
}

/// The same struct as in `kernels/search/lists.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
    pub(super) first_query: u64,
    pub(super) first_base: u32,
    pub(super) queries: u32,
    pub(super) rows: u32,
    pub(super) dim: u32,
    pub(super) panels: u32,
    pub(super) stride: u32,
    pub(super) start: u32,
    pub(super) begin: u32,
    pub(super) end: u32,
    pub(super) k: u32,
    pub(super) slots: u32,
    pub(super) dense: u32,
    pub(super) wanted: u32,
    pub(super) root: f32,
    pub(super) factor: f32,
    pub(super) absolute: f32,
}

// SAFETY: a C struct of numbers without padding, laid out as the kernels', as asserted below.
unsafe impl DeviceRepr for Pass {}

assert_layout!(Pass, 72, {
    first_query: 0, first_base: 8, queries: 12, rows: 16, dim: 20, panels: 24, stride: 28,
    start: 32, begin: 36, end: 40, k: 44, slots: 48, dense: 52, wanted: 56, root: 60,
    factor: 64, absolute: 68,
});

/// The maximum f32 multiply-adds per cycle of a multiprocessor in a scan.
const PER_CYCLE: f64 = 64.0;

/// The slowdown of a sort's step per entry relative to a multiply-add, in shared and in global
/// memory.
const MERGE_PENALTIES: [f64; 2] = [40.0, 320.0];

/// The slowdown of pairs of rows anywhere in memory.
pub(super) const FETCH_PENALTY: f64 = 32.0;

/// The maximum multiply-adds per cycle of a multiprocessor, of the elements of a spec.
pub(super) fn per_cycle(spec: &SearchKernelSpec, limits: &Limits) -> f64 {
    PER_CYCLE / if spec.kind() == ElementKind::F64 { limits.double_penalty } else { 1.0 }
}

impl SearchKernels {
    /// The kernels for such rows and a metric, compiled and loaded by the first caller.
    pub(super) fn get(gpu: &Gpu, spec: SearchKernelSpec) -> Result<Arc<Self>> {
        static LOADED: LazyLock<Once<(usize, SearchKernelSpec), SearchKernels>> =
            LazyLock::new(Once::default);
        LOADED.get((gpu.ordinal, spec), || Self::load(gpu, spec))
    }

    fn load(gpu: &Gpu, spec: SearchKernelSpec) -> Result<Self> {
        let modules =
            gpu.load_all(&[spec.program("search.cu"), spec.program("search_lists.cu")])?;
        let [module, lists] = &modules[..] else { unreachable!("a module for each program") };
        let limits = &gpu.limits;
        let per_cycle = per_cycle(&spec, limits);
        let kernels = Self {
            spec,
            shared_limit: limits.shared,
            multiprocessors: limits.multiprocessors,
            pack: function(module, "pack")?,
            scan: function(module, "scan")?,
            scan_least: function(module, "scan_least")?,
            bound_lists: function(module, "bound_lists")?,
            lengthen_lists: function(lists, "lengthen_lists")?,
            find_short: function(lists, "find_short")?,
            clear_lists: function(lists, "clear_lists")?,
            merge_by_warp: function(lists, "merge_by_warp")?,
            merge_by_block: function(lists, "merge_by_block")?,
            merge_in_place: function(lists, "merge_in_place")?,
            search_again: function(lists, "search_again")?,
            gather: function(lists, "gather")?,
            take_queries: function(module, "take_queries")?,
            among: function(lists, "among")?,
            measure_lists: function(lists, "measure_lists")?,
            rank_by_warp: function(lists, "rank_by_warp")?,
            rank_by_block: function(lists, "rank_by_block")?,
            unpack: function(lists, "unpack")?,
            scan_rate: Arc::new(limits.rate(per_cycle)),
            among_rate: Arc::new(limits.rate(per_cycle / FETCH_PENALTY)),
            exact_rate: Arc::new(limits.rate(PER_CYCLE / limits.double_penalty / FETCH_PENALTY)),
            merge_rates: MERGE_PENALTIES.map(|slower| Arc::new(limits.rate(per_cycle / slower))),
        };
        allow_shared(&kernels.scan, kernels.scan_shared())?;
        allow_shared(&kernels.scan_least, kernels.scan_shared())?;
        allow_shared(&kernels.merge_by_block, limits.shared)?;
        allow_shared(&kernels.rank_by_block, limits.shared)?;
        Ok(kernels)
    }

    /// Pairs × dimensions that a scan compares per second.
    pub(super) fn scan_rate(&self) -> &Arc<Rate> {
        &self.scan_rate
    }

    /// Pairs × dimensions per second, for pairs of rows anywhere in memory.
    pub(super) fn among_rate(&self) -> &Arc<Rate> {
        &self.among_rate
    }

    /// The same by the definition, in float64.
    pub(super) fn exact_rate(&self) -> &Arc<Rate> {
        &self.exact_rate
    }

    /// Entries × steps of the sort per second, for such lists.
    pub(super) fn merge_rate(&self, lists: &ListBuffers) -> &Arc<Rate> {
        let in_place = lists.slots * entry_bytes(self.spec.kind()) > self.shared_limit;
        &self.merge_rates[usize::from(in_place)]
    }

    /// The compile-time parameters of the kernels.
    pub(super) fn spec(&self) -> &SearchKernelSpec {
        &self.spec
    }

    /// Shared memory of the scan; the kernel documents its layout.
    fn scan_shared(&self) -> usize {
        let kind = self.spec.kind();
        let slices = (self.spec.staged_slices() * self.spec.slice()) as usize;
        PANEL * (real_bytes(kind) + slices * scalar_bytes(kind))
    }

    /// Transposes a piece of rows into panels.
    pub(super) fn pack(
        &self,
        stream: &Arc<CudaStream>,
        source: &CudaSlice<u8>,
        panels: &mut Buffer,
        piece: &Piece,
    ) -> Result<()> {
        let scalar = scalar_bytes(self.spec.kind());
        let (rows, dims) = (piece.rows as usize, piece.dims as usize);
        let last_row = piece.first_row as usize + rows;
        let held =
            if piece.deal_to == 0 { last_row.div_ceil(PANEL) } else { piece.deal_to as usize };
        assert!(rows * dims * scalar <= source.len());
        assert!(
            piece.first_dim as usize + dims <= piece.stored_dim as usize
                && last_row <= held * PANEL
        );
        check_size(panels, held * PANEL * piece.stored_dim as usize, scalar);
        let negate = u32::from(piece.negate);
        let mut launch = stream.launch_builder(&self.pack);
        launch.arg(source).arg(panels.slice_mut()).arg(&piece.rows).arg(&piece.dims);
        launch.arg(&piece.first_row).arg(&piece.first_dim).arg(&piece.stored_dim);
        launch.arg(&piece.deal_to).arg(&negate);
        // SAFETY: the kernel reads rows × dims elements of `source` and writes to places of rows
        // below `last_row` and dimensions below `stored_dim`, all checked above.
        unsafe { launch.launch(config(rows.div_ceil(32) * dims.div_ceil(32), 256, 0)) }
            .map_err(failed("pack"))?;
        Ok(())
    }

    /// Empties lists.
    pub(super) fn clear_lists(
        &self,
        stream: &Arc<CudaStream>,
        lists: &mut ListBuffers,
    ) -> Result<()> {
        self.check(lists);
        let (queries, k, slots) = (lists.queries as u32, lists.k as u32, lists.slots as u32);
        let places = lists.queries.next_multiple_of(PANEL);
        let grid = config((places * lists.k).div_ceil(THREADS), THREADS, 0);
        let places = places as u32;
        let mut launch = stream.launch_builder(&self.clear_lists);
        launch.arg(lists.entries.slice_mut()).arg(lists.worst.slice_mut());
        launch.arg(lists.reach.slice_mut()).arg(lists.counts.slice_mut());
        launch.arg(&queries).arg(&places).arg(&k).arg(&slots);
        // SAFETY: `check` holds: one element per query with its padding in each of worst, reach and
        // counts, `slots` entries per query in entries.
        unsafe { launch.launch(grid) }.map_err(failed("clear_lists"))?;
        Ok(())
    }

    /// Compares all queries with the panels of a pass's visits `begin..end`; skipped if `wanted` is
    /// given and its word on the device is 0.
    pub(super) fn scan(
        &self,
        stream: &Arc<CudaStream>,
        (queries, base): (&Buffer, &Buffer),
        lists: &mut ListBuffers,
        pass: &Pass,
        wanted: Option<&Buffer>,
    ) -> Result<()> {
        self.check_pass(queries, base, lists, pass);
        let wanted = wanted.map_or(0, |word| address(stream, word));
        // Sixteen or more blocks per multiprocessor even out the last wave, if each still has eight
        // panels to scan; the grid's y dimension is at most 65535.
        let visits = (pass.end - pass.begin) as usize;
        let enough = (32 * self.multiprocessors).div_ceil(lists.queries.div_ceil(PANEL));
        let grid = self.scan_grid(lists, enough.min(visits.div_ceil(8)).clamp(1, 65_535));
        let mut launch = stream.launch_builder(&self.scan);
        launch.arg(queries.slice()).arg(base.slice()).arg(lists.reach.slice());
        launch.arg(lists.worst.slice()).arg(lists.counts.slice());
        launch.arg(lists.entries.slice()).arg(pass).arg(&wanted);
        // SAFETY: `check_pass` holds: whole panels on both sides. Blocks write candidates at
        // positions below `slots` of lists of queries below `queries`, through atomic counters or,
        // in a dense pass, at one position per pair, which has room.
        unsafe { launch.launch(grid) }.map_err(failed("scan"))?;
        Ok(())
    }

    pub(super) fn scan_grid(&self, lists: &ListBuffers, splits: usize) -> LaunchConfig {
        let threads = if self.spec.kind() == ElementKind::F64 { 512 } else { 256 };
        let mut grid = config(lists.queries.div_ceil(PANEL), threads, self.scan_shared());
        grid.grid_dim.1 = splits as u32;
        grid
    }

    /// Merges a pass's candidates for some queries, from `first` on; skipped if `wanted` is given
    /// and its word on the device is 0. Queries that are already overflowed stay so.
    pub(super) fn merge(
        &self,
        stream: &Arc<CudaStream>,
        lists: &mut ListBuffers,
        pass: &Pass,
        (first, count): (usize, usize),
        wanted: Option<&Buffer>,
    ) -> Result<()> {
        self.check(lists);
        assert!(first + count <= lists.queries && pass.queries as usize == lists.queries);
        assert!(pass.k as usize <= lists.k && pass.slots as usize == lists.slots);
        if first == 0 && pass.dense == 0 && wanted.is_none() {
            stream
                .memset_zeros(lists.overflowed_count.slice_mut())
                .map_err(failed("cuMemsetD8Async"))?;
        }
        let (function, name, grid) = self.merge_variant(lists, count);
        let (first, end) = (first as u32, (first + count) as u32);
        let wanted = wanted.map_or(0, |word| address(stream, word));
        let mut launch = stream.launch_builder(function);
        launch.arg(lists.entries.slice_mut()).arg(lists.worst.slice_mut());
        launch.arg(lists.reach.slice_mut()).arg(lists.counts.slice_mut());
        launch.arg(lists.overflowed.slice_mut()).arg(lists.overflowed_count.slice_mut()).arg(pass);
        launch.arg(&first).arg(&end).arg(&wanted);
        // SAFETY: `check` holds; a list and its candidates are sorted within its `slots` entries,
        // or in as much shared memory as the variant was given.
        unsafe { launch.launch(grid) }.map_err(failed(name))?;
        Ok(())
    }

    /// The fastest merge for lists of this size.
    fn merge_variant(
        &self,
        lists: &ListBuffers,
        queries: usize,
    ) -> (&CudaFunction, &'static str, LaunchConfig) {
        let bytes = lists.slots * entry_bytes(self.spec.kind());
        if bytes * WARPS <= WARPS_SHARED {
            let grid = config(queries.div_ceil(WARPS), 32 * WARPS, bytes * WARPS);
            (&self.merge_by_warp, "merge_by_warp", grid)
        } else if bytes <= self.shared_limit {
            let threads = if lists.slots <= 2048 { 256 } else { 512 };
            (&self.merge_by_block, "merge_by_block", config(queries, threads, bytes))
        } else {
            (&self.merge_in_place, "merge_in_place", config(queries, 1024, 0))
        }
    }

    /// Copies base rows, from `first` on, to the layout of queries.
    pub(super) fn take_queries(
        &self,
        stream: &Arc<CudaStream>,
        (base, base_rows, stored_dim): (&Buffer, usize, usize),
        queries: &mut Buffer,
        (first, rows): (usize, usize),
        negate: bool,
    ) -> Result<()> {
        assert!(first + rows <= base_rows);
        let scalar = scalar_bytes(self.spec.kind());
        let (base_panels, panels) = (base_rows.div_ceil(PANEL), rows.div_ceil(PANEL));
        check_size(base, base_panels * PANEL * stored_dim, scalar);
        check_size(queries, panels * PANEL * stored_dim, scalar);
        if panels == 0 {
            return Ok(());
        }
        let (dim, base_panels) = (stored_dim as u32, base_panels as u32);
        let (first, rows, negate) = (first as u32, rows as u32, u32::from(negate));
        let mut launch = stream.launch_builder(&self.take_queries);
        launch.arg(base.slice()).arg(queries.slice_mut()).arg(&first).arg(&rows);
        launch.arg(&dim).arg(&base_panels).arg(&negate);
        // SAFETY: the kernel writes whole panels of `queries`, and reads rows below `first + rows`
        // of the base; sizes checked above.
        unsafe { launch.launch(config(panels, PANEL, 0)) }.map_err(failed("take_queries"))?;
        Ok(())
    }

    /// Splits the first `per_query` entries of every list into rows and distances.
    pub(super) fn gather(
        &self,
        stream: &Arc<CudaStream>,
        lists: &ListBuffers,
        per_query: usize,
        rows: &mut Buffer,
        distances: &mut Buffer,
    ) -> Result<()> {
        self.check(lists);
        assert!(per_query <= lists.k);
        check_size(rows, lists.queries * per_query, 4);
        check_size(distances, lists.queries * per_query, real_bytes(self.spec.kind()));
        if per_query == 0 {
            return Ok(());
        }
        let grid = config((lists.queries * per_query).div_ceil(THREADS), THREADS, 0);
        let (queries, length, slots) = (lists.queries as u32, per_query as u32, lists.slots as u32);
        let mut launch = stream.launch_builder(&self.gather);
        launch.arg(lists.entries.slice()).arg(rows.slice_mut()).arg(distances.slice_mut());
        launch.arg(&queries).arg(&length).arg(&slots);
        // SAFETY: reads the first `per_query` ≤ k entries of each list, writes as many rows and
        // distances per query; sizes checked above.
        unsafe { launch.launch(grid) }.map_err(failed("gather"))?;
        Ok(())
    }

    /// Checks the sizes that every kernel on lists relies on.
    pub(super) fn check(&self, lists: &ListBuffers) {
        let padded = lists.queries.next_multiple_of(PANEL);
        let kind = self.spec.kind();
        assert!(lists.k >= 1 && lists.slots >= lists.k + PANEL && lists.slots.is_power_of_two());
        check_size(&lists.entries, lists.queries * lists.slots, entry_bytes(kind));
        check_size(&lists.worst, padded, entry_bytes(kind));
        check_size(&lists.reach, padded, real_bytes(kind));
        check_size(&lists.counts, padded, 4);
        check_size(&lists.overflowed, lists.queries, 4);
        check_size(&lists.overflowed_count, 1, 4);
        check_size(&lists.redone, 1, 8);
    }

    /// Checks the sizes that every kernel on a pass relies on.
    pub(super) fn check_pass(
        &self,
        queries: &Buffer,
        base: &Buffer,
        lists: &ListBuffers,
        pass: &Pass,
    ) {
        self.check(lists);
        let scalar = scalar_bytes(self.spec.kind());
        let panel = PANEL * pass.dim as usize;
        assert!(pass.queries as usize == lists.queries && lists.queries > 0);
        assert!(pass.k as usize <= lists.k && pass.slots as usize == lists.slots);
        assert!(pass.start <= pass.begin && pass.begin < pass.end && pass.end <= pass.panels);
        assert!(pass.rows as usize <= pass.panels as usize * PANEL);
        assert!(pass.dense as usize <= lists.slots - pass.k as usize);
        assert!(pass.dense == 0 || (pass.end - pass.start) as usize * PANEL <= pass.dense as usize);
        check_size(queries, lists.queries.div_ceil(PANEL) * panel, scalar);
        check_size(base, pass.panels as usize * panel, scalar);
    }
}
