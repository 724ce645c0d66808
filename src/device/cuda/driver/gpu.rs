//! What a process keeps per GPU: its context, its two streams, pinned buffers and compiled kernels.
//!
//! Waking a GPU up takes a third of a second and compiling kernels about one, so both are done once
//! per process and shared by every handle that is opened later.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{CUdevice_attribute, CUevent_flags};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use super::cache::Cache;
use super::compile::{Program, Spec};
use super::sys::{self, Properties, failed};
use super::upload::Uploader;
use crate::device::DeviceInfo;
use crate::device::cuda::kmeans::launch::RoundKernels;
use crate::device::cuda::search::launch::{Kernels, Limits};
use crate::error::Result;

/// Unused memory that the driver's pool keeps for the next query.
const KEEP_IN_POOL: u64 = 4 << 30;

/// A GPU that is awake.
pub(in crate::device::cuda) struct Gpu {
    pub(in crate::device::cuda) info: DeviceInfo,
    pub(in crate::device::cuda) context: Arc<CudaContext>,
    /// Where kernels on lists run; uploads have a stream of their own.
    pub(in crate::device::cuda) compute: Arc<CudaStream>,
    pub(in crate::device::cuda) uploader: Uploader,
    arch: String,
    pub(in crate::device::cuda) limits: Limits,
    cache: Cache,
    kernels: Mutex<HashMap<Spec, Arc<Kernels>>>,
    rounds: Mutex<HashMap<usize, Arc<RoundKernels>>>,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Gpu {
    /// The GPU of this number, woken up by the first caller.
    pub(in crate::device::cuda) fn get(ordinal: usize) -> Result<Arc<Self>> {
        static AWAKE: OnceLock<Mutex<HashMap<usize, Arc<Gpu>>>> = OnceLock::new();
        let mut awake =
            AWAKE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = awake.get(&ordinal) {
            return Ok(gpu.clone());
        }
        let gpu = Arc::new(Self::wake(ordinal)?);
        awake.insert(ordinal, gpu.clone());
        Ok(gpu)
    }

    fn wake(ordinal: usize) -> Result<Self> {
        let context = sys::context(ordinal).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let properties = sys::properties(ordinal).map_err(failed("cuDeviceGetAttribute"))?;
        let attribute = |which| {
            context.attribute(which).map(|x| x as usize).map_err(failed("cuDeviceGetAttribute"))
        };
        let limits = Limits {
            capability: properties.capability,
            shared: attribute(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            multiprocessors: attribute(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            )?,
        };
        sys::keep_in_pool(&context, KEEP_IN_POOL).map_err(failed("cuMemPoolSetAttribute"))?;
        let compute = context.new_stream().map_err(failed("cuStreamCreate"))?;
        let uploader = Uploader::new(&context)?;
        Ok(Self {
            info: info(ordinal, &properties),
            compute,
            uploader,
            arch: arch(&properties),
            limits,
            cache: Cache::from_environment(),
            kernels: Mutex::default(),
            rounds: Mutex::default(),
            context,
        })
    }

    /// An event of the compute stream that knows when it passed.
    pub(in crate::device::cuda) fn timestamp(&self) -> Result<CudaEvent> {
        let timed = Some(CUevent_flags::CU_EVENT_DEFAULT);
        self.compute.record_event(timed).map_err(failed("cuEventRecord"))
    }

    /// The kernels for a spec, from memory, from disk or from the compiler.
    pub(in crate::device::cuda) fn kernels(&self, spec: Spec) -> Result<Arc<Kernels>> {
        let mut loaded = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = loaded.get(&spec) {
            return Ok(kernels.clone());
        }
        let cubin = spec.program().cubin(&self.arch, &self.cache)?;
        let kernels = Arc::new(Kernels::load(&self.context, spec, cubin, self.limits)?);
        loaded.insert(spec, kernels.clone());
        Ok(kernels)
    }

    /// The kernels of Lloyd's rounds for rows of this many f32.
    pub(in crate::device::cuda) fn round_kernels(&self, dim: usize) -> Result<Arc<RoundKernels>> {
        let mut loaded = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = loaded.get(&dim) {
            return Ok(kernels.clone());
        }
        let cubin = Program::clusters(dim).cubin(&self.arch, &self.cache)?;
        let kernels = Arc::new(RoundKernels::load(&self.context, dim, cubin, self.limits)?);
        loaded.insert(dim, kernels.clone());
        Ok(kernels)
    }
}

/// What a device is, for people: `NVIDIA H100 80GB HBM3 (sm_90, 79.2 GiB)`.
pub(in crate::device::cuda) fn info(ordinal: usize, properties: &Properties) -> DeviceInfo {
    let gib = properties.memory as f64 / f64::from(1 << 30);
    DeviceInfo {
        name: format!("cuda:{ordinal}"),
        description: format!("{} ({}, {gib:.1} GiB)", properties.name, arch(properties)),
        memory: Some(properties.memory),
    }
}

fn arch(properties: &Properties) -> String {
    let (major, minor) = properties.capability;
    format!("sm_{major}{minor}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_described_by_product_architecture_and_memory() {
        let properties = Properties {
            name: "NVIDIA H100 80GB HBM3".to_string(),
            capability: (9, 0),
            memory: 85_040_000_000,
        };
        let info = info(1, &properties);
        assert_eq!(info.name, "cuda:1");
        assert_eq!(info.description, "NVIDIA H100 80GB HBM3 (sm_90, 79.2 GiB)");
        assert_eq!(info.memory, Some(85_040_000_000));
    }
}
