//! Searches by quantised rows: bounds from integer codes decide which pairs are worth computing, and those are
//! computed exactly.
//!
//! A pair whose [lower bound](crate::device::cpu::quantize) is beyond the threshold of its query's sink is discarded;
//! the test is one comparison, with the largest residual of all rows. The remaining pairs are candidates. Their upper
//! bounds tell which candidates cannot be among the nearest; in the end, hardly more than `k` pairs for each query
//! get their sums in the contract's order.
//!
//! With a large `k`, most pairs would pass before `k` of them have been seen. But panels are samples of all rows:
//! after a part of them, a rank a little behind the expected share of the `k` nearest gives a guess of the final
//! threshold. Whether the guess was right is known in the end; queries with a wrong guess search again, without
//! guesses.
//!
//! A prefilter by 8 or 7 bits precedes the 16-bit sums if a sample says that it pays.
//!
//! If too many pairs pass, as residuals are not small compared with the distances that matter, the rest of the visit
//! falls back to the next layout: 8-bit codes → 16-bit codes (with or without prefilter) → direct differences.

mod deferred;
mod search;

use self::deferred::DeferredPairs;
use self::search::{EncodedQueries, Mode, QuantizedSearch};
use super::sink::Sink;
use super::traversal::{BLOCK_ROWS, TASK_QUERIES, TaskQueries, Visit};
use crate::device::contract::Work;
use crate::device::cpu::quantize::base::QuantizedBase;
use crate::device::cpu::quantize::query_bound::QuantizedQuery;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::Result;

/// The number of pairs per computed pair below which the next layout is faster.
const ONE_PASSES_IN: u64 = 32;

/// The most queries of a task with a prefilter: with fewer, base rows, of which there are three forms, would be read
/// from memory more often; with more, the queries' own data would leave the caches.
const MOST_QUERIES: usize = 512;

/// From this many queries of a task on, making another layout pays.
const WORTH_ANOTHER: usize = 64;

/// The number of queries per failed guess, one with too many candidates, below which a task stops guessing.
const MOST_GIVEN_UP: usize = 16;

/// Whether the next layout exists; with `true`, it may be made.
type HasNext<'a> = &'a dyn Fn(bool) -> Result<bool>;

/// The visit of a search that stopped early: its visited part, and the rest.
struct Stopped<'a> {
    visited: Visit<'a>,
    rest: Visit<'a>,
    /// Whether the rest is for the next layout, and not for the same one without guesses.
    is_for_next: bool,
}

impl QuantizedBase {
    /// The most queries of a task for which the caches have room.
    pub(in crate::device::cpu::search) fn most_queries(&self) -> usize {
        if self.prefilter.is_some() { MOST_QUERIES } else { TASK_QUERIES }
    }

    /// Offers all pairs of the queries with the visited blocks, if they are within the threshold, to the
    /// queries' sinks; returns the rest of the visit if it is left to the next layout.
    pub(in crate::device::cpu::search) fn scan<'a, T: SimdReal, K: Sink<T>>(
        &self,
        queries: &TaskQueries<'_, T>,
        visit: &Visit<'a>,
        sinks: &mut [K],
        next: HasNext<'_>,
    ) -> Result<(Work, Option<Visit<'a>>)> {
        self.scan_with(queries, visit, sinks, self.guesses.are_mostly_right(), next)
    }

    /// As [`scan`](Self::scan), with guesses only if `guesses` is set.
    fn scan_with<'a, T: SimdReal, K: Sink<T>>(
        &self,
        queries: &TaskQueries<'_, T>,
        visit: &Visit<'a>,
        sinks: &mut [K],
        guesses: bool,
        next: HasNext<'_>,
    ) -> Result<(Work, Option<Visit<'a>>)> {
        let count = sinks.len();
        let all: Vec<_> = (0..count as u32).collect();
        let (rounded, words) = self.round(queries, &all);
        let far = rounded.iter().filter(|query| query.far).count();
        let may_make = count >= WORTH_ANOTHER;
        if (far > count / 16 || self.tasks.are_mostly_left()) && next(may_make)? {
            return Ok((Work::default(), Some(visit.clone())));
        }
        let bytes = count * DeferredPairs::bytes(sinks[0].most(), self.rows.len());
        let reserved = visit.job.try_reserve(bytes);
        let mode = match reserved {
            Some(_) if guesses => Mode::Guess,
            Some(_) => Mode::Keep,
            None => Mode::Compute,
        };
        let encoded = EncodedQueries { ids: all, rounded, packed: self.forms(&words, count) };
        let mut search = QuantizedSearch::new(self, queries, visit, encoded, sinks, mode);
        let (mut work, stopped) = self.visit(&mut search, visit, &|| next(may_make))?;
        let (computed, wrong) = search.finish()?;
        drop(search);
        work.rechecked += computed;
        let is_left = stopped.as_ref().is_some_and(|stopped| stopped.is_for_next);
        self.tasks.count(is_left);
        if mode == Mode::Guess && !is_left {
            self.guesses.count(wrong.len(), count);
        }
        if !wrong.is_empty() {
            let visited = stopped.as_ref().map_or(visit, |stopped| &stopped.visited);
            work += self.search_again(queries, visited, wrong, sinks)?;
        }
        drop(reserved);
        match stopped {
            Some(Stopped { rest, is_for_next: false, .. }) => {
                let (more, left) = self.scan_with(queries, &rest, sinks, false, next)?;
                work += more;
                Ok((work, left))
            }
            stopped => Ok((work, stopped.map(|stopped| stopped.rest))),
        }
    }

    /// Visits block after block until the end, or until too many pairs pass for this layout or for guesses.
    fn visit<'a, T: SimdReal, K: Sink<T>>(
        &self,
        search: &mut QuantizedSearch<'_, T, K>,
        visit: &Visit<'a>,
        has_next: &dyn Fn() -> Result<bool>,
    ) -> Result<(Work, Option<Stopped<'a>>)> {
        let (mut work, count) = (Work::default(), search.sinks.len());
        let of_query = search.sinks[0].most().saturating_add(BLOCK_ROWS).saturating_mul(4);
        let free = count.saturating_mul(of_query) as u64;
        let one_in = one_recheck_in(self.rows.matrix().dim());
        for (position, block) in visit.positions() {
            visit.job.check()?;
            work.pairs += (count * visit.rows_of(block)) as u64;
            work.rechecked += search.block(block)?;
            let is_crowded = work.rechecked > free.saturating_add(work.pairs / ONE_PASSES_IN)
                || search.passed_prefilter > free.saturating_add(work.pairs / one_in);
            let rest = visit.after(position);
            if rest.is_empty() {
                break;
            }
            let is_for_next = is_crowded && has_next()?;
            if is_for_next || search.given_up > count / MOST_GIVEN_UP {
                let visited = visit.until(position);
                return Ok((work, Some(Stopped { visited, rest, is_for_next })));
            }
        }
        Ok((work, None))
    }

    /// Lets queries whose guesses were wrong visit all blocks again.
    fn search_again<T: SimdReal, K: Sink<T>>(
        &self,
        queries: &TaskQueries<'_, T>,
        visit: &Visit<'_>,
        wrong: Vec<u32>,
        sinks: &mut [K],
    ) -> Result<Work> {
        let count = wrong.len();
        let mut work = Work { redone: count as u64, ..Work::default() };
        let (rounded, words) = self.round(queries, &wrong);
        let encoded = EncodedQueries { ids: wrong, rounded, packed: self.forms(&words, count) };
        let mut search =
            QuantizedSearch::new(self, queries, visit, encoded, sinks, Mode::KeepAgain);
        for block in visit.blocks() {
            visit.job.check()?;
            work.rechecked += search.block(block)?;
        }
        work.rechecked += search.finish()?.0;
        Ok(work)
    }

    /// Some of the queries in quantised form, and their words.
    fn round<T: SimdReal>(
        &self,
        queries: &TaskQueries<'_, T>,
        ids: &[u32],
    ) -> (Vec<QuantizedQuery>, Vec<i32>) {
        let (dim, mut words) = (self.rows.matrix().dim(), Vec::new());
        let values = |id: &u32| &queries.values[*id as usize * dim..][..dim];
        let rounded = ids.iter().map(|id| self.query(values(id), &mut words)).collect();
        (rounded, words)
    }
}

/// The number of pairs per 16-bit sum below which computing all sums is faster: a single one takes several times as
/// long as one of a panel.
fn one_recheck_in(dim: usize) -> u64 {
    8 + 4096 / dim as u64
}
