//! NVIDIA GPUs, found at run time: nothing of CUDA is needed to build or to start.
//!
//! The primitives of [`Device`] as CUDA kernels (`kernels/`), which are compiled for the GPU at hand
//! and kept on disk. From the outside in:
//!
//! | module | job |
//! |---|---|
//! | this one | handles: which GPU, how much of its memory; the primitives |
//! | [`search`] | a block of queries: lists, passes of launches, the way home |
//! | [`kmeans`] | sessions of k-means: rows that stay on the GPU, many groups in one launch |
//! | [`driver`] | what a process keeps per GPU: buffers under a budget, uploads beside running kernels, kernels from source and on disk |
//!
//! Unsafe code is in the `launch` modules, one for each family, and in `driver::sys`.

mod driver;
mod kmeans;
mod search;

use std::error::Error as _;
use std::sync::Arc;

use self::driver::compile::Spec;
use self::driver::gpu::{self, Gpu};
use self::driver::memory::Memory;
use self::driver::sys;
use self::driver::upload::{Panels, Side, device_dim};
use self::kmeans::CudaKMeans;
use self::search::Search;
use self::search::launch::{Kernels, scalar_bytes};
use self::search::passes::PANEL;
use super::contract::{
    Capacity, KMeansDevice, KMeansInput, KMeansProblem, KMeansSession, Neighbors, Pairing,
    SearchDevice, Shape,
};
use super::{Device, DeviceInfo};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::{ElementKind, Real, Rows};
use crate::metric::{Metric, Sum};

/// Query rows that are enough to keep any GPU busy.
const MOST_QUERIES: usize = 131_072;

/// Share of the free memory that is used when no limit is given.
const SHARE_OF_FREE: f64 = 0.9;

/// A GPU, and how much of its memory may be used.
#[derive(Debug)]
pub struct CudaDevice {
    gpu: Arc<Gpu>,
    memory: Arc<Memory>,
}

/// Base rows on a GPU.
pub struct CudaBase(Panels);

/// Query rows on a GPU.
pub struct CudaQueries(Panels);

/// Lists of neighbours on a GPU.
pub struct CudaLists(Search);

impl CudaDevice {
    /// The GPU of this number, with at most `memory` bytes of its memory (0: 90% of what is free).
    /// Also takes 16 MiB of it, and 32 MiB of pinned host memory, once per process.
    ///
    /// # Errors
    /// Says why it cannot be had.
    pub(super) fn open(ordinal: usize, memory: u64) -> Result<Arc<Self>, String> {
        let found = count()?;
        if ordinal >= found {
            return Err(format!("the driver reports {found} GPUs"));
        }
        let open = || -> Result<Arc<Self>> {
            let gpu = Gpu::get(ordinal)?;
            let free = sys::free_memory(&gpu.context).map_err(sys::failed("cuMemGetInfo"))?;
            let most = (free as f64 * SHARE_OF_FREE) as u64;
            let limit = if memory == 0 { most } else { memory };
            let memory = Memory::new(gpu.info.name.clone(), limit, gpu.compute.clone());
            Ok(Arc::new(Self { gpu, memory }))
        };
        open().map_err(|error| with_sources(&error))
    }

    fn kernels(&self, rows: &Rows, metric: Metric) -> Result<Arc<Kernels>> {
        let (kind, dim) = (rows.matrix().kind(), rows.matrix().dim());
        self.gpu.kernels(Spec::new(kind, metric, device_dim(kind, dim) as u32))
    }

    fn upload(&self, rows: &Rows, metric: Metric, side: Side) -> Result<Panels> {
        let kernels = self.kernels(rows, metric)?;
        self.gpu.uploader.upload(&self.memory, &kernels, rows, side)
    }
}

impl super::sealed::Sealed for CudaDevice {}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        self.gpu.info.clone()
    }
}

impl SearchDevice for CudaDevice {
    type Base = CudaBase;
    type Queries = CudaQueries;
    type Lists = CudaLists;

    /// Two chunks of base rows, so that one can arrive while the other is searched, and two blocks
    /// of queries with their lists, in at most a quarter of the memory.
    fn capacity(&self, shape: &Shape) -> Capacity {
        capacity(self.memory.limit() as usize, shape)
    }

    fn upload_base(&self, rows: &Rows, metric: Metric, _job: &Job) -> Result<CudaBase> {
        self.upload(rows, metric, Side::Base).map(CudaBase)
    }

    fn upload_queries(&self, rows: &Rows, metric: Metric, _job: &Job) -> Result<CudaQueries> {
        let negate = metric.sum() == Sum::Products;
        self.upload(rows, metric, Side::Queries { negate }).map(CudaQueries)
    }

    fn new_lists(&self, queries: &CudaQueries, k: usize) -> Result<CudaLists> {
        if k == 0 || k > MOST_NEIGHBORS {
            return Err(Error::InvalidArgument(format!(
                "k must be 1…{MOST_NEIGHBORS} on {}, not {k}",
                self.gpu.info.name
            )));
        }
        Search::new(&self.gpu, &self.memory, &queries.0, k).map(CudaLists)
    }

    fn top_k(
        &self,
        queries: &CudaQueries,
        base: &CudaBase,
        pairing: &Pairing<'_>,
        lists: &mut CudaLists,
        job: &Job,
    ) -> Result<()> {
        lists.0.add(&self.gpu, &queries.0, &base.0, pairing, job)
    }

    fn download(&self, lists: CudaLists) -> Result<Neighbors> {
        lists.0.finish(&self.gpu, &self.memory)
    }
}

impl KMeansDevice for CudaDevice {
    fn open_kmeans<'a, T: Real>(
        self: &Arc<Self>,
        input: KMeansInput<'a>,
        problems: Vec<KMeansProblem>,
        _job: &Job,
    ) -> Result<Box<dyn KMeansSession<T> + 'a>> {
        Ok(Box::new(CudaKMeans::open(self, input, problems)))
    }
}

/// Lists are sorted with 32-bit positions, in a power of two of at least four times k entries.
const MOST_NEIGHBORS: usize = 1 << 28;

fn capacity(limit: usize, shape: &Shape) -> Capacity {
    let dim = device_dim(shape.kind, shape.dim);
    // Any metric: the dimension is stored the same way for all.
    let stored = Spec::new(shape.kind, any_metric(shape.kind), dim as u32).stored_dim(dim as u32);
    let row = stored as usize * scalar_bytes(shape.kind);
    let query = row + search::list_bytes(shape.kind, shape.k);
    let whole_panels = |rows: usize| (rows / PANEL).max(1) * PANEL;
    let queries = whole_panels((limit / 8 / query).min(MOST_QUERIES));
    let base = whole_panels(limit.saturating_sub(2 * queries * query) / 2 / row);
    Capacity { base: base.min(u32::MAX as usize / PANEL * PANEL), queries }
}

fn any_metric(kind: ElementKind) -> Metric {
    if kind == ElementKind::Bits { Metric::Hamming } else { Metric::L2 }
}

/// The GPUs of this machine.
pub(super) fn list() -> Vec<DeviceInfo> {
    let count = count().unwrap_or(0);
    (0..count).filter_map(|i| Some(gpu::info(i, &sys::properties(i).ok()?))).collect()
}

/// Why there is no GPU to use, if there is none; for people.
pub(super) fn why_none() -> Option<String> {
    count().err()
}

/// How many GPUs there are, or why there are none.
fn count() -> Result<usize, String> {
    if !sys::has_driver() {
        return Err("the NVIDIA driver's library (libcuda) was not found".to_string());
    }
    if !sys::has_compiler() {
        return Err("the CUDA runtime compiler's library (libnvrtc) was not found; \
                    it comes with the CUDA toolkit, or `pip install nvidia-cuda-nvrtc`"
            .to_string());
    }
    match cudarc::driver::CudaContext::device_count() {
        Ok(0) => Err("the NVIDIA driver reports no GPU".to_string()),
        Ok(count) => Ok(count as usize),
        Err(error) => Err(format!("the NVIDIA driver cannot be used: {error}")),
    }
}

/// An error and what caused it, in one line.
fn with_sources(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(kind: ElementKind, dim: usize, k: usize) -> Shape {
        Shape { kind, dim, k }
    }

    #[test]
    fn both_sides_fit_twice() {
        let limit = 8 << 30;
        for kind in [ElementKind::F32, ElementKind::F64, ElementKind::Bits] {
            for dim in [1, 33, 128, 4096] {
                for k in [1, 10, 1024] {
                    let capacity = capacity(limit, &shape(kind, dim, k));
                    let row = device_dim(kind, dim) * scalar_bytes(kind);
                    let list = search::list_bytes(kind, k);
                    let used = 2 * capacity.base * row + 2 * capacity.queries * (row + list);
                    assert!(used <= limit, "{kind:?} {dim} {k}: {used}");
                    assert!(used > limit / 2, "{kind:?} {dim} {k}: {used}");
                }
            }
        }
    }

    #[test]
    fn the_least_is_a_panel() {
        let capacity = capacity(1 << 20, &shape(ElementKind::F64, 4096, 4096));
        assert_eq!(capacity, Capacity { base: PANEL, queries: PANEL });
    }

    #[test]
    fn without_a_driver_there_is_a_reason_and_no_panic() {
        if !sys::has_driver() {
            assert!(why_none().unwrap().contains("libcuda"));
            assert!(list().is_empty());
            assert!(CudaDevice::open(0, 0).is_err());
        }
    }
}
