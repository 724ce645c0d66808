//! The search of a task's queries through the blocks.

use std::ops::Range;

use super::base::Quantised;
use super::query::{Query, Tightened};
use crate::device::cpu::search::exact;
use crate::device::cpu::search::sink::Sink;
use crate::device::cpu::search::traversal::{BLOCK_ROWS, Block, Visit};
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::vnni::{Hits, QUERIES, ROWS, Starts};

/// From this slack, in steps, and this many dimensions on, it pays to use each row's own residual.
const LEAST_SLACK: f64 = 0.1;
const LEAST_SLACK_DIM: usize = 16;
/// The most that a start may be lowered by, so that sums stay within 32 bits.
const MOST_TIGHTENED: f32 = 5e8;
/// One query in this many is sampled to tighten the starting values.
const SAMPLED: usize = 4;
const PANELS_PER_BLOCK: usize = BLOCK_ROWS / ROWS;

/// The state of a task's queries while they visit the blocks.
pub(super) struct Search<'a, T, K> {
    pub(super) base: &'a Quantised<T>,
    pub(super) queries: &'a Block<'a, T>,
    pub(super) visit: &'a Visit<'a>,
    pub(super) rounded: Vec<Query>,
    /// The starting values of the sums of the current block's rows.
    pub(super) starts: Vec<Starts>,
    pub(super) tightened: Tightened,
    /// Pairs that passed in the current block: positions of the query in the task, and of the row.
    pub(super) passed: Vec<(u32, u32)>,
    pub(super) hits: Vec<Hits>,
    /// All sums of the panel of each hit, if the rows are whole.
    pub(super) sums: Vec<Starts>,
    pub(super) sinks: &'a mut [K],
}

impl<T: Lanes, K: Sink<T>> Search<'_, T, K> {
    /// Compares all queries with a block; returns how many pairs were computed exactly.
    pub(super) fn block(&mut self, block: usize) -> u64 {
        let panels = block * PANELS_PER_BLOCK..(block + 1) * PANELS_PER_BLOCK;
        let panels = panels.start..panels.end.min(self.base.starts.len());
        self.tighten(panels.clone());
        let (mut computed, mut next, mut step) = (0, panels.start, 1);
        while next < panels.end {
            // Until lists are full, everything passes: take a few panels at a time.
            let full = self.sinks.iter().all(|sink| sink.reach() < T::INFINITY);
            let end = if full && next == panels.start { panels.end } else { next + step };
            computed += self.panels(next..end.min(panels.end));
            (next, step) = (end, 2 * step);
        }
        computed
    }

    /// Tightens the starting values of some panels' sums to the sinks' current reaches.
    fn tighten(&mut self, panels: Range<usize>) {
        let base = self.base;
        let starts = &base.starts[panels.clone()];
        if base.most_slack < LEAST_SLACK || base.scale.centre.len() < LEAST_SLACK_DIM {
            self.starts.clear();
            self.starts.extend_from_slice(starts);
            return;
        }
        let sample = self.rounded.iter_mut().zip(self.sinks.iter()).step_by(SAMPLED);
        let distances = sample.map(|(query, sink)| query.distance(sink.reach().to_f64()));
        let mut distances: Vec<_> = distances.filter(|distance| distance.is_finite()).collect();
        // Most queries benefit from the full tightening, and none loses much.
        let quarter = distances.len() / 4;
        let distance = match distances.len() {
            0 => 0.0,
            _ => *distances.select_nth_unstable_by(quarter, f64::total_cmp).1,
        };
        self.tightened = Tightened { distance, most_slack: base.most_slack };
        let twice =
            (2.0 * (distance + base.residual / base.scale.step) * (1.0 - 1e-6)).min(1e9) as f32;
        let most = (twice, MOST_TIGHTENED);
        base.vnni.tighten(starts, &base.slack[panels], most, &mut self.starts);
    }

    fn panels(&mut self, panels: Range<usize>) -> u64 {
        self.passed.clear();
        for first in (0..self.sinks.len()).step_by(QUERIES) {
            self.sweep(first, panels.clone());
        }
        self.outliers(panels.start * ROWS..panels.end * ROWS);
        self.compute();
        self.passed.len() as u64
    }

    /// Records the pairs of four queries and some panels that pass.
    fn sweep(&mut self, first: usize, panels: Range<usize>) {
        let base = self.base;
        let words = base.groups.len() / base.starts.len();
        let count = (self.sinks.len() - first).min(QUERIES);
        let mut least = [i32::MAX; QUERIES];
        for (i, least) in least.iter_mut().enumerate().take(count) {
            let reach = self.sinks[first + i].reach();
            *least = self.rounded[first + i].least(reach.to_f64(), self.tightened);
        }
        // A partial group repeats its last query, whose repeated hits are ignored.
        let query = |i: usize| self.rounded[first + i.min(count - 1)].words.as_slice();
        let queries: [&[i32]; QUERIES] = std::array::from_fn(query);
        self.hits.clear();
        let groups = &base.groups[panels.start * words..panels.end * words];
        // The starts are those of a block.
        let starts = panels.start % PANELS_PER_BLOCK..;
        let starts = &self.starts[starts][..panels.len()];
        self.sums.clear();
        let sums = base.scale.integral.then_some(&mut self.sums);
        base.vnni.sweep(groups, starts, queries, least, &mut self.hits, sums);
        for i in 0..self.hits.len() {
            let hit = self.hits[i];
            if hit.query >= count {
                continue;
            }
            let (query, panel) = (first + hit.query, panels.start + hit.panel);
            let mut rows = hit.rows & base.decided[panel];
            while rows != 0 {
                let lane = rows.trailing_zeros();
                rows &= rows - 1;
                let row = (panel * ROWS) as u32 + lane;
                match self.integral_sum(query, panel, lane, i) {
                    Some(sum) => self.offer(query, row, sum),
                    None => self.passed.push((query as u32, row)),
                }
            }
        }
    }

    /// The sum of a pair of whole rows, if this type holds it and all partial sums exactly, so that
    /// the contract's order gives the same result as any other.
    fn integral_sum(&self, query: usize, panel: usize, lane: u32, hit: usize) -> Option<T> {
        let query = &self.rounded[query];
        let square = query.integral?;
        let sum = f64::from(self.sums[hit].0[lane as usize]);
        let odd_norm = (self.base.odd_norm[panel] >> lane & 1) as f64;
        let squares = square - 2.0 * (sum - query.offset) + odd_norm;
        (squares * T::EPSILON.to_f64() <= 2.0).then(|| T::from_f64(squares))
    }

    fn offer(&mut self, query: usize, row: u32, sum: T) {
        let (visit, first, sink) = (self.visit, self.queries.first, &mut self.sinks[query]);
        if sum <= sink.reach() && !visit.is_itself(first + query, row as usize) {
            sink.offer(sum, visit.number(row as usize));
        }
    }

    /// Lets the outliers pass for every query.
    fn outliers(&mut self, rows: Range<usize>) {
        let all = &self.base.outliers;
        let start = all.partition_point(|row| (*row as usize) < rows.start);
        let end = all.partition_point(|row| (*row as usize) < rows.end);
        for query in 0..self.sinks.len() as u32 {
            self.passed.extend(all[start..end].iter().map(|row| (query, *row)));
        }
    }

    /// Computes the sums of the pairs that passed, and offers them to their sinks.
    fn compute(&mut self) {
        let (visit, first, sinks) = (self.visit, self.queries.first, &mut self.sinks);
        exact::Pairs {
            sum: self.base.metric.sum(),
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
        .compute(self.base.vnni);
    }
}
