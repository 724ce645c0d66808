//! The search of a task's queries through the blocks.

use std::ops::Range;

use super::kept::Kept;
use crate::device::cpu::exact;
use crate::device::cpu::rounded::base::Quantised;
use crate::device::cpu::rounded::coarse::CoarseQueries;
use crate::device::cpu::rounded::query::Query;
use crate::device::cpu::search::sink::Sink;
use crate::device::cpu::search::traversal::{BLOCK_ROWS, Block, Visit};
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::panels::{Group, Packed, Panels, Passed, ROWS};
use crate::error::Result;

/// Pairs that are computed together, at most those of one query more.
const SETTLED: usize = 1 << 16;

/// Rows of at least so many bytes are read in their order.
const LONG_ROW: usize = 512;
const PANELS_PER_BLOCK: usize = BLOCK_ROWS / ROWS;
/// Bytes of base rows that all queries of a task visit before the next ones: a part of an L2 cache.
const STEP_BYTES: usize = 192 << 10;

/// The state of a task's queries while they visit the blocks.
pub(super) struct Search<'a, T, K> {
    base: &'a Quantised,
    queries: &'a Block<'a, T>,
    visit: &'a Visit<'a>,
    rounded: Vec<Query>,
    packed: Forms,
    /// Sums in 16 bits of pairs that passed in fewer.
    pub(super) looked: u64,
    /// For each query the pairs that passed and are not computed yet, if there is memory to keep them.
    kept: Vec<Kept>,
    keeps: bool,
    /// Pairs to be computed: positions of the query in the task, and of the row.
    passed: Vec<(u32, u32)>,
    sorted: Vec<(u32, u32)>,
    found: Vec<Passed>,
    least: Vec<i32>,
    pub(super) sinks: &'a mut [K],
}

/// Queries as they are compared with the base.
pub(super) enum Forms {
    Packed(Packed),
    Coarse(CoarseQueries),
}

impl<'a, T: Lanes, K: Sink<T>> Search<'a, T, K> {
    pub(super) fn new(
        base: &'a Quantised,
        (queries, visit): (&'a Block<'a, T>, &'a Visit<'a>),
        (rounded, packed): (Vec<Query>, Forms),
        (sinks, keeps): (&'a mut [K], bool),
    ) -> Self {
        let kept = vec![Kept::new(); sinks.len()];
        let (passed, sorted) = (Vec::new(), Vec::new());
        let (least, found) = (Vec::new(), Vec::new());
        Self {
            base,
            queries,
            visit,
            rounded,
            packed,
            looked: 0,
            kept,
            keeps,
            passed,
            sorted,
            found,
            least,
            sinks,
        }
    }

    /// Compares all queries with a block; returns how many pairs were computed exactly.
    pub(super) fn block(&mut self, block: usize) -> Result<u64> {
        let panels = block * PANELS_PER_BLOCK..(block + 1) * PANELS_PER_BLOCK;
        let panels = panels.start..panels.end.min(self.base.starts.len());
        let most = (STEP_BYTES / (self.base.words() * size_of::<Group>())).max(1);
        // Until lists are full, everything passes: take a few panels at a time.
        let full = self
            .sinks
            .iter()
            .zip(&self.kept)
            .all(|(sink, kept)| sink.reach() < T::INFINITY || kept.least() > i32::MIN);
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
        let mut computed = self.outliers(panels.start * ROWS..panels.end * ROWS)?;
        for query in 0..self.sinks.len() {
            let (k, kept) = (self.sinks[query].most(), &mut self.kept[query]);
            if !self.keeps
                || kept.is_full(k) && !kept.cut::<T>(k, self.base.metric, &self.rounded[query])
            {
                computed += self.settle(query)?;
            }
        }
        Ok(computed + self.compute_if(0)?)
    }

    /// Computes the pairs that were kept; returns how many they were.
    pub(super) fn finish(&mut self) -> Result<u64> {
        let mut computed = 0;
        for query in 0..self.sinks.len() {
            let (k, kept) = (self.sinks[query].most(), &mut self.kept[query]);
            kept.cut::<T>(k, self.base.metric, &self.rounded[query]);
            computed += self.settle(query)?;
        }
        Ok(computed + self.compute_if(0)?)
    }

    /// Offers the kept pairs of a query whose sums are known, and lets the others be computed.
    fn settle(&mut self, query: usize) -> Result<u64> {
        let pairs = self.kept[query].take();
        for (sum, row) in &pairs {
            let of = &self.rounded[query];
            let sum = f64::from(*sum) - of.offset;
            match of.integral.and_then(|x| self.base.integral_square(x, *row as usize, sum)) {
                Some(sum) => self.offer(query, *row, sum),
                None => self.passed.push((query as u32, *row)),
            }
        }
        self.kept[query].give_back(pairs);
        self.compute_if(SETTLED)
    }

    /// Finds the pairs of all queries and some panels that pass.
    fn sweep(&mut self, panels: Range<usize>) {
        let (base, words) = (self.base, self.base.words());
        self.least.clear();
        let queries = self.rounded.iter_mut().zip(self.sinks.iter()).zip(&self.kept);
        self.least.extend(
            queries.map(|((query, sink), kept)| {
                query.least_now(sink.reach().to_f64()).max(kept.least())
            }),
        );
        let mut found = std::mem::take(&mut self.found);
        match (&base.coarse, &mut self.packed) {
            (Some(coarse), Forms::Coarse(queries)) => {
                let of = (panels.clone(), &base.starts[..], &base.decided[..]);
                self.looked += coarse.sweep(base.level, of, (queries, &self.least), &mut found);
            }
            (_, Forms::Packed(queries)) => {
                let swept = Panels {
                    groups: &base.groups[panels.start * words..panels.end * words],
                    starts: &base.starts[panels.clone()],
                };
                base.level.sweep(base.scale.width, swept, queries, &self.least, &mut found);
            }
            _ => unreachable!("queries are of the base's form"),
        }
        let first = (panels.start * ROWS) as u32;
        for Passed { query, row, sum } in found.drain(..) {
            let (query, row) = (query as usize, first + row);
            let is_decided = base.decided[row as usize / ROWS] >> (row as usize % ROWS) & 1 == 1;
            if is_decided && !self.visit.is_itself(self.queries.first + query, row as usize) {
                self.kept[query].push(sum, row);
            }
        }
        self.found = found;
    }

    fn offer(&mut self, query: usize, row: u32, sum: T) {
        let sink = &mut self.sinks[query];
        if sum <= sink.reach() {
            sink.offer(sum, self.visit.number(row as usize));
        }
    }

    /// Computes the outliers for every query.
    fn outliers(&mut self, rows: Range<usize>) -> Result<u64> {
        let outliers = self.base.outliers(rows);
        let mut computed = 0;
        for query in 0..self.sinks.len() as u32 {
            self.passed.extend(outliers.iter().map(|row| (query, *row)));
            computed += self.compute_if(SETTLED)?;
        }
        Ok(computed)
    }

    /// If more than so many pairs have passed, computes their sums, and offers them to their sinks; returns
    /// how many they were.
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
        exact::Pairs {
            metric: self.base.metric,
            queries: self.queries.values,
            base: self.base.rows.reals().unwrap_or_default(),
            dim: self.base.rows.matrix().dim(),
            pairs: &self.passed,
            found: |(query, row), sum| {
                let (query, row) = (query as usize, row as usize);
                let sink = &mut sinks[query];
                if sum <= sink.reach() && !visit.is_itself(first + query, row) {
                    sink.offer(sum, visit.number(row));
                }
            },
        }
        .compute(self.base.level);
        self.passed.clear();
        Ok(computed as u64)
    }
}

/// Puts pairs in the order of their rows, by a few bits of these at a time; `other` is memory to do so.
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
