//! The quantiser of rows: integer codes, from a centre and a step.

use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::Width;
use crate::device::sums::ROUND_TO_INTEGER_F64;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Sum;
use crate::parallel::{in_parallel, try_in_parallel};

/// The largest 8-bit code; the smallest is −LARGEST − 1.
const LARGEST: f64 = 127.0;
/// The largest 16-bit code; the smallest is −LARGEST_WORD.
pub(in crate::device::cpu) const LARGEST_WORD: f64 = 32_767.0;
/// The longest base row and the longest query in 16 bits, in steps: a product plus half a square fits 32 bits, and so
/// does every partial sum, as lengths bound the product of any part.
pub(in crate::device::cpu) const LENGTH: f64 = 26_800.0;
const QUERY_LENGTH: f64 = 66_000.0;
/// The length, in steps, of the longest row that determines the step. Rows up to [`LENGTH`] are no outliers.
const USUAL_LENGTH: f64 = 24_000.0;
/// The length of a query with a step of its own.
const USUAL_QUERY_LENGTH: f64 = 65_000.0;
/// At most one in this many rows may lie outside the range.
pub(in crate::device::cpu) const ONE_OUTLIER_IN: usize = 8192;
/// Elements of a row that are rounded together, and whose squares are added up side by side.
const MANY: usize = 64;
const SIDE_BY_SIDE: usize = 8;
/// Rows that a thread prepares together.
pub(in crate::device::cpu) const TOGETHER: usize = 4096;

/// The quantiser of rows: a code is `(x − centre) / step`, rounded.
#[derive(Debug, Clone)]
pub(in crate::device::cpu) struct Quantizer {
    pub(in crate::device::cpu) width: Width,
    pub(in crate::device::cpu) level: Level,
    /// The centres, which are subtracted from base rows and from queries.
    pub(in crate::device::cpu) centre: Vec<f64>,
    pub(in crate::device::cpu) of_queries: Vec<f64>,
    /// The length of the centre.
    pub(in crate::device::cpu) centre_norm: f64,
    pub(in crate::device::cpu) step: f64,
    /// Whether all rows are integers within the range, so that their codes are exact.
    pub(in crate::device::cpu) integral: bool,
}

/// The lengths of a row that was quantised.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct CodeLengths {
    /// The length of the rounding residual.
    pub(in crate::device::cpu) residual: f64,
    /// Close upper bound on the length of the row, from the centre.
    pub(in crate::device::cpu) length: f64,
    /// The squared length of its codes.
    pub(in crate::device::cpu) square: f64,
}

impl Quantizer {
    /// Chooses the range of all rows but a few outliers, from all rows or from a part of them. `None` for 8 bits, unless
    /// codes are exact.
    pub(in crate::device::cpu) fn try_new<T: Real>(
        values: &[T],
        is_part: bool,
        dim: usize,
        sum: Sum,
        width: Width,
        level: Level,
        job: &Job,
    ) -> Result<Option<Self>> {
        if sum == Sum::Squares
            && let Some(centre) = integral_centre(values, is_part, dim, width, level, job)?
        {
            return Ok(Some(Self {
                width,
                level,
                of_queries: centre.clone(),
                centre_norm: norm(&centre),
                centre,
                step: 1.0,
                integral: true,
            }));
        }
        if width == Width::Eight {
            return Ok(None);
        }
        let outliers = values.len() / dim / ONE_OUTLIER_IN;
        let fitting = Self::fitting(values, outliers, dim, sum, level, job)?;
        // If the rows of a part are equal, they do not tell the range of the rest.
        Ok(Some(fitting).filter(|quantizer| !is_part || quantizer.step != 1.0))
    }

    /// The 16-bit range of all rows but `outliers` of them.
    pub(in crate::device::cpu) fn fitting<T: Real>(
        values: &[T],
        outliers: usize,
        dim: usize,
        sum: Sum,
        level: Level,
        job: &Job,
    ) -> Result<Self> {
        let (squares, width) = (sum == Sum::Squares, Width::Sixteen);
        let rows = values.len() / dim;
        let share = 1.0 / rows as f64;
        let mean = |rows_of: &[T]| {
            job.check()?;
            let mut mean = vec![0.0; dim];
            level.dispatch(
                #[inline(always)]
                || {
                    for row in rows_of.chunks_exact(dim) {
                        mean.iter_mut().zip(row).for_each(|(c, x)| *c += x.to_f64() * share);
                    }
                },
            );
            Ok(mean)
        };
        let means = try_in_parallel(values.chunks(TOGETHER * dim), mean)?;
        let mut centre = vec![0.0; dim];
        for mean in means {
            centre.iter_mut().zip(mean).for_each(|(c, x)| *c += x);
        }
        let mut radii = vec![0.0; rows];
        let parts = radii.chunks_mut(TOGETHER).zip(values.chunks(TOGETHER * dim));
        in_parallel(parts, |(radii, values): (&mut [f64], &[T])| {
            level.dispatch(
                #[inline(always)]
                || {
                    for (radius, row) in radii.iter_mut().zip(values.chunks_exact(dim)) {
                        *radius = distance(row, &centre);
                    }
                },
            );
        });
        job.check()?;
        let rank = rows - 1 - outliers;
        let (_, most, _) = radii.select_nth_unstable_by(rank, f64::total_cmp);
        let step = if *most > 0.0 { *most / USUAL_LENGTH } else { 1.0 };
        let of_queries = if squares { centre.clone() } else { vec![0.0; dim] };
        let centre_norm = norm(&centre);
        Ok(Self { width, level, centre, of_queries, centre_norm, step, integral: false })
    }

    /// Whether the step is far from where squares overflow or underflow in float64.
    pub(in crate::device::cpu) fn is_usual(&self) -> bool {
        (1e-100..1e100).contains(&self.step)
    }

    /// The longest residual of a row within the range.
    pub(in crate::device::cpu) fn usual_residual(&self, step: f64) -> f64 {
        step * (self.centre.len() as f64).sqrt() * 0.5 * (1.0 + 1e-6)
    }

    /// Whether a row of a base lies outside the range.
    pub(in crate::device::cpu) fn is_outlier(&self, row: &CodeLengths) -> bool {
        self.width == Width::Sixteen && row.length > LENGTH * self.step * (1.0 + 1e-9)
    }

    /// Whether a query lies far outside the range, where its bounds are loose.
    pub(in crate::device::cpu) fn is_far(&self, query: &CodeLengths, step: f64) -> bool {
        match self.width {
            Width::Eight | Width::Seven => query.residual > 4.0 * self.usual_residual(step),
            Width::Sixteen => self.is_too_long(query, step),
        }
    }

    /// Whether a query has no bounds: its products with rows may overflow 32 bits, or its codes were clamped.
    pub(in crate::device::cpu) fn is_too_long(&self, query: &CodeLengths, step: f64) -> bool {
        let is_cut = query.residual > self.usual_residual(step) + 1e-9 * query.length;
        self.width == Width::Sixteen
            && (is_cut || query.length > QUERY_LENGTH * step * (1.0 + 1e-9))
    }

    /// The step of a query that does not share the base's.
    pub(in crate::device::cpu) fn step_of<T: Real>(&self, query: &[T]) -> f64 {
        let [largest, square] = self.level.dispatch(
            #[inline(always)]
            || largest_and_square(query),
        );
        let length = square.sqrt();
        let step = (length / USUAL_QUERY_LENGTH).max(largest / LARGEST_WORD);
        if step > 0.0 { step } else { 1.0 }
    }

    /// Quantises a row: `(row − centre) / step`, rounded.
    pub(in crate::device::cpu) fn round<T: Real>(
        &self,
        row: &[T],
        centre: &[f64],
        step: f64,
        values: &mut Vec<i16>,
    ) -> CodeLengths {
        values.clear();
        values.resize(row.len(), 0);
        self.level.dispatch(
            #[inline(always)]
            || self.round_to(row, centre, step, values),
        )
    }

    /// As [`round`](Self::round), to a slice as long as the row. It is inlined, so as to use the caller's
    /// instructions.
    #[inline(always)]
    pub(in crate::device::cpu) fn round_to<T: Real>(
        &self,
        row: &[T],
        centre: &[f64],
        step: f64,
        values: &mut [i16],
    ) -> CodeLengths {
        let range = match self.width {
            Width::Eight | Width::Seven => CodeRange { least: -LARGEST - 1.0, most: LARGEST },
            Width::Sixteen => CodeRange { least: -LARGEST_WORD, most: LARGEST_WORD },
        };
        let [residual, square] = round_row(row, centre, step, range, values);
        let (residual, rounded) = (residual.sqrt(), square.sqrt() * step);
        // The float64 rounding errors of this file are far smaller than these.
        let residual = residual * (1.0 + 1e-9) + 1e-12 * (residual + rounded);
        CodeLengths { residual, length: rounded * (1.0 + 1e-9) + residual, square }
    }

    /// Whether centre plus codes is the row itself.
    #[inline(always)]
    pub(in crate::device::cpu) fn is_as_is<T: Real>(&self, row: &[T], values: &[i16]) -> bool {
        // Integers below 2⁵³ are added exactly; `x − c` would be rounded, and could hide a tiny difference from an
        // integer.
        let others = row.iter().zip(values).zip(&self.centre);
        !others.fold(false, |any, ((x, value), c)| any | (c + f64::from(*value) != x.to_f64()))
    }

    /// Packs a query's codes into words.
    pub(in crate::device::cpu) fn write_words(&self, numbers: &[i16], words: &mut [i32]) {
        if self.width == Width::Sixteen {
            let (pairs, last) = numbers.as_chunks();
            for (word, [even, odd]) in words.iter_mut().zip(pairs) {
                *word = i32::from(*even as u16) | i32::from(*odd) << 16;
            }
            let last = words[pairs.len()..].iter_mut().zip(last);
            return last.for_each(|(word, even)| *word = i32::from(*even as u16));
        }
        for (word, numbers) in words.iter_mut().zip(numbers.chunks(self.width.per_word())) {
            let mut bytes = [0; 4];
            bytes.iter_mut().zip(numbers).for_each(|(to, x)| *to = *x as u8);
            *word = i32::from_le_bytes(bytes);
        }
    }

    /// The offset that makes the codes of base rows unsigned.
    pub(in crate::device::cpu) fn offset(&self) -> f64 {
        if self.width == Width::Eight { 128.0 } else { 0.0 }
    }
}

/// The largest absolute value of a row, and its square.
#[inline(always)]
fn largest_and_square<T: Real>(row: &[T]) -> [f64; 2] {
    let (mut largest, mut squares) = ([0.0; SIDE_BY_SIDE], [0.0; SIDE_BY_SIDE]);
    let mut take = |some: &[T; SIDE_BY_SIDE]| {
        for ((largest, square), x) in largest.iter_mut().zip(&mut squares).zip(some) {
            let x = x.to_f64().abs();
            *largest = if x > *largest { x } else { *largest };
            *square += x * x;
        }
    };
    let (all, last) = row.as_chunks();
    all.iter().for_each(&mut take);
    let mut rest = [T::ZERO; SIDE_BY_SIDE];
    rest[..last.len()].copy_from_slice(last);
    take(&rest);
    [largest.into_iter().fold(0.0, f64::max), squares.iter().sum()]
}

/// The product of a row and a centre.
#[inline(always)]
pub(super) fn product_with<T: Real>(row: &[T], centre: &[f64]) -> f64 {
    let mut sums = [0.0; SIDE_BY_SIDE];
    let (all, last) = row.as_chunks::<SIDE_BY_SIDE>();
    let (centres, last_centre) = centre.as_chunks::<SIDE_BY_SIDE>();
    for (row, centre) in all.iter().zip(centres) {
        sums.iter_mut()
            .zip(row.iter().zip(centre))
            .for_each(|(sum, (x, c))| *sum += x.to_f64() * c);
    }
    let of_last: f64 = last.iter().zip(last_centre).map(|(x, c)| x.to_f64() * c).sum();
    sums.iter().sum::<f64>() + of_last
}

/// The codes of a width, clamped to which rows are quantised.
#[derive(Clone, Copy)]
struct CodeRange {
    least: f64,
    most: f64,
}

/// Quantises a row to codes within a range; returns the squared lengths of the residual and of the codes.
#[inline(always)]
fn round_row<T: Real>(
    row: &[T],
    centre: &[f64],
    step: f64,
    range: CodeRange,
    values: &mut [i16],
) -> [f64; 2] {
    let (mut sums, inverse) = ([[0.0; SIDE_BY_SIDE]; 2], 1.0 / step);
    let ((most_of, row), (most_centres, centre)) = (row.as_chunks::<MANY>(), centre.as_chunks());
    let (to_most, values) = values.as_chunks_mut();
    for ((row, centre), values) in most_of.iter().zip(most_centres).zip(to_most) {
        round_some(row, centre, step, inverse, range, values, &mut sums);
    }
    let ((some, row), (some_centres, centre)) = (row.as_chunks(), centre.as_chunks());
    let (to_some, values) = values.as_chunks_mut();
    for ((row, centre), values) in some.iter().zip(some_centres).zip(to_some) {
        round_some::<T, SIDE_BY_SIDE>(row, centre, step, inverse, range, values, &mut sums);
    }
    if !row.is_empty() {
        let (mut last, mut last_centre) = ([T::ZERO; SIDE_BY_SIDE], [0.0; SIDE_BY_SIDE]);
        last[..row.len()].copy_from_slice(row);
        last_centre[..row.len()].copy_from_slice(centre);
        let mut to_last = [0; SIDE_BY_SIDE];
        round_some(&last, &last_centre, step, inverse, range, &mut to_last, &mut sums);
        values.copy_from_slice(&to_last[..row.len()]);
    }
    sums.map(|sums| sums.iter().sum())
}

/// As [`round_row`] for a few elements; squares are added to sums.
#[inline(always)]
fn round_some<T: Real, const COUNT: usize>(
    row: &[T; COUNT],
    centre: &[f64; COUNT],
    step: f64,
    inverse: f64,
    CodeRange { least, most }: CodeRange,
    values: &mut [i16; COUNT],
    [left, squares]: &mut [[f64; SIDE_BY_SIDE]; 2],
) {
    // Loops of one step each over arrays of known length, which compilers turn into registers of several elements.
    let [mut difference, mut whole] = [[0.0; COUNT]; 2];
    for i in 0..COUNT {
        difference[i] = row[i].to_f64() - centre[i];
    }
    for i in 0..COUNT {
        let scaled = difference[i] * inverse;
        let scaled = if scaled < least { least } else { scaled };
        let scaled = if scaled > most { most } else { scaled };
        // A number this large has no fraction, and its lowest bits are the integer.
        let shifted = scaled + ROUND_TO_INTEGER_F64;
        whole[i] = shifted - ROUND_TO_INTEGER_F64;
        difference[i] -= whole[i] * step;
        values[i] = shifted.to_bits() as i16;
    }
    // Of every eighth element, side by side.
    for terms in whole.as_chunks::<SIDE_BY_SIDE>().0 {
        squares.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term * term);
    }
    for terms in difference.as_chunks::<SIDE_BY_SIDE>().0 {
        left.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term * term);
    }
}

/// The centre that gives exact codes to rows of integers fitting into a width: pixels, counts, SIFT
/// descriptors, rows quantised before. `None` for other rows.
fn integral_centre<T: Real>(
    values: &[T],
    is_part: bool,
    dim: usize,
    width: Width,
    level: Level,
    job: &Job,
) -> Result<Option<Vec<f64>>> {
    let ranges_of = |rows: &[T]| {
        job.check()?;
        let (mut least, mut most) = (vec![T::INFINITY; dim], vec![-T::INFINITY; dim]);
        let is_whole = level.dispatch(
            #[inline(always)]
            || {
                rows.chunks_exact(dim).fold(true, |all, row| {
                    let mut is_whole = all;
                    for ((least, most), x) in least.iter_mut().zip(&mut most).zip(row) {
                        is_whole &= x.to_f64().trunc() == x.to_f64();
                        *least = if x < least { *x } else { *least };
                        *most = if x > most { *x } else { *most };
                    }
                    is_whole
                })
            },
        );
        let ranges = least.iter().zip(&most).map(|(least, most)| (least.to_f64(), most.to_f64()));
        Ok(is_whole.then(|| ranges.collect::<Vec<_>>()))
    };
    // Most data are not integers, which the first few rows show.
    let (first, others) = values.split_at(values.len().min(TOGETHER * dim));
    let Some(mut ranges) = ranges_of(first)? else { return Ok(None) };
    for part in try_in_parallel(others.chunks(TOGETHER * dim), ranges_of)? {
        let Some(part) = part else { return Ok(None) };
        for (range, other) in ranges.iter_mut().zip(part) {
            *range = (range.0.min(other.0), range.1.max(other.1));
        }
    }
    let fits = |ranges: &[(f64, f64)]| match width {
        Width::Eight | Width::Seven => {
            ranges.iter().all(|(least, most)| most - least <= 2.0 * LARGEST + 1.0)
        }
        Width::Sixteen => {
            let half = |(least, most): &(f64, f64)| (most - least) / 2.0 + 1.0;
            ranges.iter().map(|range| half(range) * half(range)).sum::<f64>() <= LENGTH * LENGTH
        }
    };
    let middle = |(least, most): (f64, f64)| match width {
        // The other rows may have any byte.
        Width::Eight if is_part && least >= 0.0 && most <= 2.0 * LARGEST + 1.0 => LARGEST + 1.0,
        _ => ((least + most) / 2.0).ceil(),
    };
    let exact = |x: f64| x.abs() < 1e15;
    Ok((fits(&ranges) && ranges.iter().all(|range| exact(range.0)))
        .then(|| ranges.into_iter().map(middle).collect()))
}

/// The distance of a row from a centre.
#[inline(always)]
fn distance<T: Real>(row: &[T], centre: &[f64]) -> f64 {
    let mut sums = [0.0; 2 * SIDE_BY_SIDE];
    for (row, centre) in row.chunks(2 * SIDE_BY_SIDE).zip(centre.chunks(2 * SIDE_BY_SIDE)) {
        for ((x, c), sum) in row.iter().zip(centre).zip(&mut sums) {
            *sum += (x.to_f64() - c) * (x.to_f64() - c);
        }
    }
    sums.iter().sum::<f64>().sqrt()
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}
