//! Sums of chosen pairs in the contract's order, a register of them at a time: each is one long
//! chain of additions, but the chains of different pairs run side by side, one to a lane.

use crate::device::cpu::simd::vnni::{self, Chains, SLAB, Vnni};
use crate::metric::Sum;

/// Computes the sums of pairs of a query and a base row, by their positions, in this order.
pub(super) struct Pairs<'a, T, F> {
    pub sum: Sum,
    pub queries: &'a [T],
    pub base: &'a [T],
    pub dim: usize,
    pub pairs: &'a [(u32, u32)],
    /// Called with each pair and its sum.
    pub found: F,
}

impl<T: Chains, F: FnMut((u32, u32), T)> Pairs<'_, T, F> {
    pub fn compute(mut self, vnni: Vnni) {
        let (queries, bases, dim) = (self.queries, self.base, self.dim);
        let query = |pair: &(u32, u32)| &queries[pair.0 as usize * dim..][..dim];
        let base = |pair: &(u32, u32)| &bases[pair.1 as usize * dim..][..dim];
        let mut state = T::state();
        let mut chunks = self.pairs.chunks(T::LANES).peekable();
        while let Some(chunk) = chunks.next() {
            if let Some(next) = chunks.peek() {
                next.iter().for_each(|pair| vnni::prefetch(base(pair)));
            }
            state.as_mut().fill(T::ZERO);
            for first in (0..dim).step_by(SLAB) {
                let slab = first..dim.min(first + SLAB);
                let rows = |i: usize| {
                    // A partial chunk repeats its last pair.
                    let pair = &chunk[i.min(chunk.len() - 1)];
                    (&query(pair)[slab.clone()], &base(pair)[slab.clone()])
                };
                match self.sum {
                    Sum::Squares => T::add_squares(vnni, &mut state, rows),
                    _ => T::add_products(vnni, &mut state, rows),
                }
            }
            chunk
                .iter()
                .zip(state.as_mut().iter())
                .for_each(|(pair, sum)| (self.found)(*pair, *sum));
        }
    }
}
