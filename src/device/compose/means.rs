//! The means of clusters, as centroids.

use std::cmp::Reverse;

use crate::device::ClusterSums;
use crate::device::contract::Assignment;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Metric;
use crate::parallel::in_parallel;

/// Rows between two checks for cancellation.
const UNCHECKED: usize = 4096;

/// With fewer numbers than this, threads do not pay.
const FEW_NUMBERS: usize = 1 << 14;

/// Rows whose clusters' means are computed.
#[derive(Debug, Clone, Copy)]
pub struct Means<'a, T> {
    /// The rows, one after the other.
    pub values: &'a [T],
    /// Elements of a row.
    pub dim: usize,
    /// The weight of each row, if they do not all weigh 1.
    pub weights: Option<&'a [f64]>,
    /// The metric whose distances are added up. Centroids are prepared for it.
    pub metric: Metric,
}

impl<T: Real> Means<'_, T> {
    /// The mean of every cluster; each must have rows of positive weight. `before` has the previous
    /// centroids.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn of(
        &self,
        sums: &ClusterSums,
        labels: &[u32],
        before: &[T],
        job: &Job,
    ) -> Result<Vec<T>> {
        Ok(self.centroids(sums, self.single_vectors(labels, sums.clusters(), job)?, before))
    }

    /// The same, where clusters may be empty. An empty cluster takes the row that is farthest from
    /// its own centroid (ties go to the earlier row) out of that row's cluster.
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
        let _reserved = job.reserve("the farthest rows", now.labels.len() * size_of::<usize>())?;
        let empty = sums.empty();
        let mut singles = self.single_vectors(&now.labels, sums.clusters(), job)?;
        let mut sums = sums.clone();
        let mut farthest: Vec<usize> =
            (0..now.labels.len()).filter(|row| self.weight(*row) > 0.0).collect();
        let key = |row: &usize| Reverse(now.costs[*row].key(u32::MAX - *row as u32));
        let wanted = empty.len().min(farthest.len());
        if 0 < wanted && wanted < farthest.len() {
            farthest.select_nth_unstable_by_key(wanted - 1, key);
        }
        farthest.truncate(wanted);
        farthest.sort_unstable_by_key(key);
        for (cluster, row) in empty.into_iter().zip(farthest) {
            let from = Some(now.labels[row]);
            sums.move_row(self.row(row), self.weight(row), from, cluster as u32);
            singles[cluster] = Some(row);
        }
        Ok(self.centroids(&sums, singles, before))
    }

    fn centroids(&self, sums: &ClusterSums, singles: Vec<Option<usize>>, before: &[T]) -> Vec<T> {
        let mut centroids = before.to_vec();
        let all: Vec<_> = centroids.chunks_exact_mut(self.dim).zip(singles).enumerate().collect();
        let mean = |(cluster, (centroid, single)): (usize, (&mut [T], Option<usize>))| {
            self.centroid(sums, (cluster, single), centroid);
        };
        if before.len() < FEW_NUMBERS {
            all.into_iter().for_each(mean);
        } else {
            in_parallel(all, mean);
        }
        centroids
    }

    /// Moves a centroid to the mean of its rows, if it has any: `single` is one of them if all are the same.
    fn centroid(
        &self,
        sums: &ClusterSums,
        (cluster, single): (usize, Option<usize>),
        centroid: &mut [T],
    ) {
        let Some(mean) = sums.mean(cluster) else { return };
        if let Some(row) = single {
            centroid.copy_from_slice(self.row(row));
            return;
        }
        let old = centroid.to_vec();
        for (to, x) in centroid.iter_mut().zip(mean) {
            *to = T::from_f64(x);
        }
        // Directions that cancel out have no mean: the cluster stays where it was.
        if self.metric.prepare(centroid).is_err() {
            centroid.copy_from_slice(&old);
        }
    }

    /// The weighted sum of all rows' costs about a centroid in 0.
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

    /// The weighted sum of all rows' costs about the centroids of their clusters, from these sums of them and from what
    /// it is [about zero](Self::about_zero).
    pub fn inertia(&self, about_zero: f64, sums: &ClusterSums, centroids: &[T]) -> f64 {
        let product = |mean: f64, x: f64| match self.metric {
            Metric::SqEuclidean => x * (2.0 * mean - x),
            _ => mean * x,
        };
        let lowered = |(cluster, centroid): (usize, &[T])| {
            let centroid = centroid.iter().map(|x| x.to_f64());
            sums.mean(cluster).map_or(0.0, |mean| {
                let products = mean.zip(centroid).map(|(mean, x)| product(mean, x));
                sums.weight(cluster) * products.sum::<f64>()
            })
        };
        let all = centroids.chunks_exact(self.dim.max(1)).enumerate();
        let lowered: f64 = if centroids.len() < FEW_NUMBERS {
            all.map(lowered).sum()
        } else {
            in_parallel(all.collect(), lowered).into_iter().sum()
        };
        (about_zero - lowered).max(0.0)
    }

    /// For each cluster whose rows are all the same vector, the first of them: the mean is the vector,
    /// without rounding.
    ///
    /// The search is not needed where means come out as the vector anyway: in float32, unless
    /// directions are scaled to length 1 again. There the sum S of n rows x of weights w is Σ fl(w x),
    /// within 2⁻⁵³ of x Σ w; rounding S, Σ w and their quotient adds three times that. An error of 2⁻⁵¹
    /// is far below 2⁻²⁶, the smallest change of x that would round to another float32.
    fn single_vectors(&self, labels: &[u32], k: usize, job: &Job) -> Result<Vec<Option<usize>>> {
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
