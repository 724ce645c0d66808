//! From the values of functions to keys of buckets: of a row's own, and of the next best.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use pulp::{Simd, WithSimd};

use super::family::{Family, Rounding};
use super::functions::TableFunctions;
use crate::metric::Metric;
use crate::random::{STEP, mix, unmix};

/// Slots of p-stable functions reach from minus this to this.
pub const MOST_SLOT: f64 = (1 << 24) as f64;

/// Bits of a slot in a key: as many as it may have.
const SLOT_BITS: u32 = 26;

/// How values become keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Signature {
    /// The family of the functions.
    pub family: Family,
    /// For what distances: `l1` orders next buckets by sums, others by sums of squares.
    pub metric: Metric,
    /// The width of slots; of no meaning to families without.
    pub width: f64,
    /// How slots are rounded.
    pub rounding: Rounding,
    /// Whether values that are more than [`MOST_SLOT`] slots away are in the outermost, instead of an
    /// error.
    pub is_clamped: bool,
}

/// A slot beyond [`MOST_SLOT`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotOutOfRange;

/// A change of one value of a signature, and its cost.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Step {
    cost: f64,
    function: usize,
    whole: i32,
}

impl Signature {
    /// The whole numbers that the values of rows stand for, row by row.
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

    /// The bucket of a row with these whole numbers.
    #[inline]
    pub fn key(&self, wholes: &[i32]) -> u64 {
        let bits = self.bits();
        let key = if bits as usize * wholes.len() <= 64 {
            let mask = u64::MAX >> (64 - bits);
            wholes.iter().fold(0u64, |key, whole| key << (bits % 64) | (*whole as u64 & mask))
        } else {
            let terms = wholes.iter().zip(&FACTORS);
            terms.fold(0u64, |key, (whole, factor)| {
                key.wrapping_add((*whole as u64).wrapping_mul(*factor))
            })
        };
        // Keys of all bits: similar signatures are far apart, different ones stay different.
        mix(key)
    }

    /// The key of the box on the other side of some planes, of at most 64: the lowest bit of `flips`
    /// is that of the last plane.
    pub fn flipped(key: u64, flips: u64) -> u64 {
        mix(unmix(key) ^ flips)
    }

    /// The planes, of at most 64, of which the boxes with these keys are on different sides.
    pub fn flips(key: u64, other: u64) -> u64 {
        unmix(key) ^ unmix(other)
    }

    /// The keys of a row's own bucket and of the next best, `probes` in all or all there are: the
    /// most probable first, by the distances of the row to what it would have to cross.
    pub fn keys(
        &self,
        (values, wholes): (&[f64], &[i32]),
        functions: &TableFunctions,
        probes: usize,
        keys: &mut Vec<u64>,
    ) {
        keys.push(self.key(wholes));
        if probes == 1 {
            return;
        }
        let mut steps = self.steps(values, wholes, functions);
        steps.sort_by(|a, b| a.cost.total_cmp(&b.cost));
        let mut changed = wholes.to_vec();
        let of_set = |set: Vec<usize>| {
            set.iter().for_each(|step| changed[steps[*step].function] = steps[*step].whole);
            let key = self.key(&changed);
            set.iter().for_each(|step| {
                let function = steps[*step].function;
                changed[function] = wholes[function];
            });
            key
        };
        let sets = Sets::new(&steps, self.family == Family::Bits);
        keys.extend(sets.take(probes - 1).map(of_set));
    }

    /// Bits of a whole number in a packed key.
    fn bits(&self) -> u32 {
        match self.family {
            Family::PStable => SLOT_BITS,
            Family::Hyperplane | Family::Bits => 1,
            Family::MinHash => 32,
        }
    }

    /// Where a value is, in widths.
    #[inline(always)]
    fn slot(&self, value: f64, offset: f64) -> f64 {
        (value + offset * self.width) / self.width
    }

    /// The next values of each function, with what it costs to go there.
    fn steps(&self, values: &[f64], wholes: &[i32], functions: &TableFunctions) -> Vec<Step> {
        let mut steps = Vec::new();
        let square = |x: f64| if self.metric == Metric::L1 { x.abs() } else { x * x };
        for (function, (value, own)) in values.iter().zip(wholes).enumerate() {
            match self.family {
                Family::PStable => {
                    let at = self.slot(*value, functions.offsets()[function]);
                    // Towards zero, the slot of 0 begins at -1.
                    let begins = match self.rounding {
                        Rounding::Zero if *own <= 0 => own - 1,
                        _ => *own,
                    };
                    let ends = match self.rounding {
                        Rounding::Zero if *own < 0 => *own,
                        _ => own + 1,
                    };
                    let below = square((at - f64::from(begins)) * self.width);
                    let above = square((f64::from(ends) - at) * self.width);
                    steps.push(Step { cost: below, function, whole: own - 1 });
                    steps.push(Step { cost: above, function, whole: own + 1 });
                }
                Family::Hyperplane => {
                    steps.push(Step { cost: value * value, function, whole: 1 - own });
                }
                Family::Bits => steps.push(Step { cost: 1.0, function, whole: 1 - own }),
                Family::MinHash => {}
            }
        }
        steps
    }
}

/// Whole numbers of values.
struct ToWhole<'a> {
    signature: &'a Signature,
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
        // What is no number, after an overflow, is slot 0 where slots are clamped.
        let mut is_in_range = true;
        match signature.family {
            Family::PStable => {
                let offsets = functions.offsets();
                let is_floor = signature.rounding == Rounding::Floor;
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

/// By what each whole number of a signature that does not fit a key is multiplied.
static FACTORS: [u64; 256] = {
    let mut factors = [0; 256];
    let mut i = 0;
    while i < factors.len() {
        factors[i] = mix((i as u64 + 1).wrapping_mul(STEP)) | 1;
        i += 1;
    }
    factors
};

/// Sets of steps, at most one of each function, the cheapest first (Lv et al. 2007): each set after
/// its own is one whose last step is moved on, or one with one more step.
struct Sets<'a> {
    steps: &'a [Step],
    /// Steps that cost the same are ordered by the number of them, and two at most are made.
    are_flips: bool,
    open: BinaryHeap<Set>,
}

/// Positions in the steps, ascending.
#[derive(Debug, Clone, PartialEq)]
struct Set {
    cost: f64,
    steps: Vec<usize>,
}

impl<'a> Sets<'a> {
    fn new(steps: &'a [Step], are_flips: bool) -> Self {
        let first = steps.first().map(|step| Set { cost: step.cost, steps: vec![0] });
        Self { steps, are_flips, open: first.into_iter().collect() }
    }

    fn cost(&self, set: &[usize]) -> f64 {
        set.iter().map(|step| self.steps[*step].cost).sum()
    }
}

impl Iterator for Sets<'_> {
    type Item = Vec<usize>;

    fn next(&mut self) -> Option<Vec<usize>> {
        loop {
            let Set { steps: set, .. } = self.open.pop()?;
            let last = set[set.len() - 1];
            let function = |step: &usize| self.steps[*step].function;
            let is_valid =
                set[..set.len() - 1].iter().all(|step| function(step) != function(&last));
            if last + 1 < self.steps.len() {
                let mut moved = set.clone();
                moved[set.len() - 1] = last + 1;
                self.open.push(Set { cost: self.cost(&moved), steps: moved });
                // What is added to two steps of one function leaves them there.
                if is_valid && (!self.are_flips || set.len() < 2) {
                    let mut more = set.clone();
                    more.push(last + 1);
                    self.open.push(Set { cost: self.cost(&more), steps: more });
                }
            }
            if is_valid {
                return Some(set);
            }
        }
    }
}

impl Eq for Set {}

impl Ord for Set {
    /// The cheapest is the greatest, of those the one with fewer steps, then with earlier ones.
    fn cmp(&self, other: &Self) -> Ordering {
        let order = self.cost.total_cmp(&other.cost);
        let order = order.then(self.steps.len().cmp(&other.steps.len()));
        order.then_with(|| self.steps.cmp(&other.steps)).reverse()
    }
}

impl PartialOrd for Set {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
