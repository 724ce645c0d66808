//! How the first centroids are chosen.

use std::collections::HashSet;
use std::sync::Arc;

use super::input::Input;
use super::params::{Init, KMeansParams};
use crate::device::{Assignment, KMeansSession, seed_plus_plus};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::{Matrix, Real, Rows};
use crate::parallel::in_parallel;
use crate::random::Random;

/// The first centroids of a run, for each problem.
pub(super) fn initial<T: Real>(
    inputs: &[Input<'_, T>],
    session: &dyn KMeansSession<T>,
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
            Ok(in_parallel(all(), |(_, input): (usize, &Input<'_, T>)| input.at_random(random())))
        }
        Init::PlusPlus => session.seed((0..inputs.len()).map(|i| (i, random())).collect(), job),
        Init::Parallel => {
            let parallel = |(i, input): (usize, &Input<'_, T>)| {
                input.parallel(|centroids| session.assign_to(i, centroids, job), random(), job)
            };
            in_parallel(all(), parallel).into_iter().collect()
        }
    }
}

impl<T: Real> Input<'_, T> {
    fn given(&self, centroids: Option<&Rows>) -> Result<Vec<T>> {
        let Some(values) = centroids.and_then(|given| given.reals::<T>()) else {
            let message = "kmeans: no first centroids, or of another type than the rows";
            return Err(Error::InvalidArgument(message.to_string()));
        };
        let KMeansParams { k, .. } = self.params;
        let (found, dim) = centroids.map_or((0, 0), |given| (given.len(), given.matrix().dim()));
        if found != k || dim != self.dim {
            let own = self.dim;
            return Err(Error::Unsatisfiable(format!(
                "kmeans: init has {found} centroids of dimension {dim}; wanted are {k} of {own}"
            )));
        }
        Ok(values.to_vec())
    }

    /// Random distinct vectors of positive weight; there are enough of them.
    fn at_random(&self, mut random: Random) -> Vec<T> {
        let all = 0..self.rows.len() as u32;
        let mut left: Vec<u32> = all.filter(|row| self.weight(*row as usize) > 0.0).collect();
        let size = self.params.k * self.dim;
        let mut chosen: Vec<T> = Vec::with_capacity(size);
        let mut distinct: HashSet<Vec<u64>> = HashSet::new();
        while chosen.len() < size {
            let at = random.below(left.len() as u64) as usize;
            let row = self.row(left.swap_remove(at) as usize);
            if distinct.insert(row.iter().map(|x| (*x + T::ZERO).to_f64().to_bits()).collect()) {
                chosen.extend_from_slice(row);
            }
        }
        chosen
    }

    /// k-means||: a few rounds that draw many rows each, thinned out by k-means++.
    fn parallel(
        &self,
        assign_to: impl Fn(&[T]) -> Result<Assignment<T>>,
        mut random: Random,
        job: &Job,
    ) -> Result<Vec<T>> {
        const ROUNDS: usize = 5;
        let (k, metric) = (self.params.k, self.params.cost());
        let wanted = 2.0 * k as f64;
        let (rows, weights) = (&self.rows, self.weights);
        let mut candidates: Vec<T> = seed_plus_plus(rows, weights, metric, 1, &mut random, job)?;
        let mut costs = assign_to(&candidates)?.costs;
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
            let drawn: Vec<T> = (costs.iter().enumerate())
                .filter(|(row, cost)| random.unit() < wanted * share(*row, cost) / total)
                .flat_map(|(row, _)| self.row(row).iter().copied())
                .collect();
            if drawn.is_empty() {
                continue;
            }
            let nearer = assign_to(&drawn)?.costs;
            costs.iter_mut().zip(nearer).for_each(|(cost, nearer)| *cost = cost.min(nearer));
            candidates.extend(drawn);
        }
        let labels = assign_to(&candidates)?.labels;
        let count = candidates.len() / self.dim;
        let mut attracted = vec![0.0; count];
        for (row, label) in labels.into_iter().enumerate() {
            attracted[label as usize] += self.weight(row);
        }
        if attracted.iter().filter(|weight| **weight > 0.0).count() < k {
            // Too few were drawn: choose among all rows instead.
            return seed_plus_plus(rows, weights, metric, k, &mut random, job);
        }
        let candidates = Matrix::new(T::elements(candidates), count, self.dim);
        let candidates = Rows::all(Arc::new(candidates));
        seed_plus_plus(&candidates, Some(&attracted), metric, k, &mut random, job)
    }
}
