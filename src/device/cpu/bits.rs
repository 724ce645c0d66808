//! Distances between strings of bits, by counting.

use pulp::{Simd, WithSimd};

use super::select::{Neighbor, Selection};
use super::tasks::{Block, Scan, Visit};
use crate::device::contract::Work;
use crate::error::Result;
use crate::matrix::Rows;

/// Bytes of base rows that all queries of a task visit before the next ones.
const STEP_BYTES: usize = 24 * 1024;

/// Base rows of bits.
#[derive(Debug)]
pub(super) struct Bits(pub Rows);

impl Bits {
    fn rows_per_step(&self) -> usize {
        (STEP_BYTES / (self.0.matrix().width() * 8).max(1)).max(1)
    }
}

impl Scan<f32> for Bits {
    fn rows(&self) -> usize {
        self.0.len()
    }

    fn scan(
        &self,
        queries: &Block<'_, f32>,
        visit: &Visit<'_>,
        lists: &mut [Selection<f32>],
    ) -> Result<Work> {
        let arch = pulp::Arch::new();
        let mut pairs = 0;
        for block in visit.blocks() {
            visit.job.check()?;
            let all = visit.rows_of(block);
            pairs += (all.len() * lists.len()) as u64;
            for start in all.clone().step_by(self.rows_per_step()) {
                let rows = start..all.end.min(start + self.rows_per_step());
                arch.dispatch(Count { base: self, rows, queries, visit, lists });
            }
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
