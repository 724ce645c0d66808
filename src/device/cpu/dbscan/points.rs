//! Rows as DBSCAN sees them: coordinates for boxes, and a test of a row against a tile of rows.

use crate::error::Result;
use crate::job::Job;

/// Rows, before and after they are ordered.
pub(super) trait Points: Sync {
    /// Number of rows.
    fn rows(&self) -> usize;

    /// Coordinates of a row in the space of boxes.
    fn coordinates(&self) -> usize;

    /// A coordinate of a row.
    fn coordinate(&self, row: usize, i: usize) -> f64;

    /// Those rows of a tile that may be within eps of a row in a box, and perhaps others; `None` if there
    /// is no fast way to find them.
    fn rows_near(&self, _tile: usize, _bounds: &[f64]) -> Option<u64> {
        None
    }

    /// Lays the rows out in tiles of [`LANES`](super::tree::LANES), in this order.
    fn tile(&mut self, order: &[u32], job: &Job) -> Result<()>;

    /// A bit for each row of a tile that is within eps of this row; those past the last row mean
    /// nothing. `rows` are the tile's. Also whether the faster arithmetic left some open.
    fn near(&self, row: usize, tile: usize, rows: &[u32]) -> (u64, bool);
}
