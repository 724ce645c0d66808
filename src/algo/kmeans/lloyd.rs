//! One input on its way through runs and rounds.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use super::start::Random;
use super::{Clustering, Init, KMeansParams, Rounds};
use crate::algo::knn::{Knn, KnnParams};
use crate::device::{
    Cancel, ClusterSums, Device, Distances, End, LloydStart, Resident, in_parallel, shift,
    squares_are_finite,
};
use crate::error::{Error, Result};
use crate::matrix::{Matrix, Real, Rows};
use crate::metric::{Metric, power_of_two_near_inverse};

/// One input on its way through all runs.
pub(super) struct Lloyd<'a, D, T> {
    pub(super) device: &'a Arc<D>,
    pub(super) rows: &'a Rows,
    pub(super) values: &'a [T],
    pub(super) dim: usize,
    pub(super) weights: Option<&'a [f64]>,
    pub(super) params: &'a KMeansParams,
    pub(super) cancel: &'a Cancel,
    /// Squared distances that the centroids may still move in the last round, …
    pub(super) tolerance: f64,
    /// … of coordinates times this power of two.
    unit: f64,
    /// The largest magnitude of an element.
    largest: f64,
    /// Sums of no rows.
    pub(super) empty: ClusterSums,
    /// The rows on the device, if rounds run there.
    pub(super) resident: Option<Box<dyn Resident>>,
    pub(super) rounds: Rounds,
}

/// Centroids to which all rows are assigned, at the end of the rounds.
pub(super) struct Settled<T> {
    pub(super) centroids: Vec<T>,
    pub(super) last: Assigned<T>,
    pub(super) iterations: usize,
    pub(super) moved: usize,
}

/// The nearest centroid of every row, and what it costs to be there.
pub(super) struct Assigned<T> {
    pub(super) labels: Vec<u32>,
    pub(super) costs: Vec<T>,
}

impl<'a, D: Device, T: Real> Lloyd<'a, D, T> {
    pub(super) fn try_new(
        device: &'a Arc<D>,
        rows: &'a Rows,
        weights: Option<&'a [f64]>,
        params: &'a KMeansParams,
        cancel: &'a Cancel,
    ) -> Result<Self> {
        let dim = rows.matrix().dim();
        let values = rows.reals::<T>().unwrap_or_default();
        if params.max_iterations == 0 || params.runs == 0 {
            let message = "kmeans: max_iterations and runs are counted from 1";
            return Err(Error::InvalidArgument(message.to_string()));
        }
        if !(params.tolerance >= 0.0 && params.tolerance.is_finite()) {
            let found = params.tolerance;
            return Err(Error::InvalidArgument(format!(
                "kmeans: tolerance is {found}; accepted are numbers from 0"
            )));
        }
        check_weights(weights, rows.len())?;
        let (needed, found) = (params.k, distinct_rows(values, dim, weights, params.k));
        if found < needed {
            let weighing = if weights.is_some() { " of positive weight" } else { "" };
            return Err(Error::Unsatisfiable(format!(
                "kmeans: k is {needed}, but the input has only {found} distinct vectors{weighing}"
            )));
        }
        let Moments { means, variance, unit, largest, farthest } = moments(values, dim);
        let empty = ClusterSums::new(values, weights, dim, params.k);
        let (tolerance, rounds) = (params.tolerance * variance, Rounds::default());
        let resident = match (weights, params.cost()) {
            (None, Metric::SqEuclidean) if squares_are_finite(dim, largest) => {
                let start = LloydStart { empty: &empty, origin: &means, farthest, tolerance };
                device.reside(rows, &start)?
            }
            _ => None,
        };
        Ok(Self {
            device,
            rows,
            values,
            dim,
            weights,
            params,
            cancel,
            tolerance,
            unit,
            largest,
            empty,
            resident,
            rounds,
        })
    }

    /// The run of least inertia.
    pub(super) fn best(mut self, start: Option<&Rows>) -> Result<Clustering> {
        let runs = if self.params.init == Init::Given { 1 } else { self.params.runs };
        let mut best: Option<Clustering> = None;
        for run in 0..runs {
            let centroids = self.start(run, start)?;
            let found = self.lloyd(centroids)?;
            let all = found.rounds;
            let best = match &mut best {
                Some(best) if best.inertia() <= found.inertia() => best,
                other => other.insert(found),
            };
            let Rounds { iterations, moved, inertia, .. } = best.rounds;
            best.rounds = Rounds { iterations, moved, inertia, ..all };
        }
        best.ok_or_else(|| Error::InvalidArgument("kmeans: no runs".to_string()))
    }

    /// The first centroids of a run.
    pub(super) fn start(&mut self, run: usize, given: Option<&Rows>) -> Result<Vec<T>> {
        let (clock, assigning) = (Instant::now(), self.rounds.assigning);
        let seed = self.params.seed.wrapping_add((run as u64).wrapping_mul(0xa076_1d64_78bd_642f));
        let centroids = match self.params.init {
            Init::Given => self.given(given)?,
            Init::Random => self.at_random(&mut Random(seed)),
            Init::PlusPlus => self.plus_plus(self.rows, self.weights, &mut Random(seed))?,
            Init::Parallel => self.parallel(&mut Random(seed))?,
        };
        // k-means|| assigns rows as well; that is no round.
        self.rounds.assigning = assigning;
        self.rounds.seeding += clock.elapsed();
        Ok(centroids)
    }

    /// Rounds from these centroids on.
    fn lloyd(&mut self, centroids: Vec<T>) -> Result<Clustering> {
        let settled = match self.resident.take() {
            Some(mut resident) => {
                let settled = self.rounds_on_device(resident.as_mut(), &centroids)?;
                self.resident = Some(resident);
                settled
            }
            None => None,
        };
        let settled = match settled {
            Some(settled) => settled,
            None => self.rounds_by_search(centroids)?,
        };
        Ok(self.clusters(settled))
    }

    /// What a run has found. Times and counts are those of all runs so far.
    pub(super) fn clusters(&self, settled: Settled<T>) -> Clustering {
        let Settled { centroids, last, iterations, moved } = settled;
        let k = self.params.k;
        let (mut sizes, mut inertias) = (vec![0; k], vec![0.0; k]);
        for (row, (label, cost)) in last.labels.iter().zip(&last.costs).enumerate() {
            sizes[*label as usize] += 1;
            // A row without weight costs nothing, however far it is.
            if self.weight(row) > 0.0 {
                inertias[*label as usize] += self.weight(row) * cost.to_f64();
            }
        }
        let distance = |cost: T| if self.params.metric == Metric::L2 { cost.sqrt() } else { cost };
        let distances = Distances::of(last.costs.into_iter().map(distance).collect());
        let centroids = Arc::new(Matrix::new(T::elements(centroids), k, self.dim));
        let inertia = inertias.iter().sum();
        let rounds = Rounds { iterations, moved, inertia, ..self.rounds };
        Clustering { labels: last.labels, distances, centroids, sizes, inertias, rounds }
    }

    /// Rounds in which every row is searched for on the device, and centroids move on the host.
    pub(super) fn rounds_by_search(&mut self, mut centroids: Vec<T>) -> Result<Settled<T>> {
        let mut sums = self.empty.clone();
        let mut before: Option<Assigned<T>> = None;
        let (mut iterations, mut moved) = (0, self.rows.len());
        let last = loop {
            let near = before.as_ref().map(|before| before.labels.as_slice());
            let now = self.assign(&centroids, near)?;
            if iterations == self.params.max_iterations {
                break now;
            }
            iterations += 1;
            let clock = Instant::now();
            let old = before.as_ref().map(|before| before.labels.as_slice());
            moved = match old {
                Some(old) => old.iter().zip(&now.labels).filter(|(a, b)| a != b).count(),
                None => self.rows.len(),
            };
            if moved == 0 {
                break now;
            }
            self.device.regroup(self.rows, self.weights, (old, &now.labels), &mut sums);
            let next = self.means(&sums, &now, &centroids);
            let moved_by = shift(&centroids, &next, self.dim, self.unit);
            centroids = next;
            self.rounds.updating += clock.elapsed();
            if moved_by <= self.tolerance {
                break self.assign(&centroids, Some(&now.labels))?;
            }
            before = Some(now);
        };
        Ok(Settled { centroids, last, iterations, moved })
    }

    /// Whether no squared distance between rows, and these first centroids, overflows float32. Means
    /// of rows are among them, so all later centroids are.
    pub(super) fn squares_are_finite(&self, start: &[T]) -> bool {
        let largest = start.iter().fold(self.largest, |most, x| most.max(x.to_f64().abs()));
        squares_are_finite(self.dim, largest)
    }

    /// Rounds that stay on the device, except those that leave a cluster empty. `None` if the
    /// device gives up, or distances from these centroids are more than it can compare.
    fn rounds_on_device(
        &mut self,
        resident: &mut dyn Resident,
        start: &[T],
    ) -> Result<Option<Settled<T>>> {
        let clock = Instant::now();
        if !self.squares_are_finite(start) {
            return Ok(None);
        }
        resident.start(&singles(start))?;
        let (mut iterations, mut moved) = (0, self.rows.len());
        while iterations < self.params.max_iterations {
            let stretch = resident.run(self.params.max_iterations - iterations, self.cancel)?;
            iterations += stretch.rounds;
            moved = stretch.moved;
            match stretch.end {
                End::Crowded => return Ok(None),
                End::EmptyCluster => {
                    let (labels, costs) = resident.assigned()?;
                    let now = Assigned { labels, costs: reals(costs) };
                    let centroids: Vec<T> = reals(resident.centroids()?);
                    let next = self.means(&resident.sums()?, &now, &centroids);
                    let moved_by = shift(&centroids, &next, self.dim, self.unit);
                    resident.go_on(&singles(&next))?;
                    if moved_by <= self.tolerance {
                        break;
                    }
                }
                End::Limit | End::Stable | End::Converged => break,
            }
        }
        if !resident.assign()? {
            return Ok(None);
        }
        let (labels, costs) = resident.assigned()?;
        let last = Assigned { labels, costs: reals(costs) };
        let centroids = reals(resident.centroids()?);
        self.rounds.assigned += self.rows.len() as u64 * (iterations as u64 + 1);
        self.rounds.work += resident.take_work()?;
        self.rounds.assigning += clock.elapsed();
        Ok(Some(Settled { centroids, last, iterations, moved }))
    }

    pub(super) fn weight(&self, row: usize) -> f64 {
        self.weights.map_or(1.0, |weights| weights[row])
    }

    /// The nearest of these centroids for every row, which may have been near one of them before.
    pub(super) fn assign(&mut self, centroids: &[T], near: Option<&[u32]>) -> Result<Assigned<T>> {
        self.cancel.check()?;
        let clock = Instant::now();
        let count = centroids.len() / self.dim;
        let matrix = Matrix::new(T::elements(centroids.to_vec()), count, self.dim);
        let params = KnnParams::try_new(1, self.params.cost())?;
        let search = Knn::try_new(self.device.clone(), Rows::all(Arc::new(matrix)), params)?;
        let found = search.search_near(self.rows, None, near, self.cancel)?;
        self.rounds.assigned += self.rows.len() as u64;
        self.rounds.work += found.work;
        self.rounds.assigning += clock.elapsed();
        let costs = found.distances.reals().unwrap_or_default();
        Ok(Assigned { labels: found.rows, costs })
    }

    /// The mean of every cluster. An empty one takes the row that is farthest from its own centroid,
    /// the earlier of equals, out of that cluster.
    fn means(&self, sums: &ClusterSums, now: &Assigned<T>, before: &[T]) -> Vec<T> {
        let empty = sums.empty();
        let mut alike = self.alike(&now.labels);
        let mut changed;
        let mut sums = sums;
        if !empty.is_empty() {
            changed = sums.clone();
            let mut farthest: Vec<usize> =
                (0..self.rows.len()).filter(|row| self.weight(*row) > 0.0).collect();
            let key = |row: &usize| std::cmp::Reverse(now.costs[*row].key(u32::MAX - *row as u32));
            let wanted = empty.len().min(farthest.len());
            if wanted < farthest.len() {
                farthest.select_nth_unstable_by_key(wanted - 1, key);
            }
            farthest.truncate(wanted);
            farthest.sort_unstable_by_key(key);
            for (cluster, row) in empty.into_iter().zip(farthest) {
                let values = &self.values[row * self.dim..][..self.dim];
                let from = now.labels[row];
                changed.shift(values, self.weight(row), Some(from), cluster as u32);
                alike[cluster] = Some(row);
            }
            sums = &changed;
        }
        let mut centroids = before.to_vec();
        for (cluster, centroid) in centroids.chunks_exact_mut(self.dim).enumerate() {
            let Some(mean) = sums.mean(cluster) else { continue };
            if let Some(row) = alike[cluster] {
                centroid.copy_from_slice(self.row(row));
                continue;
            }
            let old = centroid.to_vec();
            for (to, x) in centroid.iter_mut().zip(mean) {
                *to = T::from_f64(x);
            }
            // Directions that cancel out have no mean: the cluster stays where it was.
            if self.params.metric.prepare(centroid).is_err() {
                centroid.copy_from_slice(&old);
            }
        }
        centroids
    }

    /// For each cluster of one vector, however often it is there, the first row that is it: its mean
    /// is the vector, without rounding.
    ///
    /// Nobody needs to look for them where means come out as the vector anyway: in float32, unless
    /// directions are scaled to length 1 again. There the sum S of n rows x of weights w is Σ fl(w x),
    /// within 2⁻⁵³ of x Σ w; rounding S, Σ w and their quotient adds three times that. An error of 2⁻⁵¹
    /// is far below 2⁻²⁶, the least that x would have to change by to be rounded to another float32.
    fn alike(&self, labels: &[u32]) -> Vec<Option<usize>> {
        let mut first = vec![None; self.params.k];
        if T::MANTISSA <= f32::MANTISSA_DIGITS && self.params.metric == Metric::L2 {
            return first;
        }
        let mut mixed = vec![false; self.params.k];
        for (row, label) in labels.iter().map(|label| *label as usize).enumerate() {
            if !mixed[label] {
                let first = *first[label].get_or_insert(row);
                mixed[label] = self.row(first) != self.row(row);
            }
        }
        first.into_iter().zip(mixed).map(|(first, mixed)| first.filter(|_| !mixed)).collect()
    }

    pub(super) fn row(&self, row: usize) -> &[T] {
        &self.values[row * self.dim..][..self.dim]
    }
}

/// Numbers as a device that computes in float32 has them: no others get there.
pub(super) fn singles<T: Real>(values: &[T]) -> Vec<f32> {
    values.iter().map(|x| x.to_f64() as f32).collect()
}

pub(super) fn reals<T: Real>(values: Vec<f32>) -> Vec<T> {
    values.into_iter().map(|x| T::from_f64(f64::from(x))).collect()
}

/// How many different rows of positive weight there are, counted up to `most`. Zeros of both signs
/// are equal.
pub(super) fn distinct_rows<T: Real>(
    values: &[T],
    dim: usize,
    weights: Option<&[f64]>,
    most: usize,
) -> usize {
    let bits = |row: &[T]| row.iter().map(|x| (*x + T::ZERO).to_f64().to_bits()).collect();
    let mut distinct: HashSet<Vec<u64>> = HashSet::new();
    for (i, row) in values.chunks_exact(dim.max(1)).enumerate() {
        if weights.is_some_and(|weights| weights[i] == 0.0) {
            continue;
        }
        distinct.insert(bits(row));
        if distinct.len() == most {
            break;
        }
    }
    distinct.len()
}

/// A weight from 0 for each row, and not all of them 0.
fn check_weights(weights: Option<&[f64]>, rows: usize) -> Result<()> {
    let Some(weights) = weights else { return Ok(()) };
    if weights.len() != rows {
        let found = weights.len();
        return Err(Error::InvalidArgument(format!("kmeans: {found} weights for {rows} vectors")));
    }
    if let Some(bad) = weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
        return Err(Error::InvalidArgument(format!(
            "kmeans: a weight is {bad}; accepted are numbers from 0"
        )));
    }
    if weights.iter().all(|w| *w == 0.0) {
        return Err(Error::Unsatisfiable("kmeans: all weights are 0".to_string()));
    }
    Ok(())
}

/// What is known about rows before they are put into clusters.
struct Moments {
    /// The mean of every dimension.
    means: Vec<f64>,
    /// The mean of the dimensions' variances, of coordinates times …
    variance: f64,
    /// … this power of two, with which squares neither overflow nor vanish in float64.
    unit: f64,
    /// The largest magnitude of an element, …
    largest: f64,
    /// … and the largest difference of one from its dimension's mean.
    farthest: f64,
}

fn moments<T: Real>(values: &[T], dim: usize) -> Moments {
    let rows = (values.len() / dim.max(1)).max(1) as f64;
    let mut columns = columns(values, dim, 1.0);
    let largest = columns.ends.iter().fold(0.0, |most: f64, (a, b)| most.max(b.max(-a)));
    // Always 1 for float32.
    let is_near_1 = (1e-60..1e60).contains(&largest);
    let unit = if is_near_1 { 1.0 } else { power_of_two_near_inverse(largest) };
    if unit != 1.0 {
        columns = self::columns(values, dim, unit);
    }
    let means: Vec<f64> = columns.sums.iter().map(|sum| sum / rows).collect();
    let variance = variances(values, &means, unit).iter().sum::<f64>() / dim.max(1) as f64;
    let means: Vec<f64> = means.into_iter().map(|mean| mean / unit).collect();
    let from_mean = columns.ends.iter().zip(&means).map(|((a, b), mean)| (b - mean).max(mean - a));
    let farthest = from_mean.fold(0.0, f64::max);
    Moments { means, variance, unit, largest, farthest }
}

/// Rows whose numbers are added up in order; then sums are, block by block.
const BLOCK: usize = 4096;

/// All elements of each dimension.
struct Columns {
    /// Added up, times a power of two.
    sums: Vec<f64>,
    /// The least and the largest one.
    ends: Vec<(f64, f64)>,
}

fn columns<T: Real>(values: &[T], dim: usize, unit: f64) -> Columns {
    let blocks = in_parallel(values.chunks(BLOCK * dim.max(1)).collect(), |block: &[T]| {
        let mut sums = vec![0.0; dim];
        let (mut low, mut high) = (block[..dim].to_vec(), block[..dim].to_vec());
        for row in block.chunks_exact(dim.max(1)) {
            let ends = low.iter_mut().zip(&mut high);
            for ((x, sum), (low, high)) in row.iter().zip(&mut sums).zip(ends) {
                *sum += x.to_f64() * unit;
                *low = if x < low { *x } else { *low };
                *high = if x > high { *x } else { *high };
            }
        }
        (sums, low, high)
    });
    let mut all = Columns { sums: vec![0.0; dim], ends: vec![(f64::MAX, f64::MIN); dim] };
    for (sums, low, high) in blocks {
        let ends = low.iter().zip(&high).map(|(low, high)| (low.to_f64(), high.to_f64()));
        for ((to, from), (sum, more)) in
            all.ends.iter_mut().zip(ends).zip(all.sums.iter_mut().zip(sums))
        {
            *to = (to.0.min(from.0), to.1.max(from.1));
            *sum += more;
        }
    }
    all
}

/// The variance of each dimension, around these means of elements times a power of two.
fn variances<T: Real>(values: &[T], means: &[f64], unit: f64) -> Vec<f64> {
    let dim = means.len();
    let blocks = in_parallel(values.chunks(BLOCK * dim.max(1)).collect(), |block: &[T]| {
        let mut sums = vec![0.0; dim];
        for row in block.chunks_exact(dim.max(1)) {
            for ((x, mean), sum) in row.iter().zip(means).zip(&mut sums) {
                *sum += (x.to_f64() * unit - mean).powi(2);
            }
        }
        sums
    });
    let mut all = vec![0.0; dim];
    for sums in blocks {
        all.iter_mut().zip(sums).for_each(|(sum, more)| *sum += more);
    }
    let rows = (values.len() / dim.max(1)).max(1) as f64;
    all.into_iter().map(|sum| sum / rows).collect()
}
