//! The weights of rows, and the test whether the rows within eps are many or heavy enough.

use std::ops::{AddAssign, Range};

use super::tiles::{LANES, lanes_of};
use crate::error::Result;
use crate::job::{Job, Reserved};

/// Units in a weight of 1, which is that of every row without weights: a unit is 2⁻³².
const ONE: u128 = 1 << 32;

/// The weight of some rows: at least `units`, and less than one more for each of `inexact`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Total {
    units: u128,
    inexact: u128,
}

impl AddAssign for Total {
    fn add_assign(&mut self, other: Self) {
        self.units += other.units;
        self.inexact += other.inexact;
    }
}

/// The weights of rows in their order.
pub(super) struct Weights {
    min_points: u64,
    /// For each tile, the total before it; empty if all rows weigh 1.
    before: Vec<Total>,
    /// The weights by position.
    weights: Vec<f64>,
    _reserved: Reserved,
}

impl Weights {
    /// The weights of rows in this order.
    pub fn new(weights: Option<&[f64]>, min_points: u64, order: &[u32], job: &Job) -> Result<Self> {
        let Some(given) = weights else {
            let (before, weights) = (Vec::new(), Vec::new());
            return Ok(Self { min_points, before, weights, _reserved: job.reserve("weights", 0)? });
        };
        let tiles = order.len().div_ceil(LANES);
        let bytes = (tiles + 1) * size_of::<Total>() + size_of_val(given);
        let _reserved = job.reserve("weights", bytes)?;
        let weights: Vec<f64> = order.iter().map(|row| given[*row as usize]).collect();
        let mut before = Vec::with_capacity(tiles + 1);
        let mut total = Total::default();
        before.push(total);
        for tile in weights.chunks(LANES) {
            tile.iter().for_each(|weight| total += of_weight(*weight, min_points));
            before.push(total);
        }
        Ok(Self { min_points, before, weights, _reserved })
    }

    /// The total of the rows of these tiles.
    pub fn of_tiles(&self, tiles: Range<usize>, rows: usize) -> Total {
        if self.before.is_empty() {
            return Total { units: rows as u128 * ONE, inexact: 0 };
        }
        let (start, end) = (self.before[tiles.start], self.before[tiles.end]);
        Total { units: end.units - start.units, inexact: end.inexact - start.inexact }
    }

    /// The total of these lanes of a tile.
    #[inline]
    pub fn of_lanes(&self, tile: usize, lanes: u64) -> Total {
        if self.before.is_empty() {
            return Total { units: u128::from(lanes.count_ones()) * ONE, inexact: 0 };
        }
        let mut total = Total::default();
        for lane in lanes_of(lanes) {
            total += of_weight(self.weights[tile * LANES + lane as usize], self.min_points);
        }
        total
    }

    /// Whether rows of this total are enough for certain.
    #[inline]
    pub fn is_enough(&self, total: Total) -> bool {
        total.units >= u128::from(self.min_points) * ONE
    }

    /// The number of further rows that are enough where all rows weigh 1; `u32::MAX` with weights.
    pub fn missing(&self, total: Total) -> u32 {
        if !self.before.is_empty() {
            return u32::MAX;
        }
        let missing = u128::from(self.min_points).saturating_sub(total.units / ONE);
        u32::try_from(missing).unwrap_or(u32::MAX)
    }

    /// Whether rows of this total, which are not enough for certain, may be enough.
    pub fn may_be_enough(&self, total: Total) -> bool {
        // Each of them is less than a unit more.
        total.inexact > 0 && total.units + total.inexact > u128::from(self.min_points) * ONE
    }

    /// An exact sum of weights.
    pub fn exact(&self) -> ExactWeight<'_> {
        ExactWeight { weights: self, limbs: [0; LIMBS] }
    }
}

/// A weight in units, rounded down, and whether it was; at most `min_points`, which is enough.
fn of_weight(weight: f64, min_points: u64) -> Total {
    if weight >= min_points as f64 {
        return Total { units: u128::from(min_points) * ONE, inexact: 0 };
    }
    // Exact: a power of two.
    let units = weight * ONE as f64;
    let whole = if units < u64::MAX as f64 { u128::from(units as u64) } else { units as u128 };
    Total { units: whole, inexact: u128::from(units.fract() != 0.0) }
}

/// Limbs of 64 bits, from 2⁻¹⁰⁸⁸ on: any float64 below 2⁶⁴, and 2⁶⁴ times that.
const LIMBS: usize = 20;
const LOWEST: i32 = -1088;

/// A sum of weights, each of them below `min_points`, without rounding.
pub(super) struct ExactWeight<'a> {
    weights: &'a Weights,
    limbs: [u64; LIMBS],
}

impl ExactWeight<'_> {
    /// Adds the weights of the rows at these positions.
    pub fn add(&mut self, positions: impl Iterator<Item = usize>) {
        for position in positions {
            let weight = self.weights.weights[position];
            if weight > 0.0 {
                self.add_one(weight.min(self.weights.min_points as f64));
            }
        }
    }

    fn add_one(&mut self, weight: f64) {
        let bits = weight.to_bits();
        let exponent = (bits >> 52) as i32;
        let mantissa = bits & ((1 << 52) - 1) | if exponent > 0 { 1 << 52 } else { 0 };
        let place = exponent.max(1) - 1075 - LOWEST;
        let (limb, shift) = (place as usize / 64, place % 64);
        let wide = u128::from(mantissa) << shift;
        let mut carry = false;
        for (i, limb) in self.limbs[limb..].iter_mut().enumerate() {
            let part = match i {
                0 => wide as u64,
                1 => (wide >> 64) as u64,
                _ if !carry => break,
                _ => 0,
            };
            let (sum, over) = limb.overflowing_add(part);
            let (sum, more) = sum.overflowing_add(u64::from(carry));
            (*limb, carry) = (sum, over | more);
        }
    }

    /// Whether they are enough.
    pub fn is_enough(&self) -> bool {
        // The limb of 2⁰, and those above.
        let whole = (-LOWEST / 64) as usize;
        self.limbs[whole + 1..].iter().any(|limb| *limb > 0)
            || self.limbs[whole] >= self.weights.min_points
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(given: &[f64], min_points: u64) -> Weights {
        let order: Vec<u32> = (0..given.len() as u32).collect();
        Weights::new(Some(given), min_points, &order, &Job::default()).unwrap()
    }

    /// Whether all of these weigh enough, by units where they decide and exactly.
    fn decide(given: &[f64], min_points: u64) -> (Option<bool>, bool) {
        let all = weights(given, min_points);
        let total = all.of_tiles(0..1, given.len());
        let lanes = all.of_lanes(0, (1 << given.len()) - 1);
        assert_eq!(lanes, total);
        let by_units = match (all.is_enough(total), all.may_be_enough(total)) {
            (true, _) => Some(true),
            (false, false) => Some(false),
            (false, true) => None,
        };
        let mut exact = all.exact();
        exact.add(0..given.len());
        (by_units, exact.is_enough())
    }

    #[test]
    fn weights_are_added_without_rounding() {
        // 0.1 is a little more than a tenth.
        assert_eq!(decide(&[0.1; 10], 1), (None, true));
        assert_eq!(decide(&[0.1; 9], 1), (Some(false), false));
        // 0.3 is a little less than three tenths.
        assert_eq!(decide(&[0.3, 0.3, 0.3, 0.1], 1), (None, false));
        assert_eq!(decide(&[0.5, 0.25, 0.25], 1), (Some(true), true));
        assert_eq!(decide(&[1.0 - f64::EPSILON / 2.0], 1), (Some(false), false));
        assert_eq!(decide(&[1.0 - f64::EPSILON / 2.0, 5e-324], 1), (None, false));
        assert_eq!(decide(&[1.0 - f64::EPSILON / 2.0, 2f64.powi(-53)], 1), (None, true));
        assert_eq!(decide(&[0.0, 0.0], 1), (Some(false), false));
        assert_eq!(decide(&[1e300], 3), (Some(true), true));
        assert_eq!(decide(&[f64::MAX, 0.5], u64::MAX), (Some(true), true));
        assert_eq!(decide(&[2.5, 2.5, 1e-300], 5), (Some(true), true));
        assert!(!decide(&[2.5, 2.5 - 4.0 * f64::EPSILON, 1e-300], 5).1);
    }
}
