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

/// The start with which no row passes, and no sum overflows 32 bits.
const NEVER: i32 = i32::MIN / 2;

/// Base rows with codes of 8 or 7 bits in panels, and codes of 16 bits row by row.
#[derive(Debug)]
pub(in crate::device::cpu) struct Coarse {
    pub(super) scale: CoarseScale,
    pub(super) groups: Aligned<Group>,
    pub(super) starts: Vec<Starts>,
    pub(super) lines: Aligned<Line>,
    /// The longest residual and the longest row, in steps.
    pub(super) longest: Longest,
}

/// The words of queries in the layout in which a base compares them.
#[derive(Debug)]
pub(in crate::device::cpu) enum Forms {
    Packed(Packed),
    Coarse(CoarseQueries),
}

/// Queries with codes of 8 bits, and codes of 16 bits row by row.
#[derive(Debug)]
pub(in crate::device::cpu) struct CoarseQueries {
    each: Vec<CoarseQuery>,
    packed: Packed,
    lines: Aligned<Line>,
    /// For each, its threshold in the prefilter.
    least: Vec<i32>,
    /// The number of pairs of the last panels that passed the prefilter.
    looked: usize,
}

impl Coarse {
    /// Allocates this many panels.
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

    /// Queries from the words of their 16-bit codes, `length` of each.
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

    /// Sets the thresholds of the prefilter, so that no pair is lost whose 16-bit sum is at least `least`.
    pub fn limit(&self, queries: &mut CoarseQueries, least: &[i32]) {
        let CoarseQueries { each, least: coarse, .. } = queries;
        coarse.clear();
        let each = each.iter().zip(least);
        coarse.extend(each.map(|(query, least)| self.scale.least(query, *least, &self.longest)));
    }

    /// Finds the pairs of all queries and some panels whose 16-bit sums, which begin with `starts`, reach the query's
    /// threshold; returns the number of these sums that were computed. `decided` has a bit for each row that may
    /// pass.
    pub fn sweep(
        &self,
        level: Level,
        (panels, starts, decided): (Range<usize>, &[Starts], &[u64]),
        (queries, least): (&mut CoarseQueries, &[i32]),
        found: &mut Found,
    ) -> u64 {
        self.limit(queries, least);
        // If more pairs of the last panels passed than there are rows, prefetches all rows in 16 bits.
        let next = match queries.looked > panels.len() * ROWS {
            true => self.lines_of(panels.clone()),
            false => &[],
        };
        self.look(level, (panels.clone(), &self.starts[panels.clone()]), queries, next, found);
        queries.looked = found.len();
        self.keep(level, (panels, starts, decided), (queries, least), found);
        queries.looked as u64
    }

    /// Finds the pairs of all queries and some panels that pass the prefilter, with these initial sums, and meanwhile
    /// prefetches the lines `next`.
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

    /// Prefetches the 16-bit rows of the pairs that passed, so that their reads from memory overlap.
    pub fn ask_for(&self, panels: Range<usize>, found: &Found) {
        let lines = self.lines_of(panels);
        for row in found.iter().map(|pair| pair.row as usize) {
            prefetch(&lines[row * self.scale.lines()..][..self.scale.lines()]);
        }
    }

    /// Keeps the pairs whose 16-bit sums, as in [`sweep`](Self::sweep), reach the query's threshold.
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
