//! Rows of bits.

use pulp::{Simd, WithSimd};

use super::box_pruning::BoxPruning;
use super::space::Space;
use super::tiles::LANES;
use crate::device::contract::Within;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::spatial_order::Coordinates;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::parallel::try_in_parallel;
use crate::rows::Rows;

/// Rows of bits, whose only coordinate is their number of set bits.
pub(super) struct BitSpace<'a> {
    words: &'a [u64],
    width: usize,
    within: Within,
    /// The words of tiles, row by row.
    tiled: Vec<u64>,
    arch: pulp::Arch,
    reserved: Option<Reserved>,
}

impl<'a> BitSpace<'a> {
    pub fn new(rows: &'a Rows, within: Within, level: Level) -> Self {
        let (words, width) = (rows.words().unwrap_or_default(), rows.matrix().width());
        Self { words, width, within, tiled: Vec::new(), arch: level.arch(), reserved: None }
    }

    #[inline(always)]
    fn near_bits(&self, row: usize, tile: usize) -> u64 {
        let query = &self.words[row * self.width..][..self.width];
        let first = tile * LANES * self.width;
        let tile = &self.tiled[first..self.tiled.len().min(first + LANES * self.width)];
        let rows = tile.chunks_exact(self.width).enumerate();
        rows.fold(0, |near, (lane, other)| {
            near | u64::from(self.within.holds_for_bits(query, other)) << lane
        })
    }
}

/// See [`BitSpace::near_bits`].
struct BitTileKernel<'a>(&'a BitSpace<'a>, usize, usize);

impl WithSimd for BitTileKernel<'_> {
    type Output = u64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> u64 {
        self.0.near_bits(self.1, self.2)
    }
}

impl Coordinates for BitSpace<'_> {
    fn rows(&self) -> usize {
        self.words.len() / self.width
    }

    fn coordinates(&self) -> usize {
        1
    }

    fn coordinate(&self, row: usize, _: usize) -> f64 {
        let words = &self.words[row * self.width..][..self.width];
        f64::from(words.iter().map(|word| word.count_ones()).sum::<u32>())
    }
}

impl Space for BitSpace<'_> {
    fn pruning(&self) -> BoxPruning {
        BoxPruning::new(self.within, 1)
    }

    fn tile(&mut self, order: &[u32], job: &Job) -> Result<()> {
        self.reserved = Some(job.reserve("reordered rows", size_of_val(self.words))?);
        self.tiled = vec![0; self.words.len()];
        let (words, width) = (self.words, self.width);
        let fill = |(tile, rows): (&mut [u64], &[u32])| {
            for (to, row) in tile.chunks_exact_mut(width).zip(rows) {
                to.copy_from_slice(&words[*row as usize * width..][..width]);
            }
            job.check()
        };
        let tiles = self.tiled.chunks_mut(LANES * width).zip(order.chunks(LANES));
        try_in_parallel(tiles, fill).map(drop)
    }

    fn near(&self, row: usize, tile: usize, _: &[u32], _: u64, _: u32) -> (u64, u64) {
        (self.arch.dispatch(BitTileKernel(self, row, tile)), 0)
    }
}
