//! The permutation of base rows in panels: the place of each row.

use super::simd::panels::ROWS;

/// With fewer rows, each lies at the place of its own number.
const LEAST_ROWS: usize = 256;

/// The permutation of rows, which maps places to rows: a panel has 64 places, some of which may be empty.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowPermutation {
    rows: usize,
    /// The difference of the row numbers at neighbouring places of a panel; `None` for rows as given.
    stride: Option<usize>,
}

impl RowPermutation {
    /// Each row at the place of its own number.
    pub fn identity(rows: usize) -> Self {
        Self { rows, stride: None }
    }

    /// Rows of a panel whose numbers are far apart, from [`LEAST_ROWS`] rows on: each panel is then a sample of all
    /// rows, unless their order is periodic.
    pub fn strided(rows: usize) -> Self {
        let stride = (rows >= LEAST_ROWS).then(|| rows.div_ceil(ROWS));
        Self { rows, stride }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Whether consecutive rows lie in consecutive panels, at the same place of each.
    pub fn is_strided(&self) -> bool {
        self.stride.is_some()
    }

    /// Number of places.
    pub fn count(&self) -> usize {
        self.stride.map_or(self.rows, |panels| panels * ROWS)
    }

    /// The row at a place; the place is empty unless the result is below the number of rows.
    #[inline(always)]
    pub fn row(&self, place: usize) -> usize {
        match self.stride {
            Some(panels) => place % ROWS * panels + place / ROWS,
            None => place,
        }
    }

    /// Number of rows at these places, which are those of whole panels.
    pub fn rows_at(&self, places: std::ops::Range<usize>) -> usize {
        match self.stride {
            Some(panels) => {
                // The first `rows % panels` panels have one row more.
                let (start, end) = (places.start / ROWS, places.end / ROWS);
                let longer = (self.rows % panels).clamp(start, end) - start;
                self.rows / panels * (end - start) + longer
            }
            None => places.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_one_place() {
        for rows in [0, 1, 63, 255, 256, 257, 1000, 4095, 4096, 4097, 5000] {
            for places in [RowPermutation::identity(rows), RowPermutation::strided(rows)] {
                let rows_by_place: Vec<_> =
                    (0..places.count()).map(|place| places.row(place)).collect();
                let mut there: Vec<_> =
                    rows_by_place.iter().copied().filter(|row| *row < rows).collect();
                there.sort_unstable();
                assert!(there.into_iter().eq(0..rows), "{rows}");
                assert!(places.count() < rows.next_multiple_of(ROWS) + 1);
                for start in (0..places.count()).step_by(ROWS) {
                    let range = start..places.count().min(start + ROWS);
                    let panel_rows = rows_by_place[range.clone()].iter().filter(|row| **row < rows);
                    assert_eq!(panel_rows.count(), places.rows_at(range), "{rows}");
                }
            }
        }
    }
}
