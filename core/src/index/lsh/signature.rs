//! Signatures: the rounded hash values of a row, and the bucket key made of them.

use pulp::{Simd, WithSimd};

use super::family::{Family, SlotRounding};
use super::functions::TableFunctions;
use crate::metric::Metric;
use crate::random::{STEP, mix, unmix};

/// Largest absolute slot of a p-stable function.
pub const MOST_SLOT: f64 = (1 << 24) as f64;

/// Bits of a slot in a packed key, enough for ±[`MOST_SLOT`].
const SLOT_BITS: u32 = 26;

/// The mapping of hash values to keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HashSignature {
    /// The family of the functions.
    pub family: Family,
    /// The metric: `l1` orders the next buckets by sums, the others by sums of squares.
    pub metric: Metric,
    /// The width of p-stable slots; unused by other families.
    pub width: f64,
    /// The rounding of slots.
    pub rounding: SlotRounding,
    /// Whether slots beyond [`MOST_SLOT`] are clamped to the outermost, instead of an error.
    pub is_clamped: bool,
}

/// The error of a slot beyond [`MOST_SLOT`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotOutOfRange;

/// A step: the change of one rounded value to an adjacent one, and its cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Step {
    pub cost: f64,
    pub function: usize,
    pub from: i32,
    pub to: i32,
}

impl HashSignature {
    /// The rounded values of rows, row by row.
    ///
    /// # Errors
    /// [`SlotOutOfRange`].
    pub fn wholes(
        &self,
        values: &[f64],
        functions: &TableFunctions,
    ) -> Result<Vec<i32>, SlotOutOfRange> {
        let mut wholes = vec![0; values.len()];
        let is_in_range = pulp::Arch::new().dispatch(ToWhole {
            signature: self,
            values,
            functions,
            to: &mut wholes,
        });
        if is_in_range { Ok(wholes) } else { Err(SlotOutOfRange) }
    }

    /// The key of a row with these rounded values.
    #[inline]
    pub fn key(&self, wholes: &[i32]) -> u64 {
        Self::mixed(self.raw(wholes))
    }

    /// The packed signature before mixing: the rounded values side by side if they fit in 64 bits,
    /// else a sum of multiples of them.
    #[inline]
    pub(super) fn raw(&self, wholes: &[i32]) -> u64 {
        let bits = self.bits();
        if bits as usize * wholes.len() <= 64 {
            let mask = u64::MAX >> (64 - bits);
            wholes.iter().fold(0u64, |key, whole| key << (bits % 64) | (*whole as u64 & mask))
        } else {
            let terms = wholes.iter().zip(&FACTORS);
            terms.fold(0u64, |key, (whole, factor)| {
                key.wrapping_add((*whole as u64).wrapping_mul(*factor))
            })
        }
    }

    /// The packed signature after a step; it has `count` rounded values.
    #[inline]
    pub(super) fn changed(&self, raw: u64, count: usize, step: &Step) -> u64 {
        let (bits, from, to) = (self.bits(), step.from as u64, step.to as u64);
        if bits as usize * count <= 64 {
            let mask = u64::MAX >> (64 - bits);
            raw ^ (((from ^ to) & mask) << (bits as usize * (count - 1 - step.function)))
        } else {
            raw.wrapping_add(to.wrapping_sub(from).wrapping_mul(FACTORS[step.function]))
        }
    }

    /// The packed signature mixed into a key: a bijection that spreads similar signatures.
    #[inline]
    pub(super) fn mixed(raw: u64) -> u64 {
        mix(raw)
    }

    /// The key of the box on the other side of up to 64 planes: the lowest bit of `flips` is that
    /// of the last plane.
    pub fn flipped(key: u64, flips: u64) -> u64 {
        mix(unmix(key) ^ flips)
    }

    /// The planes, at most 64, that separate the boxes with these keys.
    pub fn flips(key: u64, other: u64) -> u64 {
        unmix(key) ^ unmix(other)
    }

    /// Bits of a rounded value in a packed key.
    pub fn bits(&self) -> u32 {
        match self.family {
            Family::PStable => SLOT_BITS,
            Family::Hyperplane | Family::Bits => 1,
            Family::MinHash => 32,
        }
    }

    /// The position of a value, in widths.
    #[inline(always)]
    fn slot(&self, value: f64, offset: f64) -> f64 {
        (value + offset * self.width) / self.width
    }

    /// The steps from each rounded value to the adjacent ones, with their costs.
    pub(super) fn steps(
        &self,
        values: &[f64],
        wholes: &[i32],
        functions: &TableFunctions,
        steps: &mut Vec<Step>,
    ) {
        let square = |x: f64| if self.metric == Metric::L1 { x.abs() } else { x * x };
        for (function, (value, whole)) in values.iter().zip(wholes).enumerate() {
            let whole = *whole;
            match self.family {
                Family::PStable => {
                    let at = self.slot(*value, functions.offsets()[function]);
                    // Towards zero, slot 0 begins at -1.
                    let begins = match self.rounding {
                        SlotRounding::Zero if whole <= 0 => whole - 1,
                        _ => whole,
                    };
                    let ends = match self.rounding {
                        SlotRounding::Zero if whole < 0 => whole,
                        _ => whole + 1,
                    };
                    let below = square((at - f64::from(begins)) * self.width);
                    let above = square((f64::from(ends) - at) * self.width);
                    steps.push(Step { cost: below, function, from: whole, to: whole - 1 });
                    steps.push(Step { cost: above, function, from: whole, to: whole + 1 });
                }
                Family::Hyperplane => {
                    steps.push(Step { cost: value * value, function, from: whole, to: 1 - whole });
                }
                // The steps of bits all cost the same, and the first set bit has no adjacent one.
                Family::Bits | Family::MinHash => {}
            }
        }
    }
}

/// Rounds hash values.
struct ToWhole<'a> {
    signature: &'a HashSignature,
    values: &'a [f64],
    functions: &'a TableFunctions,
    to: &'a mut [i32],
}

impl WithSimd for ToWhole<'_> {
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) -> bool {
        let Self { signature, values, functions, to } = self;
        let count = functions.count().max(1);
        let rows = values.chunks_exact(count).zip(to.chunks_exact_mut(count));
        // NaN, after an overflow, becomes slot 0 if slots are clamped.
        let mut is_in_range = true;
        match signature.family {
            Family::PStable => {
                let offsets = functions.offsets();
                let is_floor = signature.rounding == SlotRounding::Floor;
                for (values, to) in rows {
                    for ((value, offset), to) in values.iter().zip(offsets).zip(to) {
                        let at = signature.slot(*value, *offset);
                        let mut slot = if is_floor { at.floor() } else { at.trunc() };
                        if signature.is_clamped {
                            slot = slot.clamp(-MOST_SLOT, MOST_SLOT);
                        }
                        is_in_range &= slot.abs() <= MOST_SLOT;
                        *to = slot as i32;
                    }
                }
            }
            Family::Hyperplane => {
                to.iter_mut().zip(values).for_each(|(to, value)| *to = i32::from(*value >= 0.0));
            }
            Family::Bits | Family::MinHash => {
                to.iter_mut().zip(values).for_each(|(to, value)| *to = *value as i32);
            }
        }
        is_in_range || signature.is_clamped
    }
}

/// The odd multiplier of each rounded value, for signatures that do not fit in 64 bits.
static FACTORS: [u64; 256] = {
    let mut factors = [0; 256];
    let mut i = 0;
    while i < factors.len() {
        factors[i] = mix((i as u64 + 1).wrapping_mul(STEP)) | 1;
        i += 1;
    }
    factors
};
