//! A filter on the rows of a base.

/// A filter on rows: the selected rows of a base, in ascending order. Memory: 4 bytes per selected
/// row, and 1.5 bits per row of the base.
#[derive(Debug, PartialEq, Eq)]
pub struct RowFilter {
    rows: Vec<u32>,
    /// A bit for each row of the base, set if it is selected.
    bits: Vec<u64>,
    /// Number of selected rows before each word of `bits`.
    before: Vec<u32>,
}

impl RowFilter {
    /// Selects the rows `chosen` of a base of `all` rows; duplicates count once.
    pub fn new(chosen: impl IntoIterator<Item = u32>, all: usize) -> Self {
        let mut bits = vec![0u64; all.div_ceil(64)];
        chosen.into_iter().for_each(|row| bits[row as usize / 64] |= 1 << (row % 64));
        let mut count = 0;
        let counted = |word: &u64| {
            count += word.count_ones();
            count - word.count_ones()
        };
        let before = bits.iter().map(counted).collect();
        let is_set = |row: &u32| bits[*row as usize / 64] >> (row % 64) & 1 == 1;
        let rows = (0..all as u32).filter(is_set).collect();
        Self { rows, bits, before }
    }

    /// Bytes of a filter that selects `rows` of `all` rows.
    pub fn bytes(rows: usize, all: usize) -> usize {
        rows * size_of::<u32>() + all.div_ceil(64) * (size_of::<u64>() + size_of::<u32>())
    }

    /// The selected rows, ascending.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Number of selected rows before `row`.
    pub fn rank(&self, row: u32) -> usize {
        let at = row as usize / 64;
        let before = self.bits[at] & ((1 << (row % 64)) - 1);
        (self.before[at] + before.count_ones()) as usize
    }

    /// Whether a row is selected.
    #[inline(always)]
    pub(super) fn has(&self, row: u32) -> bool {
        self.bits[row as usize / 64] >> (row % 64) & 1 == 1
    }

    /// A bit for each row of the base, set if it is not selected.
    pub(super) fn others(&self) -> Vec<u64> {
        self.bits.iter().map(|word| !word).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_in_their_order() {
        let chosen = [130, 3, 64, 0, 63, 3];
        let row_filter = RowFilter::new(chosen, 131);
        assert_eq!(row_filter.rows(), [0, 3, 63, 64, 130]);
        for (rank, row) in row_filter.rows().iter().enumerate() {
            assert_eq!(row_filter.rank(*row), rank);
        }
        let others = row_filter.others();
        for row in 0..131 {
            assert_eq!(row_filter.has(row), chosen.contains(&row));
            assert_eq!(others[row as usize / 64] >> (row % 64) & 1 == 0, chosen.contains(&row));
        }
        assert!(RowFilter::new([], 0).rows().is_empty());
    }
}
