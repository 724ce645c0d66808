//! Filtered passes.

use std::ops::Range;
use std::sync::Arc;

use super::super::launch_layouts::InPanels;
use super::super::launch_lists::{ListBuffers, Pass};
use super::super::passes::{PANEL, Tiles};
use super::buffers::{FilterBuffers, QueryBuffers, Scratch};
use super::form::room;
use super::launch::STATE_WORDS;
use super::packed::PackedBase;
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{Counted, LaunchThrottle};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::job::Job;

/// Rows up to this dimension are scanned so fast that more of them bound the lists.
const FEW_ELEMENTS: usize = 32;

/// The filtered passes of one call.
pub(in super::super) struct Filtering {
    base: Arc<PackedBase>,
    queries: QueryBuffers,
    scratch: Scratch,
}

impl Filtering {
    /// Packs queries for a base.
    pub(in super::super) fn new(
        device: &CudaDevice,
        base: Arc<PackedBase>,
        queries: InPanels<'_>,
        lists: &ListBuffers,
    ) -> Result<Self> {
        let CudaDevice { gpu, memory, .. } = device;
        let queries = base.queries(device, queries)?;
        let mut state = memory.allocate(&gpu.compute, STATE_WORDS * 4)?;
        let hits = memory.allocate(&gpu.compute, base.kernels.scratch_bytes(lists))?;
        gpu.compute.memset_zeros(state.slice_mut()).map_err(failed("cuMemsetD8Async"))?;
        Ok(Self { base, queries, scratch: Scratch { state, hits } })
    }

    /// The cuts of passes, and the panels that bound lists, for rows of `dim` elements.
    pub(in super::super) fn tiles(&self, dim: usize) -> Tiles {
        let kernels = &self.base.kernels;
        let bounding = if dim <= FEW_ELEMENTS { 8 } else { 4 };
        Tiles { cuts: kernels.form.cuts(), words: room(kernels.kind, 0, 1), bounding }
    }

    /// Merges the neighbours found in the panels of some visits, which are whole tiles, into the
    /// lists. If the filter is given up, which the device knows, nothing is merged. Queries whose
    /// hits overflow are recorded as overflowed.
    pub(in super::super) fn run(
        &self,
        gpu: &Gpu,
        lists: &mut ListBuffers,
        pass: &Pass,
        visits: &Range<usize>,
        throttle: &mut LaunchThrottle,
        job: &Job,
    ) -> Result<()> {
        let (kernels, stream) = (&self.base.kernels, &gpu.compute);
        let (form, rate) = (kernels.form, kernels.rate.clone());
        let Self { base, queries, scratch } = self;
        let buffers = FilterBuffers { base: &base.buffers, queries, scratch };
        base.set_thresholds(gpu, queries, lists, scratch, pass.dim)?;
        let of_a_tile = (lists.queries * form.tile * form.columns()) as f64;
        let together = ((rate.of_a_launch() / of_a_tile) as usize).max(1);
        let tiles = visits.start / form.panels()..visits.end.div_ceil(form.panels());
        debug_assert!(visits.start.is_multiple_of(form.tile / PANEL));
        for begin in tiles.clone().step_by(together) {
            job.check()?;
            let end = (begin + together).min(tiles.end);
            kernels.filter(stream, buffers, lists, begin..end, pass.k as usize)?;
            let work = (end - begin) as f64 * of_a_tile;
            throttle.launched(stream, &rate, work, Counted::Exactly)?;
        }
        kernels.judge(stream, lists, scratch, pass.k as usize)?;
        kernels.merge_hits(stream, buffers, lists, pass)
    }

    /// The word on the device that says whether the filter is given up.
    pub(in super::super) fn given_up(&self) -> &Buffer {
        &self.scratch.state
    }
}
