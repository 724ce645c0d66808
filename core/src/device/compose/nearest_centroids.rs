//! The nearest centroid of each row by exact distance.
//!
//! Rounds of k-means leave a small number of rows undecided. Only these are compared again.

use std::sync::Arc;

use super::error_bounds::ErrorBounds;
use super::exact::ExactSearch;
use crate::device::Device;
use crate::device::contract::{Labels, QueryRows, Work};
use crate::device::cpu::CpuDevice;
use crate::error::{Error, Result};
use crate::job::{Job, Reserved};
use crate::matrix::{Elements, Matrix};
use crate::memory::zeros;
use crate::metric::Metric;
use crate::parallel::in_parallel;
use crate::rows::Rows;

/// Rows per task: for the distance to one centroid, and to all centroids.
const TASK: usize = 4096;
const COMPARED: usize = 64;

/// Rows that are compared at a time, and for which memory is reserved.
const TOGETHER: usize = 1 << 17;

/// Rows × centroids × dimensions up to which all exact distances are computed on the host, which is
/// faster than preparing a search. The limit is higher beside a GPU: a search there has to copy the
/// rows and load kernels that rounds do not use. 4 · 10⁸ took 16 cores 40 ms more than an H200 whose
/// kernels were loaded.
const HOST_PRODUCTS: usize = 1 << 20;
const HOST_PRODUCTS_BESIDE_A_GPU: usize = 1 << 28;

/// The nearest centroid of each row, ties going to the lower number.
#[derive(Debug)]
pub struct NearestCentroids {
    /// The number of the centroid.
    pub labels: Vec<u32>,
    /// The exact distance from it.
    pub distances: Vec<f64>,
    /// Counters of the work after the rounds.
    pub work: Work,
}

impl NearestCentroids {
    /// Decides the undecided rows of `assignment`. Rows and centroids have one element type; rows
    /// are as k-means under this metric [averages](Rows::averaged) them.
    ///
    /// # Errors
    /// [`Cancelled`](Error::Cancelled), [`HostMemory`](Error::HostMemory), and any error of the device.
    pub fn of<D: Device>(
        device: &Arc<D>,
        rows: &Rows,
        centroids: &Arc<Matrix>,
        metric: Metric,
        assignment: Labels,
        job: &Job,
    ) -> Result<Self> {
        let (centroids, _unit_vectors) = compared(centroids, metric, job)?;
        let Labels { mut labels, undecided } = assignment;
        let open = undecided.as_ref().map_or(rows.len(), Vec::len);
        let pairs = open * centroids.len();
        let mut work = Work { rechecked: pairs as u64, ..Work::default() };
        let is_gpu = device.info().memory.is_some();
        let few = if is_gpu { HOST_PRODUCTS_BESIDE_A_GPU } else { HOST_PRODUCTS };
        let search = match pairs * centroids.matrix().dim() <= few {
            true => None,
            false => Some(ExactSearch::open(device.clone(), centroids.clone(), metric, 1, job)?),
        };
        for first in (0..open).step_by(TOGETHER) {
            let places = first..open.min(first + TOGETHER);
            let numbers = undecided.as_ref().map(|numbers| &numbers[places.clone()]);
            let (some, _reserved) = match numbers {
                Some(numbers) => {
                    let reserved = job.reserve("undecided rows", rows.bytes_at(numbers))?;
                    (rows.at(numbers, job)?, Some(reserved))
                }
                None => (rows.slice(places.clone()), None),
            };
            let nearest = match &search {
                Some(search) => {
                    let bytes = some.len() * list_bytes(metric, &centroids);
                    let _lists = job.reserve("lists of nearest centroids", bytes)?;
                    let neighbors = search.search(&some, QueryRows::Separate, job)?;
                    work += neighbors.work;
                    neighbors.rows
                }
                None => all_compared(device.host(), &some, &centroids, metric, job)?,
            };
            match numbers {
                Some(numbers) => {
                    let rows = numbers.iter().zip(nearest);
                    rows.for_each(|(row, nearest)| labels[*row as usize] = nearest);
                }
                None => labels[places].copy_from_slice(&nearest),
            }
        }
        let distances = distances(device.host(), rows, &centroids, metric, &labels, job)?;
        Ok(Self { labels, distances, work })
    }
}

/// The centroids as a search under this metric reads vectors, and the reserved memory of a
/// temporary copy.
fn compared(
    centroids: &Arc<Matrix>,
    metric: Metric,
    job: &Job,
) -> Result<(Rows, Option<Reserved>)> {
    let rows = Rows::all(centroids.clone());
    let (Elements::F64(values), true) = (centroids.elements(), metric.is_of_directions()) else {
        return Ok((rows.searched(metric, job)?, None));
    };
    let reserved = job.reserve("unit vectors of centroids", size_of_val(&values[..]))?;
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
    let rows = Rows::all(Arc::new(Matrix::new(Elements::F64(values), centroids.rows(), dim)));
    Ok((rows, Some(reserved)))
}

/// Bytes of a row's candidate list, with approximate and exact distances.
fn list_bytes(metric: Metric, centroids: &Rows) -> usize {
    let matrix = centroids.matrix();
    let listed = (1 + ErrorBounds::new(metric, matrix).more(1)).min(centroids.len());
    listed * (size_of::<u32>() + matrix.kind().bytes() + size_of::<f64>())
}

/// The nearest centroid of each row, by the exact distances of all pairs.
fn all_compared(
    host: CpuDevice,
    rows: &Rows,
    centroids: &Rows,
    metric: Metric,
    job: &Job,
) -> Result<Vec<u32>> {
    let pairs = host.exact_pairs(metric, rows, centroids);
    let all: Vec<u32> = (0..centroids.len() as u32).collect();
    let tasks: Vec<usize> = (0..rows.len()).step_by(COMPARED).collect();
    let nearest = in_parallel(tasks, |first| {
        job.check()?;
        let (mut distances, mut buffer) = (vec![0.0; all.len()], Vec::new());
        let nearest = |row: usize| {
            pairs.compute(row, &all, &mut distances, &mut buffer);
            let least = (0..).zip(&distances).min_by(|a: &(u32, _), b| f64::total_cmp(a.1, b.1));
            least.map_or(0, |(centroid, _)| centroid)
        };
        Ok((first..rows.len().min(first + COMPARED)).map(nearest).collect::<Vec<u32>>())
    });
    Ok(nearest.into_iter().collect::<Result<Vec<_>>>()?.concat())
}

/// The distance of each row from the centroid of its label.
fn distances(
    host: CpuDevice,
    rows: &Rows,
    centroids: &Rows,
    metric: Metric,
    labels: &[u32],
    job: &Job,
) -> Result<Vec<f64>> {
    let pairs = host.exact_pairs(metric, rows, centroids);
    let mut distances: Vec<f64> = zeros(labels.len());
    let tasks = distances.chunks_mut(TASK).zip(labels.chunks(TASK)).enumerate();
    let done = in_parallel(tasks, |(task, (distances, labels)): (usize, (&mut [f64], &[u32]))| {
        job.check()?;
        pairs.of_labels(task * TASK, labels, distances);
        Ok(())
    });
    done.into_iter().collect::<Result<Vec<()>>>()?;
    Ok(distances)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::job::Budget;
    use crate::matrix::Real;
    use crate::random::Random;

    /// Bytes reserved now, and their peak.
    #[derive(Default)]
    struct Counted(AtomicUsize, AtomicUsize);

    impl Budget for Counted {
        fn grow(&self, bytes: usize) -> std::result::Result<(), String> {
            let now = self.0.fetch_add(bytes, Ordering::Relaxed) + bytes;
            self.1.fetch_max(now, Ordering::Relaxed);
            Ok(())
        }

        fn shrink(&self, bytes: usize) {
            self.0.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    #[test]
    fn rows_are_compared_part_by_part_in_memory_that_is_reserved() {
        let (count, k, dim, mut random) = (TOGETHER + 999, 20, 3, Random::new(3));
        let mut rows = |count: usize| {
            let values: Vec<f32> = (0..count * dim).map(|_| random.normal() as f32).collect();
            Matrix::new(f32::elements(values), count, dim)
        };
        let (rows, centroids) = (Rows::all(Arc::new(rows(count))), Arc::new(rows(k)));
        let device = Arc::new(CpuDevice::new());
        for metric in [Metric::L2, Metric::Cosine] {
            let rows = rows.averaged(metric, &Job::default()).unwrap();
            let (base, _) = compared(&centroids, metric, &Job::default()).unwrap();
            let expected =
                all_compared(CpuDevice::new(), &rows, &base, metric, &Job::default()).unwrap();
            let odd = (1..count as u32).step_by(2).collect::<Vec<_>>();
            for undecided in [None, Some(odd)] {
                // Decided rows are not compared again.
                let is_open = |row: usize| undecided.is_none() || row % 2 == 1;
                let of_row = |row: usize| if is_open(row) { 7 } else { expected[row] };
                let labels = (0..count).map(of_row).collect();
                let open = undecided.as_ref().map_or(count, Vec::len).min(TOGETHER);
                let budget = Arc::new(Counted::default());
                let job = Job::default().with_budget(budget.clone());
                let assignment = Labels { labels, undecided };
                let nearest =
                    NearestCentroids::of(&device, &rows, &centroids, metric, assignment, &job);
                assert_eq!(nearest.unwrap().labels, expected, "{metric}");
                let (left, most) = (&budget.0, budget.1.load(Ordering::Relaxed));
                assert_eq!(left.load(Ordering::Relaxed), 0);
                assert!(most >= open * list_bytes(metric, &base), "{metric}: {most}");
            }
        }
    }

    #[test]
    fn a_copy_of_centroids_is_reserved_while_rows_are_compared() {
        let (k, dim, mut random) = (40, 7, Random::new(5));
        let values: Vec<f64> = (0..k * dim).map(|_| random.normal()).collect();
        let centroids = Arc::new(Matrix::new(Elements::F64(values), k, dim));
        for metric in [Metric::L2, Metric::Cosine] {
            let budget = Arc::new(Counted::default());
            let job = Job::default().with_budget(budget.clone());
            let (rows, reserved) = compared(&centroids, metric, &job).unwrap();
            let is_copy = metric == Metric::Cosine;
            let bytes = if is_copy { rows.bytes() } else { 0 };
            assert_eq!(budget.0.load(Ordering::Relaxed), bytes, "{metric}");
            drop(reserved);
            assert_eq!(budget.0.load(Ordering::Relaxed), 0, "{metric}");
            let assignment = Labels { labels: vec![0; k], undecided: Some(Vec::new()) };
            let device = Arc::new(CpuDevice::new());
            NearestCentroids::of(&device, &rows, &centroids, metric, assignment, &job).unwrap();
            let most = budget.1.load(Ordering::Relaxed);
            assert_eq!(most, bytes, "{metric}");
            assert_eq!(budget.0.load(Ordering::Relaxed), 0, "{metric}");
        }
    }
}
