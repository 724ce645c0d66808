//! Every kernel launch of a search: one function per kernel, which checks the sizes that the
//! kernel relies on and picks its grid.
//!
//! What all launches share: buffers are borrowed for the call, kernels run later. A buffer outlives
//! its kernels because dropping it only retires it (see [`super::memory`]), and streams order the
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

use super::compile::Spec;
use super::memory::Buffer;
use super::rounds::PANEL;
use super::sys::failed;
use crate::error::Result;
use crate::matrix::ElementKind;

/// Shared memory that a kernel has without asking for more.
const DEFAULT_SHARED: usize = 48 << 10;

/// Warps, one query each, in a block of `merge_by_warp`, and the shared memory they may fill.
const WARPS: usize = 8;
const WARPS_SHARED: usize = 32 << 10;

/// The kernels of one [`Spec`], loaded on a device.
#[derive(Debug)]
pub(super) struct Kernels {
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
pub(super) struct Limits {
    /// Compute capability.
    pub(super) capability: (i32, i32),
    /// Shared memory of a block that asks for it.
    pub(super) shared: usize,
    /// Streaming multiprocessors.
    pub(super) multiprocessors: usize,
}

/// Rows of a piece that is being packed, and where they go. See `kernels/pack.cu`.
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
    /// Panels that rows are dealt out to; 0 to fill panels in order.
    pub(super) deal_to: u32,
    /// Store the negated elements.
    pub(super) negate: bool,
}

/// The lists of a block of queries. See `Lists` in `kernels/merge.cu`.
pub(super) struct Lists {
    pub(super) queries: usize,
    pub(super) k: usize,
    pub(super) slots: usize,
    pub(super) entries: Buffer,
    pub(super) worst: Buffer,
    pub(super) reach: Buffer,
    pub(super) counts: Buffer,
    pub(super) crowded: Buffer,
    pub(super) crowded_count: Buffer,
    pub(super) redone: Buffer,
}

/// The same struct as in `kernels/lists.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
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
}

// SAFETY: a C struct of integers, laid out as the kernels declare it; the tail padding is not read.
unsafe impl DeviceRepr for Round {}

/// Bytes of a list entry.
pub(super) fn entry_bytes(kind: ElementKind) -> usize {
    if kind == ElementKind::F64 { 16 } else { 8 }
}

/// Bytes of a distance, and of a reach.
pub(super) fn real_bytes(kind: ElementKind) -> usize {
    if kind == ElementKind::F64 { 8 } else { 4 }
}

/// Bytes of an element on the device, where bits are words of 32.
pub(super) fn scalar_bytes(kind: ElementKind) -> usize {
    real_bytes(kind)
}

impl Kernels {
    /// Load a cubin.
    pub(super) fn load(
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
    pub(super) fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Shared memory of the scan; its layout is described at the kernel.
    fn scan_shared(&self) -> usize {
        let kind = self.spec.kind();
        let slices = (self.spec.staged_slices() * self.spec.slice()) as usize;
        PANEL * (real_bytes(kind) + slices * scalar_bytes(kind))
    }

    /// Transpose a piece of rows into panels.
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

    /// Make lists empty.
    pub(super) fn clear_lists(&self, stream: &Arc<CudaStream>, lists: &mut Lists) -> Result<()> {
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

    /// Compare all queries with the panels of a round's visits `begin..end`.
    pub(super) fn scan(
        &self,
        stream: &Arc<CudaStream>,
        queries: &Buffer,
        base: &Buffer,
        lists: &mut Lists,
        round: &Round,
    ) -> Result<()> {
        self.check_round(queries, base, lists, round);
        let query_panels = lists.queries.div_ceil(PANEL);
        let visits = (round.end - round.begin) as usize;
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
        launch.arg(lists.entries.slice()).arg(round);
        // SAFETY: `check_round` holds: whole panels on both sides. Blocks write candidates at
        // positions below `slots` of lists of queries below `queries`, through atomic counters or,
        // in a dense round, at one position per pair, which has room.
        unsafe { launch.launch(grid) }.map_err(failed("scan"))?;
        Ok(())
    }

    /// Merge what a round found, and search it again for the queries that found too much.
    pub(super) fn merge(
        &self,
        stream: &Arc<CudaStream>,
        queries: &Buffer,
        base: &Buffer,
        lists: &mut Lists,
        round: &Round,
    ) -> Result<()> {
        self.check_round(queries, base, lists, round);
        if round.dense == 0 {
            stream
                .memset_zeros(lists.crowded_count.slice_mut())
                .map_err(failed("cuMemsetD8Async"))?;
        }
        let (function, name, grid) = self.merge_variant(lists);
        let mut launch = stream.launch_builder(function);
        launch.arg(lists.entries.slice_mut()).arg(lists.worst.slice_mut());
        launch.arg(lists.reach.slice_mut()).arg(lists.counts.slice_mut());
        launch.arg(lists.crowded.slice_mut()).arg(lists.crowded_count.slice_mut()).arg(round);
        // SAFETY: `check` holds; a list and its candidates are sorted within its `slots` entries,
        // or in as much shared memory as the variant was given.
        unsafe { launch.launch(grid) }.map_err(failed(name))?;
        if round.dense == 0 {
            self.search_again(stream, queries, base, lists, round)?;
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
        round: &Round,
    ) -> Result<()> {
        let blocks = lists.queries.min(16 * self.multiprocessors);
        let mut launch = stream.launch_builder(&self.search_again);
        launch.arg(queries.slice()).arg(base.slice()).arg(lists.entries.slice_mut());
        launch.arg(lists.worst.slice_mut()).arg(lists.reach.slice_mut());
        launch.arg(lists.crowded.slice()).arg(lists.crowded_count.slice());
        launch.arg(lists.redone.slice_mut()).arg(round);
        // SAFETY: `merge` has checked the round; the kernel writes to the `slots` entries of
        // crowded queries, which are below `queries`, each in one block.
        unsafe { launch.launch(config(blocks, PANEL, 0)) }.map_err(failed("search_again"))?;
        Ok(())
    }

    /// Take the first `per_query` entries of every list apart.
    pub(super) fn gather(
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

    /// What every kernel on a round relies on.
    fn check_round(&self, queries: &Buffer, base: &Buffer, lists: &Lists, round: &Round) {
        self.check(lists);
        let scalar = scalar_bytes(self.spec.kind());
        let panel = PANEL * round.dim as usize;
        assert!(round.queries as usize == lists.queries && lists.queries > 0);
        assert!(round.k as usize == lists.k && round.slots as usize == lists.slots);
        assert!(round.start <= round.begin && round.begin < round.end && round.end <= round.panels);
        assert!(round.rows as usize <= round.panels as usize * PANEL);
        assert!(round.dense as usize <= lists.slots - lists.k);
        assert!(
            round.dense == 0 || (round.end - round.start) as usize * PANEL <= round.dense as usize
        );
        check_size(queries, lists.queries.div_ceil(PANEL) * panel, scalar);
        check_size(base, round.panels as usize * panel, scalar);
    }
}

/// A grid of one side.
pub(super) fn config(blocks: usize, threads: usize, shared: usize) -> LaunchConfig {
    let blocks = u32::try_from(blocks).expect("a grid has fewer than 2^31 blocks");
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: shared as u32,
    }
}

pub(super) fn check_size(buffer: &Buffer, count: usize, bytes: usize) {
    let (needed, held) = (count * bytes, buffer.slice().len());
    assert!(needed <= held, "a kernel needs {needed} bytes where there are {held}");
}

/// Let a kernel have more shared memory than the default.
pub(super) fn allow_shared(function: &CudaFunction, bytes: usize) -> Result<()> {
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
