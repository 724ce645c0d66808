//! The launches that rank lists by the definition.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, PushKernelArg};

use super::Sides;
use super::launch::{SearchKernels, WARPS, WARPS_SHARED};
use super::launch_lists::ListBuffers;
use super::passes::PANEL;
use super::spec::entry_bytes;
use crate::device::contract::Outcome;
use crate::device::cuda::driver::launch::{address, check_size, config};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// Threads of a block of `measure_lists`.
const MEASURING: usize = 64;

/// Bytes of a direction: a mean, and one over a length.
pub(super) const DIRECTION_BYTES: usize = 2 * size_of::<f64>();

/// Rows of f32 of one side, as the definition of a distance reads them.
pub(super) struct ExactSide<'a> {
    /// The values, from this byte on, and the dimension of rows.
    pub(super) values: (&'a Buffer, usize),
    pub(super) dim: usize,
    pub(super) laid: Laid,
    /// The position of the first row among the values, and the number of rows.
    pub(super) first: usize,
    pub(super) rows: usize,
    /// The directions of the rows, from this byte on, if the metric compares directions.
    pub(super) directions: Option<(&'a Buffer, usize)>,
}

/// The layout of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Laid {
    /// Row-major.
    Plain,
    /// The panels of a base, to which rows are dealt.
    Dealt { panels: usize },
    /// The panels of queries, which may be negated.
    InOrder { negated: bool },
}

/// Parameters of lists by the definition.
#[derive(Debug, Clone, Copy)]
pub(super) struct Measured {
    /// Elements of a row.
    pub(super) dim: usize,
    /// Rows of each list, and the number of rows to keep.
    pub(super) per_list: usize,
    pub(super) keep: usize,
    /// The metric of the definition.
    pub(super) metric: Metric,
}

/// Buffers for lists that have been ranked.
pub(super) struct Ranked {
    pub(super) rows: Buffer,
    /// Of float64.
    pub(super) distances: Buffer,
    /// For each list, a lower bound on the sums of all rows outside it.
    pub(super) last: Buffer,
}

/// The same struct as in `kernels/search/exact.cuh`, which documents it: addresses on the device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct SideOnDevice {
    values: u64,
    directions: u64,
    first: u64,
    dim: u32,
    step: u32,
    dealt_to: u32,
    negated: u32,
}

kernel_struct!(SideOnDevice, 40, {
    values: 0, directions: 8, first: 16, dim: 24, step: 28, dealt_to: 32, negated: 36,
});

impl ExactSide<'_> {
    /// # Panics
    /// If there are not as many rows in the buffers.
    fn on_device(&self, stream: &Arc<CudaStream>) -> SideOnDevice {
        let (end, (values, offset)) = (self.first + self.rows, self.values);
        let (places, step, dealt_to, negated) = match self.laid {
            Laid::Plain => (end, 1, 0, false),
            Laid::Dealt { panels } => (panels * PANEL, PANEL, panels, false),
            Laid::InOrder { negated } => (end.next_multiple_of(PANEL), PANEL, 0, negated),
        };
        assert!(end <= places && u32::try_from(places).is_ok() && offset.is_multiple_of(4));
        check_size(values, offset / 4 + places * self.dim, 4);
        let directions = self.directions.map_or(0, |(directions, offset)| {
            assert!(offset.is_multiple_of(DIRECTION_BYTES));
            check_size(directions, offset / DIRECTION_BYTES + self.rows, DIRECTION_BYTES);
            address(stream, directions) + offset as u64
        });
        SideOnDevice {
            values: address(stream, values) + offset as u64,
            directions,
            first: self.first as u64,
            dim: self.dim as u32,
            step: step as u32,
            dealt_to: dealt_to as u32,
            negated: u32::from(negated),
        }
    }
}

impl SearchKernels {
    /// Entries of shared memory in which a list of this length is sorted.
    pub(super) fn room_to_rank(per_list: usize) -> usize {
        per_list.next_power_of_two().max(2)
    }

    /// Whether lists of this length can be ranked by the definition.
    pub(super) fn can_rank(&self, per_list: usize) -> bool {
        let bytes = Self::room_to_rank(per_list).saturating_mul(entry_bytes(ElementKind::F64));
        self.spec.kind == ElementKind::F32 && bytes <= self.shared_limit
    }

    /// Computes the distances of some entries of the lists, counted list after list, and writes
    /// them behind the entries of each list. Entries are rows of this base, or none.
    pub(super) fn measure_lists(
        &self,
        stream: &Arc<CudaStream>,
        sides: Sides<&ExactSide<'_>>,
        lists: &mut ListBuffers,
        pairs: Range<usize>,
        measured: &Measured,
    ) -> Result<()> {
        self.check(lists);
        let Measured { dim, per_list, metric, .. } = *measured;
        let Sides { queries, base } = sides;
        assert!(self.can_rank(per_list));
        assert!(metric.searched(ElementKind::F32) == self.spec.metric);
        assert!(per_list > 0 && per_list <= lists.k && 2 * per_list <= lists.slots);
        assert!(queries.rows == lists.queries && pairs.end <= lists.queries * per_list);
        assert!(dim <= queries.dim && dim <= base.dim && !pairs.is_empty() && base.rows > 0);
        let (queries, base) = (queries.on_device(stream), base.on_device(stream));
        // `Outcome` in `kernels/search/exact.cuh`.
        let outcome = match Outcome::of(metric) {
            Outcome::Sum => 0u32,
            Outcome::Root => 1,
            Outcome::Half => 2,
        };
        let (first, count, dim) = (pairs.start as u64, pairs.len() as u32, dim as u32);
        let (length, slots) = (per_list as u32, lists.slots as u32);
        let mut launch = stream.launch_builder(&self.measure_lists);
        launch.arg(&queries).arg(&base).arg(lists.entries.slice_mut()).arg(&first).arg(&count);
        launch.arg(&dim).arg(&length).arg(&slots).arg(&outcome);
        // SAFETY: reads the first `per_list` entries of lists below `queries`, and writes as many
        // numbers of 8 bytes, as entries of f32 have, behind them: within `slots`. Queries are
        // below `queries.rows`, and rows below `base.rows`, as the lists were only offered this
        // base, from number 0 on, and no entry is read as row 0; `on_device` checks that these are
        // there.
        unsafe { launch.launch(config(pairs.len().div_ceil(MEASURING), MEASURING, 0)) }
            .map_err(failed("measure_lists"))
            .map(drop)
    }

    /// Sorts some lists by the distances behind their entries.
    pub(super) fn rank_lists(
        &self,
        stream: &Arc<CudaStream>,
        lists: &ListBuffers,
        some: Range<usize>,
        measured: &Measured,
        to: &mut Ranked,
    ) -> Result<()> {
        self.check(lists);
        let Measured { per_list, keep, .. } = *measured;
        assert!(self.can_rank(per_list) && keep <= per_list && some.end <= lists.queries);
        assert!(per_list > 0 && per_list <= lists.k && 2 * per_list <= lists.slots);
        check_size(&to.rows, lists.queries * keep, 4);
        check_size(&to.distances, lists.queries * keep, 8);
        check_size(&to.last, lists.queries, 4);
        let room = Self::room_to_rank(per_list);
        let bytes = room * entry_bytes(ElementKind::F64);
        let (function, name, grid) = if bytes * WARPS <= WARPS_SHARED {
            let grid = config(some.len().div_ceil(WARPS), 32 * WARPS, bytes * WARPS);
            (&self.rank_by_warp, "rank_by_warp", grid)
        } else {
            (&self.rank_by_block, "rank_by_block", config(some.len(), 256, bytes))
        };
        let (first, end, length) = (some.start as u32, some.end as u32, per_list as u32);
        let (slots, keep, room) = (lists.slots as u32, keep as u32, room as u32);
        let mut launch = stream.launch_builder(function);
        launch.arg(lists.entries.slice()).arg(lists.worst.slice()).arg(to.rows.slice_mut());
        launch.arg(to.distances.slice_mut()).arg(to.last.slice_mut()).arg(&first).arg(&end);
        launch.arg(&length).arg(&slots).arg(&keep).arg(&room);
        // SAFETY: reads the first `per_list` entries of lists below `queries` and as many distances
        // behind them, within `slots`, and an entry of `worst` for each; writes `keep` rows and
        // distances for each, and a sum: sizes checked above. Each list is sorted in `room` entries
        // of the shared memory that the launch asks for.
        unsafe { launch.launch(grid) }.map_err(failed(name)).map(drop)
    }
}
