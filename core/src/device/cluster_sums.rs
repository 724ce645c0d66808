//! Exact cluster sums, for the means of k-means.

use std::sync::Arc;

use super::sums::{ExactSums, Scaled, Steps};
use crate::matrix::Real;

/// The exact sums of clusters' rows: they do not depend on the order in which rows are added and
/// removed, nor on other clusters and dimensions.
///
/// A mean is the sum of weight times coordinate, each product rounded once to the 53 bits of
/// float64, over the sum of the weights. Each sum is exact until it is rounded to float64, and so
/// is the quotient. The error is at most 4 ulp (float64) of Σ w |x| / Σ w.
#[derive(Debug, Clone)]
pub struct ClusterSums {
    /// Number of rows of positive weight in each cluster.
    pub(super) counts: Vec<i64>,
    pub(super) sums: ExactSums,
    /// The sums of weights; `None` if all weights are 1.
    pub(super) weights: Option<ExactSums>,
}

impl ClusterSums {
    /// Empty sums of `k` clusters, for these values (row by row) and weights.
    pub fn new<T: Real>(values: &[T], weights: Option<&[f64]>, dim: usize, k: usize) -> Self {
        let sums = ExactSums::new(Arc::new(Steps::choose(values, dim, weights)), k);
        let weights =
            weights.map(|weights| ExactSums::new(Arc::new(Steps::choose(weights, 1, None)), k));
        Self { counts: vec![0; k], sums, weights }
    }

    /// Empty sums of the same clusters.
    pub fn cleared(&self) -> Self {
        let weights = self.weights.as_ref().map(ExactSums::cleared);
        Self { counts: vec![0; self.counts.len()], sums: self.sums.cleared(), weights }
    }

    /// The inverse steps of a row's columns, and last of its weight, if rows have weights.
    #[cfg(feature = "cuda")]
    pub fn inverse_steps(&self) -> Vec<f64> {
        let weights = self.weights.iter().flat_map(|weights| &weights.steps.inverse);
        self.sums.steps.inverse.iter().chain(weights).copied().collect()
    }

    /// Number of clusters.
    pub fn clusters(&self) -> usize {
        self.counts.len()
    }

    /// Number of rows of positive weight in each cluster.
    pub fn counts(&self) -> &[i64] {
        &self.counts
    }

    /// Number of values of a row.
    pub fn width(&self) -> usize {
        self.sums.width()
    }

    /// Bytes of memory, without the wide sums.
    pub fn bytes(&self) -> usize {
        let weights = self.weights.as_ref().map_or(0, ExactSums::bytes);
        self.counts.len() * size_of::<i64>() + self.sums.bytes() + weights
    }

    /// Bytes of the wide sums, which are allocated as rows are added.
    pub fn wide_bytes(&self) -> usize {
        self.sums.wide_bytes() + self.weights.as_ref().map_or(0, ExactSums::wide_bytes)
    }

    /// Moves a row into the cluster `to`, and out of the cluster `from` if it is in one.
    #[inline(always)]
    pub fn move_row<T: Real>(&mut self, row: &[T], weight: f64, from: Option<u32>, to: u32) {
        if weight == 0.0 {
            return;
        }
        let (from, to) = (from.map(|from| from as usize), to as usize);
        self.counts[to] += 1;
        if let Some(from) = from {
            self.counts[from] -= 1;
        }
        self.sums.move_row(row, weight, from, to);
        if let Some(weights) = &mut self.weights {
            weights.move_row(&[weight], 1.0, from, to);
        }
    }

    /// Adds the sums of `other`.
    pub fn absorb(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(a, b)| *a += b);
        self.sums.absorb(&other.sums);
        if let (Some(weights), Some(other)) = (&mut self.weights, &other.weights) {
            weights.absorb(other);
        }
    }

    /// Adds the sums of other rows in the same clusters, with weights as these or without as these.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(a, b)| *a += b);
        self.sums.merge(&other.sums);
        if let (Some(weights), Some(other)) = (&mut self.weights, &other.weights) {
            weights.merge(other);
        }
    }

    /// Appends the sums in a form that is the same for equal sums.
    pub fn write(&self, to: &mut Vec<u8>) {
        self.counts.iter().for_each(|count| to.extend(count.to_le_bytes()));
        self.sums.write(to);
        self.weights.iter().for_each(|weights| weights.write(to));
    }

    /// Takes [written](Self::write) sums from the front of `from`; `None` if it has none.
    pub fn read(from: &mut &[u8], dim: usize, k: usize, has_weights: bool) -> Option<Self> {
        let count = |bytes: &[u8]| bytes.try_into().ok().map(i64::from_le_bytes);
        let counts = from.split_off(..k.checked_mul(size_of::<i64>())?)?;
        let counts = counts.chunks(size_of::<i64>()).map(count).collect::<Option<_>>()?;
        let sums = ExactSums::read(from, dim, k)?;
        let weights = has_weights.then(|| ExactSums::read(from, 1, k));
        let weights = if let Some(weights) = weights { Some(weights?) } else { None };
        Some(Self { counts, sums, weights })
    }

    /// The clusters without rows of positive weight, ascending.
    pub fn empty(&self) -> Vec<usize> {
        (0..self.counts.len()).filter(|cluster| self.counts[*cluster] == 0).collect()
    }

    /// The total weight of a cluster.
    pub fn weight(&self, cluster: usize) -> f64 {
        self.total_weight(cluster).over(Scaled::whole(1))
    }

    fn total_weight(&self, cluster: usize) -> Scaled {
        match &self.weights {
            Some(weights) => weights.total(cluster, 0),
            None => Scaled::whole(self.counts[cluster]),
        }
    }

    /// The weighted mean of a cluster's rows; `None` if their total weight is 0.
    pub fn mean(&self, cluster: usize) -> Option<impl Iterator<Item = f64>> {
        let (count, weight) = (self.counts[cluster], self.total_weight(cluster));
        let mean = move |column| self.sums.total(cluster, column).over(weight);
        (count != 0).then(|| (0..self.sums.width()).map(mean))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_sums_are_counted_once_there_are_any() {
        let values: Vec<f32> = (0..4000).map(|i| if i % 1000 == 7 { 1e-30 } else { 3.0 }).collect();
        let mut sums = ClusterSums::new(&values, None, 4, 2);
        assert_eq!(sums.wide_bytes(), 0);
        for (row, values) in values.chunks(4).enumerate() {
            sums.move_row(values, 1.0, None, row as u32 % 2);
        }
        // A number of 24 bits touches three bins.
        assert!(sums.wide_bytes() >= 3 * size_of::<i128>());
        assert_eq!(sums.cleared().wide_bytes(), 0);
    }
}
