//! The quantisation of base rows, panel by panel.

use rayon::prelude::*;

use super::base::Quantised;
use super::coarse::{Coarse, CoarseScale, Longest};
use super::scale::{Scale, TOGETHER};
use crate::device::cpu::places::Places;
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::lines::Line;
use crate::device::cpu::simd::panels::{self, Group, LANES, ROWS, Starts, Width};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Sum;

/// Panels that a thread fills together.
const PANELS_TOGETHER: usize = TOGETHER / ROWS;
/// Bytes of rows that are read one after the other.
const RUN: usize = 2048;

/// Some panels that are being filled.
struct Panels<'a> {
    groups: &'a mut [Group],
    starts: &'a mut [Starts],
    /// For the prefilter: its scale, its initial sums, and the rows in 16 bits.
    coarse: Option<(&'a CoarseScale, &'a mut [Starts], &'a mut [Line])>,
    decided: &'a mut [u64],
    odd_norm: &'a mut [u64],
}

/// Statistics of the rows of some panels.
#[derive(Default)]
struct Filled {
    /// The places of outliers, counted from the first of these panels.
    outliers: Vec<usize>,
    is_rounded: bool,
    residual: f64,
    length: f64,
    longest: Longest,
}

impl Panels<'_> {
    /// Rounds the rows of these panels, the first of which has this place.
    #[inline(always)]
    fn fill<T: Real>(
        mut self,
        (all, places, first): (&[T], Places, usize),
        scale: &Scale,
        squares: bool,
    ) -> Filled {
        let (mut filled, panels, dim) = (Filled::default(), self.starts.len(), scale.centre.len());
        let words = self.groups.len() / panels::Panels::groups_of(panels);
        let mut numbers = vec![0; dim.next_multiple_of(scale.width.per_word())];
        let mut bytes = vec![0; 4 * words];
        // A run of consecutive rows at a time for a quarter of a panel, whose words lie side by side.
        let run = if places.are_far_apart() { RUN.div_ceil(dim * size_of::<T>()) } else { 1 };
        for start in (0..panels * ROWS).step_by(run * ROWS) {
            let end = panels.min(start / ROWS + run) * ROWS;
            for lanes in (0..ROWS).step_by(LANES) {
                for lane in lanes..lanes + LANES {
                    for place in (start + lane..end).step_by(ROWS) {
                        // The last places of some panels are empty.
                        let row = all.chunks_exact(dim).nth(places.row(first + place));
                        let Some(values) = row else { continue };
                        let of = (scale, squares);
                        let bytes = (&mut *numbers, &mut *bytes);
                        self.round(place, values, of, bytes, &mut filled);
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
        (scale, squares): (&Scale, bool),
        (numbers, bytes): (&mut [i16], &mut [u8]),
        filled: &mut Filled,
    ) {
        let (panel, lane, dim) = (place / ROWS, place % ROWS, values.len());
        let rounded = scale.round_to(values, (&scale.centre, scale.step), &mut numbers[..dim]);
        let is_outlier = scale.is_outlier(&rounded);
        if is_outlier {
            // Its products could overflow 32 bits.
            numbers.fill(0);
            filled.outliers.push(place);
        } else {
            filled.is_rounded |= scale.integral && !scale.is_as_is(values, numbers);
            self.decided[panel] |= 1 << lane;
            filled.residual = filled.residual.max(rounded.residual);
            filled.length = filled.length.max(rounded.length);
        }
        if squares && !is_outlier {
            let square = rounded.square as i64;
            self.starts[panel].0[lane] = -(square / 2) as i32;
            self.odd_norm[panel] |= u64::from(square % 2 == 1) << lane;
        }
        match (&mut self.coarse, scale.width) {
            // Its initial sum lets it never pass.
            (Some(_), _) if is_outlier => return,
            (Some((coarse, starts, lines)), _) => {
                let numbers = &numbers[..dim];
                let from = (self.starts[panel].0[lane], rounded.square);
                let (start, longest) = coarse.round(numbers, from, bytes);
                starts[panel].0[lane] = start;
                filled.longest = filled.longest.max(longest);
                Line::copy(numbers, &mut lines[place * coarse.lines()..]);
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

impl Quantised {
    /// Rounds all rows.
    pub(super) fn fill<T: Lanes>(&mut self, values: &[T], job: &Job) -> Result<()> {
        let (scale, squares) = (&self.scale, self.metric.sum() == Sum::Squares);
        let places = self.places;
        let (groups, mut coarse) = match &mut self.coarse {
            Some(Coarse { scale, groups, starts, lines, .. }) => {
                let lines = lines.chunks_mut(PANELS_TOGETHER * ROWS * scale.lines());
                (groups, Some((&*scale, starts.chunks_mut(PANELS_TOGETHER).zip(lines))))
            }
            None => (&mut self.groups, None),
        };
        let of_panel = groups.len() / self.starts.len();
        let bits = (self.decided.chunks_mut(PANELS_TOGETHER))
            .zip(self.odd_norm.chunks_mut(PANELS_TOGETHER));
        let groups = groups.chunks_mut(PANELS_TOGETHER * of_panel);
        let panels = groups.zip(self.starts.chunks_mut(PANELS_TOGETHER)).zip(bits);
        let panels = panels.map(|((groups, starts), (decided, odd_norm))| {
            let coarse = coarse.as_mut().and_then(|(scale, parts)| {
                let (starts, lines) = parts.next()?;
                Some((*scale, starts, lines))
            });
            Panels { groups, starts, coarse, decided, odd_norm }
        });
        let panels: Vec<_> = panels.collect();
        let parts = panels.into_par_iter().enumerate().map(|(part, panels)| {
            job.check()?;
            let first = part * PANELS_TOGETHER * ROWS;
            Ok(pulp::Arch::new().dispatch(
                #[inline(always)]
                || panels.fill((values, places, first), scale, squares),
            ))
        });
        let parts: Vec<_> = parts.collect::<Result<_>>()?;
        for (part, filled) in parts.into_iter().enumerate() {
            let Filled { outliers, is_rounded, residual, length, longest } = filled;
            let first = part * PANELS_TOGETHER * ROWS;
            self.is_rounded |= is_rounded;
            self.outliers.extend(outliers.into_iter().map(|place| (first + place) as u32));
            (self.residual, self.length) = (self.residual.max(residual), self.length.max(length));
            if let Some(coarse) = &mut self.coarse {
                coarse.longest = coarse.longest.max(longest);
            }
        }
        Ok(())
    }
}
