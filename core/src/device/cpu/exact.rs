//! Sums of chosen pairs in the contract's order, several at a time: each is one long chain of
//! additions, but the chains of different pairs run side by side.

use pulp::{Simd, WithSimd};

use crate::device::cpu::simd::level::{Level, WideSimd};
use crate::device::cpu::simd::ordered_sums::prefetch;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::metric::{Metric, Sum};

/// Pairs whose sums are added up side by side without AVX2.
const TOGETHER: usize = 8;

/// Dimensions of a slab, which is added up before the next.
const SLAB: usize = 64;

/// With fewer dimensions, transposing rows takes longer than adding up.
const LEAST_DIM: usize = 16;

/// Computes the sums of pairs of a query and a base row, by their positions, in this order.
pub(in crate::device::cpu) struct PairSums<'a, T, F> {
    pub metric: Metric,
    pub queries: &'a [T],
    pub base: &'a [T],
    pub dim: usize,
    pub pairs: &'a [(u32, u32)],
    /// Called with each pair and its sum.
    pub on_sum: F,
}

impl<'a, T: SimdReal, F: FnMut((u32, u32), T)> PairSums<'a, T, F> {
    pub fn compute(self, level: Level) {
        let suits = self.metric.sum() != Sum::Absolute && self.dim >= LEAST_DIM;
        match level.wide().filter(|_| suits) {
            Some(wide) => self.in_lanes(wide),
            None => level.dispatch(self),
        }
    }

    fn query(&self, pair: &(u32, u32)) -> &'a [T] {
        &self.queries[pair.0 as usize * self.dim..][..self.dim]
    }

    fn base(&self, pair: &(u32, u32)) -> &'a [T] {
        &self.base[pair.1 as usize * self.dim..][..self.dim]
    }

    fn in_lanes(mut self, wide: WideSimd) {
        let mut chunks = self.pairs.chunks(T::LANES).peekable();
        let (mut rows, mut next) = (Vec::with_capacity(T::LANES), Vec::with_capacity(T::LANES));
        let slabs = self.dim.div_ceil(SLAB);
        while let Some(chunk) = chunks.next() {
            next.clear();
            let of_next = chunks.peek().copied().unwrap_or_default();
            next.extend(of_next.chunk_by(|a, b| a.1 == b.1).map(|same| self.base(&same[0])));
            let mut next = next.chunks(next.len().div_ceil(slabs).max(1));
            rows.clear();
            rows.extend(chunk.iter().map(|pair| (self.query(pair), self.base(pair))));
            // A partial chunk repeats its last pair.
            rows.resize(T::LANES, rows[chunk.len() - 1]);
            let mut sums = T::no_sums();
            for first in (0..self.dim).step_by(SLAB) {
                let slab = first..self.dim.min(first + SLAB);
                // While these are added up, the next rows come from memory, one after the other.
                next.next().unwrap_or_default().iter().for_each(|row| prefetch(row));
                match self.metric.sum() {
                    Sum::Squares => T::add_squares(wide, &mut sums, &rows, slab),
                    _ => T::add_products(wide, &mut sums, &rows, slab),
                }
            }
            let sums = chunk.iter().zip(sums.as_mut().iter());
            sums.for_each(|(pair, sum)| (self.on_sum)(*pair, *sum));
        }
    }
}

impl<T: SimdReal, F: FnMut((u32, u32), T)> WithSimd for PairSums<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        let metric = self.metric;
        for chunk in self.pairs.chunks(TOGETHER) {
            // A partial chunk repeats its last pair.
            let pair = |i: usize| &chunk[i.min(chunk.len() - 1)];
            let queries: [&[T]; TOGETHER] = std::array::from_fn(|i| self.query(pair(i)));
            let bases: [&[T]; TOGETHER] = std::array::from_fn(|i| self.base(pair(i)));
            let mut sums = [T::ZERO; TOGETHER];
            for j in 0..self.dim {
                for i in 0..TOGETHER {
                    sums[i] = metric.add_to_sum(sums[i], queries[i][j], bases[i][j]);
                }
            }
            chunk.iter().zip(sums).for_each(|(pair, sum)| (self.on_sum)(*pair, sum));
        }
    }
}
