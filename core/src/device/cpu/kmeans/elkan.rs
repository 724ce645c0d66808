//! Assignment with a lower bound for each row and centroid (Elkan 2003).
//!
//! At first, rows are compared with all centroids by quantised codes, tile by tile. From then on, a row keeps an
//! upper bound on the distance to its own centroid and a lower bound on the distance to each other one; both change
//! by how far centroids move. Centroids that may be nearer than the row's own are compared with the row by quantised
//! codes; if several may be the nearest, the sums of the definition decide.
//!
//! Lower bounds are 16-bit integers, in steps of the rows' quantisation. Each is stored as the
//! bound plus the centroid's total movement at that time, so only changed bounds are written.
//!
//! Labels and distances are those of the definition: bounds only decide which pairs are computed.

use super::drake::{MOST_DIM, distances};
use super::quantized_centroids::{Measure, QuantizedCentroids};
use crate::device::contract::{Assigned, Assigner, Distances, Moved, Work};
use crate::device::cpu::quantize::row_codes::{DistanceBounds, RowCodes};
use crate::device::cpu::simd::bounds::{LARGEST, NEVER, StoredBounds, TOGETHER, lower, whole};
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::device::cpu::{exact, plan};
use crate::error::{Result, within_memory};
use crate::job::{Job, Reserved};
use crate::metric::{Metric, Sum};
use crate::parallel::{in_parallel, try_in_parallel_with};
use crate::rows::Rows;

/// The most rows of a task, the bytes of their bounds (a part of an L1 cache, as most bounds are read twice), and the
/// least rows of a task.
const BLOCK: usize = 64;
const BLOCK_BYTES: usize = 16 << 10;
const LEAST_BLOCK: usize = 8;

/// The number of rows per certain row above which the next round tests none of them.
const ONE_CERTAIN_IN: usize = 8;

/// The total movement of a centroid, in steps, above which all bounds are rewritten.
const MOST_MOVED: u16 = 1 << 14;

/// See the [module](self).
pub(in crate::device::cpu) struct Elkan<T> {
    rows: Rows,
    measure: Measure,
    rounded: RowCodes,
    /// Number of bounds of a row: `k`, rounded up to a multiple of [`TOGETHER`].
    stride: usize,
    /// For each row, an upper bound on the distance to its own centroid.
    upper: Vec<f32>,
    /// For each row and centroid, a lower bound on their distance plus the centroid's `moved` at that time; [`NEVER`]
    /// for the row's own centroid.
    least: Vec<u16>,
    /// For each centroid, its total movement since bounds were last rewritten, padded to `stride` elements.
    moved: Vec<u16>,
    /// The centroids of the last round.
    before: Vec<T>,
    /// Whether all rows are taken for uncertain, as testing them takes longer than it saves.
    few_are_certain: bool,
    /// Whether bounds were given up: they decided too little, or memory ran out.
    is_given_up: bool,
    reserved: Reserved,
}

/// Rows of a task.
struct ElkanBlock<'a> {
    /// The number of the first.
    first: u32,
    labels: &'a mut [u32],
    upper: &'a mut [f32],
    least: &'a mut [u16],
}

/// Buffers that a thread reuses.
#[derive(Default)]
struct ElkanScratch {
    uncertain: Vec<Uncertain>,
    /// Centroids that may be nearer to a row than its own.
    near: Vec<u32>,
    /// Pairs of a row and a centroid.
    pairs: Vec<(u32, u32)>,
    sums: Vec<i32>,
    distance_bounds: Vec<DistanceBounds>,
    computed: Vec<(u32, u32)>,
}

/// A row to which a centroid other than its own may be nearer.
struct Uncertain {
    /// Its number in the block.
    row: usize,
    /// Its previous centroid, and bounds on the distance to that.
    label: u32,
    distance_bounds: DistanceBounds,
    /// Number of other centroids that it is compared with.
    others: usize,
}

impl<T: SimdReal> Elkan<T> {
    /// `None` without memory, for metrics without squares or products, and for dimensions and values that may
    /// overflow.
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
        if dim > MOST_DIM || metric.sum() == Sum::Absolute {
            return Ok(None);
        }
        let stride = k.next_multiple_of(TOGETHER);
        let bytes = stride * size_of::<u16>() + size_of::<f32>();
        let most = rows.len() * (bytes + size_of::<f64>());
        let Some(mut reserved) = job.try_reserve(most) else {
            return Ok(None);
        };
        let Some(measure) = Measure::sixteen(values, dim, metric, level, job)? else {
            return Ok(None);
        };
        reserved.shrink_to(rows.len() * bytes);
        let quantizer = &measure.quantizer;
        let is_too_long = |row: &_| quantizer.is_too_long(row, quantizer.step);
        let Some(rounded) = within_memory(RowCodes::new(values, quantizer, is_too_long, job))?
        else {
            return Ok(None);
        };
        Ok(Some(Self {
            rows: rows.clone(),
            measure,
            rounded,
            stride,
            upper: vec![f32::INFINITY; rows.len()],
            least: vec![0; rows.len() * stride],
            moved: vec![0; stride],
            before: Vec::new(),
            few_are_certain: false,
            is_given_up: false,
            reserved,
        }))
    }

    /// The bounds of a row.
    fn bounds<'a>(&'a self, least: &'a [u16]) -> StoredBounds<'a> {
        StoredBounds { noted: least.as_chunks().0, moved: self.moved.as_chunks().0 }
    }

    /// The quantised centroids; `None` if one lies outside the range, or without memory.
    fn round(&mut self, centroids: &[T], job: &Job) -> Result<Option<RowCodes>> {
        let quantizer = &self.measure.quantizer;
        let is_outlier = |row: &_| quantizer.is_outlier(row);
        let codes = within_memory(RowCodes::new(centroids, quantizer, is_outlier, job))?;
        if codes.is_none() {
            self.give_up();
        }
        Ok(codes.filter(RowCodes::all_have_bounds))
    }

    /// Adds the movement of each centroid since the last round; rewrites all bounds once a total exceeds
    /// [`MOST_MOVED`].
    fn age(&mut self, moved: &[f32]) {
        for (all, moved) in self.moved.iter_mut().zip(moved) {
            *all = all.saturating_add(moved.ceil() as u16);
        }
        if self.moved.iter().all(|all| *all <= MOST_MOVED) {
            return;
        }
        in_parallel(self.least.chunks_mut(self.stride * BLOCK), |rows: &mut [u16]| {
            for row in rows.chunks_exact_mut(self.stride) {
                let bounds = row.iter_mut().zip(&self.moved).filter(|(least, _)| **least != NEVER);
                bounds.for_each(|(least, moved)| *least = least.saturating_sub(*moved));
            }
        });
        self.moved.fill(0);
    }

    /// Assigns the rows of a block, which have no bounds yet if it `begins`. Returns the work, and the number of rows
    /// that were compared with centroids other than their own.
    fn block(
        &self,
        centroids: &QuantizedCentroids<'_, T, RowCodes>,
        block: &mut ElkanBlock<'_>,
        begins: bool,
        scratch: &mut ElkanScratch,
    ) -> (Work, usize) {
        let all = if begins { self.begin(centroids, block, scratch) } else { 0 };
        self.find_uncertain(centroids, block, scratch);
        let label_pairs = scratch.pairs.len();
        self.compare(centroids, scratch);
        let with_others = self.find_near(centroids, block, scratch);
        let others = scratch.pairs.len();
        self.compare(centroids, scratch);
        self.choose(centroids, block, scratch);
        self.renew(block, scratch);
        let computed = scratch.computed.len();
        let (pairs, rechecked) = ((all + label_pairs + others + computed) as u64, computed as u64);
        (Work { pairs, rechecked, ..Work::default() }, with_others)
    }

    /// Bounds the distances of the pairs by quantised codes.
    fn compare(&self, centroids: &QuantizedCentroids<'_, T, RowCodes>, scratch: &mut ElkanScratch) {
        let ElkanScratch { pairs, sums, distance_bounds, .. } = scratch;
        self.rounded.bounds(&centroids.rounded, pairs, sums, distance_bounds);
    }

    /// Compares the rows of a block with all centroids by quantised codes; returns the number of pairs.
    fn begin(
        &self,
        centroids: &QuantizedCentroids<'_, T, RowCodes>,
        block: &mut ElkanBlock<'_>,
        scratch: &mut ElkanScratch,
    ) -> usize {
        let ElkanScratch { pairs, sums, .. } = scratch;
        let (first, rows, k) = (block.first as usize, block.labels.len(), centroids.moved.len());
        let mut nearest = [(0, f32::INFINITY); BLOCK];
        let (nearest, rows) = (&mut nearest[..rows], first..first + rows);
        let least = &mut *block.least;
        self.rounded.bounds_to_all(&centroids.rounded, rows, pairs, sums, least, nearest);
        let bounds = block.labels.iter_mut().zip(&mut *block.upper);
        let each = bounds.zip(block.least.chunks_exact_mut(self.stride)).zip(&*nearest);
        each.for_each(|(((label, upper), least), nearest)| {
            (*label, *upper) = *nearest;
            least[k..].fill(NEVER);
            least[*label as usize] = NEVER;
        });
        nearest.len() * k
    }

    /// Finds the rows that may be uncertain after centroids moved, and pairs each with its own centroid.
    fn find_uncertain(
        &self,
        centroids: &QuantizedCentroids<'_, T, RowCodes>,
        block: &mut ElkanBlock<'_>,
        scratch: &mut ElkanScratch,
    ) {
        let ElkanScratch { uncertain, pairs, .. } = scratch;
        uncertain.clear();
        pairs.clear();
        let rows = block.labels.iter().zip(&mut *block.upper);
        for (row, ((label, upper), least)) in
            rows.zip(block.least.chunks_exact(self.stride)).enumerate()
        {
            *upper = (*upper + centroids.moved[*label as usize]) * (1.0 + 2.0 * f32::EPSILON);
            let most = whole(centroids.bound(*upper));
            if self.few_are_certain || self.measure.level.least(self.bounds(least)) <= most {
                let distance_bounds = DistanceBounds { least: 0.0, most: *upper };
                uncertain.push(Uncertain { row, label: *label, distance_bounds, others: 0 });
                pairs.push((block.first + row as u32, *label));
            }
        }
    }

    /// Pairs uncertain rows, already compared with their own centroids, with the centroids that may
    /// be nearer; returns the number of rows with such a centroid.
    fn find_near(
        &self,
        centroids: &QuantizedCentroids<'_, T, RowCodes>,
        block: &mut ElkanBlock<'_>,
        scratch: &mut ElkanScratch,
    ) -> usize {
        let ElkanScratch { uncertain, near, pairs, distance_bounds, .. } = scratch;
        pairs.clear();
        let mut with_others = 0;
        for (of, distance_bounds) in uncertain.iter_mut().zip(&*distance_bounds) {
            let upper = &mut block.upper[of.row];
            *upper = upper.min(distance_bounds.most);
            of.distance_bounds = *distance_bounds;
            let least = &block.least[of.row * self.stride..][..self.stride];
            let most = whole(centroids.bound(*upper));
            self.measure.level.within(self.bounds(least), most, near);
            let row = block.first + of.row as u32;
            pairs.extend(near.iter().map(|other| (row, *other)));
            of.others = near.len();
            with_others += usize::from(of.others > 0);
        }
        with_others
    }

    /// Labels uncertain rows with the nearest of the centroids that they were compared with; if the bounds leave
    /// several, the definition decides.
    fn choose(
        &self,
        centroids: &QuantizedCentroids<'_, T, RowCodes>,
        block: &mut ElkanBlock<'_>,
        scratch: &mut ElkanScratch,
    ) {
        let ElkanScratch { uncertain, pairs, distance_bounds, computed, .. } = scratch;
        computed.clear();
        let (mut pairs, mut distance_bounds) = (pairs.as_slice(), distance_bounds.as_slice());
        for of in uncertain.iter() {
            let others = (&pairs[..of.others], &distance_bounds[..of.others]);
            (pairs, distance_bounds) = (&pairs[of.others..], &distance_bounds[of.others..]);
            let label_pair = (block.first + of.row as u32, of.label);
            let (mut nearest, mut most) = (label_pair, block.upper[of.row]);
            for (pair, distance_bounds) in others.0.iter().zip(others.1) {
                if distance_bounds.most < most {
                    (nearest, most) = (*pair, distance_bounds.most);
                }
            }
            (block.labels[of.row], block.upper[of.row]) = (nearest.1, most);
            let (bound, before) = (centroids.bound(most), computed.len());
            let mut take = |pair: (u32, u32), distance_bounds: &DistanceBounds| {
                if distance_bounds.least <= bound && pair != nearest {
                    computed.push(pair);
                }
            };
            others
                .0
                .iter()
                .zip(others.1)
                .for_each(|(pair, distance_bounds)| take(*pair, distance_bounds));
            take(label_pair, &of.distance_bounds);
            if computed.len() > before {
                computed.push(nearest);
            }
        }
        self.compute(centroids, block, computed);
    }

    /// Computes pairs by definition, and labels each row with the nearest of its centroids.
    fn compute(
        &self,
        centroids: &QuantizedCentroids<'_, T, RowCodes>,
        block: &mut ElkanBlock<'_>,
        pairs: &[(u32, u32)],
    ) {
        let Measure { metric, level, .. } = self.measure;
        let mut last: Option<(u32, T, u32)> = None;
        let on_sum = |(row, centroid): (u32, u32), sum: T| {
            let (at, cost) = ((row - block.first) as usize, metric.distance(sum));
            let is_nearer = last.is_none_or(|(before, least, nearest)| {
                before != row || (cost, centroid) < (least, nearest)
            });
            if is_nearer {
                last = Some((row, cost, centroid));
                (block.labels[at], block.upper[at]) = (centroid, centroids.most(cost));
            }
        };
        let (queries, base) = (self.rows.reals().unwrap_or_default(), centroids.values);
        let dim = self.rows.matrix().dim();
        exact::PairSums { metric, queries, base, dim, pairs, on_sum }.compute(level);
    }

    /// Renews the bounds of uncertain rows by the comparisons of this round.
    fn renew(&self, block: &mut ElkanBlock<'_>, scratch: &ElkanScratch) {
        let mut compared = scratch.pairs.iter().zip(&scratch.distance_bounds);
        for of in &scratch.uncertain {
            let least = &mut block.least[of.row * self.stride..][..self.stride];
            let learnt = |centroid: u32, distance_bounds: &DistanceBounds| {
                let moved = self.moved[centroid as usize];
                lower(distance_bounds.least).saturating_add(moved).min(LARGEST)
            };
            for ((_, other), distance_bounds) in compared.by_ref().take(of.others) {
                let bound = &mut least[*other as usize];
                *bound = learnt(*other, distance_bounds).max(*bound);
            }
            let label = block.labels[of.row];
            if label != of.label {
                least[of.label as usize] = learnt(of.label, &of.distance_bounds);
                least[label as usize] = NEVER;
            }
        }
    }

    /// Leaves all further rounds to searches.
    fn give_up(&mut self) {
        self.is_given_up = true;
        (self.upper, self.least, self.moved) = (Vec::new(), Vec::new(), Vec::new());
        self.rounded.clear();
        self.reserved.shrink_to(0);
    }
}

impl<T: SimdReal> Assigner for Elkan<T> {
    fn assign(
        &mut self,
        centroids: &Rows,
        labels: &mut Vec<u32>,
        job: &Job,
    ) -> Result<Option<Assigned>> {
        let Some(values) = centroids.reals::<T>().filter(|_| !self.is_given_up) else {
            return Ok(None);
        };
        // A round that is cut short leaves no bounds.
        let mut before = std::mem::take(&mut self.before);
        let Some(rounded) = self.round(values, job)? else { return Ok(None) };
        let (has_labels, k) = (!labels.is_empty(), centroids.len());
        let begins = !has_labels || before.len() != values.len();
        if begins {
            before.clear();
            self.moved.fill(0);
        }
        let rounded = self.measure.centroids(values, rounded, &before);
        self.age(&rounded.moved);
        labels.resize(self.rows.len(), 0);
        let (mut upper, mut least) =
            (std::mem::take(&mut self.upper), std::mem::take(&mut self.least));
        let of_block = (BLOCK_BYTES / size_of::<u16>() / self.stride).clamp(LEAST_BLOCK, BLOCK);
        let bounds = upper.chunks_mut(of_block).zip(least.chunks_mut(of_block * self.stride));
        let blocks = labels.chunks_mut(of_block).zip(bounds).enumerate();
        type Parts<'a> = (&'a mut [u32], (&'a mut [f32], &'a mut [u16]));
        let assign = |scratch: &mut ElkanScratch, (block, (labels, bounds)): (usize, Parts<'_>)| {
            job.check()?;
            let (first, (upper, least)) = ((block * of_block) as u32, bounds);
            let mut before = [0; BLOCK];
            before[..labels.len()].copy_from_slice(labels);
            let mut block = ElkanBlock { first, labels, upper, least };
            let (work, with_others) = self.block(&rounded, &mut block, begins, scratch);
            let rows = (first..).zip(before.into_iter().zip(block.labels.iter()));
            let moved = rows.filter(|(_, (before, now))| has_labels && before != *now);
            let moved: Vec<Moved> = moved.map(|(row, (before, _))| (row, before)).collect();
            Ok(((work, with_others), moved))
        };
        let done = try_in_parallel_with(blocks, ElkanScratch::default, assign);
        (self.upper, self.least) = (upper, least);
        let (done, moved): (Vec<(Work, usize)>, Vec<_>) = done?.into_iter().unzip();
        let sum = |of: fn(&Work) -> u64| done.iter().map(|(work, _)| of(work)).sum::<u64>();
        let certain = self.rows.len() - done.iter().map(|(_, others)| others).sum::<usize>();
        self.few_are_certain = certain * ONE_CERTAIN_IN <= self.rows.len();
        let (pairs, rechecked) = (sum(|work| work.pairs), sum(|work| work.rechecked));
        self.before = values.to_vec();
        if !plan::bounds_pay(rechecked as usize, self.rows.len(), k) {
            self.give_up();
        }
        let work = Work { pairs, rechecked, ..Work::default() };
        Ok(Some(Assigned { moved: moved.concat(), work }))
    }

    fn distances(&self, centroids: &Rows, labels: &[u32], job: &Job) -> Result<Distances> {
        let Measure { metric, level, .. } = self.measure;
        distances::<T>(&self.rows, centroids, labels, metric, level, job)
    }

    fn undecided(&self, centroids: &Rows, _: &[u32]) -> Option<Vec<u32>> {
        let values = centroids.reals::<T>().filter(|_| !self.is_given_up)?;
        let centroids = self.measure.centroids(values, (), &[]);
        let is_near = |upper: f32, least: &[u16]| {
            self.measure.level.least(self.bounds(least)) <= whole(centroids.bound(upper))
        };
        let blocks = self.upper.chunks(BLOCK).zip(self.least.chunks(self.stride * BLOCK));
        let near = in_parallel(blocks.enumerate(), |(block, (upper, least)): (_, (&[f32], _))| {
            let rows =
                (block * BLOCK..).zip(upper.iter().zip(<[_]>::chunks_exact(least, self.stride)));
            let near = rows.filter(|(_, (upper, least))| is_near(**upper, least));
            near.map(|(row, _)| row as u32).collect::<Vec<_>>()
        });
        Some(near.concat())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::matrix::{Matrix, Real};
    use crate::random::Random;

    #[test]
    fn no_bound_is_beyond_its_distance_however_far_centroids_move() {
        let (count, k, dim, job) = (200, 37, 40, Job::default());
        let mut random = Random::new(1);
        let values: Vec<f32> = (0..count * dim).map(|_| random.normal() as f32).collect();
        let rows = |values: &[f32]| {
            let elements = f32::elements(values.to_vec());
            Rows::all(Arc::new(Matrix::new(elements, values.len() / dim, dim)))
        };
        let mut centroids = values[..k * dim].to_vec();
        let (metric, level) = (Metric::SqEuclidean, Level::all()[0]);
        let bounds = Elkan::<f32>::try_new(&rows(&values), k, metric, level, &job);
        let mut bounds = bounds.unwrap().expect("rows that suit");
        let unit = 1.0 / bounds.measure.quantizer.step;
        let distance = |row: usize, centroid: &[f32]| {
            let pairs = values[row * dim..][..dim].iter().zip(centroid);
            let squares = pairs.map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2));
            squares.sum::<f64>().sqrt() * unit
        };
        let (mut labels, mut known, mut anew) = (Vec::new(), 0, 0);
        for round in 0..60 {
            let assigned = bounds.assign(&rows(&centroids), &mut labels, &job).unwrap();
            assert!(assigned.is_some());
            anew += usize::from(round > 0 && bounds.moved.iter().all(|moved| *moved == 0));
            for (row, label) in labels.iter().enumerate() {
                let label_distance = distance(row, &centroids[*label as usize * dim..][..dim]);
                assert!(f64::from(bounds.upper[row]) >= label_distance * (1.0 - 1e-6));
                for (other, centroid) in centroids.chunks_exact(dim).enumerate() {
                    let bound = bounds.least[row * bounds.stride + other];
                    if other == *label as usize {
                        assert_eq!(bound, NEVER);
                        continue;
                    }
                    let bound = f64::from(bound.saturating_sub(bounds.moved[other]));
                    let exact = distance(row, centroid);
                    assert!(bound <= exact * (1.0 + 1e-6), "{round}: {bound} and {exact}");
                    known += usize::from(bound > 0.5 * exact);
                }
            }
            for centroid in centroids.chunks_exact_mut(dim).skip(round % 3).step_by(3) {
                let part = if random.below(20) == 0 { 1.0 } else { 0.05 };
                let to = &values[random.below(count as u64) as usize * dim..][..dim];
                centroid.iter_mut().zip(to).for_each(|(x, to)| *x += part * (to - *x));
            }
        }
        assert!(anew > 0 && known > 60 * count * k / 2, "{anew} times, {known}");
    }
}
