//! Distances between strings of bits, by counting.

use pulp::{Simd, WithSimd};

use super::select::{Neighbor, Selection};
use super::tasks::{Block, Scan, Visit};
use crate::device::Work;
use crate::error::Result;
use crate::matrix::Rows;

/// Bytes of base rows that all queries of a task visit before the next ones.
const BLOCK_BYTES: usize = 24 * 1024;

/// Base rows of bits.
#[derive(Debug)]
pub(super) struct Bits(pub Rows);

impl Bits {
    fn rows_per_block(&self) -> usize {
        (BLOCK_BYTES / (self.0.matrix().width() * 8).max(1)).max(1)
    }
}

impl Scan<f32> for Bits {
    fn blocks(&self) -> usize {
        self.0.len().div_ceil(self.rows_per_block())
    }

    fn scan(
        &self,
        queries: &Block<'_, f32>,
        visit: &Visit<'_>,
        lists: &mut [Selection<f32>],
    ) -> Result<Work> {
        let arch = pulp::Arch::new();
        let per_block = self.rows_per_block();
        let mut pairs = 0;
        for block in visit.blocks() {
            visit.cancel.check()?;
            let rows = block * per_block..((block + 1) * per_block).min(self.0.len());
            pairs += (rows.len() * lists.len()) as u64;
            arch.dispatch(Count { base: self, rows, queries, visit, lists });
        }
        Ok(Work { pairs, ..Work::default() })
    }
}

/// All queries of a task with some base rows.
struct Count<'a> {
    base: &'a Bits,
    rows: std::ops::Range<usize>,
    queries: &'a Block<'a, f32>,
    visit: &'a Visit<'a>,
    lists: &'a mut [Selection<f32>],
}

impl WithSimd for Count<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let width = self.base.0.matrix().width();
        let words = self.base.0.words().unwrap_or_default();
        for (i, list) in self.lists.iter_mut().enumerate() {
            let query = &self.queries.words[i * width..][..width];
            for row in self.rows.clone() {
                let base = &words[row * width..][..width];
                let distance = self.visit.metric.distance_of_bits(query, base);
                if distance <= list.reach() && !self.visit.is_itself(self.queries.first + i, row) {
                    list.insert(Neighbor { distance, row: self.visit.number(row) });
                }
            }
        }
    }
}
