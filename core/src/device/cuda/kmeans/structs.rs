//! The structs of `kernels/kmeans`, which kernels read on the device.
#![allow(unsafe_code)]

use crate::device::contract::{Labels, StopReason};

/// The same struct as in `kernels/kmeans/rounds.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Status {
    pub(super) end: u32,
    pub(super) iterations: u32,
    pub(super) current: u32,
    pub(super) moved_last: u32,
    pub(super) moved: u32,
    pub(super) uncertain: u32,
    pub(super) pairs: u32,
    pub(super) empty: u32,
    pub(super) arrived: u32,
    pub(super) largest_row: u32,
    pub(super) typical_row: u32,
    pub(super) largest_centroid: u32,
    pub(super) largest_error: u32,
    pub(super) has_far: u32,
    pub(super) unchanged: u32,
    pub(super) listed: u32,
    pub(super) drift: f32,
    pub(super) padding: u32,
    pub(super) rechecked: u64,
}

/// Set in the label of an undecided row, after the last round.
const UNDECIDED: u32 = 1 << 31;

/// The labels that kernels write after the last round, with undecided rows separated.
pub(super) fn labels_of(mut labels: Vec<u32>) -> Labels {
    let is_open = |(_, label): &(u32, &u32)| *label & UNDECIDED != 0;
    let undecided = (0..).zip(&labels).filter(is_open).map(|(row, _)| row).collect();
    labels.iter_mut().for_each(|label| *label &= !UNDECIDED);
    Labels { labels, undecided: Some(undecided) }
}

/// Values of [`Status::end`]: names in `kernels/kmeans/rounds.cuh`.
const GOING_ON: u32 = 0;
const STABLE: u32 = 1;
const CONVERGED: u32 = 2;
const EMPTY_CLUSTER: u32 = 3;
const GIVEN_UP: u32 = 4;

impl Status {
    pub(super) fn is_going_on(&self) -> bool {
        self.end == GOING_ON
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.end == GIVEN_UP
    }

    /// The reason why rounds stopped.
    pub(super) fn stop_reason(&self) -> Option<StopReason> {
        match self.end {
            STABLE => Some(StopReason::Stable),
            CONVERGED => Some(StopReason::Converged),
            EMPTY_CLUSTER => Some(StopReason::EmptyCluster),
            _ => None,
        }
    }
}

/// The rows and the state of rounds.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RoundsOnDevice {
    pub(super) status: u64,
    pub(super) rows: u64,
    /// `count` of u32, or null.
    pub(super) numbers: u64,
    /// 2 × k × dim of the elements' type.
    pub(super) centroids: u64,
    /// `count` of u32.
    pub(super) labels: u64,
    /// `count` of two u32.
    pub(super) moved: u64,
    /// `count` of f32, k of f32, `count` of u32; null where all rows are compared.
    pub(super) gaps: u64,
    pub(super) drifts: u64,
    pub(super) listed: u64,
    pub(super) count: u32,
    pub(super) k: u32,
}

/// Sums of clusters, and the convergence test.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SumsOnDevice {
    /// A f64 for each row, or null.
    pub(super) weights: u64,
    /// k × [width](super::row_type::RowType::width) of i64, parts of steps only for some
    /// [types of rows](super::row_type::RowType::has_parts); and k of i64.
    pub(super) sums: u64,
    pub(super) parts: u64,
    pub(super) counts: u64,
    /// k × width × [bins](super::row_type::RowType::bins) of i64, and k of u32.
    pub(super) wide: u64,
    pub(super) is_wide: u64,
    /// k of u32, and of u64, for some [types of rows](super::row_type::RowType::has_singles).
    pub(super) first_rows: u64,
    pub(super) differing: u64,
    /// Width of f64.
    pub(super) inverse: u64,
    /// k of f64.
    pub(super) shifts: u64,
    pub(super) limit: f64,
    pub(super) tolerance: f64,
}

/// Buffers of `AssignStrategy::SortMeans`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SortedCentroids {
    /// k × k of u64, and a u32 for each place in the order.
    pub(super) lists: u64,
    pub(super) sorted_counts: u64,
}

/// Buffers and numbers of `AssignStrategy::Tiles`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Fp16Buffers {
    /// `count` rows, and whole tiles of centroids, of [`fp16_dim`](super::kernels::fp16_dim); for
    /// warpgroups, whole swizzled tiles of both.
    pub(super) fp16_rows: u64,
    pub(super) fp16_centroids: u64,
    /// `count` of two f32.
    pub(super) rounded: u64,
    /// Whole tiles of f32, and whole swizzled tiles of u32.
    pub(super) half_squares: u64,
    pub(super) far: u64,
    /// `count` of u32, f32 and u64; of f64 also of u32.
    pub(super) uncertain: u64,
    pub(super) least: u64,
    pub(super) nearest: u64,
    pub(super) clusters: u64,
    /// `room_for_pairs` of two u32; of f64 also of f64.
    pub(super) pairs: u64,
    pub(super) distances: u64,
    /// `count` of four u32, or null.
    pub(super) results: u64,
    /// dim of f64.
    pub(super) origin: u64,
    pub(super) scale: f64,
    pub(super) unscale: f64,
    pub(super) absolute: f64,
    pub(super) room_for_pairs: u32,
    pub(super) padding: u32,
}

kernel_struct!(Status, 80, {
    end: 0, iterations: 4, current: 8, moved_last: 12, moved: 16, uncertain: 20, pairs: 24,
    empty: 28, arrived: 32, largest_row: 36, typical_row: 40, largest_centroid: 44,
    largest_error: 48, has_far: 52, unchanged: 56, listed: 60, drift: 64, padding: 68,
    rechecked: 72,
});
kernel_struct!(RoundsOnDevice, 80, {
    status: 0, rows: 8, numbers: 16, centroids: 24, labels: 32, moved: 40, gaps: 48, drifts: 56,
    listed: 64, count: 72, k: 76,
});
kernel_struct!(SumsOnDevice, 96, {
    weights: 0, sums: 8, parts: 16, counts: 24, wide: 32, is_wide: 40, first_rows: 48,
    differing: 56, inverse: 64, shifts: 72, limit: 80, tolerance: 88,
});
kernel_struct!(SortedCentroids, 16, { lists: 0, sorted_counts: 8 });
kernel_struct!(Fp16Buffers, 136, {
    fp16_rows: 0, fp16_centroids: 8, rounded: 16, half_squares: 24, far: 32, uncertain: 40,
    least: 48, nearest: 56, clusters: 64, pairs: 72, distances: 80, results: 88, origin: 96,
    scale: 104, unscale: 112, absolute: 120, room_for_pairs: 128, padding: 132,
});
