//! Rows in whole numbers decide which pairs are worth computing; those are then computed exactly.
//!
//! A pair whose [bound](crate::device::cpu::rounded) is beyond the reach of its query's sink is discarded; the test is
//! one comparison, with the largest residual of all rows. Others are kept. A kept pair's bounds say how far away it is
//! at most, and so which others cannot be among the nearest; in the end hardly more pairs than were asked for get their
//! sums in the contract's order.
//!
//! Where a sample says that it pays, pairs are looked at in 8 or 7 bits before they are in 16.
//!
//! Where the residuals are not small compared with the distances that matter, too many pairs pass: the
//! rows not yet visited are then left to the next layout, after 8 bits 16, with a look before or without, after those direct
//! differences.

mod kept;
mod search;

use self::kept::Kept;
use self::search::{Forms, Search};
use super::sink::Sink;
use super::traversal::{BLOCK_ROWS, Block, Visit};
use crate::device::contract::Work;
use crate::device::cpu::rounded::base::Quantised;
use crate::device::cpu::simd::lanes::Lanes;
use crate::error::{Error, Result};

/// If more than one in this many pairs is computed, the next layout is faster.
const ONE_PASSES_IN: u64 = 32;

/// From this many queries of a task on, making another layout pays.
const WORTH_ANOTHER: usize = 64;

/// Whether the layout that rows are left to is there; with `true`, it may be made.
type IsThere<'a> = &'a dyn Fn(bool) -> Result<bool>;

impl Quantised {
    /// Offers all pairs of the queries with the visited blocks, if they are within reach, to the
    /// queries' sinks; returns the rest of the visit if it is left to the next layout.
    pub(in crate::device::cpu::search) fn scan<'a, T: Lanes, K: Sink<T>>(
        &self,
        queries: &Block<'_, T>,
        visit: &Visit<'a>,
        sinks: &mut [K],
        next: IsThere<'_>,
    ) -> Result<(Work, Option<Visit<'a>>)> {
        let dim = self.rows.matrix().dim();
        let mut words = Vec::new();
        let each = queries.values.chunks_exact(dim);
        let rounded: Vec<_> = each.map(|values| self.query(values, &mut words)).collect();
        let far = rounded.iter().filter(|query| query.far).count();
        let may_make = sinks.len() >= WORTH_ANOTHER;
        if (far > sinks.len() / 16 || self.tasks.are_mostly_left()) && next(may_make)? {
            return Ok((Work::default(), Some(visit.clone())));
        }
        let most = sinks[0].most();
        let bytes = sinks.len() * Kept::bytes(most, self.rows.len());
        let reserved = match visit.job.reserve("candidates", bytes) {
            Err(Error::HostMemory { .. }) => None,
            reserved => Some(reserved?),
        };
        let length = words.len() / sinks.len();
        let packed = match &self.coarse {
            Some(coarse) => Forms::Coarse(coarse.queries(&words, length, self.level)),
            None => Forms::Packed(self.level.pack(&words, length)),
        };
        let mut search =
            Search::new(self, (queries, visit), (rounded, packed), (sinks, reserved.is_some()));
        let mut work = Work::default();
        let most = most.saturating_add(BLOCK_ROWS).saturating_mul(4);
        let free = search.sinks.len().saturating_mul(most) as u64;
        let one_in = one_look_in(dim);
        let mut left = None;
        for (position, block) in visit.positions() {
            visit.job.check()?;
            let rows = visit.rows_of(block).len();
            work.pairs += (search.sinks.len() * rows) as u64;
            work.rechecked += search.block(block)?;
            let is_crowded = work.rechecked > free.saturating_add(work.pairs / ONE_PASSES_IN)
                || search.looked > free.saturating_add(work.pairs / one_in);
            let rest = visit.after(position);
            if is_crowded && !rest.is_empty() && next(may_make)? {
                left = Some(rest);
                break;
            }
        }
        work.rechecked += search.finish()?;
        self.tasks.count(left.is_some());
        Ok((work, left))
    }
}

/// If sums in 16 bits of more than one in this many pairs are needed, sums of all of them are faster: a
/// sum of its own takes several times as long.
fn one_look_in(dim: usize) -> u64 {
    8 + 4096 / dim as u64
}
