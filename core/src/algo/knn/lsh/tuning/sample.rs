//! The sample on which parameters are tuned: queries with their exact neighbours, and base rows.

use std::sync::Arc;

use super::ground_truth::GroundTruth;
use super::recall_bound::SampledShares;
use crate::algo::knn::lsh::params::LshParams;
use crate::algo::knn::params::KnnParams;
use crate::device::{Device, QueryInput, QueryRows};
use crate::error::{Error, Result};
use crate::index::lsh::Planes;
use crate::job::{Job, Reserved};
use crate::metric::Metric;
use crate::parallel::threads;
use crate::random::Random;
use crate::rows::Rows;

/// Smallest number of sampled queries, and the number for which candidates are counted.
const QUERIES: usize = 160;
/// Queries with fewer than `ENOUGH` neighbours: `ENOUGH / k` times as many are sampled, at most
/// `MOST_TIMES`.
const ENOUGH: usize = 5;
const MOST_TIMES: usize = 4;
/// High recalls: `MISSED / (1 - recall)` queries are sampled, at most `MOST_QUERIES`, …
const MISSED: f64 = 16.0;
const MOST_QUERIES: usize = 8192;
/// … within a limit on the bytes of checked rows, …
const MOST_BYTES: usize = 1 << 28;
/// … and on the number of neighbours in all, with a minimum number of queries.
const MOST_NEIGHBORS: usize = 1 << 20;
const FEWEST_QUERIES: usize = 16;
/// Base rows for which candidates are counted.
const BASE: usize = 2048;
/// Base rows that planes are trained on.
const TRAINING: usize = 8192;

/// A sample of queries and base rows.
pub(super) struct TuningSample {
    pub queries: Rows,
    pub ground_truth: GroundTruth,
    pub base: Rows,
    /// For each query, the position of the same row in `base`, if it was sampled.
    pub itself: Vec<Option<usize>>,
    pub shares: SampledShares,
    /// Number of rows of the base.
    pub all_rows: usize,
    /// Number of queries of the search.
    pub all_queries: usize,
    /// Whether the sample has reached its largest size.
    pub is_largest: bool,
    /// Candidates are counted for every `counted_in`-th query.
    pub counted_in: usize,
    /// The median distance of the k-th neighbour.
    pub median_distance: f64,
    _reserved: Reserved,
}

impl TuningSample {
    /// # Errors
    /// Those of the exact search.
    pub fn new<D: Device>(
        device: &Arc<D>,
        base: &Rows,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        params: KnnParams,
        lsh: &LshParams,
        job: &Job,
    ) -> Result<Self> {
        let mut random = Random::new(lsh.seed);
        let of_query = GroundTruth::MOST_ROWS * base.matrix().row_bytes();
        let most = MOST_QUERIES.min((MOST_BYTES / of_query.max(1)).max(QUERIES));
        let most = most.min(MOST_NEIGHBORS / params.k()).max(FEWEST_QUERIES);
        // The cast saturates.
        let missing = (MISSED / (1.0 - lsh.recall)) as usize;
        let times = (ENOUGH / params.k()).clamp(1, MOST_TIMES);
        let count = missing.max(times * QUERIES).min(most);
        let positions = spread(queries.len(), count, &mut random);
        let share = positions.len() as f64 / queries.len().max(1) as f64;
        let of_base = spread(base.len(), BASE, &mut random);
        let first = match query_rows {
            QueryRows::OfBase { first } => Some(first),
            QueryRows::Separate => None,
        };
        let neighbors = positions.len() * params.k().min(base.len()) * size_of::<(f64, u32)>();
        let checked = positions.len() * GroundTruth::MOST_ROWS;
        let rows = queries.bytes_at(&positions)
            + base.bytes_at(&of_base)
            + checked * base.matrix().row_bytes();
        let lists = 4 * (neighbors + checked * size_of::<(f64, u32)>());
        let mut reserved = job.reserve("a sample of queries", lists + rows)?;
        let sampled = Rows::all(Arc::new(queries.gather(&positions, job)?));
        let self_rows: Vec<Option<u32>> =
            positions.iter().map(|position| first.map(|first| first + position)).collect();
        let ground_truth = GroundTruth::new(device, base, &sampled, &self_rows, params, job)?;
        reserved.shrink_to(rows);
        let position =
            |self_row: &Option<u32>| of_base.iter().position(|row| Some(*row) == *self_row);
        let mut sample = Self {
            queries: sampled,
            shares: SampledShares { queries: share, neighbors: ground_truth.share() },
            all_rows: base.len(),
            all_queries: queries.len(),
            is_largest: count == most || positions.len() == queries.len(),
            counted_in: positions.len().div_ceil(QUERIES).max(1),
            ground_truth,
            base: Rows::all(Arc::new(base.gather(&of_base, job)?)),
            itself: self_rows.iter().map(position).collect(),
            median_distance: 0.0,
            _reserved: reserved,
        };
        sample.median_distance = sample.median_neighbor_distance(params.metric());
        Ok(sample)
    }

    /// Number of queries whose candidates are counted.
    pub fn counted(&self) -> usize {
        self.queries.len().div_ceil(self.counted_in)
    }

    /// The median distance of the k-th neighbour or, if it is 0, of random pairs, by `l2` or `l1`.
    fn median_neighbor_distance(&self, metric: Metric) -> f64 {
        let last = |query| Some((query, self.ground_truth.positions(query).last()?));
        let near = (0..self.queries.len()).filter_map(last);
        let near = near.map(|(query, last)| {
            let neighbor = values(&self.ground_truth.rows, last);
            distance(metric, &values(&self.queries, query), &neighbor)
        });
        let near = median(near.collect());
        if near > 0.0 {
            return near;
        }
        let far = 0..self.base.len().min(self.queries.len());
        let far =
            far.map(|row| distance(metric, &values(&self.queries, row), &values(&self.base, row)));
        let far = far.filter(|distance| *distance > 0.0).collect();
        match median(far) {
            far if far > 0.0 => far,
            _ => 1.0,
        }
    }
}

/// The training rows of planes: the given ones, or a sample of the base; none if planes are not
/// trained.
pub(in crate::algo::knn::lsh) fn training(
    lsh: &LshParams,
    base: &Rows,
    given: Option<&Rows>,
    job: &Job,
) -> Result<(Rows, Reserved)> {
    if let Some(given) = given {
        let dims = (given.matrix().dim(), base.matrix().dim());
        if !given.is_empty() && dims.0 != dims.1 {
            let text = format!("dim mismatch: training has {}, base has {}", dims.0, dims.1);
            return Err(Error::Unsatisfiable(text));
        }
        let bytes = training_bytes(given.len(), dims.1);
        let reserved = job.reserve("training rows", bytes)?;
        return Ok((given.clone(), reserved));
    }
    let count = if lsh.planes == Planes::Trained { TRAINING } else { 0 };
    let positions = spread(base.len(), count, &mut Random::new(lsh.seed));
    let dim = base.matrix().dim();
    let bytes = training_bytes(positions.len(), dim) + positions.len() * dim * size_of::<f64>();
    let reserved = job.reserve("training rows", bytes)?;
    Ok((Rows::all(Arc::new(base.gather(&positions, job)?)), reserved))
}

/// Bytes of training rows in float64, twice while they are made, and of the scores of candidate
/// planes: each thread has the box of each row, its side of several planes, and one value.
fn training_bytes(rows: usize, dim: usize) -> usize {
    rows * (2 * dim * size_of::<f64>() + threads() * 96)
}

/// `count` stratified random positions below `all`: one in each of `count` equal parts.
fn spread(all: usize, count: usize, random: &mut Random) -> Vec<u32> {
    let count = count.min(all);
    let part = |i: usize| i * all / count;
    (0..count)
        .map(|i| (part(i) as u64 + random.below((part(i + 1) - part(i)) as u64)) as u32)
        .collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// The distance in which slot widths are measured.
fn distance(metric: Metric, x: &[f64], y: &[f64]) -> f64 {
    let differences = x.iter().zip(y).map(|(x, y)| x - y);
    match metric {
        Metric::L1 => differences.map(f64::abs).sum(),
        _ => differences.map(|d| d * d).sum::<f64>().sqrt(),
    }
}

/// The values of a row in float64; zeros for a row of bits.
fn values(rows: &Rows, row: usize) -> Vec<f64> {
    let dim = rows.matrix().dim();
    let of_row = row * dim..(row + 1) * dim;
    match (rows.reals::<f64>(), rows.reals::<f32>()) {
        (Some(values), _) => values[of_row].to_vec(),
        (_, Some(values)) => values[of_row].iter().map(|x| f64::from(*x)).collect(),
        _ => vec![0.0; dim],
    }
}
