//! The interface of rows to DBSCAN: coordinates for boxes, and tests of a row against a tile of rows.

use super::box_pruning::BoxPruning;
use super::tiles::{LANES, TileRows};
use crate::device::cpu::spatial_order::Coordinates;
use crate::error::Result;
use crate::job::Job;

/// The space of rows, before and after they are ordered; its coordinates are those of boxes.
pub(super) trait Space: Coordinates {
    /// Whether every pair of tiles is compared, once for the rows of both, as boxes prune little.
    const IN_PAIRS: bool = false;

    /// The tests of boxes of coordinates.
    fn pruning(&self) -> BoxPruning;

    /// A superset of the rows of a tile within eps of a row in a box; `None` if there is no fast way to find it.
    fn rows_near(&self, _tile: usize, _bounds: &[f64]) -> Option<u64> {
        None
    }

    /// Lays the rows out in tiles of [`LANES`], in this order.
    fn tile(&mut self, order: &[u32], job: &Job) -> Result<()>;

    /// For some rows of a tile, a superset of the rows of another tile within eps, as bits. If there are
    /// fewer others, each of their bits must be of a row that exists.
    fn candidates(&self, _rows: TileRows, _others: TileRows) -> [u64; LANES] {
        [u64::MAX; LANES]
    }

    /// `(near, open)`, as bits: the candidates in a tile within eps of a row, and the pairs left open by a faster
    /// arithmetic. Bits past the last row are undefined. `rows` are the tile's; once `most` candidates are within
    /// eps, the rest may be skipped.
    fn near(&self, row: usize, tile: usize, rows: &[u32], candidates: u64, most: u32)
    -> (u64, u64);
}
