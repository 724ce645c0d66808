//! The nearest centroid of every row, round after round, by a bound for each pair (Elkan 2003).
//!
//! A row keeps a bound on its own centroid's distance, and one on that of each other, which change by how far centroids
//! move. Those that may be nearer than its own one are compared with the row in whole numbers; of those that this leaves,
//! if there are several, the sums of the definition decide.
//!
//! Labels and distances are those of the definition: bounds only decide which pairs are computed.

use rayon::prelude::*;

use super::centroids::{Centroids, Measure};
use super::distances;
use super::lists::less;
use crate::device::contract::{Assigned, Assigner, Distances, Moved, Work};
use crate::device::cpu::exact;
use crate::device::cpu::rounded::lined::{Apart, LinedRows};
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::level::Level;
use crate::error::{Error, Result};
use crate::job::{Job, Reserved};
use crate::matrix::Rows;
use crate::metric::{Metric, Sum};

/// Rows of a task.
const BLOCK: usize = 64;

/// Bounds that are looked at together: there are so many for a row, or a multiple.
const SIDE_BY_SIDE: usize = 8;

/// If more than one in this many pairs is computed by definition, and some of each row, there is a faster way.
const ONE_COMPUTED_IN: usize = 8;
const FREE: usize = 4;

/// With fewer dimensions, rows in whole numbers take more memory than they save time.
const LEAST_DIM: usize = 33;

/// Bytes that the bounds of a row may take, even if the row takes less.
const SMALL: usize = 512;

/// Whether the bounds of a row take about as much memory as the row, or little.
pub(in crate::device::cpu) fn suits<T: Lanes>(dim: usize, k: usize) -> bool {
    dim >= LEAST_DIM && k * size_of::<f32>() <= (dim * size_of::<T>()).max(SMALL)
}

/// See the [module](self).
pub(in crate::device::cpu) struct PairBounds<T> {
    rows: Rows,
    measure: Measure,
    rounded: LinedRows,
    /// Bounds of a row.
    stride: usize,
    /// For each row, a distance that its own centroid is not beyond.
    own: Vec<f32>,
    /// For each row and centroid, a distance that it is not nearer than; infinite for the row's own one.
    least: Vec<f32>,
    /// The centroids of the last round.
    before: Vec<T>,
    /// Bounds decide too little, or there is no memory.
    is_given_up: bool,
    reserved: Reserved,
}

/// Rows of a task.
struct Block<'a> {
    /// The number of the first.
    first: u32,
    labels: &'a mut [u32],
    own: &'a mut [f32],
    least: &'a mut [f32],
}

/// What a thread uses again.
#[derive(Default)]
struct Scratch {
    uncertain: Vec<Uncertain>,
    /// Of a row and a centroid.
    pairs: Vec<(u32, u32)>,
    sums: Vec<i32>,
    apart: Vec<Apart>,
    computed: Vec<(u32, u32)>,
}

/// A row to which another centroid than its own may be nearer.
struct Uncertain {
    /// Its number in the block.
    row: usize,
    /// Its own centroid before, and how far away that is.
    own: u32,
    apart: Apart,
    /// How many others it is compared with.
    others: usize,
}

impl<T: Lanes> PairBounds<T> {
    /// `None` if comparing all pairs suits these rows, or without memory.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn try_new(rows: &Rows, k: usize, of: (Metric, Level), job: &Job) -> Result<Option<Self>> {
        let (Some(values), dim) = (rows.reals::<T>(), rows.matrix().dim()) else { return Ok(None) };
        if dim > super::MOST_DIM || of.0.sum() == Sum::Absolute {
            return Ok(None);
        }
        let stride = k.next_multiple_of(SIDE_BY_SIDE);
        let bytes = (stride + 1) * size_of::<f32>();
        let most = rows.len() * (bytes + size_of::<f64>());
        let mut reserved = match job.reserve("bounds of rows and centroids", most) {
            Err(Error::HostMemory { .. }) => return Ok(None),
            reserved => reserved?,
        };
        let Some(measure) = Measure::sixteen(values, dim, of, job)? else { return Ok(None) };
        reserved.shrink_to(rows.len() * bytes);
        let scale = &measure.scale;
        let is_too_long = |row: &_| scale.is_too_long(row, scale.step);
        let rounded = match LinedRows::new(values, scale, is_too_long, job) {
            Err(Error::HostMemory { .. }) => return Ok(None),
            rounded => rounded?,
        };
        Ok(Some(Self {
            rows: rows.clone(),
            measure,
            rounded,
            stride,
            own: vec![f32::INFINITY; rows.len()],
            least: vec![0.0; rows.len() * stride],
            before: Vec::new(),
            is_given_up: false,
            reserved,
        }))
    }

    /// Nothing is known of any row.
    fn forget(&mut self, k: usize) {
        self.own.fill(f32::INFINITY);
        self.least.par_chunks_exact_mut(self.stride).with_min_len(BLOCK).for_each(|least| {
            least[..k].fill(0.0);
            least[k..].fill(f32::INFINITY);
        });
    }

    /// Assigns the rows of a block.
    fn block(
        &self,
        centroids: &Centroids<'_, T, LinedRows>,
        block: &mut Block<'_>,
        scratch: &mut Scratch,
    ) -> Work {
        let arch = pulp::Arch::new();
        arch.dispatch(
            #[inline(always)]
            || self.find_uncertain(centroids, block, scratch),
        );
        let own = scratch.pairs.len();
        self.compare(centroids, scratch);
        arch.dispatch(
            #[inline(always)]
            || self.find_near(centroids, block, scratch),
        );
        let others = scratch.pairs.len();
        self.compare(centroids, scratch);
        self.choose(centroids, block, scratch);
        self.renew(block, scratch);
        let computed = scratch.computed.len();
        let (pairs, rechecked) = ((own + others + computed) as u64, computed as u64);
        Work { pairs, rechecked, ..Work::default() }
    }

    /// Compares pairs in whole numbers.
    fn compare(&self, centroids: &Centroids<'_, T, LinedRows>, scratch: &mut Scratch) {
        let Scratch { pairs, sums, apart, .. } = scratch;
        self.rounded.apart(&centroids.rounded, pairs, self.measure.level, (sums, apart));
    }

    /// Ages bounds by how far centroids have moved; each row that is then uncertain makes a pair with its own centroid.
    #[inline(always)]
    fn find_uncertain(
        &self,
        centroids: &Centroids<'_, T, LinedRows>,
        block: &mut Block<'_>,
        scratch: &mut Scratch,
    ) {
        let Scratch { uncertain, pairs, .. } = scratch;
        uncertain.clear();
        pairs.clear();
        let rows = block.labels.iter().zip(&mut *block.own);
        for (row, ((label, own), least)) in
            rows.zip(block.least.chunks_exact_mut(self.stride)).enumerate()
        {
            *own = (*own + centroids.moved[*label as usize]) * (1.0 + 2.0 * f32::EPSILON);
            // Also where nothing is known.
            least[*label as usize] = f32::INFINITY;
            if centroids.bound(*own) >= age(least, &centroids.moved) {
                let apart = Apart { least: 0.0, most: *own };
                uncertain.push(Uncertain { row, own: *label, apart, others: 0 });
                pairs.push((block.first + row as u32, *label));
            }
        }
    }

    /// Finds the centroids that may be nearer to uncertain rows than their own ones, which they have been compared with.
    #[inline(always)]
    fn find_near(
        &self,
        centroids: &Centroids<'_, T, LinedRows>,
        block: &mut Block<'_>,
        scratch: &mut Scratch,
    ) {
        let Scratch { uncertain, pairs, apart, .. } = scratch;
        pairs.clear();
        for (of, apart) in uncertain.iter_mut().zip(&*apart) {
            let own = &mut block.own[of.row];
            *own = own.min(apart.most);
            of.apart = *apart;
            // What is infinitely far away is not, or is the row's own one.
            let bound = centroids.bound(*own).min(f32::MAX);
            let (row, before) = (block.first + of.row as u32, pairs.len());
            let least = &block.least[of.row * self.stride..][..self.stride];
            for (part, least) in (0..).step_by(SIDE_BY_SIDE).zip(least.as_chunks().0) {
                let mut near = within::<SIDE_BY_SIDE>(least, bound);
                while near != 0 {
                    pairs.push((row, part + near.trailing_zeros()));
                    near &= near - 1;
                }
            }
            of.others = pairs.len() - before;
        }
    }

    /// Gives uncertain rows the nearest of the centroids that they have been compared with; of several that may be it, the
    /// nearest by definition.
    fn choose(
        &self,
        centroids: &Centroids<'_, T, LinedRows>,
        block: &mut Block<'_>,
        scratch: &mut Scratch,
    ) {
        let Scratch { uncertain, pairs, apart, computed, .. } = scratch;
        computed.clear();
        let mut compared = pairs.iter().copied().zip(&*apart);
        for of in uncertain.iter() {
            let others = compared.clone().take(of.others);
            if of.others > 0 {
                compared.nth(of.others - 1);
            }
            let own = (block.first + of.row as u32, of.own);
            let (mut nearest, mut most) = (own, block.own[of.row]);
            for (pair, apart) in others.clone() {
                if apart.most < most {
                    (nearest, most) = (pair, apart.most);
                }
            }
            (block.labels[of.row], block.own[of.row]) = (nearest.1, most);
            let (bound, before) = (centroids.bound(most), computed.len());
            let all = others.chain([(own, &of.apart)]);
            let near = all.filter(|(pair, apart)| *pair != nearest && apart.least <= bound);
            computed.extend(near.map(|(pair, _)| pair));
            if computed.len() > before {
                computed.push(nearest);
            }
        }
        self.compute(centroids, block, computed);
    }

    /// Gives each row of some pairs the nearest of their centroids.
    fn compute(
        &self,
        centroids: &Centroids<'_, T, LinedRows>,
        block: &mut Block<'_>,
        pairs: &[(u32, u32)],
    ) {
        let Measure { metric, level, .. } = self.measure;
        let mut last: Option<(u32, T, u32)> = None;
        let found = |(row, centroid): (u32, u32), sum: T| {
            let (at, cost) = ((row - block.first) as usize, metric.distance(sum));
            let is_nearer = last.is_none_or(|(before, least, nearest)| {
                before != row || (cost, centroid) < (least, nearest)
            });
            if is_nearer {
                last = Some((row, cost, centroid));
                (block.labels[at], block.own[at]) = (centroid, centroids.most(cost));
            }
        };
        let (queries, base) = (self.rows.reals().unwrap_or_default(), centroids.values);
        let dim = self.rows.matrix().dim();
        exact::Pairs { metric, queries, base, dim, pairs, found }.compute(level);
    }

    /// Renews the bounds of uncertain rows by what they have been compared with.
    fn renew(&self, block: &mut Block<'_>, scratch: &Scratch) {
        let mut compared = scratch.pairs.iter().zip(&scratch.apart);
        for of in &scratch.uncertain {
            let least = &mut block.least[of.row * self.stride..][..self.stride];
            for ((_, other), apart) in compared.by_ref().take(of.others) {
                let bound = &mut least[*other as usize];
                *bound = bound.max(apart.least);
            }
            let own = block.labels[of.row];
            if own != of.own {
                least[of.own as usize] = of.apart.least;
                least[own as usize] = f32::INFINITY;
            }
        }
    }

    /// Leaves all further rounds to searches.
    fn give_up(&mut self) {
        self.is_given_up = true;
        (self.own, self.least) = (Vec::new(), Vec::new());
        self.rounded.clear();
        self.reserved.shrink_to(0);
    }
}

/// Each centroid has moved so far: the least distance that one may be at.
#[inline(always)]
fn age(least: &mut [f32], moved: &[f32]) -> f32 {
    let mut nearest = [f32::INFINITY; SIDE_BY_SIDE];
    let (parts, rest) = least.split_at_mut(moved.len() / SIDE_BY_SIDE * SIDE_BY_SIDE);
    let (moved, rest_moved) = moved.as_chunks::<SIDE_BY_SIDE>();
    for (least, moved) in parts.as_chunks_mut::<SIDE_BY_SIDE>().0.iter_mut().zip(moved) {
        for ((least, moved), nearest) in least.iter_mut().zip(moved).zip(&mut nearest) {
            *least = less(*least, *moved);
            *nearest = if *least < *nearest { *least } else { *nearest };
        }
    }
    for ((least, moved), nearest) in rest.iter_mut().zip(rest_moved).zip(&mut nearest) {
        *least = less(*least, *moved);
        *nearest = if *least < *nearest { *least } else { *nearest };
    }
    nearest.into_iter().fold(f32::INFINITY, f32::min)
}

/// A bit for each that is within the bound.
#[inline(always)]
fn within<const COUNT: usize>(least: &[f32; COUNT], bound: f32) -> u32 {
    let near: [u32; COUNT] = std::array::from_fn(|i| u32::from(least[i] <= bound) << i);
    near.into_iter().fold(0, |all, one| all | one)
}

impl<T: Lanes> Assigner for PairBounds<T> {
    fn assign(
        &mut self,
        centroids: &Rows,
        labels: &mut Vec<u32>,
        job: &Job,
    ) -> Result<Option<Assigned>> {
        let Some(values) = centroids.reals::<T>().filter(|_| !self.is_given_up) else {
            return Ok(None);
        };
        let scale = &self.measure.scale;
        let rounded = match LinedRows::new(values, scale, |row| scale.is_outlier(row), job) {
            Err(Error::HostMemory { .. }) => {
                self.give_up();
                return Ok(None);
            }
            rounded => rounded?,
        };
        // What is cut short begins anew.
        let before = std::mem::take(&mut self.before);
        if !rounded.all_have_bounds() {
            return Ok(None);
        }
        let (has_labels, k) = (!labels.is_empty(), centroids.len());
        if !has_labels || before.len() != values.len() {
            self.forget(k);
        }
        let rounded = self.measure.centroids((values, rounded), &before);
        labels.resize(self.rows.len(), 0);
        let (mut own, mut least) = (std::mem::take(&mut self.own), std::mem::take(&mut self.least));
        let bounds = own.par_chunks_mut(BLOCK).zip(least.par_chunks_mut(BLOCK * self.stride));
        let blocks = labels.par_chunks_mut(BLOCK).zip(bounds).enumerate();
        type Parts<'a> = (&'a mut [u32], (&'a mut [f32], &'a mut [f32]));
        let assign = |scratch: &mut Scratch, (block, (labels, bounds)): (usize, Parts<'_>)| {
            job.check()?;
            let (first, (own, least)) = ((block * BLOCK) as u32, bounds);
            let mut before = [0; BLOCK];
            before[..labels.len()].copy_from_slice(labels);
            let mut block = Block { first, labels, own, least };
            let work = self.block(&rounded, &mut block, scratch);
            let rows = (first..).zip(before.into_iter().zip(block.labels.iter()));
            let moved = rows.filter(|(_, (before, now))| has_labels && before != *now);
            let moved: Vec<Moved> = moved.map(|(row, (before, _))| (row, before)).collect();
            Ok((work, moved))
        };
        let done: Result<Vec<_>> = blocks.map_init(Scratch::default, assign).collect();
        (self.own, self.least) = (own, least);
        let (done, moved): (Vec<Work>, Vec<_>) = done?.into_iter().unzip();
        let sum = |of: fn(&Work) -> u64| done.iter().map(of).sum::<u64>();
        let (pairs, rechecked) = (sum(|work| work.pairs), sum(|work| work.rechecked));
        self.before = before;
        self.before.clear();
        self.before.extend_from_slice(values);
        if rechecked as usize > self.rows.len() * (k / ONE_COMPUTED_IN + FREE) {
            self.give_up();
        }
        let work = Work { pairs, rechecked, ..Work::default() };
        Ok(Some(Assigned { moved: moved.concat(), work }))
    }

    fn distances(&self, centroids: &Rows, labels: &[u32], job: &Job) -> Result<Distances> {
        let Measure { metric, level, .. } = self.measure;
        distances::<T>((&self.rows, centroids), labels, (metric, level), job)
    }
}
