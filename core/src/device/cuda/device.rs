//! The CUDA device: a GPU, and the share of its memory that may be used.

use std::error::Error as _;
use std::sync::Arc;

use cudarc::driver::DeviceRepr;

use super::driver::gpu::{self, Gpu};
use super::driver::launch::Limits;
use super::driver::memory::{Buffer, Memory};
use super::driver::sys;
use crate::device::{DeviceInfo, Work};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::ElementKind;
use crate::rows::Rows;

/// Shared memory per block of the smallest GPUs with tensor-core products (sm_86, sm_89, sm_120).
const LEAST_SHARED: usize = 99 << 10;

/// The share of the free memory that may be used.
const SHARE_OF_FREE: f64 = 0.9;

/// A GPU, with a memory budget.
#[derive(Debug)]
pub struct CudaDevice {
    pub(super) gpu: Arc<Gpu>,
    pub(super) memory: Arc<Memory>,
    pub(super) pair_strategy: PairStrategy,
}

/// The strategy for comparing pairs in searches and DBSCAN, and rows with centroids in k-means,
/// where there is a choice. Answers are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PairStrategy {
    /// The fastest strategy.
    Best,
    /// All pairs, one by one.
    Scanned,
    /// With a filter, for any number of pairs.
    Filtered,
    /// With the filter of single warps, also on devices with warpgroup products, in blocks with at
    /// most `shared` bytes of shared memory.
    FilteredByWarps { shared: usize },
}

/// The tensor-core instructions that filter the pairs of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum TensorCores {
    /// Those of warpgroups, which are four warps each (sm_90): `wgmma`.
    Warpgroups,
    /// Those of single warps (sm_80 and later): `mma`. Blocks have at most `shared` bytes of shared
    /// memory.
    Warps { shared: usize },
}

impl CudaDevice {
    /// The GPU with this ordinal, with a budget of `memory` bytes (0: no limit), and of at most 90%
    /// of what is free now. Takes 16 MiB of it, and 40 MiB of pinned host memory, once per process.
    ///
    /// # Errors
    /// The reason why the GPU cannot be used.
    pub(in crate::device) fn open(ordinal: usize, memory: u64) -> Result<Arc<Self>, String> {
        let count = count()?;
        if ordinal >= count {
            return Err(format!("the driver reports {count} GPUs"));
        }
        if let Some(reason) = sys::why_lost() {
            return Err(reason);
        }
        let open = || -> Result<Arc<Gpu>> {
            let gpu = Gpu::get(ordinal)?;
            let free = sys::free_memory(&gpu.context).map_err(sys::failed("cuMemGetInfo"))?;
            gpu.shared.allow((free as f64 * SHARE_OF_FREE) as u64);
            Ok(gpu)
        };
        let gpu = open().map_err(|error| with_sources(&error))?;
        let (name, shared, compute) =
            (gpu.info.name.clone(), gpu.shared.clone(), gpu.compute.clone());
        let memory = Memory::new(name, memory, shared, compute);
        Ok(Arc::new(Self { gpu, memory, pair_strategy: PairStrategy::Best }))
    }

    /// The same GPU with each strategy that it would not always choose, and the strategies' names.
    pub(in crate::device) fn test_variants(&self) -> Vec<(&'static str, Arc<Self>)> {
        let with = |pair_strategy| {
            let (gpu, memory) = (self.gpu.clone(), self.memory.clone());
            Arc::new(Self { gpu, memory, pair_strategy })
        };
        let mut all = vec![("scanned", with(PairStrategy::Scanned))];
        if self.tensor_cores(ElementKind::F32).is_some() {
            all.push(("filtered", with(PairStrategy::Filtered)));
        }
        if self.tensor_cores(ElementKind::F32) == Some(TensorCores::Warpgroups) {
            all.push(("warps", with(PairStrategy::FilteredByWarps { shared: usize::MAX })));
            all.push(("small", with(PairStrategy::FilteredByWarps { shared: LEAST_SHARED })));
        }
        all
    }

    /// The tensor-core instructions that filter pairs of a search of such rows, if the GPU has them
    /// and the compiler supports them. From capability 10 on, bit products are emulated in many
    /// instructions, so they are not used.
    pub(super) fn tensor_cores(&self, kind: ElementKind) -> Option<TensorCores> {
        let Limits { capability, shared, .. } = self.gpu.limits;
        let compiles_wgmma = || sys::nvrtc_version().is_ok_and(|version| version >= (12, 0));
        match (self.pair_strategy, capability) {
            (PairStrategy::Scanned, _) => None,
            (_, (10.., _)) if kind == ElementKind::Bits => None,
            (PairStrategy::Best | PairStrategy::Filtered, (9, 0)) if compiles_wgmma() => {
                Some(TensorCores::Warpgroups)
            }
            (PairStrategy::FilteredByWarps { shared: most }, (8.., _)) => {
                Some(TensorCores::Warps { shared: shared.min(most) })
            }
            (_, (8.., _)) => Some(TensorCores::Warps { shared }),
            _ => None,
        }
    }

    /// The first `count` values of a buffer, after all earlier work of the device.
    pub(super) fn read<T: DeviceRepr>(
        &self,
        from: &Buffer,
        count: usize,
        job: &Job,
    ) -> Result<Vec<T>> {
        self.gpu.downloader.read(&self.gpu.compute, from.slice(), count, job)
    }

    /// Sends bytes, one part after the other; later work of the device waits for them.
    pub(super) fn send(&self, parts: &[&[u8]], job: &Job) -> Result<Buffer> {
        let (buffer, ready) = self.gpu.uploader.upload_parts(&self.memory, parts, job)?;
        self.gpu.compute.wait(&ready).map_err(sys::failed("cuStreamWaitEvent"))?;
        Ok(buffer)
    }

    /// Sends numbers, or structs of numbers; later work of the device waits for them.
    pub(super) fn send_values<T: DeviceRepr>(&self, values: &[T], job: &Job) -> Result<Buffer> {
        self.send(&[sys::bytes_of(values)], job)
    }

    /// Sends rows in row-major order; later work of the device waits for them. Also returns the
    /// work.
    pub(super) fn send_rows(&self, rows: &Rows, job: &Job) -> Result<(Buffer, Work)> {
        let (buffer, ready, transfer) = self.gpu.uploader.upload_plain(&self.memory, rows, job)?;
        self.gpu.compute.wait(&ready).map_err(sys::failed("cuStreamWaitEvent"))?;
        let (bytes_sent, transfer) = (transfer.bytes, transfer.time()?);
        Ok((buffer, Work { bytes_sent, transfer, ..Work::default() }))
    }

    /// Memory filled with this byte.
    pub(super) fn filled(&self, bytes: usize, byte: u8) -> Result<Buffer> {
        let mut buffer = self.memory.allocate(&self.gpu.compute, bytes)?;
        sys::fill(&self.gpu.compute, buffer.slice_mut(), byte)
            .map_err(sys::failed("cuMemsetD8Async"))?;
        Ok(buffer)
    }
}

/// The GPUs of this machine.
pub(in crate::device) fn list() -> Vec<DeviceInfo> {
    let count = count().unwrap_or(0);
    (0..count).filter_map(|i| Some(gpu::info(i, &sys::properties(i).ok()?))).collect()
}

/// The reason why there is no usable GPU, as a message for users; `None` if there is one.
pub(in crate::device) fn why_none() -> Option<String> {
    count().err()
}

/// The number of GPUs, or the reason why there are none.
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

/// An error and its sources, in one line.
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

    #[test]
    fn each_gpu_is_listed_or_there_is_a_reason() {
        match count() {
            Ok(gpus) => {
                assert_eq!(why_none(), None);
                assert_eq!(list().len(), gpus);
                let beyond = CudaDevice::open(gpus, 0).unwrap_err();
                assert_eq!(beyond, format!("the driver reports {gpus} GPUs"));
            }
            Err(reason) => {
                assert!(sys::has_driver() || reason.contains("libcuda"), "{reason}");
                assert_eq!(why_none().as_ref(), Some(&reason));
                assert!(list().is_empty());
                assert_eq!(CudaDevice::open(0, 0).unwrap_err(), reason);
            }
        }
    }
}
