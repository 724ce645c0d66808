//! Shares of rows, weight times cost in integers, for k-means++: sums are the same in any order, on
//! every device.

use std::ops::Range;

use crate::matrix::Real;
use crate::parallel::in_parallel;

/// Rows whose shares are summed in one total.
pub const BLOCK: usize = 1024;

/// Bits of the largest share. The sum of a block fits in 64 bits.
const BITS: i32 = 52;

/// 2⁵², as the bits of a float64.
const ONE_TO_BITS: u64 = (1023 + BITS as u64) << BITS;

/// Random bits for the draw of a row.
const DRAWN: u32 = 53;

/// Number of candidates that a step of greedy k-means++ draws, for `k` clusters.
pub fn candidates(k: usize) -> usize {
    2 + (k as f64).ln() as usize
}

/// The scale of shares, and their sums by blocks.
pub struct Shares<'a> {
    rows: usize,
    weights: Option<&'a [f64]>,
    /// Factors of a share, applied one after the other.
    scale: [f64; 2],
    /// The sums of blocks.
    pub totals: Vec<u64>,
}

impl<'a> Shares<'a> {
    /// Shares of rows whose cost is 1.
    pub fn new(rows: usize, weights: Option<&'a [f64]>) -> Self {
        let totals = vec![0; rows.div_ceil(BLOCK)];
        let mut shares = Self { rows, weights, scale: [1.0; 2], totals };
        shares.rescale(|_| 1.0);
        shares
    }

    fn weight(&self, row: usize) -> f64 {
        self.weights.map_or(1.0, |weights| weights[row])
    }

    /// Weight times cost; a row of weight 0 has share 0 at any distance.
    fn exact(&self, row: usize, cost: f64) -> f64 {
        let weight = self.weight(row);
        if weight == 0.0 { 0.0 } else { (weight * cost).min(f64::MAX) }
    }

    /// The share of a row, rounded down.
    #[inline]
    pub fn of(&self, row: usize, cost: f64) -> u64 {
        let [one, other] = self.scale;
        (self.exact(row, cost) * one * other) as u64
    }

    /// The sum of the shares of rows from `first` on. Undefined if any cost exceeds those for which
    /// the scale was chosen.
    #[inline(always)]
    pub fn sum_of<T: Real>(&self, first: usize, costs: &[T]) -> u64 {
        let [one, other] = self.scale;
        // The sum of 2⁵² and an integer below it has that integer in its low bits.
        let whole = |share: f64| {
            let share = (share.min(f64::MAX) * one * other).floor();
            (share + f64::from_bits(ONE_TO_BITS)).to_bits() ^ ONE_TO_BITS
        };
        match self.weights {
            None => costs.iter().map(|cost| whole(cost.to_f64())).fold(0, u64::wrapping_add),
            Some(weights) => {
                let exact = |(cost, weight): (&T, &f64)| {
                    let share = cost.to_f64() * weight;
                    whole(if *weight == 0.0 { 0.0 } else { share })
                };
                costs.iter().zip(&weights[first..]).map(exact).fold(0, u64::wrapping_add)
            }
        }
    }

    /// The sum of all shares.
    pub fn total(&self) -> u128 {
        self.totals.iter().map(|total| u128::from(*total)).sum()
    }

    /// Chooses the scale that gives the largest share all bits. `cost` is the cost of a row.
    pub fn rescale(&mut self, cost: impl Fn(usize) -> f64 + Sync) {
        let share = |row: usize| self.exact(row, cost(row));
        let of_block = |block| self.rows_of(block).map(share).fold(0.0, f64::max);
        let largest = in_parallel(0..self.totals.len(), of_block).into_iter().fold(0.0, f64::max);
        if largest > 0.0 {
            self.scale = scale_for(largest);
        }
        self.totals = in_parallel(0..self.totals.len(), |block| {
            self.rows_of(block).map(|row| self.of(row, cost(row))).sum()
        });
    }

    /// Rescales if the sum of all shares has fallen below 2⁵⁰.
    pub fn keep_scale(&mut self, cost: impl Fn(usize) -> f64 + Sync) {
        if self.total() >> (BITS - 2) == 0 {
            self.rescale(cost);
        }
    }

    fn rows_of(&self, block: usize) -> Range<usize> {
        block * BLOCK..self.rows.min((block + 1) * BLOCK)
    }

    /// Draws a row with a probability proportional to its share, by 64 random bits; `None` if all
    /// shares are 0.
    pub fn draw(&self, cost: impl Fn(usize) -> f64, bits: u64) -> Option<u32> {
        let (total, drawn) = (self.total(), u128::from(bits >> (64 - DRAWN)));
        // ⌊total · drawn / 2⁵³⌋.
        let low = total & ((1 << DRAWN) - 1);
        let mut left = (total >> DRAWN) * drawn + ((low * drawn) >> DRAWN);
        let mut blocks = self.totals.iter().map(|total| u128::from(*total));
        let block = blocks.position(|total| {
            let is_here = left < total;
            left -= if is_here { 0 } else { total };
            is_here
        })?;
        let mut left = left as u64;
        let drawn_row = self.rows_of(block).find(|row| {
            let share = self.of(*row, cost(*row));
            let is_here = left < share;
            left -= if is_here { 0 } else { share };
            is_here
        });
        drawn_row.map(|row| row as u32)
    }

    /// Draws the first row, by weight alone.
    pub fn draw_first(&self, bits: u64) -> u32 {
        self.draw(|_| 1.0, bits).unwrap_or_else(|| self.draw_any(bits))
    }

    /// Draws a row of positive weight, uniformly.
    pub fn draw_any(&self, bits: u64) -> u32 {
        let of = |count: usize| ((u128::from(bits) * count as u128) >> 64) as usize;
        if self.weights.is_none() {
            return of(self.rows) as u32;
        }
        let heavy = || (0..self.rows).filter(|row| self.weight(*row) > 0.0);
        heavy().nth(of(heavy().count())).unwrap_or(0) as u32
    }
}

/// Two factors whose product gives the share `largest` > 0 all bits; applied one after the other,
/// since the product may overflow.
pub fn scale_for(largest: f64) -> [f64; 2] {
    // Half of the exponent each, since all of it may be out of range.
    let all = BITS - 1 - exponent(largest);
    [all / 2, all - all / 2].map(power_of_two)
}

/// ⌊log₂ x⌋ of a positive number.
fn exponent(x: f64) -> i32 {
    let bits = |x: f64| (x.to_bits() >> 52) as i32 - 1023;
    if x.is_normal() { bits(x) } else { bits(x * power_of_two(64)) - 64 }
}

/// 2ᵉ, for e from −1,022 to 1,023.
fn power_of_two(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_share_has_all_bits_however_large_or_small_it_is() {
        for cost in [5e-324, 1e-310, 1e-20, 1.0, 3.5, 1e30, f64::MAX, f64::INFINITY] {
            let mut shares = Shares::new(3, None);
            let costs = [0.0, cost, cost / 1024.0];
            shares.rescale(|row| costs[row]);
            let [none, most, other] = [0, 1, 2].map(|row| shares.of(row, costs[row]));
            assert!(none == 0 && most >> 51 == 1, "{cost}: {most}");
            let is_usual = (1e-300..1e300).contains(&cost);
            assert!(!is_usual || most / 1024 == other, "{cost}: {other}");
            assert_eq!(shares.total(), u128::from(most + other));
        }
    }

    #[test]
    fn rows_are_drawn_in_proportion_to_their_shares() {
        let cost = |row: usize| (row % 3) as f64;
        let weights: Vec<f64> = (0..3000).map(|row| f64::from(row != 2999) * 0.5).collect();
        let mut shares = Shares::new(3000, Some(&weights));
        shares.rescale(cost);
        let mut random = crate::random::Random::new(1);
        let mut counts = [0; 3];
        for _ in 0..30_000 {
            let row = shares.draw(cost, random.bits()).unwrap();
            assert!(row < 2999);
            counts[row as usize % 3] += 1;
        }
        assert!(counts[0] == 0 && (9_600..10_400).contains(&counts[1]), "{counts:?}");
        assert_eq!(shares.draw(cost, 0), Some(1));
        assert_eq!(shares.draw(cost, u64::MAX), Some(2998));
        shares.rescale(|_| 0.0);
        assert_eq!(shares.draw(|_| 0.0, u64::MAX), None);
        assert_eq!(shares.draw_any(u64::MAX), 2998);
    }
}
