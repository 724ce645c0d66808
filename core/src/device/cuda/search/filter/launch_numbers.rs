//! The kernels that pack numeric rows as fp16, and their launches.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaModule, CudaStream, PushKernelArg};

use super::super::launch_lists::ListBuffers;
use super::super::passes::PANEL;
use super::super::spec::scalar_bytes;
use super::buffers::{QueryBuffers, Scratch};
use super::form::{Form, QUERY_NORM_BYTES};
use crate::device::cuda::driver::launch::{address, check_size, config, function};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::matrix::ElementKind;

/// Bins of norms. See `kernels/filter/pack.cuh`.
pub(super) const BINS: usize = 1 << 14;

/// Threads that share the packing of a query.
pub(super) const PARTS: usize = 4;

/// Threads of most kernels.
const THREADS: usize = 256;

/// The kernels that pack rows of numbers.
#[derive(Debug)]
pub(super) struct NumberPacker {
    kind: ElementKind,
    form: Form,
    centre: CudaFunction,
    norms: CudaFunction,
    choose_scale: CudaFunction,
    pack_base: CudaFunction,
    pack_queries: CudaFunction,
    set_thresholds: CudaFunction,
}

/// The buffers of a base that is being packed as fp16: its swizzled tiles and rows, its packing
/// parameters, and the bins of its rows' norms and their counts, which are zeros at first.
pub(super) struct Fp16Base<'a> {
    pub(super) tiles: &'a Buffer,
    pub(super) rows: &'a Buffer,
    pub(super) centre: &'a Buffer,
    pub(super) packing: &'a Buffer,
    pub(super) bins: &'a Buffer,
    pub(super) counts: &'a Buffer,
}

/// The layout of fp16 rows. The same struct as in `kernels/filter/pack.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Pack {
    pub(super) rows: u32,
    pub(super) dim: u32,
    pub(super) panels: u32,
    pub(super) stride: u32,
    pub(super) pitch: u32,
    pub(super) steps: u32,
    pub(super) stored: u32,
    pub(super) log: u32,
    pub(super) tile: u32,
    pub(super) padding: u32,
}

/// The centre, scale and error bounds of a packed base. The same struct as in
/// `kernels/filter/pack.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Packing {
    scale: f64,
    centre_norm: f64,
    norm: u64,
    lost: u64,
    /// The largest test value of a row, as the bits of an f64.
    pub(super) test: u64,
    raw_norm: u64,
    last_bin: u32,
    pub(super) is_finite: u32,
}

/// The parameters of thresholds. See `Test` in `kernels/filter/thresholds.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Test {
    queries: u32,
    dim: u32,
    steps: u32,
    has_fp16_sums: u32,
    stored: u32,
    log: u32,
    tile: u32,
    lost: u32,
}

kernel_struct!(Pack, 40, {
    rows: 0, dim: 4, panels: 8, stride: 12, pitch: 16, steps: 20, stored: 24, log: 28, tile: 32,
    padding: 36,
});
kernel_struct!(Packing, 56, {
    scale: 0, centre_norm: 8, norm: 16, lost: 24, test: 32, raw_norm: 40, last_bin: 48,
    is_finite: 52,
});
kernel_struct!(Test, 32, {
    queries: 0, dim: 4, steps: 8, has_fp16_sums: 12, stored: 16, log: 20, tile: 24, lost: 28,
});

impl NumberPacker {
    /// The kernels of a module.
    pub(super) fn load(module: &Arc<CudaModule>, kind: ElementKind, form: Form) -> Result<Self> {
        Ok(Self {
            kind,
            form,
            centre: function(module, "centre")?,
            norms: function(module, "norms")?,
            choose_scale: function(module, "choose_scale")?,
            pack_base: function(module, "pack_base")?,
            pack_queries: function(module, "pack_queries")?,
            set_thresholds: function(module, "set_thresholds")?,
        })
    }

    /// Packs a base in the order of `visits` visits to its panels.
    pub(super) fn pack_base(
        &self,
        stream: &Arc<CudaStream>,
        panels: &Buffer,
        packed: &Fp16Base<'_>,
        pack: &Pack,
        visits: usize,
    ) -> Result<()> {
        let Fp16Base { bins, counts, .. } = *packed;
        let scalar = scalar_bytes(self.kind);
        let (dim, places) = (pack.dim as usize, visits * PANEL);
        assert!(pack.panels as usize <= visits && places.is_multiple_of(pack.tile as usize));
        assert!(pack.rows <= pack.panels * PANEL as u32 && pack.panels > 0 && dim > 0);
        check_size(panels, pack.panels as usize * PANEL * dim, scalar);
        check_size(bins, places, 2);
        check_size(counts, BINS, 4);
        check_size(packed.centre, dim, 8);
        check_size(packed.packing, 1, size_of::<Packing>());
        check_size(packed.tiles, places * self.form.row_bytes(), 1);
        check_size(packed.rows, places * pack.pitch as usize, scalar);
        assert!(pack.pitch as usize <= self.form.columns());
        let mut launch = stream.launch_builder(&self.centre);
        launch.arg(panels.slice()).arg(packed.centre.slice());
        launch.arg(&pack.rows).arg(&pack.dim).arg(&pack.panels);
        // SAFETY: reads `panels` whole panels, writes an f64 per dimension, all checked above.
        unsafe { launch.launch(config(dim, 1024, 0)) }.map_err(failed("centre"))?;
        let mut launch = stream.launch_builder(&self.norms);
        launch.arg(panels.slice()).arg(packed.centre.slice()).arg(bins.slice()).arg(counts.slice());
        launch.arg(&pack.rows).arg(&pack.dim).arg(&pack.panels);
        // SAFETY: reads `panels` whole panels and the centre, writes a bin per place, all checked
        // above, and adds to counts of bins, which are below `BINS`.
        unsafe { launch.launch(config(pack.panels as usize, PANEL, 0)) }
            .map_err(failed("norms"))?;
        let mut launch = stream.launch_builder(&self.choose_scale);
        launch.arg(counts.slice()).arg(packed.centre.slice()).arg(packed.packing.slice());
        launch.arg(&pack.dim);
        // SAFETY: reads the counts of all `BINS` bins and the centre, writes one struct, all checked above.
        unsafe { launch.launch(config(1, 1024, 0)) }.map_err(failed("choose_scale"))?;
        let mut launch = stream.launch_builder(&self.pack_base);
        launch.arg(panels.slice()).arg(bins.slice()).arg(packed.centre.slice());
        launch.arg(packed.packing.slice()).arg(packed.tiles.slice()).arg(packed.rows.slice());
        launch.arg(pack);
        // SAFETY: visits below `panels` read their panel; all write the place of their position, of
        // `columns` fp16 numbers and `pitch` elements, for which there is room as checked above.
        unsafe { launch.launch(config(visits, PANEL, 0)) }.map_err(failed("pack_base")).map(drop)
    }

    /// Packs queries for a base, padded to whole blocks.
    pub(super) fn pack_queries(
        &self,
        stream: &Arc<CudaStream>,
        panels: &Buffer,
        centre: &Buffer,
        packing: &Buffer,
        packed: &QueryBuffers,
        pack: &Pack,
    ) -> Result<()> {
        let (scalar, rows, dim) = (scalar_bytes(self.kind), pack.rows as usize, pack.dim as usize);
        let places = packed.places;
        assert!(rows <= places && places.is_multiple_of(PANEL) && rows > 0);
        check_size(panels, rows.div_ceil(PANEL) * PANEL * dim, scalar);
        check_size(centre, dim, 8);
        check_size(packing, 1, size_of::<Packing>());
        check_size(&packed.tiles, places * self.form.row_bytes(), 1);
        check_size(&packed.rows, rows * pack.pitch as usize, scalar);
        check_size(&packed.query_norms, rows, QUERY_NORM_BYTES);
        check_size(&packed.thresholds, places, 4);
        let mut launch = stream.launch_builder(&self.pack_queries);
        launch.arg(panels.slice()).arg(centre.slice()).arg(packing.slice());
        launch.arg(packed.tiles.slice()).arg(packed.rows.slice()).arg(packed.query_norms.slice());
        launch.arg(packed.thresholds.slice()).arg(pack);
        // SAFETY: only rows below `rows` are read, and written to `rows` and `query_norms`; all places
        // have `columns` fp16 numbers and a threshold. Sizes are checked above.
        unsafe { launch.launch(config(places / PANEL, PARTS * PANEL, 0)) }
            .map_err(failed("pack_queries"))
            .map(drop)
    }

    /// Sets the filter thresholds of queries from the distance thresholds of their lists.
    pub(super) fn set_thresholds(
        &self,
        stream: &Arc<CudaStream>,
        packing: &Buffer,
        queries: &QueryBuffers,
        lists: &ListBuffers,
        scratch: &Scratch,
        dim: u32,
    ) -> Result<()> {
        let form = self.form;
        check_size(packing, 1, size_of::<Packing>());
        let test = Test {
            queries: lists.queries as u32,
            dim,
            steps: form.steps as u32,
            has_fp16_sums: u32::from(form.has_fp16_sums()),
            stored: form.stored() as u32,
            log: form.log,
            tile: form.query_tile() as u32,
            lost: form.lost(),
        };
        let tiles = address(stream, &queries.tiles);
        let mut launch = stream.launch_builder(&self.set_thresholds);
        launch.arg(lists.thresholds.slice()).arg(queries.query_norms.slice()).arg(packing.slice());
        launch.arg(queries.thresholds.slice()).arg(lists.counts.slice());
        launch.arg(scratch.state.slice()).arg(&tiles).arg(&test);
        let grid = config(lists.queries.div_ceil(THREADS), THREADS, 0);
        // SAFETY: `FilterKernels::check` holds: an element per query in each, and a stored row in
        // `tiles`.
        unsafe { launch.launch(grid) }.map_err(failed("set_thresholds")).map(drop)
    }
}
