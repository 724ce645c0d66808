//! What the filter keeps on the device.

use crate::device::cuda::driver::memory::Buffer;

/// A base, its rows in the order of visits, and what they were packed with.
pub(super) struct BaseBuffers {
    pub(super) images: Buffer,
    pub(super) rows: Buffer,
    pub(super) with: PackedWith,
}

/// What rows were packed with.
pub(super) enum PackedWith {
    /// Numbers: the centre of the base, and what was found of its rows.
    Halves { centre: Buffer, packing: Buffer },
    /// Bits: the positions of rows before they were sorted, and the fewest bits of a row of each tile.
    Sorted { order: Buffer, fewest: Buffer },
}

/// Queries, packed for one base.
pub(super) struct QueryBuffers {
    pub(super) images: Buffer,
    pub(super) rows: Buffer,
    pub(super) asked: Buffer,
    pub(super) thresholds: Buffer,
}

/// What passes of a call use beside lists and rows.
pub(super) struct Scratch {
    /// Whether the filter has been given up, and counters; zeros at first.
    pub(super) state: Buffer,
    /// Hits of threads.
    pub(super) hits: Buffer,
}
