//! Rows with a cost each, and which of them some vectors among them may be nearer to.
//!
//! A search gives every query a reach, here every row has one: its cost. What the least sum of a pair within
//! reach owes to the reach, half its square in steps, is added to what the row's sum starts with. Then one
//! number for each vector decides, as in a search, and the same sweep finds the pairs.
//!
//! Products of rows are bounded by squares too: `‖q − x‖² = ‖q‖² + ‖x‖² − 2 q·x`.

use rayon::prelude::*;

use super::base::{Form, Quantised, Rounding, Sampled};
use super::query::Bound;
use crate::device::cpu::exact;
use crate::device::cpu::places::Places;
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::{Found, Group, Packed, Panels, Passed, ROWS, Starts};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Rows;
use crate::metric::{Metric, Sum};

/// Panels of a block of rows.
pub(in crate::device::cpu) const PANELS: usize = 16;
const BLOCK_ROWS: usize = PANELS * ROWS;

/// Bytes of rows that all vectors are compared with before the next ones: a part of an L2 cache.
const STEP_BYTES: usize = 256 << 10;

/// With more dimensions, sums of 8 bits leave no room for starts that let everything pass.
const MOST_DIM_OF_EIGHT: usize = 1 << 13;

/// The largest start, with which every pair passes, and no sum leaves 32 bits.
const MOST_START: f64 = 1.2e9;

/// Rows in whole numbers, and how their costs bound the pairs that count.
pub(in crate::device::cpu) struct Nearer {
    base: Quantised,
    metric: Metric,
    /// The inverse of the step, and a factor for the rounding of distances.
    inverse: f64,
    factor: f64,
    /// The residuals of a row and a vector, in steps.
    apart: f64,
    /// Of products: what the square of a distance exceeds twice the sum by.
    squares: f64,
}

/// Vectors that rows are compared with.
pub(in crate::device::cpu) struct Vectors<T> {
    /// Their values, one vector after the other.
    values: Vec<T>,
    packed: Packed,
    /// For each, the least sum that passes.
    least: Vec<i32>,
    /// For each, its square and offset, if its sums are exact.
    integral: Vec<Option<(f64, f64)>>,
    /// Those of which all pairs are computed.
    unbounded: Vec<u32>,
}

/// What a thread uses again.
#[derive(Default)]
pub(in crate::device::cpu) struct Scratch {
    passed: Found,
    pairs: Vec<(u32, u32)>,
}

impl Nearer {
    /// `None` if whole numbers do not suit these rows.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
    pub fn try_new<T: Lanes>(
        rows: &Rows,
        (metric, level): (Metric, Level),
        job: &Job,
    ) -> Result<Option<Self>> {
        let (Some(values), dim) = (rows.reals::<T>(), rows.matrix().dim()) else { return Ok(None) };
        if metric.sum() == Sum::Absolute {
            return Ok(None);
        }
        let sampled = Sampled::new(values, dim, job)?;
        let of = |form| {
            let kind = (Metric::SqEuclidean, level, form, None);
            let places = Places::as_given(rows.len());
            Quantised::try_new((rows, places), &sampled, kind, job)
        };
        let eight = if dim <= MOST_DIM_OF_EIGHT { of(Form::Eight)? } else { None };
        let Some(base) = (if eight.is_some() { eight } else { of(Form::Sixteen)? }) else {
            return Ok(None);
        };
        let Rounding { relative, absolute, .. } = Rounding::of::<T>(dim as f64);
        let apart = (2.0 * base.residual + absolute.sqrt()) / base.scale.step;
        let squares = match metric.sum() {
            Sum::Squares => 0.0,
            _ => 2.0 * most_square(values, dim) * (1.0 + 2.0 * relative) + 4.0 * absolute,
        };
        let (inverse, factor) = (1.0 / base.scale.step, 1.0 + relative);
        Ok(Some(Self { base, metric, inverse, factor, apart, squares }))
    }

    /// What sums start with before rows have a cost: as many as there are panels.
    pub fn starts(&self) -> &[Starts] {
        &self.base.starts
    }

    /// What the sum of a row of this cost starts with.
    #[inline]
    pub fn start<T: Lanes>(&self, row: usize, cost: T) -> i32 {
        let reach = self.metric.reach(cost).to_f64();
        let square = match self.metric.sum() {
            Sum::Squares => reach,
            _ => self.squares + 2.0 * reach,
        };
        let own = square.max(0.0).sqrt() * (self.factor * self.inverse) + self.apart;
        let start = f64::from(self.base.starts[row / ROWS].0[row % ROWS]);
        // Rounded up; not a number is no bound.
        let raised = start + own * own * (0.5 + 1e-9) + 1.0;
        (if raised < MOST_START { raised } else { MOST_START }) as i32
    }

    fn is_decided(&self, row: usize) -> bool {
        self.base.decided[row / ROWS] >> (row % ROWS) & 1 == 1
    }

    /// Rows, by their numbers, as vectors to be compared with.
    pub fn vectors<T: Lanes>(&self, rows: &[u32]) -> Vectors<T> {
        let (dim, all) = (self.base.rows.matrix().dim(), self.values::<T>());
        let (mut values, mut words) = (Vec::with_capacity(rows.len() * dim), Vec::new());
        let (mut least, mut integral, mut unbounded) = (Vec::new(), Vec::new(), Vec::new());
        for (number, row) in rows.iter().enumerate() {
            let own = &all[*row as usize * dim..][..dim];
            values.extend_from_slice(own);
            let query = self.base.query(own, &mut words);
            match query.bound {
                Bound::Squares { square, .. } if self.is_decided(*row as usize) => {
                    least.push((square / 2.0 + query.offset - 3.0) as i32);
                    integral.push(query.integral.map(|square| (square, query.offset)));
                }
                _ => {
                    // Its products could leave 32 bits.
                    words[number * self.base.words()..].fill(0);
                    unbounded.push(number as u32);
                    least.push(i32::MAX);
                    integral.push(None);
                }
            }
        }
        let packed = self.base.level.pack(&words, self.base.words());
        Vectors { values, packed, least, integral, unbounded }
    }

    /// Calls `found` with each vector, by its number, each row of a block, and their distance, where that is less
    /// than the row's cost. `starts` and `costs` are those of the block's rows.
    pub fn in_block<T: Lanes>(
        &self,
        (block, starts, costs): (usize, &[Starts], &[T]),
        vectors: &Vectors<T>,
        scratch: &mut Scratch,
        mut found: impl FnMut(usize, usize, T),
    ) {
        let (first, panels) = (block * BLOCK_ROWS, block * PANELS);
        let Scratch { passed, pairs } = scratch;
        pairs.clear();
        for number in &vectors.unbounded {
            pairs.extend((0..costs.len()).map(|row| (*number, (first + row) as u32)));
        }
        let words = self.base.words();
        let step = (STEP_BYTES / (words * size_of::<Group>())).max(1);
        for from in (0..starts.len()).step_by(step) {
            let some = from..starts.len().min(from + step);
            let groups =
                &self.base.groups[(panels + some.start) * words..(panels + some.end) * words];
            let swept = Panels { groups, starts: &starts[some.clone()] };
            let width = self.base.scale.width;
            self.base.level.sweep(width, swept, &vectors.packed, &vectors.least, passed);
            for Passed { query, row, sum } in passed.iter() {
                let row = some.start * ROWS + row as usize;
                if !self.is_decided(first + row) {
                    continue;
                }
                let raised = starts[row / ROWS].0[row % ROWS];
                match self.integral(vectors, query as usize, first + row, sum - raised) {
                    Some(distance) if distance < costs[row] => found(query as usize, row, distance),
                    Some(_) => {}
                    None => pairs.push((query, (first + row) as u32)),
                }
            }
        }
        let outliers = self.base.outliers(first..first + costs.len());
        for number in (0..vectors.least.len() as u32).filter(|x| !vectors.unbounded.contains(x)) {
            pairs.extend(outliers.iter().map(|row| (number, *row)));
        }
        exact::Pairs {
            metric: self.metric,
            queries: &vectors.values,
            base: self.values(),
            dim: self.base.rows.matrix().dim(),
            pairs,
            found: |(vector, row): (u32, u32), sum: T| {
                let (row, distance) = (row as usize - first, self.metric.distance(sum));
                if distance < costs[row] {
                    found(vector as usize, row, distance);
                }
            },
        }
        .compute(self.base.level);
    }

    /// The distance of a pair of whole rows, if its sum of products decides it.
    fn integral<T: Lanes>(
        &self,
        vectors: &Vectors<T>,
        vector: usize,
        row: usize,
        product: i32,
    ) -> Option<T> {
        let (square, offset) = vectors.integral[vector]?;
        let sum = f64::from(product) + f64::from(self.base.starts[row / ROWS].0[row % ROWS]);
        let squares = self.base.integral_square::<T>(square, row, sum - offset)?;
        (self.metric.sum() == Sum::Squares).then(|| self.metric.distance(squares))
    }

    fn values<T: Lanes>(&self) -> &[T] {
        self.base.rows.reals().unwrap_or_default()
    }
}

/// The square of the longest row, from zero: directions that are near each other are nearer to their centre, but a bound
/// by way of it says less of their products.
fn most_square<T: Lanes>(values: &[T], dim: usize) -> f64 {
    let square = |row: &[T]| {
        let (some, last) = row.as_chunks::<8>();
        let mut sums = [0.0; 8];
        for some in some {
            sums.iter_mut().zip(some).for_each(|(sum, x)| *sum += x.to_f64() * x.to_f64());
        }
        let last = last.iter().map(|x| x.to_f64() * x.to_f64());
        sums.into_iter().chain(last).sum::<f64>()
    };
    let of_block = |rows: &[T]| rows.chunks_exact(dim).map(square).fold(0.0, f64::max);
    let blocks = values.par_chunks(BLOCK_ROWS * dim).map(of_block);
    blocks.reduce(|| 0.0, f64::max) * (1.0 + 1e-9)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::matrix::{Matrix, Real};
    use crate::random::Random;

    #[test]
    fn products_of_directions_near_each_other_are_bounded_by_their_lengths() {
        let (count, dim, mut random) = (500, 40, Random::new(1));
        let mut values: Vec<f32> = (0..count * dim)
            .map(|i| if i % dim < 9 { 1.0 } else { 0.3 * random.normal() as f32 })
            .collect();
        for row in values.chunks_exact_mut(dim) {
            Metric::Cosine.prepare(row).unwrap();
        }
        let rows = Rows::all(Arc::new(Matrix::new(f32::elements(values), count, dim)));
        for level in Level::all() {
            let nearer = Nearer::try_new::<f32>(&rows, (Metric::Cosine, level), &Job::default());
            let squares = nearer.unwrap().unwrap().squares;
            assert!((2.0 - 1e-6..2.001).contains(&squares), "{squares}, {level:?}");
        }
    }
}
