//! The launches that merge base rows into the top-k lists of queries: initial thresholds, scans,
//! merges, and the repair of short lists and of lists whose candidates overflow.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};

use super::Sides;
use super::launch::{SearchKernels, WARPS, WARPS_SHARED};
use super::passes::PANEL;
use super::spec::{entry_bytes, real_bytes, scalar_bytes};
use crate::device::cuda::driver::launch::{Rate, address_or_null, check_size, config};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::matrix::ElementKind;

/// Threads of a block with a thread per list entry.
const THREADS: usize = 256;

/// The fewest lists of a merging launch: fewer keep no device busy.
pub(super) const LEAST_MERGED: usize = 64;

/// The lists of a block of queries. See `Lists` in `kernels/search/merge.cuh`.
pub(super) struct ListBuffers {
    pub(super) queries: usize,
    pub(super) k: usize,
    pub(super) slots: usize,
    pub(super) entries: Buffer,
    pub(super) worst: Buffer,
    pub(super) thresholds: Buffer,
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
    pub(super) enough: u32,
    pub(super) root: f32,
    pub(super) factor: f32,
    pub(super) absolute: f32,
}

kernel_struct!(Pass, 72, {
    first_query: 0, first_base: 8, queries: 12, rows: 16, dim: 20, panels: 24, stride: 28,
    start: 32, begin: 36, end: 40, k: 44, slots: 48, dense: 52, enough: 56, root: 60,
    factor: 64, absolute: 68,
});

impl SearchKernels {
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
        launch.arg(lists.thresholds.slice_mut()).arg(lists.counts.slice_mut());
        launch.arg(&queries).arg(&places).arg(&k).arg(&slots);
        // SAFETY: `check` holds: one element per query with its padding in each of worst, thresholds
        // and counts, `slots` entries per query in entries.
        unsafe { launch.launch(grid) }.map_err(failed("clear_lists")).map(drop)
    }

    /// The number of parts into which the panels that bound lists are cut, to keep all
    /// multiprocessors busy.
    pub(super) fn bounding_splits(&self, lists: &ListBuffers, visits: usize) -> usize {
        (2 * self.multiprocessors).div_ceil(lists.queries.div_ceil(PANEL)).clamp(1, visits)
    }

    /// Sets the thresholds of empty lists from a pass's visits; `least` holds 32 totals per query
    /// and split.
    pub(super) fn bound_lists(
        &self,
        stream: &Arc<CudaStream>,
        sides: Sides<&Buffer>,
        lists: &mut ListBuffers,
        least: &mut Buffer,
        pass: &Pass,
    ) -> Result<()> {
        self.check_pass(sides, lists, pass);
        let splits = self.bounding_splits(lists, (pass.end - pass.begin) as usize);
        assert!(pass.k <= 32 && pass.dense == 0);
        check_size(least, lists.queries * splits * 32, real_bytes(self.spec.kind));
        let mut launch = stream.launch_builder(&self.scan_least);
        launch.arg(sides.queries.slice()).arg(sides.base.slice()).arg(least.slice_mut()).arg(pass);
        // SAFETY: `check_pass` holds: whole panels on both sides; 32 totals are written for each
        // query below `queries` and each split.
        unsafe { launch.launch(self.scan_grid(lists, splits)) }.map_err(failed("scan_least"))?;
        let (count, splits) = (lists.queries as u32, splits as u32);
        let mut launch = stream.launch_builder(&self.bound_lists);
        launch.arg(least.slice()).arg(lists.worst.slice_mut()).arg(lists.thresholds.slice_mut());
        launch.arg(&count).arg(&splits).arg(&pass.k);
        // SAFETY: a warp for each query, with an element in `worst` and `thresholds`.
        unsafe { launch.launch(config(lists.queries.div_ceil(8), 256, 0)) }
            .map_err(failed("bound_lists"))
            .map(drop)
    }

    /// Compares all queries with the panels of a pass's visits `begin..end`; skipped if `flag` is
    /// given and its word on the device is 0.
    pub(super) fn scan(
        &self,
        stream: &Arc<CudaStream>,
        sides: Sides<&Buffer>,
        lists: &mut ListBuffers,
        pass: &Pass,
        flag: Option<&Buffer>,
    ) -> Result<()> {
        self.check_pass(sides, lists, pass);
        let flag = address_or_null(stream, flag);
        // Sixteen or more blocks per multiprocessor even out the last wave, if each still has eight
        // panels to scan; the grid's y dimension is at most 65535.
        let visits = (pass.end - pass.begin) as usize;
        let enough = (32 * self.multiprocessors).div_ceil(lists.queries.div_ceil(PANEL));
        let grid = self.scan_grid(lists, enough.min(visits.div_ceil(8)).clamp(1, 65_535));
        let mut launch = stream.launch_builder(&self.scan);
        launch.arg(sides.queries.slice()).arg(sides.base.slice()).arg(lists.thresholds.slice());
        launch.arg(lists.worst.slice()).arg(lists.counts.slice());
        launch.arg(lists.entries.slice()).arg(pass).arg(&flag);
        // SAFETY: `check_pass` holds: whole panels on both sides. Blocks write candidates at
        // positions below `slots` of lists of queries below `queries`, through atomic counters or,
        // in a dense pass, at one position per pair, which has room.
        unsafe { launch.launch(grid) }.map_err(failed("scan")).map(drop)
    }

    fn scan_grid(&self, lists: &ListBuffers, splits: usize) -> LaunchConfig {
        let threads = if self.spec.kind == ElementKind::F64 { 512 } else { 256 };
        let mut grid = config(lists.queries.div_ceil(PANEL), threads, self.scan_shared());
        grid.grid_dim.1 = splits as u32;
        grid
    }

    /// Merges a pass's candidates for some queries; skipped if `flag` is given and its word on
    /// the device is 0. Queries that are already overflowed stay so.
    pub(super) fn merge(
        &self,
        stream: &Arc<CudaStream>,
        lists: &mut ListBuffers,
        pass: &Pass,
        queries: Range<usize>,
        flag: Option<&Buffer>,
    ) -> Result<()> {
        self.check(lists);
        assert!(queries.end <= lists.queries && pass.queries as usize == lists.queries);
        assert!(pass.k as usize <= lists.k && pass.slots as usize == lists.slots);
        if queries.start == 0 && pass.dense == 0 && flag.is_none() {
            stream
                .memset_zeros(lists.overflowed_count.slice_mut())
                .map_err(failed("cuMemsetD8Async"))?;
        }
        let (function, name, grid) = self.merge_variant(lists, queries.len());
        let (first, end) = (queries.start as u32, queries.end as u32);
        let flag = address_or_null(stream, flag);
        let mut launch = stream.launch_builder(function);
        launch.arg(lists.entries.slice_mut()).arg(lists.worst.slice_mut());
        launch.arg(lists.thresholds.slice_mut()).arg(lists.counts.slice_mut());
        launch.arg(lists.overflowed.slice_mut()).arg(lists.overflowed_count.slice_mut()).arg(pass);
        launch.arg(&first).arg(&end).arg(&flag);
        // SAFETY: `check` holds; a list and its candidates are sorted within its `slots` entries,
        // or in as much shared memory as the variant was given.
        unsafe { launch.launch(grid) }.map_err(failed(name)).map(drop)
    }

    /// The fastest merge for lists of this size.
    fn merge_variant(
        &self,
        lists: &ListBuffers,
        queries: usize,
    ) -> (&CudaFunction, &'static str, LaunchConfig) {
        let bytes = lists.slots * entry_bytes(self.spec.kind);
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

    /// Entries × steps of the sort per second, for such lists.
    pub(super) fn merge_rate(&self, lists: &ListBuffers) -> &Arc<Rate> {
        let in_place = lists.slots * entry_bytes(self.spec.kind) > self.shared_limit;
        &self.merge_rates[usize::from(in_place)]
    }

    /// Searches the pass's visits `begin..end` again for the queries whose candidates overflow.
    pub(super) fn search_again(
        &self,
        stream: &Arc<CudaStream>,
        sides: Sides<&Buffer>,
        lists: &mut ListBuffers,
        pass: &Pass,
    ) -> Result<()> {
        self.check_pass(sides, lists, pass);
        let blocks = lists.queries.min(16 * self.multiprocessors);
        let mut launch = stream.launch_builder(&self.search_again);
        launch.arg(sides.queries.slice()).arg(sides.base.slice()).arg(lists.entries.slice_mut());
        launch.arg(lists.worst.slice_mut()).arg(lists.thresholds.slice_mut());
        launch.arg(lists.overflowed.slice()).arg(lists.overflowed_count.slice());
        launch.arg(lists.redone.slice_mut()).arg(pass);
        // SAFETY: `check_pass` holds; the kernel writes to the `slots` entries of overflowed
        // queries, which are below `queries`, each in one block.
        unsafe { launch.launch(config(blocks, PANEL, 0)) }.map_err(failed("search_again")).map(drop)
    }

    /// Extends all lists by these entries, which are empty.
    pub(super) fn lengthen_lists(
        &self,
        stream: &Arc<CudaStream>,
        lists: &mut ListBuffers,
        entries: Range<usize>,
    ) -> Result<()> {
        self.check(lists);
        assert!(entries.start <= entries.end && entries.end <= lists.k);
        let (queries, slots) = (lists.queries as u32, lists.slots as u32);
        let (first, end) = (entries.start as u32, entries.end as u32);
        let mut launch = stream.launch_builder(&self.lengthen_lists);
        launch.arg(lists.entries.slice_mut()).arg(&queries).arg(&first).arg(&end).arg(&slots);
        // SAFETY: entries below `k` of lists of queries below `queries` are written; `check` holds.
        unsafe { launch.launch(config(lists.queries.div_ceil(128), 128, 0)) }
            .map_err(failed("lengthen_lists"))
            .map(drop)
    }

    /// Empties every list with free entries if it may lack a row that matters, and records its
    /// query as overflowed.
    pub(super) fn find_short(
        &self,
        stream: &Arc<CudaStream>,
        lists: &mut ListBuffers,
        pass: &Pass,
    ) -> Result<()> {
        self.check(lists);
        assert!(pass.k as usize <= lists.k && pass.queries as usize == lists.queries);
        assert!(pass.slots as usize == lists.slots);
        let overflowed_count = lists.overflowed_count.slice_mut();
        stream.memset_zeros(overflowed_count).map_err(failed("cuMemsetD8Async"))?;
        let mut launch = stream.launch_builder(&self.find_short);
        launch.arg(lists.entries.slice_mut()).arg(lists.worst.slice_mut());
        launch.arg(lists.thresholds.slice_mut()).arg(lists.overflowed.slice_mut());
        launch.arg(lists.overflowed_count.slice_mut()).arg(pass);
        // SAFETY: `check` holds: `k` entries of every list, and an element per query in the others.
        unsafe { launch.launch(config(lists.queries.div_ceil(128), 128, 0)) }
            .map_err(failed("find_short"))
            .map(drop)
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
        check_size(distances, lists.queries * per_query, real_bytes(self.spec.kind));
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
        unsafe { launch.launch(grid) }.map_err(failed("gather")).map(drop)
    }

    /// Checks the sizes that every kernel on lists relies on.
    pub(super) fn check(&self, lists: &ListBuffers) {
        let padded = lists.queries.next_multiple_of(PANEL);
        let kind = self.spec.kind;
        assert!(lists.k >= 1 && lists.slots >= lists.k + PANEL && lists.slots.is_power_of_two());
        check_size(&lists.entries, lists.queries * lists.slots, entry_bytes(kind));
        check_size(&lists.worst, padded, entry_bytes(kind));
        check_size(&lists.thresholds, padded, real_bytes(kind));
        check_size(&lists.counts, padded, 4);
        check_size(&lists.overflowed, lists.queries, 4);
        check_size(&lists.overflowed_count, 1, 4);
        check_size(&lists.redone, 1, 8);
    }

    /// Checks the sizes that every kernel on a pass relies on.
    fn check_pass(&self, sides: Sides<&Buffer>, lists: &ListBuffers, pass: &Pass) {
        self.check(lists);
        let scalar = scalar_bytes(self.spec.kind);
        let panel = PANEL * pass.dim as usize;
        assert!(pass.queries as usize == lists.queries && lists.queries > 0);
        assert!(pass.k as usize <= lists.k && pass.slots as usize == lists.slots);
        assert!(pass.start <= pass.begin && pass.begin < pass.end && pass.end <= pass.panels);
        assert!(pass.rows as usize <= pass.panels as usize * PANEL);
        assert!(pass.dense as usize <= lists.slots - pass.k as usize);
        assert!(pass.dense == 0 || (pass.end - pass.start) as usize * PANEL <= pass.dense as usize);
        check_size(sides.queries, lists.queries.div_ceil(PANEL) * panel, scalar);
        check_size(sides.base, pass.panels as usize * panel, scalar);
    }
}
