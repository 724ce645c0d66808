//! Kernel launches that pack rows of bits; as in `launch.rs`.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaModule, CudaStream, DeviceRepr, PushKernelArg};

use super::super::launch::Lists;
use super::super::passes::PANEL;
use super::buffers::{QueryBuffers, Scratch};
use super::form::{ASKED_BYTES, Form};
use crate::device::cuda::driver::launch::{check_size, config, function};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;

/// Threads of most kernels.
const THREADS: usize = 256;

/// The kernels that pack rows of bits.
#[derive(Debug)]
pub(super) struct BitPacker {
    form: Form,
    pack_base: CudaFunction,
    pack_queries: CudaFunction,
    set_thresholds: CudaFunction,
}

/// The kernel that looks at a base, before the form of the others is known.
#[derive(Debug)]
pub(super) struct BitCounter(CudaFunction);

/// How many bits rows have. The same struct as in `kernels/filter/bits.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct BitRange {
    pub(super) most: u32,
    most_clear: u32,
}

// SAFETY: a C struct of integers, laid out as the kernels declare it; every pattern of bits is a value.
unsafe impl DeviceRepr for BitRange {}

/// How rows of bits are packed. The same struct as in `kernels/filter/bits.cuh`, which documents it.
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
    pub(super) most: u32,
    pub(super) lanes: u32,
}

// SAFETY: a C struct of integers, laid out as the kernels declare it.
unsafe impl DeviceRepr for BitPack {}

/// The structs of the kernels.
const _: () = assert!(size_of::<BitRange>() == 8 && size_of::<BitPack>() == 40);

impl BitRange {
    /// Words of lanes that rows of so many words of bits need.
    pub(super) fn lanes(&self, dim: usize) -> usize {
        let fewest = (dim as u32 * 32).saturating_sub(self.most_clear);
        (self.most.saturating_sub(fewest) as usize).div_ceil(2).div_ceil(32)
    }
}

impl BitCounter {
    /// The kernel of a module.
    pub(super) fn load(module: &Arc<CudaModule>) -> Result<Self> {
        Ok(Self(function(module, "count_bits")?))
    }

    /// Counts the bits of a base's rows, in panels, into a range, which is zeros at first.
    pub(super) fn count(
        &self,
        stream: &Arc<CudaStream>,
        panels: &Buffer,
        range: &Buffer,
        (rows, dim): (usize, usize),
    ) -> Result<()> {
        let count = rows.div_ceil(PANEL);
        check_size(panels, count * PANEL * dim, 4);
        check_size(range, 1, size_of::<BitRange>());
        let (rows, dim, all) = (rows as u32, dim as u32, count as u32);
        let mut launch = stream.launch_builder(&self.0);
        launch.arg(panels.slice()).arg(range.slice()).arg(&rows).arg(&dim).arg(&all);
        // SAFETY: reads whole panels, writes one struct; sizes are checked above.
        unsafe { launch.launch(config(count, PANEL, 0)) }.map_err(failed("count_bits"))?;
        Ok(())
    }
}

impl BitPacker {
    /// The kernels of a module.
    pub(super) fn load(module: &Arc<CudaModule>, form: Form) -> Result<Self> {
        Ok(Self {
            form,
            pack_base: function(module, "pack_base")?,
            pack_queries: function(module, "pack_queries")?,
            set_thresholds: function(module, "set_thresholds")?,
        })
    }

    /// Packs a base.
    pub(super) fn pack_base(
        &self,
        stream: &Arc<CudaStream>,
        panels: &Buffer,
        (images, rows): (&Buffer, &Buffer),
        (pack, visits): (&BitPack, usize),
    ) -> Result<()> {
        let places = visits * PANEL;
        self.check(pack);
        assert!(pack.panels as usize <= visits && places.is_multiple_of(pack.tile as usize));
        check_size(panels, pack.panels as usize * PANEL * pack.dim as usize, 4);
        check_size(images, places * self.form.row_bytes(), 1);
        check_size(rows, places * pack.pitch as usize, 4);
        let mut launch = stream.launch_builder(&self.pack_base);
        launch.arg(panels.slice()).arg(images.slice()).arg(rows.slice()).arg(pack);
        // SAFETY: visits below `panels` read their panel; all write the place of their position. Sizes are
        // checked above.
        unsafe { launch.launch(config(visits, PANEL, 0)) }.map_err(failed("pack_base"))?;
        Ok(())
    }

    /// Packs queries, and as many rows as fill blocks.
    pub(super) fn pack_queries(
        &self,
        stream: &Arc<CudaStream>,
        panels: &Buffer,
        packed: &QueryBuffers,
        (pack, places): (&BitPack, usize),
    ) -> Result<()> {
        let rows = pack.rows as usize;
        self.check(pack);
        assert!(rows <= places && places.is_multiple_of(PANEL));
        check_size(panels, rows.div_ceil(PANEL) * PANEL * pack.dim as usize, 4);
        check_size(&packed.images, places * self.form.row_bytes(), 1);
        check_size(&packed.rows, rows * pack.pitch as usize, 4);
        check_size(&packed.asked, rows, ASKED_BYTES);
        check_size(&packed.thresholds, places, 4);
        let mut launch = stream.launch_builder(&self.pack_queries);
        launch.arg(panels.slice()).arg(packed.images.slice()).arg(packed.rows.slice());
        launch.arg(packed.asked.slice()).arg(packed.thresholds.slice()).arg(pack);
        // SAFETY: only rows below `rows` are read, and written to `rows` and `asked`; all places have a
        // stored row and a threshold. Sizes are checked above.
        unsafe { launch.launch(config(places / PANEL, PANEL, 0)) }
            .map_err(failed("pack_queries"))?;
        Ok(())
    }

    /// Sets the thresholds of queries by the reaches of their lists, and their lanes.
    pub(super) fn set_thresholds(
        &self,
        stream: &Arc<CudaStream>,
        queries: &QueryBuffers,
        lists: &Lists,
        scratch: &Scratch,
        pack: &BitPack,
    ) -> Result<()> {
        self.check(pack);
        assert!(pack.rows as usize == lists.queries);
        let mut launch = stream.launch_builder(&self.set_thresholds);
        launch.arg(lists.reach.slice()).arg(queries.asked.slice());
        launch.arg(queries.thresholds.slice()).arg(lists.counts.slice());
        launch.arg(scratch.state.slice()).arg(queries.images.slice()).arg(pack);
        let grid = config(lists.queries.div_ceil(THREADS), THREADS, 0);
        // SAFETY: `Kernels::check` holds: an element per query in each, and a stored row in images.
        unsafe { launch.launch(grid) }.map_err(failed("set_thresholds"))?;
        Ok(())
    }

    /// Checks that rows are as wide as the form says.
    fn check(&self, pack: &BitPack) {
        assert!(pack.rows > 0 && pack.dim > 0 && pack.pitch >= pack.dim);
        assert!(pack.steps as usize == self.form.stored() && pack.pitch.is_multiple_of(4));
        assert!((pack.dim + pack.lanes) as usize <= self.form.steps * 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_for_half_of_the_range() {
        let lanes = |most, most_clear| BitRange { most, most_clear }.lanes(4);
        assert_eq!(lanes(64, 64), 0);
        assert_eq!(lanes(65, 64), 1);
        assert_eq!(lanes(128, 64), 1);
        assert_eq!(lanes(128, 65), 2);
        assert_eq!(lanes(128, 128), 2);
        assert_eq!(lanes(0, 0), 0);
    }
}
