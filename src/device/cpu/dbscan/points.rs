//! Rows as DBSCAN sees them: coordinates for boxes, and a test of a row against a tile of rows.

use super::reach::Reach;
use super::tiles::LANES;
use crate::device::cpu::order::Coordinates;
use crate::error::Result;
use crate::job::Job;

/// Rows, before and after they are ordered; their coordinates are those of boxes.
pub(super) trait Points: Coordinates {
    /// Whether boxes rule so little out that every pair of tiles is compared, once for the rows of both.
    const IN_PAIRS: bool = false;

    /// What boxes of coordinates decide.
    fn reach(&self) -> Reach;

    /// Those rows of a tile that may be within eps of a row in a box, and perhaps others; `None` if there
    /// is no fast way to find them.
    fn rows_near(&self, _tile: usize, _bounds: &[f64]) -> Option<u64> {
        None
    }

    /// Lays the rows out in tiles of [`LANES`], in this order.
    fn tile(&mut self, order: &[u32], job: &Job) -> Result<()>;

    /// For some rows of a tile, a bit for each of some rows of another that may be within eps, and
    /// perhaps for others. Where fewer rows are asked for of the other, all of them must be there.
    fn candidates(&self, _own: (usize, u64), _other: (usize, u64)) -> [u64; LANES] {
        [u64::MAX; LANES]
    }

    /// A bit for each of a row's candidates in a tile that is within eps of it; those past the last row
    /// mean nothing. `rows` are the tile's. Where there are `most` or more, so many of them are enough.
    /// Also the pairs that a faster arithmetic left open.
    fn near(&self, row: usize, tile: usize, rows: &[u32], candidates: u64, most: u32)
    -> (u64, u64);
}
