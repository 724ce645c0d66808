//! Cluster means, and the centroids made of them.

use std::cmp::Reverse;

use crate::device::ClusterSums;
use crate::device::contract::Assignment;
use crate::device::cpu::CpuDevice;
use crate::device::cpu::kmeans::cluster_sums::NewLabels;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Metric;
use crate::parallel::in_parallel;
use crate::rows::Rows;

/// Rows between two checks for cancellation.
const UNCHECKED: usize = 4096;

/// Number of values below which threads do not pay off.
const FEW_NUMBERS: usize = 1 << 14;

/// Number of independent partial sums of products.
const SIDE_BY_SIDE: usize = 8;

/// The cluster sums of these rows, by their labels. `empty` has empty sums.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
pub fn sums_of(
    rows: &Rows,
    weights: Option<&[f64]>,
    labels: &[u32],
    mut empty: ClusterSums,
    job: &Job,
) -> Result<ClusterSums> {
    let labels = NewLabels { labels, moved: None };
    CpuDevice::new().move_rows(rows, weights, labels, &mut empty, job)?;
    Ok(empty)
}

/// Cluster means, updated for the clusters whose rows changed.
#[derive(Debug, Default)]
pub struct ClusterMeans {
    /// The total weight of each cluster; `None` if it is 0.
    weights: Vec<Option<f64>>,
    /// The means, one after the other.
    means: Vec<f64>,
}

impl ClusterMeans {
    /// Computes the means of the clusters that have `changed`, or all of them the first time.
    pub fn renew(&mut self, sums: &ClusterSums, changed: impl Fn(usize) -> bool) {
        let (k, width) = (sums.clusters(), sums.width());
        let is_new = self.weights.len() != k;
        self.weights.resize(k, None);
        self.means.resize(k * width, 0.0);
        let each = self.weights.iter_mut().zip(self.means.chunks_exact_mut(width.max(1)));
        let some = each.enumerate().filter(|(cluster, _)| is_new || changed(*cluster));
        let some: Vec<_> = some.collect();
        let renew = |(cluster, (weight, to)): (usize, (&mut Option<f64>, &mut [f64]))| {
            let mean = sums.mean(cluster);
            *weight = mean.is_some().then(|| sums.weight(cluster));
            to.iter_mut().zip(mean.into_iter().flatten()).for_each(|(to, x)| *to = x);
        };
        if some.len() * width < FEW_NUMBERS {
            some.into_iter().for_each(renew);
        } else {
            in_parallel(some, renew);
        }
    }

    /// The total weight and the mean of a cluster; `None` if the weight is 0.
    fn of(&self, cluster: usize) -> Option<(f64, &[f64])> {
        let width = self.means.len() / self.weights.len().max(1);
        Some((self.weights[cluster]?, &self.means[cluster * width..][..width]))
    }
}

/// The rows whose cluster means are computed.
#[derive(Debug, Clone, Copy)]
pub struct Means<'a, T> {
    /// The values of the rows, one after the other.
    pub values: &'a [T],
    /// Number of values of a row.
    pub dim: usize,
    /// The weight of each row; `None` if all weigh 1.
    pub weights: Option<&'a [f64]>,
    /// The metric whose distances are summed. Centroids are prepared for it.
    pub metric: Metric,
}

impl<T: Real> Means<'_, T> {
    /// The centroids for these means; each cluster must have rows of positive weight. `before` has
    /// the previous centroids.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn of(
        &self,
        means: &ClusterMeans,
        labels: &[u32],
        before: &[T],
        job: &Job,
    ) -> Result<Vec<T>> {
        let singles = self.single_vectors(labels, means.weights.len(), job)?;
        Ok(self.centroids(means, singles, before))
    }

    /// The same for clusters that may be empty. An empty cluster takes the row farthest from its
    /// own centroid (ties go to the earlier row) out of that row's cluster.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
    pub fn with_empty_filled(
        &self,
        sums: &ClusterSums,
        now: &Assignment<T>,
        before: &[T],
        job: &Job,
    ) -> Result<Vec<T>> {
        let _reserved =
            job.reserve("rows for empty clusters", now.labels.len() * size_of::<usize>())?;
        let singles = self.single_vectors(&now.labels, sums.clusters(), job)?;
        Ok(self.filled(sums.clone(), singles, now, before))
    }

    /// The same, given one of the rows of each cluster whose rows are all equal.
    pub fn filled(
        &self,
        mut sums: ClusterSums,
        mut singles: Vec<Option<usize>>,
        now: &Assignment<T>,
        before: &[T],
    ) -> Vec<T> {
        let empty = sums.empty();
        let mut farthest: Vec<usize> =
            (0..now.labels.len()).filter(|row| self.weight(*row) > 0.0).collect();
        let key = |row: &usize| Reverse(now.costs[*row].key(u32::MAX - *row as u32));
        let count = empty.len().min(farthest.len());
        if 0 < count && count < farthest.len() {
            farthest.select_nth_unstable_by_key(count - 1, key);
        }
        farthest.truncate(count);
        farthest.sort_unstable_by_key(key);
        for (cluster, row) in empty.into_iter().zip(farthest) {
            let from = Some(now.labels[row]);
            sums.move_row(self.row(row), self.weight(row), from, cluster as u32);
            singles[cluster] = Some(row);
        }
        let mut means = ClusterMeans::default();
        means.renew(&sums, |_| true);
        self.centroids(&means, singles, before)
    }

    fn centroids(&self, means: &ClusterMeans, singles: Vec<Option<usize>>, before: &[T]) -> Vec<T> {
        let mut centroids = before.to_vec();
        let all: Vec<_> = centroids.chunks_exact_mut(self.dim).zip(singles).enumerate().collect();
        let mean = |(cluster, (centroid, single)): (usize, (&mut [T], Option<usize>))| {
            self.centroid(means, cluster, single, centroid);
        };
        if before.len() < FEW_NUMBERS {
            all.into_iter().for_each(mean);
        } else {
            in_parallel(all, mean);
        }
        centroids
    }

    /// Moves a centroid to the mean of its rows, if their weight is positive; `single` is one of
    /// the rows if all are equal.
    fn centroid(
        &self,
        means: &ClusterMeans,
        cluster: usize,
        single: Option<usize>,
        centroid: &mut [T],
    ) {
        let Some((_, mean)) = means.of(cluster) else { return };
        if let Some(row) = single {
            centroid.copy_from_slice(self.row(row));
            return;
        }
        let old = centroid.to_vec();
        for (to, x) in centroid.iter_mut().zip(mean) {
            *to = T::from_f64(*x);
        }
        // Directions that cancel out have no mean: the centroid stays.
        if self.metric.prepare(centroid).is_err() {
            centroid.copy_from_slice(&old);
        }
    }

    /// The weighted sum of all rows' costs about the origin.
    pub fn about_zero(&self) -> f64 {
        let rows: Vec<_> = (0..self.values.len() / self.dim.max(1)).step_by(UNCHECKED).collect();
        let of_part = |first: usize| {
            let rows = self.values[first * self.dim..].chunks_exact(self.dim).take(UNCHECKED);
            let cost = |row: &[T]| match self.metric {
                Metric::SqEuclidean => row.iter().map(|x| x.to_f64() * x.to_f64()).sum(),
                _ => 1.0,
            };
            let weighted = (first..).zip(rows).map(|(i, row)| self.weight(i) * cost(row));
            weighted.sum::<f64>()
        };
        in_parallel(rows, of_part).into_iter().sum()
    }

    /// The inertia: the weighted sum of all rows' costs about their centroids, from the cluster
    /// means and the sum [about the origin](Self::about_zero).
    pub fn inertia(&self, about_zero: f64, means: &ClusterMeans, centroids: &[T]) -> f64 {
        let is_square = self.metric == Metric::SqEuclidean;
        let lowered = |(cluster, centroid): (usize, &[T])| {
            let Some((weight, mean)) = means.of(cluster) else { return 0.0 };
            let mut sums = [0.0; SIDE_BY_SIDE];
            let mut add = |means: &[f64], centroid: &[T]| {
                for ((sum, mean), x) in sums.iter_mut().zip(means).zip(centroid) {
                    let x = x.to_f64();
                    *sum += x * if is_square { 2.0 * mean - x } else { *mean };
                }
            };
            let (most, last) = mean.as_chunks::<SIDE_BY_SIDE>();
            let (most_of, last_of) = centroid.as_chunks::<SIDE_BY_SIDE>();
            most.iter().zip(most_of).for_each(|(mean, centroid)| add(mean, centroid));
            add(last, last_of);
            weight * sums.iter().sum::<f64>()
        };
        let all = centroids.chunks_exact(self.dim.max(1)).enumerate();
        (about_zero - all.map(lowered).sum::<f64>()).max(0.0)
    }

    /// For each cluster whose rows are all equal, the first of them: the mean is that vector,
    /// without rounding.
    ///
    /// In float32 the mean equals the vector anyway, unless directions are scaled to length 1
    /// again. The sum S of n rows x of weights w is Σ fl(w x), within 2⁻⁵³ of x Σ w; rounding S,
    /// Σ w and their quotient adds 3 · 2⁻⁵³. The relative error is at most 2⁻⁵¹, far below 2⁻²⁶, the
    /// smallest change of x that would round to another float32.
    pub fn single_vectors(
        &self,
        labels: &[u32],
        k: usize,
        job: &Job,
    ) -> Result<Vec<Option<usize>>> {
        let mut first = vec![None; k];
        if T::MANTISSA <= f32::MANTISSA_DIGITS && self.metric == Metric::SqEuclidean {
            return Ok(first);
        }
        let mut mixed = vec![false; k];
        for (row, label) in labels.iter().map(|label| *label as usize).enumerate() {
            if row % UNCHECKED == 0 {
                job.check()?;
            }
            if !mixed[label] {
                let first = *first[label].get_or_insert(row);
                mixed[label] = self.row(first) != self.row(row);
            }
        }
        let first = first.into_iter().zip(mixed);
        Ok(first.map(|(first, mixed)| first.filter(|_| !mixed)).collect())
    }

    fn weight(&self, row: usize) -> f64 {
        self.weights.map_or(1.0, |weights| weights[row])
    }

    fn row(&self, row: usize) -> &[T] {
        &self.values[row * self.dim..][..self.dim]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn means_of_clusters_that_changed_are_those_of_all() {
        let (rows, dim, k, mut random) = (300, 5, 20, Random::new(1));
        let values: Vec<f32> = (0..rows * dim).map(|_| random.normal() as f32).collect();
        let weights: Vec<f64> = (0..rows).map(|row| (row % 4) as f64 * 0.3).collect();
        for weights in [None, Some(weights.as_slice())] {
            let mut sums = ClusterSums::new(&values, weights, dim, k);
            let (mut labels, mut means) = (vec![None; rows], ClusterMeans::default());
            means.renew(&sums, |_| false);
            let (mut unchanged, mut without) = (0, 0);
            for round in 0..60 {
                let mut changed = vec![false; k];
                for _ in 0..=40 / (1 + round) {
                    let row = random.below(rows as u64) as usize;
                    let weight = weights.map_or(1.0, |weights| weights[row]);
                    // Some clusters never have rows.
                    let to = random.below(k as u64 - 3) as u32;
                    let from = labels[row].replace(to);
                    sums.move_row(&values[row * dim..][..dim], weight, from, to);
                    from.into_iter().chain([to]).for_each(|at| changed[at as usize] = true);
                }
                means.renew(&sums, |cluster| changed[cluster]);
                let mut all = ClusterMeans::default();
                all.renew(&sums, |_| true);
                for (cluster, changed) in changed.into_iter().enumerate() {
                    let entry = means.of(cluster);
                    assert_eq!(entry, all.of(cluster), "{round}");
                    let mean = sums.mean(cluster).map(Iterator::collect::<Vec<_>>);
                    assert_eq!(entry.map(|(_, mean)| mean), mean.as_deref());
                    unchanged += usize::from(!changed && entry.is_some());
                    without += usize::from(entry.is_none());
                }
            }
            assert!(unchanged > 100 && without >= 3 * 60, "{unchanged}, {without}");
        }
    }
}
