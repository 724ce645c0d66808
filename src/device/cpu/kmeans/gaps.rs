//! The nearest of few centroids, round after round: a row is compared again once another centroid may be nearer.
//!
//! Of every row is known by how much the second nearest centroid is farther than the nearest, at least. That gap shrinks
//! by how far centroids move. As long as it is open, the row stays where it is; then it is compared with all.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::rounds::{distances, down, up};
use crate::device::contract::{Assigned, Assigner, Distances, Work};
use crate::device::cpu::rounded::base::Rounding;
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::transposed::{Column, SIDE_BY_SIDE, squares};
use crate::error::{Error, Result};
use crate::job::{Job, Reserved};
use crate::matrix::Rows;
use crate::metric::Metric;

/// Rows of a task.
const BLOCK: usize = 4096;

/// Centroids that are compared together.
const TOGETHER: usize = 4;

/// With more centroids, their numbers might not be exact in float32, and other ways are faster.
const MOST: usize = 4096;

/// See the [module](self).
pub(in crate::device::cpu) struct Gaps<T> {
    rows: Rows,
    level: Level,
    gaps: Vec<f32>,
    /// The centroids of the last round.
    before: Vec<T>,
    /// The length of the longest row.
    longest: f64,
    rounding: Rounding,
    _reserved: Reserved,
}

impl<T: Lanes> Gaps<T> {
    /// `None` without memory, for many centroids, and for other metrics.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn try_new(
        rows: &Rows,
        k: usize,
        (metric, level): (Metric, Level),
        job: &Job,
    ) -> Result<Option<Self>> {
        let (Some(values), dim) = (rows.reals::<T>(), rows.matrix().dim()) else { return Ok(None) };
        if metric != Metric::SqEuclidean || k > MOST {
            return Ok(None);
        }
        let reserved = match job.reserve("gaps between centroids", rows.len() * size_of::<f32>()) {
            Err(Error::HostMemory { .. }) => return Ok(None),
            reserved => reserved?,
        };
        let longest = values.par_chunks_exact(dim).map(length).reduce(|| 0.0, f64::max);
        job.check()?;
        Ok(Some(Self {
            rows: rows.clone(),
            level,
            gaps: vec![0.0; rows.len()],
            before: Vec::new(),
            longest,
            rounding: Rounding::of::<T>(dim as f64),
            _reserved: reserved,
        }))
    }

    /// By which factor and by how much distances from two centroids of equal costs differ.
    fn apart(&self) -> (f64, f64) {
        let Rounding { relative, absolute, .. } = self.rounding;
        (1.0 + 2.0 * relative, 3.0 * absolute.sqrt())
    }

    /// By how much the gaps of each centroid's rows shrink at most; `None` if nothing is known of them.
    fn shrinking(&self, centroids: &[T], dim: usize) -> Option<Vec<f32>> {
        let longest = centroids.chunks_exact(dim).map(length).fold(self.longest, f64::max);
        // Costs that overflow are equal, whatever the distances.
        let is_finite = 4.0 * longest < (T::MAX.to_f64() / 4.0).sqrt();
        if !is_finite || self.before.len() != centroids.len() {
            return None;
        }
        let pairs = centroids.chunks_exact(dim).zip(self.before.chunks_exact(dim));
        let moved = pairs.map(|(now, before)| {
            let apart = now.iter().zip(before).map(|(a, b)| a.to_f64() - b.to_f64());
            apart.map(|x| x * x).sum::<f64>().sqrt() * (1.0 + 1e-9) + f64::MIN_POSITIVE.sqrt()
        });
        let moved: Vec<f64> = moved.collect();
        let farthest = (0..moved.len()).max_by(|a, b| moved[*a].total_cmp(&moved[*b]))?;
        let but_that = moved.iter().enumerate().filter(|(i, _)| *i != farthest);
        let second = but_that.fold(0.0, |most, (_, moved)| moved.max(most));
        let of = |(centroid, own): (usize, &f64)| {
            let others = if centroid == farthest { second } else { moved[farthest] };
            up(own * self.apart().0 + others)
        };
        Some(moved.iter().enumerate().map(of).collect())
    }

    /// The gap of a row whose nearest and second nearest centroids cost this much.
    #[inline(always)]
    fn gap(&self, (nearest, second): (&T, &T)) -> f32 {
        let (Rounding { relative, absolute, .. }, (factor, apart)) = (self.rounding, self.apart());
        let most = (nearest.to_f64().sqrt() + absolute.sqrt()) * (1.0 + relative);
        let least = (second.to_f64() - absolute).max(0.0).sqrt() * (1.0 - relative);
        let gap = down((least - (most * factor + apart)).max(0.0));
        // How far apart infinite costs are is not known.
        if *second < T::INFINITY { gap } else { 0.0 }
    }
}

/// Rows of a task.
struct Block<'a, T> {
    values: &'a [T],
    labels: &'a mut [u32],
    gaps: &'a mut [f32],
}

/// Shrinks the gaps of a block's rows; finds the rows that have none.
#[inline(always)]
fn shrink<T>(block: &mut Block<'_, T>, shrinking: &[f32], uncertain: &mut Vec<u32>) {
    uncertain.resize(block.labels.len(), 0);
    let mut found = 0;
    for (row, (gap, label)) in block.gaps.iter_mut().zip(block.labels.iter()).enumerate() {
        *gap = (*gap - shrinking[*label as usize]) * (1.0 - 2.0 * f32::EPSILON);
        // Without a branch, which could not be foreseen.
        uncertain[found] = row as u32;
        found += usize::from(*gap <= 0.0);
    }
    uncertain.truncate(found);
}

/// Compares rows of a block with all centroids.
struct Compare<'a, 'b, T> {
    gaps: &'a Gaps<T>,
    centroids: &'a [T],
    block: &'a mut Block<'b, T>,
    shrinking: Option<&'a [f32]>,
    uncertain: &'a mut Vec<u32>,
    columns: &'a mut Vec<Column<T>>,
}

impl<T: Lanes> WithSimd for Compare<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { gaps, centroids, block, shrinking, uncertain, columns } = self;
        uncertain.clear();
        match shrinking {
            Some(shrinking) => shrink(block, shrinking, uncertain),
            None => uncertain.extend(0..block.labels.len() as u32),
        }
        let dim = columns.len();
        for some in uncertain.chunks(SIDE_BY_SIDE) {
            // Of a last few, the first is compared more than once.
            let mut starts = [some[0] as usize * dim; SIDE_BY_SIDE];
            starts.iter_mut().zip(some).for_each(|(start, row)| *start = *row as usize * dim);
            for (j, column) in columns.iter_mut().enumerate() {
                let lanes = column.0.iter_mut().zip(&starts);
                lanes.for_each(|(to, start)| *to = block.values[start + j]);
            }
            let mut nearest = [T::INFINITY; SIDE_BY_SIDE];
            let (mut second, mut number) = (nearest, [T::ZERO; SIDE_BY_SIDE]);
            let registers = T::vectors_mut::<S>(&mut nearest).iter_mut();
            let registers = registers.zip(T::vectors_mut::<S>(&mut second));
            let registers = registers.zip(T::vectors_mut::<S>(&mut number)).enumerate();
            for (register, ((nearest, second), number)) in registers {
                let mut found = (*nearest, *second, *number);
                let of = (&columns[..], register);
                let parts = centroids.chunks_exact(TOGETHER * dim);
                let last = parts.remainder();
                let done = (centroids.len() - last.len()) / dim;
                for (i, part) in parts.enumerate() {
                    let sums = squares::<S, T, TOGETHER>(simd, of.0, of.1, part);
                    found = nearer::<S, T, TOGETHER>(simd, i * TOGETHER, sums, found);
                }
                for (i, part) in last.chunks_exact(dim).enumerate() {
                    let sums = squares::<S, T, 1>(simd, of.0, of.1, part);
                    found = nearer::<S, T, 1>(simd, done + i, sums, found);
                }
                (*nearest, *second, *number) = found;
            }
            let mut open = [0.0; SIDE_BY_SIDE];
            let both = nearest.iter().zip(&second);
            open.iter_mut().zip(both).for_each(|(gap, both)| *gap = gaps.gap(both));
            for ((row, gap), number) in some.iter().zip(open).zip(number) {
                block.labels[*row as usize] = number.to_f64() as u32;
                block.gaps[*row as usize] = gap;
            }
        }
    }
}

/// Updates the least two values so far and the number of the least with some more values, numbered from this one on.
#[inline(always)]
fn nearer<S: Simd, T: Lanes, const COUNT: usize>(
    simd: S,
    first: usize,
    sums: [T::Vector<S>; COUNT],
    (mut nearest, mut second, mut number): (T::Vector<S>, T::Vector<S>, T::Vector<S>),
) -> (T::Vector<S>, T::Vector<S>, T::Vector<S>) {
    for (i, sum) in sums.into_iter().enumerate() {
        let own = T::splat(simd, T::from_f64((first + i) as f64));
        number = T::where_less(simd, (sum, nearest), own, number);
        second = T::lesser(simd, second, T::where_less(simd, (sum, nearest), nearest, sum));
        nearest = T::lesser(simd, sum, nearest);
    }
    (nearest, second, number)
}

impl<T: Lanes> Assigner for Gaps<T> {
    fn assign(
        &mut self,
        centroids: &Rows,
        near: Option<&[u32]>,
        job: &Job,
    ) -> Result<Option<Assigned>> {
        let (Some(values), Some(of)) = (self.rows.reals::<T>(), centroids.reals::<T>()) else {
            return Ok(None);
        };
        let dim = self.rows.matrix().dim();
        let shrinking = near.and_then(|_| self.shrinking(of, dim));
        // What is cut short begins anew.
        self.before.clear();
        let mut labels = near.map_or_else(|| vec![0; self.rows.len()], <[u32]>::to_vec);
        let mut gaps = std::mem::take(&mut self.gaps);
        let parts = labels.par_chunks_mut(BLOCK).zip(gaps.par_chunks_mut(BLOCK));
        let parts = parts.zip(values.par_chunks(BLOCK * dim));
        let scratch = || (Vec::new(), vec![Column([T::ZERO; SIDE_BY_SIDE]); dim]);
        let compared = parts.map_init(scratch, |scratch, ((labels, gaps), values)| {
            job.check()?;
            let (uncertain, columns) = (&mut scratch.0, &mut scratch.1);
            let block = &mut Block { values, labels, gaps };
            let (centroids, shrinking) = (of, shrinking.as_deref());
            let gaps = &*self;
            pulp::Arch::new().dispatch(Compare {
                gaps,
                centroids,
                block,
                shrinking,
                uncertain,
                columns,
            });
            Ok(uncertain.len() as u64)
        });
        let compared: Result<u64> = compared.try_reduce(|| 0, |a, b| Ok(a + b));
        self.gaps = gaps;
        let work = Work { pairs: compared? * centroids.len() as u64, ..Work::default() };
        self.before.extend_from_slice(of);
        Ok(Some(Assigned { labels, work }))
    }

    fn distances(&self, centroids: &Rows, labels: &[u32], job: &Job) -> Result<Distances> {
        distances::<T>((&self.rows, centroids), labels, (Metric::SqEuclidean, self.level), job)
    }
}

fn length<T: Lanes>(row: &[T]) -> f64 {
    row.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>().sqrt()
}
