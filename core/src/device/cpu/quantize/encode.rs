//! The quantisation of base rows, panel by panel.

use super::base::QuantizedBase;
use super::prefilter::{Longest, Prefilter, PrefilterQuantizer};
use super::quantizer::{Quantizer, TOGETHER};
use crate::device::cpu::row_permutation::RowPermutation;
use crate::device::cpu::simd::dot_i16::CacheLine;
use crate::device::cpu::simd::panels::{self, Group, InitialSums, LANES, ROWS, Width};
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Sum;
use crate::parallel::try_in_parallel;

/// Panels that a thread fills together.
const PANELS_TOGETHER: usize = TOGETHER / ROWS;
/// Bytes of rows that are read one after the other.
const RUN: usize = 2048;

/// Some panels that are being filled.
struct EncodedPanels<'a> {
    quantizer: &'a Quantizer,
    /// Whether initial sums have the squares of rows.
    has_squares: bool,
    groups: &'a mut [Group],
    starts: &'a mut [InitialSums],
    /// For the prefilter: its quantiser, its initial sums, and the rows in 16 bits.
    prefilter: Option<(&'a PrefilterQuantizer, &'a mut [InitialSums], &'a mut [CacheLine])>,
    decided: &'a mut [u64],
    odd_norm: &'a mut [u64],
}

/// Statistics of the rows of some panels.
#[derive(Default)]
struct EncodeStats {
    /// The places of outliers, counted from the first of these panels.
    outliers: Vec<usize>,
    is_rounded: bool,
    residual: f64,
    length: f64,
    longest: Longest,
}

impl EncodedPanels<'_> {
    /// Rounds the rows of these panels, the first of which has this place.
    #[inline(always)]
    fn fill<T: Real>(mut self, all: &[T], places: RowPermutation, first: usize) -> EncodeStats {
        let quantizer = self.quantizer;
        let (mut filled, panels, dim) =
            (EncodeStats::default(), self.starts.len(), quantizer.centre.len());
        let words = self.groups.len() / panels::CodePanels::groups_of(panels);
        let mut numbers = vec![0; dim.next_multiple_of(quantizer.width.per_word())];
        let mut bytes = vec![0; 4 * words];
        // A run of consecutive rows at a time for a quarter of a panel, whose words lie side by side.
        let run = if places.is_strided() { RUN.div_ceil(dim * size_of::<T>()) } else { 1 };
        for start in (0..panels * ROWS).step_by(run * ROWS) {
            let end = panels.min(start / ROWS + run) * ROWS;
            for lanes in (0..ROWS).step_by(LANES) {
                for lane in lanes..lanes + LANES {
                    for place in (start + lane..end).step_by(ROWS) {
                        // The last places of some panels are empty.
                        let row = all.chunks_exact(dim).nth(places.row(first + place));
                        let Some(values) = row else { continue };
                        self.round(place, values, &mut numbers, &mut bytes, &mut filled);
                    }
                }
            }
        }
        filled.outliers.sort_unstable();
        filled
    }

    /// Rounds a row at a place of these panels.
    #[inline(always)]
    fn round<T: Real>(
        &mut self,
        place: usize,
        values: &[T],
        numbers: &mut [i16],
        bytes: &mut [u8],
        filled: &mut EncodeStats,
    ) {
        let quantizer = self.quantizer;
        let (panel, lane, dim) = (place / ROWS, place % ROWS, values.len());
        let rounded =
            quantizer.round_to(values, &quantizer.centre, quantizer.step, &mut numbers[..dim]);
        let is_outlier = quantizer.is_outlier(&rounded);
        if is_outlier {
            // Its products could overflow 32 bits.
            numbers.fill(0);
            filled.outliers.push(place);
        } else {
            filled.is_rounded |= quantizer.integral && !quantizer.is_as_is(values, numbers);
            self.decided[panel] |= 1 << lane;
            filled.residual = filled.residual.max(rounded.residual);
            filled.length = filled.length.max(rounded.length);
        }
        if self.has_squares && !is_outlier {
            let square = rounded.square as i64;
            self.starts[panel].0[lane] = -(square / 2) as i32;
            self.odd_norm[panel] |= u64::from(square % 2 == 1) << lane;
        }
        match (&mut self.prefilter, quantizer.width) {
            // Its initial sum lets it never pass.
            (Some(_), _) if is_outlier => return,
            (Some((prefilter, starts, lines)), _) => {
                let numbers = &numbers[..dim];
                let start = self.starts[panel].0[lane];
                let (start, longest) = prefilter.round(numbers, start, rounded.square, bytes);
                starts[panel].0[lane] = start;
                filled.longest = filled.longest.max(longest);
                CacheLine::copy(numbers, &mut lines[place * prefilter.lines()..]);
            }
            (None, Width::Sixteen) => {
                let sixteens = bytes.as_chunks_mut::<2>().0.iter_mut().zip(numbers);
                sixteens.for_each(|(to, x)| *to = x.to_le_bytes());
            }
            (None, _) => {
                let eights = bytes.iter_mut().zip(&numbers[..dim]);
                eights.for_each(|(to, x)| *to = (x + 128) as u8);
            }
        }
        let (words, _) = bytes.as_chunks::<4>();
        let quarter = panel * (ROWS / LANES) + lane / LANES;
        let groups = &mut self.groups[quarter * words.len()..][..words.len()];
        groups.iter_mut().zip(words).for_each(|(group, word)| group.0[lane % LANES] = *word);
    }
}

impl QuantizedBase {
    /// Rounds all rows.
    pub(super) fn fill<T: SimdReal>(&mut self, values: &[T], job: &Job) -> Result<()> {
        let (quantizer, has_squares) = (&self.quantizer, self.metric.sum() == Sum::Squares);
        let (places, level) = (self.places, self.level);
        let (groups, mut prefilter) = match &mut self.prefilter {
            Some(Prefilter { quantizer, groups, starts, lines, .. }) => {
                let lines = lines.chunks_mut(PANELS_TOGETHER * ROWS * quantizer.lines());
                (groups, Some((&*quantizer, starts.chunks_mut(PANELS_TOGETHER).zip(lines))))
            }
            None => (&mut self.groups, None),
        };
        let of_panel = groups.len() / self.starts.len();
        let bits = (self.decided.chunks_mut(PANELS_TOGETHER))
            .zip(self.odd_norm.chunks_mut(PANELS_TOGETHER));
        let groups = groups.chunks_mut(PANELS_TOGETHER * of_panel);
        let panels = groups.zip(self.starts.chunks_mut(PANELS_TOGETHER)).zip(bits);
        let panels = panels.map(|((groups, starts), (decided, odd_norm))| {
            let prefilter = prefilter.as_mut().and_then(|(quantizer, parts)| {
                let (starts, lines) = parts.next()?;
                Some((*quantizer, starts, lines))
            });
            EncodedPanels { quantizer, has_squares, groups, starts, prefilter, decided, odd_norm }
        });
        let parts = try_in_parallel(panels.enumerate(), |(part, panels)| {
            job.check()?;
            let first = part * PANELS_TOGETHER * ROWS;
            Ok(level.dispatch(
                #[inline(always)]
                || panels.fill(values, places, first),
            ))
        })?;
        for (part, filled) in parts.into_iter().enumerate() {
            let EncodeStats { outliers, is_rounded, residual, length, longest } = filled;
            let first = part * PANELS_TOGETHER * ROWS;
            self.is_rounded |= is_rounded;
            self.outliers.extend(outliers.into_iter().map(|place| (first + place) as u32));
            (self.residual, self.length) = (self.residual.max(residual), self.length.max(length));
            if let Some(prefilter) = &mut self.prefilter {
                prefilter.longest = prefilter.longest.max(longest);
            }
        }
        Ok(())
    }
}
