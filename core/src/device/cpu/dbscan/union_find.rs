//! A concurrent union-find of rows.

use std::sync::atomic::{AtomicU32, Ordering};

/// Disjoint sets of rows. A set is a tree whose root is its first row; roots only ever get smaller.
pub(super) struct UnionFind(Vec<AtomicU32>);

impl UnionFind {
    /// Every row by itself.
    pub fn new(rows: usize) -> Self {
        Self((0..rows as u32).map(AtomicU32::new).collect())
    }

    /// The first row of a row's set. It may be outdated at once while other threads join sets.
    pub fn first(&self, mut row: u32) -> u32 {
        loop {
            let parent = self.parent(row);
            if parent == row {
                return row;
            }
            let next = self.parent(parent);
            if next != parent {
                // Halves the path. Where another thread was faster, its parent is as good.
                let at = &self.0[row as usize];
                let _ = at.compare_exchange(parent, next, Ordering::Relaxed, Ordering::Relaxed);
            }
            row = next;
        }
    }

    /// Joins the sets of two rows.
    pub fn join(&self, a: u32, b: u32) {
        let (mut a, mut b) = (a, b);
        loop {
            (a, b) = (self.first(a), self.first(b));
            let (low, high) = (a.min(b), a.max(b));
            if low == high {
                return;
            }
            let at = &self.0[high as usize];
            if at.compare_exchange(high, low, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return;
            }
        }
    }

    fn parent(&self, row: u32) -> u32 {
        self.0[row as usize].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::in_parallel;

    #[test]
    fn threads_join_sets_whose_first_rows_are_their_names() {
        for step in [2, 3, 7, 64] {
            let rows = 50_000u32;
            let sets = UnionFind::new(rows as usize);
            // Backwards and in any order.
            in_parallel((step..rows).rev(), |row| sets.join(row, row - step));
            assert!((0..rows).all(|row| sets.first(row) == row % step), "{step}");
        }
    }
}
