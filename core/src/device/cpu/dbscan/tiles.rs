//! Tiles of rows, and bits for the rows of one.

/// Rows of a tile.
pub(super) const LANES: usize = 64;

/// A row: its tile, and its lane there.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileRow {
    pub tile: usize,
    pub lane: u32,
}

/// Some rows of a tile, as bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileRows {
    pub tile: usize,
    pub rows: u64,
}

/// The lowest bits, as many as there are rows.
pub(super) fn lowest(rows: usize) -> u64 {
    if rows < LANES { (1 << rows) - 1 } else { u64::MAX }
}

/// The lanes of these bits, ascending.
pub(super) fn lanes_of(mut bits: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let lane = bits.trailing_zeros();
        bits &= bits.wrapping_sub(1);
        (lane < u64::BITS).then_some(lane)
    })
}
