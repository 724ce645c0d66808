//! A prefilter of 16-bit codes by 8 or 7 bits: at half the products, it leaves few pairs whose 16-bit sums are
//! needed.
//!
//! With a step s, the 16-bit codes x̂ of a row are `s h + e`, and those of a query, with a step of its own, are `q̂ =
//! s_q g + f`. By the Cauchy–Schwarz inequality,
//!
//! `q̂·x̂ ≤ s_q s g·h + s_q ‖g‖ ‖e‖ + ‖f‖ ‖x̂‖`.
//!
//! The last two terms enter the row's initial sum with typical bounds G ≥ ‖g‖ and F ≥ ‖f‖. A query with a larger norm
//! lowers its threshold by the excess times the largest ‖e‖ or ‖x̂‖ of all rows. As each row has its own initial sum,
//! a few codes may be clamped.

mod quantizer;

use std::ops::Range;

pub(super) use self::quantizer::Longest;
use self::quantizer::PrefilterQuery;
pub(super) use self::quantizer::SearchSize;
pub(in crate::device::cpu) use self::quantizer::{MOST_GUESSED, PrefilterQuantizer};
use crate::device::cpu::simd::dot_i16::{CacheLine, CodeLines, DotOperands};
use crate::device::cpu::simd::ordered_sums::prefetch;
use crate::device::cpu::simd::panels::{CodePanels, Group, InitialSums, Packed, PassedPairs, ROWS};
use crate::memory::Aligned;

/// The start with which no row passes, and no sum overflows 32 bits.
const NEVER: i32 = i32::MIN / 2;

/// Base rows with codes of 8 or 7 bits in panels, and codes of 16 bits row by row.
#[derive(Debug)]
pub(in crate::device::cpu) struct Prefilter {
    pub(super) quantizer: PrefilterQuantizer,
    pub(super) groups: Aligned<Group>,
    pub(super) starts: Vec<InitialSums>,
    pub(super) lines: Aligned<CacheLine>,
    /// The longest residual and the longest row, in steps.
    pub(super) longest: Longest,
}

/// Some panels of a base; their 16-bit sums begin with `starts`, and a row may pass if it has a bit in `decided`, which
/// have elements for all panels of the base.
#[derive(Debug, Clone)]
pub(in crate::device::cpu) struct BasePanels<'a> {
    pub panels: Range<usize>,
    pub starts: &'a [InitialSums],
    pub decided: &'a [u64],
}

/// The words of queries in the layout in which a base compares them.
#[derive(Debug)]
pub(in crate::device::cpu) enum QueryCodes {
    Packed(Packed),
    Prefiltered(PrefilterQueries),
}

/// Queries with codes of 8 bits, and codes of 16 bits row by row.
#[derive(Debug)]
pub(in crate::device::cpu) struct PrefilterQueries {
    each: Vec<PrefilterQuery>,
    packed: Packed,
    lines: Aligned<CacheLine>,
    /// For each, its threshold in the prefilter.
    least: Vec<i32>,
    /// The number of pairs of the last panels that passed the prefilter.
    passed_prefilter: usize,
}

impl Prefilter {
    /// Allocates this many panels.
    pub fn new(quantizer: PrefilterQuantizer, panels: usize) -> Self {
        let groups = Aligned::zeros(panels * CodePanels::groups_of(quantizer.words()));
        let lines = Aligned::zeros(panels * ROWS * quantizer.lines());
        let starts = vec![InitialSums([NEVER; ROWS]); panels];
        Self { quantizer, groups, starts, lines, longest: Longest::default() }
    }

    /// Bytes of a panel.
    pub fn bytes(quantizer: &PrefilterQuantizer) -> usize {
        let line = ROWS * size_of::<CacheLine>();
        CodePanels::bytes_of(quantizer.words())
            + size_of::<InitialSums>()
            + quantizer.lines() * line
    }

    /// Queries from the words of their 16-bit codes, `length` of each.
    pub fn queries(&self, words: &[i32], length: usize) -> PrefilterQueries {
        let (count, per_row) = (words.len() / length, self.quantizer.lines());
        let mut lines = Aligned::zeros(count * per_row);
        let (mut each, mut codes) = (Vec::with_capacity(count), Vec::new());
        for (words, lines) in words.chunks_exact(length).zip(lines.chunks_exact_mut(per_row)) {
            let mut numbers = vec![0; 2 * length];
            let pairs = numbers.as_chunks_mut().0.iter_mut();
            pairs.zip(words).for_each(|(to, word)| *to = [*word as i16, (*word >> 16) as i16]);
            numbers.truncate(self.quantizer.dim);
            CacheLine::copy(&numbers, lines);
            each.push(self.quantizer.query(&numbers, &mut codes));
        }
        let packed = self.quantizer.level.pack(&codes, self.quantizer.words());
        PrefilterQueries { each, packed, lines, least: Vec::new(), passed_prefilter: 0 }
    }

    /// Sets the thresholds of the prefilter, so that no pair is lost whose 16-bit sum is at least `least`.
    pub fn limit(&self, queries: &mut PrefilterQueries, least: &[i32]) {
        let PrefilterQueries { each, least: thresholds, .. } = queries;
        thresholds.clear();
        let each = each.iter().zip(least);
        thresholds
            .extend(each.map(|(query, least)| self.quantizer.least(query, *least, &self.longest)));
    }

    /// Finds the pairs of all queries and some panels whose 16-bit sums reach the query's threshold; returns the number
    /// of these sums that were computed.
    pub fn sweep(
        &self,
        base: BasePanels<'_>,
        queries: &mut PrefilterQueries,
        least: &[i32],
        passed: &mut PassedPairs,
    ) -> u64 {
        self.limit(queries, least);
        let panels = base.panels.clone();
        // If more pairs of the last panels passed than there are rows, prefetches all rows in 16 bits.
        let next = match queries.passed_prefilter > panels.len() * ROWS {
            true => self.lines_of(panels.clone()),
            false => &[],
        };
        self.candidates(panels.clone(), &self.starts[panels], queries, next, passed);
        queries.passed_prefilter = passed.len();
        self.retain(base, queries, least, passed);
        queries.passed_prefilter as u64
    }

    /// Finds the pairs of all queries and some panels that pass the prefilter, with these initial sums, and meanwhile
    /// prefetches the lines `next`.
    pub fn candidates(
        &self,
        panels: Range<usize>,
        starts: &[InitialSums],
        PrefilterQueries { packed, least, .. }: &PrefilterQueries,
        next: &[CacheLine],
        passed: &mut PassedPairs,
    ) {
        let stored = CodePanels { groups: &self.groups, starts: &self.starts }.some(panels);
        let (level, width, swept) =
            (self.quantizer.level, self.quantizer.width, CodePanels { starts, ..stored });
        level.panel_dot_threshold_prefetching(next, width, swept, packed, least, passed);
    }

    /// Prefetches the 16-bit rows of the pairs that passed, to overlap their reads from memory.
    pub fn prefetch_passed(&self, panels: Range<usize>, passed: &PassedPairs) {
        let lines = self.lines_of(panels);
        for row in passed.iter().map(|pair| pair.row as usize) {
            prefetch(&lines[row * self.quantizer.lines()..][..self.quantizer.lines()]);
        }
    }

    /// Keeps the pairs whose 16-bit sums, as in [`sweep`](Self::sweep), reach the query's threshold.
    pub fn retain(
        &self,
        BasePanels { panels, starts, decided }: BasePanels<'_>,
        queries: &PrefilterQueries,
        least: &[i32],
        passed: &mut PassedPairs,
    ) {
        let per_row = self.quantizer.lines();
        let base = CodeLines { all: self.lines_of(panels.clone()), per_row };
        let queries = CodeLines { all: &queries.lines, per_row };
        let (starts, decided) = (&starts[panels.clone()], &decided[panels]);
        let operands = DotOperands { base, queries, starts, decided, least };
        self.quantizer.level.retain_by_dot_i16(operands, passed);
    }

    fn lines_of(&self, panels: Range<usize>) -> &[CacheLine] {
        let of_panel = ROWS * self.quantizer.lines();
        &self.lines[panels.start * of_panel..panels.end * of_panel]
    }
}
