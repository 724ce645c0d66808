//! Sums of chosen pairs in the contract's order, several at a time: each is one long chain of
//! additions, but the chains of different pairs run side by side.

use pulp::{Simd, WithSimd};

use super::lanes::Lanes;
use super::vnni;
use crate::matrix::Real;
use crate::metric::{Metric, Sum};

/// Pairs whose sums are computed together: as many as an addition takes cycles.
const TOGETHER: usize = 4;

/// Compute the sums of pairs of a query and a base row, by their positions, in this order.
pub(super) struct Pairs<'a, T, F> {
    pub metric: Metric,
    pub queries: &'a [T],
    pub base: &'a [T],
    pub dim: usize,
    pub pairs: &'a [(u32, u32)],
    /// Called with each pair and its sum.
    pub found: F,
}

impl<T: Lanes, F: FnMut((u32, u32), T)> WithSimd for Pairs<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _simd: S) {
        let query = |pair: &(u32, u32)| &self.queries[pair.0 as usize * self.dim..][..self.dim];
        let base = |pair: &(u32, u32)| &self.base[pair.1 as usize * self.dim..][..self.dim];
        let mut chunks = self.pairs.chunks(TOGETHER).peekable();
        while let Some(chunk) = chunks.next() {
            if let Some(next) = chunks.peek() {
                next.iter().for_each(|pair| vnni::prefetch(base(pair)));
            }
            // A chunk that is not full repeats its last pair.
            let at = |i: usize| &chunk[i.min(chunk.len() - 1)];
            let rows = std::array::from_fn(|i| (query(at(i)), base(at(i))));
            let sums = match self.metric.sum() {
                Sum::Squares => chains(self.dim, rows, |q, x, s: T| Real::mul_add(q - x, q - x, s)),
                Sum::Absolute => chains(self.dim, rows, |q, x, s: T| s + Real::abs(q - x)),
                _ => chains(self.dim, rows, |q, x, s: T| Real::mul_add(-q, x, s)),
            };
            chunk.iter().zip(sums).for_each(|(pair, sum)| (self.found)(*pair, sum));
        }
    }
}

#[inline(always)]
fn chains<T: Real>(
    dim: usize,
    rows: [(&[T], &[T]); TOGETHER],
    term: impl Fn(T, T, T) -> T,
) -> [T; TOGETHER] {
    let rows = rows.map(|(query, base)| (&query[..dim], &base[..dim]));
    let mut sums = [T::ZERO; TOGETHER];
    for j in 0..dim {
        for (sum, (query, base)) in sums.iter_mut().zip(rows) {
            *sum = term(query[j], base[j], *sum);
        }
    }
    sums
}
