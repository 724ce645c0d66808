//! The structs of `kernels/dbscan`, which kernels read on the device.
#![allow(unsafe_code)]

/// Levels of the tree: 32⁷ tiles are more than rows can be numbered.
pub(super) const LEVELS: usize = 8;

/// A weight: the same struct as in `kernels/dbscan/rows.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Weight {
    pub(super) low: u64,
    pub(super) high: u64,
}

impl From<u128> for Weight {
    fn from(parts: u128) -> Self {
        Self { low: parts as u64, high: (parts >> 64) as u64 }
    }
}

/// A [`Direction`](crate::device::contract::Direction).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct DirectionOnDevice {
    pub(super) unit: f64,
    pub(super) mean: f64,
    pub(super) inverse: f64,
}

/// Counters of the work done, and of the items that a stage has left.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ProgressOnDevice {
    pub(super) next: u32,
    pub(super) unfinished: u32,
    pub(super) tested: u64,
    pub(super) pruned: u64,
    pub(super) joined: u64,
    pub(super) pairs: u64,
    pub(super) rechecked: u64,
}

/// The parameters of keys.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Keys {
    /// For each coordinate, `SPLITTERS` of f32.
    pub(super) splitters: u64,
    /// For each coordinate, a u32.
    pub(super) bits: u64,
}

/// Addresses on the device, and numbers; documented in `kernels/dbscan/rows.cuh`. The sizes are those
/// of the buffers that [`DbscanWorkspace`](super::workspace::DbscanWorkspace) allocates.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DbscanOnDevice {
    pub(super) rows: u64,
    pub(super) directions: u64,
    pub(super) weights: u64,
    pub(super) ends: u64,
    pub(super) first_tiles: u64,
    pub(super) box_dims: u64,
    pub(super) sorted: u64,
    pub(super) order: u64,
    pub(super) ranges: u64,
    pub(super) chunks: u64,
    pub(super) inverses: u64,
    pub(super) bits: u64,
    pub(super) boxes: u64,
    pub(super) totals: u64,
    pub(super) core: u64,
    pub(super) near: u64,
    pub(super) parents: u64,
    pub(super) known: u64,
    pub(super) least: u64,
    pub(super) offsets: u64,
    pub(super) sections: u64,
    pub(super) list: u64,
    pub(super) cursors: u64,
    pub(super) counted: u64,
    pub(super) firsts: u64,
    pub(super) is_core: u64,
    pub(super) progress: u64,
    pub(super) enough: Weight,
    pub(super) limit: f64,
    pub(super) sure: f64,
    pub(super) may: f64,
    pub(super) beyond: f32,
    pub(super) inside: f32,
    pub(super) dim: u32,
    pub(super) chunk_count: u32,
    pub(super) tile_count: u32,
    pub(super) group_count: u32,
    pub(super) cycles: u64,
    pub(super) node_starts: [u32; LEVELS],
    pub(super) box_starts: [u32; LEVELS],
    pub(super) products: ProductsOnDevice,
}

/// The operands of tensor-core products; documented in `kernels/dbscan/rows.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ProductsOnDevice {
    pub(super) slices: u64,
    pub(super) rounded: u64,
    pub(super) most: u64,
    pub(super) centre: u64,
    pub(super) unit: f64,
    pub(super) surely: f32,
    pub(super) maybe: f32,
    pub(super) count: u32,
    pub(super) unused: u32,
}

kernel_struct!(Weight, 16, { low: 0, high: 8 });
kernel_struct!(DirectionOnDevice, 24, { unit: 0, mean: 8, inverse: 16 });
kernel_struct!(ProgressOnDevice, 48, {
    next: 0, unfinished: 4, tested: 8, pruned: 16, joined: 24, pairs: 32, rechecked: 40,
});
kernel_struct!(Keys, 16, { splitters: 0, bits: 8 });
kernel_struct!(ProductsOnDevice, 56, {
    slices: 0, rounded: 8, most: 16, centre: 24, unit: 32, surely: 40, maybe: 44, count: 48,
    unused: 52,
});
kernel_struct!(DbscanOnDevice, 408, {
    rows: 0, directions: 8, weights: 16, ends: 24, first_tiles: 32, box_dims: 40, sorted: 48,
    order: 56, ranges: 64, chunks: 72, inverses: 80, bits: 88, boxes: 96, totals: 104, core: 112,
    near: 120, parents: 128, known: 136, least: 144, offsets: 152, sections: 160, list: 168,
    cursors: 176, counted: 184, firsts: 192, is_core: 200, progress: 208, enough: 216, limit: 232,
    sure: 240, may: 248, beyond: 256, inside: 260, dim: 264, chunk_count: 268, tile_count: 272,
    group_count: 276, cycles: 280, node_starts: 288, box_starts: 320, products: 352,
});
