//! Rows in 8 bits decide which pairs are worth computing; those are then computed exactly.
//!
//! With a centre c and a step t, a row x is `c + t x̂ + e`, x̂ being whole numbers from −127 to 127
//! and e a rest of known length r. Products of such rows are exact in integers, four dimensions and
//! sixteen rows to an instruction, and say nearly all about the real rows:
//!
//! - squares: `‖q − x‖ ≥ t ‖q̂ − x̂‖ − r_q − r_x` by the triangle inequality;
//! - products (c = 0, the query with a step t_q of its own):
//!   `|q·x − t_q t q̂·x̂| ≤ r_q ‖x‖ + ‖t_q q̂‖ r_x` by Cauchy and Schwarz.
//!
//! A pair whose bound is beyond the reach of its query's sink is done with; every other one gets
//! its sum in the contract's order. The test is one comparison per pair, with the largest rest of
//! all rows; what a row's own rest is smaller by goes into the number that its sum starts from. The
//! few rows that stick out of the range that 8 bits cover are kept aside and always computed. Where
//! the rests are not small beside the distances that matter, too many pairs pass: the rows still to be
//! visited are then left to another layout.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use rayon::prelude::*;

use super::direct::Direct;
use super::exact;
use super::sink::Sink;
use super::traversal::{Arithmetic, BLOCK_ROWS, Block, Visit};
use crate::device::contract::Work;
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::vnni::{GROUP, Group, Hits, QUERIES, ROWS, Starts, Vnni};
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::matrix::{Real, Rows};
use crate::metric::{Metric, Sum};

/// Dimensions from which on this beats direct differences.
const LEAST_DIM: usize = 5;
/// Dimensions up to which sums stay within 32 bits.
const MOST_DIM: usize = 1 << 15;
/// Rows from which on the preparation pays.
const LEAST_ROWS: usize = 256;
/// The whole numbers a row is rounded to: from −LARGEST − 1 to LARGEST.
const LARGEST: f64 = 127.0;
/// In float64, sums of this and numbers below 2⁵¹ are whole.
const NO_FRACTIONS: f64 = 6_755_399_441_055_744.0;
/// One in so many rows may stick out of the range that is covered.
const ONE_OUTLIER_IN: usize = 8192;
/// One in so many pairs may pass before another layout is the faster one.
const ONE_PASSES_IN: u64 = 32;
/// Steps and dimensions from which on it pays to look at the rest of each row.
const LEAST_SPARE: f64 = 0.1;
const LEAST_SPARE_DIM: usize = 16;
/// What a start may be lowered by at most, for sums to stay within 32 bits.
const MOST_TIGHTENED: f32 = 5e8;
/// Queries of which one is asked what starts to take away.
const SAMPLED: usize = 4;
const PANELS_PER_BLOCK: usize = BLOCK_ROWS / ROWS;
/// Rows, and panels, that a thread prepares together.
const TOGETHER: usize = 4096;
const PANELS_TOGETHER: usize = TOGETHER / ROWS;

/// Base rows, and the same rounded to 8 bits.
#[derive(Debug)]
pub(super) struct Quantised<T> {
    rows: Rows,
    metric: Metric,
    vnni: Vnni,
    scale: Scale,
    groups: Vec<Group>,
    starts: Vec<Starts>,
    /// How much smaller the rest of each row is than the longest, in steps.
    spare: Vec<[f32; ROWS]>,
    most_spare: f64,
    /// For each panel, a bit for each row that its sum decides about.
    decided: Vec<u64>,
    /// For each panel, a bit for each row of odd square, half of which its start lost.
    odd: Vec<u64>,
    /// Rows that are always computed, ascending.
    outliers: Vec<u32>,
    /// The longest rest and the longest row among the others.
    rest: f64,
    norm: f64,
    /// The layout for rows that 8 bits tell too little about.
    fallback: OnceLock<Direct<T>>,
    making_fallback: Mutex<()>,
    _reserved: Reserved,
}

/// How rows become whole numbers.
#[derive(Debug)]
struct Scale {
    centre: Vec<f64>,
    step: f64,
    /// All rows are whole numbers in range, and nothing is rounded.
    whole: bool,
}

/// A row in whole numbers.
struct Rounded {
    values: Vec<i8>,
    /// The length of what rounding took away.
    rest: f64,
    /// The length of the row, from the origin.
    norm: f64,
}

impl Scale {
    /// The range that all but a few rows fit into.
    fn new<T: Real>(values: &[T], dim: usize, sum: Sum, job: &Job) -> Result<Self> {
        if sum == Sum::Squares
            && let Some(centre) = whole_centre(values, dim, job)?
        {
            return Ok(Self { centre, step: 1.0, whole: true });
        }
        let rows = values.len() / dim;
        let mut centre = vec![0.0; dim];
        if sum == Sum::Squares {
            let mean = |rows_of: &[T]| {
                job.check()?;
                let mut mean = vec![0.0; dim];
                for row in rows_of.chunks_exact(dim) {
                    mean.iter_mut().zip(row).for_each(|(c, x)| *c += x.to_f64() / rows as f64);
                }
                Ok(mean)
            };
            let means: Vec<_> =
                values.par_chunks(TOGETHER * dim).map(mean).collect::<Result<_>>()?;
            for mean in means {
                centre.iter_mut().zip(mean).for_each(|(c, x)| *c += x);
            }
        }
        let reach = |row: &[T]| {
            let apart = row.iter().zip(&centre).map(|(x, c)| (x.to_f64() - c).abs());
            apart.fold(0.0, f64::max)
        };
        let mut reaches: Vec<f64> = values.par_chunks_exact(dim).map(reach).collect();
        job.check()?;
        let kept = rows - 1 - rows / ONE_OUTLIER_IN;
        let (_, most, _) = reaches.select_nth_unstable_by(kept, f64::total_cmp);
        let step = if *most > 0.0 { *most / LARGEST } else { 1.0 };
        Ok(Self { centre, step, whole: false })
    }

    /// The longest rest of a row within the range.
    fn usual_rest(&self) -> f64 {
        self.step * (self.centre.len() as f64).sqrt() * 0.5 * (1.0 + 1e-6)
    }

    fn round<T: Real>(&self, row: &[T], step: f64) -> Rounded {
        let (mut rest, mut square, mut size) = (0.0, 0.0, 0.0);
        let inverse = 1.0 / step;
        let values = row.iter().zip(&self.centre).map(|(x, c)| {
            let x = x.to_f64();
            let apart = x - c;
            // Adding a number this large leaves no room for a fraction.
            let rounded =
                (apart * inverse).clamp(-LARGEST - 1.0, LARGEST) + NO_FRACTIONS - NO_FRACTIONS;
            rest += (apart - rounded * step) * (apart - rounded * step);
            square += x * x;
            size += apart * apart;
            rounded as i8
        });
        let values = values.collect();
        // The float64 arithmetic of this file errs far less than this.
        let slack = 1e-12 * (square.sqrt() + f64::sqrt(size));
        Rounded {
            values,
            rest: f64::sqrt(rest) * (1.0 + 1e-9) + slack,
            norm: f64::sqrt(square) * (1.0 + 1e-9),
        }
    }
}

/// The centre of rows of whole numbers that fit into 8 bits as they are, so that nothing is rounded:
/// pixels, counts, SIFT descriptors, rows that were quantised before.
fn whole_centre<T: Real>(values: &[T], dim: usize, job: &Job) -> Result<Option<Vec<f64>>> {
    let nothing = || vec![(f64::INFINITY, f64::NEG_INFINITY); dim];
    let ranges_of = |rows: &[T]| {
        job.check()?;
        let mut ranges = nothing();
        for row in rows.chunks_exact(dim) {
            for ((least, most), x) in ranges.iter_mut().zip(row) {
                let x = x.to_f64();
                if x.trunc() != x {
                    return Ok(None);
                }
                (*least, *most) = (least.min(x), most.max(x));
            }
        }
        Ok(Some(ranges))
    };
    // Most rows are no whole numbers, and the first few say so.
    let (first, others) = values.split_at(values.len().min(TOGETHER * dim));
    let Some(mut ranges) = ranges_of(first)? else { return Ok(None) };
    let others: Vec<_> = others.par_chunks(TOGETHER * dim).map(ranges_of).collect::<Result<_>>()?;
    for found in others {
        let Some(found) = found else { return Ok(None) };
        for (range, found) in ranges.iter_mut().zip(found) {
            *range = (range.0.min(found.0), range.1.max(found.1));
        }
    }
    let fits = |&(least, most): &(f64, f64)| most - least <= 2.0 * LARGEST + 1.0;
    let middle = |(least, most): (f64, f64)| ((least + most) / 2.0).ceil();
    let exact = |x: f64| x.abs() < 1e15;
    Ok((ranges.iter().all(|range| fits(range) && exact(range.0)))
        .then(|| ranges.into_iter().map(middle).collect()))
}

/// Some panels that are being filled.
struct Panels<'a> {
    groups: &'a mut [Group],
    starts: &'a mut [Starts],
    decided: &'a mut [u64],
    odd: &'a mut [u64],
    /// Of each row that is no outlier, the length of what rounding took away.
    rests: &'a mut [f64],
}

/// What is known of the rows of some panels.
#[derive(Default)]
struct Filled {
    /// Positions among these rows.
    outliers: Vec<usize>,
    rest: f64,
    norm: f64,
}

impl Panels<'_> {
    fn fill<T: Real>(
        self,
        values: &[T],
        scale: &Scale,
        (dim, words, squares): (usize, usize, bool),
    ) -> Filled {
        let usual = scale.usual_rest();
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
                self.odd[panel] |= u64::from(square % 2 == 1) << lane;
            }
            if rounded.rest > usual + 1e-9 * rounded.norm {
                filled.outliers.push(row);
            } else {
                self.decided[panel] |= 1 << lane;
                self.rests[row] = rounded.rest;
                filled.rest = filled.rest.max(rounded.rest);
                filled.norm = filled.norm.max(rounded.norm);
            }
        }
        filled
    }
}

impl<T: Lanes> Quantised<T> {
    /// `None` if this is not the layout for these rows, or this processor.
    pub fn try_new(rows: &Rows, values: &[T], metric: Metric, job: &Job) -> Result<Option<Self>> {
        let (dim, sum) = (rows.matrix().dim(), metric.sum());
        let fits = (LEAST_DIM..=MOST_DIM).contains(&dim) && rows.len() >= LEAST_ROWS;
        if !fits || sum == Sum::Absolute {
            return Ok(None);
        }
        let Some(vnni) = Vnni::detect() else { return Ok(None) };
        let words = dim.div_ceil(GROUP);
        let panels = rows.len().div_ceil(ROWS);
        let of_panel = words * size_of::<Group>() + 2 * size_of::<Starts>() + 2 * size_of::<u64>();
        // While it is made, a number for each row.
        let of_rows = rows.len() * size_of::<f64>();
        let mut reserved = job.reserve("base rows in 8 bits", panels * of_panel + of_rows)?;
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
            spare: vec![[0.0; ROWS]; panels],
            most_spare: 0.0,
            decided: vec![0; panels],
            odd: vec![0; panels],
            outliers: Vec::new(),
            rest: 0.0,
            norm: 0.0,
            scale,
            fallback: OnceLock::new(),
            making_fallback: Mutex::default(),
            _reserved: job.reserve("", 0)?,
        };
        quantised.fill(values, dim, words, job)?;
        reserved.shrink_to(panels * of_panel);
        quantised._reserved = reserved;
        let few = rows.len() / (ONE_OUTLIER_IN / 8) + 4;
        Ok((quantised.outliers.len() <= few).then_some(quantised))
    }

    fn fill(&mut self, values: &[T], dim: usize, words: usize, job: &Job) -> Result<()> {
        let mut rests = vec![0.0; values.len() / dim];
        let (scale, squares) = (&self.scale, self.metric.sum() == Sum::Squares);
        let groups = self.groups.par_chunks_mut(PANELS_TOGETHER * words);
        let starts = self.starts.par_chunks_mut(PANELS_TOGETHER);
        let bits = (self.decided.par_chunks_mut(PANELS_TOGETHER))
            .zip(self.odd.par_chunks_mut(PANELS_TOGETHER));
        let rows = (values.par_chunks(PANELS_TOGETHER * ROWS * dim))
            .zip(rests.par_chunks_mut(PANELS_TOGETHER * ROWS));
        let parts = groups.zip(starts).zip(bits).zip(rows);
        let parts = parts.map(|(((groups, starts), (decided, odd)), (values, rests))| {
            job.check()?;
            let panels = Panels { groups, starts, decided, odd, rests };
            Ok(panels.fill(values, scale, (dim, words, squares)))
        });
        let parts: Vec<_> = parts.collect::<Result<_>>()?;
        for (part, Filled { outliers, rest, norm }) in parts.into_iter().enumerate() {
            let first = part * PANELS_TOGETHER * ROWS;
            self.outliers.extend(outliers.into_iter().map(|row| (first + row) as u32));
            (self.rest, self.norm) = (self.rest.max(rest), self.norm.max(norm));
        }
        for (row, rest) in rests.into_iter().enumerate().filter(|(_, rest)| *rest > 0.0) {
            let spare = (self.rest - rest) / self.scale.step;
            self.most_spare = self.most_spare.max(spare);
            self.spare[row / ROWS][row % ROWS] = (spare * (1.0 - 1e-6)) as f32;
        }
        Ok(())
    }

    /// The layout for rows that 8 bits tell too little about. Made on threads of its own: rayon's may
    /// wait for it here.
    fn fallback(&self, job: &Job) -> Result<&Direct<T>> {
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

    fn query(&self, values: &[T]) -> Query {
        let squares = self.metric.sum() == Sum::Squares;
        let largest = values.iter().fold(0.0f64, |m, x| m.max(x.to_f64().abs()));
        let own = if largest > 0.0 { largest / LARGEST } else { 1.0 };
        let step = if squares { self.scale.step } else { own };
        let rounded = self.scale.round(values, step);
        let square = f64::from(square(&rounded.values));
        let sum: i32 = rounded.values.iter().map(|x| i32::from(*x)).sum();
        // Whole numbers below 2⁵³ add up exactly; x − c would be rounded, and a hair beside a whole
        // number be lost.
        let as_is = |((value, x), c): ((&i8, &T), &f64)| c + f64::from(*value) == x.to_f64();
        let whole = self.scale.whole
            && rounded.values.iter().zip(values).zip(&self.scale.centre).all(as_is);
        let words = rounded.values.chunks(GROUP).map(|chunk| {
            let mut word = [0; GROUP];
            word.iter_mut().zip(chunk).for_each(|(slot, value)| *slot = *value as u8);
            i32::from_le_bytes(word)
        });
        // How far the contract's own rounding moves a sum, relatively and near zero.
        let d = values.len() as f64 + 8.0;
        let relative = d * T::EPSILON.to_f64();
        let absolute = 4.0 * d * T::MIN_POSITIVE.to_f64() * T::EPSILON.to_f64();
        let bound = if squares {
            Bound::Squares {
                factor: 1.0 + relative,
                apart: (rounded.rest + absolute.sqrt()) / step,
                rest: self.rest / step,
                inverse: 1.0 / step,
                square,
            }
        } else {
            let length = square.sqrt() * step * (1.0 + 1e-9);
            let most = rounded.norm * self.norm;
            let apart = rounded.rest * self.norm + length * self.rest + relative * most + absolute;
            let inverse = 1.0 / (step * self.scale.step);
            // A sum that may overflow on its way is bounded by nothing, nor is one of a query whose
            // length was lost because its squares vanish in float64.
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
            whole: whole.then_some(square),
            bound,
            known: (f64::NAN, f64::NAN),
            far: rounded.rest > 4.0 * self.scale.usual_rest() && squares,
        }
    }
}

/// A query in whole numbers.
struct Query {
    words: Vec<i32>,
    /// What the unsigned base adds to every product.
    offset: f64,
    /// The square of a query that was not rounded, of a base that was not.
    whole: Option<f64>,
    bound: Bound,
    /// A reach, and the distance it means: reaches change seldom.
    known: (f64, f64),
    /// It lies far out of the range of the base: its bounds are loose.
    far: bool,
}

enum Bound {
    /// Lengths in steps.
    Squares {
        factor: f64,
        apart: f64,
        rest: f64,
        inverse: f64,
        square: f64,
    },
    Products {
        apart: f64,
        inverse: f64,
    },
    /// Every row passes.
    None,
}

/// A distance that the sums of all rows have been tightened for.
#[derive(Debug, Clone, Copy, Default)]
struct Tightened {
    /// In steps, without the rest of the row.
    distance: f64,
    most_spare: f64,
}

impl Query {
    /// The distance within which a row without a rest may be within reach, in steps.
    fn distance(&mut self, reach: f64) -> f64 {
        if self.known.0 != reach {
            let distance = match self.bound {
                Bound::Squares { factor, apart, inverse, .. } => {
                    reach.max(0.0).sqrt() * factor * inverse + apart
                }
                _ => f64::INFINITY,
            };
            self.known = (reach, distance);
        }
        self.known.1
    }

    /// The least sum of a pair that may be within reach.
    fn least(&mut self, reach: f64, tightened: Tightened) -> i32 {
        let least = match self.bound {
            Bound::Squares { rest, square, .. } => {
                let own = self.distance(reach);
                // For a row with s to spare: (own + rest − s)² = (own + rest)² − s (2 own + 2 rest − s),
                // of which the row's start has taken s (2 tightened + 2 rest − s) away.
                let too_much = 2.0 * tightened.most_spare * (tightened.distance - own).max(0.0);
                let most = (own + rest) * (own + rest) + too_much;
                (square - most * (1.0 + 1e-9)) / 2.0
            }
            Bound::Products { apart, inverse } => {
                let least = -reach - apart;
                (least - least.abs() * 1e-9) * inverse
            }
            Bound::None => return i32::MIN,
        };
        // The cast rounds towards zero, by less than 1, and saturates.
        let least = least + self.offset - 3.0;
        if least.is_nan() { i32::MIN } else { least as i32 }
    }
}

fn square(values: &[i8]) -> i32 {
    values.iter().map(|x| i32::from(*x) * i32::from(*x)).sum()
}

impl<T: Lanes> Arithmetic<T> for Quantised<T> {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn scan<K: Sink<T>>(
        &self,
        queries: &Block<'_, T>,
        visit: &Visit<'_>,
        sinks: &mut [K],
    ) -> Result<Work> {
        let dim = self.rows.matrix().dim();
        let rounded: Vec<_> = queries.values.chunks_exact(dim).map(|q| self.query(q)).collect();
        if rounded.iter().filter(|query| query.far).count() > sinks.len() / 16 {
            return self.fallback(visit.job)?.scan(queries, visit, sinks);
        }
        let (passed, hits, sums) = (Vec::new(), Vec::new(), Vec::new());
        let (starts, tightened) = (Vec::new(), Tightened::default());
        let mut search = Search {
            base: self,
            queries,
            visit,
            rounded,
            starts,
            tightened,
            passed,
            hits,
            sums,
            sinks,
        };
        let mut work = Work::default();
        let most = search.sinks[0].most().saturating_add(BLOCK_ROWS).saturating_mul(4);
        let free = search.sinks.len().saturating_mul(most) as u64;
        for (position, block) in visit.positions() {
            visit.job.check()?;
            work.pairs += (search.sinks.len() * visit.rows_of(block).len()) as u64;
            work.rechecked += search.block(block);
            if work.rechecked > free.saturating_add(work.pairs / ONE_PASSES_IN) {
                let fallback = self.fallback(visit.job)?;
                work += fallback.scan(queries, &visit.after(position), search.sinks)?;
                return Ok(work);
            }
        }
        Ok(work)
    }
}

/// The queries of a task on their way through the blocks.
struct Search<'a, T, K> {
    base: &'a Quantised<T>,
    queries: &'a Block<'a, T>,
    visit: &'a Visit<'a>,
    rounded: Vec<Query>,
    /// What the sums of the rows of the present block start from.
    starts: Vec<Starts>,
    tightened: Tightened,
    /// Pairs that passed in the present block: positions of the query in the task, of the row.
    passed: Vec<(u32, u32)>,
    hits: Vec<Hits>,
    /// All sums of the panel of each hit, if the rows are whole.
    sums: Vec<Starts>,
    sinks: &'a mut [K],
}

impl<T: Lanes, K: Sink<T>> Search<'_, T, K> {
    /// Take all queries through a block; returns how many pairs were computed exactly.
    fn block(&mut self, block: usize) -> u64 {
        let panels = block * PANELS_PER_BLOCK..(block + 1) * PANELS_PER_BLOCK;
        let panels = panels.start..panels.end.min(self.base.starts.len());
        self.tighten(panels.clone());
        let (mut computed, mut next, mut step) = (0, panels.start, 1);
        while next < panels.end {
            // Lists that are not full let everything pass: a few panels at a time until they are.
            let full = self.sinks.iter().all(|sink| sink.reach() < T::INFINITY);
            let end = if full && next == panels.start { panels.end } else { next + step };
            computed += self.panels(next..end.min(panels.end));
            (next, step) = (end, 2 * step);
        }
        computed
    }

    /// Let the sums of some panels start from what suits the sinks as they are.
    fn tighten(&mut self, panels: Range<usize>) {
        let base = self.base;
        let starts = &base.starts[panels.clone()];
        if base.most_spare < LEAST_SPARE || base.scale.centre.len() < LEAST_SPARE_DIM {
            self.starts.clear();
            self.starts.extend_from_slice(starts);
            return;
        }
        let sample = self.rounded.iter_mut().zip(self.sinks.iter()).step_by(SAMPLED);
        let distances = sample.map(|(query, sink)| query.distance(sink.reach().to_f64()));
        let mut distances: Vec<_> = distances.filter(|distance| distance.is_finite()).collect();
        // Most queries use all that the starts take away, and none loses much.
        let quarter = distances.len() / 4;
        let distance = match distances.len() {
            0 => 0.0,
            _ => *distances.select_nth_unstable_by(quarter, f64::total_cmp).1,
        };
        self.tightened = Tightened { distance, most_spare: base.most_spare };
        let twice = (2.0 * (distance + base.rest / base.scale.step) * (1.0 - 1e-6)).min(1e9) as f32;
        let most = (twice, MOST_TIGHTENED);
        base.vnni.tighten(starts, &base.spare[panels], most, &mut self.starts);
    }

    fn panels(&mut self, panels: Range<usize>) -> u64 {
        self.passed.clear();
        for first in (0..self.sinks.len()).step_by(QUERIES) {
            self.sweep(first, panels.clone());
        }
        self.outliers(panels.start * ROWS..panels.end * ROWS);
        self.compute();
        self.passed.len() as u64
    }

    /// Note the pairs of four queries with some panels that pass.
    fn sweep(&mut self, first: usize, panels: Range<usize>) {
        let base = self.base;
        let words = base.groups.len() / base.starts.len();
        let count = (self.sinks.len() - first).min(QUERIES);
        let mut least = [i32::MAX; QUERIES];
        for (i, least) in least.iter_mut().enumerate().take(count) {
            let reach = self.sinks[first + i].reach();
            *least = self.rounded[first + i].least(reach.to_f64(), self.tightened);
        }
        // A group that is not full repeats its last query, whose hits are then not looked at.
        let query = |i: usize| self.rounded[first + i.min(count - 1)].words.as_slice();
        let queries: [&[i32]; QUERIES] = std::array::from_fn(query);
        self.hits.clear();
        let groups = &base.groups[panels.start * words..panels.end * words];
        // The starts are those of a block.
        let starts = panels.start % PANELS_PER_BLOCK..;
        let starts = &self.starts[starts][..panels.len()];
        self.sums.clear();
        let sums = base.scale.whole.then_some(&mut self.sums);
        base.vnni.sweep(groups, starts, queries, least, &mut self.hits, sums);
        for i in 0..self.hits.len() {
            let hit = self.hits[i];
            if hit.query >= count {
                continue;
            }
            let (query, panel) = (first + hit.query, panels.start + hit.panel);
            let mut rows = hit.rows & base.decided[panel];
            while rows != 0 {
                let lane = rows.trailing_zeros();
                rows &= rows - 1;
                let row = (panel * ROWS) as u32 + lane;
                match self.whole_sum(query, panel, lane, i) {
                    Some(sum) => self.offer(query, row, sum),
                    None => self.passed.push((query as u32, row)),
                }
            }
        }
    }

    /// The sum of a pair of whole rows, if numbers of this type hold it and all on the way there, so
    /// that the contract's order and any other come to the same.
    fn whole_sum(&self, query: usize, panel: usize, lane: u32, hit: usize) -> Option<T> {
        let query = &self.rounded[query];
        let square = query.whole?;
        let sum = f64::from(self.sums[hit].0[lane as usize]);
        let odd = (self.base.odd[panel] >> lane & 1) as f64;
        let squares = square - 2.0 * (sum - query.offset) + odd;
        (squares * T::EPSILON.to_f64() <= 2.0).then(|| T::from_f64(squares))
    }

    fn offer(&mut self, query: usize, row: u32, sum: T) {
        let (visit, first, sink) = (self.visit, self.queries.first, &mut self.sinks[query]);
        if sum <= sink.reach() && !visit.is_itself(first + query, row as usize) {
            sink.offer(sum, visit.number(row as usize));
        }
    }

    /// The rows kept aside pass for every query.
    fn outliers(&mut self, rows: Range<usize>) {
        let all = &self.base.outliers;
        let start = all.partition_point(|row| (*row as usize) < rows.start);
        let end = all.partition_point(|row| (*row as usize) < rows.end);
        for query in 0..self.sinks.len() as u32 {
            self.passed.extend(all[start..end].iter().map(|row| (query, *row)));
        }
    }

    /// Offer the pairs that passed to their sinks, by their sums.
    fn compute(&mut self) {
        let (visit, first, sinks) = (self.visit, self.queries.first, &mut self.sinks);
        exact::Pairs {
            sum: self.base.metric.sum(),
            queries: self.queries.values,
            base: self.base.rows.reals().unwrap_or_default(),
            dim: self.base.rows.matrix().dim(),
            pairs: &self.passed,
            found: |(query, row), sum| {
                let (query, row) = (query as usize, row as usize);
                let sink = &mut sinks[query];
                if sum <= sink.reach() && !visit.is_itself(first + query, row) {
                    sink.offer(sum, visit.number(row));
                }
            },
        }
        .compute(self.base.vnni);
    }
}
