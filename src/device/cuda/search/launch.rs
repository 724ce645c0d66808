//! Every kernel launch of a search: one function per kernel, which checks the sizes that the
//! kernel relies on and picks its grid.
//!
//! What all launches share: buffers are borrowed for the call, kernels run later. A buffer outlives
//! its kernels because dropping it only retires it (see `driver::memory`), and streams order the
//! kernels of one list. Buffers are distinct allocations, so `__restrict__` holds; sizes in bytes
//! are checked against what a kernel may touch before each launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute;
use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DeviceRepr, DriverError, LaunchConfig,
    PushKernelArg,
};
use cudarc::nvrtc::Ptx;

use super::passes::PANEL;
use crate::device::cuda::driver::compile::Spec;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::matrix::ElementKind;

/// Shared memory that a kernel has without asking for more.
const DEFAULT_SHARED: usize = 48 << 10;

/// Warps, one query each, in a block of `merge_by_warp`, and the shared memory they may fill.
const WARPS: usize = 8;
const WARPS_SHARED: usize = 32 << 10;

/// The kernels of one [`Spec`], loaded on a device.
#[derive(Debug)]
pub(in crate::device::cuda) struct Kernels {
    spec: Spec,
    shared_limit: usize,
    multiprocessors: usize,
    pack: CudaFunction,
    scan: CudaFunction,
    clear_lists: CudaFunction,
    merge_by_warp: CudaFunction,
    merge_by_block: CudaFunction,
    merge_in_place: CudaFunction,
    search_again: CudaFunction,
    gather: CudaFunction,
}

/// What launching needs to know about a device.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cuda) struct Limits {
    /// Compute capability.
    pub(in crate::device::cuda) capability: (i32, i32),
    /// Shared memory of a block that asks for it.
    pub(in crate::device::cuda) shared: usize,
    /// Streaming multiprocessors.
    pub(in crate::device::cuda) multiprocessors: usize,
}

/// Rows of a piece that is being packed, and where they go. See `kernels/pack.cu`.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cuda) struct Piece {
    /// Rows in the piece.
    pub(in crate::device::cuda) rows: u32,
    /// Consecutive elements of each.
    pub(in crate::device::cuda) dims: u32,
    /// Position of the first row and of the first element.
    pub(in crate::device::cuda) first_row: u32,
    pub(in crate::device::cuda) first_dim: u32,
    /// Elements of a row in a panel.
    pub(in crate::device::cuda) stored_dim: u32,
    /// Panels that rows are dealt out to; 0 to fill panels in order.
    pub(in crate::device::cuda) deal_to: u32,
    /// Store the negated elements.
    pub(in crate::device::cuda) negate: bool,
}

/// The lists of a block of queries. See `Lists` in `kernels/merge.cu`.
pub(in crate::device::cuda) struct Lists {
    pub(in crate::device::cuda) queries: usize,
    pub(in crate::device::cuda) k: usize,
    pub(in crate::device::cuda) slots: usize,
    pub(in crate::device::cuda) entries: Buffer,
    pub(in crate::device::cuda) worst: Buffer,
    pub(in crate::device::cuda) reach: Buffer,
    pub(in crate::device::cuda) counts: Buffer,
    pub(in crate::device::cuda) crowded: Buffer,
    pub(in crate::device::cuda) crowded_count: Buffer,
    pub(in crate::device::cuda) redone: Buffer,
}

/// The same struct as in `kernels/lists.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cuda) struct Pass {
    pub(in crate::device::cuda) first_query: u64,
    pub(in crate::device::cuda) first_base: u32,
    pub(in crate::device::cuda) queries: u32,
    pub(in crate::device::cuda) rows: u32,
    pub(in crate::device::cuda) dim: u32,
    pub(in crate::device::cuda) panels: u32,
    pub(in crate::device::cuda) stride: u32,
    pub(in crate::device::cuda) start: u32,
    pub(in crate::device::cuda) begin: u32,
    pub(in crate::device::cuda) end: u32,
    pub(in crate::device::cuda) k: u32,
    pub(in crate::device::cuda) slots: u32,
    pub(in crate::device::cuda) dense: u32,
}

// SAFETY: a C struct of integers, laid out as the kernels declare it; the tail padding is not read.
unsafe impl DeviceRepr for Pass {}

/// Bytes of a list entry.
pub(in crate::device::cuda) fn entry_bytes(kind: ElementKind) -> usize {
    if kind == ElementKind::F64 { 16 } else { 8 }
}

/// Bytes of a distance, and of a reach.
pub(in crate::device::cuda) fn real_bytes(kind: ElementKind) -> usize {
    if kind == ElementKind::F64 { 8 } else { 4 }
}

/// Bytes of an element on the device, where bits are words of 32.
pub(in crate::device::cuda) fn scalar_bytes(kind: ElementKind) -> usize {
    real_bytes(kind)
}

impl Kernels {
    /// Load a cubin.
    pub(in crate::device::cuda) fn load(
        context: &Arc<CudaContext>,
        spec: Spec,
        cubin: Vec<u8>,
        limits: Limits,
    ) -> Result<Self> {
        let module =
            context.load_module(Ptx::from_binary(cubin)).map_err(failed("cuModuleLoadData"))?;
        let function = |name| module.load_function(name).map_err(failed("cuModuleGetFunction"));
        let kernels = Self {
            spec,
            shared_limit: limits.shared,
            multiprocessors: limits.multiprocessors,
            pack: function("pack")?,
            scan: function("scan")?,
            clear_lists: function("clear_lists")?,
            merge_by_warp: function("merge_by_warp")?,
            merge_by_block: function("merge_by_block")?,
            merge_in_place: function("merge_in_place")?,
            search_again: function("search_again")?,
            gather: function("gather")?,
        };
        allow_shared(&kernels.scan, kernels.scan_shared())?;
        allow_shared(&kernels.merge_by_block, limits.shared)?;
        Ok(kernels)
    }

    /// What they were compiled for.
    pub(in crate::device::cuda) fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Shared memory of the scan; its layout is described at the kernel.
    fn scan_shared(&self) -> usize {
        let kind = self.spec.kind();
        let slices = (self.spec.staged_slices() * self.spec.slice()) as usize;
        PANEL * (real_bytes(kind) + slices * scalar_bytes(kind))
    }

    /// Transpose a piece of rows into panels.
    pub(in crate::device::cuda) fn pack(
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

    /// Make lists empty.
    pub(in crate::device::cuda) fn clear_lists(
        &self,
        stream: &Arc<CudaStream>,
        lists: &mut Lists,
    ) -> Result<()> {
        self.check(lists);
        let (queries, k, slots) = (lists.queries as u32, lists.k as u32, lists.slots as u32);
        let blocks = lists.queries.next_multiple_of(PANEL);
        let mut launch = stream.launch_builder(&self.clear_lists);
        launch.arg(lists.entries.slice_mut()).arg(lists.worst.slice_mut());
        launch.arg(lists.reach.slice_mut()).arg(lists.counts.slice_mut());
        launch.arg(&queries).arg(&k).arg(&slots);
        // SAFETY: `check` holds: one element per query with its padding in each of worst, reach and
        // counts, `slots` entries per query in entries.
        unsafe { launch.launch(config(blocks, 128, 0)) }.map_err(failed("clear_lists"))?;
        Ok(())
    }

    /// Compare all queries with the panels of a pass's visits `begin..end`.
    pub(in crate::device::cuda) fn scan(
        &self,
        stream: &Arc<CudaStream>,
        queries: &Buffer,
        base: &Buffer,
        lists: &mut Lists,
        pass: &Pass,
    ) -> Result<()> {
        self.check_pass(queries, base, lists, pass);
        let query_panels = lists.queries.div_ceil(PANEL);
        let visits = (pass.end - pass.begin) as usize;
        // Sixteen blocks per multiprocessor and more even out the last wave, if each still has
        // eight panels to look at; the grid's second side ends at 65535.
        let wanted = (32 * self.multiprocessors).div_ceil(query_panels);
        let splits = wanted.min(visits.div_ceil(8)).clamp(1, 65_535);
        let threads = if self.spec.kind() == ElementKind::F64 { 512 } else { 256 };
        let mut grid = config(query_panels, threads, self.scan_shared());
        grid.grid_dim.1 = splits as u32;
        let mut launch = stream.launch_builder(&self.scan);
        launch.arg(queries.slice()).arg(base.slice()).arg(lists.reach.slice());
        launch.arg(lists.worst.slice()).arg(lists.counts.slice());
        launch.arg(lists.entries.slice()).arg(pass);
        // SAFETY: `check_pass` holds: whole panels on both sides. Blocks write candidates at
        // positions below `slots` of lists of queries below `queries`, through atomic counters or,
        // in a dense pass, at one position per pair, which has room.
        unsafe { launch.launch(grid) }.map_err(failed("scan"))?;
        Ok(())
    }

    /// Merge what a pass found, and search it again for the queries that found too much.
    pub(in crate::device::cuda) fn merge(
        &self,
        stream: &Arc<CudaStream>,
        queries: &Buffer,
        base: &Buffer,
        lists: &mut Lists,
        pass: &Pass,
    ) -> Result<()> {
        self.check_pass(queries, base, lists, pass);
        if pass.dense == 0 {
            stream
                .memset_zeros(lists.crowded_count.slice_mut())
                .map_err(failed("cuMemsetD8Async"))?;
        }
        let (function, name, grid) = self.merge_variant(lists);
        let mut launch = stream.launch_builder(function);
        launch.arg(lists.entries.slice_mut()).arg(lists.worst.slice_mut());
        launch.arg(lists.reach.slice_mut()).arg(lists.counts.slice_mut());
        launch.arg(lists.crowded.slice_mut()).arg(lists.crowded_count.slice_mut()).arg(pass);
        // SAFETY: `check` holds; a list and its candidates are sorted within its `slots` entries,
        // or in as much shared memory as the variant was given.
        unsafe { launch.launch(grid) }.map_err(failed(name))?;
        if pass.dense == 0 {
            self.search_again(stream, queries, base, lists, pass)?;
        }
        Ok(())
    }

    /// The fastest merge for lists of this size.
    fn merge_variant(&self, lists: &Lists) -> (&CudaFunction, &'static str, LaunchConfig) {
        let bytes = lists.slots * entry_bytes(self.spec.kind());
        if bytes * WARPS <= WARPS_SHARED {
            let grid = config(lists.queries.div_ceil(WARPS), 32 * WARPS, bytes * WARPS);
            (&self.merge_by_warp, "merge_by_warp", grid)
        } else if bytes <= self.shared_limit {
            let threads = if lists.slots <= 2048 { 256 } else { 512 };
            (&self.merge_by_block, "merge_by_block", config(lists.queries, threads, bytes))
        } else {
            (&self.merge_in_place, "merge_in_place", config(lists.queries, 1024, 0))
        }
    }

    fn search_again(
        &self,
        stream: &Arc<CudaStream>,
        queries: &Buffer,
        base: &Buffer,
        lists: &mut Lists,
        pass: &Pass,
    ) -> Result<()> {
        let blocks = lists.queries.min(16 * self.multiprocessors);
        let mut launch = stream.launch_builder(&self.search_again);
        launch.arg(queries.slice()).arg(base.slice()).arg(lists.entries.slice_mut());
        launch.arg(lists.worst.slice_mut()).arg(lists.reach.slice_mut());
        launch.arg(lists.crowded.slice()).arg(lists.crowded_count.slice());
        launch.arg(lists.redone.slice_mut()).arg(pass);
        // SAFETY: `merge` has checked the pass; the kernel writes to the `slots` entries of
        // crowded queries, which are below `queries`, each in one block.
        unsafe { launch.launch(config(blocks, PANEL, 0)) }.map_err(failed("search_again"))?;
        Ok(())
    }

    /// Take the first `per_query` entries of every list apart.
    pub(in crate::device::cuda) fn gather(
        &self,
        stream: &Arc<CudaStream>,
        lists: &Lists,
        per_query: usize,
        rows: &mut Buffer,
        distances: &mut Buffer,
    ) -> Result<()> {
        self.check(lists);
        assert!(per_query <= lists.k);
        check_size(rows, lists.queries * per_query, 4);
        check_size(distances, lists.queries * per_query, real_bytes(self.spec.kind()));
        let (length, slots) = (per_query as u32, lists.slots as u32);
        let mut launch = stream.launch_builder(&self.gather);
        launch.arg(lists.entries.slice()).arg(rows.slice_mut()).arg(distances.slice_mut());
        launch.arg(&length).arg(&slots);
        // SAFETY: reads the first `per_query` ≤ k entries of each list, writes as many rows and
        // distances per query; sizes checked above.
        unsafe { launch.launch(config(lists.queries, 128, 0)) }.map_err(failed("gather"))?;
        Ok(())
    }

    /// What every kernel on lists relies on.
    fn check(&self, lists: &Lists) {
        let padded = lists.queries.next_multiple_of(PANEL);
        let kind = self.spec.kind();
        assert!(lists.k >= 1 && lists.slots >= lists.k + PANEL && lists.slots.is_power_of_two());
        check_size(&lists.entries, lists.queries * lists.slots, entry_bytes(kind));
        check_size(&lists.worst, padded, entry_bytes(kind));
        check_size(&lists.reach, padded, real_bytes(kind));
        check_size(&lists.counts, padded, 4);
        check_size(&lists.crowded, lists.queries, 4);
        check_size(&lists.crowded_count, 1, 4);
        check_size(&lists.redone, 1, 8);
    }

    /// What every kernel on a pass relies on.
    fn check_pass(&self, queries: &Buffer, base: &Buffer, lists: &Lists, pass: &Pass) {
        self.check(lists);
        let scalar = scalar_bytes(self.spec.kind());
        let panel = PANEL * pass.dim as usize;
        assert!(pass.queries as usize == lists.queries && lists.queries > 0);
        assert!(pass.k as usize == lists.k && pass.slots as usize == lists.slots);
        assert!(pass.start <= pass.begin && pass.begin < pass.end && pass.end <= pass.panels);
        assert!(pass.rows as usize <= pass.panels as usize * PANEL);
        assert!(pass.dense as usize <= lists.slots - lists.k);
        assert!(pass.dense == 0 || (pass.end - pass.start) as usize * PANEL <= pass.dense as usize);
        check_size(queries, lists.queries.div_ceil(PANEL) * panel, scalar);
        check_size(base, pass.panels as usize * panel, scalar);
    }
}

/// A grid of one side.
pub(in crate::device::cuda) fn config(
    blocks: usize,
    threads: usize,
    shared: usize,
) -> LaunchConfig {
    let blocks = u32::try_from(blocks).expect("a grid has fewer than 2^31 blocks");
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: shared as u32,
    }
}

pub(in crate::device::cuda) fn check_size(buffer: &Buffer, count: usize, bytes: usize) {
    let (needed, held) = (count * bytes, buffer.slice().len());
    assert!(needed <= held, "a kernel needs {needed} bytes where there are {held}");
}

/// Let a kernel have more shared memory than the default.
pub(in crate::device::cuda) fn allow_shared(function: &CudaFunction, bytes: usize) -> Result<()> {
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let set = || -> Result<(), DriverError> {
        if bytes > DEFAULT_SHARED {
            function.set_attribute(attribute, bytes as i32)
        } else {
            Ok(())
        }
    };
    set().map_err(failed("cuFuncSetAttribute"))
}
