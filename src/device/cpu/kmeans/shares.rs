//! Weight times cost of rows in whole numbers, so that sums are the same in any order, on every device.

use rayon::prelude::*;

use crate::matrix::Real;

/// Rows whose shares are added up together.
pub(super) const BLOCK: usize = 1024;

/// Bits of the largest share. Those of a block add up in 64 bits.
const BITS: i32 = 52;

/// Bits of a random number that draws a row.
const DRAWN: u32 = 53;

/// What a row's share is made of.
pub(super) struct Shares<'a> {
    weights: Option<&'a [f64]>,
    /// Shares are multiplied by one, and then by the other.
    scale: [f64; 2],
    /// The sums of blocks.
    pub(super) totals: Vec<u64>,
}

impl<'a> Shares<'a> {
    /// Rows that cost their weights.
    pub fn new<T: Real>(rows: usize, weights: Option<&'a [f64]>) -> Self {
        let totals = vec![0; rows.div_ceil(BLOCK)];
        let mut shares = Self { weights, scale: [1.0; 2], totals };
        shares.rescale(&vec![T::ONE; rows]);
        shares
    }

    fn weight(&self, row: usize) -> f64 {
        self.weights.map_or(1.0, |weights| weights[row])
    }

    /// Weight times cost; a row without weight has no share, however far it is.
    fn exact(&self, row: usize, cost: f64) -> f64 {
        let weight = self.weight(row);
        if weight == 0.0 { 0.0 } else { (weight * cost).min(f64::MAX) }
    }

    /// The share of a row, rounded down.
    #[inline]
    pub fn of<T: Real>(&self, row: usize, cost: T) -> u64 {
        let [one, other] = self.scale;
        (self.exact(row, cost.to_f64()) * one * other) as u64
    }

    /// The sum of all shares.
    pub fn total(&self) -> u128 {
        self.totals.iter().map(|total| u128::from(*total)).sum()
    }

    /// Gives the largest share all bits.
    pub fn rescale<T: Real>(&mut self, costs: &[T]) {
        let share = |(row, cost): (usize, &T)| self.exact(row, cost.to_f64());
        let largest = costs.par_iter().enumerate().map(share).reduce(|| 0.0, f64::max);
        if largest > 0.0 {
            // Half of the exponent at a time: all of it may be out of range.
            let all = BITS - 1 - exponent(largest);
            self.scale = [all / 2, all - all / 2].map(power_of_two);
        }
        let mut totals = std::mem::take(&mut self.totals);
        totals.par_iter_mut().zip(costs.par_chunks(BLOCK)).enumerate().for_each(
            |(block, (total, costs))| {
                let rows = costs.iter().enumerate();
                *total = rows.map(|(i, cost)| self.of(block * BLOCK + i, *cost)).sum();
            },
        );
        self.totals = totals;
    }

    /// The same, if the sum of all has become much smaller than one.
    pub fn keep_scale<T: Real>(&mut self, costs: &[T]) {
        if self.total() >> (BITS - 2) == 0 {
            self.rescale(costs);
        }
    }

    /// Draws a row with a probability proportional to its share, by 64 random bits; `None` if there are no
    /// shares.
    pub fn draw<T: Real>(&self, costs: &[T], bits: u64) -> Option<u32> {
        let (total, drawn) = (self.total(), u128::from(bits >> (64 - DRAWN)));
        // total · drawn / 2⁵³, rounded down.
        let low = total & ((1 << DRAWN) - 1);
        let mut left = (total >> DRAWN) * drawn + ((low * drawn) >> DRAWN);
        let mut blocks = self.totals.iter().map(|total| u128::from(*total));
        let block = blocks.position(|total| {
            let is_here = left < total;
            left -= if is_here { 0 } else { total };
            is_here
        })?;
        let mut left = left as u64;
        let mut rows = costs.iter().enumerate().skip(block * BLOCK);
        let found = rows.find(|(row, cost)| {
            let share = self.of(*row, **cost);
            let is_here = left < share;
            left -= if is_here { 0 } else { share };
            is_here
        });
        found.map(|(row, _)| row as u32)
    }

    /// Draws a row of positive weight, all with the same probability.
    pub fn draw_any(&self, rows: usize, bits: u64) -> u32 {
        let of = |count: usize| ((u128::from(bits) * count as u128) >> 64) as usize;
        if self.weights.is_none() {
            return of(rows) as u32;
        }
        let heavy = || (0..rows).filter(|row| self.weight(*row) > 0.0);
        heavy().nth(of(heavy().count())).unwrap_or(0) as u32
    }
}

/// The largest e with 2ᵉ at most this positive number.
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
            let mut shares = Shares::new::<f64>(3, None);
            let costs = [0.0, cost, cost / 1024.0];
            shares.rescale(&costs);
            let [none, most, other] = [0, 1, 2].map(|row| shares.of(row, costs[row]));
            assert!(none == 0 && most >> 51 == 1, "{cost}: {most}");
            let is_usual = (1e-300..1e300).contains(&cost);
            assert!(!is_usual || most / 1024 == other, "{cost}: {other}");
            assert_eq!(shares.total(), u128::from(most + other));
        }
    }

    #[test]
    fn rows_are_drawn_in_proportion_to_their_shares() {
        let costs: Vec<f32> = (0..3000).map(|row| (row % 3) as f32).collect();
        let weights: Vec<f64> = (0..3000).map(|row| f64::from(row != 2999) * 0.5).collect();
        let mut shares = Shares::new::<f32>(3000, Some(&weights));
        shares.rescale(&costs);
        let mut random = crate::random::Random::new(1);
        let mut counts = [0; 3];
        for _ in 0..30_000 {
            let row = shares.draw(&costs, random.bits()).unwrap();
            assert!(row < 2999);
            counts[row as usize % 3] += 1;
        }
        assert!(counts[0] == 0 && (9_600..10_400).contains(&counts[1]), "{counts:?}");
        assert_eq!(shares.draw(&costs, 0), Some(1));
        assert_eq!(shares.draw(&costs, u64::MAX), Some(2998));
        shares.rescale(&[0.0f32; 3000]);
        assert_eq!(shares.draw(&[0.0f32; 3000], u64::MAX), None);
        assert_eq!(shares.draw_any(3000, u64::MAX), 2998);
    }
}
