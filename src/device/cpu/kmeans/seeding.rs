//! Greedy k-means++ (Arthur and Vassilvitskii 2007; greedy as in scikit-learn, with 2 + ⌊ln k⌋
//! candidates a step), on all cores.

use std::ops::Range;

use rayon::prelude::*;

use crate::device::cpu::simd::transposed::Transposed;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::{Real, Rows};
use crate::metric::Metric;
use crate::random::Random;

/// Rows whose costs are added up one after the other.
const BLOCK: usize = 1024;

/// Chooses `k` rows as [`seed`](crate::device::KMeansSession::seed) says.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
pub(crate) fn plus_plus<T: Real>(
    rows: &Rows,
    weights: Option<&[f64]>,
    metric: Metric,
    k: usize,
    random: &mut Random,
    job: &Job,
) -> Result<Vec<T>> {
    let values: &[T] = rows.reals().expect("a session has rows of its own type");
    let dim = rows.matrix().dim();
    let _reserved = job.reserve("the choice of first centroids", rows.len() * size_of::<T>())?;
    let mut costs = SeedCosts::new(values, dim, weights, metric);
    let candidates = 2 + (k as f64).ln() as usize;
    let mut chosen: Vec<T> = Vec::with_capacity(k * dim);
    for step in 0..k {
        job.check()?;
        let drawn = if step == 0 { 1 } else { candidates };
        let drawn: Vec<u32> = (0..drawn).map(|_| costs.draw(random.unit())).collect();
        let best = if drawn.len() == 1 { drawn[0] } else { drawn[costs.best(&drawn, job)?] };
        let row = &values[best as usize * dim..][..dim];
        chosen.extend_from_slice(row);
        if step + 1 < k {
            costs.add(row, job)?;
        }
    }
    Ok(chosen)
}

/// The distance of every row from the nearest row chosen so far.
struct SeedCosts<'a, T> {
    values: &'a [T],
    dim: usize,
    weights: Option<&'a [f64]>,
    metric: Metric,
    /// Empty before the first row is chosen: rows then cost their weight.
    costs: Vec<T>,
    /// For each block of rows, weight times cost, added up in order.
    totals: Vec<f64>,
}

impl<'a, T: Real> SeedCosts<'a, T> {
    fn new(values: &'a [T], dim: usize, weights: Option<&'a [f64]>, metric: Metric) -> Self {
        let rows = values.len() / dim;
        let total = |start: usize| match weights {
            Some(weights) => weights[start..].iter().take(BLOCK).sum(),
            None => (rows - start).min(BLOCK) as f64,
        };
        let totals = (0..rows).step_by(BLOCK).map(total).collect();
        Self { values, dim, weights, metric, costs: Vec::new(), totals }
    }

    fn rows(&self) -> usize {
        self.values.len() / self.dim
    }

    fn weight(&self, row: usize) -> f64 {
        self.weights.map_or(1.0, |weights| weights[row])
    }

    /// The weight of a row times its cost.
    fn share(&self, row: usize) -> f64 {
        let weight = self.weight(row);
        self.costs.get(row).map_or(weight, |cost| share(weight, cost.to_f64()))
    }

    /// Draws a row with probability proportional to weight times cost, by a number from 0 to 1.
    fn draw(&self, unit: f64) -> u32 {
        let total: f64 = self.totals.iter().sum();
        let mut left = unit * total;
        let mut last = None;
        for (block, sum) in self.totals.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
            last = Some(block);
            if left >= *sum {
                left -= sum;
                continue;
            }
            for row in self.block(block) {
                let share = self.share(row);
                if share > 0.0 && left < share {
                    return row as u32;
                }
                left -= share;
            }
        }
        // Rounding has passed the end of the sum, or all costs are zero.
        let of_block = |block| self.block(block).rev().find(|row| self.share(*row) > 0.0);
        last.and_then(of_block).map_or_else(|| self.any(unit), |row| row as u32)
    }

    fn block(&self, block: usize) -> Range<usize> {
        block * BLOCK..self.rows().min((block + 1) * BLOCK)
    }

    /// Draws a row of positive weight, all with the same probability.
    fn any(&self, unit: f64) -> u32 {
        let all = self.rows();
        let of = |count: usize| ((unit * count as f64) as usize).min(count.saturating_sub(1));
        if self.weights.is_none() {
            return of(all) as u32;
        }
        let heavy = || (0..all).filter(|row| self.weight(*row) > 0.0);
        heavy().nth(of(heavy().count())).unwrap_or(0) as u32
    }

    /// Adds a row to those chosen.
    fn add(&mut self, row: &[T], job: &Job) -> Result<()> {
        let (dim, metric, weights) = (self.dim, self.metric, self.weights);
        let mut costs = std::mem::take(&mut self.costs);
        costs.resize(self.rows(), T::INFINITY);
        self.totals = self
            .values
            .par_chunks(BLOCK * dim)
            .zip(costs.par_chunks_mut(BLOCK))
            .enumerate()
            .map(|(block, (values, costs))| {
                job.check()?;
                let mut found = vec![T::ZERO; costs.len()];
                Transposed::new(values, dim).costs(metric, row, &mut found);
                costs.iter_mut().zip(found).for_each(|(cost, found)| *cost = cost.min(found));
                Ok(total(weights, block, costs.iter().copied()))
            })
            .collect::<Result<_>>()?;
        self.costs = costs;
        Ok(())
    }

    /// Which of these rows leaves the least Σ weight · distance to the nearest chosen row, the first
    /// in case of a tie.
    fn best(&self, candidates: &[u32], job: &Job) -> Result<usize> {
        // For each block, the cost left with each candidate; added up in order of the blocks.
        let blocks: Vec<Vec<f64>> = self
            .values
            .par_chunks(BLOCK * self.dim)
            .zip(self.costs.par_chunks(BLOCK))
            .enumerate()
            .map(|(block, (values, costs))| {
                job.check()?;
                let transposed = Transposed::new(values, self.dim);
                let mut found = vec![T::ZERO; costs.len()];
                let left = |row: &u32| {
                    let row = &self.values[*row as usize * self.dim..][..self.dim];
                    transposed.costs(self.metric, row, &mut found);
                    let costs = found.iter().zip(costs).map(|(a, b)| a.min(*b));
                    total(self.weights, block, costs)
                };
                Ok(candidates.iter().map(left).collect())
            })
            .collect::<Result<_>>()?;
        let left = |i: usize| blocks.iter().map(|block| block[i]).sum::<f64>();
        let lefts: Vec<_> = (0..candidates.len()).map(left).collect();
        Ok((1..lefts.len()).fold(0, |a, b| if lefts[b] < lefts[a] { b } else { a }))
    }
}

/// Weight times cost of a block's rows, added up.
fn total<T: Real>(weights: Option<&[f64]>, block: usize, costs: impl Iterator<Item = T>) -> f64 {
    let weight = |i: usize| weights.map_or(1.0, |weights| weights[block * BLOCK + i]);
    costs.enumerate().map(|(i, cost)| share(weight(i), cost.to_f64())).sum()
}

/// Weight times cost; a row without weight costs nothing, however far it is.
fn share(weight: f64, cost: f64) -> f64 {
    if weight == 0.0 { 0.0 } else { weight * cost }
}
