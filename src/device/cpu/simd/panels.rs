//! Panels of 64 base rows of whole numbers, and queries that are compared with them.
#![allow(unsafe_code)]

use crate::memory::Zeros;

/// Base rows in a panel.
pub(in crate::device::cpu) const ROWS: usize = 64;

/// Queries that are compared with a panel together: with AVX-512, and with others.
#[cfg(target_arch = "x86_64")]
pub(super) const FEW: usize = 4;
pub(super) const SOME: usize = 6;

/// The numbers that rows are rounded to.
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

/// Words of rows of seven bits that are multiplied with those of a query and added up in 16 bits: the absolute values
/// of the query's first two numbers of these words, and of the last two, must not exceed [`MOST_IN_16_BITS`]
/// together.
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

/// A word of every row of a panel.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct Group(pub [[u8; 4]; ROWS]);
// SAFETY: zeros are numbers.
unsafe impl Zeros for Group {}

/// For each row of a panel, the initial value of its sum, or the sum.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct Starts(pub [i32; ROWS]);
// SAFETY: as above.
unsafe impl Zeros for Starts {}

/// Panels: what the sums of each start with, and as many groups for each as a row has words.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct Panels<'a> {
    pub groups: &'a [Group],
    pub starts: &'a [Starts],
}

/// Queries in words, as a level takes them.
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
pub(in crate::device::cpu) struct Passed {
    pub query: u32,
    /// The base row, counted from the first panel.
    pub row: u32,
    pub sum: i32,
}

/// Appends the pairs of a query and some rows, a bit each, from this row on, of which all sums are given.
#[inline(always)]
pub(super) fn pass(
    passed: &mut Vec<Passed>,
    query: usize,
    first: usize,
    mut rows: u64,
    sums: &[i32],
) {
    passed.reserve(rows.count_ones() as usize);
    while rows != 0 {
        let lane = rows.trailing_zeros() as usize;
        rows &= rows - 1;
        passed.push(Passed { query: query as u32, row: (first + lane) as u32, sum: sums[lane] });
    }
}

/// Queries that are compared with a panel together.
pub(super) struct QueryGroup<'a> {
    /// Word by word those of all queries.
    pub(super) words: &'a [i32],
    /// The number of the first of them.
    pub(super) first: usize,
    /// For each, the least sum that passes; there may be fewer.
    pub(super) least: &'a [i32],
}

impl QueryGroup<'_> {
    /// The words of all queries.
    pub(super) fn words<const TOGETHER: usize>(&self) -> &[[i32; TOGETHER]] {
        self.words.as_chunks().0
    }

    /// What sums have to be greater than.
    pub(super) fn limits<const TOGETHER: usize>(&self) -> [i32; TOGETHER] {
        // Sums are never the smallest number.
        std::array::from_fn(|i| self.least.get(i).map_or(i32::MAX, |least| least.saturating_sub(1)))
    }

    /// The panels, each with its groups.
    pub(super) fn each<'a>(
        &self,
        panels: Panels<'a>,
    ) -> impl Iterator<Item = (usize, &'a Starts, &'a [Group])> {
        let length = panels.groups.len() / panels.starts.len().max(1);
        let groups = (0..panels.starts.len()).map(move |i| &panels.groups[i * length..][..length]);
        let all = panels.starts.iter().zip(groups).enumerate();
        all.map(|(panel, (starts, groups))| (panel, starts, groups))
    }
}
