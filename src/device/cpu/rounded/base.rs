//! Quantised base rows, with codes of 8 or 16 bits.

use std::ops::Range;

use super::coarse::{Coarse, CoarseScale, Forms};
use super::history::{Guesses, Tasks};
use super::query::{Bound, Query};
use super::scale::{ONE_OUTLIER_IN, Rounded, Scale, product_with};
use crate::device::cpu::places::Places;
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::{Group, Panels, ROWS, Starts, Width};
use crate::error::{Error, Result};
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
/// Rows of the sample that determines the scale, if there are several times as many.
const SAMPLED: usize = 2048;

/// The form of the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::device::cpu) enum Form {
    /// 8-bit codes, for rows of integers.
    Eight,
    /// 16-bit codes, behind a prefilter by fewer bits.
    Coarse,
    /// 16-bit codes.
    Sixteen,
}

impl Form {
    fn width(self) -> Width {
        if self == Self::Eight { Width::Eight } else { Width::Sixteen }
    }
}

/// All rows, with a sample of them if they are many and there is memory.
pub(in crate::device::cpu) struct Sampled<'a, T> {
    all: &'a [T],
    sample: Option<(Vec<T>, Reserved)>,
}

/// The result of quantising rows in a form.
enum Fit {
    Right(Box<Quantised>),
    /// The scale of these rows does not suit.
    Not,
    /// No scale suits.
    Never,
}

/// Base rows and their codes.
#[derive(Debug)]
pub(in crate::device::cpu) struct Quantised {
    pub(in crate::device::cpu) rows: Rows,
    pub(in crate::device::cpu) places: Places,
    pub(in crate::device::cpu) metric: Metric,
    pub(in crate::device::cpu) level: Level,
    pub(in crate::device::cpu) scale: Scale,
    /// The prefilter by fewer bits, which replaces `groups`.
    pub(in crate::device::cpu) coarse: Option<Coarse>,
    pub(in crate::device::cpu) groups: Aligned<Group>,
    pub(in crate::device::cpu) starts: Aligned<Starts>,
    /// For each panel, a bit for each row that is decided by its sum.
    pub(in crate::device::cpu) decided: Vec<u64>,
    /// For each panel, a bit for each row of odd square, whose start lost a half.
    pub(in crate::device::cpu) odd_norm: Vec<u64>,
    /// The places of rows that are always computed, ascending.
    pub(in crate::device::cpu) outliers: Vec<u32>,
    /// Whether a row differs from its codes although the scale is integral.
    pub(super) is_rounded: bool,
    /// The lengths of the longest residual and, from the centre, of the longest row, outliers excluded.
    pub(in crate::device::cpu) residual: f64,
    pub(in crate::device::cpu) length: f64,
    /// Counters of tasks that were left to the next layout, and of tasks that were finished.
    pub(in crate::device::cpu) tasks: Tasks,
    pub(in crate::device::cpu) guesses: Guesses,
    _reserved: Reserved,
}

impl Quantised {
    /// Quantises rows. With `k`, the prefilter is used only if it pays in searches of `k` neighbours. `None` if this
    /// form does not suit these rows, or this processor.
    pub(in crate::device::cpu) fn try_new<T: Lanes>(
        (rows, places): (&Rows, Places),
        sampled: &Sampled<'_, T>,
        (metric, level, form, k): (Metric, Level, Form, Option<usize>),
        job: &Job,
    ) -> Result<Option<Self>> {
        let (dim, sum, width) = (rows.matrix().dim(), metric.sum(), form.width());
        let fits = (LEAST_DIM..=MOST_DIM).contains(&dim) && rows.len() >= LEAST_ROWS;
        let looks = form != Form::Coarse || CoarseScale::suits(dim, level, k.is_some());
        if !fits || sum == Sum::Absolute || !level.has(width) || !looks {
            return Ok(None);
        }
        let all = sampled.all;
        let of = |values: &[T], is_part: bool| {
            // One number for each row.
            let _reserved =
                job.reserve("lengths of base rows", values.len() / dim * size_of::<f64>())?;
            let scale = Scale::of_part((values, is_part), dim, (sum, width), job)?;
            let Some(scale) = scale.filter(Scale::is_usual) else {
                // A sample that does not fit 8 bits rules out all rows.
                return Ok(if form == Form::Eight { Fit::Never } else { Fit::Not });
            };
            let coarse = match form {
                Form::Coarse => {
                    let of = (sum == Sum::Squares, level);
                    let search = k.map(|k| (k, rows.len()));
                    match CoarseScale::new((values, dim), &scale, of, search) {
                        Some(coarse) => Some(coarse),
                        None => return Ok(Fit::Never),
                    }
                }
                _ => None,
            };
            let of = (metric, level, scale, coarse);
            let quantised = Self::filled((rows, places), all, of, job)?;
            let few = rows.len() / (ONE_OUTLIER_IN / 8) + 4;
            let is_right = quantised.outliers.len() <= few && !quantised.is_rounded;
            Ok(if is_right { Fit::Right(Box::new(quantised)) } else { Fit::Not })
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
            Fit::Right(quantised) => Some(*quantised),
            Fit::Not | Fit::Never => None,
        })
    }

    /// Rows quantised by this scale, of a width that the level has.
    pub(in crate::device::cpu) fn rounded<T: Lanes>(
        rows: &Rows,
        values: &[T],
        (metric, level, scale): (Metric, Level, Scale),
        job: &Job,
    ) -> Result<Self> {
        let places = Places::as_given(rows.len());
        Self::filled((rows, places), values, (metric, level, scale, None), job)
    }

    fn filled<T: Lanes>(
        (rows, places): (&Rows, Places),
        values: &[T],
        (metric, level, scale, coarse): (Metric, Level, Scale, Option<CoarseScale>),
        job: &Job,
    ) -> Result<Self> {
        let dim = rows.matrix().dim();
        let panels = places.count().div_ceil(ROWS);
        let words = match coarse {
            Some(_) => 0,
            None => dim.div_ceil(scale.width.per_word()),
        };
        let of_panel = Panels::bytes_of(words) + size_of::<Starts>() + 2 * size_of::<u64>();
        let of_panel = of_panel + coarse.as_ref().map_or(0, Coarse::bytes);
        let reserved = job.reserve("quantised base rows", panels * of_panel)?;
        let mut quantised = Self {
            rows: rows.clone(),
            places,
            metric,
            level,
            groups: Aligned::zeros(panels * Panels::groups_of(words)),
            starts: Aligned::zeros(panels),
            decided: vec![0; panels],
            odd_norm: vec![0; panels],
            outliers: Vec::new(),
            is_rounded: false,
            residual: 0.0,
            length: 0.0,
            scale,
            coarse: coarse.map(|scale| Coarse::new(scale, panels)),
            tasks: Tasks::default(),
            guesses: Guesses::default(),
            _reserved: reserved,
        };
        quantised.fill(values, job)?;
        Ok(quantised)
    }

    /// The width of its codes.
    pub(in crate::device::cpu) fn width(&self) -> Width {
        self.scale.width
    }

    /// The form of its codes.
    pub(in crate::device::cpu) fn form(&self) -> Form {
        match (self.width(), &self.coarse) {
            (Width::Sixteen, Some(_)) => Form::Coarse,
            (Width::Sixteen, None) => Form::Sixteen,
            _ => Form::Eight,
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
        self.length + self.scale.centre_norm
    }

    /// Words of a row: of its codes in the prefilter, if there is one.
    pub(in crate::device::cpu) fn words(&self) -> usize {
        let groups = self.coarse.as_ref().map_or(&self.groups, |coarse| &coarse.groups);
        groups.len() / Panels::groups_of(self.starts.len())
    }

    /// The words of `count` queries in the layout in which this base compares them.
    pub(in crate::device::cpu) fn forms(&self, words: &[i32], count: usize) -> Forms {
        let length = words.len() / count.max(1);
        match &self.coarse {
            Some(coarse) => Forms::Coarse(coarse.queries(words, length, self.level)),
            None => Forms::Packed(self.level.pack(words, length)),
        }
    }

    /// Some of its panels, if there is no prefilter.
    pub(in crate::device::cpu) fn panels(&self, panels: Range<usize>) -> Panels<'_> {
        Panels { groups: &self.groups, starts: &self.starts }.some(panels)
    }

    /// The outliers at some places.
    pub(in crate::device::cpu) fn outliers(&self, places: Range<usize>) -> &[u32] {
        let start = self.outliers.partition_point(|place| (*place as usize) < places.start);
        let end = self.outliers.partition_point(|place| (*place as usize) < places.end);
        &self.outliers[start..end]
    }

    /// Quantises a query, and appends its words.
    pub(in crate::device::cpu) fn query<T: Lanes>(
        &self,
        values: &[T],
        words: &mut Vec<i32>,
    ) -> Query {
        let (scale, squares) = (&self.scale, self.metric.sum() == Sum::Squares);
        let step = if squares { scale.step } else { scale.step_of(values) };
        let mut numbers = Vec::with_capacity(values.len());
        let rounded = scale.round(values, (&scale.of_queries, step), &mut numbers);
        let integral = scale.integral && scale.is_as_is(values, &numbers);
        let square = rounded.square;
        let rounding = Rounding::of::<T>(values.len() as f64);
        let bound = if scale.is_too_long(&rounded, step) {
            Bound::None
        } else if squares {
            rounding.squares(self, (rounded.residual, square))
        } else {
            let of_centre = pulp::Arch::new().dispatch(
                #[inline(always)]
                || product_with(values, &scale.centre),
            );
            rounding.products(self, (&rounded, square, step), of_centre)
        };
        let has_bound = !matches!(bound, Bound::None);
        if !has_bound {
            // Its products could overflow 32 bits.
            numbers.fill(0);
        }
        let first = words.len();
        words.resize(first + numbers.len().div_ceil(scale.width.per_word()), 0);
        scale.write_words(&numbers, &mut words[first..]);
        let sum: i64 = numbers.iter().map(|x| i64::from(*x)).sum();
        Query {
            offset: scale.offset() * sum as f64,
            integral: (integral && has_bound).then_some(square),
            far: squares && scale.is_far(&rounded, step),
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
        let reserved = match job.reserve("a sample of base rows", SAMPLED * dim * size_of::<T>()) {
            Err(Error::HostMemory { .. }) => return Ok(Self { all, sample: None }),
            reserved => reserved?,
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
pub(in crate::device::cpu) struct Rounding {
    dim: f64,
    pub(in crate::device::cpu) relative: f64,
    pub(in crate::device::cpu) absolute: f64,
    largest: f64,
}

impl Rounding {
    pub(in crate::device::cpu) fn of<T: Real>(dim: f64) -> Self {
        let (dim, largest) = (dim + 8.0, T::MAX.to_f64());
        let relative = dim * T::EPSILON.to_f64();
        let absolute = 4.0 * dim * T::MIN_POSITIVE.to_f64() * T::EPSILON.to_f64();
        Self { dim, relative, absolute, largest }
    }

    /// The bound of a query, by its residual and its square.
    pub(in crate::device::cpu) fn squares(
        &self,
        base: &Quantised,
        (residual, square): (f64, f64),
    ) -> Bound {
        let step = base.scale.step;
        Bound::Squares {
            factor: 1.0 + self.relative,
            apart: (residual + self.absolute.sqrt()) / step,
            residual: base.residual / step,
            inverse: 1.0 / step,
            square,
        }
    }

    fn products(
        self,
        base: &Quantised,
        (query, square, step): (&Rounded, f64, f64),
        of_centre: f64,
    ) -> Bound {
        let length = square.sqrt() * step * (1.0 + 1e-9);
        // A query has no centre.
        let most = query.length * base.norm();
        let apart = query.residual * base.length
            + length * base.residual
            + self.relative * most
            + self.dim * 1e-15 * query.length * base.scale.centre_norm
            + self.absolute;
        let inverse = 1.0 / (step * base.scale.step);
        // A sum has no bound if its partial sums may overflow, or if the query's squares underflow in float64.
        let has_length = (1e-100..1e100).contains(&step);
        if has_length && most < self.largest / 4.0 && apart.is_finite() && inverse.is_normal() {
            Bound::Products { apart, inverse, of_centre }
        } else {
            Bound::None
        }
    }
}
