//! Weights as 128-bit integers, whose sums are exact.

use super::structs::Weight;
use crate::parallel::{in_parallel, map_in_parallel};

/// Bits of the largest weight: the sum of two still fits into 128 bits.
const BITS: i32 = 126;

/// Weights of a task.
const TASK: usize = 4096;

/// Weights and `min_points` as multiples of the smallest unit that occurs. `None` if these do not
/// fit.
pub(super) fn parts_of(weights: &[f64], min_points: u64) -> Option<(Vec<Weight>, Weight)> {
    // A weight of at least `min_points` counts as `min_points`.
    let enough = min_points as f64;
    let used = |weight: f64| if weight >= enough { None } else { Some(weight) };
    let lowest = in_parallel(weights.chunks(TASK), |weights: &[f64]| {
        let places = weights.iter().filter(|weight| **weight > 0.0);
        places.filter_map(|weight| used(*weight)).map(lowest_place).min()
    });
    let lowest = lowest.into_iter().flatten().min().unwrap_or(0);
    // The unit is at most 1, as `min_points` is an integer.
    let shift = -lowest.min(0);
    let highest = (u64::BITS - min_points.leading_zeros()) as i32;
    if shift + highest > BITS {
        return None;
    }
    let enough = u128::from(min_points) << shift;
    let part =
        |row: usize| used(weights[row]).map_or(enough, |weight| in_parts(weight, shift)).into();
    Some((map_in_parallel(weights.len(), TASK, part), enough.into()))
}

/// The exponent of a positive number's lowest set bit.
fn lowest_place(x: f64) -> i32 {
    let (mantissa, exponent) = split(x);
    exponent + mantissa.trailing_zeros() as i32
}

/// A non-negative number times 2 to the power of `shift`; the product is an integer.
fn in_parts(x: f64, shift: i32) -> u128 {
    let (mantissa, exponent) = split(x);
    if mantissa == 0 {
        return 0;
    }
    match exponent + shift {
        left @ 0.. => u128::from(mantissa) << left,
        right => u128::from(mantissa >> -right),
    }
}

/// The mantissa and the exponent of a non-negative number.
fn split(x: f64) -> (u64, i32) {
    let bits = x.to_bits();
    let exponent = (bits >> 52 & 0x7ff) as i32;
    let mantissa = bits & ((1 << 52) - 1) | if exponent > 0 { 1 << 52 } else { 0 };
    (mantissa, exponent.max(1) - 1075)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(weights: &[f64], min_points: u64) -> Option<(Vec<u128>, u128)> {
        let whole = |weight: &Weight| u128::from(weight.high) << 64 | u128::from(weight.low);
        let (parts, enough) = parts_of(weights, min_points)?;
        Some((parts.iter().map(whole).collect(), whole(&enough)))
    }

    #[test]
    fn weights_are_whole_numbers_of_their_smallest_part() {
        assert_eq!(parts(&[0.0, 1.0, 3.0, 7.0], 5), Some((vec![0, 1, 3, 5], 5)));
        assert_eq!(parts(&[0.25, 1.5, 2.0], 3), Some((vec![1, 6, 8], 12)));
        assert_eq!(
            parts(&[1e300, f64::MAX], u64::MAX),
            Some((vec![u128::from(u64::MAX); 2], u128::from(u64::MAX)))
        );
        // 0.1 is a little more than a tenth.
        let (tenth, one) = parts(&[0.1], 1).unwrap();
        assert!(10 * tenth[0] > one && 9 * tenth[0] < one);
        assert_eq!(one, 1 << 55);
        assert_eq!(parts(&[], 2), Some((vec![], 2)));
    }

    #[test]
    fn parts_that_are_too_small_are_none() {
        assert_eq!(parts(&[1.0, 5e-324], 1), None);
        assert_eq!(parts(&[2f64.powi(-125)], 1), Some((vec![1], 1 << 125)));
        assert_eq!(parts(&[2f64.powi(-126)], 1), None);
        // A weight above `min_points` does not determine the unit.
        assert_eq!(parts(&[1.0 + f64::EPSILON], 1), Some((vec![1], 1)));
    }
}
