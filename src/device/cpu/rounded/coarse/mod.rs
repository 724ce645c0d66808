//! A first look at rows of 16 bits, in 8 or 7: half the products leave few pairs whose sums in 16 bits are needed.
//!
//! With a step s, a row x̂ of whole numbers is `s h + e`, and a query q̂, with a step of its own, `s_q g + f`. By Cauchy
//! and Schwarz
//!
//! `q̂·x̂ ≤ s_q s g·h + s_q ‖g‖ ‖e‖ + ‖f‖ ‖x̂‖`.
//!
//! The last two terms are allowed for where a row's sum starts, for the lengths that ‖g‖ and ‖f‖ hardly exceed; what a
//! query exceeds them by is allowed for by the longest of all rows, in the least sum that passes. As each row has its
//! own start, a few rows may be cut off at the largest number.

mod scale;

use std::ops::Range;

use self::scale::CoarseQuery;
pub(super) use self::scale::Longest;
pub(in crate::device::cpu) use self::scale::{CoarseScale, MOST_GUESSED};
use crate::device::cpu::simd::chains::prefetch;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::lines::{Chosen, Line, Lines};
use crate::device::cpu::simd::panels::{Found, Group, Packed, Panels, ROWS, Starts};
use crate::memory::Aligned;

/// The start with which no row passes, and no sum leaves 32 bits.
const NEVER: i32 = i32::MIN / 2;

/// Base rows in 8 or 7 bits, and row by row in 16.
#[derive(Debug)]
pub(in crate::device::cpu) struct Coarse {
    pub(super) scale: CoarseScale,
    pub(super) groups: Aligned<Group>,
    pub(super) starts: Vec<Starts>,
    pub(super) lines: Aligned<Line>,
    /// The longest residual and the longest row, in steps.
    pub(super) longest: Longest,
}

/// Queries as they are compared with a base.
#[derive(Debug)]
pub(in crate::device::cpu) enum Forms {
    Packed(Packed),
    Coarse(CoarseQueries),
}

/// Queries in 8 bits, and row by row in 16.
#[derive(Debug)]
pub(in crate::device::cpu) struct CoarseQueries {
    each: Vec<CoarseQuery>,
    packed: Packed,
    lines: Aligned<Line>,
    /// For each, the least sum that passes in fewer bits.
    least: Vec<i32>,
    /// Pairs of the last panels that passed.
    looked: usize,
}

impl Coarse {
    /// Room for so many panels.
    pub fn new(scale: CoarseScale, panels: usize) -> Self {
        let groups = Aligned::zeros(panels * Panels::groups_of(scale.words()));
        let lines = Aligned::zeros(panels * ROWS * scale.lines());
        let starts = vec![Starts([NEVER; ROWS]); panels];
        Self { scale, groups, starts, lines, longest: Longest::default() }
    }

    /// Bytes of a panel.
    pub fn bytes(scale: &CoarseScale) -> usize {
        let line = ROWS * size_of::<Line>();
        Panels::bytes_of(scale.words()) + size_of::<Starts>() + scale.lines() * line
    }

    /// Queries from their words of 16 bits, as many each.
    pub fn queries(&self, words: &[i32], length: usize, level: Level) -> CoarseQueries {
        let (count, per_row) = (words.len() / length, self.scale.lines());
        let mut lines = Aligned::zeros(count * per_row);
        let (mut each, mut coarse) = (Vec::with_capacity(count), Vec::new());
        for (words, lines) in words.chunks_exact(length).zip(lines.chunks_exact_mut(per_row)) {
            let mut numbers = vec![0; 2 * length];
            let pairs = numbers.as_chunks_mut().0.iter_mut();
            pairs.zip(words).for_each(|(to, word)| *to = [*word as i16, (*word >> 16) as i16]);
            numbers.truncate(self.scale.dim);
            Line::copy(&numbers, lines);
            each.push(self.scale.query(&numbers, &mut coarse));
        }
        let packed = level.pack(&coarse, self.scale.words());
        CoarseQueries { each, packed, lines, least: Vec::new(), looked: 0 }
    }

    /// Only pairs whose sums in 16 bits may be at least these will pass.
    pub fn limit(&self, queries: &mut CoarseQueries, least: &[i32]) {
        let CoarseQueries { each, least: coarse, .. } = queries;
        coarse.clear();
        let each = each.iter().zip(least);
        coarse.extend(each.map(|(query, least)| self.scale.least(query, *least, &self.longest)));
    }

    /// Finds the pairs of all queries and some panels whose sums in 16 bits, of which `starts` are the first terms, are
    /// at least the query's; returns how many sums that took. `decided` has a bit for each row that may pass.
    pub fn sweep(
        &self,
        level: Level,
        (panels, starts, decided): (Range<usize>, &[Starts], &[u64]),
        (queries, least): (&mut CoarseQueries, &[i32]),
        found: &mut Found,
    ) -> u64 {
        self.limit(queries, least);
        // Most rows will be looked at, as of the panels before, or few.
        let next = match queries.looked > panels.len() * ROWS {
            true => self.lines_of(panels.clone()),
            false => &[],
        };
        self.look(level, (panels.clone(), &self.starts[panels.clone()]), queries, next, found);
        queries.looked = found.len();
        self.keep(level, (panels, starts, decided), (queries, least), found);
        queries.looked as u64
    }

    /// Finds the pairs of all queries and some panels, of which sums in fewer bits start with these, that pass; meanwhile
    /// some lines come from memory.
    pub fn look(
        &self,
        level: Level,
        (panels, starts): (Range<usize>, &[Starts]),
        CoarseQueries { packed, least, .. }: &CoarseQueries,
        next: &[Line],
        found: &mut Found,
    ) {
        let own = Panels { groups: &self.groups, starts: &self.starts }.some(panels);
        let swept = (self.scale.width, Panels { starts, ..own });
        level.sweep_before(next, swept, (packed, least), found);
    }

    /// Asks for the rows in 16 bits of pairs that passed, all of which come from memory at a time then.
    pub fn ask_for(&self, panels: Range<usize>, found: &Found) {
        let lines = self.lines_of(panels);
        for row in found.iter().map(|pair| pair.row as usize) {
            prefetch(&lines[row * self.scale.lines()..][..self.scale.lines()]);
        }
    }

    /// Keeps those of some pairs whose sums in 16 bits, as of [`sweep`](Self::sweep), are at least the query's.
    pub fn keep(
        &self,
        level: Level,
        (panels, starts, decided): (Range<usize>, &[Starts], &[u64]),
        (queries, least): (&CoarseQueries, &[i32]),
        found: &mut Found,
    ) {
        let per_row = self.scale.lines();
        let base = Lines { all: self.lines_of(panels.clone()), per_row };
        let queries = Lines { all: &queries.lines, per_row };
        let (starts, decided) = (&starts[panels.clone()], &decided[panels]);
        level.keep(Chosen { base, queries, starts, decided, least }, found);
    }

    fn lines_of(&self, panels: Range<usize>) -> &[Line] {
        let of_panel = ROWS * self.scale.lines();
        &self.lines[panels.start * of_panel..panels.end * of_panel]
    }
}
