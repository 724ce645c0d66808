//! Rows in 8 bits decide which pairs are worth computing; those are then computed exactly.
//!
//! With a centre c and a step t, a row x is `c + t x̂ + e`, x̂ being whole numbers from −127 to 127
//! and e a residual of known length r. Products of such rows are exact in integers, four dimensions
//! and sixteen rows to an instruction, and closely bound the sums of the original rows:
//!
//! - squares: `‖q − x‖ ≥ t ‖q̂ − x̂‖ − r_q − r_x` by the triangle inequality;
//! - products (c = 0, the query with a step t_q of its own):
//!   `|q·x − t_q t q̂·x̂| ≤ r_q ‖x‖ + ‖t_q q̂‖ r_x` by Cauchy and Schwarz.
//!
//! A pair whose bound is beyond the reach of its query's sink is discarded; every other one gets
//! its sum in the contract's order. The test is one comparison per pair, with the largest residual of
//! all rows; a row's slack (the largest residual minus its own) is folded into its sum's initial
//! value. The few rows outside the range that 8 bits cover are kept aside and always computed. Where
//! the residuals are not small compared with the distances that matter, too many pairs pass: the rows
//! not yet visited are then left to another layout.

mod base;
mod query;
mod scale;
mod search;

pub(super) use self::base::Quantised;
use self::query::Tightened;
use self::search::Search;
use super::sink::Sink;
use super::traversal::{Arithmetic, BLOCK_ROWS, Block, Visit};
use crate::device::contract::Work;
use crate::device::cpu::simd::lanes::Lanes;
use crate::error::Result;

/// If more than one in this many pairs passes, another layout is faster.
const ONE_PASSES_IN: u64 = 32;

impl<T: Lanes> Arithmetic<T> for Quantised<T> {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn scan<K: Sink<T>>(
        &self,
        queries: &Block<'_, T>,
        visit: &Visit<'_>,
        sinks: &mut [K],
    ) -> Result<Work> {
        let dim = self.rows.matrix().dim();
        let rounded: Vec<_> = queries.values.chunks_exact(dim).map(|q| self.query(q)).collect();
        if rounded.iter().filter(|query| query.far).count() > sinks.len() / 16 {
            return self.fallback(visit.job)?.scan(queries, visit, sinks);
        }
        let (passed, hits, sums) = (Vec::new(), Vec::new(), Vec::new());
        let (starts, tightened) = (Vec::new(), Tightened::default());
        let mut search = Search {
            base: self,
            queries,
            visit,
            rounded,
            starts,
            tightened,
            passed,
            hits,
            sums,
            sinks,
        };
        let mut work = Work::default();
        let most = search.sinks[0].most().saturating_add(BLOCK_ROWS).saturating_mul(4);
        let free = search.sinks.len().saturating_mul(most) as u64;
        for (position, block) in visit.positions() {
            visit.job.check()?;
            work.pairs += (search.sinks.len() * visit.rows_of(block).len()) as u64;
            work.rechecked += search.block(block);
            if work.rechecked > free.saturating_add(work.pairs / ONE_PASSES_IN) {
                let fallback = self.fallback(visit.job)?;
                work += fallback.scan(queries, &visit.after(position), search.sinks)?;
                return Ok(work);
            }
        }
        Ok(work)
    }
}
