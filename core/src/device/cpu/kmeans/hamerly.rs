//! Assignment to few centroids with one lower bound for each row (Hamerly 2010).
//!
//! The bound is on the row's gap: the distance to its second nearest centroid less the distance to its nearest. By
//! the triangle inequality, a round shrinks the gap by at most the movement of the row's own centroid plus the
//! largest movement of any other. While the gap is open, that is above 0, the row keeps its label; then it is
//! compared with all centroids.
//!
//! The amount by which gaps shrink is added up for each cluster, and each row stores the total at which its gap
//! closes.

use pulp::{Simd, WithSimd};

use super::drake::{distances, up};
use crate::device::contract::{Assigned, Assigner, Distances, Moved, Work};
use crate::device::cpu::quantize::base::RoundingError;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::device::cpu::simd::soa::{SIDE_BY_SIDE, SoaColumn, fold_squares};
use crate::device::cpu::simd::squares::{longest_square, square, square_between};
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::metric::Metric;
use crate::parallel::try_in_parallel_with;
use crate::rows::Rows;

/// Rows of a task.
const BLOCK: usize = 4096;

/// The number of rows per compared row below which a whole block is read into the cache sequentially.
const ONE_UNCERTAIN_IN: usize = 16;

/// See the [module](self).
pub(in crate::device::cpu) struct Hamerly<T> {
    rows: Rows,
    level: Level,
    /// For each centroid, the total by which the gaps of its rows have shrunk.
    shrunk: Vec<f32>,
    /// For each row, the total of its centroid's `shrunk` at which its gap closes.
    closed_at: Vec<f32>,
    /// The centroids of the last round.
    before: Vec<T>,
    /// The length of the longest row.
    longest: f64,
    rounding: RoundingError,
    _reserved: Reserved,
}

impl<T: SimdReal> Hamerly<T> {
    /// `None` without memory, and for metrics other than the squared Euclidean distance.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn try_new(
        rows: &Rows,
        k: usize,
        metric: Metric,
        level: Level,
        job: &Job,
    ) -> Result<Option<Self>> {
        let (Some(values), dim) = (rows.reals::<T>(), rows.matrix().dim()) else { return Ok(None) };
        if metric != Metric::SqEuclidean {
            return Ok(None);
        }
        let Some(reserved) = job.try_reserve(rows.len() * size_of::<f32>()) else {
            return Ok(None);
        };
        let longest = longest_square(level, values, dim).sqrt();
        job.check()?;
        Ok(Some(Self {
            rows: rows.clone(),
            level,
            shrunk: vec![0.0; k],
            closed_at: vec![0.0; rows.len()],
            before: Vec::new(),
            longest,
            rounding: RoundingError::of::<T>(dim as f64),
            _reserved: reserved,
        }))
    }

    /// `(factor, offset)` such that the distances a and b of two centroids of equal cost satisfy `a ≤ factor · b +
    /// offset`.
    fn cost_margin(&self) -> (f64, f64) {
        let RoundingError { relative, absolute, .. } = self.rounding;
        (1.0 + 2.0 * relative, 3.0 * absolute.sqrt())
    }

    /// Shrinks gaps by the movement of the centroids. Returns whether the bounds are still valid.
    fn shrink(&mut self, centroids: &[T], dim: usize) -> bool {
        let level = self.level;
        let longest = centroids.chunks_exact(dim).map(|row| square(level, row).sqrt());
        let longest = longest.fold(self.longest, f64::max);
        // All costs that overflow are equal, whatever the distances.
        let is_finite = 4.0 * longest < (T::MAX.to_f64() / 4.0).sqrt();
        if !is_finite || self.before.len() != centroids.len() {
            self.shrunk.fill(0.0);
            return false;
        }
        let pairs = centroids.chunks_exact(dim).zip(self.before.chunks_exact(dim));
        let moved = pairs.map(|(now, before)| {
            square_between(level, now, before).sqrt() * (1.0 + 1e-9) + f64::MIN_POSITIVE.sqrt()
        });
        let moved: Vec<f64> = moved.collect();
        let most = moved.iter().copied().fold(0.0, f64::max);
        let farthest = moved.iter().position(|moved| *moved == most);
        let but_that = moved.iter().enumerate().filter(|(i, _)| Some(*i) != farthest);
        let second = but_that.fold(0.0, |most, (_, moved)| moved.max(most));
        let factor = self.cost_margin().0;
        for ((centroid, movement), shrunk) in moved.iter().enumerate().zip(&mut self.shrunk) {
            let others = if Some(centroid) == farthest { second } else { most };
            *shrunk = up(f64::from(*shrunk) + movement * factor + others);
        }
        true
    }

    /// The constants by which costs bound gaps.
    fn slack(&self) -> Slack<T> {
        let (RoundingError { relative, absolute, .. }, (factor, offset)) =
            (self.rounding, self.cost_margin());
        // The arithmetic below errs by a few units in the last place.
        let error = 8.0 * T::EPSILON.to_f64();
        let up = |x: f64| T::from_f64(x * (1.0 + error));
        Slack {
            // Doubled, as subnormal numbers have few digits.
            absolute: up(2.0 * absolute),
            least: T::from_f64((1.0 - relative) * (1.0 - error)),
            most: up((1.0 + relative) * factor),
            offset: up(absolute.sqrt() * (1.0 + relative) * factor + offset),
        }
    }
}

/// See [`Hamerly::slack`].
#[derive(Clone, Copy)]
struct Slack<T> {
    absolute: T,
    least: T,
    most: T,
    offset: T,
}

impl<T: SimdReal> Slack<T> {
    /// Lower bound on a row's gap, from the costs of its nearest and second nearest centroids; below 0 if there is
    /// none.
    #[inline(always)]
    fn gap(self, nearest: T, second: T) -> T {
        let least = (second - self.absolute).max(T::ZERO).sqrt() * self.least;
        let gap = least - (nearest.sqrt() * self.most + self.offset);
        // An infinite cost bounds no distance.
        if second < T::INFINITY { gap } else { -T::ONE }
    }
}

/// Rows of a task.
struct HamerlyBlock<'a, T> {
    values: &'a [T],
    /// The number of the first.
    first: usize,
    labels: &'a mut [u32],
    closed_at: &'a mut [f32],
}

/// The rows of a block whose gaps are closed.
#[inline(always)]
fn closed<T>(block: &HamerlyBlock<'_, T>, shrunk: &[f32], rows: &mut Vec<u32>) {
    rows.resize(block.labels.len(), 0);
    let (mut count, to) = (0, rows.as_mut_slice());
    for (row, (closed_at, label)) in block.closed_at.iter().zip(&*block.labels).enumerate() {
        // NaN counts as closed. Branch-free, as a branch could not be predicted.
        let is_open = *closed_at > shrunk[*label as usize];
        to[count] = row as u32;
        count += usize::from(!is_open);
    }
    rows.truncate(count);
}

/// Compares rows of a block with all centroids.
struct Compare<'a, 'b, T> {
    hamerly: &'a Hamerly<T>,
    centroids: &'a [T],
    has_labels: bool,
    /// Whether the gaps of rows are valid.
    is_known: bool,
    block: &'a mut HamerlyBlock<'b, T>,
    scratch: &'a mut HamerlyScratch<T>,
    moved: &'a mut Vec<Moved>,
}

/// Buffers that a thread reuses.
struct HamerlyScratch<T> {
    uncertain: Vec<u32>,
    columns: Vec<SoaColumn<T>>,
}

impl<T: SimdReal> WithSimd for Compare<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { hamerly, centroids, has_labels, is_known, block, scratch, moved } = self;
        let HamerlyScratch { uncertain, columns } = scratch;
        let (shrunk, slack) = (hamerly.shrunk.as_slice(), hamerly.slack());
        if is_known {
            closed(block, shrunk, uncertain);
        } else {
            uncertain.clear();
            uncertain.extend(0..block.labels.len() as u32);
        }
        if uncertain.len() * ONE_UNCERTAIN_IN > block.labels.len() {
            fetch(block.values);
        }
        for some in uncertain.chunks(SIDE_BY_SIDE) {
            // A partial chunk repeats its first row.
            let mut rows = [some[0] as usize; SIDE_BY_SIDE];
            rows.iter_mut().zip(some).for_each(|(to, row)| *to = *row as usize);
            gather(block.values, &rows, columns);
            let [nearest, second, number] = two_nearest(simd, columns, centroids);
            let mut gap = [0.0f32; SIDE_BY_SIDE];
            for (gap, (nearest, second)) in gap.iter_mut().zip(nearest.iter().zip(&second)) {
                *gap = slack.gap(*nearest, *second).to_f64() as f32;
            }
            let mut numbers = [0u32; SIDE_BY_SIDE];
            for (to, number) in numbers.iter_mut().zip(&number) {
                *to = number.whole();
            }
            for ((row, gap), number) in some.iter().zip(gap).zip(numbers) {
                let (label, row) = (&mut block.labels[*row as usize], *row as usize);
                if *label != number {
                    if has_labels {
                        moved.push(((block.first + row) as u32, *label));
                    }
                    *label = number;
                }
                // Three roundings, each with an error of at most half a unit in the last place.
                let at = shrunk[number as usize] + gap;
                block.closed_at[row] = at - 2.0 * f32::EPSILON * (at.abs() + gap.abs());
            }
        }
    }
}

/// Reads values into the cache sequentially, as hardware prefetchers expect.
#[inline(always)]
fn fetch<T: SimdReal>(values: &[T]) {
    let lines = values.iter().step_by(64 / size_of::<T>());
    std::hint::black_box(lines.fold(0.0, |all, x| all + x.to_f64()));
}

/// Transposes these rows into columns.
#[inline(always)]
fn gather<T: SimdReal>(values: &[T], rows: &[usize; SIDE_BY_SIDE], columns: &mut [SoaColumn<T>]) {
    let dim = columns.len();
    for (lane, row) in rows.iter().enumerate() {
        let row = &values[row * dim..][..dim];
        let (some, last) = row.as_chunks::<4>();
        let (of_some, of_last) = columns.as_chunks_mut::<4>();
        // Compilers would make slow scattered stores of one loop over all.
        for ([a, b, c, d], [v, w, x, y]) in of_some.iter_mut().zip(some) {
            (a.0[lane], b.0[lane], c.0[lane], d.0[lane]) = (*v, *w, *x, *y);
        }
        for (column, value) in of_last.iter_mut().zip(last) {
            column.0[lane] = *value;
        }
    }
}

/// For rows side by side, the costs of the nearest and of the second nearest centroid, and the number of the nearest.
#[inline(always)]
fn two_nearest<S: Simd, T: SimdReal>(
    simd: S,
    columns: &[SoaColumn<T>],
    centroids: &[T],
) -> [[T; SIDE_BY_SIDE]; 3] {
    let mut argmin = [[T::ZERO; SIDE_BY_SIDE]; 3];
    let none = T::splat(simd, T::INFINITY);
    fold_squares::<S, T, _>(
        simd,
        columns,
        centroids,
        [none, none, T::splat(simd, T::ZERO)],
        #[inline(always)]
        |[nearest, second, of_nearest], number, cost| {
            let lesser = T::lesser(simd, cost, nearest);
            let greater = T::where_less(simd, cost, nearest, nearest, cost);
            let of_nearest = T::where_less(simd, cost, nearest, number, of_nearest);
            [lesser, T::lesser(simd, second, greater), of_nearest]
        },
        #[inline(always)]
        |register, of_register| {
            for (to, from) in argmin.iter_mut().zip(of_register) {
                T::vectors_mut::<S>(to)[register] = from;
            }
        },
    );
    argmin
}

impl<T: SimdReal> Assigner for Hamerly<T> {
    fn assign(
        &mut self,
        centroids: &Rows,
        labels: &mut Vec<u32>,
        job: &Job,
    ) -> Result<Option<Assigned>> {
        let rows = self.rows.clone();
        let (Some(values), Some(of)) = (rows.reals::<T>(), centroids.reals::<T>()) else {
            return Ok(None);
        };
        let dim = rows.matrix().dim();
        let has_labels = !labels.is_empty();
        if !has_labels {
            self.before.clear();
        }
        let is_known = self.shrink(of, dim);
        // A round that is cut short leaves no bounds.
        self.before.clear();
        if !has_labels {
            // Not filled here: memory that is new is touched by all threads.
            *labels = vec![0; rows.len()];
        }
        let mut closed_at = std::mem::take(&mut self.closed_at);
        let parts = labels.chunks_mut(BLOCK).zip(closed_at.chunks_mut(BLOCK));
        let parts = parts.zip(values.chunks(BLOCK * dim)).enumerate();
        let scratch = || HamerlyScratch {
            uncertain: Vec::new(),
            columns: vec![SoaColumn([T::ZERO; SIDE_BY_SIDE]); dim],
        };
        let compared =
            try_in_parallel_with(parts, scratch, |scratch, (i, ((labels, closed_at), values))| {
                job.check()?;
                let block = &mut HamerlyBlock { values, first: i * BLOCK, labels, closed_at };
                let (hamerly, centroids, mut moved) = (&*self, of, Vec::new());
                let compare = Compare {
                    hamerly,
                    centroids,
                    has_labels,
                    is_known,
                    block,
                    scratch,
                    moved: &mut moved,
                };
                self.level.dispatch(compare);
                Ok((scratch.uncertain.len() as u64, moved))
            });
        self.closed_at = closed_at;
        let (compared, moved): (Vec<u64>, Vec<_>) = compared?.into_iter().unzip();
        let pairs = compared.iter().sum::<u64>() * centroids.len() as u64;
        self.before.extend_from_slice(of);
        Ok(Some(Assigned { moved: moved.concat(), work: Work { pairs, ..Work::default() } }))
    }

    fn distances(&self, centroids: &Rows, labels: &[u32], job: &Job) -> Result<Distances> {
        distances::<T>(&self.rows, centroids, labels, Metric::SqEuclidean, self.level, job)
    }

    fn undecided(&self, _: &Rows, labels: &[u32]) -> Option<Vec<u32>> {
        let is_open = |(closed_at, label): (&f32, &u32)| *closed_at > self.shrunk[*label as usize];
        let rows = (0..).zip(self.closed_at.iter().zip(labels)).filter(|(_, row)| !is_open(*row));
        Some(rows.map(|(row, _)| row).collect())
    }
}
