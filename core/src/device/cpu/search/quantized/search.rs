//! The search of a task's queries through the blocks.

use std::ops::Range;

use super::deferred::DeferredPairs;
use crate::device::cpu::exact;
use crate::device::cpu::quantize::base::QuantizedBase;
use crate::device::cpu::quantize::prefilter::{BasePanels, QueryCodes};
use crate::device::cpu::quantize::query_bound::QuantizedQuery;
use crate::device::cpu::search::sink::Sink;
use crate::device::cpu::search::traversal::{BLOCK_ROWS, TaskQueries, Visit};
use crate::device::cpu::simd::panels::{CodePanels, PassedPair, PassedPairs, ROWS};
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::Result;

/// Pairs that are computed together, and at most those of one query more.
const SETTLED: usize = 1 << 16;

/// Rows of at least this many bytes are read in ascending order.
const LONG_ROW: usize = 512;
const PANELS_PER_BLOCK: usize = BLOCK_ROWS / ROWS;
/// Bytes of base rows in a tile, which all queries of a task visit before the next: a part of an L2 cache.
const STEP_BYTES: usize = 192 << 10;

/// Some of a task's queries, encoded.
pub(super) struct EncodedQueries {
    /// Their positions in the task.
    pub ids: Vec<u32>,
    pub rounded: Vec<QuantizedQuery>,
    pub packed: QueryCodes,
}

/// The state of a task's queries while they visit the blocks.
pub(super) struct QuantizedSearch<'a, T, K> {
    base: &'a QuantizedBase,
    queries: &'a TaskQueries<'a, T>,
    visit: &'a Visit<'a>,
    /// The positions in the task of the queries that are searched for.
    ids: Vec<u32>,
    rounded: Vec<QuantizedQuery>,
    packed: QueryCodes,
    /// The number of 16-bit sums of pairs that passed the prefilter.
    pub(super) passed_prefilter: u64,
    /// The number of queries with too many pairs for a guess.
    pub(super) given_up: usize,
    /// For each query the pairs that passed and are not computed yet, if there is memory to keep them.
    deferred: Vec<DeferredPairs>,
    mode: Mode,
    /// Base rows that were visited, and those to be visited.
    visited: usize,
    rows: usize,
    /// Pairs to be computed: positions of the query in the task, and of the row.
    passed: Vec<(u32, u32)>,
    sorted: Vec<(u32, u32)>,
    /// Pairs that passed the thresholds in some panels.
    passed_pairs: PassedPairs,
    least: Vec<i32>,
    pub(super) sinks: &'a mut [K],
}

/// The treatment of pairs that pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Pairs are kept, and dropped by bounds and guesses.
    Guess,
    /// Pairs are kept, and dropped by bounds.
    Keep,
    /// As [`Keep`](Self::Keep), for queries with a wrong guess, whose sinks have been offered outliers before.
    KeepAgain,
    /// Pairs are computed at once.
    Compute,
}

impl<'a, T: SimdReal, K: Sink<T>> QuantizedSearch<'a, T, K> {
    pub(super) fn new(
        base: &'a QuantizedBase,
        queries: &'a TaskQueries<'a, T>,
        visit: &'a Visit<'a>,
        EncodedQueries { ids, rounded, packed }: EncodedQueries,
        sinks: &'a mut [K],
        mode: Mode,
    ) -> Self {
        let deferred = vec![DeferredPairs::new(mode == Mode::Guess); ids.len()];
        Self {
            base,
            queries,
            visit,
            ids,
            rounded,
            packed,
            passed_prefilter: 0,
            given_up: 0,
            deferred,
            mode,
            visited: 0,
            rows: visit.rows(),
            passed: Vec::new(),
            sorted: Vec::new(),
            passed_pairs: PassedPairs::default(),
            least: Vec::new(),
            sinks,
        }
    }

    /// Compares all queries with a block; returns how many pairs were computed exactly.
    pub(super) fn block(&mut self, block: usize) -> Result<u64> {
        let panels = block * PANELS_PER_BLOCK..(block + 1) * PANELS_PER_BLOCK;
        let panels = panels.start..panels.end.min(self.base.starts.len());
        let most = (STEP_BYTES / CodePanels::bytes_of(self.base.words())).max(1);
        // Until lists are full, everything passes: take a few panels at a time.
        let is_limited = |(id, deferred): (&u32, &DeferredPairs)| {
            deferred.least() > i32::MIN || self.sinks[*id as usize].threshold() < T::INFINITY
        };
        let full = self.ids.iter().zip(&self.deferred).all(is_limited);
        let (mut computed, mut next) = (0, panels.start);
        let mut step = if full { most } else { 1 };
        while next < panels.end {
            let end = panels.end.min(next + step);
            computed += self.panels(next..end)?;
            (next, step) = (end, most.min(2 * step));
        }
        Ok(computed)
    }

    /// Compares all queries with some panels of a block; returns how many pairs were computed exactly.
    fn panels(&mut self, panels: Range<usize>) -> Result<u64> {
        self.sweep(panels.clone());
        let places = panels.start * ROWS..panels.end * ROWS;
        self.visited += self.base.places.rows_at(places.clone());
        let mut computed = match self.mode {
            Mode::KeepAgain => 0,
            _ => self.outliers(places)?,
        };
        let share = self.visited as f64 / self.rows as f64;
        for query in 0..self.ids.len() {
            let (k, deferred) =
                (self.sinks[self.ids[query] as usize].most(), &mut self.deferred[query]);
            if self.mode == Mode::Compute {
                computed += self.settle(query)?;
            } else if deferred.is_full(k, share) {
                let has_room = deferred.cut::<T>(k, share, self.base.metric, &self.rounded[query]);
                if !has_room && deferred.has_guess() {
                    deferred.give_up();
                    self.given_up += 1;
                } else if !has_room {
                    computed += self.settle(query)?;
                }
            }
        }
        Ok(computed + self.compute_if(0)?)
    }

    /// Computes the pairs that were kept; returns their number, and the queries whose guesses were wrong.
    pub(super) fn finish(&mut self) -> Result<(u64, Vec<u32>)> {
        let (mut computed, mut wrong) = (0, Vec::new());
        for query in 0..self.ids.len() {
            let sink = &self.sinks[self.ids[query] as usize];
            let (k, threshold, deferred) =
                (sink.most(), sink.threshold(), &mut self.deferred[query]);
            deferred.cut::<T>(k, 1.0, self.base.metric, &self.rounded[query]);
            if deferred.is_sure(self.rounded[query].least_now(threshold.to_f64())) {
                computed += self.settle(query)?;
            } else {
                wrong.push(self.ids[query]);
            }
        }
        Ok((computed + self.compute_if(0)?, wrong))
    }

    /// Offers the kept pairs of a query with exact sums, and lets the rest be computed.
    fn settle(&mut self, query: usize) -> Result<u64> {
        let (pairs, id) = (self.deferred[query].take(), self.ids[query]);
        for (sum, place) in &pairs {
            let (of, place) = (&self.rounded[query], *place as usize);
            let (sum, row) = (f64::from(*sum) - of.offset, self.base.places.row(place) as u32);
            match of.integral.and_then(|x| self.base.integral_square(x, place, sum)) {
                Some(sum) => self.offer(id, row, sum),
                None => self.passed.push((id, row)),
            }
        }
        self.deferred[query].give_back(pairs);
        self.compute_if(SETTLED)
    }

    /// Finds the pairs of all queries and some panels that pass.
    fn sweep(&mut self, panels: Range<usize>) {
        let base = self.base;
        self.least.clear();
        let queries = self.rounded.iter_mut().zip(&self.ids).zip(&self.deferred);
        self.least.extend(queries.map(|((query, id), deferred)| {
            let threshold = self.sinks[*id as usize].threshold();
            query.least_now(threshold.to_f64()).max(deferred.least())
        }));
        let mut passed_pairs = std::mem::take(&mut self.passed_pairs);
        match (&base.prefilter, &mut self.packed) {
            (Some(prefilter), QueryCodes::Prefiltered(queries)) => {
                let (starts, decided) = (&base.starts[..], &base.decided[..]);
                let of = BasePanels { panels: panels.clone(), starts, decided };
                self.passed_prefilter +=
                    prefilter.sweep(of, queries, &self.least, &mut passed_pairs);
            }
            (_, QueryCodes::Packed(queries)) => {
                let swept = base.panels(panels.clone());
                base.level.panel_dot_threshold(
                    base.quantizer.width,
                    swept,
                    queries,
                    &self.least,
                    &mut passed_pairs,
                );
            }
            _ => unreachable!("queries are of the base's form"),
        }
        let first = (panels.start * ROWS) as u32;
        for PassedPair { query, row, sum } in passed_pairs.iter() {
            let (query, place) = (query as usize, (first + row) as usize);
            let is_decided = base.decided[place / ROWS] >> (place % ROWS) & 1 == 1;
            let row = base.places.row(place);
            let id = self.ids[query] as usize;
            if is_decided && !self.visit.is_itself(self.queries.first + id, row) {
                self.deferred[query].push(sum, place as u32);
            }
        }
        self.passed_pairs = passed_pairs;
    }

    fn offer(&mut self, id: u32, row: u32, sum: T) {
        let sink = &mut self.sinks[id as usize];
        if sum <= sink.threshold() {
            sink.offer(sum, self.visit.number(row as usize));
        }
    }

    /// Computes the outliers for every query.
    fn outliers(&mut self, places: Range<usize>) -> Result<u64> {
        let (outliers, of) = (self.base.outliers(places), self.base.places);
        let mut computed = 0;
        for query in 0..self.ids.len() {
            let id = self.ids[query];
            let rows = outliers.iter().map(|place| of.row(*place as usize) as u32);
            self.passed.extend(rows.map(|row| (id, row)));
            computed += self.compute_if(SETTLED)?;
        }
        Ok(computed)
    }

    /// Computes the sums of the pairs that have passed, if more than `more` have, and offers them to their sinks;
    /// returns their number.
    fn compute_if(&mut self, more: usize) -> Result<u64> {
        let computed = self.passed.len();
        if computed <= more {
            return Ok(0);
        }
        self.visit.job.check()?;
        if self.base.rows.matrix().row_bytes() >= LONG_ROW {
            // Otherwise each row would come from memory for every query that it is near to.
            sort_by_row(&mut self.passed, &mut self.sorted);
        }
        let (visit, first, sinks) = (self.visit, self.queries.first, &mut self.sinks);
        exact::PairSums {
            metric: self.base.metric,
            queries: self.queries.values,
            base: self.base.rows.reals().unwrap_or_default(),
            dim: self.base.rows.matrix().dim(),
            pairs: &self.passed,
            on_sum: |(query, row), sum| {
                let (query, row) = (query as usize, row as usize);
                let sink = &mut sinks[query];
                if sum <= sink.threshold() && !visit.is_itself(first + query, row) {
                    sink.offer(sum, visit.number(row));
                }
            },
        }
        .compute(self.base.level);
        self.passed.clear();
        Ok(computed as u64)
    }
}

/// Radix sort of pairs by their rows; `other` is a buffer.
fn sort_by_row(pairs: &mut Vec<(u32, u32)>, other: &mut Vec<(u32, u32)>) {
    const BITS: u32 = 10;
    let most = pairs.iter().fold(0, |most, (_, row)| most | row);
    let digit = |row: u32, shift: u32| (row >> shift) as usize & ((1 << BITS) - 1);
    for shift in (0..u32::BITS - most.leading_zeros()).step_by(BITS as usize) {
        let mut places = [0; 1 << BITS];
        pairs.iter().for_each(|(_, row)| places[digit(*row, shift)] += 1);
        let mut before = 0;
        places.iter_mut().for_each(|place| before += std::mem::replace(place, before));
        other.resize(pairs.len(), (0, 0));
        for pair in pairs.iter() {
            let place = &mut places[digit(pair.1, shift)];
            other[*place] = *pair;
            *place += 1;
        }
        std::mem::swap(pairs, other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn pairs_are_put_in_the_order_of_their_rows() {
        let mut random = Random::new(3);
        for most in [1, 2, 1023, 1024, 70_000, u64::from(u32::MAX)] {
            let mut pairs: Vec<_> = (0..3000).map(|i| (i, random.below(most) as u32)).collect();
            let mut expected = pairs.clone();
            expected.sort_by_key(|(_, row)| *row);
            sort_by_row(&mut pairs, &mut Vec::new());
            assert_eq!(pairs, expected);
        }
    }
}
