//! Base rows in 8 bits.

use std::sync::{Mutex, OnceLock, PoisonError};

use rayon::prelude::*;

use super::query::{Bound, Query};
use super::scale::{LARGEST, ONE_OUTLIER_IN, Scale, TOGETHER, square};
use crate::device::cpu::search::direct::Direct;
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::vnni::{GROUP, Group, ROWS, Starts, Vnni};
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::matrix::{Real, Rows};
use crate::metric::{Metric, Sum};

/// From this many dimensions on, this beats direct differences.
const LEAST_DIM: usize = 5;
/// Up to this many dimensions, sums stay within 32 bits.
const MOST_DIM: usize = 1 << 15;
/// From this many rows on, the preparation pays.
const LEAST_ROWS: usize = 256;
/// Panels that a thread prepares together.
const PANELS_TOGETHER: usize = TOGETHER / ROWS;

/// Base rows, and the same rounded to 8 bits.
#[derive(Debug)]
pub(in crate::device::cpu::search) struct Quantised<T> {
    pub(super) rows: Rows,
    pub(super) metric: Metric,
    pub(super) vnni: Vnni,
    pub(super) scale: Scale,
    pub(super) groups: Vec<Group>,
    pub(super) starts: Vec<Starts>,
    /// How much shorter each row's residual is than the longest (its slack), in steps.
    pub(super) slack: Vec<[f32; ROWS]>,
    pub(super) most_slack: f64,
    /// For each panel, a bit for each row that is decided by its sum.
    pub(super) decided: Vec<u64>,
    /// For each panel, a bit for each row of odd square, whose start lost a half.
    pub(super) odd_norm: Vec<u64>,
    /// Rows that are always computed, ascending.
    pub(super) outliers: Vec<u32>,
    /// The lengths of the longest residual and of the longest row among the others.
    pub(super) residual: f64,
    pub(super) norm: f64,
    /// The layout for rows that 8 bits do not separate well enough.
    pub(super) fallback: OnceLock<Direct<T>>,
    pub(super) making_fallback: Mutex<()>,
    reserved: Reserved,
}

/// Some panels that are being filled.
struct Panels<'a> {
    groups: &'a mut [Group],
    starts: &'a mut [Starts],
    decided: &'a mut [u64],
    odd_norm: &'a mut [u64],
    /// For each row that is not an outlier, the length of its rounding residual.
    residuals: &'a mut [f64],
}

/// Statistics of the rows of some panels.
#[derive(Default)]
struct Filled {
    /// Positions among these rows.
    outliers: Vec<usize>,
    residual: f64,
    norm: f64,
}

impl Panels<'_> {
    fn fill<T: Real>(
        self,
        values: &[T],
        scale: &Scale,
        (dim, words, squares): (usize, usize, bool),
    ) -> Filled {
        let usual = scale.usual_residual();
        let mut filled = Filled::default();
        for (row, values) in values.chunks_exact(dim).enumerate() {
            let rounded = scale.round(values, scale.step);
            let (panel, lane) = (row / ROWS, row % ROWS);
            for (group, values) in
                self.groups[panel * words..][..words].iter_mut().zip(rounded.values.chunks(GROUP))
            {
                for (slot, value) in group.0[lane].iter_mut().zip(values) {
                    *slot = (i16::from(*value) + 128) as u8;
                }
            }
            if squares {
                let square = square(&rounded.values);
                self.starts[panel].0[lane] = -(square / 2);
                self.odd_norm[panel] |= u64::from(square % 2 == 1) << lane;
            }
            if rounded.residual > usual + 1e-9 * rounded.norm {
                filled.outliers.push(row);
            } else {
                self.decided[panel] |= 1 << lane;
                self.residuals[row] = rounded.residual;
                filled.residual = filled.residual.max(rounded.residual);
                filled.norm = filled.norm.max(rounded.norm);
            }
        }
        filled
    }
}

impl<T: Lanes> Quantised<T> {
    /// `None` if this layout does not suit these rows, or this processor.
    pub(in crate::device::cpu::search) fn try_new(
        rows: &Rows,
        values: &[T],
        metric: Metric,
        job: &Job,
    ) -> Result<Option<Self>> {
        let (dim, sum) = (rows.matrix().dim(), metric.sum());
        let fits = (LEAST_DIM..=MOST_DIM).contains(&dim) && rows.len() >= LEAST_ROWS;
        if !fits || sum == Sum::Absolute {
            return Ok(None);
        }
        let Some(vnni) = Vnni::detect() else { return Ok(None) };
        let words = dim.div_ceil(GROUP);
        let panels = rows.len().div_ceil(ROWS);
        let of_panel = words * size_of::<Group>() + 2 * size_of::<Starts>() + 2 * size_of::<u64>();
        // During construction, also one number for each row.
        let of_rows = rows.len() * size_of::<f64>();
        let reserved = job.reserve("base rows in 8 bits", panels * of_panel + of_rows)?;
        let scale = Scale::new(values, dim, sum, job)?;
        if !(1e-100..1e100).contains(&scale.step) {
            return Ok(None);
        }
        let mut quantised = Self {
            rows: rows.clone(),
            metric,
            vnni,
            groups: vec![Group([[0; GROUP]; ROWS]); panels * words],
            starts: vec![Starts([0; ROWS]); panels],
            slack: vec![[0.0; ROWS]; panels],
            most_slack: 0.0,
            decided: vec![0; panels],
            odd_norm: vec![0; panels],
            outliers: Vec::new(),
            residual: 0.0,
            norm: 0.0,
            scale,
            fallback: OnceLock::new(),
            making_fallback: Mutex::default(),
            reserved,
        };
        quantised.fill(values, dim, words, job)?;
        quantised.reserved.shrink_to(panels * of_panel);
        let few = rows.len() / (ONE_OUTLIER_IN / 8) + 4;
        Ok((quantised.outliers.len() <= few).then_some(quantised))
    }

    fn fill(&mut self, values: &[T], dim: usize, words: usize, job: &Job) -> Result<()> {
        let mut residuals = vec![0.0; values.len() / dim];
        let (scale, squares) = (&self.scale, self.metric.sum() == Sum::Squares);
        let groups = self.groups.par_chunks_mut(PANELS_TOGETHER * words);
        let starts = self.starts.par_chunks_mut(PANELS_TOGETHER);
        let bits = (self.decided.par_chunks_mut(PANELS_TOGETHER))
            .zip(self.odd_norm.par_chunks_mut(PANELS_TOGETHER));
        let rows = (values.par_chunks(PANELS_TOGETHER * ROWS * dim))
            .zip(residuals.par_chunks_mut(PANELS_TOGETHER * ROWS));
        let parts = groups.zip(starts).zip(bits).zip(rows);
        let parts = parts.map(|(((groups, starts), (decided, odd_norm)), (values, residuals))| {
            job.check()?;
            let panels = Panels { groups, starts, decided, odd_norm, residuals };
            Ok(panels.fill(values, scale, (dim, words, squares)))
        });
        let parts: Vec<_> = parts.collect::<Result<_>>()?;
        for (part, Filled { outliers, residual, norm }) in parts.into_iter().enumerate() {
            let first = part * PANELS_TOGETHER * ROWS;
            self.outliers.extend(outliers.into_iter().map(|row| (first + row) as u32));
            (self.residual, self.norm) = (self.residual.max(residual), self.norm.max(norm));
        }
        for (row, residual) in
            residuals.into_iter().enumerate().filter(|(_, residual)| *residual > 0.0)
        {
            let slack = (self.residual - residual) / self.scale.step;
            self.most_slack = self.most_slack.max(slack);
            self.slack[row / ROWS][row % ROWS] = (slack * (1.0 - 1e-6)) as f32;
        }
        Ok(())
    }

    /// The layout for rows that 8 bits do not separate well enough. Made on threads of its own:
    /// rayon's may wait for it here.
    pub(super) fn fallback(&self, job: &Job) -> Result<&Direct<T>> {
        if let Some(made) = self.fallback.get() {
            return Ok(made);
        }
        let _only = self.making_fallback.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = self.fallback.get() {
            return Ok(made);
        }
        let values = self.rows.reals().unwrap_or_default();
        let made = Direct::new(&self.rows, values, self.metric, job)?;
        Ok(self.fallback.get_or_init(|| made))
    }

    pub(super) fn query(&self, values: &[T]) -> Query {
        let squares = self.metric.sum() == Sum::Squares;
        let largest = values.iter().fold(0.0f64, |m, x| m.max(x.to_f64().abs()));
        let own = if largest > 0.0 { largest / LARGEST } else { 1.0 };
        let step = if squares { self.scale.step } else { own };
        let rounded = self.scale.round(values, step);
        let square = f64::from(square(&rounded.values));
        let sum: i32 = rounded.values.iter().map(|x| i32::from(*x)).sum();
        // Whole numbers below 2⁵³ add up exactly; x − c would be rounded, and a tiny difference from
        // a whole number be lost.
        let as_is = |((value, x), c): ((&i8, &T), &f64)| c + f64::from(*value) == x.to_f64();
        let integral = self.scale.integral
            && rounded.values.iter().zip(values).zip(&self.scale.centre).all(as_is);
        let words = rounded.values.chunks(GROUP).map(|chunk| {
            let mut word = [0; GROUP];
            word.iter_mut().zip(chunk).for_each(|(slot, value)| *slot = *value as u8);
            i32::from_le_bytes(word)
        });
        // The rounding error of the contract's own sum, relative and, near zero, absolute.
        let d = values.len() as f64 + 8.0;
        let relative = d * T::EPSILON.to_f64();
        let absolute = 4.0 * d * T::MIN_POSITIVE.to_f64() * T::EPSILON.to_f64();
        let bound = if squares {
            Bound::Squares {
                factor: 1.0 + relative,
                apart: (rounded.residual + absolute.sqrt()) / step,
                residual: self.residual / step,
                inverse: 1.0 / step,
                square,
            }
        } else {
            let length = square.sqrt() * step * (1.0 + 1e-9);
            let most = rounded.norm * self.norm;
            let apart =
                rounded.residual * self.norm + length * self.residual + relative * most + absolute;
            let inverse = 1.0 / (step * self.scale.step);
            // There is no bound on a sum that may overflow on its way, nor on one of a query whose
            // length was lost because its squares underflow in float64.
            let has_length = (1e-100..1e100).contains(&step);
            if has_length
                && most < T::MAX.to_f64() / 4.0
                && apart.is_finite()
                && inverse.is_normal()
            {
                Bound::Products { apart, inverse }
            } else {
                Bound::None
            }
        };
        Query {
            words: words.collect(),
            offset: 128.0 * f64::from(sum),
            integral: integral.then_some(square),
            bound,
            known: (f64::NAN, f64::NAN),
            far: rounded.residual > 4.0 * self.scale.usual_residual() && squares,
        }
    }
}
