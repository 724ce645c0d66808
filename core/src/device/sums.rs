//! Exact sums of rows, for means that do not depend on the order of rows, on threads, or on the
//! values of other rows.
//!
//! A sum has two parts. Nearly all numbers are integer multiples of a *step*, a power of two chosen
//! for each column, and are summed as 64-bit integers. The rest is added to a wide sum, which
//! covers every exponent. Both parts are exact, so the choice of steps affects only the speed.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::parallel::in_parallel;

/// Sums of rows in cells: `width` numbers each, of rows that are multiplied by a weight.
///
/// The terms are the products of weight and number, each rounded once to 53 bits, with an unlimited
/// exponent.
#[derive(Debug, Clone)]
pub(super) struct ExactSums {
    pub(super) steps: Arc<Steps>,
    /// For each cell and column, the sum in steps …
    high: Vec<i64>,
    /// … and in parts of a step, if [`Steps::has_parts`].
    low: Vec<i64>,
    /// Wide sums of other numbers, and for each cell and column whether it has one.
    wide: HashMap<usize, Wide>,
    is_wide: Vec<bool>,
    /// Scratch memory for a row, in steps and parts.
    row: (Vec<i64>, Vec<i64>),
}

/// The step of each column.
#[derive(Debug)]
pub(super) struct Steps {
    /// A power of two for each column, and its inverse.
    steps: Vec<f64>,
    pub(super) inverse: Vec<f64>,
    /// A single number has at most 2^bits steps: the sum of all numbers then stays below 2⁶², and
    /// each number below 2⁵¹, the range of [`ROUND_TO_INTEGER_F64`].
    bits: i32,
    /// Whether a step is divided into 2^bits parts, for numbers of more than the 24 bits of f32.
    has_parts: bool,
}

/// 1.5 · 2⁵²: adding it to a number below 2⁵¹ leaves the nearest integer in the low bits.
pub(super) const ROUND_TO_INTEGER_F64: f64 = 6_755_399_441_055_744.0;

/// Rows sampled to choose the steps.
const SAMPLE: usize = 1024;

/// The limits on a step's exponent: steps multiply integers of 24 or 53 bits.
const LEAST_STEP: i32 = -1022;
const MOST_STEP: i32 = 1022;

impl Steps {
    /// Chooses steps for sums of these rows.
    pub(super) fn choose<T: Real>(values: &[T], width: usize, weights: Option<&[f64]>) -> Self {
        let product = |row: usize, column: usize| {
            let weight = weights.map_or(1.0, |weights| weights[row]);
            weight * values[row * width + column].to_f64()
        };
        let has_parts = weights.is_some() || T::MANTISSA > 24;
        Self::for_products(values.len() / width.max(1), width, has_parts, product)
    }

    /// Chooses steps for sums of `rows` rows of these products.
    fn for_products(
        rows: usize,
        width: usize,
        has_parts: bool,
        product: impl Fn(usize, usize) -> f64 + Sync,
    ) -> Self {
        let rows_bits = usize::BITS - rows.saturating_sub(1).leading_zeros();
        let bits = (62 - rows_bits as i32).min(51);
        let room = if has_parts { 2 * bits } else { bits };
        // The last bits of all f32 are between 2^-149 and 2^104: other steps are useless.
        let range = if has_parts { (LEAST_STEP, MOST_STEP) } else { (-149, 104) };
        let stride = rows.div_ceil(SAMPLE).max(1);
        let exponent = |column: usize| {
            let sample = (0..rows).step_by(stride).map(|row| product(row, column));
            let spans = sample.filter(|x| x.is_normal()).map(|x| {
                let (mantissa, exponent) = parts_of(x);
                let top = exponent + (u64::BITS - mantissa.leading_zeros()) as i32;
                // The smallest step within the limit, and the largest step of which this is a
                // multiple.
                (top - bits, exponent + mantissa.trailing_zeros() as i32 + room - bits)
            });
            let spans: Vec<_> = spans
                .map(|(a, b)| (a.clamp(range.0, range.1), b.clamp(range.0, range.1)))
                .collect();
            best_step(&spans).unwrap_or(0)
        };
        let columns = (0..width).collect::<Vec<_>>();
        let exponents: Vec<i32> = if rows * width < 1 << 16 {
            columns.into_iter().map(exponent).collect()
        } else {
            in_parallel(columns, exponent)
        };
        Self {
            steps: exponents.iter().map(|e| power_of_two(*e)).collect(),
            inverse: exponents.iter().map(|e| power_of_two(-e)).collect(),
            bits,
            has_parts,
        }
    }

    /// The largest number of steps of a single number.
    pub(super) fn limit(&self) -> f64 {
        power_of_two(self.bits)
    }

    fn exponent(&self, column: usize) -> i32 {
        exponent_of(self.steps[column])
    }

    /// Converts a row to integer steps; false if an element is not a multiple.
    #[inline(always)]
    fn whole<T: Real>(&self, row: &[T], out: &mut [i64]) -> bool {
        let (limit, mut fits) = (self.limit(), true);
        for (((x, inverse), step), out) in row.iter().zip(&self.inverse).zip(&self.steps).zip(out) {
            let (whole, is_whole) = in_steps(x.to_f64(), *inverse, *step, limit);
            *out = whole;
            fits &= is_whole;
        }
        fits
    }

    /// Converts a row times its weight to steps and parts; false if an element is not exact.
    #[inline(always)]
    fn parts<T: Real>(&self, row: &[T], weight: f64, high: &mut [i64], low: &mut [i64]) -> bool {
        let (limit, mut fits) = (self.limit(), true);
        let steps = self.inverse.iter().zip(&self.steps);
        for ((x, (inverse, step)), (high, low)) in
            row.iter().zip(steps).zip(high.iter_mut().zip(low))
        {
            let (whole, parts, is_whole) = in_parts(x.to_f64(), weight, *inverse, *step, limit);
            (*high, *low) = (whole, parts);
            fits &= is_whole;
        }
        fits
    }
}

/// Rows of a block of [`sums_by_label`].
const BLOCK: usize = 16_384;

/// The sum of the rows' terms in each of `cells` cells, exact and rounded once. A term is a number and a weight,
/// of which the product is rounded once; an infinite one makes its sum infinite.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled).
pub fn sums_by_label(
    rows: usize,
    cells: usize,
    label: impl Fn(usize) -> usize + Sync,
    term: impl Fn(usize) -> (f64, f64) + Sync,
    job: &Job,
) -> Result<Vec<f64>> {
    let product = |row: usize, _| {
        let (number, weight) = term(row);
        number * weight
    };
    let steps = Arc::new(Steps::for_products(rows, 1, true, product));
    // Several rows per cell, so that the sums of blocks are small beside the rows.
    let block = BLOCK.max(16 * cells);
    let starts = (0..rows).step_by(block);
    let blocks = in_parallel(starts, |start: usize| {
        job.check()?;
        let (mut sums, mut infinite) = (ExactSums::new(steps.clone(), cells), Vec::new());
        for row in start..rows.min(start + block) {
            match (label(row), term(row)) {
                (cell, (number, weight)) if number.is_finite() && weight.is_finite() => {
                    sums.move_row(&[number], weight, None, cell);
                }
                (cell, _) => infinite.push(cell),
            }
        }
        Ok((sums, infinite))
    });
    let mut blocks = blocks.into_iter();
    let none = || Ok((ExactSums::new(steps.clone(), cells), Vec::new()));
    let (mut all, mut infinite) = blocks.next().unwrap_or_else(none)?;
    for of_block in blocks {
        let (sums, more) = of_block?;
        all.absorb(&sums);
        infinite.extend(more);
    }
    let mut totals: Vec<_> = (0..cells).map(|cell| all.total(cell, 0).to_f64()).collect();
    infinite.into_iter().for_each(|cell| totals[cell] = f64::INFINITY);
    Ok(totals)
}

/// A number in steps, and whether it is an integer multiple of at most `limit` steps.
#[inline(always)]
fn in_steps(x: f64, inverse: f64, step: f64, limit: f64) -> (i64, bool) {
    let (nearest, whole) = integer(x * inverse);
    // Checked by multiplying back, since the scaled value of too small a number underflows to 0.
    (whole, (nearest * step == x) & (nearest.abs() <= limit))
}

/// A number times a weight in steps and parts, and whether the conversion is exact.
#[inline(always)]
fn in_parts(x: f64, weight: f64, inverse: f64, step: f64, limit: f64) -> (i64, i64, bool) {
    let product = x * weight;
    let scaled = product * inverse;
    let (nearest, whole) = integer(scaled);
    let rest = scaled - nearest;
    let (nearest_part, parts) = integer(rest * limit);
    // A subnormal or infinite product is not the exact one rounded to 53 bits, and neither is a
    // product that rounding has made normal.
    let is_rounded_once = (product.abs() > f64::MIN_POSITIVE) | (x == 0.0);
    let is_all = (scaled * step == product) & (nearest_part == rest * limit);
    (whole, parts, is_rounded_once & is_all & (scaled.abs() <= limit))
}

/// The nearest integer of a number up to 2⁵¹, in both types; unspecified for a larger one.
#[inline(always)]
pub(super) fn integer(x: f64) -> (f64, i64) {
    let shifted = x + ROUND_TO_INTEGER_F64;
    (
        shifted - ROUND_TO_INTEGER_F64,
        (shifted.to_bits() as i64).wrapping_sub(ROUND_TO_INTEGER_F64.to_bits() as i64),
    )
}

/// The exponent that lies in the largest number of ranges, with a margin to their edges.
fn best_step(spans: &[(i32, i32)]) -> Option<i32> {
    let first = spans.iter().map(|span| span.0).min()?;
    let last = spans.iter().map(|span| span.0.max(span.1)).max()?;
    let mut changes = vec![0i32; (last - first + 2) as usize];
    for (least, most) in spans.iter().filter(|(least, most)| least <= most) {
        changes[(least - first) as usize] += 1;
        changes[(most + 1 - first) as usize] -= 1;
    }
    let counts = changes.iter().scan(0, |count, change| {
        *count += change;
        Some(*count)
    });
    let counts: Vec<i32> = counts.collect();
    let most = *counts.iter().max()?;
    let is_good = |count: &i32| *count >= most - most / 1024;
    let low = counts.iter().position(is_good)?;
    let high = low + counts[low..].iter().take_while(|count| is_good(count)).count() - 1;
    // Rows outside the sample may be larger.
    Some(first + (low + 2).min((low + high).div_ceil(2)) as i32)
}

impl ExactSums {
    /// Empty sums of `cells` cells.
    pub(super) fn new(steps: Arc<Steps>, cells: usize) -> Self {
        let width = steps.steps.len();
        let parts = if steps.has_parts { width } else { 0 };
        Self {
            high: vec![0; cells * width],
            low: vec![0; cells * parts],
            wide: HashMap::new(),
            is_wide: vec![false; cells * width],
            row: (vec![0; width], vec![0; parts]),
            steps,
        }
    }

    /// Empty sums of the same cells.
    pub(super) fn cleared(&self) -> Self {
        Self::new(self.steps.clone(), self.high.len() / self.steps.steps.len().max(1))
    }

    /// Bytes of memory, without the wide sums.
    pub(super) fn bytes(&self) -> usize {
        (self.high.len() + self.low.len()) * size_of::<i64>() + self.is_wide.len()
    }

    /// Bytes of the wide sums.
    pub(super) fn wide_bytes(&self) -> usize {
        let bins: usize = self.wide.values().map(|wide| wide.bins.capacity()).sum();
        self.wide.capacity() * size_of::<(usize, Wide)>() + bins * size_of::<i128>()
    }

    pub(super) fn width(&self) -> usize {
        self.steps.steps.len()
    }

    /// Adds a row to the cell `to`, and subtracts it from the cell `from`.
    #[inline(always)]
    pub(super) fn move_row<T: Real>(
        &mut self,
        row: &[T],
        weight: f64,
        from: Option<usize>,
        to: usize,
    ) {
        let (high, low) = &mut self.row;
        let fits = if self.steps.has_parts {
            self.steps.parts(row, weight, high, low)
        } else {
            self.steps.whole(row, high)
        };
        if !fits {
            return self.move_row_slowly(row, weight, from, to);
        }
        move_whole(&mut self.high, high, from, to);
        if self.steps.has_parts {
            move_whole(&mut self.low, low, from, to);
        }
    }

    /// The same for a row with numbers for the wide sums.
    #[cold]
    #[inline(never)]
    fn move_row_slowly<T: Real>(&mut self, row: &[T], weight: f64, from: Option<usize>, to: usize) {
        let (steps, width) = (self.steps.clone(), self.width());
        let (mut high, mut low) = std::mem::take(&mut self.row);
        for (column, x) in row.iter().map(|x| x.to_f64()).enumerate() {
            let (inverse, step) = (steps.inverse[column], steps.steps[column]);
            let fits = if steps.has_parts {
                in_parts(x, weight, inverse, step, steps.limit()).2
            } else {
                in_steps(x, inverse, step, steps.limit()).1
            };
            if fits {
                continue;
            }
            high[column] = 0;
            low.get_mut(column).into_iter().for_each(|low| *low = 0);
            for (cell, is_negative) in [(Some(to), false), (from, true)] {
                let place = cell.map(|cell| cell * width + column);
                place.into_iter().for_each(|at| self.wide(at).add_product(x, weight, is_negative));
            }
        }
        move_whole(&mut self.high, &high, from, to);
        if steps.has_parts {
            move_whole(&mut self.low, &low, from, to);
        }
        self.row = (high, low);
    }

    fn wide(&mut self, place: usize) -> &mut Wide {
        self.is_wide[place] = true;
        self.wide.entry(place).or_default()
    }

    /// Adds the sums of `other`.
    pub(super) fn absorb(&mut self, other: &Self) {
        let add = |to: &mut [i64], from: &[i64]| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = to.wrapping_add(*from));
        };
        add(&mut self.high, &other.high);
        add(&mut self.low, &other.low);
        for (place, wide) in &other.wide {
            self.wide(*place).absorb(wide);
        }
    }

    /// Adds the sums of `other`, whatever its steps.
    pub(super) fn merge(&mut self, other: &Self) {
        for place in 0..self.high.len() {
            let sum = other.exact(place);
            if !sum.bins.is_empty() {
                self.wide(place).absorb(&sum);
            }
        }
    }

    /// Appends all sums in a form that is the same for equal sums.
    pub(super) fn write(&self, to: &mut Vec<u8>) {
        (0..self.high.len()).for_each(|place| self.exact(place).write(to));
    }

    /// Takes the [written](Self::write) sums of `cells` cells from the front of `from`; `None` if it
    /// has none.
    pub(super) fn read(from: &mut &[u8], width: usize, cells: usize) -> Option<Self> {
        let ones = vec![1.0; width];
        let steps = Steps { steps: ones.clone(), inverse: ones, bits: 51, has_parts: true };
        let mut sums = Self::new(Arc::new(steps), cells);
        for place in 0..cells * width {
            let sum = Wide::read(from)?;
            if !sum.bins.is_empty() {
                *sums.wide(place) = sum;
            }
        }
        Some(sums)
    }

    /// The sum of a cell and column.
    fn exact(&self, place: usize) -> Wide {
        let mut sum = match self.is_wide[place] {
            true => self.wide.get(&place).cloned().unwrap_or_default(),
            false => Wide::default(),
        };
        let exponent = self.steps.exponent(place % self.width().max(1));
        sum.add_integer(self.high[place], exponent);
        if self.steps.has_parts {
            sum.add_integer(self.low[place], exponent - self.steps.bits);
        }
        sum
    }

    /// For each cell and column, the sum in steps or in parts.
    #[cfg(feature = "cuda")]
    pub(super) fn steps_mut(&mut self, of_parts: bool) -> &mut [i64] {
        if of_parts { &mut self.low } else { &mut self.high }
    }

    /// Adds Σ `digits[i]` · 2^(32 i + `least_exponent`) to the wide sum of a cell and column.
    #[cfg(feature = "cuda")]
    pub(super) fn add_digits(&mut self, place: usize, digits: &[i64], least_exponent: i32) {
        let wide = self.wide(place);
        for (i, digit) in digits.iter().enumerate() {
            wide.add_integer(*digit, 32 * i as i32 + least_exponent);
        }
    }

    /// A sum, rounded once.
    pub(super) fn total(&self, cell: usize, column: usize) -> Scaled {
        let place = cell * self.width() + column;
        if self.is_wide[place] {
            return self.exact(place).rounded();
        }
        let (high, exponent) = (self.high[place], self.steps.exponent(column));
        if !self.steps.has_parts {
            return Scaled { mantissa: high as f64, exponent };
        }
        let whole = (i128::from(high) << self.steps.bits) + i128::from(self.low[place]);
        Scaled { mantissa: whole as f64, exponent: exponent - self.steps.bits }
    }
}

#[inline(always)]
fn move_whole(sums: &mut [i64], row: &[i64], from: Option<usize>, to: usize) {
    let width = row.len();
    for (sum, x) in sums[to * width..][..width].iter_mut().zip(row) {
        *sum = sum.wrapping_add(*x);
    }
    if let Some(from) = from {
        for (sum, x) in sums[from * width..][..width].iter_mut().zip(row) {
            *sum = sum.wrapping_sub(*x);
        }
    }
}

/// An unlimited integer times a power of two: bins of 32 bits, to which digits are added without
/// carry propagation.
#[derive(Debug, Clone, Default)]
struct Wide {
    /// The first bin counts multiples of 2^(32 first).
    first: i32,
    /// 96 bits of room for carries, more than the number of rows needs.
    bins: Vec<i128>,
}

impl Wide {
    /// Adds x · weight, rounded to 53 bits, or subtracts it.
    fn add_product(&mut self, x: f64, weight: f64, is_minus: bool) {
        let ((a, a_exponent), (b, b_exponent)) = (parts_of(x), parts_of(weight));
        let product = u128::from(a) * u128::from(b);
        let surplus = (128 - product.leading_zeros() as i32 - 53).max(0);
        let (mut mantissa, rest) = (product >> surplus, product & ((1 << surplus) - 1));
        if surplus > 0 {
            let half = 1 << (surplus - 1);
            let is_up = rest > half || (rest == half && mantissa % 2 == 1);
            mantissa += u128::from(is_up);
        }
        let is_negative = (x < 0.0) != is_minus;
        let mantissa = if is_negative { -(mantissa as i64) } else { mantissa as i64 };
        self.add_integer(mantissa, a_exponent + b_exponent + surplus);
    }

    /// Adds n · 2^exponent.
    fn add_integer(&mut self, n: i64, exponent: i32) {
        if n == 0 {
            return;
        }
        let (bin, shift) = (exponent.div_euclid(32), exponent.rem_euclid(32));
        self.cover(bin, bin + 3);
        let magnitude = u128::from(n.unsigned_abs()) << shift;
        for i in 0..3 {
            let digit = i128::from((magnitude >> (32 * i)) as u32);
            self.bins[(bin - self.first + i) as usize] += if n < 0 { -digit } else { digit };
        }
    }

    fn absorb(&mut self, other: &Self) {
        self.cover(other.first, other.first + other.bins.len() as i32);
        let start = (other.first - self.first) as usize;
        self.bins[start..].iter_mut().zip(&other.bins).for_each(|(bin, other)| *bin += other);
    }

    /// Extends the bins to the range from `begin` to before `end`.
    fn cover(&mut self, begin: i32, end: i32) {
        if self.bins.is_empty() {
            self.first = begin;
        }
        if begin < self.first {
            let missing = (self.first - begin) as usize;
            self.bins.splice(0..0, std::iter::repeat_n(0, missing));
            self.first = begin;
        }
        let length = (end - self.first).max(0) as usize;
        if length > self.bins.len() {
            self.bins.resize(length, 0);
        }
    }

    /// Appends the first digit's number, sign and length, and the digits, none of them 0 at an end.
    fn write(&self, to: &mut Vec<u8>) {
        let (is_negative, digits) = self.digits();
        let start = digits.iter().position(|digit| *digit != 0).unwrap_or(digits.len());
        let end = digits.iter().rposition(|digit| *digit != 0).map_or(start, |last| last + 1);
        let first = if start < end { self.first + start as i32 } else { 0 };
        to.extend(first.to_le_bytes());
        to.extend(((end - start) as u32 * 2 + u32::from(is_negative)).to_le_bytes());
        digits[start..end].iter().for_each(|digit| to.extend(digit.to_le_bytes()));
    }

    fn read(from: &mut &[u8]) -> Option<Self> {
        let mut number = || from.split_off(..4)?.try_into().ok().map(u32::from_le_bytes);
        let (first, form) = (number()? as i32, number()?);
        // Sums of doubles, and of their products, have fewer digits.
        if first.unsigned_abs() > 256 || form > 2 * 512 {
            return None;
        }
        let sign = if form % 2 == 1 { -1 } else { 1 };
        let bins = (0..form / 2).map(|_| Some(sign * i128::from(number()?)));
        Some(Self { first, bins: bins.collect::<Option<_>>()? })
    }

    /// The nearest number of 53 bits, ties to even.
    fn rounded(&self) -> Scaled {
        let (is_negative, digits) = self.digits();
        let Some(top) = digits.iter().rposition(|digit| *digit != 0) else {
            return Scaled { mantissa: 0.0, exponent: 0 };
        };
        // The three highest digits have at least 65 bits; a sticky bit at the end covers the rest.
        let digit = |i: usize| top.checked_sub(i).map_or(0, |at| u128::from(digits[at]));
        let is_more = digits[..top.saturating_sub(2)].iter().any(|digit| *digit != 0);
        let highest = digit(0) << 64 | digit(1) << 32 | digit(2) | u128::from(is_more);
        let mantissa = if is_negative { -(highest as f64) } else { highest as f64 };
        Scaled { mantissa, exponent: 32 * (self.first + top as i32 - 2) }
    }

    /// Sign and magnitude, in digits of 32 bits from the lowest on.
    fn digits(&self) -> (bool, Vec<u32>) {
        let carried = |sign: i128| {
            let mut carry = 0;
            let mut digits: Vec<u32> = Vec::with_capacity(self.bins.len() + 4);
            for bin in self.bins.iter().map(|bin| sign * bin).chain([0; 4]) {
                let sum = bin + carry;
                digits.push(sum as u32);
                carry = sum >> 32;
            }
            (carry >= 0).then_some(digits)
        };
        match carried(1) {
            Some(digits) => (false, digits),
            None => (true, carried(-1).expect("a negative number's opposite is positive")),
        }
    }
}

/// A number with an unlimited exponent: mantissa · 2^exponent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scaled {
    mantissa: f64,
    exponent: i32,
}

impl Scaled {
    /// The integer `n`.
    pub(super) fn whole(n: i64) -> Self {
        Self { mantissa: n as f64, exponent: 0 }
    }

    /// The quotient in float64, rounded once; clamped to finite numbers.
    pub(super) fn over(self, other: Self) -> f64 {
        let (mantissa, exponent) = (self.mantissa / other.mantissa, self.exponent - other.exponent);
        Self { mantissa, exponent }.to_f64().clamp(-f64::MAX, f64::MAX)
    }

    /// The number in float64, rounded once.
    fn to_f64(self) -> f64 {
        let Self { mantissa: mut scaled, mut exponent } = self;
        // Exponent steps small enough for numbers between 2^-128 and 2^128 to lose no bits before
        // the last one.
        while exponent != 0 && scaled != 0.0 && scaled.is_finite() {
            let step = exponent.clamp(-800, 800);
            scaled *= power_of_two(step);
            exponent -= step;
        }
        scaled
    }
}

/// An integer of at most 53 bits and an exponent: |x| = mantissa · 2^exponent.
fn parts_of(x: f64) -> (u64, i32) {
    let (bits, exponent) = (x.to_bits() & ((1 << 52) - 1), (x.to_bits() >> 52 & 0x7ff) as i32);
    if exponent == 0 { (bits, -1074) } else { (bits | 1 << 52, exponent - 1075) }
}

fn power_of_two(exponent: i32) -> f64 {
    debug_assert!((-1022..=1023).contains(&exponent));
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The exponent of a power of two.
fn exponent_of(x: f64) -> i32 {
    (x.to_bits() >> 52) as i32 - 1023
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums_of(rows: &[f64], weights: Option<&[f64]>) -> ExactSums {
        let steps = Arc::new(Steps::choose(rows, 1, weights));
        let mut sums = ExactSums::new(steps, 1);
        for (i, row) in rows.iter().enumerate() {
            sums.move_row(&[*row], weights.map_or(1.0, |weights| weights[i]), None, 0);
        }
        sums
    }

    fn total(rows: &[f64], weights: Option<&[f64]>) -> f64 {
        sums_of(rows, weights).total(0, 0).over(Scaled::whole(1))
    }

    #[test]
    fn sums_by_label_do_not_depend_on_the_order_of_rows() {
        let mut random = crate::random::Random::new(7);
        let (count, cells) = (3 * BLOCK + 11, 5);
        let terms: Vec<_> = (0..count)
            .map(|_| (random.below(5), random.normal() * 1e3, random.normal().exp2()))
            .collect();
        let sums = |row: &(dyn Fn(usize) -> usize + Sync)| {
            let label = |i: usize| terms[row(i)].0 as usize;
            let term = |i: usize| (terms[row(i)].1, terms[row(i)].2);
            sums_by_label(count, cells, label, term, &Job::default()).unwrap()
        };
        let first = sums(&|i| i);
        assert_eq!(first, sums(&|i| count - 1 - i));
        assert_eq!(first, sums(&|i| (i * 7) % count));
        for (cell, sum) in first.iter().enumerate() {
            // The rounded products, summed with the error of every addition.
            let (mut all, mut rest) = (0.0f64, 0.0);
            for (_, number, weight) in terms.iter().filter(|term| term.0 as usize == cell) {
                let (term, before) = (number * weight, all);
                all += term;
                let back = all - before;
                rest += (before - (all - back)) + (term - back);
            }
            assert_eq!(*sum, all + rest);
        }
    }

    #[test]
    fn sums_that_overflow_are_infinite() {
        let numbers = [1.0, f64::MAX, f64::MAX, f64::INFINITY, 2.0];
        let term = |row: usize| (numbers[row], 1.0);
        let label = |row: usize| [0, 1, 1, 2, 0][row];
        let sums = sums_by_label(5, 4, label, term, &Job::default()).unwrap();
        assert_eq!(sums, [3.0, f64::INFINITY, f64::INFINITY, 0.0]);
    }

    #[test]
    fn nothing_is_lost_beside_what_is_large() {
        assert_eq!(total(&[1e300, 1e-300, -1e300], None), 1e-300);
        assert_eq!(total(&[f64::MAX, f64::MAX, -f64::MAX, 5e-324, -f64::MAX], None), 5e-324);
        assert_eq!(total(&[1e40, 1.0, 1e-40, -1e40], None), 1.0);
        assert_eq!(total(&[0.0, -0.0], None), 0.0);
    }

    #[test]
    fn products_have_no_limit_of_exponent() {
        let weights = [1e-300, 1e-300, 1e300];
        let sums = sums_of(&[1e-30, 2e-30, 1e300], Some(&weights));
        let mut sums = sums;
        sums.move_row(&[-1e300], 1e300, None, 0);
        let weight = sums_of(&[1e-300], None).total(0, 0);
        let mean = sums.total(0, 0).over(weight);
        assert!((mean - 3e-30).abs() <= 1e-45, "{mean}");
    }

    #[test]
    fn a_product_that_rounding_would_make_normal_is_rounded_to_53_bits() {
        let (rows, smallest) = ([1.0 - f64::EPSILON / 2.0, -0.5], f64::MIN_POSITIVE);
        let weights = [smallest, 2.0 * smallest];
        let weight = sums_of(&weights, None).total(0, 0);
        let mean = sums_of(&rows, Some(&weights)).total(0, 0).over(weight);
        assert_eq!(mean, -f64::EPSILON / 2.0 / 3.0);
    }

    #[test]
    fn halves_go_to_the_even_number() {
        let unit = 2f64.powi(60);
        let large = 2f64.powi(113);
        assert_eq!(total(&[large, unit], None), large);
        assert_eq!(total(&[large, unit, 1.0], None), large + 2.0 * unit);
        assert_eq!(total(&[large, 3.0 * unit], None), large + 4.0 * unit);
        assert_eq!(total(&[-large, -unit, -1e-300], None), -large - 2.0 * unit);
    }

    #[test]
    fn what_was_added_can_be_taken_away() {
        let rows = [1e30, 1.5, -7e-20, 3e5, 1e-310, 2.0];
        let steps = Arc::new(Steps::choose(&rows, 1, None));
        let mut sums = ExactSums::new(steps, 2);
        rows.iter().for_each(|row| sums.move_row(&[*row], 1.0, None, 0));
        rows.iter().filter(|x| **x != 1.5).for_each(|row| sums.move_row(&[*row], 1.0, Some(0), 1));
        assert_eq!(sums.total(0, 0).over(Scaled::whole(1)), 1.5);
        assert_eq!(sums.total(1, 0).over(Scaled::whole(1)), 1e30);
    }

    #[test]
    fn nearly_all_of_what_is_usual_needs_no_wide_sum() {
        let mut state = 1u64;
        let mut unit = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        let mut rows: Vec<f32> = (0..1 << 20).map(|_| unit() + unit() + unit()).collect();
        // An outlier makes no difference, even in the sample.
        rows[0] = 1e38;
        let steps = Arc::new(Steps::choose(&rows, 1, None));
        let mut high = [0];
        let fits = rows.iter().filter(|x| steps.whole(&[**x], &mut high)).count();
        assert!(fits as f64 >= 0.999 * rows.len() as f64, "{fits}");
    }
}
