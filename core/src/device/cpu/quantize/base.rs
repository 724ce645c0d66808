//! Quantised base rows, with codes of 8 or 16 bits.

use std::ops::Range;

use super::feedback::{GuessFeedback, LayoutFeedback};
use super::prefilter::{Prefilter, PrefilterQuantizer, QueryCodes, SearchSize};
use super::quantizer::{CodeLengths, ONE_OUTLIER_IN, Quantizer, product_with};
use super::query_bound::{Bound, QuantizedQuery};
use crate::device::cpu::row_permutation::RowPermutation;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::{CodePanels, Group, InitialSums, ROWS, Width};
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::matrix::Real;
use crate::memory::Aligned;
use crate::metric::{Metric, Sum};
use crate::rows::Rows;

/// From this many dimensions on, codes are faster than direct differences.
const LEAST_DIM: usize = 5;
/// Up to this many dimensions, sums stay within 32 bits.
const MOST_DIM: usize = 1 << 15;
/// From this many rows on, the preparation pays.
const LEAST_ROWS: usize = 256;
/// Rows of the sample that determines the quantiser, if there are several times as many.
const SAMPLED: usize = 2048;

/// The form of the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::device::cpu) enum CodeForm {
    /// 8-bit codes, for rows of integers.
    Eight,
    /// 16-bit codes, behind a prefilter by fewer bits.
    Prefiltered,
    /// 16-bit codes.
    Sixteen,
}

impl CodeForm {
    fn width(self) -> Width {
        if self == Self::Eight { Width::Eight } else { Width::Sixteen }
    }
}

/// The searches that a layout of base rows is for.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct LayoutSpec {
    pub(in crate::device::cpu) metric: Metric,
    pub(in crate::device::cpu) level: Level,
    /// Neighbours of a query, if the layout may depend on them.
    pub(in crate::device::cpu) k: Option<usize>,
}

/// All rows, with a sample of them if they are many and there is memory.
pub(in crate::device::cpu) struct Sampled<'a, T> {
    all: &'a [T],
    sample: Option<(Vec<T>, Reserved)>,
}

/// The result of quantising rows in a form.
enum Fit {
    Right(Box<QuantizedBase>),
    /// The quantiser of these rows does not suit.
    Not,
    /// No quantiser suits.
    Never,
}

/// Base rows and their codes.
#[derive(Debug)]
pub(in crate::device::cpu) struct QuantizedBase {
    pub(in crate::device::cpu) rows: Rows,
    pub(in crate::device::cpu) places: RowPermutation,
    pub(in crate::device::cpu) metric: Metric,
    pub(in crate::device::cpu) level: Level,
    pub(in crate::device::cpu) quantizer: Quantizer,
    /// The prefilter by fewer bits, which replaces `groups`.
    pub(in crate::device::cpu) prefilter: Option<Prefilter>,
    pub(in crate::device::cpu) groups: Aligned<Group>,
    pub(in crate::device::cpu) starts: Aligned<InitialSums>,
    /// For each panel, a bit for each row that is decided by its sum.
    pub(in crate::device::cpu) decided: Vec<u64>,
    /// For each panel, a bit for each row of odd square, whose start lost a half.
    pub(in crate::device::cpu) odd_norm: Vec<u64>,
    /// The places of rows that are always computed, ascending.
    pub(in crate::device::cpu) outliers: Vec<u32>,
    /// Whether a row differs from its codes although the quantiser is integral.
    pub(super) is_rounded: bool,
    /// The lengths of the longest residual and, from the centre, of the longest row, outliers excluded.
    pub(in crate::device::cpu) residual: f64,
    pub(in crate::device::cpu) length: f64,
    /// Numbers of tasks left to the next layout, and of finished tasks.
    pub(in crate::device::cpu) tasks: LayoutFeedback,
    pub(in crate::device::cpu) guesses: GuessFeedback,
    _reserved: Reserved,
}

impl QuantizedBase {
    /// Quantises rows. With `k`, the prefilter is used only if it pays in searches of `k` neighbours. `None` if this
    /// form does not suit these rows, or this processor.
    pub(in crate::device::cpu) fn try_new<T: SimdReal>(
        rows: &Rows,
        places: RowPermutation,
        sampled: &Sampled<'_, T>,
        form: CodeForm,
        LayoutSpec { metric, level, k }: LayoutSpec,
        job: &Job,
    ) -> Result<Option<Self>> {
        let (dim, sum, width) = (rows.matrix().dim(), metric.sum(), form.width());
        let fits = (LEAST_DIM..=MOST_DIM).contains(&dim) && rows.len() >= LEAST_ROWS;
        let suits_prefilter =
            form != CodeForm::Prefiltered || PrefilterQuantizer::suits(dim, level, k.is_some());
        if !fits || sum == Sum::Absolute || !level.has(width) || !suits_prefilter {
            return Ok(None);
        }
        let all = sampled.all;
        let of = |values: &[T], is_part: bool| {
            // One number for each row.
            let _reserved =
                job.reserve("lengths of base rows", values.len() / dim * size_of::<f64>())?;
            let quantizer = Quantizer::try_new(values, is_part, dim, sum, width, level, job)?;
            let Some(quantizer) = quantizer.filter(Quantizer::is_usual) else {
                // A sample that does not fit 8 bits rules out all rows.
                return Ok(if form == CodeForm::Eight { Fit::Never } else { Fit::Not });
            };
            let prefilter = match form {
                CodeForm::Prefiltered => {
                    let (squares, rows) = (sum == Sum::Squares, rows.len());
                    let search = k.map(|k| SearchSize { k, rows });
                    match PrefilterQuantizer::new(values, dim, &quantizer, squares, search) {
                        Some(prefilter) => Some(prefilter),
                        None => return Ok(Fit::Never),
                    }
                }
                _ => None,
            };
            let quantized = Self::filled(rows, places, all, metric, quantizer, prefilter, job)?;
            let few = rows.len() / (ONE_OUTLIER_IN / 8) + 4;
            let is_right = quantized.outliers.len() <= few && !quantized.is_rounded;
            Ok(if is_right { Fit::Right(Box::new(quantized)) } else { Fit::Not })
        };
        // A sample tells the range of nearly all rows; rows outside are outliers, if they are few.
        let fit = match &sampled.sample {
            None => of(all, false)?,
            Some((sample, _)) => match of(sample, true)? {
                Fit::Not => of(all, false)?,
                fit => fit,
            },
        };
        Ok(match fit {
            Fit::Right(quantized) => Some(*quantized),
            Fit::Not | Fit::Never => None,
        })
    }

    /// Rows encoded by this quantiser, of a width that its level has.
    pub(in crate::device::cpu) fn rounded<T: SimdReal>(
        rows: &Rows,
        values: &[T],
        metric: Metric,
        quantizer: Quantizer,
        job: &Job,
    ) -> Result<Self> {
        let places = RowPermutation::identity(rows.len());
        Self::filled(rows, places, values, metric, quantizer, None, job)
    }

    fn filled<T: SimdReal>(
        rows: &Rows,
        places: RowPermutation,
        values: &[T],
        metric: Metric,
        quantizer: Quantizer,
        prefilter: Option<PrefilterQuantizer>,
        job: &Job,
    ) -> Result<Self> {
        let dim = rows.matrix().dim();
        let panels = places.count().div_ceil(ROWS);
        let words = match prefilter {
            Some(_) => 0,
            None => dim.div_ceil(quantizer.width.per_word()),
        };
        let of_panel =
            CodePanels::bytes_of(words) + size_of::<InitialSums>() + 2 * size_of::<u64>();
        let of_panel = of_panel + prefilter.as_ref().map_or(0, Prefilter::bytes);
        let reserved = job.reserve("quantised base rows", panels * of_panel)?;
        let mut quantized = Self {
            rows: rows.clone(),
            places,
            metric,
            level: quantizer.level,
            groups: Aligned::zeros(panels * CodePanels::groups_of(words)),
            starts: Aligned::zeros(panels),
            decided: vec![0; panels],
            odd_norm: vec![0; panels],
            outliers: Vec::new(),
            is_rounded: false,
            residual: 0.0,
            length: 0.0,
            quantizer,
            prefilter: prefilter.map(|quantizer| Prefilter::new(quantizer, panels)),
            tasks: LayoutFeedback::default(),
            guesses: GuessFeedback::default(),
            _reserved: reserved,
        };
        quantized.fill(values, job)?;
        Ok(quantized)
    }

    /// The width of its codes.
    pub(in crate::device::cpu) fn width(&self) -> Width {
        self.quantizer.width
    }

    /// The form of its codes.
    pub(in crate::device::cpu) fn form(&self) -> CodeForm {
        match (self.width(), &self.prefilter) {
            (Width::Sixteen, Some(_)) => CodeForm::Prefiltered,
            (Width::Sixteen, None) => CodeForm::Sixteen,
            _ => CodeForm::Eight,
        }
    }

    /// The squared distance of an integer query from an integer row, if this type holds it and all partial sums
    /// exactly: every order of summation then gives the contract's result. `square` is the squared length of the
    /// query's codes, `sum` the sum of the pair.
    #[inline(always)]
    pub(in crate::device::cpu) fn integral_square<T: Real>(
        &self,
        square: f64,
        place: usize,
        sum: f64,
    ) -> Option<T> {
        let odd_norm = (self.odd_norm[place / ROWS] >> (place % ROWS) & 1) as f64;
        let squares = square - 2.0 * sum + odd_norm;
        (squares * T::EPSILON.to_f64() <= 2.0).then(|| T::from_f64(squares))
    }

    /// Upper bound on the length of a row from the origin, outliers excluded.
    pub(super) fn norm(&self) -> f64 {
        self.length + self.quantizer.centre_norm
    }

    /// Words of a row: of its codes in the prefilter, if there is one.
    pub(in crate::device::cpu) fn words(&self) -> usize {
        let groups = self.prefilter.as_ref().map_or(&self.groups, |prefilter| &prefilter.groups);
        groups.len() / CodePanels::groups_of(self.starts.len())
    }

    /// The words of `count` queries in the layout in which this base compares them.
    pub(in crate::device::cpu) fn forms(&self, words: &[i32], count: usize) -> QueryCodes {
        let length = words.len() / count.max(1);
        match &self.prefilter {
            Some(prefilter) => QueryCodes::Prefiltered(prefilter.queries(words, length)),
            None => QueryCodes::Packed(self.level.pack(words, length)),
        }
    }

    /// Some of its panels, if there is no prefilter.
    pub(in crate::device::cpu) fn panels(&self, panels: Range<usize>) -> CodePanels<'_> {
        CodePanels { groups: &self.groups, starts: &self.starts }.some(panels)
    }

    /// The outliers at some places.
    pub(in crate::device::cpu) fn outliers(&self, places: Range<usize>) -> &[u32] {
        let start = self.outliers.partition_point(|place| (*place as usize) < places.start);
        let end = self.outliers.partition_point(|place| (*place as usize) < places.end);
        &self.outliers[start..end]
    }

    /// Quantises a query, and appends its words.
    pub(in crate::device::cpu) fn query<T: SimdReal>(
        &self,
        values: &[T],
        words: &mut Vec<i32>,
    ) -> QuantizedQuery {
        let (quantizer, squares) = (&self.quantizer, self.metric.sum() == Sum::Squares);
        let step = if squares { quantizer.step } else { quantizer.step_of(values) };
        let mut numbers = Vec::with_capacity(values.len());
        let rounded = quantizer.round(values, &quantizer.of_queries, step, &mut numbers);
        let integral = quantizer.integral && quantizer.is_as_is(values, &numbers);
        let square = rounded.square;
        let rounding = RoundingError::of::<T>(values.len() as f64);
        let bound = if quantizer.is_too_long(&rounded, step) {
            Bound::None
        } else if squares {
            rounding.squares(self, rounded.residual, square)
        } else {
            let of_centre = self.level.dispatch(
                #[inline(always)]
                || product_with(values, &quantizer.centre),
            );
            rounding.products(self, &rounded, step, of_centre)
        };
        let has_bound = !matches!(bound, Bound::None);
        if !has_bound {
            // Its products could overflow 32 bits.
            numbers.fill(0);
        }
        let first = words.len();
        words.resize(first + numbers.len().div_ceil(quantizer.width.per_word()), 0);
        quantizer.write_words(&numbers, &mut words[first..]);
        let sum: i64 = numbers.iter().map(|x| i64::from(*x)).sum();
        QuantizedQuery {
            offset: quantizer.offset() * sum as f64,
            integral: (integral && has_bound).then_some(square),
            far: squares && quantizer.is_far(&rounded, step),
            known: (f64::NAN, i32::MIN),
            bound,
        }
    }
}

impl<'a, T: Real> Sampled<'a, T> {
    pub fn new(all: &'a [T], dim: usize, job: &Job) -> Result<Self> {
        let rows = all.len() / dim.max(1);
        if rows < 4 * SAMPLED || dim < LEAST_DIM {
            return Ok(Self { all, sample: None });
        }
        let Some(reserved) = job.try_reserve(SAMPLED * dim * size_of::<T>()) else {
            return Ok(Self { all, sample: None });
        };
        let mut sample = Vec::with_capacity(SAMPLED * dim);
        for i in 0..SAMPLED {
            sample.extend_from_slice(&all[i * rows / SAMPLED * dim..][..dim]);
        }
        Ok(Self { all, sample: Some((sample, reserved)) })
    }
}

/// The rounding error of the contract's own sum, relative and, near zero, absolute.
#[derive(Clone, Copy)]
pub(in crate::device::cpu) struct RoundingError {
    dim: f64,
    pub(in crate::device::cpu) relative: f64,
    pub(in crate::device::cpu) absolute: f64,
    largest: f64,
}

impl RoundingError {
    pub(in crate::device::cpu) fn of<T: Real>(dim: f64) -> Self {
        let (dim, largest) = (dim + 8.0, T::MAX.to_f64());
        let relative = dim * T::EPSILON.to_f64();
        let absolute = 4.0 * dim * T::MIN_POSITIVE.to_f64() * T::EPSILON.to_f64();
        Self { dim, relative, absolute, largest }
    }

    /// The bound of a query, by its residual and its square.
    pub(in crate::device::cpu) fn squares(
        &self,
        base: &QuantizedBase,
        residual: f64,
        square: f64,
    ) -> Bound {
        let step = base.quantizer.step;
        Bound::Squares {
            factor: 1.0 + self.relative,
            error: (residual + self.absolute.sqrt()) / step,
            residual: base.residual / step,
            inverse: 1.0 / step,
            square,
        }
    }

    fn products(
        self,
        base: &QuantizedBase,
        query: &CodeLengths,
        step: f64,
        of_centre: f64,
    ) -> Bound {
        let length = query.square.sqrt() * step * (1.0 + 1e-9);
        // A query has no centre.
        let most = query.length * base.norm();
        let error = query.residual * base.length
            + length * base.residual
            + self.relative * most
            + self.dim * 1e-15 * query.length * base.quantizer.centre_norm
            + self.absolute;
        let inverse = 1.0 / (step * base.quantizer.step);
        // A sum has no bound if its partial sums may overflow, or if the query's squares underflow in float64.
        let has_length = (1e-100..1e100).contains(&step);
        if has_length && most < self.largest / 4.0 && error.is_finite() && inverse.is_normal() {
            Bound::Products { error, inverse, of_centre }
        } else {
            Bound::None
        }
    }
}
