//! Assignment to many centroids by lists of bounds (as Drake and Hamerly 2012, with unsorted lists).
//!
//! Each row keeps a list of its nearest centroids with a lower bound on the distance to each, and one lower bound on
//! the distance to every centroid outside the list. Bounds shrink by how far centroids move. A row whose own centroid
//! is nearer than all bounds keeps its label. If the bounds leave centroids of the list only, these are computed;
//! otherwise the row is compared with all centroids by quantised codes, which renews its list.
//!
//! With few centroids for the dimension of the rows, [Elkan's bounds](super::elkan), one for each
//! pair, are kept instead.
//!
//! Labels and distances are those of the definition: bounds only decide which pairs are computed.

pub(super) mod bound_list;
mod scan;

pub(super) use self::bound_list::up;
use self::bound_list::{BoundList, LENGTH};
use self::scan::{CandidateScan, TOGETHER};
use super::quantized_centroids::{Measure, QuantizedCentroids};
use crate::device::contract::{Assigned, Assigner, Distances, Moved, Work};
use crate::device::cpu::{exact, plan};

use crate::device::cpu::quantize::base::QuantizedBase;
use crate::device::cpu::quantize::quantized_rows::QuantizedRows;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::{Error, Result, within_memory};
use crate::job::{Job, Reserved};
use crate::metric::{Metric, Sum};
use crate::parallel::{try_in_parallel, try_in_parallel_with};
use crate::rows::Rows;

/// Rows of a task.
const BLOCK: usize = 512;

/// With more dimensions, sums overflow 32 bits.
pub(super) const MOST_DIM: usize = 1 << 15;

/// The most candidates of the rows that are scanned together, if bounds rule out no centroid.
const MOST_CANDIDATES: usize = 1 << 19;

/// The margin by which a list's radius exceeds the distance of the row's own centroid, relative to that: at first,
/// and its least and largest value.
const FIRST_MARGIN: f64 = 0.1;
const MARGINS: (f64, f64) = (0.005, 1.0);

/// See the [module](self).
pub(in crate::device::cpu) struct Drake<T> {
    rows: Rows,
    measure: Measure,
    rounded: QuantizedRows,
    lists: Vec<BoundList>,
    /// The centroids of the last round.
    before: Vec<T>,
    margin: f64,
    /// Whether bounds were given up: they decided too little, or memory ran out.
    is_given_up: bool,
    reserved: Reserved,
}

/// Rows of a task.
struct DrakeBlock<'a, T> {
    /// The number of the first.
    first: usize,
    labels: &'a mut [u32],
    /// The costs of the rows that were computed.
    costs: &'a mut [T],
    lists: &'a mut [BoundList],
}

impl<T> DrakeBlock<'_, T> {
    /// The pair of a row of the block and a centroid, with the row's number among all rows.
    fn pair(&self, row: u32, centroid: u32) -> (u32, u32) {
        (self.first as u32 + row, centroid)
    }
}

/// Buffers that a thread reuses.
#[derive(Default)]
struct ListScratch {
    scan: CandidateScan,
    /// Always left empty.
    pairs: Vec<(u32, u32)>,
    uncertain: Vec<u32>,
    scanned: Vec<u32>,
}

/// The work done for some rows.
#[derive(Default, Clone, Copy)]
struct ListWork {
    scanned: usize,
    computed: usize,
    /// Centroids within the radius of the rows that were scanned.
    candidates: usize,
}

impl<T: SimdReal> Drake<T> {
    /// `None` without memory, for metrics without squares or products, and for dimensions and values that may
    /// overflow.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn try_new(rows: &Rows, metric: Metric, level: Level, job: &Job) -> Result<Option<Self>> {
        let (Some(values), dim) = (rows.reals::<T>(), rows.matrix().dim()) else { return Ok(None) };
        if dim > MOST_DIM || metric.sum() == Sum::Absolute {
            return Ok(None);
        }
        let bytes = rows.len() * (size_of::<BoundList>() + size_of::<f64>());
        let Some(mut reserved) = job.try_reserve(bytes) else {
            return Ok(None);
        };
        let Some(measure) = Measure::new(values, dim, metric, level, job)? else {
            return Ok(None);
        };
        reserved.shrink_to(rows.len() * size_of::<BoundList>());
        let Some(rounded) =
            within_memory(QuantizedRows::new(values, dim, &measure.quantizer, job))?
        else {
            return Ok(None);
        };
        Ok(Some(Self {
            rows: rows.clone(),
            measure,
            rounded,
            lists: vec![BoundList::empty(); rows.len()],
            before: Vec::new(),
            margin: FIRST_MARGIN,
            is_given_up: false,
            reserved,
        }))
    }

    /// Assigns the rows of a block.
    fn block(
        &self,
        centroids: &QuantizedCentroids<'_, T, QuantizedBase>,
        block: &mut DrakeBlock<'_, T>,
        has_labels: bool,
        scratch: &mut ListScratch,
    ) -> ListWork {
        let ListScratch { scan, pairs, uncertain, scanned } = scratch;
        scanned.clear();
        if has_labels {
            self.uncertain(centroids, block, uncertain);
            pairs.extend(uncertain.iter().map(|row| block.pair(*row, block.labels[*row as usize])));
            self.compute(centroids, block, pairs, true);
            for row in uncertain.iter() {
                let (label, list) = (block.labels[*row as usize], &block.lists[*row as usize]);
                let bound = centroids.bound(list.upper());
                if bound < list.beyond() {
                    pairs.extend(list.within(bound, label).map(|other| block.pair(*row, other)));
                } else {
                    scanned.push(*row);
                }
            }
        } else {
            scanned.extend(0..block.labels.len() as u32);
        }
        let label_pairs = if has_labels { uncertain.len() } else { 0 };
        let mut done =
            ListWork { scanned: scanned.len(), computed: label_pairs + pairs.len(), candidates: 0 };
        self.compute(centroids, block, pairs, false);
        let together = (MOST_CANDIDATES / centroids.moved.len()).clamp(1, TOGETHER);
        for some in scanned.chunks(together) {
            let scan_work = self.scan(centroids, block, some, has_labels, scan, pairs);
            done.computed += scan_work.computed;
            done.candidates += scan_work.candidates;
        }
        done
    }

    /// Ages lists, and finds the rows to which a centroid other than their own may be nearer.
    fn uncertain(
        &self,
        centroids: &QuantizedCentroids<'_, T, QuantizedBase>,
        block: &mut DrakeBlock<'_, T>,
        uncertain: &mut Vec<u32>,
    ) {
        let (moved, most) = (centroids.moved.as_slice(), centroids.most_moved);
        uncertain.clear();
        self.measure.level.dispatch(
            #[inline(always)]
            || {
                for (row, (list, label)) in
                    block.lists.iter_mut().zip(block.labels.iter()).enumerate()
                {
                    let others = list.age(*label, moved, most);
                    if centroids.bound(list.upper()) >= others {
                        uncertain.push(row as u32);
                    }
                }
            },
        );
    }

    /// Compares rows with all centroids by quantised codes, computes the candidates, and renews the rows' lists.
    fn scan(
        &self,
        centroids: &QuantizedCentroids<'_, T, QuantizedBase>,
        block: &mut DrakeBlock<'_, T>,
        rows: &[u32],
        has_labels: bool,
        scan: &mut CandidateScan,
        pairs: &mut Vec<(u32, u32)>,
    ) -> ListWork {
        let mut done = ListWork::default();
        let squared_radius_of = |row: u32| match has_labels {
            true => {
                let upper = f64::from(centroids.bound(block.lists[row as usize].upper()));
                (upper / centroids.unit * (1.0 + self.margin)).powi(2)
            }
            false => f64::INFINITY,
        };
        let queries = rows.iter().map(|row| (block.first + *row as usize, squared_radius_of(*row)));
        scan.run(&centroids.rounded, &self.rounded, queries, centroids.unit);
        if !has_labels {
            for (row, (_, _, best)) in rows.iter().zip(scan.candidates()) {
                block.labels[*row as usize] = best;
                pairs.push(block.pair(*row, best));
            }
            done.computed += pairs.len();
            self.compute(centroids, block, pairs, true);
        }
        for (row, (candidates, squared_radius, _)) in rows.iter().zip(scan.candidates()) {
            let (label, list) = (block.labels[*row as usize], &mut block.lists[*row as usize]);
            let (bound, beyond) = (centroids.bound(list.upper()), centroids.beyond(squared_radius));
            done.candidates += candidates.len();
            if bound < beyond {
                let near = candidates.iter().filter(|entry| entry.least <= bound);
                let others = near.map(|entry| entry.centroid).filter(|other| *other != label);
                pairs.extend(others.map(|other| block.pair(*row, other)));
            } else {
                let others = (0..centroids.moved.len() as u32).filter(|other| *other != label);
                pairs.extend(others.map(|other| block.pair(*row, other)));
            }
        }
        done.computed += pairs.len();
        self.compute(centroids, block, pairs, false);
        for (row, (candidates, squared_radius, _)) in rows.iter().zip(scan.candidates()) {
            let row = *row as usize;
            block.lists[row].set(candidates, block.labels[row], centroids.beyond(squared_radius));
        }
        done
    }

    /// Computes pairs of a row (by its number among all rows) and a centroid. With `is_own`, the centroid is the
    /// row's own; without, the nearest centroid becomes the row's own.
    fn compute(
        &self,
        centroids: &QuantizedCentroids<'_, T, QuantizedBase>,
        block: &mut DrakeBlock<'_, T>,
        pairs: &mut Vec<(u32, u32)>,
        is_own: bool,
    ) {
        let Measure { metric, level, .. } = self.measure;
        let DrakeBlock { first, labels, costs, lists } = block;
        let on_sum = |(row, centroid): (u32, u32), sum: T| {
            let (row, cost) = (row as usize - *first, metric.distance(sum));
            if !is_own {
                lists[row].learn(centroid, centroids.least(cost));
            }
            if is_own || (cost, centroid) < (costs[row], labels[row]) {
                (costs[row], labels[row]) = (cost, centroid);
                lists[row].set_upper(centroids.most(cost));
            }
        };
        let (queries, base) = (self.rows.reals().unwrap_or_default(), centroids.values);
        let dim = self.rows.matrix().dim();
        exact::PairSums { metric, queries, base, dim, pairs, on_sum }.compute(level);
        pairs.clear();
    }

    /// Adapts the margin, so that the next lists hold about [`LENGTH`] centroids.
    fn adapt(&mut self, done: ListWork) {
        let (least, most) = MARGINS;
        if done.scanned > 0 {
            let per_row = done.candidates as f64 / done.scanned as f64;
            let factor = (LENGTH as f64 / per_row.max(1.0)).sqrt().clamp(0.5, 1.5);
            self.margin = (self.margin * factor).clamp(least, most);
        }
    }

    /// Leaves all further rounds to searches.
    fn give_up(&mut self) {
        self.is_given_up = true;
        self.lists = Vec::new();
        self.rounded.clear();
        self.reserved.shrink_to(0);
    }
}

impl<T: SimdReal> Assigner for Drake<T> {
    fn assign(
        &mut self,
        centroids: &Rows,
        labels: &mut Vec<u32>,
        job: &Job,
    ) -> Result<Option<Assigned>> {
        let Some(values) = centroids.reals::<T>().filter(|_| !self.is_given_up) else {
            return Ok(None);
        };
        let Some(rounded) = within_memory(self.measure.quantized(centroids, values, job))? else {
            self.give_up();
            return Ok(None);
        };
        let has_labels = !labels.is_empty();
        if !has_labels || rounded.is_none() || self.before.len() != values.len() {
            self.lists.iter_mut().for_each(BoundList::forget);
        }
        // A round that is cut short leaves no bounds.
        let before = std::mem::take(&mut self.before);
        let Some(rounded) = rounded else { return Ok(None) };
        let rounded = self.measure.centroids(values, rounded, &before);
        labels.resize(self.rows.len(), 0);
        let mut lists = std::mem::take(&mut self.lists);
        let blocks = labels.chunks_mut(BLOCK).zip(lists.chunks_mut(BLOCK)).enumerate();
        let assign = |scratch: &mut ListScratch, (block, (labels, lists)): (_, (&mut [u32], _))| {
            job.check()?;
            let (first, count) = (block * BLOCK, labels.len());
            let costs = &mut [T::ZERO; BLOCK][..count];
            let mut before = [0; BLOCK];
            before[..count].copy_from_slice(labels);
            let mut block = DrakeBlock { first, labels, costs, lists };
            let done = self.block(&rounded, &mut block, has_labels, scratch);
            let rows = (first as u32..).zip(before.into_iter().zip(block.labels.iter()));
            let moved = rows.filter(|(_, (before, now))| has_labels && before != *now);
            let moved: Vec<Moved> = moved.map(|(row, (before, _))| (row, before)).collect();
            Ok((done, moved))
        };
        let done = try_in_parallel_with(blocks, ListScratch::default, assign);
        self.lists = lists;
        let (done, moved): (Vec<ListWork>, Vec<_>) = done?.into_iter().unzip();
        let done = done.into_iter().fold(ListWork::default(), |all, done| ListWork {
            scanned: all.scanned + done.scanned,
            computed: all.computed + done.computed,
            candidates: all.candidates + done.candidates,
        });
        self.before.extend_from_slice(values);
        let k = centroids.len();
        if has_labels {
            self.adapt(done);
        }
        if !plan::bounds_pay(done.computed, self.rows.len(), k) {
            self.give_up();
        }
        let (pairs, rechecked) = (done.computed + done.scanned * k, done.computed);
        let work = Work { pairs: pairs as u64, rechecked: rechecked as u64, ..Work::default() };
        Ok(Some(Assigned { moved: moved.concat(), work }))
    }

    fn distances(&self, centroids: &Rows, labels: &[u32], job: &Job) -> Result<Distances> {
        let Measure { metric, level, .. } = self.measure;
        distances::<T>(&self.rows, centroids, labels, metric, level, job)
    }

    fn undecided(&self, centroids: &Rows, labels: &[u32]) -> Option<Vec<u32>> {
        let values = centroids.reals::<T>().filter(|_| !self.is_given_up)?;
        let centroids = self.measure.centroids(values, (), &[]);
        let lists = (0..).zip(self.lists.iter().zip(labels));
        let others = lists.map(|(row, (list, label))| (row, list.upper(), list.others(*label)));
        let near = others.filter(|(_, upper, others)| centroids.bound(*upper) >= *others);
        Some(near.map(|(row, ..)| row).collect())
    }
}

/// The distance of every row from the centroid of its label.
pub(super) fn distances<T: SimdReal>(
    rows: &Rows,
    centroids: &Rows,
    labels: &[u32],
    metric: Metric,
    level: Level,
    job: &Job,
) -> Result<Distances> {
    let (queries, base) = (rows.reals().unwrap_or_default(), centroids.reals::<T>());
    let (base, dim) = (base.unwrap_or_default(), rows.matrix().dim());
    let mut distances = vec![T::ZERO; labels.len()];
    let blocks = distances.chunks_mut(BLOCK).zip(labels.chunks(BLOCK)).enumerate();
    try_in_parallel(blocks, |(block, (distances, labels))| {
        job.check()?;
        let first = (block * BLOCK) as u32;
        let pairs: Vec<_> = (first..).zip(labels.iter().copied()).collect();
        let pairs = pairs.as_slice();
        let on_sum = |(row, _): (u32, u32), sum| {
            distances[(row - first) as usize] = metric.distance(sum);
        };
        exact::PairSums { metric, queries, base, dim, pairs, on_sum }.compute(level);
        Ok::<_, Error>(())
    })?;
    Ok(Distances::of(distances))
}

#[cfg(test)]
mod tests;
