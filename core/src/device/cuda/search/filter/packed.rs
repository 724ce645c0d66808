//! Both sides of a search, packed for tensor-core products.

use std::sync::Arc;

use super::super::Sides;
use super::super::launch::SearchKernels;
use super::super::launch_layouts::InPanels;
use super::super::launch_lists::ListBuffers;
use super::super::passes::{PANEL, panels, stride};
use super::super::spec::{SearchSpec, device_dim, scalar_bytes};
use super::buffers::{BaseBuffers, PackedWith, QueryBuffers, Scratch};
use super::form::{Form, QUERY_NORM_BYTES, THRESHOLD_BYTES, pays, pitch};
use super::launch::{FilterKernels, Packer};
use super::launch_bits::{BitBase, BitPack};
use super::launch_numbers::{BINS, Fp16Base, Pack, Packing};
use crate::device::contract::Shape;
use crate::device::cuda::device::{CudaDevice, TensorCores};
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::{self, failed};
use crate::error::Result;
use crate::matrix::ElementKind;

/// The maximum test value. See `FARTHEST` in `kernels/filter/thresholds.cuh`.
const LARGEST_TEST: f64 = 60_000.0;

/// A packed base, and its kernels.
pub(in super::super) struct PackedBase {
    pub(super) kernels: Arc<FilterKernels>,
    pub(super) buffers: BaseBuffers,
}

impl PackedBase {
    /// Packs a base that is on the device. `None` if the filter is of no use for its rows: norms
    /// are not finite, or products with the centre outweigh all others.
    pub(in super::super) fn of(
        device: &CudaDevice,
        by: TensorCores,
        scans: &SearchKernels,
        base: InPanels<'_>,
    ) -> Result<Option<Self>> {
        match scans.spec.kind {
            ElementKind::Bits => Self::of_bits(device, by, scans, base).map(Some),
            _ => Self::of_numbers(device, by, scans, base),
        }
    }

    fn of_numbers(
        device: &CudaDevice,
        by: TensorCores,
        scans: &SearchKernels,
        base: InPanels<'_>,
    ) -> Result<Option<Self>> {
        let CudaDevice { gpu, memory, .. } = device;
        let (kind, stream) = (scans.spec.kind, &gpu.compute);
        let (dim, form) = (base.dim, Form::of_numbers(base.dim, by));
        let kernels = FilterKernels::get(gpu, kind, scans.spec.metric, form)?;
        let Packer::Numbers(packer) = &kernels.packer else {
            unreachable!("rows of numbers have a packer of numbers");
        };
        let (tiles, rows, visits) = allocate_base(device, kind, form, base)?;
        let mut counts = memory.allocate(stream, BINS * 4)?;
        let bins = memory.allocate(stream, visits * PANEL * 2)?;
        let centre = memory.allocate(stream, dim * 8)?;
        let packing = memory.allocate(stream, size_of::<Packing>())?;
        stream.memset_zeros(counts.slice_mut()).map_err(failed("cuMemsetD8Async"))?;
        let pack = Pack {
            rows: base.rows as u32,
            dim: dim as u32,
            panels: panels(base.rows) as u32,
            stride: stride(panels(base.rows)) as u32,
            pitch: pitch(kind, dim) as u32,
            steps: form.steps as u32,
            stored: form.stored() as u32,
            log: form.log,
            tile: form.tile as u32,
            padding: 0,
        };
        let to = Fp16Base {
            tiles: &tiles,
            rows: &rows,
            centre: &centre,
            packing: &packing,
            bins: &bins,
            counts: &counts,
        };
        packer.pack_base(stream, base.buffer, &to, &pack, visits)?;
        let read = sys::read::<Packing>(stream, packing.slice(), 1);
        let read = read.map_err(failed("cuMemcpyDtoHAsync"))?[0];
        let is_useful = read.is_finite > 0 && f64::from_bits(read.test) < LARGEST_TEST;
        let with = PackedWith::Fp16 { centre, packing };
        Ok(is_useful.then_some(Self { kernels, buffers: BaseBuffers { tiles, rows, with } }))
    }

    fn of_bits(
        device: &CudaDevice,
        by: TensorCores,
        scans: &SearchKernels,
        base: InPanels<'_>,
    ) -> Result<Self> {
        let CudaDevice { gpu, memory, .. } = device;
        let (metric, stream) = (scans.spec.metric, &gpu.compute);
        let form = Form::of_words(base.dim, by);
        let kernels = FilterKernels::get(gpu, ElementKind::Bits, metric, form)?;
        let Packer::Bits(packer) = &kernels.packer else {
            unreachable!("rows of bits have a packer of bits");
        };
        let (tiles, rows, visits) = allocate_base(device, ElementKind::Bits, form, base)?;
        let order = memory.allocate(stream, visits * PANEL * 4)?;
        let fewest = memory.allocate(stream, visits * 4)?;
        let stride = stride(panels(base.rows)) as u32;
        let pack = BitPack { stride, ..bit_pack(base.rows, base.dim, form, form.tile) };
        let to = BitBase { tiles: &tiles, rows: &rows, order: &order, fewest: &fewest };
        packer.pack_base(stream, base.buffer, &to, &pack)?;
        let with = PackedWith::Sorted { order, fewest };
        Ok(Self { kernels, buffers: BaseBuffers { tiles, rows, with } })
    }

    /// Packs queries for this base.
    pub(super) fn queries(
        &self,
        CudaDevice { gpu, memory, .. }: &CudaDevice,
        queries: InPanels<'_>,
    ) -> Result<QueryBuffers> {
        let (kind, form, stream) = (self.kernels.kind, self.kernels.form, &gpu.compute);
        let (dim, rows) = (queries.dim, queries.rows);
        // Padded to whole blocks, and to whole panels.
        let places = rows.next_multiple_of(form.queries()).next_multiple_of(PANEL);
        let packed = QueryBuffers {
            places,
            tiles: memory.allocate(stream, places * form.row_bytes())?,
            rows: memory.allocate(stream, rows * pitch(kind, dim) * scalar_bytes(kind))?,
            query_norms: memory.allocate(stream, rows * QUERY_NORM_BYTES)?,
            thresholds: memory.allocate(stream, places * THRESHOLD_BYTES)?,
        };
        match (&self.kernels.packer, &self.buffers.with) {
            (Packer::Numbers(packer), PackedWith::Fp16 { centre, packing }) => {
                let pack = Pack {
                    rows: rows as u32,
                    dim: dim as u32,
                    panels: panels(rows) as u32,
                    stride: 0,
                    pitch: pitch(kind, dim) as u32,
                    steps: form.steps as u32,
                    stored: form.stored() as u32,
                    log: form.log,
                    tile: form.query_tile() as u32,
                    padding: 0,
                };
                packer.pack_queries(stream, queries.buffer, centre, packing, &packed, &pack)?;
            }
            (Packer::Bits(packer), PackedWith::Sorted { .. }) => {
                let pack = bit_pack(rows, dim, form, form.query_tile());
                packer.pack_queries(stream, queries.buffer, &packed, &pack)?;
            }
            _ => unreachable!("rows are packed by the packer of their kind"),
        }
        Ok(packed)
    }

    /// Sets the filter thresholds of packed queries from the distance thresholds of their lists.
    pub(super) fn set_thresholds(
        &self,
        gpu: &Gpu,
        queries: &QueryBuffers,
        lists: &ListBuffers,
        scratch: &Scratch,
        dim: u32,
    ) -> Result<()> {
        let stream = &gpu.compute;
        self.kernels.check(queries, lists, scratch);
        match (&self.kernels.packer, &self.buffers.with) {
            (Packer::Numbers(packer), PackedWith::Fp16 { packing, .. }) => {
                packer.set_thresholds(stream, packing, queries, lists, scratch, dim)
            }
            (Packer::Bits(packer), PackedWith::Sorted { .. }) => {
                let form = self.kernels.form;
                let pack = bit_pack(lists.queries, dim as usize, form, form.query_tile());
                packer.set_thresholds(stream, queries, lists, scratch, &pack)
            }
            _ => unreachable!("rows are packed by the packer of their kind"),
        }
    }
}

/// Loads the kernels of the filter, if it pays for `queries` queries.
pub(in super::super) fn warm(device: &CudaDevice, spec: SearchSpec, shape: &Shape, queries: usize) {
    let (kind, metric) = (spec.kind, spec.metric);
    let Some(by) = device.tensor_cores(kind) else { return };
    let dim = spec.stored_dim(device_dim(kind, shape.dim) as u32) as usize;
    let form = match kind {
        ElementKind::Bits => Form::of_words(dim, by),
        _ => Form::of_numbers(dim, by),
    };
    let rows = Sides { queries, base: shape.base };
    if pays(&spec, shape.k, device.gpu.limits.shared, rows, false) {
        let _ = FilterKernels::get(&device.gpu, kind, metric, form);
    }
}

/// The layout of `rows` packed bit rows.
fn bit_pack(rows: usize, dim: usize, form: Form, tile: usize) -> BitPack {
    BitPack {
        rows: rows as u32,
        dim: dim as u32,
        panels: panels(rows) as u32,
        stride: 0,
        pitch: pitch(ElementKind::Bits, dim) as u32,
        steps: form.stored() as u32,
        log: form.log,
        tile: tile as u32,
    }
}

/// Allocates a base's swizzled tiles and rows; also returns the number of its panels, padded to
/// whole tiles.
fn allocate_base(
    CudaDevice { gpu, memory, .. }: &CudaDevice,
    kind: ElementKind,
    form: Form,
    base: InPanels<'_>,
) -> Result<(Buffer, Buffer, usize)> {
    let visits = panels(base.rows).next_multiple_of(form.panels());
    let places = visits * PANEL;
    let row = pitch(kind, base.dim) * scalar_bytes(kind);
    Ok((
        memory.allocate(&gpu.compute, places * form.row_bytes())?,
        memory.allocate(&gpu.compute, places * row)?,
        visits,
    ))
}
