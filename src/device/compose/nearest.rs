//! The nearest centroid of every row by the definition of a distance.
//!
//! Rounds of k-means leave few rows undecided. Only these are compared once more.

use std::sync::Arc;

use super::exact::ExactSearch;
use crate::device::contract::{Labels, QueryRows, SearchDevice, Work};
use crate::device::cpu::ExactPairs;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::{Elements, Matrix};
use crate::memory::zeros;
use crate::metric::Metric;
use crate::parallel::in_parallel;
use crate::rows::Rows;

/// Rows of a task.
const TASK: usize = 4096;

/// Up to so many rows × centroids × dimensions all pairs are computed by the definition, which takes less time than
/// making a search ready.
const FEW: usize = 1 << 20;

/// The nearest centroid of every row, the first of equally near ones.
#[derive(Debug)]
pub struct Nearest {
    /// Its number.
    pub labels: Vec<u32>,
    /// Its distance.
    pub distances: Vec<f64>,
    /// What it took besides the rounds.
    pub work: Work,
}

impl Nearest {
    /// Completes what rounds have found for these rows and centroids, both of one type of numbers; rows are as k-means
    /// under this metric [averages](Rows::averaged) them.
    ///
    /// # Errors
    /// [`Cancelled`](Error::Cancelled), [`HostMemory`](Error::HostMemory), and any error of the device.
    pub fn of<D: SearchDevice>(
        device: &Arc<D>,
        (rows, centroids): (&Rows, &Arc<Matrix>),
        metric: Metric,
        found: Labels,
        job: &Job,
    ) -> Result<Self> {
        let centroids = compared(centroids, metric, job)?;
        let Labels { mut labels, undecided } = found;
        let mut work = Work::default();
        if undecided.as_ref().is_none_or(|undecided| !undecided.is_empty()) {
            let gathered = match &undecided {
                Some(undecided) => {
                    let _reserved = job.reserve("undecided rows", rows.bytes_at(undecided))?;
                    Some((rows.at(undecided, job)?, _reserved))
                }
                None => None,
            };
            let some = gathered.as_ref().map_or(rows, |(some, _)| some);
            let pairs = some.len() * centroids.len();
            work.rechecked += pairs as u64;
            let nearest = if pairs * centroids.matrix().dim() <= FEW {
                all_compared((some, &centroids), metric, job)?
            } else {
                let (device, base) = (device.clone(), centroids.clone());
                let search = ExactSearch::open(device, base, metric, 1, job)?;
                let found = search.search(some, QueryRows::Separate, job)?;
                work += found.work;
                found.rows
            };
            match undecided {
                Some(undecided) => {
                    let rows = undecided.into_iter().zip(nearest);
                    rows.for_each(|(row, nearest)| labels[row as usize] = nearest);
                }
                None => labels = nearest,
            }
        }
        let distances = distances((rows, &centroids), metric, &labels, job)?;
        Ok(Self { labels, distances, work })
    }
}

/// Centroids as a search under this metric reads vectors.
fn compared(centroids: &Arc<Matrix>, metric: Metric, job: &Job) -> Result<Rows> {
    let rows = Rows::all(centroids.clone());
    let (Elements::F64(values), true) = (centroids.elements(), metric.is_of_directions()) else {
        return rows.searched(metric, job);
    };
    let (mut values, dim) = (values.clone(), centroids.dim());
    for (row, values) in values.chunks_exact_mut(dim.max(1)).enumerate() {
        let bad = |problem| Error::BadRow {
            input: "centroids",
            row: row as u64,
            column: String::new(),
            problem,
        };
        metric.prepare(values).map_err(bad)?;
    }
    Ok(Rows::all(Arc::new(Matrix::new(Elements::F64(values), centroids.rows(), dim))))
}

/// The nearest centroid of every row, of which all pairs are compared.
fn all_compared((rows, centroids): (&Rows, &Rows), metric: Metric, job: &Job) -> Result<Vec<u32>> {
    let pairs = ExactPairs::new(metric, rows, centroids);
    let all: Vec<u32> = (0..centroids.len() as u32).collect();
    let tasks: Vec<usize> = (0..rows.len()).step_by(TASK).collect();
    let nearest = in_parallel(tasks, |first| {
        job.check()?;
        let (mut distances, mut buffer) = (vec![0.0; all.len()], Vec::new());
        let nearest = |row: usize| {
            pairs.compute((row, &all), &mut distances, &mut buffer);
            let least = (0..).zip(&distances).min_by(|a: &(u32, _), b| f64::total_cmp(a.1, b.1));
            least.map_or(0, |(centroid, _)| centroid)
        };
        Ok((first..rows.len().min(first + TASK)).map(nearest).collect::<Vec<u32>>())
    });
    Ok(nearest.into_iter().collect::<Result<Vec<_>>>()?.concat())
}

/// The distance of every row from the centroid of its label.
fn distances(
    (rows, centroids): (&Rows, &Rows),
    metric: Metric,
    labels: &[u32],
    job: &Job,
) -> Result<Vec<f64>> {
    let pairs = ExactPairs::new(metric, rows, centroids);
    let mut distances: Vec<f64> = zeros(labels.len());
    let tasks = distances.chunks_mut(TASK).zip(labels.chunks(TASK)).enumerate().collect();
    let done = in_parallel(tasks, |(task, (distances, labels)): (usize, (&mut [f64], &[u32]))| {
        job.check()?;
        pairs.of_labels(task * TASK, labels, distances);
        Ok(())
    });
    done.into_iter().collect::<Result<Vec<()>>>()?;
    Ok(distances)
}
