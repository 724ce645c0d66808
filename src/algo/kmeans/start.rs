//! How the first centroids are chosen, and what is drawn at random.

use std::collections::HashSet;
use std::sync::Arc;

use super::lloyd::Lloyd;
use crate::device::{Device, Spread};
use crate::error::{Error, Result};
use crate::matrix::{Matrix, Real, Rows};

impl<D: Device, T: Real> Lloyd<'_, D, T> {
    pub(super) fn given(&self, start: Option<&Rows>) -> Result<Vec<T>> {
        let Some(values) = start.and_then(|start| start.reals::<T>()) else {
            let message = "kmeans: no first centroids, or of another type than the rows";
            return Err(Error::InvalidArgument(message.to_string()));
        };
        let (found, dim) = start.map_or((0, 0), |start| (start.len(), start.matrix().dim()));
        if found != self.params.k || dim != self.dim {
            let (k, own) = (self.params.k, self.dim);
            return Err(Error::Unsatisfiable(format!(
                "kmeans: init has {found} centroids of dimension {dim}; wanted are {k} of {own}"
            )));
        }
        Ok(values.to_vec())
    }

    /// Different vectors of positive weight at random, of which there are enough.
    pub(super) fn at_random(&self, random: &mut Random) -> Vec<T> {
        let all = 0..self.rows.len() as u32;
        let mut left: Vec<u32> = all.filter(|row| self.weight(*row as usize) > 0.0).collect();
        let mut chosen: Vec<T> = Vec::with_capacity(self.params.k * self.dim);
        let mut distinct: HashSet<Vec<u64>> = HashSet::new();
        while chosen.len() < self.params.k * self.dim {
            let at = random.below(left.len() as u64) as usize;
            let row = self.row(left.swap_remove(at) as usize);
            if distinct.insert(row.iter().map(|x| (*x + T::ZERO).to_f64().to_bits()).collect()) {
                chosen.extend_from_slice(row);
            }
        }
        chosen
    }

    /// Greedy k-means++ among some rows.
    pub(super) fn plus_plus(
        &self,
        rows: &Rows,
        weights: Option<&[f64]>,
        random: &mut Random,
    ) -> Result<Vec<T>> {
        let values = rows.reals::<T>().unwrap_or_default();
        let metric = self.params.cost();
        let trials = 2 + (self.params.k as f64).ln() as usize;
        let mut spread = Spread::new(rows, weights, metric);
        let mut chosen: Vec<T> = Vec::with_capacity(self.params.k * self.dim);
        while chosen.len() < self.params.k * self.dim {
            self.cancel.check()?;
            let first = chosen.is_empty();
            let candidates: Vec<u32> = if first {
                vec![spread.draw(random.unit())]
            } else {
                (0..trials).map(|_| spread.draw(random.unit())).collect()
            };
            let best = self.device.spread(&mut spread, &candidates);
            chosen.extend_from_slice(&values[best as usize * self.dim..][..self.dim]);
        }
        Ok(chosen)
    }

    /// k-means||: a few rounds that draw many rows each, thinned out by k-means++.
    pub(super) fn parallel(&mut self, random: &mut Random) -> Result<Vec<T>> {
        const ROUNDS: usize = 5;
        let wanted = 2.0 * self.params.k as f64;
        let spread = Spread::new(self.rows, self.weights, self.params.cost());
        let mut candidates = vec![spread.draw(random.unit())];
        let mut costs = self.assign(&self.at(&candidates), None)?.costs;
        for _ in 0..ROUNDS {
            // A row without weight costs nothing, however far it is.
            let share = |row: usize, cost: &T| match self.weight(row) {
                0.0 => 0.0,
                weight => weight * cost.to_f64(),
            };
            let total: f64 = costs.iter().enumerate().map(|(row, cost)| share(row, cost)).sum();
            if total <= 0.0 {
                break;
            }
            let drawn: Vec<u32> = (costs.iter().enumerate())
                .filter(|(row, cost)| random.unit() < wanted * share(*row, cost) / total)
                .map(|(row, _)| row as u32)
                .collect();
            if drawn.is_empty() {
                continue;
            }
            let nearer = self.assign(&self.at(&drawn), None)?.costs;
            costs.iter_mut().zip(nearer).for_each(|(cost, nearer)| *cost = cost.min(nearer));
            candidates.extend(drawn);
        }
        let labels = self.assign(&self.at(&candidates), None)?.labels;
        let mut weights = vec![0.0; candidates.len()];
        for (row, label) in labels.into_iter().enumerate() {
            weights[label as usize] += self.weight(row);
        }
        let distinct = weights.iter().filter(|weight| **weight > 0.0).count();
        if distinct < self.params.k {
            // Too few were drawn: choose among all rows instead.
            return self.plus_plus(self.rows, self.weights, random);
        }
        let matrix = Matrix::new(T::elements(self.at(&candidates)), candidates.len(), self.dim);
        self.plus_plus(&Rows::all(Arc::new(matrix)), Some(&weights), random)
    }

    fn at(&self, rows: &[u32]) -> Vec<T> {
        rows.iter().flat_map(|row| self.row(*row as usize).iter().copied()).collect()
    }
}

/// Steele, Lea and Flood's SplitMix64: the same numbers for a seed for ever.
pub(super) struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to below 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From 0 to below a bound.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}
