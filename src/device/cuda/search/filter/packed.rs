//! Both sides of a search as halves.

use std::sync::Arc;

use super::super::launch::Kernels as Scans;
use super::super::passes::{PANEL, panels, stride};
use super::super::spec::scalar_bytes;
use super::buffers::{BaseBuffers, QueryBuffers};
use super::form::{Form, pitch};
use super::launch::{BINS, Kernels, Pack, Packing};
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::memory::{Buffer, Memory};
use crate::device::cuda::driver::sys::{self, failed};
use crate::error::Result;

/// The halves of a test may not exceed this. See `FARTHEST` in `kernels/filter/thresholds.cuh`.
const LARGEST_TEST: f64 = 60_000.0;

/// Rows in panels, on either side of a search.
#[derive(Clone, Copy)]
pub(in super::super) struct InPanels<'a> {
    pub(in super::super) buffer: &'a Buffer,
    pub(in super::super) rows: usize,
    /// Elements of a row in a panel.
    pub(in super::super) dim: usize,
}

/// A base as halves, and its kernels.
pub(in super::super) struct PackedBase {
    pub(super) kernels: Arc<Kernels>,
    pub(super) buffers: BaseBuffers,
}

impl PackedBase {
    /// Packs a base, which is on the device. `None` if its rows have no use for halves: their norms are not
    /// finite, or products with the centre outweigh all others.
    pub(in super::super) fn of(
        gpu: &Gpu,
        memory: &Arc<Memory>,
        scans: &Scans,
        base: InPanels<'_>,
    ) -> Result<Option<Self>> {
        let (kind, stream) = (scans.spec().kind(), &gpu.compute);
        let (dim, form) = (base.dim, Form::of(base.dim));
        let kernels = Kernels::get(gpu, kind, scans.spec().metric(), form)?;
        let visits = panels(base.rows).next_multiple_of(form.panels());
        let places = visits * PANEL;
        let mut counts = memory.allocate(stream, BINS * 4)?;
        let bins = memory.allocate(stream, places * 2)?;
        let buffers = BaseBuffers {
            images: memory.allocate(stream, places * form.columns() * 2)?,
            rows: memory.allocate(stream, places * pitch(kind, dim) * scalar_bytes(kind))?,
            centre: memory.allocate(stream, dim * 8)?,
            packing: memory.allocate(stream, size_of::<Packing>())?,
        };
        stream.memset_zeros(counts.slice_mut()).map_err(failed("cuMemsetD8Async"))?;
        let pack = Pack {
            rows: base.rows as u32,
            dim: dim as u32,
            panels: panels(base.rows) as u32,
            stride: stride(panels(base.rows)) as u32,
            pitch: pitch(kind, dim) as u32,
            steps: form.steps as u32,
            log: form.log(),
            tile: form.tile() as u32,
        };
        kernels.pack_base(stream, base.buffer, (&bins, &counts), &buffers, (&pack, visits))?;
        let packing = sys::read::<Packing>(stream, buffers.packing.slice(), 1);
        let packing = packing.map_err(failed("cuMemcpyDtoHAsync"))?[0];
        let is_useful = packing.is_finite > 0 && f64::from_bits(packing.test) < LARGEST_TEST;
        Ok(is_useful.then_some(Self { kernels, buffers }))
    }

    /// Packs queries for this base.
    pub(super) fn queries(
        &self,
        gpu: &Gpu,
        memory: &Arc<Memory>,
        scans: &Scans,
        queries: InPanels<'_>,
    ) -> Result<QueryBuffers> {
        let (kind, form, stream) = (scans.spec().kind(), self.kernels.form, &gpu.compute);
        let (dim, rows) = (queries.dim, queries.rows);
        // Whole blocks, and whole panels.
        let places = rows.next_multiple_of(form.queries()).next_multiple_of(PANEL);
        let packed = QueryBuffers {
            images: memory.allocate(stream, places * form.columns() * 2)?,
            rows: memory.allocate(stream, rows * pitch(kind, dim) * scalar_bytes(kind))?,
            asked: memory.allocate(stream, rows * 32)?,
            thresholds: memory.allocate(stream, places * 4)?,
        };
        let pack = Pack {
            rows: rows as u32,
            dim: dim as u32,
            panels: panels(rows) as u32,
            stride: 0,
            pitch: pitch(kind, dim) as u32,
            steps: form.steps as u32,
            log: form.log(),
            tile: if form.is_wide() { PANEL as u32 } else { 0 },
        };
        self.kernels.pack_queries(
            stream,
            queries.buffer,
            &self.buffers,
            &packed,
            (&pack, places),
        )?;
        Ok(packed)
    }
}
