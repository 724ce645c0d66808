//! The rows that a query has visited, and their scores.

use crate::algo::knn::row_filter::RowFilter;

/// Scratch memory of a query.
pub(super) struct VisitedRows {
    /// A bit for each row, set if it was seen or is not selected.
    pub seen: Vec<u64>,
    /// The score of each row; empty without scoring.
    pub scores: Vec<f64>,
}

impl VisitedRows {
    /// Marks a row as seen; returns whether it is seen for the first time.
    #[inline(always)]
    pub fn is_new(&mut self, row: u32) -> bool {
        let (word, bit) = (&mut self.seen[row as usize / 64], 1 << (row % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Unmarks `rows`, which must be all rows that were marked. Rows that are not selected stay
    /// marked.
    pub fn forget(&mut self, rows: &[u32], row_filter: Option<&RowFilter>) {
        for row in rows {
            let word = &mut self.seen[*row as usize / 64];
            match row_filter {
                None => *word = 0,
                Some(_) => *word &= !(1 << (row % 64)),
            }
        }
    }
}
