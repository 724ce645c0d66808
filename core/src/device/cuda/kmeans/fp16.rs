//! The memory of rows and centroids as fp16.

use super::kernels::{RoundKernels, TILE, fp16_dim};
use super::row_type::{Element, RowType};
use super::structs::Fp16Buffers;
use super::swizzled_tiles::SWIZZLED_CENTROIDS;
use crate::device::contract::KMeansProblem;
use crate::error::Result;

/// The buffers for fp16 products of `count` rows with a problem's centroids, allocated by `place`.
pub(super) fn fp16_buffers(
    problem: &KMeansProblem,
    kernels: &RoundKernels,
    count: usize,
    origin: u64,
    place: &mut impl FnMut(usize) -> Result<u64>,
) -> Result<Fp16Buffers> {
    let (tiles, room_for_pairs) = (problem.k.next_multiple_of(TILE), (2 * count).max(4096));
    let RowType { element, dim, .. } = kernels.row_type;
    let (scale, is_double) = (scale(problem.farthest), element == Element::F64);
    let (row_bytes, centroid_bytes, results) = match kernels.swizzled_tiles() {
        Some(swizzled) => {
            (swizzled.row_bytes(count), swizzled.centroid_bytes(problem.k), place(count * 16)?)
        }
        None => (count * fp16_dim(dim) * 2, tiles * fp16_dim(dim) * 2, 0),
    };
    Ok(Fp16Buffers {
        fp16_rows: place(row_bytes)?,
        fp16_centroids: place(centroid_bytes)?,
        rounded: place(count * 8)?,
        half_squares: place(tiles * 4)?,
        far: place(problem.k.next_multiple_of(SWIZZLED_CENTROIDS) * 4)?,
        uncertain: place(count * 4)?,
        least: place(count * 4)?,
        nearest: place(count * 8)?,
        clusters: if is_double { place(count * 4)? } else { 0 },
        pairs: place(room_for_pairs * 8)?,
        distances: if is_double { place(room_for_pairs * 8)? } else { 0 },
        results,
        origin,
        scale,
        unscale: 1.0 / scale,
        absolute: kernels.row_type.absolute_error() * scale * scale,
        room_for_pairs: room_for_pairs as u32,
        padding: 0,
    })
}

impl Fp16Buffers {
    /// Scales elements by a further power of two of at most `times`.
    pub(super) fn scale_up(&mut self, times: f64) {
        let times = 2f64.powi(times.log2().floor() as i32);
        self.scale *= times;
        self.unscale /= times;
        self.absolute *= times * times;
    }
}

/// A power of two that scales elements below 256, given the maximum distance of an element from the
/// origin.
fn scale(farthest: f64) -> f64 {
    if farthest == 0.0 {
        return 1.0;
    }
    2f64.powi((7.0 - farthest.log2().floor()).clamp(-1000.0, 1000.0) as i32)
}
