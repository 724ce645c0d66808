//! The kernels that pack rows of bits, and their launches.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaModule, CudaStream, PushKernelArg};

use super::super::launch_lists::ListBuffers;
use super::super::passes::{PANEL, WINDOW, windows};
use super::buffers::{QueryBuffers, Scratch};
use super::form::{Form, QUERY_NORM_BYTES, THRESHOLD_BYTES};
use crate::device::cuda::driver::launch::{allow_shared, check_size, config, function};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;

/// Threads of most kernels, and of those that sort rows.
const THREADS: usize = 256;
const SORTING_THREADS: usize = 1024;

/// Shared memory in which rows are sorted.
const SORTED_BYTES: usize = WINDOW * PANEL * 4;

/// The kernels that pack rows of bits.
#[derive(Debug)]
pub(super) struct BitPacker {
    form: Form,
    sort_rows: CudaFunction,
    pack_base: CudaFunction,
    pack_queries: CudaFunction,
    set_thresholds: CudaFunction,
}

/// The buffers of a base of bits that is being packed: its swizzled tiles and rows, the positions
/// of rows before they were sorted, and the fewest set bits of a row of each tile.
pub(super) struct BitBase<'a> {
    pub(super) tiles: &'a Buffer,
    pub(super) rows: &'a Buffer,
    pub(super) order: &'a Buffer,
    pub(super) fewest: &'a Buffer,
}

/// The layout of packed bit rows. The same struct as in `kernels/filter/bits.cuh`, which documents
/// it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct BitPack {
    pub(super) rows: u32,
    pub(super) dim: u32,
    pub(super) panels: u32,
    pub(super) stride: u32,
    pub(super) pitch: u32,
    pub(super) steps: u32,
    pub(super) log: u32,
    pub(super) tile: u32,
}

kernel_struct!(BitPack, 32, {
    rows: 0, dim: 4, panels: 8, stride: 12, pitch: 16, steps: 20, log: 24, tile: 28,
});

impl BitPacker {
    /// The kernels of a module.
    pub(super) fn load(module: &Arc<CudaModule>, form: Form) -> Result<Self> {
        let sort_rows = function(module, "sort_rows")?;
        allow_shared(&sort_rows, SORTED_BYTES)?;
        Ok(Self {
            form,
            sort_rows,
            pack_base: function(module, "pack_base")?,
            pack_queries: function(module, "pack_queries")?,
            set_thresholds: function(module, "set_thresholds")?,
        })
    }

    /// Sorts the rows of a base by their set bits, window by window, and packs them in that order.
    pub(super) fn pack_base(
        &self,
        stream: &Arc<CudaStream>,
        panels: &Buffer,
        &BitBase { tiles, rows, order, fewest }: &BitBase<'_>,
        pack: &BitPack,
    ) -> Result<()> {
        let count = pack.panels as usize;
        let places = count * PANEL;
        self.check(pack);
        assert!(pack.tile as usize == PANEL && places <= u32::MAX as usize - WINDOW * PANEL);
        let windows = windows(count);
        check_size(panels, places * pack.dim as usize, 4);
        check_size(tiles, places * self.form.row_bytes(), 1);
        check_size(rows, places * pack.pitch as usize, 4);
        check_size(order, places, 4);
        check_size(fewest, count, 4);
        let mut launch = stream.launch_builder(&self.sort_rows);
        launch.arg(panels.slice()).arg(order.slice()).arg(fewest.slice()).arg(pack);
        // SAFETY: panels below `panels` are read, and their positions and the fewest of each written. Sizes are
        // checked above.
        unsafe { launch.launch(config(windows, SORTING_THREADS, SORTED_BYTES)) }
            .map_err(failed("sort_rows"))?;
        let mut launch = stream.launch_builder(&self.pack_base);
        launch.arg(panels.slice()).arg(order.slice());
        launch.arg(tiles.slice()).arg(rows.slice()).arg(pack);
        // SAFETY: positions of rows are within these panels, of which every place is written. Sizes are checked above.
        unsafe { launch.launch(config(count, PANEL, 0)) }.map_err(failed("pack_base")).map(drop)
    }

    /// Packs queries, padded to whole blocks.
    pub(super) fn pack_queries(
        &self,
        stream: &Arc<CudaStream>,
        panels: &Buffer,
        packed: &QueryBuffers,
        pack: &BitPack,
    ) -> Result<()> {
        let (rows, places) = (pack.rows as usize, packed.places);
        self.check(pack);
        assert!(rows <= places && places.is_multiple_of(PANEL));
        check_size(panels, rows.div_ceil(PANEL) * PANEL * pack.dim as usize, 4);
        check_size(&packed.tiles, places * self.form.row_bytes(), 1);
        check_size(&packed.rows, rows * pack.pitch as usize, 4);
        check_size(&packed.query_norms, rows, QUERY_NORM_BYTES);
        check_size(&packed.thresholds, places, THRESHOLD_BYTES);
        let mut launch = stream.launch_builder(&self.pack_queries);
        launch.arg(panels.slice()).arg(packed.tiles.slice()).arg(packed.rows.slice());
        launch.arg(packed.query_norms.slice()).arg(packed.thresholds.slice()).arg(pack);
        // SAFETY: only rows below `rows` are read, and written to `rows` and `query_norms`; all places
        // have a stored row and a threshold. Sizes are checked above.
        unsafe { launch.launch(config(places / PANEL, PANEL, 0)) }
            .map_err(failed("pack_queries"))
            .map(drop)
    }

    /// Sets the filter thresholds of queries from the distance thresholds of their lists.
    pub(super) fn set_thresholds(
        &self,
        stream: &Arc<CudaStream>,
        queries: &QueryBuffers,
        lists: &ListBuffers,
        scratch: &Scratch,
        pack: &BitPack,
    ) -> Result<()> {
        self.check(pack);
        assert!(pack.rows as usize == lists.queries);
        let mut launch = stream.launch_builder(&self.set_thresholds);
        launch.arg(lists.thresholds.slice()).arg(queries.query_norms.slice());
        launch.arg(queries.thresholds.slice()).arg(lists.counts.slice());
        launch.arg(scratch.state.slice()).arg(pack);
        let grid = config(lists.queries.div_ceil(THREADS), THREADS, 0);
        // SAFETY: `FilterKernels::check` holds: an element per query in each.
        unsafe { launch.launch(grid) }.map_err(failed("set_thresholds")).map(drop)
    }

    /// Checks that rows have the width of the form.
    fn check(&self, pack: &BitPack) {
        assert!(pack.rows > 0 && pack.dim > 0 && pack.pitch >= pack.dim);
        assert!(pack.steps as usize == self.form.stored() && pack.pitch.is_multiple_of(4));
        assert!(pack.dim as usize <= self.form.steps * 8);
    }
}
