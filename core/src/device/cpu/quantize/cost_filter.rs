//! Rows with a radius each, from their costs, and the pairs of a vector and a row within it.
//!
//! In a search, each query has a radius; here, each row has one: r, whose square is the row's cost. A pair passes if
//! `q·x ≥ (‖q‖² + ‖x‖² − r²) / 2`. `r² / 2`, in squared steps, is folded into the row's initial sum, so that one
//! threshold per vector remains, and the sweep of a search finds the pairs. For many vectors, a prefilter by fewer
//! bits comes first, in whose steps initial sums are raised.
//!
//! Products of rows are bounded by squares too: `‖q − x‖² = ‖q‖² + ‖x‖² − 2 q·x`.

use std::ops::Range;

use super::base::{CodeForm, LayoutSpec, QuantizedBase, RoundingError, Sampled};
use super::prefilter::{BasePanels, PrefilterQuantizer, QueryCodes};
use super::query_bound::Bound;
use crate::device::cpu::exact;
use crate::device::cpu::plan::PREFILTERED_VECTORS;
use crate::device::cpu::row_permutation::RowPermutation;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::{CodePanels, InitialSums, PassedPair, PassedPairs, ROWS};
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::metric::{Metric, Sum};
use crate::parallel::in_parallel;
use crate::rows::Rows;

/// Panels of a block of rows.
pub(in crate::device::cpu) const PANELS: usize = 16;
const BLOCK_ROWS: usize = PANELS * ROWS;

/// Bytes of rows in a tile, which all vectors are compared with: a part of an L2 cache.
const STEP_BYTES: usize = 256 << 10;

/// With more dimensions, sums of 8 bits leave no room for starts that let everything pass.
const MOST_DIM_OF_EIGHT: usize = 1 << 13;

/// The largest start: every pair passes, and no sum overflows 32 bits.
const MOST_START: f64 = 1.2e9;

/// The filter by costs: quantised rows, and the conversion of their costs to initial sums.
pub(in crate::device::cpu) struct CostFilter {
    base: QuantizedBase,
    metric: Metric,
    /// The inverse of the step, and a factor for the rounding of distances.
    inverse: f64,
    factor: f64,
    /// The residuals of a row and a vector, in steps.
    residuals: f64,
    /// For products: lower and upper bound on `‖q − x‖² − 2 · sum`.
    squares: [f64; 2],
    rounding: RoundingError,
}

/// Vectors that rows are compared with.
pub(in crate::device::cpu) struct FilterVectors<T> {
    /// Their values, one vector after the other.
    values: Vec<T>,
    forms: QueryCodes,
    /// For each, its threshold: the least sum that passes.
    least: Vec<i32>,
    /// Thresholds that all pairs pass.
    any: Vec<i32>,
    /// For each, its quantised form, if it has bounds.
    bounds: Vec<Option<VectorCode>>,
    /// Vectors without bounds, of which all pairs are computed.
    unbounded: Vec<u32>,
}

/// A quantised vector.
#[derive(Debug, Clone, Copy)]
struct VectorCode {
    square: f64,
    /// The offset that the unsigned base adds to every product.
    offset: f64,
    /// Whether it equals its codes.
    is_exact: bool,
}

/// A block of rows with their costs.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct CostBlock<'a, T> {
    /// The number of the block.
    pub block: usize,
    /// The rows' initial sums, one element for each panel.
    pub starts: &'a [InitialSums],
    pub costs: &'a [T],
}

/// A pair whose distance may be below the row's cost, by the vector's number and the row's number in its block.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct Hit {
    pub vector: u32,
    pub row: u32,
    /// Lower and upper bound on their distance, equal if it is known.
    pub least: f64,
    pub most: f64,
}

/// Buffers that a thread reuses.
#[derive(Default)]
pub(in crate::device::cpu) struct FilterScratch {
    passed: PassedPairs,
    pairs: Vec<(u32, u32)>,
}

impl<T> FilterVectors<T> {
    pub fn len(&self) -> usize {
        self.bounds.len()
    }
}

impl CostFilter {
    /// Quantises rows for about `count` vectors, most of which are nearer to few rows only. `None` if quantisation
    /// does not suit these rows.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
    pub fn try_new<T: SimdReal>(
        rows: &Rows,
        metric: Metric,
        level: Level,
        count: usize,
        job: &Job,
    ) -> Result<Option<Self>> {
        let (Some(values), dim) = (rows.reals::<T>(), rows.matrix().dim()) else { return Ok(None) };
        // Bounds are those of squares and of products, not of roots.
        if metric.sum() == Sum::Absolute || metric == Metric::L2 {
            return Ok(None);
        }
        let sampled = Sampled::new(values, dim, job)?;
        let of = |form| {
            let spec = LayoutSpec { metric: Metric::SqEuclidean, level, k: None };
            let places = RowPermutation::identity(rows.len());
            QuantizedBase::try_new(rows, places, &sampled, form, spec, job)
        };
        // Fewer bits come from memory in less time, but pairs that pass need their rows in 16 bits, too.
        let forms = [
            (CodeForm::Eight, dim <= MOST_DIM_OF_EIGHT),
            (
                CodeForm::Prefiltered,
                count >= PREFILTERED_VECTORS && PrefilterQuantizer::is_short(dim, level),
            ),
            (CodeForm::Sixteen, true),
        ];
        let mut base = None;
        for (form, _) in forms.into_iter().filter(|(_, suits)| *suits) {
            if base.is_none() {
                base = match of(form) {
                    // Memory may suffice for the next form.
                    Err(Error::HostMemory { .. }) if form == CodeForm::Prefiltered => None,
                    built => built?,
                };
            }
        }
        let Some(base) = base else { return Ok(None) };
        let rounding = RoundingError::of::<T>(dim as f64);
        let RoundingError { relative, absolute, .. } = rounding;
        let residuals = (2.0 * base.residual + absolute.sqrt()) / base.quantizer.step;
        let squares = match metric.sum() {
            Sum::Squares => [0.0; 2],
            _ => {
                let [least, most] = squares(values, dim);
                let error = 4.0 * (relative * most + absolute);
                [2.0 * least - error, 2.0 * most + error]
            }
        };
        let (inverse, factor) = (1.0 / base.quantizer.step, 1.0 + relative);
        Ok(Some(Self { base, metric, inverse, factor, residuals, squares, rounding }))
    }

    /// The initial sums of rows without a cost, one element for each panel.
    pub fn starts(&self) -> &[InitialSums] {
        self.base.prefilter.as_ref().map_or(&self.base.starts, |prefilter| &prefilter.starts)
    }

    /// The initial sum of a row of this cost: in the prefilter, if there is one.
    #[inline]
    pub fn start<T: SimdReal>(&self, row: usize, cost: T) -> i32 {
        let largest_sum = self.metric.largest_sum(cost).to_f64();
        let square = match self.metric.sum() {
            Sum::Squares => largest_sum,
            _ => self.squares[1] + 2.0 * largest_sum,
        };
        let radius = square.max(0.0).sqrt() * (self.factor * self.inverse) + self.residuals;
        let start = self.starts()[row / ROWS].0[row % ROWS];
        // Rounded up; NaN does not bound.
        let by = radius * radius * (0.5 + 1e-9) + 1.0;
        let raised = match &self.base.prefilter {
            Some(prefilter) => prefilter.quantizer.raised(start, by),
            None => f64::from(start) + by,
        };
        (if raised < MOST_START { raised } else { MOST_START }) as i32
    }

    fn is_decided(&self, row: usize) -> bool {
        self.base.decided[row / ROWS] >> (row % ROWS) & 1 == 1
    }

    /// The vectors of the rows with these numbers.
    pub fn vectors<T: SimdReal>(&self, rows: &[u32]) -> FilterVectors<T> {
        let (dim, all) = (self.base.rows.matrix().dim(), self.values::<T>());
        let (mut values, mut words) = (Vec::with_capacity(rows.len() * dim), Vec::new());
        let (mut least, mut bounds, mut unbounded) = (Vec::new(), Vec::new(), Vec::new());
        for (number, row) in rows.iter().enumerate() {
            let before = words.len();
            let vector = &all[*row as usize * dim..][..dim];
            values.extend_from_slice(vector);
            let query = self.base.query(vector, &mut words);
            match query.bound {
                Bound::Squares { square, .. } if self.is_decided(*row as usize) => {
                    least.push((square / 2.0 + query.offset - 3.0) as i32);
                    let (offset, is_exact) = (query.offset, query.integral.is_some());
                    bounds.push(Some(VectorCode { square, offset, is_exact }));
                }
                _ => {
                    // Its products could overflow 32 bits.
                    words[before..].fill(0);
                    unbounded.push(number as u32);
                    least.push(i32::MAX);
                    bounds.push(None);
                }
            }
        }
        let (mut forms, any) = (self.base.forms(&words, rows.len()), vec![i32::MIN; rows.len()]);
        if let (Some(prefilter), QueryCodes::Prefiltered(queries)) =
            (&self.base.prefilter, &mut forms)
        {
            prefilter.limit(queries, &least);
        }
        FilterVectors { values, forms, least, any, bounds, unbounded }
    }

    /// Calls `on_hit` with the pairs of a vector and a row of a block whose distance may be less than the row's cost.
    pub fn in_block<T: SimdReal>(
        &self,
        of: CostBlock<'_, T>,
        vectors: &FilterVectors<T>,
        scratch: &mut FilterScratch,
        mut on_hit: impl FnMut(Hit),
    ) {
        let CostBlock { block, starts, costs } = of;
        let (first, panels) = (block * BLOCK_ROWS, block * PANELS);
        let FilterScratch { passed, pairs } = scratch;
        pairs.clear();
        for number in &vectors.unbounded {
            pairs.extend((0..costs.len()).map(|row| (*number, row as u32)));
        }
        let step = (STEP_BYTES / CodePanels::bytes_of(self.base.words())).max(1);
        for from in (0..starts.len()).step_by(step) {
            let some = from..starts.len().min(from + step);
            let of_sums = self.sweep(panels, some.clone(), starts, vectors, passed);
            for PassedPair { query: vector, row, sum } in passed.iter() {
                let row = row as usize;
                let (start, row) = (of_sums[row / ROWS].0[row % ROWS], some.start * ROWS + row);
                if !self.is_decided(first + row) {
                    continue;
                }
                let product = sum - start;
                let [least, most] = self.distance(vectors, vector as usize, first + row, product);
                if least < costs[row].to_f64() {
                    on_hit(Hit { vector, row: row as u32, least, most });
                }
            }
        }
        let outliers = self.base.outliers(first..first + costs.len());
        for number in (0..vectors.bounds.len() as u32).filter(|x| !vectors.unbounded.contains(x)) {
            pairs.extend(outliers.iter().map(|row| (number, *row - first as u32)));
        }
        let all = std::mem::take(pairs);
        self.compute(of, vectors, all.iter().copied(), scratch, |vector, row, distance| {
            let distance = distance.to_f64();
            on_hit(Hit { vector, row, least: distance, most: distance });
        });
        scratch.pairs = all;
    }

    /// Finds the pairs of all vectors and some panels, counted from `first`, whose distances may be below their rows'
    /// costs, with their sums of full width. Returns the initial values of these sums. `starts` are those of the
    /// panels from `first` on.
    fn sweep<'a, T>(
        &'a self,
        first: usize,
        some: Range<usize>,
        starts: &'a [InitialSums],
        vectors: &FilterVectors<T>,
        passed: &mut PassedPairs,
    ) -> &'a [InitialSums] {
        let (level, starts) = (self.base.level, &starts[some.clone()]);
        let panels = first + some.start..first + some.end;
        match (&self.base.prefilter, &vectors.forms) {
            (Some(prefilter), QueryCodes::Prefiltered(queries)) => {
                prefilter.candidates(panels.clone(), starts, queries, &[], passed);
                prefilter.prefetch_passed(panels.clone(), passed);
                let (starts, decided) = (&*self.base.starts, &*self.base.decided);
                let base = BasePanels { panels: panels.clone(), starts, decided };
                prefilter.retain(base, queries, &vectors.any, passed);
                &self.base.starts[panels]
            }
            (_, QueryCodes::Packed(packed)) => {
                let swept = CodePanels { starts, ..self.base.panels(panels) };
                level.panel_dot_threshold(self.base.width(), swept, packed, &vectors.least, passed);
                starts
            }
            _ => unreachable!("vectors are of the base's form"),
        }
    }

    /// Computes the distances of some pairs of a vector and a row of a block, and calls `on_pair` with each pair whose
    /// distance is below the row's cost.
    pub fn compute<T: SimdReal>(
        &self,
        CostBlock { block, costs, .. }: CostBlock<'_, T>,
        vectors: &FilterVectors<T>,
        pairs: impl Iterator<Item = (u32, u32)>,
        scratch: &mut FilterScratch,
        mut on_pair: impl FnMut(u32, u32, T),
    ) {
        let first = (block * BLOCK_ROWS) as u32;
        scratch.pairs.clear();
        scratch.pairs.extend(pairs.map(|(vector, row)| (vector, first + row)));
        exact::PairSums {
            metric: self.metric,
            queries: &vectors.values,
            base: self.values(),
            dim: self.base.rows.matrix().dim(),
            pairs: &scratch.pairs,
            on_sum: |(vector, row): (u32, u32), sum: T| {
                let (row, distance) = (row - first, self.metric.distance(sum));
                if distance < costs[row as usize] {
                    on_pair(vector, row, distance);
                }
            },
        }
        .compute(self.base.level);
    }

    /// Lower and upper bound on the distance of a pair, from the product of their codes.
    fn distance<T: SimdReal>(
        &self,
        vectors: &FilterVectors<T>,
        vector: usize,
        row: usize,
        product: i32,
    ) -> [f64; 2] {
        let Some(VectorCode { square, offset, is_exact }) = vectors.bounds[vector] else {
            return [0.0, f64::INFINITY];
        };
        let start = self.base.starts[row / ROWS].0[row % ROWS];
        let sum = f64::from(product) + f64::from(start) - offset;
        if is_exact
            && self.metric.sum() == Sum::Squares
            && let Some(squares) = self.base.integral_square::<T>(square, row, sum)
        {
            return [self.metric.distance(squares).to_f64(); 2];
        }
        let RoundingError { relative, absolute, .. } = self.rounding;
        // A start may have lost a half.
        let between = square - 2.0 * sum;
        let least = ((between.max(0.0).sqrt() - self.residuals) / self.inverse).max(0.0);
        let most = ((between + 1.0).max(0.0).sqrt() + self.residuals) / self.inverse;
        let [least, most] = [least * least * (1.0 - 1e-9), most * most * (1.0 + 1e-9)];
        match self.metric.sum() {
            Sum::Squares => {
                let least = (least * (1.0 - relative) - absolute).max(0.0);
                let most = most * (1.0 + relative) + absolute;
                // Sums near the largest number may overflow.
                [least, if most < T::MAX.to_f64() / 4.0 { most } else { f64::INFINITY }]
            }
            _ => {
                let sums = [(least - self.squares[1]) / 2.0, (most - self.squares[0]) / 2.0];
                // Distances are rounded once more.
                let error = 4.0 * T::EPSILON.to_f64();
                let [least, most] = sums.map(|sum| self.metric.distance(sum));
                [least - error, most + error]
            }
        }
    }

    fn values<T: SimdReal>(&self) -> &[T] {
        self.base.rows.reals().unwrap_or_default()
    }
}

/// The squared lengths of the shortest and the longest row, from the origin. Similar directions are nearer to their
/// centre, but lengths from there bound their products less closely.
fn squares<T: SimdReal>(values: &[T], dim: usize) -> [f64; 2] {
    let square = |row: &[T]| {
        let (some, last) = row.as_chunks::<8>();
        let mut sums = [0.0; 8];
        for some in some {
            sums.iter_mut().zip(some).for_each(|(sum, x)| *sum += x.to_f64() * x.to_f64());
        }
        let last = last.iter().map(|x| x.to_f64() * x.to_f64());
        sums.into_iter().chain(last).sum::<f64>()
    };
    let both = |[least, most]: [f64; 2], [a, b]: [f64; 2]| [least.min(a), most.max(b)];
    let none = [f64::INFINITY, 0.0];
    let of_block = |rows: &[T]| rows.chunks_exact(dim).map(|row| [square(row); 2]).fold(none, both);
    let blocks = in_parallel(values.chunks(BLOCK_ROWS * dim), of_block);
    let [least, most] = blocks.into_iter().fold(none, both);
    [least * (1.0 - 1e-9), most * (1.0 + 1e-9)]
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
            let filter =
                CostFilter::try_new::<f32>(&rows, Metric::Cosine, level, 1, &Job::default());
            let squares = filter.unwrap().unwrap().squares;
            let are_right = squares[0] > 1.999 && squares[0] < squares[1] && squares[1] < 2.001;
            assert!(are_right, "{squares:?}, {level:?}");
        }
    }

    #[test]
    fn distances_are_within_their_bounds() {
        let (count, dim, job) = (2000, 40, Job::default());
        for kind in 0..5 {
            let mut random = Random::new(kind);
            let mut value = |row: usize| match kind {
                0 | 3 => random.normal(),
                // Some squares overflow.
                4 => random.normal() * 2e18,
                1 => random.below(200) as f64,
                _ => random.normal() * if row == 77 { 1e9 } else { 1.0 },
            };
            let values = (0..count * dim).map(|i| value(i / dim) as f32);
            let mut values: Vec<f32> = values.collect();
            let metric = if kind == 3 { Metric::Cosine } else { Metric::SqEuclidean };
            values.chunks_exact_mut(dim).for_each(|row| metric.prepare(row).unwrap());
            let rows = Rows::all(Arc::new(Matrix::new(f32::elements(values.clone()), count, dim)));
            let row = |row: usize| &values[row * dim..][..dim];
            let distance = |a, b| metric.distance(metric.sum_of(row(a), row(b)));
            let chosen = [3, 77, 500, 1999];
            let counts = [1, PREFILTERED_VECTORS];
            for (level, vectors) in Level::all().into_iter().flat_map(|x| counts.map(|n| (x, n))) {
                let filter = CostFilter::try_new::<f32>(&rows, metric, level, vectors, &job);
                let filter = filter.unwrap().unwrap();
                let (vectors, block) = (filter.vectors::<f32>(&chosen), 1);
                // The first of the block cost as much as one of the vectors is away.
                let first = block * BLOCK_ROWS;
                let costs: Vec<f32> =
                    (first..count).map(|at| distance(at, chosen[at % 4] as usize)).collect();
                let mut starts = filter.starts()[block * PANELS..].to_vec();
                for (row, cost) in costs.iter().enumerate() {
                    starts[row / ROWS].0[row % ROWS] = filter.start(first + row, *cost);
                }
                let mut hits = std::collections::BTreeMap::new();
                let mut scratch = FilterScratch::default();
                let of = CostBlock { block, starts: &starts, costs: &costs };
                filter.in_block(of, &vectors, &mut scratch, |near| {
                    assert!(hits.insert((near.vector, near.row), near).is_none());
                });
                let (mut least, mut wide, mut most_far) = (0, 0, 0.0f64);
                for (number, vector) in chosen.into_iter().enumerate() {
                    for (at, cost) in costs.iter().enumerate() {
                        let distance = distance(vector as usize, first + at);
                        let near = hits.get(&(number as u32, at as u32));
                        assert!(near.is_some() || distance >= *cost, "{kind}, {level:?}");
                        let Some(Hit { least: from, most: to, .. }) = near else { continue };
                        let exact = f64::from(distance);
                        assert!((*from..=*to).contains(&exact), "{kind}: {exact}, {near:?}");
                        least += 1;
                        wide += usize::from(to - from > 0.02 * exact + 1e-3);
                        most_far = most_far.max(exact);
                    }
                }
                // One row far away leaves only zeros to the rest.
                let is_hard = matches!(kind, 2 | 4);
                assert!(least > 1000 && (is_hard || wide < least / 10), "{wide} of {least}");
                assert!(kind != 4 || most_far > 1e38);
            }
        }
    }
}
