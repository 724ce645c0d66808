//! Rows in whole numbers decide which pairs are worth computing; those are then computed exactly.
//!
//! A pair whose [bound](crate::device::cpu::rounded) is beyond the reach of its query's sink is discarded; the test is
//! one comparison, with the largest residual of all rows. Others are kept. A kept pair's bounds say how far away it is
//! at most, and so which others cannot be among the nearest; in the end hardly more pairs than were asked for get their
//! sums in the contract's order.
//!
//! Where many neighbours are asked for, most pairs would pass before as many have been seen. But panels are samples of
//! all rows: after a part of them, a pair that ranks well beyond its share tells what will matter. That is a guess, whose
//! outcome is known in the end; the few queries for which it was wrong search again, without guesses.
//!
//! Where a sample says that it pays, pairs are looked at in 8 or 7 bits before they are in 16.
//!
//! Where the residuals are not small compared with the distances that matter, too many pairs pass: the
//! rows not yet visited are then left to the next layout, after 8 bits 16, with a look before or without, after those direct
//! differences.

mod kept;
mod search;

use self::kept::Kept;
use self::search::{Forms, Mode, Search};
use super::sink::Sink;
use super::traversal::{BLOCK_ROWS, Block, Visit};
use crate::device::contract::Work;
use crate::device::cpu::rounded::base::Quantised;
use crate::device::cpu::rounded::query::Query;
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
        let all: Vec<_> = (0..sinks.len() as u32).collect();
        let (rounded, words) = self.round(queries, &all);
        let far = rounded.iter().filter(|query| query.far).count();
        let may_make = sinks.len() >= WORTH_ANOTHER;
        if (far > sinks.len() / 16 || self.tasks.are_mostly_left()) && next(may_make)? {
            return Ok((Work::default(), Some(visit.clone())));
        }
        let (most, count) = (sinks[0].most(), sinks.len());
        let bytes = count * Kept::bytes(most, self.rows.len());
        let reserved = match visit.job.reserve("candidates", bytes) {
            Err(Error::HostMemory { .. }) => None,
            reserved => Some(reserved?),
        };
        let mode = match reserved {
            Some(_) if self.guesses.are_mostly_right() => Mode::Guess,
            Some(_) => Mode::Keep,
            None => Mode::Compute,
        };
        let of = (all, rounded, self.forms(&words, count));
        let mut search = Search::new(self, (queries, visit), of, (sinks, mode));
        let mut work = Work::default();
        let most = most.saturating_add(BLOCK_ROWS).saturating_mul(4);
        let free = count.saturating_mul(most) as u64;
        let one_in = one_look_in(self.rows.matrix().dim());
        let mut left = None;
        for (position, block) in visit.positions() {
            visit.job.check()?;
            work.pairs += (count * visit.rows_of(block)) as u64;
            work.rechecked += search.block(block)?;
            let is_crowded = work.rechecked > free.saturating_add(work.pairs / ONE_PASSES_IN)
                || search.looked > free.saturating_add(work.pairs / one_in);
            let rest = visit.after(position);
            if is_crowded && !rest.is_empty() && next(may_make)? {
                left = Some((visit.until(position), rest));
                break;
            }
        }
        let (computed, wrong) = search.finish()?;
        work.rechecked += computed;
        self.tasks.count(left.is_some());
        if mode == Mode::Guess {
            self.guesses.count(wrong.len(), count);
        }
        let (visited, rest) = left.unzip();
        if !wrong.is_empty() {
            work += self.search_again(queries, visited.as_ref().unwrap_or(visit), wrong, sinks)?;
        }
        Ok((work, rest))
    }

    /// Lets queries whose guesses were wrong visit all blocks again.
    fn search_again<T: Lanes, K: Sink<T>>(
        &self,
        queries: &Block<'_, T>,
        visit: &Visit<'_>,
        wrong: Vec<u32>,
        sinks: &mut [K],
    ) -> Result<Work> {
        let (mut work, count) = (Work::default(), wrong.len());
        let (rounded, words) = self.round(queries, &wrong);
        let of = (wrong, rounded, self.forms(&words, count));
        let mut search = Search::new(self, (queries, visit), of, (sinks, Mode::KeepAgain));
        for block in visit.blocks() {
            visit.job.check()?;
            work.pairs += (count * visit.rows_of(block)) as u64;
            work.rechecked += search.block(block)?;
        }
        work.rechecked += search.finish()?.0;
        Ok(work)
    }

    /// Some of the queries in whole numbers, and their words.
    fn round<T: Lanes>(&self, queries: &Block<'_, T>, ids: &[u32]) -> (Vec<Query>, Vec<i32>) {
        let (dim, mut words) = (self.rows.matrix().dim(), Vec::new());
        let values = |id: &u32| &queries.values[*id as usize * dim..][..dim];
        let rounded = ids.iter().map(|id| self.query(values(id), &mut words)).collect();
        (rounded, words)
    }

    /// Words of so many queries, as they are compared with the base.
    fn forms(&self, words: &[i32], count: usize) -> Forms {
        let length = words.len() / count;
        match &self.coarse {
            Some(coarse) => Forms::Coarse(coarse.queries(words, length, self.level)),
            None => Forms::Packed(self.level.pack(words, length)),
        }
    }
}

/// If sums in 16 bits of more than one in this many pairs are needed, sums of all of them are faster: a
/// sum of its own takes several times as long.
fn one_look_in(dim: usize) -> u64 {
    8 + 4096 / dim as u64
}
