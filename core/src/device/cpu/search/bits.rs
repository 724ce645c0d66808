//! Distances between strings of bits, by counting.

use pulp::{Simd, WithSimd};

use super::sink::{Neighbor, Sink};
use super::traversal::{Arithmetic, TaskQueries, Visit};
use crate::device::contract::Work;
use crate::device::cpu::row_permutation::RowPermutation;
use crate::error::Result;
use crate::rows::Rows;

/// Bytes of base rows in a tile, which all queries of a task visit before the next.
const STEP_BYTES: usize = 24 * 1024;

/// Base rows of bits.
#[derive(Debug)]
pub(super) struct BitRows(pub Rows);

impl BitRows {
    fn rows_per_step(&self) -> usize {
        (STEP_BYTES / (self.0.matrix().width() * 8).max(1)).max(1)
    }
}

impl Arithmetic<f32> for BitRows {
    fn places(&self) -> RowPermutation {
        RowPermutation::identity(self.0.len())
    }

    fn scan<K: Sink<f32>>(
        &self,
        queries: &TaskQueries<'_, f32>,
        visit: &Visit<'_>,
        sinks: &mut [K],
    ) -> Result<Work> {
        let arch = visit.level.arch();
        let mut pairs = 0;
        for block in visit.blocks() {
            visit.job.check()?;
            let all = visit.places_of(block);
            pairs += (all.len() * sinks.len()) as u64;
            for start in all.clone().step_by(self.rows_per_step()) {
                let rows = start..all.end.min(start + self.rows_per_step());
                arch.dispatch(BitDistances { base: self, rows, queries, visit, sinks });
            }
        }
        Ok(Work { pairs, ..Work::default() })
    }
}

/// All queries of a task with some base rows.
struct BitDistances<'a, K> {
    base: &'a BitRows,
    rows: std::ops::Range<usize>,
    queries: &'a TaskQueries<'a, f32>,
    visit: &'a Visit<'a>,
    sinks: &'a mut [K],
}

impl<K: Sink<f32>> WithSimd for BitDistances<'_, K> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let width = self.base.0.matrix().width();
        let words = self.base.0.words().unwrap_or_default();
        for (i, sink) in self.sinks.iter_mut().enumerate() {
            let query = &self.queries.words[i * width..][..width];
            for row in self.rows.clone() {
                let base = &words[row * width..][..width];
                let distance = self.visit.metric.distance_of_bits(query, base);
                if distance <= sink.threshold()
                    && !self.visit.is_itself(self.queries.first + i, row)
                {
                    sink.insert(Neighbor { distance, row: self.visit.number(row) });
                }
            }
        }
    }
}
