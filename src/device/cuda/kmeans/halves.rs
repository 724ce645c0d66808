//! The memory of rows and centroids as fp16.

use super::images::IMAGE_CENTROIDS;
use super::kernels::{RoundKernels, TILE, half_dim};
use super::space::{Element, Space};
use super::structs::Halves;
use crate::device::contract::KMeansProblem;
use crate::error::Result;

/// The buffers for fp16 products of `count` rows with a problem's centroids, allocated by `place`.
pub(super) fn of_tiles(
    problem: &KMeansProblem,
    (kernels, count): (&RoundKernels, usize),
    origin: u64,
    place: &mut impl FnMut(usize) -> Result<u64>,
) -> Result<Halves> {
    let (tiles, room_for_pairs) = (problem.k.next_multiple_of(TILE), (2 * count).max(4096));
    let Space { element, dim, .. } = kernels.space;
    let (scale, is_double) = (scale(problem.farthest), element == Element::F64);
    let (row_bytes, centroid_bytes, found) = match kernels.images() {
        Some(images) => {
            (images.row_bytes(count), images.centroid_bytes(problem.k), place(count * 16)?)
        }
        None => (count * half_dim(dim) * 2, tiles * half_dim(dim) * 2, 0),
    };
    Ok(Halves {
        half_rows: place(row_bytes)?,
        half_centroids: place(centroid_bytes)?,
        rounded: place(count * 8)?,
        half_squares: place(tiles * 4)?,
        far: place(problem.k.next_multiple_of(IMAGE_CENTROIDS) * 4)?,
        uncertain: place(count * 4)?,
        least: place(count * 4)?,
        nearest: place(count * 8)?,
        clusters: if is_double { place(count * 4)? } else { 0 },
        pairs: place(room_for_pairs * 8)?,
        distances: if is_double { place(room_for_pairs * 8)? } else { 0 },
        found,
        origin,
        scale,
        unscale: 1.0 / scale,
        absolute: kernels.space.absolute_error() * scale * scale,
        room_for_pairs: room_for_pairs as u32,
        padding: 0,
    })
}

impl Halves {
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
