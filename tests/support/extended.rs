//! Arithmetic in extended precision: numbers of about 106 bits and any magnitude, for true
//! distances with far more digits than Float64 has.
//!
//! A [`Double`] is an unevaluated sum of two floats. Its operations are built on two exact ones:
//! the sum of two floats as a float and its rounding error (Knuth, *The Art of Computer
//! Programming*, 4.2.2), and their product as a float and its rounding error, by a fused
//! multiply-add. The algorithms and their error bounds are those of Joldes, Muller and Popescu
//! 2017, "Tight and rigorous error bounds for basic building blocks of double-word arithmetic".
//! An [`Extended`] is a `Double` times a power of two, and neither overflows nor underflows.

use std::ops::{Add, Div, Mul, Neg, Sub};

/// Half the distance from 1 to the next float: the relative error of one rounding.
pub const UNIT: f64 = f64::EPSILON / 2.0;

/// The sum of two floats, the second at most half a unit in the last place of the first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Double {
    pub high: f64,
    pub low: f64,
}

impl Double {
    pub const ZERO: Self = Self { high: 0.0, low: 0.0 };

    /// The exact sum of two floats.
    pub fn of_sum(x: f64, y: f64) -> Self {
        let high = x + y;
        let of_y = high - x;
        Self { high, low: (x - (high - of_y)) + (y - of_y) }
    }

    /// The product of two floats, exact if it is at least 2⁻⁹⁶⁰.
    pub fn of_product(x: f64, y: f64) -> Self {
        let high = x * y;
        Self { high, low: x.mul_add(y, -high) }
    }

    /// The exact sum of two floats, the first of larger magnitude.
    fn of_ordered_sum(x: f64, y: f64) -> Self {
        let high = x + y;
        Self { high, low: y - (high - x) }
    }

    /// This number times a power of two, exact unless it underflows.
    pub fn times_power(self, power: i32) -> Self {
        Self { high: times_power(self.high, power), low: times_power(self.low, power) }
    }

    pub fn abs(self) -> Self {
        if self.high < 0.0 { -self } else { self }
    }

    /// The square root; 0 for numbers that are not positive.
    pub fn sqrt(self) -> Self {
        if self.high <= 0.0 {
            return Self::ZERO;
        }
        let root = self.high.sqrt();
        let rest = self - Self::of_product(root, root);
        Self::of_ordered_sum(root, rest.high / (2.0 * root))
    }
}

impl From<f64> for Double {
    fn from(x: f64) -> Self {
        Self { high: x, low: 0.0 }
    }
}

impl Neg for Double {
    type Output = Self;

    fn neg(self) -> Self {
        Self { high: -self.high, low: -self.low }
    }
}

impl Add for Double {
    type Output = Self;

    /// The relative error is at most 3 · 2⁻¹⁰⁶.
    fn add(self, other: Self) -> Self {
        let high = Self::of_sum(self.high, other.high);
        let low = Self::of_sum(self.low, other.low);
        let sum = Self::of_ordered_sum(high.high, high.low + low.high);
        Self::of_ordered_sum(sum.high, sum.low + low.low)
    }
}

impl Sub for Double {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

impl Mul for Double {
    type Output = Self;

    /// The relative error is at most 4 · 2⁻¹⁰⁶.
    fn mul(self, other: Self) -> Self {
        let high = Self::of_product(self.high, other.high);
        let crossed = self.high.mul_add(other.low, self.low * other.low);
        let crossed = self.low.mul_add(other.high, crossed);
        Self::of_ordered_sum(high.high, high.low + crossed)
    }
}

impl Div for Double {
    type Output = Self;

    /// The relative error is at most 15 · 2⁻¹⁰⁶.
    fn div(self, other: Self) -> Self {
        let quotient = self.high / other.high;
        let rest = self - other * Self::from(quotient);
        Self::of_ordered_sum(quotient, rest.high / other.high)
    }
}

/// A [`Double`] times a power of two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extended {
    /// The significand: from 1 to 2, or 0.
    pub digits: Double,
    pub power: i32,
}

impl Extended {
    pub const ZERO: Self = Self { digits: Double::ZERO, power: 0 };

    /// `digits` · 2^`power`.
    pub fn new(digits: Double, power: i32) -> Self {
        if digits.high == 0.0 {
            return Self::ZERO;
        }
        let exponent = power_of(digits.high);
        Self { digits: digits.times_power(-exponent), power: power + exponent }
    }

    pub fn abs(self) -> Self {
        Self { digits: self.digits.abs(), power: self.power }
    }

    /// The square root; 0 for numbers that are not positive.
    pub fn sqrt(self) -> Self {
        let odd = self.power.rem_euclid(2);
        Self::new(self.digits.times_power(odd).sqrt(), (self.power - odd) / 2)
    }

    pub fn is_below(self, other: Self) -> bool {
        (self - other).digits.high < 0.0
    }
}

impl From<f64> for Extended {
    fn from(x: f64) -> Self {
        Self::new(Double::from(x), 0)
    }
}

impl Neg for Extended {
    type Output = Self;

    fn neg(self) -> Self {
        Self { digits: -self.digits, power: self.power }
    }
}

impl Add for Extended {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        if self.digits.high == 0.0 {
            return other;
        }
        if other.digits.high == 0.0 {
            return self;
        }
        let (large, small) = if self.power < other.power { (other, self) } else { (self, other) };
        let digits = large.digits + small.digits.times_power(small.power - large.power);
        Self::new(digits, large.power)
    }
}

impl Sub for Extended {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

impl Mul for Extended {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        Self::new(self.digits * other.digits, self.power + other.power)
    }
}

/// The exponent of the power of two at or below the magnitude of a finite non-zero number.
pub fn power_of(x: f64) -> i32 {
    let biased = |x: f64| ((x.to_bits() >> 52) & 0x7ff) as i32;
    match biased(x) {
        // Subnormal numbers.
        0 => biased(x * power_of_two(64)) - 1023 - 64,
        normal => normal - 1023,
    }
}

/// A number times a power of two, exact unless it overflows or underflows.
pub fn times_power(x: f64, power: i32) -> f64 {
    // In two steps, since 2^power itself may be out of range.
    let power = power.clamp(-2040, 2040);
    x * power_of_two(power / 2) * power_of_two(power - power / 2)
}

/// A power of two from 2⁻¹⁰²² to 2¹⁰²³.
fn power_of_two(power: i32) -> f64 {
    f64::from_bits(((power + 1023) as u64) << 52)
}
