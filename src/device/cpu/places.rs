//! Where the rows of a base lie in its panels.

use super::simd::panels::ROWS;

/// With fewer, rows lie as given.
const LEAST_ROWS: usize = 256;

/// The places of rows: 64 to a panel, some of them perhaps empty.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    rows: usize,
    /// Rows from one place of a panel to the next.
    apart: Option<usize>,
}

impl Places {
    /// Each row at the place of its own number.
    pub fn as_given(rows: usize) -> Self {
        Self { rows, apart: None }
    }

    /// The rows of a panel far apart, if there are many: every panel is then a sample of all rows, unless
    /// their order is periodic.
    pub fn far_apart(rows: usize) -> Self {
        let apart = (rows >= LEAST_ROWS).then(|| rows.div_ceil(ROWS));
        Self { rows, apart }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Whether rows that follow each other lie in panels that do, at the same place of each.
    pub fn are_far_apart(&self) -> bool {
        self.apart.is_some()
    }

    /// How many places there are.
    pub fn count(&self) -> usize {
        self.apart.map_or(self.rows, |panels| panels * ROWS)
    }

    /// The row at a place; there is none if it is not below the number of rows.
    #[inline(always)]
    pub fn row(&self, place: usize) -> usize {
        match self.apart {
            Some(panels) => place % ROWS * panels + place / ROWS,
            None => place,
        }
    }

    /// How many rows lie at some whole panels' places.
    pub fn rows_at(&self, places: std::ops::Range<usize>) -> usize {
        match self.apart {
            Some(panels) => {
                // The first panels have one more than the others.
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
            for places in [Places::as_given(rows), Places::far_apart(rows)] {
                let found: Vec<_> = (0..places.count()).map(|place| places.row(place)).collect();
                let mut there: Vec<_> = found.iter().copied().filter(|row| *row < rows).collect();
                there.sort_unstable();
                assert!(there.into_iter().eq(0..rows), "{rows}");
                assert!(places.count() < rows.next_multiple_of(ROWS) + 1);
                for start in (0..places.count()).step_by(ROWS) {
                    let range = start..places.count().min(start + ROWS);
                    let own = found[range.clone()].iter().filter(|row| **row < rows);
                    assert_eq!(own.count(), places.rows_at(range), "{rows}");
                }
            }
        }
    }
}
