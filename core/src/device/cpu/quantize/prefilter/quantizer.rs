//! The quantiser of the prefilter, which rounds 16-bit codes to 8 or 7 bits.

use crate::device::cpu::quantize::quantizer::Quantizer;
use crate::device::cpu::simd::bounds::ROUND_TO_INTEGER_F32;
use crate::device::cpu::simd::dot_i16::CacheLine;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::{MOST_IN_16_BITS, ROWS, TOGETHER_IN_16_BITS, Width};
use crate::matrix::Real;

/// Rows of the sample that determines the steps.
const SAMPLED: usize = 256;
/// One in this many codes of the sample may be clamped, and one in this many queries may exceed the typical lengths.
const CUT_ONE_IN: usize = 10_000;
const EXCEEDS_ONE_IN: usize = 64;
/// With more dimensions, sums would leave no room for starts.
const MOST_DIM: usize = 1 << 13;
/// With fewer dimensions, the padding of rows takes too long.
const LEAST_DIM: usize = 48;
/// The longest row of 16 bits, in its steps.
const LONGEST_ROW: f64 = 27_000.0;
/// Queries with which the prefilter is tried on the sample, where one in `TRIED_ONE_IN` of the pairs needs to pass.
const TRIED_QUERIES: usize = 8;
const TRIED_ONE_IN: usize = 64;
/// Cost model, measured with AVX-512 and AVX2: the 16-bit sum of a pair that passes costs
/// `RECHECK_PER_DIM · dim + RECHECK_FIXED`, and the prefilter saves `SAVED · dim` for every pair.
const RECHECK_PER_DIM: f64 = 3.0;
const RECHECK_FIXED: f64 = 1600.0;
const SAVED: f64 = 0.6;
/// The largest `k` for which thresholds are guessed.
pub(in crate::device::cpu) const MOST_GUESSED: usize = 4096;
/// Upper limit of initial sums and thresholds.
const MOST_START: f64 = (1 << 29) as f64;
/// Numbers of a row that are rounded together, and whose squares are added up side by side.
const ROUNDED: usize = 64;
const SIDE_BY_SIDE: usize = 16;

/// The steps of rows and queries.
#[derive(Debug, Clone)]
pub(in crate::device::cpu) struct PrefilterQuantizer {
    pub(super) width: Width,
    pub(super) level: Level,
    pub(super) dim: usize,
    step: f64,
    /// The step of all queries, if sums start with squares.
    of_queries: Option<f64>,
    /// Typical lengths, which few queries exceed.
    usual: Lengths,
}

/// A search for the `k` nearest of a number of rows.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct SearchSize {
    pub k: usize,
    pub rows: usize,
}

/// Lengths of a query in its steps: of its codes, and of its residual.
#[derive(Debug, Clone, Copy, Default)]
struct Lengths {
    numbers: f64,
    residual: f64,
}

/// The longest residual and the longest row of some, in steps.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::device::cpu::quantize) struct Longest {
    residual: f64,
    row: f64,
}

/// A query with codes of 8 bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct PrefilterQuery {
    step: f64,
    /// The offset that the unsigned base adds to its products.
    offset: f64,
    lengths: Lengths,
}

impl Longest {
    pub fn max(self, other: Self) -> Self {
        Self { residual: self.residual.max(other.residual), row: self.row.max(other.row) }
    }
}

/// Rows of a sample that need to pass when the prefilter is tried.
fn needed<T>(base: &[T]) -> usize {
    base.len() / TRIED_ONE_IN + 1
}

impl PrefilterQuantizer {
    /// Whether this level can prefilter rows of `dim` dimensions and, with `is_to_pay`, whether that may pay.
    pub fn suits(dim: usize, level: Level, is_to_pay: bool) -> bool {
        level.prefilter_width().is_some() && dim <= MOST_DIM && (!is_to_pay || dim >= LEAST_DIM)
    }

    /// Whether codes of fewer bits take at most three quarters of the words of 16-bit codes.
    pub fn is_short(dim: usize, level: Level) -> bool {
        let in_16 = dim.div_ceil(Width::Sixteen.per_word());
        level.prefilter_width().is_some_and(|width| 4 * words(width, dim) <= 3 * in_16)
    }

    /// The steps for these rows and queries like them. `None` if the level has no products of fewer bits, or if these
    /// are not faster in this search.
    pub fn new<T: Real>(
        values: &[T],
        dim: usize,
        quantizer: &Quantizer,
        squares: bool,
        search: Option<SearchSize>,
    ) -> Option<Self> {
        let level = quantizer.level;
        let width = level.prefilter_width().filter(|_| quantizer.width == Width::Sixteen)?;
        let rows = values.len() / dim;
        let sampled = rows.min(SAMPLED);
        let row = |i: usize| &values[i * rows / sampled * dim..][..dim];
        let round = |i: usize, centre: &[f64], step: f64| {
            let mut numbers = Vec::new();
            let rounded = quantizer.round(row(i), centre, step, &mut numbers);
            (rounded, numbers)
        };
        // Products of outliers could overflow 32 bits.
        let of_base = |i| {
            let (rounded, numbers) = round(i, &quantizer.centre, quantizer.step);
            (!quantizer.is_outlier(&rounded)).then_some(numbers)
        };
        let base: Vec<_> = (0..sampled).filter_map(of_base).collect();
        if base.is_empty() {
            return None;
        }
        let mut sizes = base.concat();
        sizes.iter_mut().for_each(|x| *x = x.saturating_abs());
        let most = sizes.len() - 1 - sizes.len() / CUT_ONE_IN;
        let (_, most, _) = sizes.select_nth_unstable(most);
        let step = (f64::from(*most) / f64::from(largest(width))).ceil().max(1.0);
        let quantile = |mut sizes: Vec<f64>| {
            let last = sizes.len() - 1 - sizes.len() / EXCEEDS_ONE_IN;
            *sizes.select_nth_unstable_by(last, f64::total_cmp).1
        };
        let (of_queries, usual) = (None, Lengths::default());
        let mut prefilter = Self { width, level, dim, step, of_queries, usual };
        let queries = if squares {
            let of_queries = match width {
                Width::Eight => step,
                _ => quantile(base.iter().map(|row| prefilter.step_of(row)).collect()).max(1.0),
            };
            prefilter.of_queries = Some(of_queries);
            base.clone()
        } else {
            let of = |i| {
                let step = quantizer.step_of(row(i));
                let (rounded, numbers) = round(i, &quantizer.of_queries, step);
                (!quantizer.is_too_long(&rounded, step)).then_some(numbers)
            };
            (0..sampled).filter_map(of).collect()
        };
        if queries.is_empty() {
            return None;
        }
        let lengths = queries.iter().map(|query| prefilter.query(query, &mut Vec::new()).lengths);
        let (numbers, residual) =
            lengths.map(|of_query| (of_query.numbers, of_query.residual)).unzip();
        prefilter.usual = Lengths { numbers: quantile(numbers), residual: quantile(residual) };
        let allowed = (prefilter.usual.numbers + prefilter.usual.residual) * LONGEST_ROW / step;
        let pays = || search.is_none_or(|search| prefilter.pays(&base, &queries, search));
        (allowed < MOST_START && pays()).then_some(prefilter)
    }

    /// Whether the prefilter is faster than 16-bit products alone when the `k` nearest of `rows` rows are searched,
    /// estimated from sampled rows and queries.
    fn pays(&self, base: &[Vec<i16>], queries: &[Vec<i16>], search: SearchSize) -> bool {
        let SearchSize { k, rows } = search;
        let passing = self.level.dispatch(
            #[inline(always)]
            || self.passing(base, queries),
        );
        if passing * needed(base) as f64 > base.len() as f64 / 4.0 {
            return false;
        }
        // The first panel passes, and then the pairs within thresholds that tighten: with the neighbours found or,
        // for `k` up to `MOST_GUESSED`, with guesses; see `DeferredPairs`.
        let (nearest, rows, dim) = (k as f64, rows as f64, self.dim as f64);
        let by_bounds = nearest * (1.0 + (rows / nearest).ln().max(0.0));
        let panels = (rows / ROWS as f64).max(1.0);
        let by_guesses = 1.2 * (nearest + 7.0 * nearest.sqrt() + 6.0 * panels.ln());
        let passed = if k <= MOST_GUESSED { by_bounds.min(by_guesses) } else { by_bounds };
        let rechecks = ROWS as f64 + passing * passed;
        rechecks * (RECHECK_PER_DIM * dim + RECHECK_FIXED) < SAVED * rows * dim
    }

    /// The number of passing pairs over the number of pairs to be found, which are one in [`TRIED_ONE_IN`].
    #[inline(always)]
    fn passing(&self, base: &[Vec<i16>], queries: &[Vec<i16>]) -> f64 {
        let product = |a: &[i16], b: &[i16]| -> i32 {
            a.iter().zip(b).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum()
        };
        let mut longest = Longest::default();
        let base: Vec<_> = base
            .iter()
            .map(|numbers| {
                let mut bytes = vec![0; self.words() * self.width.per_word()];
                let square = f64::from(product(numbers, numbers));
                let start = if self.of_queries.is_some() { -square / 2.0 } else { 0.0 };
                let (first, row_lengths) = self.round(numbers, start as i32, square, &mut bytes);
                longest = longest.max(row_lengths);
                let bytes: Vec<_> = bytes.into_iter().map(i16::from).collect();
                (numbers, start as i32, bytes, first)
            })
            .collect();
        let needed = needed(&base);
        let queries = queries.iter().step_by(queries.len().div_ceil(TRIED_QUERIES));
        let count = queries.len();
        let passing = queries.map(|numbers| {
            let mut words = Vec::new();
            let query = self.query(numbers, &mut words);
            let codes: Vec<_> = words
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .map(|x| i16::from(x as i8))
                .collect();
            let sums = base.iter().map(|(row, start, ..)| start + product(numbers, row));
            let mut sums: Vec<_> = sums.collect();
            let (_, last, _) = sums.select_nth_unstable_by(needed - 1, |a, b| b.cmp(a));
            let least = self.least(&query, *last, &longest);
            base.iter().filter(|(.., row, first)| first + product(&codes, row) >= least).count()
        });
        passing.sum::<usize>() as f64 / (needed * count) as f64
    }

    /// The prefilter's threshold for pairs whose 16-bit sums are at least `least`, among rows no longer than
    /// `longest`.
    pub(super) fn least(&self, query: &PrefilterQuery, least: i32, longest: &Longest) -> i32 {
        // All pass, or none.
        if matches!(least, i32::MIN | i32::MAX) {
            return least;
        }
        let (lengths, usual) = (query.lengths, self.usual);
        let beyond = (lengths.numbers - usual.numbers).max(0.0) * longest.residual
            + (lengths.residual - usual.residual).max(0.0) * longest.row;
        let least = f64::from(least) / (query.step * self.step) - beyond;
        // Rounded towards 0 by the cast, which saturates.
        (least * (1.0 - 1e-12 * least.signum()) + query.offset - 2.0) as i32
    }

    /// An initial sum of the prefilter, raised by `by` in 16-bit steps, if sums start with squares.
    #[inline]
    pub fn raised(&self, start: i32, by: f64) -> f64 {
        f64::from(start) + by / (self.of_queries.unwrap_or(1.0) * self.step) + 1.0
    }

    /// Words of a row, and its lines.
    pub fn words(&self) -> usize {
        words(self.width, self.dim)
    }

    pub fn lines(&self) -> usize {
        CacheLine::count(self.dim)
    }

    /// Rounds the 16-bit codes of a row, whose initial sum is `start`, to `bytes`. Returns the initial sum of the
    /// bytes, and the lengths of the residual and of the row in steps.
    #[inline(always)]
    pub(in crate::device::cpu::quantize) fn round(
        &self,
        numbers: &[i16],
        start: i32,
        square: f64,
        bytes: &mut [u8],
    ) -> (i32, Longest) {
        let (step, most) = (self.step as f32, largest(self.width) as f32);
        let (inverse, bias) = (1.0 / step, bias(self.width));
        let mut squares = [0.0f32; SIDE_BY_SIDE];
        for (numbers, bytes) in numbers.chunks(ROUNDED).zip(bytes.chunks_mut(ROUNDED)) {
            let mut left = [0.0f32; ROUNDED];
            for ((x, byte), left) in numbers.iter().zip(bytes).zip(&mut left) {
                let x = f32::from(*x);
                let scaled = x * inverse;
                let scaled = if scaled < -most - 1.0 { -most - 1.0 } else { scaled };
                let scaled = if scaled > most { most } else { scaled };
                let shifted = scaled + ROUND_TO_INTEGER_F32;
                // Exact: integers below 2²⁴.
                *left = x - (shifted - ROUND_TO_INTEGER_F32) * step;
                *byte = (shifted.to_bits() as u8).wrapping_add(bias);
            }
            for left in left.as_chunks::<SIDE_BY_SIDE>().0 {
                squares.iter_mut().zip(left).for_each(|(sum, left)| *sum += left * left);
            }
        }
        let squares: f32 = squares.iter().sum();
        // The squares of at most 512 numbers were added up in each.
        let residual = f64::from(squares).sqrt() * (1.0 + 1e-4) / self.step;
        let row = square.sqrt() * (1.0 + 1e-9) / self.step;
        let start =
            self.of_queries.map_or(0.0, |query_step| f64::from(start) / (query_step * self.step));
        let start = start + self.usual.numbers * residual + self.usual.residual * row + 1.0;
        (start.min(MOST_START) as i32, Longest { residual, row })
    }

    /// Rounds the 16-bit codes of a query, and appends its words.
    pub(super) fn query(&self, numbers: &[i16], words: &mut Vec<i32>) -> PrefilterQuery {
        let step = self.of_queries.unwrap_or_else(|| self.step_of(numbers));
        let mut rounded = vec![0; self.words() * self.width.per_word()];
        self.level.dispatch(
            #[inline(always)]
            || round_query(numbers, step, &mut rounded),
        );
        if self.width == Width::Seven {
            rounded.chunks_mut(4 * TOGETHER_IN_16_BITS).for_each(fit_into_16_bits);
        }
        let ([squares, residual], sum) = self.level.dispatch(
            #[inline(always)]
            || lengths(numbers, step, &rounded),
        );
        words.extend(
            rounded.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(bytes.map(|x| x as u8))),
        );
        let lengths = Lengths {
            numbers: squares.sqrt() * (1.0 + 1e-9),
            residual: residual.sqrt() / step * (1.0 + 1e-9),
        };
        PrefilterQuery { step, offset: f64::from(bias(self.width)) * f64::from(sum), lengths }
    }

    /// The step with which no code of a query is clamped.
    fn step_of(&self, numbers: &[i16]) -> f64 {
        let largest = numbers.iter().map(|x| x.unsigned_abs()).max().unwrap_or(0);
        let step = f64::from(largest) / f64::from(self::largest(Width::Eight));
        let step = if self.width == Width::Seven {
            let sums = numbers.chunks(4 * TOGETHER_IN_16_BITS).map(|part| {
                let [low, high] = halves(part.iter().map(|x| i32::from(*x)));
                low.max(high)
            });
            // Rounding adds up to a half to each number.
            let room = MOST_IN_16_BITS - TOGETHER_IN_16_BITS as i32;
            step.max(f64::from(sums.max().unwrap_or(0)) / f64::from(room))
        } else {
            step
        };
        if step > 0.0 { step } else { 1.0 }
    }
}

/// Rounds numbers to multiples of a step from −127 to 127 times it.
#[inline(always)]
fn round_query(numbers: &[i16], step: f64, rounded: &mut [i8]) {
    let (most, inverse) = (f32::from(largest(Width::Eight)), (1.0 / step) as f32);
    for (x, to) in numbers.iter().zip(rounded) {
        let scaled = f32::from(*x) * inverse;
        let scaled = if scaled < -most { -most } else { scaled };
        let scaled = if scaled > most { most } else { scaled };
        *to = (scaled + ROUND_TO_INTEGER_F32).to_bits() as i8;
    }
}

/// The squared lengths of the codes and of the residual, and the sum of the codes.
#[inline(always)]
fn lengths(numbers: &[i16], step: f64, rounded: &[i8]) -> ([f64; 2], i32) {
    let (mut squares, mut left, mut sum) = ([0.0; SIDE_BY_SIDE], [0.0; SIDE_BY_SIDE], 0);
    let parts = numbers.chunks(SIDE_BY_SIDE).zip(rounded.chunks(SIDE_BY_SIDE));
    for (numbers, rounded) in parts {
        let sums = squares.iter_mut().zip(&mut left);
        for ((x, code), (squares, left)) in numbers.iter().zip(rounded).zip(sums) {
            let code = f64::from(*code);
            let residual = f64::from(*x) - code * step;
            *squares += code * code;
            *left += residual * residual;
        }
        sum += rounded.iter().map(|x| i32::from(*x)).sum::<i32>();
    }
    ([squares.iter().sum(), left.iter().sum()], sum)
}

/// Words of a row of `dim` dimensions.
fn words(width: Width, dim: usize) -> usize {
    let words = dim.div_ceil(width.per_word());
    if width == Width::Seven { words.next_multiple_of(TOGETHER_IN_16_BITS) } else { words }
}

/// The largest code of a base row before [`bias`] is added.
fn largest(width: Width) -> i16 {
    if width == Width::Seven { 63 } else { 127 }
}

/// The bias that makes the codes of base rows unsigned.
fn bias(width: Width) -> u8 {
    if width == Width::Seven { 64 } else { 128 }
}

/// The sums of absolute values of the numbers that are added up in 16 bits: two of every four each.
fn halves(numbers: impl Iterator<Item = i32>) -> [i32; 2] {
    let mut sums = [0; 2];
    numbers.enumerate().for_each(|(i, x)| sums[i / 2 % 2] += x.abs());
    sums
}

/// Scales numbers down so that their sums fit 16 bits.
fn fit_into_16_bits(numbers: &mut [i8]) {
    let sums = halves(numbers.iter().map(|x| i32::from(*x)));
    for (i, x) in numbers.iter_mut().enumerate() {
        let sum = sums[i / 2 % 2];
        if sum > MOST_IN_16_BITS {
            // Rounded towards 0.
            *x = (i32::from(*x) * MOST_IN_16_BITS / sum) as i8;
        }
    }
}
