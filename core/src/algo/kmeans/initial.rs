//! Initial centroids: greedy k-means++ (Arthur and Vassilvitskii 2007), on the device; k-means||
//! (Bahmani et al. 2012); random rows; or given ones.

use std::collections::HashSet;
use std::sync::Arc;

use super::input::ProblemInput;
use super::params::{Init, KMeansParams};
use crate::device::{Assignment, KMeansDevice, KMeansInput, KMeansSession, sums_by_label};
use crate::error::{Error, Result};
use crate::job::{Job, Reserved};
use crate::matrix::{Matrix, Real};
use crate::parallel::in_parallel;
use crate::random::Random;
use crate::rows::Rows;

/// The initial centroids of a run, for each problem.
pub(super) fn initial<D: KMeansDevice, T: Real>(
    inputs: &[ProblemInput<'_, T>],
    device: &D,
    session: &mut (dyn KMeansSession<T> + '_),
    given: Option<&Rows>,
    run: usize,
    job: &Job,
) -> Result<Vec<Vec<T>>> {
    let Some(params) = inputs.first().map(|input| &input.params) else { return Ok(vec![]) };
    let seed = params.seed.wrapping_add((run as u64).wrapping_mul(0xa076_1d64_78bd_642f));
    let random = || Random::new(seed);
    let all = || inputs.iter().enumerate().collect::<Vec<_>>();
    match params.init {
        Init::Given => all().into_iter().map(|(_, input)| input.given(given)).collect(),
        Init::Random => {
            let at_random =
                |(_, input): (usize, &ProblemInput<'_, T>)| input.at_random(random(), job);
            in_parallel(all(), at_random).into_iter().collect()
        }
        Init::PlusPlus => session.seed((0..inputs.len()).map(|i| (i, random())).collect(), job),
        Init::Parallel => {
            let session = &*session;
            let parallel = |(i, input): (usize, &ProblemInput<'_, T>)| {
                let assign_to = |centroids: &[T]| session.assign_to(i, centroids, job);
                input.parallel(device, assign_to, random(), job)
            };
            in_parallel(all(), parallel).into_iter().collect()
        }
    }
}

impl<T: Real> ProblemInput<'_, T> {
    fn given(&self, centroids: Option<&Rows>) -> Result<Vec<T>> {
        let Some(values) = centroids.and_then(|given| given.reals::<T>()) else {
            let message = "kmeans: no first centroids, or of another type than the rows";
            return Err(Error::InvalidArgument(message.to_string()));
        };
        let KMeansParams { k, .. } = self.params;
        let count = centroids.map_or(0, Rows::len);
        // Without rows, there is no dimension either.
        let dim = centroids.filter(|_| count > 0).map_or(self.dim, |given| given.matrix().dim());
        if count != k || dim != self.dim {
            let row_dim = self.dim;
            return Err(Error::Unsatisfiable(format!(
                "kmeans: init has {count} centroids of dimension {dim}; wanted are {k} of {row_dim}"
            )));
        }
        Ok(values.to_vec())
    }

    /// Random distinct vectors, drawn without replacement with probabilities proportional to the
    /// weights. The problem has at least `k` distinct vectors of positive weight.
    fn at_random(&self, mut random: Random, job: &Job) -> Result<Vec<T>> {
        // For each centroid, its bits in a hash set at half load, and its values.
        let per_row = size_of::<f64>() + 1;
        let per_centroid =
            2 * size_of::<Vec<u64>>() + self.dim * (size_of::<u64>() + size_of::<T>());
        let bytes = self.rows.len() * per_row + self.params.k * per_centroid;
        let _reserved = job.reserve("random first centroids", bytes)?;
        let mut left = match self.weights {
            None => Undrawn::Equal((0..self.rows.len() as u32).collect()),
            Some(weights) => Undrawn::Weighted(Weighted::new(weights)),
        };
        let size = self.params.k * self.dim;
        let mut chosen: Vec<T> = Vec::with_capacity(size);
        let mut distinct: HashSet<Vec<u64>> = HashSet::new();
        while chosen.len() < size {
            job.check()?;
            let row = self.row(left.draw(&mut random));
            if distinct.insert(row.iter().map(|x| (*x + T::ZERO).to_f64().to_bits()).collect()) {
                chosen.extend_from_slice(row);
            }
        }
        Ok(chosen)
    }

    /// k-means||: oversamples candidates in `ROUNDS` rounds, and reduces them to `k` by k-means++.
    fn parallel(
        &self,
        device: &impl KMeansDevice,
        assign_to: impl Fn(&[T]) -> Result<Assignment<T>>,
        mut random: Random,
        job: &Job,
    ) -> Result<Vec<T>> {
        const ROUNDS: usize = 5;
        let (k, metric) = (self.params.k, self.params.cost());
        let oversampling = 2.0 * k as f64;
        // The costs of all rows, and their nearest candidates with these costs.
        let per_row = 2 * size_of::<T>() + size_of::<u32>();
        let _reserved = job.reserve("costs of rows", self.rows.len() * per_row)?;
        let mut reserved: Vec<Reserved> = Vec::new();
        let all = KMeansInput { rows: &self.rows, weights: self.weights, metric };
        let mut candidates: Vec<T> = device.plus_plus(all, 1, &mut random, job)?;
        let mut costs = assign_to(&candidates)?.costs;
        for _ in 0..ROUNDS {
            // A row of weight 0 costs nothing at any distance.
            let term = |row: usize| match self.weight(row) {
                0.0 => (0.0, 0.0),
                weight => (costs[row].to_f64(), weight),
            };
            let total = sums_by_label(costs.len(), 1, |_| 0, term, job)?[0];
            if total <= 0.0 {
                break;
            }
            let is_drawn = |row: &usize| {
                let (cost, weight) = term(*row);
                random.unit() < oversampling * (weight * cost) / total
            };
            let drawn: Vec<T> = (0..costs.len())
                .filter(is_drawn)
                .flat_map(|row| self.row(row).iter().copied())
                .collect();
            if drawn.is_empty() {
                continue;
            }
            // Once as they are drawn, and twice in a vector that doubles its capacity.
            reserved.push(job.reserve("candidates of k-means||", 3 * size_of_val(&drawn[..]))?);
            let nearer = assign_to(&drawn)?.costs;
            costs.iter_mut().zip(nearer).for_each(|(cost, nearer)| *cost = cost.min(nearer));
            candidates.extend(drawn);
        }
        let labels = assign_to(&candidates)?.labels;
        let count = candidates.len() / self.dim;
        let (label, weight) = (|row: usize| labels[row] as usize, |row| (self.weight(row), 1.0));
        let attracted = sums_by_label(labels.len(), count, label, weight, job)?;
        if attracted.iter().filter(|weight| **weight > 0.0).count() < k {
            // Fewer than `k` candidates attract rows: draw from all rows instead.
            return device.plus_plus(all, k, &mut random, job);
        }
        let candidates = Matrix::new(T::elements(candidates), count, self.dim);
        let candidates = Rows::all(Arc::new(candidates));
        let input = KMeansInput { rows: &candidates, weights: Some(&attracted), metric };
        device.plus_plus(input, k, &mut random, job)
    }
}

/// The rows that have not been drawn.
enum Undrawn<'a> {
    Equal(Vec<u32>),
    Weighted(Weighted<'a>),
}

impl Undrawn<'_> {
    fn draw(&mut self, random: &mut Random) -> usize {
        match self {
            Self::Equal(left) => {
                let at = random.below(left.len() as u64) as usize;
                left.swap_remove(at) as usize
            }
            Self::Weighted(left) => left.draw(random),
        }
    }
}

/// Rows of unequal weights, and the rows drawn from them.
struct Weighted<'a> {
    weights: &'a [f64],
    /// Prefix sums of the weights; they may include rows that were drawn since they were computed.
    sums: Vec<f64>,
    drawn: Vec<bool>,
}

/// Largest number of consecutive draws of rows already drawn, before the prefix sums are
/// recomputed.
const MOST_MISSES: usize = 16;

impl<'a> Weighted<'a> {
    fn new(weights: &'a [f64]) -> Self {
        let (sums, drawn) = (Vec::with_capacity(weights.len()), vec![false; weights.len()]);
        let mut weighted = Self { weights, sums, drawn };
        weighted.add_up();
        weighted
    }

    /// Recomputes the prefix sums over the rows that are left.
    fn add_up(&mut self) {
        let left = self.weights.iter().zip(&self.drawn);
        let left = left.map(|(weight, is_drawn)| if *is_drawn { 0.0 } else { *weight });
        // Relative to the largest weight, so that sums do not overflow.
        let largest = left.clone().fold(0.0, f64::max);
        let sums = left.scan(0.0, |sum, weight| {
            *sum += weight / largest;
            Some(*sum)
        });
        self.sums.clear();
        self.sums.extend(sums);
    }

    fn draw(&mut self, random: &mut Random) -> usize {
        loop {
            for _ in 0..MOST_MISSES {
                let target = random.unit() * self.sums.last().copied().unwrap_or(0.0);
                let row = self.sums.partition_point(|sum| *sum <= target);
                if row < self.sums.len() && !std::mem::replace(&mut self.drawn[row], true) {
                    return row;
                }
            }
            self.add_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::device::{AnyDevice, Device, OnDevice};
    use crate::job::Budget;
    use crate::metric::Metric;

    /// A limit in bytes, and the bytes in use.
    struct Most(usize, AtomicUsize);

    impl Budget for Most {
        fn grow(&self, bytes: usize) -> std::result::Result<(), String> {
            if self.1.fetch_add(bytes, Ordering::Relaxed) + bytes <= self.0 {
                return Ok(());
            }
            self.shrink(bytes);
            Err(format!("there are {}", self.0))
        }

        fn shrink(&self, bytes: usize) {
            self.1.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// k-means|| of rows at equal distances.
    struct Parallel<'a>(&'a ProblemInput<'a, f64>, &'a Job);

    impl OnDevice for Parallel<'_> {
        type Output = Result<Vec<f64>>;

        fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
            let count = self.0.rows.len();
            let assign_to =
                |_: &[f64]| Ok(Assignment { labels: vec![0; count], costs: vec![1.0; count] });
            self.0.parallel(&**device, assign_to, Random::new(1), self.1)
        }
    }

    /// A method for initial centroids.
    type Start<'a> = &'a dyn Fn(&Job) -> Result<Vec<f64>>;

    #[test]
    fn what_starts_take_is_reserved() {
        let (count, dim, k, mut random) = (600, 64, 200, Random::new(3));
        let values: Vec<f64> = (0..count * dim).map(|_| random.normal()).collect();
        let rows = Rows::all(Arc::new(Matrix::new(f64::elements(values.clone()), count, dim)));
        let params = KMeansParams::try_new(k as u64, Metric::L2).unwrap();
        let (unit, tolerance) = (1.0, 0.0);
        let input =
            ProblemInput { rows, values: &values, dim, weights: None, params, unit, tolerance };
        let at_random = |job: &Job| input.at_random(Random::new(1), job);
        let parallel = |job: &Job| AnyDevice::cpu().run(Parallel(&input, job));
        // The bits and values of 200 rows; about 400 rows in each of five rounds.
        let starts: [(Start<'_>, usize); 2] = [(&at_random, 200_000), (&parallel, 1_000_000)];
        for (start, least) in starts {
            for (limit, fits) in [(least, false), (64 << 20, true)] {
                let budget = Arc::new(Most(limit, AtomicUsize::new(0)));
                let centroids = start(&Job::default().with_budget(budget.clone()));
                assert_eq!(
                    centroids.as_ref().is_ok_and(|centroids| centroids.len() == k * dim),
                    fits
                );
                assert!(fits || matches!(centroids, Err(Error::HostMemory { .. })));
                assert_eq!(budget.1.load(Ordering::Relaxed), 0);
            }
        }
    }

    #[test]
    fn rows_are_drawn_in_proportion_to_the_weights_of_those_left() {
        let weights = [0.0, 1.0, 2.0, 1e-30, 5.0, 0.0];
        let mut first = [0u32; 6];
        let mut second_after_4 = [0; 6];
        for seed in 0..8000 {
            let (mut left, mut random) = (Weighted::new(&weights), Random::new(seed));
            let drawn: Vec<_> = (0..4).map(|_| left.draw(&mut random)).collect();
            first[drawn[0]] += 1;
            second_after_4[drawn[1]] += usize::from(drawn[0] == 4);
            let mut all = drawn.clone();
            all.sort_unstable();
            assert_eq!((all, drawn[3]), (vec![1, 2, 3, 4], 3));
        }
        let expected = [0u32, 1000, 2000, 0, 5000, 0];
        assert!(first.iter().zip(expected).all(|(n, e)| n.abs_diff(e) <= 150), "{first:?}");
        let part = second_after_4[1] as f64 / first[4] as f64;
        assert!((part - 1.0 / 3.0).abs() < 0.03, "{second_after_4:?}");
    }

    #[test]
    fn weights_of_all_sizes_are_drawn_from() {
        for weights in
            [[f64::MAX, f64::MAX, f64::MAX], [5e-324, 5e-324, 1e-300], [1e300, 1.0, 1e-300]]
        {
            let (mut left, mut random) = (Weighted::new(&weights), Random::new(1));
            let mut drawn: Vec<_> = (0..3).map(|_| left.draw(&mut random)).collect();
            drawn.sort_unstable();
            assert_eq!(drawn, [0, 1, 2]);
        }
    }
}
