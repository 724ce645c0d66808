//! The k-means contract of a GPU.

use std::sync::Arc;

use super::kernels::{MOST_ROWS, assign_strategy, is_large};
use super::resident::Resident;
use super::row_type::RowType;
use super::{CudaKMeans, seeding};
use crate::device::compose::plus_plus_on_host;
use crate::device::contract::{
    KMeansDevice, KMeansInput, KMeansKind, KMeansProblem, KMeansSession, KMeansShape, SearchDevice,
    Shape, Work,
};
use crate::device::cuda::device::CudaDevice;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Metric;
use crate::random::Random;

/// Centroids × dimensions from which so many rows may stay undecided after the rounds that they are
/// searched for: with 1,024 × 128 they were, 3,200 of 1,000,000; with 64 × 10 they were not.
const LIKELY_SEARCHED: usize = 1 << 16;

/// Whether rows are sent before the problems are known.
fn will_send(device: &CudaDevice, input: KMeansInput<'_>, expected: KMeansShape) -> bool {
    let (rows, KMeansShape { problems, k, draws }) = (input.rows, expected);
    let dim = rows.matrix().dim();
    let strategy = |row_type| assign_strategy(row_type, k, device.gpu.limits);
    let stays = RowType::of(input.kind()).and_then(strategy).is_some();
    let is_seeded = draws && is_large(rows.len(), k, dim) && seeding::can_seed(device, rows, k);
    problems == 1 && rows.len() <= MOST_ROWS && (stays || is_seeded)
}

impl KMeansDevice for CudaDevice {
    fn open_kmeans<'a, T: Real>(
        self: &Arc<Self>,
        input: KMeansInput<'a>,
        expected: KMeansShape,
        problems: impl FnOnce() -> Result<Vec<KMeansProblem>>,
        job: &Job,
    ) -> Result<Box<dyn KMeansSession<T> + 'a>> {
        if !will_send(self, input, expected) {
            return Ok(Box::new(CudaKMeans::open(self, input, problems()?, None, Work::default())));
        }
        // The transfer of rows overlaps the preparation of problems.
        let (sent, problems) = std::thread::scope(|scope| {
            let sent = scope.spawn(|| self.send_rows(input.rows, job));
            let problems = problems();
            (sent.join(), problems)
        });
        let problems = problems?;
        let sent = match sent.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
            // Other strategies need no rows on the GPU, or may find more memory.
            Err(Error::DeviceMemory { .. }) => None,
            sent => Some(sent?),
        };
        let (uploaded, work) = sent.unzip();
        let work = work.unwrap_or_default();
        Ok(Box::new(CudaKMeans::open(self, input, problems, uploaded, work)))
    }

    fn plus_plus<T: Real>(
        &self,
        input: KMeansInput<'_>,
        k: usize,
        random: &mut Random,
        job: &Job,
    ) -> Result<Vec<T>> {
        plus_plus_on_host(input, k, random, job)
    }

    fn warm_kmeans(&self, rows: KMeansKind, metric: Metric, k: usize, draws: bool) {
        std::thread::scope(|scope| {
            if k * rows.dim >= LIKELY_SEARCHED {
                let shape = Shape { kind: rows.elements, dim: rows.dim, base: k, k: 1 };
                scope.spawn(move || self.warm_search(metric, &shape, 0));
            }
            if draws {
                scope.spawn(move || seeding::warm(self, rows.elements, rows.metric, rows.dim, k));
            }
            let Some(row_type) = RowType::of(rows) else { return };
            if let Some(strategy) = assign_strategy(row_type, k, self.gpu.limits) {
                let _ = Resident::kernels(self, row_type, strategy);
            }
        });
    }
}
