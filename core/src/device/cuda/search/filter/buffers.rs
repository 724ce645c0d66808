//! The device buffers of the filter.

use crate::device::cuda::driver::memory::Buffer;

/// A packed base: its swizzled tiles, its row-major rows in the order of visits, and
/// the parameters of its packing.
pub(super) struct BaseBuffers {
    pub(super) tiles: Buffer,
    pub(super) rows: Buffer,
    pub(super) with: PackedWith,
}

/// The parameters of a base's packing.
pub(super) enum PackedWith {
    /// Numbers, as fp16: the centre of the base, and the scale and error bounds of its rows.
    Fp16 { centre: Buffer, packing: Buffer },
    /// Bits: the positions of rows before they were sorted, and the fewest set bits of a row of
    /// each tile.
    Sorted { order: Buffer, fewest: Buffer },
}

/// Queries, packed for one base, in `places` places: padded to whole blocks.
pub(super) struct QueryBuffers {
    pub(super) places: usize,
    pub(super) tiles: Buffer,
    pub(super) rows: Buffer,
    pub(super) query_norms: Buffer,
    pub(super) thresholds: Buffer,
}

/// The scratch memory of a call's passes, beside lists and rows.
pub(super) struct Scratch {
    /// The flag that the filter is given up, and counters; zeros at first.
    pub(super) state: Buffer,
    /// Hits of each thread.
    pub(super) hits: Buffer,
}

/// All buffers of a filtered pass, beside lists.
#[derive(Clone, Copy)]
pub(super) struct FilterBuffers<'a> {
    pub(super) base: &'a BaseBuffers,
    pub(super) queries: &'a QueryBuffers,
    pub(super) scratch: &'a Scratch,
}
