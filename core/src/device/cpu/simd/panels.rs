//! Panels of 64 base rows in integer codes, and the queries that are compared with them.
#![allow(unsafe_code)]

use std::ops::Range;

use crate::memory::Zeros;

/// Base rows in a panel, and in a quarter of it.
pub(in crate::device::cpu) const ROWS: usize = 64;
pub(in crate::device::cpu) const LANES: usize = ROWS / 4;

/// Queries compared with a panel together: the narrow group if there are few, and with AVX-512 without VNNI, whose
/// registers hold products too; else the wide one.
#[cfg(target_arch = "x86_64")]
pub(super) const NARROW_GROUP: usize = 4;
pub(super) const WIDE_GROUP: usize = 6;

/// The range of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::device::cpu) enum Width {
    /// Base rows from 0 to 255, queries from −128 to 127: only with VNNI.
    Eight,
    /// Base rows from 0 to 127, queries from −127 to 127 [whose products fit 16 bits](TOGETHER_IN_16_BITS): only
    /// without VNNI.
    Seven,
    /// From −32,767 to 32,767.
    Sixteen,
}

/// Words of 7-bit rows whose products with a query are added up in 16 bits: over these words, the absolute values of
/// the query's first two codes of each word, and those of its last two, must not exceed [`MOST_IN_16_BITS`] in sum.
pub(in crate::device::cpu) const TOGETHER_IN_16_BITS: usize = 4;
/// See [`TOGETHER_IN_16_BITS`].
pub(in crate::device::cpu) const MOST_IN_16_BITS: i32 = 32_767 / 127;

impl Width {
    /// Dimensions in a word of 32 bits.
    pub fn per_word(self) -> usize {
        match self {
            Self::Eight | Self::Seven => 4,
            Self::Sixteen => 2,
        }
    }
}

/// A word of every row of a quarter of a panel.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct Group(pub [[u8; 4]; LANES]);
// SAFETY: arrays of bytes, of which every pattern of bits is one; nothing is dropped.
unsafe impl Zeros for Group {}

/// For each row of a panel, the initial value of its sum, or the sum.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct InitialSums(pub [i32; ROWS]);
// SAFETY: an array of i32, of which every pattern of bits is one; nothing is dropped.
unsafe impl Zeros for InitialSums {}

/// Panels: the initial sums of each and, for each of its quarters, as many groups as a row has words.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct CodePanels<'a> {
    pub groups: &'a [Group],
    pub starts: &'a [InitialSums],
}

impl CodePanels<'_> {
    /// The groups of a panel whose rows have `words` words.
    pub const fn groups_of(words: usize) -> usize {
        ROWS / LANES * words
    }

    /// Their bytes.
    pub const fn bytes_of(words: usize) -> usize {
        Self::groups_of(words) * size_of::<Group>()
    }

    /// Some of them.
    pub fn some(self, panels: Range<usize>) -> Self {
        let of_panel = self.groups.len() / self.starts.len().max(1);
        Self {
            groups: &self.groups[panels.start * of_panel..panels.end * of_panel],
            starts: &self.starts[panels],
        }
    }
}

/// The groups of each quarter of a panel.
pub(super) fn quarters(panel: &[Group]) -> [&[Group]; ROWS / LANES] {
    let words = panel.len() * LANES / ROWS;
    std::array::from_fn(|quarter| &panel[quarter * words..][..words])
}

/// The words of queries, in the order of a level's kernel.
#[derive(Debug, Clone)]
pub(in crate::device::cpu) struct Packed {
    /// Group by group, and word by word the words of all queries of a group.
    pub(super) words: Vec<i32>,
    /// Words of a query.
    pub(super) length: usize,
    pub(super) together: usize,
}

/// A pair that passed, and its sum.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct PassedPair {
    pub query: u32,
    /// The base row, counted from the first panel.
    pub row: u32,
    pub sum: i32,
}

/// The pairs that a sweep lets pass.
#[derive(Debug, Default)]
pub(in crate::device::cpu) struct PassedPairs {
    /// The row of each pair and, in the bits above, its query.
    pairs: Vec<u32>,
    sums: Vec<i32>,
    row_bits: u32,
}

impl PassedPairs {
    /// Clears the pairs, for this many rows and queries.
    pub(super) fn begin(&mut self, rows: usize, queries: usize) {
        self.truncate(0);
        self.row_bits = rows.next_power_of_two().trailing_zeros();
        let pairs = (queries as u64) << self.row_bits;
        assert!(self.row_bits < u32::BITS && pairs <= 1 << u32::BITS, "pairs of 32 bits");
    }

    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    #[inline(always)]
    pub(super) fn get(&self, i: usize) -> PassedPair {
        self.passed(self.pairs[i], self.sums[i])
    }

    #[inline(always)]
    pub fn iter(&self) -> impl Iterator<Item = PassedPair> {
        self.pairs.iter().zip(&self.sums).map(|(pair, sum)| self.passed(*pair, *sum))
    }

    #[inline(always)]
    fn passed(&self, pair: u32, sum: i32) -> PassedPair {
        let (query, row) = (u64::from(pair) >> self.row_bits, pair & ((1 << self.row_bits) - 1));
        PassedPair { query: query as u32, row, sum }
    }

    /// Moves a pair to an earlier place, with another sum.
    #[inline(always)]
    pub(super) fn keep(&mut self, i: usize, place: usize, sum: i32) {
        (self.pairs[place], self.sums[place]) = (self.pairs[i], sum);
    }

    /// Keeps the first `count` pairs.
    pub(super) fn truncate(&mut self, count: usize) {
        self.pairs.truncate(count);
        self.sums.truncate(count);
    }

    /// The stored form of a pair.
    #[inline(always)]
    pub(super) fn pair(&self, query: usize, row: usize) -> u32 {
        (query << self.row_bits | row) as u32
    }

    /// Appends the pairs whose bits are set; `sums` has the sums of all.
    #[inline(always)]
    pub(super) fn pass(&mut self, first: u32, mut rows: u64, sums: &[i32]) {
        self.pairs.reserve(rows.count_ones() as usize);
        self.sums.reserve(rows.count_ones() as usize);
        while rows != 0 {
            let lane = rows.trailing_zeros();
            rows &= rows - 1;
            self.pairs.push(first + lane);
            self.sums.push(sums[lane as usize]);
        }
    }

    /// Room to which `count` more pairs and sums may be written.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn room(&mut self, count: usize) -> (*mut u32, *mut i32) {
        self.pairs.reserve(count);
        self.sums.reserve(count);
        (
            self.pairs.spare_capacity_mut().as_mut_ptr().cast(),
            self.sums.spare_capacity_mut().as_mut_ptr().cast(),
        )
    }

    /// Appends the pairs and sums that were written to [`room`](Self::room).
    ///
    /// # Safety
    /// `count` pairs and sums were written at the beginning of the room, which was reserved for at least as many.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) unsafe fn wrote(&mut self, count: usize) {
        // SAFETY: the caller promises that both vectors have room for `count` more, which have been written.
        unsafe {
            self.pairs.set_len(self.pairs.len() + count);
            self.sums.set_len(self.sums.len() + count);
        }
    }
}

/// Queries that are compared with a panel together.
pub(super) struct QueryGroup<'a> {
    /// The words of all queries, word by word.
    pub(super) words: &'a [i32],
    /// The number of the first query; the first group is the first to read the panels.
    pub(super) first: usize,
    /// For each, its threshold: the least sum that passes; there may be fewer.
    pub(super) least: &'a [i32],
}

impl QueryGroup<'_> {
    /// The words of all queries.
    pub(super) fn words<const TOGETHER: usize>(&self) -> &[[i32; TOGETHER]] {
        self.words.as_chunks().0
    }

    /// The limits that passing sums exceed: thresholds less 1.
    pub(super) fn limits<const TOGETHER: usize>(&self) -> [i32; TOGETHER] {
        // No sum is the smallest number.
        std::array::from_fn(|i| self.least.get(i).map_or(i32::MAX, |least| least.saturating_sub(1)))
    }

    /// The panels, each with its groups.
    pub(super) fn each<'a>(
        &self,
        panels: CodePanels<'a>,
    ) -> impl Iterator<Item = (usize, &'a InitialSums, &'a [Group])> {
        let length = panels.groups.len() / panels.starts.len().max(1);
        let groups = (0..panels.starts.len()).map(move |i| &panels.groups[i * length..][..length]);
        let all = panels.starts.iter().zip(groups).enumerate();
        all.map(|(panel, (starts, groups))| (panel, starts, groups))
    }
}

/// The other side of a comparison, such as centroids: their initial sums, and the words of all, one after the other.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct CentroidWords<'a> {
    pub starts: &'a [i32],
    pub words: &'a [i32],
}

impl<'a> CentroidWords<'a> {
    /// Each initial sum with its words.
    pub(super) fn each(self) -> impl Iterator<Item = (i32, &'a [i32])> {
        let length = self.words.len() / self.starts.len().max(1);
        let starts = self.starts.iter().enumerate();
        starts.map(move |(i, start)| (*start, &self.words[i * length..][..length]))
    }
}

/// For each row of a panel, its least sum, the number of the centroid that has it (the first of several), and the
/// least sum of the rest, which is the largest number if there is none.
#[derive(Debug, Clone, PartialEq)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct Argmin2 {
    pub least: [i32; ROWS],
    pub second: [i32; ROWS],
    pub number: [i32; ROWS],
}

impl Default for Argmin2 {
    fn default() -> Self {
        Self { least: [i32::MAX; ROWS], second: [i32::MAX; ROWS], number: [0; ROWS] }
    }
}

/// The expected result, which tells for which rows the two least sums are reported.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct ExpectedArgmin<'a> {
    /// The expected numbers of the least sums.
    pub numbers: &'a [u32; ROWS],
    /// The usual margin of the second least sum above the least.
    pub margin: i32,
}
