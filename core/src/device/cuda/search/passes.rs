//! The passes of a search: the size of a query's list, and the order in which base panels are
//! scanned.
//!
//! A pass compares every query with some panels against a fixed threshold; its candidates are then
//! merged, which lowers the threshold for the next pass. Passes grow with the number of rows seen:
//! k of these are within the threshold, so a pass `growth` times as large finds about k · growth
//! candidates per query, half of its slots. Panels are visited at a stride near the golden ratio,
//! so that the rows seen are spread evenly. A base that defeats this costs time (queries whose
//! candidates overflow are searched again), but never changes an answer.
//!
//! No CUDA here: this is pure arithmetic, and is tested as such.

use std::ops::Range;

/// Rows in a panel.
pub(super) const PANEL: usize = 128;

/// The maximum size of a pass relative to the rows seen before it, of a scan and of a filtered
/// pass.
const MOST_GROWTH: usize = 8;
const MOST_FILTERED_GROWTH: f64 = 2.0;

/// The smallest and the largest number of panels whose bit rows are sorted together, powers of two.
pub(super) const FIRST_WINDOW: usize = 16;
pub(super) const WINDOW: usize = 128;

/// Panels that are scanned before the filter starts: enough for useful thresholds.
const SCANNED_FIRST: usize = 4;

/// The longest lists that are bounded by the minima of 32 groups of rows.
const MOST_BOUNDED: usize = 16;

/// A last pass smaller than this share of its regular size is added to the one before.
const CRUMB: f64 = 0.25;

/// Entries of a query's list: k neighbours and at least 2.75 times as many candidates; a power of
/// two, because the sort needs one. Three times as many would double the slots of lists that are a
/// few longer than a power of two, as those of k = 1,024 are.
pub(super) fn slots(k: usize) -> usize {
    (4 * k - k / 4).max(2 * PANEL).next_power_of_two()
}

/// Panels that hold this many rows.
pub(super) fn panels(rows: usize) -> usize {
    rows.div_ceil(PANEL)
}

/// A stride that visits each panel once, and spreads every prefix of the visits evenly.
pub(super) fn stride(panels: usize) -> usize {
    let golden = (panels as f64 * 0.618_033_988_749_895) as usize;
    (golden.max(1)..).find(|candidate| gcd(*candidate, panels) == 1).unwrap_or(1)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A range of visits to panels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SearchPass {
    /// Visits, each to one panel.
    pub(super) visits: Range<usize>,
    pub(super) kind: PassKind,
    /// Entries of every list after the pass.
    pub(super) k: usize,
}

/// The use of a pass's pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PassKind {
    /// They bound the lists, and are compared again later.
    Bounding,
    /// Every pair is a candidate, because lists may not be full yet.
    Dense,
    /// Pairs within the threshold are candidates.
    Scanned,
    /// Pairs are filtered first; visits are whole tiles.
    Filtered,
}

/// The boundaries of filtered passes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Cuts {
    /// Between tiles of this many panels.
    Tiles(usize),
    /// Between windows: [`FIRST_WINDOW`] panels, then as many as lie before, up to [`WINDOW`]. Bit
    /// rows are sorted within a window; the larger it is, the more alike are the rows of a tile.
    Windows,
}

impl Cuts {
    /// The first boundary at or after a visit.
    fn next(self, visit: usize) -> usize {
        match self {
            Self::Tiles(panels) => visit.next_multiple_of(panels),
            Self::Windows if visit >= WINDOW => visit.next_multiple_of(WINDOW),
            Self::Windows if visit > 0 => visit.next_power_of_two().max(FIRST_WINDOW),
            Self::Windows => 0,
        }
    }
}

/// The number of windows of `panels` panels.
pub(super) fn windows(panels: usize) -> usize {
    let ends = std::iter::successors(Some(0), |end| Some(Cuts::Windows.next(end + 1)));
    ends.take_while(|end| *end < panels).count()
}

/// The parameters of filtered passes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiles {
    pub(super) cuts: Cuts,
    /// Words for hits in the memory of a candidate.
    pub(super) words: usize,
    /// Panels that bound the lists.
    pub(super) bounding: usize,
}

/// The passes of one call.
///
/// With a filter, previously empty lists start with few entries: the expected number of entries
/// that the rows seen share with the final list, and a margin. A row beyond them is unlikely to be
/// among the k nearest. If one is, the list is not full at the end, and is made again.
#[derive(Debug)]
pub(super) struct SearchPasses {
    panels: usize,
    /// Places in panels without a row.
    padding: usize,
    k: usize,
    slots: usize,
    /// Rows that the lists were offered before this call.
    offered: usize,
    next: usize,
    tiles: Option<Tiles>,
    /// Whether lists are bounded.
    is_bounded: bool,
}

impl SearchPasses {
    /// Passes over `rows` base rows, for lists that were offered `offered` rows before.
    pub(super) fn new(rows: usize, k: usize, offered: usize) -> Self {
        let panels = panels(rows);
        let padding = panels * PANEL - rows;
        let (slots, next, tiles) = (slots(k), 0, None);
        Self { panels, padding, k, slots, offered, next, tiles, is_bounded: false }
    }

    /// The same passes, most of them filtered.
    pub(super) fn filtered(self, tiles: Option<Tiles>) -> Self {
        Self { tiles, ..self }
    }

    /// Whether lists may not be full at the end although there are enough rows.
    pub(super) fn may_end_short(&self) -> bool {
        self.tiles.is_some() && self.offered == 0
    }

    /// Whether lists may not be full yet: all padding may be in the panels seen, and one row may be
    /// the query itself. An unnecessary dense pass is only slower.
    fn may_be_short(&self) -> bool {
        let k = if self.may_end_short() { self.rank(self.next) } else { self.k };
        self.offered + (self.next * PANEL).saturating_sub(self.padding) <= k
    }

    /// The expected number of entries of the final list among the rows of `panels` panels, plus
    /// five standard deviations.
    fn rank(&self, panels: usize) -> usize {
        let expected = self.k as f64 * panels as f64 / self.panels as f64;
        let rank = (expected + 5.0 * expected.sqrt() + 4.0).ceil() as usize;
        if panels >= self.panels { self.k } else { rank.min(self.k) }
    }

    /// Panels that hold the rows seen.
    fn seen(&self) -> usize {
        self.next + self.offered / PANEL
    }

    fn pass(&mut self, size: usize, kind: PassKind) -> SearchPass {
        let visits = self.next..self.next + size.min(self.panels - self.next);
        if kind != PassKind::Bounding {
            self.next = visits.end;
        }
        let k = match self.may_end_short() {
            true if !self.is_bounded => self.rank(visits.end),
            _ => self.k,
        };
        SearchPass { visits, kind, k }
    }

    /// The next pass with a filter.
    fn next_filtered(&mut self, tiles: Tiles) -> SearchPass {
        if self.may_end_short() && !self.is_bounded && self.next == 0 {
            if self.k <= MOST_BOUNDED {
                self.is_bounded = true;
                return self.pass(tiles.bounding, PassKind::Bounding);
            }
            let fits = (self.slots - self.rank(SCANNED_FIRST)) / PANEL;
            let least = (self.rank(SCANNED_FIRST) + 1 + self.padding).div_ceil(PANEL);
            let size = tiles.cuts.next(SCANNED_FIRST.max(least));
            return self.pass(size.min(fits), PassKind::Dense);
        }
        let seen = if self.is_bounded { self.next.max(tiles.bounding) } else { self.seen() };
        let k = if self.may_end_short() && !self.is_bounded { self.rank(seen) } else { self.k };
        let others = tiles.cuts.next(self.next) - self.next;
        if others > 0 {
            let most = seen * (self.slots - self.k) / (2 * k);
            return self.pass(others.min(most.max(1)), PassKind::Scanned);
        }
        let room = (self.slots - self.k) * tiles.words;
        let growth = (room as f64 / (3 * k) as f64).min(MOST_FILTERED_GROWTH);
        let end = self.next + ((seen as f64 * growth) as usize).max(1);
        let whole = tiles.cuts.next(end) - self.next;
        let left = self.panels - self.next;
        let is_last = (left as f64) < (1.0 + CRUMB) * whole as f64;
        self.pass(if is_last { left } else { whole }, PassKind::Filtered)
    }
}

impl Iterator for SearchPasses {
    type Item = SearchPass;

    fn next(&mut self) -> Option<SearchPass> {
        let left = self.panels - self.next;
        if left == 0 {
            return None;
        }
        let is_dense = self.may_be_short();
        if let Some(tiles) = self.tiles
            && (!is_dense || self.may_end_short())
        {
            return Some(self.next_filtered(tiles));
        }
        let room = self.slots - self.k;
        let size = if is_dense || self.next == 0 {
            // Just enough to fill the lists; there are as many candidates as rows, so they always
            // fit.
            (self.k + 1 + self.padding).div_ceil(PANEL).clamp(1, room / PANEL)
        } else {
            let growth = (room as f64 / (2 * self.k) as f64).min(MOST_GROWTH as f64);
            ((self.next as f64 * growth) as usize).max(1)
        };
        Some(self.pass(size, if is_dense { PassKind::Dense } else { PassKind::Scanned }))
    }
}

/// Cuts a pass into launches of at most this much work, unless a single panel exceeds it.
pub(super) fn launches(
    visits: &Range<usize>,
    queries: usize,
    dim: usize,
    most: f64,
) -> impl Iterator<Item = Range<usize>> + use<> {
    let per_panel = operations(1, queries, dim);
    let size = ((most / per_panel) as usize).max(1);
    let end = visits.end;
    visits.clone().step_by(size).map(move |begin| begin..(begin + size).min(end))
}

/// Pairs × dimensions of some panels; the epilogue costs about two dimensions per pair.
pub(super) fn operations(panels: usize, queries: usize, dim: usize) -> f64 {
    panels as f64 * PANEL as f64 * queries as f64 * (dim + 2) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_room_for_a_panel_of_candidates() {
        for k in [1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 1000, 1024, 4096, 20_000, 1_000_000] {
            assert!(slots(k).is_power_of_two());
            assert!(slots(k) - k >= PANEL && 4 * (slots(k) - k) >= 11 * k, "k = {k}");
        }
    }

    #[test]
    fn a_stride_visits_every_panel_once() {
        for panels in 1..300 {
            let stride = stride(panels);
            let mut seen = vec![false; panels];
            (0..panels).for_each(|visit| seen[visit * stride % panels] = true);
            assert!(seen.iter().all(|x| *x), "{panels} panels");
        }
    }

    #[test]
    fn rounds_cover_every_visit_in_order() {
        for rows in [0, 1, 127, 128, 129, 1000, 100_000, 3_000_000] {
            for k in [1, 5, 100, 4096, 20_000] {
                for offered in [0, 3, k, k + 1, 10 * k] {
                    let mut next = 0;
                    for round in SearchPasses::new(rows, k, offered) {
                        assert_eq!(round.visits.start, next);
                        assert!(round.visits.end > next);
                        next = round.visits.end;
                    }
                    assert_eq!(next, panels(rows));
                }
            }
        }
    }

    #[test]
    fn candidates_of_first_and_dense_rounds_always_fit() {
        for k in [1, 5, 64, 100, 4096, 20_000] {
            for (i, round) in SearchPasses::new(1_000_000, k, 0).enumerate() {
                if i == 0 || round.kind == PassKind::Dense {
                    assert!(round.visits.len() * PANEL <= slots(k) - k, "k = {k}");
                }
            }
        }
    }

    #[test]
    fn rounds_are_dense_until_the_lists_are_full() {
        for (k, offered) in [(1, 0), (5, 0), (127, 0), (128, 0), (4096, 0), (4096, 4000)] {
            for base in [1_000_000, 999_937, 129] {
                for round in SearchPasses::new(base, k, offered) {
                    let padding = panels(base) * PANEL - base;
                    let rows = offered + (round.visits.start * PANEL).saturating_sub(padding);
                    assert!(round.kind == PassKind::Dense || rows > k, "k = {k}, {rows} rows");
                }
            }
        }
        assert!(SearchPasses::new(1000, 2000, 0).all(|round| round.kind == PassKind::Dense));
        assert!(SearchPasses::new(1000, 5, 6).all(|round| round.kind != PassKind::Dense));
    }

    #[test]
    fn filtered_passes_are_whole_tiles_of_full_lists() {
        for (rows, k) in
            [(3, 5), (129, 5), (1000, 40), (1_000_000, 10), (1_000_001, 1024), (70_000, 100)]
        {
            let all_cuts = [Cuts::Tiles(1), Cuts::Tiles(2), Cuts::Windows];
            let all_cuts =
                all_cuts.map(|cuts| [0, 50, 7000, 100_000].map(|offered| (cuts, offered)));
            for (cuts, offered) in all_cuts.into_iter().flatten() {
                let tiles = Tiles { cuts, words: 2, bounding: 4 };
                let all = SearchPasses::new(rows, k, offered).filtered(Some(tiles));
                let (mut next, mut before) = (0, 0);
                for pass in all {
                    assert_eq!(pass.visits.start, next);
                    assert!(pass.k <= k && pass.k >= before, "{pass:?}");
                    before = pass.k;
                    match pass.kind {
                        PassKind::Bounding => {
                            assert!(k <= MOST_BOUNDED && offered == 0 && next == 0);
                            continue;
                        }
                        PassKind::Dense => {
                            assert!(pass.visits.len() * PANEL <= slots(k) - pass.k);
                        }
                        PassKind::Filtered => {
                            let Range { start, end } = pass.visits;
                            assert_eq!(cuts.next(start), start);
                            assert!(cuts.next(end) == end || end == panels(rows));
                        }
                        PassKind::Scanned => {}
                    }
                    next = pass.visits.end;
                }
                assert_eq!((next, before), (panels(rows), k));
            }
        }
        for k in [10, 100, 1024] {
            for (cuts, most) in [(Cuts::Tiles(2), 9), (Cuts::Windows, 10)] {
                let tiles = Some(Tiles { cuts, words: 2, bounding: 4 });
                let all: Vec<_> = SearchPasses::new(1_000_000, k, 0).filtered(tiles).collect();
                assert!(all.len() <= most, "{all:?}");
            }
        }
    }

    #[test]
    fn windows_grow_and_cover_all_panels() {
        for panels in [1, 15, 16, 17, 32, 33, 127, 128, 129, 256, 1000] {
            let mut ends = vec![0];
            while *ends.last().unwrap() < panels {
                ends.push(Cuts::Windows.next(ends.last().unwrap() + 1));
            }
            assert_eq!(windows(panels), ends.len() - 1, "{panels}");
            for (i, window) in ends.windows(2).enumerate() {
                // As in `sort_rows` in `kernels/filter/bits.cuh`.
                let small = (WINDOW / FIRST_WINDOW).ilog2() as usize + 1;
                let (size, before) = match i {
                    0 => (FIRST_WINDOW, 0),
                    i if i < small => (FIRST_WINDOW << (i - 1), FIRST_WINDOW << (i - 1)),
                    i => (WINDOW, (i - small + 1) * WINDOW),
                };
                assert_eq!((window[0], window[1]), (before, before + size));
            }
        }
    }

    #[test]
    fn few_rounds_suffice() {
        assert!(SearchPasses::new(1_000_000, 10, 0).count() <= 6);
        assert!(SearchPasses::new(1_000_000, 1024, 0).count() <= 10);
    }

    #[test]
    fn launches_are_bounded_and_whole() {
        let cut: Vec<_> = launches(&(10..1000), 131_072, 1024, 5e11).collect();
        assert_eq!(cut.first().map(|x| x.start), Some(10));
        assert_eq!(cut.last().map(|x| x.end), Some(1000));
        assert!(cut.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert!(cut.iter().all(|x| operations(x.len(), 131_072, 1024) <= 5e11));
        assert_eq!(launches(&(0..2), 131_072, 1 << 20, 5e11).count(), 2);
    }
}
