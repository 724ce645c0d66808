//! k-means as a GPU offers it.

use std::sync::Arc;

use super::kernels::way;
use super::resident::Resident;
use super::{CudaKMeans, seeding};
use crate::device::contract::{KMeansDevice, KMeansInput, KMeansProblem, KMeansSession};
use crate::device::cuda::handle::CudaDevice;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::{ElementKind, Real};
use crate::metric::Metric;

impl KMeansDevice for CudaDevice {
    fn open_kmeans<'a, T: Real>(
        self: &Arc<Self>,
        input: KMeansInput<'a>,
        problems: Vec<KMeansProblem>,
        _job: &Job,
    ) -> Result<Box<dyn KMeansSession<T> + 'a>> {
        Ok(Box::new(CudaKMeans::open(self, input, problems)))
    }

    fn warm_kmeans(
        &self,
        (kind, metric, dim): (ElementKind, Metric, usize),
        k: usize,
        draws: bool,
    ) {
        if draws {
            seeding::warm(self, (kind, metric, dim), k);
        }
        let is_plain = kind == ElementKind::F32 && metric == Metric::SqEuclidean;
        if let Some(way) = way(dim, k, self.gpu.limits).filter(|_| is_plain) {
            let _ = Resident::kernels(self, dim, way);
        }
    }
}
