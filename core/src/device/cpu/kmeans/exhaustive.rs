//! Exhaustive assignment to few centroids by 16-bit codes: in every round, each row is compared with all of them.
//!
//! For each row x and centroid c, an integer sum is a lower bound on `‖x − c‖² / 2` (or on `−x·c`), in squared steps
//! and up to a constant that all centroids share. If the second smallest sum exceeds the smallest by more than the
//! error, the nearest centroid is known; otherwise the sums of the definition decide.

use std::cmp::Ordering;
use std::marker::PhantomData;

use super::drake::distances;
use crate::device::contract::{Assigned, Assigner, Distances, Moved, Work};
use crate::device::cpu::plan::{self, AssignmentShape};
use crate::device::cpu::quantize::base::RoundingError;
use crate::device::cpu::quantize::quantizer::{LARGEST_WORD, LENGTH, Quantizer};
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::{
    Argmin2, CentroidWords, CodePanels, ExpectedArgmin, Group, LANES, ROWS, Width,
};
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::device::cpu::simd::soa::SoaRows;
use crate::device::cpu::simd::squares::{longest_square, square};
use crate::device::sums::ROUND_TO_INTEGER_F64;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::memory::{Aligned, zeros};
use crate::metric::{Metric, Sum};
use crate::parallel::try_in_parallel;
use crate::random::Random;
use crate::rows::Rows;

/// Rows of a task.
const BLOCK: usize = 64 * ROWS;

/// Rows of the sample that determines the quantiser; one in `ONE_OUTLIER_IN` of them may be an outlier.
const SAMPLE: usize = 4096;
const ONE_OUTLIER_IN: usize = 1000;

/// The longest centroid in steps, the largest difference of two starts, and the largest error of a sum: within these
/// limits, no sum overflows 32 bits.
const LONGEST: f64 = 32_000.0;
const LARGEST_START: f64 = 1e9;
const LARGEST_ERROR: f64 = 1e8;
/// The start of a centroid that repeats an earlier one. With codes of 0, its sums equal the start, which exceeds all
/// other sums by more than twice the largest error: it is never the nearest.
const NEVER: f64 = i32::MAX as f64 - 1.0;
/// For products: the largest product of a centroid's length and the centre's, in squared steps, for which starts are
/// exact enough in float64.
const FARTHEST: f64 = 1e12;

/// See the [module](self).
pub(in crate::device::cpu) struct Exhaustive<T> {
    rows: Rows,
    shape: AssignmentShape,
    fallback: Fallback,
    state: ExhaustiveState<T>,
    /// The rows left to the definition in the last round; `None` if another assigner did it.
    undecided: Option<Vec<u32>>,
}

/// Makes the assigner that takes over from [`Exhaustive`]; `None` leaves all rounds to searches.
pub(in crate::device::cpu) type Fallback =
    fn(&Rows, AssignmentShape, &Job) -> Result<Option<Box<dyn Assigner>>>;

enum ExhaustiveState<T> {
    Codes(PanelCodes<T>),
    /// The assigner that took over, as sums decided too little or a centroid was too far away.
    Fallback(Option<Box<dyn Assigner>>),
}

/// Rows as 16-bit codes.
struct PanelCodes<T> {
    quantizer: Quantizer,
    /// The codes, panel by panel.
    groups: Aligned<Group>,
    /// The radius of the rows, which is the length of the longest, and the longest rounding residual, in steps.
    radius: f64,
    residual: f64,
    /// For products: the squared length of the longest row, from the origin.
    longest: f64,
    /// For each block, its rows outside the range of the codes, ascending.
    beyond: Vec<Vec<u32>>,
    of_type: PhantomData<T>,
    _reserved: Reserved,
}

/// Statistics of some rows that were rounded.
#[derive(Default)]
struct BlockStats {
    /// The largest squared length of a row's codes.
    longest: f64,
    beyond: Vec<u32>,
}

impl<T: SimdReal> Exhaustive<T> {
    /// `None` without memory, for values near overflow or underflow, and if too many rows lie outside the range.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn try_new(
        rows: &Rows,
        shape: AssignmentShape,
        fallback: Fallback,
        job: &Job,
    ) -> Result<Option<Self>> {
        let AssignmentShape { metric, level, .. } = shape;
        let state = PanelCodes::try_new(rows, metric, level, job)?.map(ExhaustiveState::Codes);
        let rows = rows.clone();
        Ok(state.map(|state| Self { rows, shape, fallback, state, undecided: None }))
    }

    /// Leaves all further rounds to another assigner.
    fn give_up(&mut self, k: usize, job: &Job) -> Result<()> {
        // Freed first: the other assigner may need the memory.
        self.state = ExhaustiveState::Fallback(None);
        let other = (self.fallback)(&self.rows, AssignmentShape { k, ..self.shape }, job)?;
        self.state = ExhaustiveState::Fallback(other);
        Ok(())
    }
}

impl<T: SimdReal> PanelCodes<T> {
    /// See [`Exhaustive::try_new`].
    fn try_new(rows: &Rows, metric: Metric, level: Level, job: &Job) -> Result<Option<Self>> {
        let (Some(values), dim) = (rows.reals::<T>(), rows.matrix().dim()) else { return Ok(None) };
        if dim == 0 || rows.is_empty() {
            return Ok(None);
        }
        let of_panel = CodePanels::groups_of(dim.div_ceil(Width::Sixteen.per_word()));
        let count = rows.len().div_ceil(ROWS) * of_panel;
        // The sample, too, and the numbers of rows beyond the range.
        let beside = SAMPLE * (dim * size_of::<T>() + size_of::<f64>()) + rows.len() * 4;
        let bytes = count * size_of::<Group>();
        let Some(mut reserved) = job.try_reserve(bytes + beside) else {
            return Ok(None);
        };
        let sample = sample(values, dim);
        let outliers = sample.len() / dim / ONE_OUTLIER_IN;
        let quantizer = Quantizer::fitting(&sample, outliers, dim, Sum::Squares, level, job)?;
        if !quantizer.is_usual() {
            return Ok(None);
        }
        let mut groups = Aligned::zeros(count);
        let blocks = groups.chunks_mut(BLOCK / ROWS * of_panel).zip(values.chunks(BLOCK * dim));
        let filled: Vec<BlockStats> = try_in_parallel(blocks, |(groups, values)| {
            job.check()?;
            Ok(level.dispatch(
                #[inline(always)]
                || fill(groups, values, &quantizer),
            ))
        })?;
        let residual = quantizer.usual_residual(1.0);
        let radius =
            filled.iter().map(|filled| filled.longest).fold(0.0, f64::max).sqrt() + residual;
        let beyond: Vec<_> = filled.into_iter().map(|filled| filled.beyond).collect();
        let are_beyond = beyond.iter().map(Vec::len).sum::<usize>();
        if !plan::codes_decide(are_beyond, rows.len()) {
            return Ok(None);
        }
        reserved.shrink_to(bytes + are_beyond * 4);
        let of_type = PhantomData;
        let longest = match metric.sum() {
            Sum::Squares => 0.0,
            _ => longest_square(level, values, dim),
        };
        job.check()?;
        let _reserved = reserved;
        Ok(Some(Self { quantizer, groups, radius, residual, longest, beyond, of_type, _reserved }))
    }

    /// The centroids of a round; `None` if one is too far away.
    fn centroids(&self, values: &[T], metric: Metric) -> Option<CentroidCodes<T>> {
        let Quantizer { centre, centre_norm, step, .. } = &self.quantizer;
        let (dim, is_squares) = (centre.len(), metric.sum() == Sum::Squares);
        let length = dim.div_ceil(Width::Sixteen.per_word());
        let (mut starts, mut errors) = (Vec::new(), Vec::new());
        let (mut words, mut numbers) = (Vec::new(), Vec::new());
        for (centroid, is_first) in values.chunks_exact(dim).zip(are_first(values, dim)) {
            let rounded = self.quantizer.round(centroid, centre, *step, &mut numbers);
            let (longest, residual) = (rounded.length / step, rounded.residual / step);
            if longest >= LONGEST || !is_squares && longest * centre_norm / step > FARTHEST {
                return None;
            }
            // The terms that differ from centroid to centroid.
            let ways = centroid.iter().zip(centre).map(|(x, c)| (x.to_f64() - c, c));
            let start = match is_squares {
                true => ways.map(|(way, _)| way * way).sum::<f64>() / 2.0,
                false => -ways.map(|(way, c)| way * c).sum::<f64>(),
            };
            let of_definition = match is_squares {
                true => self.error_of_squares(longest)? / 2.0,
                false => self.error_of_products(centroid),
            };
            let of_rounding = self.residual * longest + (self.radius + self.residual) * residual;
            // Float64 has errors, too.
            errors.push((of_rounding + of_definition / step / step) * (1.0 + 1e-6) + 1.0);
            // Of equal ones, the first is the nearest.
            starts.push(if is_first { start / step / step } else { f64::INFINITY });
            // Negated, as products are subtracted.
            numbers.iter_mut().for_each(|x| *x = if is_first { -*x } else { 0 });
            let first = words.len();
            words.resize(first + length, 0);
            self.quantizer.write_words(&numbers, &mut words[first..]);
        }
        let finite = starts.iter().copied().filter(|start| start.is_finite());
        let largest = finite.fold(f64::NEG_INFINITY, f64::max);
        let largest_error = errors.iter().copied().fold(0.0, f64::max);
        let least = starts.iter().copied().fold(f64::INFINITY, f64::min);
        if largest - least > LARGEST_START || largest_error > LARGEST_ERROR {
            return None;
        }
        let starts = starts.iter().zip(&errors);
        let starts = starts.map(|(start, error)| (start - least - error).floor().min(NEVER) as i32);
        let starts = starts.collect();
        let slack: Vec<i32> = errors.iter().map(|error| (2.0 * error).ceil() as i32 + 1).collect();
        let most_slack = slack.iter().copied().fold(0, i32::max);
        let rows = SoaRows::new(values, dim);
        Some(CentroidCodes { rows, words, starts, slack, most_slack })
    }

    /// Rounding error of the definition's distances from a centroid at distance `longest` from the centre, in steps;
    /// `None` if a distance may overflow.
    fn error_of_squares(&self, longest: f64) -> Option<f64> {
        let RoundingError { relative, absolute, .. } =
            RoundingError::of::<T>(self.quantizer.centre.len() as f64);
        let farthest = ((self.radius + self.residual + longest) * self.quantizer.step).powi(2);
        (farthest < T::MAX.to_f64() / 4.0).then_some(relative * farthest + absolute)
    }

    /// Rounding error of the definition's cosine distances from a centroid, plus what clamping to 0 to 2 may change.
    fn error_of_products(&self, centroid: &[T]) -> f64 {
        let RoundingError { relative, absolute, .. } =
            RoundingError::of::<T>(centroid.len() as f64);
        let both = self.longest + square(self.quantizer.level, centroid);
        relative * both + absolute + 8.0 * T::EPSILON.to_f64() + (both / 2.0 - 1.0).max(0.0)
    }
}

/// A random sample of the rows; all rows, if there are at most [`SAMPLE`].
fn sample<T: SimdReal>(values: &[T], dim: usize) -> Vec<T> {
    let count = values.len() / dim;
    if count <= SAMPLE {
        return values.to_vec();
    }
    // Not at even steps, as rows may be periodic.
    let mut random = Random::new(0);
    let row = |row: u64| values[row as usize * dim..][..dim].iter().copied();
    (0..SAMPLE).flat_map(|_| row(random.below(count as u64))).collect()
}

/// For each row, whether it differs from all earlier rows.
fn are_first<T: SimdReal>(values: &[T], dim: usize) -> Vec<bool> {
    let row = |i: &usize| &values[i * dim..][..dim];
    let mut order: Vec<usize> = (0..values.len() / dim).collect();
    let mut are_first = vec![true; order.len()];
    order.sort_by(|a, b| row(a).partial_cmp(row(b)).unwrap_or(Ordering::Equal));
    for pair in order.windows(2).filter(|pair| row(&pair[0]) == row(&pair[1])) {
        are_first[pair[1]] = false;
    }
    are_first
}

/// Fills the panels of a block with the codes of its rows; rows outside the range keep zeros.
#[inline(always)]
fn fill<T: SimdReal>(groups: &mut [Group], values: &[T], quantizer: &Quantizer) -> BlockStats {
    let (dim, inverse) = (quantizer.centre.len(), 1.0 / quantizer.step);
    let (words, mut filled) = (dim.div_ceil(Width::Sixteen.per_word()), BlockStats::default());
    let mut numbers = vec![0; dim.next_multiple_of(Width::Sixteen.per_word())];
    for (row, values) in values.chunks_exact(dim).enumerate() {
        let mut square = 0.0;
        for ((number, x), c) in numbers.iter_mut().zip(values).zip(&quantizer.centre) {
            let scaled = ((x.to_f64() - c) * inverse).clamp(-LARGEST_WORD, LARGEST_WORD);
            let shifted = scaled + ROUND_TO_INTEGER_F64;
            square += (shifted - ROUND_TO_INTEGER_F64) * (shifted - ROUND_TO_INTEGER_F64);
            *number = shifted.to_bits() as i16;
        }
        // If a number was clamped, its square is too large.
        if square > LENGTH * LENGTH {
            filled.beyond.push(row as u32);
            continue;
        }
        filled.longest = filled.longest.max(square);
        let groups = &mut groups[row / LANES * words..][..words];
        for (group, [even, odd]) in groups.iter_mut().zip(numbers.as_chunks().0) {
            let ([a, b], [c, d]) = (even.to_le_bytes(), odd.to_le_bytes());
            group.0[row % LANES] = [a, b, c, d];
        }
    }
    filled
}

/// The centroids of a round.
struct CentroidCodes<T> {
    rows: SoaRows<T>,
    words: Vec<i32>,
    /// The initial value of each centroid's sums, rounded down so that sums are lower bounds.
    starts: Vec<i32>,
    /// For each centroid, the margin by which the sums of all others must exceed its own to prove it the nearest; and
    /// the largest margin.
    slack: Vec<i32>,
    most_slack: i32,
}

/// Rows of a task.
struct ExhaustiveBlock<'a> {
    /// The number of the first.
    first: usize,
    groups: &'a [Group],
    beyond: &'a [u32],
    labels: &'a mut [u32],
}

impl ExhaustiveBlock<'_> {
    /// Labels rows with their nearest centroids. Returns the rows whose labels changed, and the rows decided by
    /// the definition.
    fn compare<T: SimdReal>(
        &mut self,
        centroids: &CentroidCodes<T>,
        values: &[T],
        metric: Metric,
        level: Level,
    ) -> (Vec<Moved>, Vec<u32>) {
        let CentroidCodes { words, starts, slack, most_slack, rows } = centroids;
        let (mut moved, mut undecided) = (Vec::new(), Vec::new());
        let mut argmin = Argmin2::default();
        let of_panel = self.groups.len() / self.labels.len().div_ceil(ROWS);
        let mut beyond = self.beyond.iter().peekable();
        let panels = self.groups.chunks_exact(of_panel).zip(self.labels.chunks_mut(ROWS));
        for (i, (panel, labels)) in panels.enumerate() {
            let (first, others) = (i * ROWS, CentroidWords { starts, words });
            // The last panel may be partial.
            let mut padded = [0; ROWS];
            let numbers = <&[u32; ROWS]>::try_from(&*labels).unwrap_or_else(|_| {
                padded[..labels.len()].copy_from_slice(labels);
                &padded
            });
            let known = ExpectedArgmin { numbers, margin: *most_slack };
            let mut open = level.panel_dot_argmin2(panel, others, known, &mut argmin);
            open &= u64::MAX >> (ROWS - labels.len());
            while let Some(row) = beyond.next_if(|row| (**row as usize) < first + ROWS) {
                let lane = *row as usize - first;
                argmin.second[lane] = argmin.least[lane];
                open |= 1 << lane;
            }
            while open != 0 {
                let lane = open.trailing_zeros() as usize;
                open &= open - 1;
                let (row, mut now) = (first + lane, argmin.number[lane] as u32);
                if argmin.second[lane] - slack[now as usize] <= argmin.least[lane] {
                    undecided.push((self.first + row) as u32);
                    now = nearest(rows, &values[row * rows.dim..][..rows.dim], metric, level);
                }
                let label = &mut labels[lane];
                if *label != now {
                    moved.push(((self.first + row) as u32, *label));
                    *label = now;
                }
            }
        }
        (moved, undecided)
    }
}

/// The nearest centroid of a row, by definition.
fn nearest<T: SimdReal>(centroids: &SoaRows<T>, row: &[T], metric: Metric, level: Level) -> u32 {
    let (mut nearest, k) = (None, centroids.count);
    centroids.distances(
        level,
        metric,
        row,
        #[inline(always)]
        |first, distances| {
            for (distance, number) in distances.iter().zip(first..k) {
                if nearest.is_none_or(|(least, _)| *distance < least) {
                    nearest = Some((*distance, number as u32));
                }
            }
        },
    );
    nearest.map_or(0, |(_, number)| number)
}

impl<T: SimdReal> Exhaustive<T> {
    /// Labels every row with its nearest centroid. Returns the rows whose labels changed, and the rows decided by
    /// the definition; `None` if a centroid is too far away.
    fn assign_all(
        &self,
        codes: &PanelCodes<T>,
        centroids: &[T],
        labels: &mut Vec<u32>,
        job: &Job,
    ) -> Result<Option<(Vec<Moved>, Vec<u32>)>> {
        let AssignmentShape { metric, level, .. } = self.shape;
        let Some(centroids) = codes.centroids(centroids, metric) else { return Ok(None) };
        let has_labels = !labels.is_empty();
        if !has_labels {
            *labels = zeros(self.rows.len());
        }
        let of_block = codes.groups.len() / self.rows.len().div_ceil(ROWS) * (BLOCK / ROWS);
        let blocks = labels.chunks_mut(BLOCK).zip(codes.groups.chunks(of_block));
        let blocks = blocks.zip(&codes.beyond).enumerate();
        let values = self.rows.reals::<T>().unwrap_or_default();
        let blocks = blocks.zip(values.chunks(BLOCK * codes.quantizer.centre.len()));
        let compared = try_in_parallel(blocks, |((i, ((labels, groups), beyond)), values)| {
            job.check()?;
            let mut block = ExhaustiveBlock { first: i * BLOCK, groups, beyond, labels };
            let (moved, undecided) = block.compare(&centroids, values, metric, level);
            Ok((if has_labels { moved } else { Vec::new() }, undecided))
        });
        let (moved, undecided): (Vec<_>, Vec<_>) = compared?.into_iter().unzip();
        Ok(Some((moved.concat(), undecided.concat())))
    }
}

impl<T: SimdReal> Assigner for Exhaustive<T> {
    fn assign(
        &mut self,
        centroids: &Rows,
        labels: &mut Vec<u32>,
        job: &Job,
    ) -> Result<Option<Assigned>> {
        let k = centroids.len();
        if let (ExhaustiveState::Codes(codes), Some(values)) = (&self.state, centroids.reals::<T>())
        {
            if let Some((moved, undecided)) = self.assign_all(codes, values, labels, job)? {
                let count = undecided.len();
                self.undecided = Some(undecided);
                if !plan::codes_decide(count, self.rows.len()) {
                    self.give_up(k, job)?;
                }
                let (pairs, rechecked) = ((self.rows.len() * k) as u64, (count * k) as u64);
                let work = Work { pairs, rechecked, ..Work::default() };
                return Ok(Some(Assigned { moved, work }));
            }
            self.give_up(k, job)?;
        }
        self.undecided = None;
        match &mut self.state {
            ExhaustiveState::Fallback(Some(other)) => other.assign(centroids, labels, job),
            _ => Ok(None),
        }
    }

    fn distances(&self, centroids: &Rows, labels: &[u32], job: &Job) -> Result<Distances> {
        let AssignmentShape { metric, level, .. } = self.shape;
        distances::<T>(&self.rows, centroids, labels, metric, level, job)
    }

    fn undecided(&self, centroids: &Rows, labels: &[u32]) -> Option<Vec<u32>> {
        match (&self.undecided, &self.state) {
            (Some(undecided), _) => Some(undecided.clone()),
            (None, ExhaustiveState::Fallback(Some(other))) => other.undecided(centroids, labels),
            _ => None,
        }
    }
}
