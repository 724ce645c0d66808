//! Devices: coarse, fused arithmetic primitives, on the CPU by SIMD code and on a GPU by CUDA
//! kernels.
//!
//! | module | job |
//! |---|---|
//! | `contract` | a trait for each family of functions, whose methods define their results bit by bit |
//! | `compose` | algorithms over those traits: searches larger than memory, exact searches, k-means by search |
//! | `cpu`, `cuda` | the devices |
//! | `sums`, `cluster_sums`, `shares` | exact sums, independent of the order of addition |
//!
//! Work of O(rows × rows) is here; the rest of an algorithm is in [`crate::algo`], once.

mod cluster_sums;
mod compose;
mod contract;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod moments;
mod shares;
mod sums;

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::index::lsh::Family;
use crate::matrix::ElementKind;
use crate::metric::Metric;

pub use cluster_sums::ClusterSums;
pub use compose::StreamedSearch;
pub use compose::{ErrorBounds, RowStats};
pub use compose::{ExactSearch, Means, NearestCentroids, sums_of};
pub use contract::{
    Assignment, BucketTask, Buckets, Candidates, Components, DbscanDevice, DbscanInput, DbscanWork,
    Distances, Hashes, HashingDevice, KMeansDevice, KMeansInput, KMeansKind, KMeansProblem,
    KMeansSession, KMeansShape, NOISE, NearestInBuckets, Neighbors, ProbeSet, QueryInput,
    QueryRows, Ranges, RowUse, SearchDevice, SelfRows, Shape, Starts, StopReason, TableRows,
    TablesBuilt, Within, Work, centroid_shift,
};
pub use contract::{Labels, Pairing, RoundsRun};
pub use cpu::{CpuDevice, ExactPairs};
#[cfg(feature = "cuda")]
pub use cuda::CudaDevice;
pub use sums::sums_by_label;

mod sealed {
    pub trait Sealed {}
}

/// A device: the primitives of every family of functions.
pub trait Device: SearchDevice + KMeansDevice + DbscanDevice + Host + sealed::Sealed {
    /// Hash tables on the device; uninhabited if it has no primitives of LSH searches.
    type HashTables: Send + Sync;

    /// A description of the device.
    fn info(&self) -> DeviceInfo;

    /// The primitives of LSH searches; `None` if the host does all of their work but the distances.
    fn hashing(&self) -> Option<&Hashing<Self>> {
        None
    }

    /// The peak of device memory in bytes, allocated through this handle.
    fn peak_memory(&self) -> u64 {
        0
    }

    /// The bytes of device memory now allocated through this handle.
    fn memory_in_use(&self) -> u64 {
        0
    }
}

/// A device beside a host, which computes some of its results.
pub trait Host {
    /// Whether the device is the host.
    const IS_HOST: bool = false;

    /// The CPU for these: the device itself, or the CPU of this machine.
    fn host(&self) -> CpuDevice {
        CpuDevice::new()
    }
}

#[cfg(feature = "cuda")]
impl Host for CudaDevice {}

/// The primitives of LSH searches on a device.
pub type Hashing<D> =
    dyn HashingDevice<Rows = <D as SearchDevice>::Rows, HashTables = <D as Device>::HashTables>;

/// A description of a device, for users.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The name in settings: `cpu`, `cuda:0`.
    pub name: String,
    /// The product, and the resources in use.
    pub description: String,
    /// Bytes of its own memory; `None` if it uses the host's.
    pub memory: Option<u64>,
}

/// The device that a user requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// A GPU if the machine has one and the work is worth it.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU with this number; 0 is the driver's first.
    Cuda(usize),
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl std::str::FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let lower = name.to_ascii_lowercase();
        match lower.as_str() {
            "auto" => return Ok(Self::Auto),
            "cpu" => return Ok(Self::Cpu),
            "cuda" => return Ok(Self::Cuda(0)),
            _ => {}
        }
        lower.strip_prefix("cuda:").and_then(|n| n.parse().ok()).map(Self::Cuda).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "unknown device '{name}'; accepted are auto, cpu, cuda, cuda:N"
            ))
        })
    }
}

/// A device of this machine.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AnyDevice {
    /// The CPU.
    Cpu(Arc<CpuDevice>),
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(Arc<CudaDevice>),
}

/// A task that runs on any device.
pub trait OnDevice {
    /// The result.
    type Output;
    /// Runs the task.
    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output;
}

impl AnyDevice {
    /// The CPU of this machine.
    pub fn cpu() -> Self {
        Self::Cpu(Arc::new(CpuDevice::new()))
    }

    /// The CPU, once with each instruction set that it distinguishes and this processor has.
    /// Returns for each the name of the instruction set, whether searches prefilter with fewer bits
    /// wherever possible instead of only where it pays off, and the device.
    pub fn cpu_test_variants() -> Vec<(&'static str, bool, Self)> {
        let all = CpuDevice::test_variants().into_iter();
        all.map(|(name, prefilters, device)| (name, prefilters, Self::Cpu(Arc::new(device))))
            .collect()
    }

    /// The GPU with this number, limited to `memory` bytes of its memory (0: nearly all free
    /// memory).
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the reason why it is not available.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn cuda(ordinal: usize, memory: u64) -> Result<Self> {
        #[cfg(feature = "cuda")]
        let reason = match CudaDevice::open(ordinal, memory) {
            Ok(device) => return Ok(Self::Cuda(device)),
            Err(reason) => reason,
        };
        #[cfg(not(feature = "cuda"))]
        let reason = "this build has no CUDA support (feature \"cuda\")".to_string();
        let available = devices().into_iter().map(|d| d.name).collect::<Vec<_>>().join(", ");
        Err(Error::NoDevice { requested: format!("cuda:{ordinal}"), reason, available })
    }

    /// This device, once with each search strategy that it would not always choose, and their
    /// names. For the CPU, see [`cpu_test_variants`](Self::cpu_test_variants).
    pub fn test_variants(&self) -> Vec<(&'static str, Self)> {
        match self {
            Self::Cpu(_) => vec![],
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => {
                let all = device.test_variants().into_iter();
                all.map(|(name, device)| (name, Self::Cuda(device))).collect()
            }
        }
    }

    /// The device for a computation of about `operations` arithmetic operations.
    ///
    /// `auto` takes the first GPU if the machine has one and the work outweighs its initialisation.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if a device requested by name is not available.
    pub fn choose(choice: DeviceChoice, memory: u64, operations: f64) -> Result<Self> {
        let Some(ordinal) = Self::gpu_ordinal(choice, Some(operations)) else {
            return Ok(Self::cpu());
        };
        let gpu = Self::cuda(ordinal, memory);
        if choice == DeviceChoice::Auto { gpu.or_else(|_| Ok(Self::cpu())) } else { gpu }
    }

    /// The number of the GPU that [`choose`](Self::choose) requests for about `operations`
    /// operations, if any; `operations` is `None` if unknown.
    pub fn gpu_ordinal(choice: DeviceChoice, operations: Option<f64>) -> Option<usize> {
        match choice {
            DeviceChoice::Cpu => None,
            DeviceChoice::Cuda(ordinal) => Some(ordinal),
            DeviceChoice::Auto => {
                operations.is_some_and(|operations| operations >= WORTH_A_GPU).then_some(0)
            }
        }
    }

    /// The device that [`choose`](Self::choose) would take for about `operations` operations, for
    /// EXPLAIN: `cpu`, `auto (cuda:0)`, or `auto`. Queries the driver without initialising a GPU.
    pub fn expected_device(choice: DeviceChoice, operations: Option<f64>) -> String {
        if choice != DeviceChoice::Auto {
            return choice.to_string();
        }
        let worth = operations.map(|operations| operations >= WORTH_A_GPU);
        let gpu = || devices().into_iter().nth(1).map(|gpu| gpu.name);
        match worth {
            Some(false) => "auto (cpu)".to_string(),
            worth => match (gpu(), worth) {
                (Some(gpu), Some(_)) => format!("auto ({gpu})"),
                (Some(_), None) => "auto".to_string(),
                (None, _) => "auto (cpu)".to_string(),
            },
        }
    }

    /// A description of the device.
    pub fn info(&self) -> DeviceInfo {
        struct Info;
        impl OnDevice for Info {
            type Output = DeviceInfo;
            fn run<D: Device>(self, device: &Arc<D>) -> DeviceInfo {
                device.info()
            }
        }
        self.run(Info)
    }

    /// The peak of device memory in bytes, allocated through this handle.
    pub fn peak_memory(&self) -> u64 {
        struct Peak;
        impl OnDevice for Peak {
            type Output = u64;
            fn run<D: Device>(self, device: &Arc<D>) -> u64 {
                device.peak_memory()
            }
        }
        self.run(Peak)
    }

    /// The bytes of device memory now allocated through this handle.
    pub fn memory_in_use(&self) -> u64 {
        struct InUse;
        impl OnDevice for InUse {
            type Output = u64;
            fn run<D: Device>(self, device: &Arc<D>) -> u64 {
                device.memory_in_use()
            }
        }
        self.run(InUse)
    }

    /// Prepares the device for a search: see `SearchDevice::warm_search`.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn warm_search(&self, metric: Metric, shape: &Shape, queries: usize) {
        match self {
            Self::Cpu(_) => {}
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.warm_search(metric, shape, queries),
        }
    }

    /// Prepares the device for an LSH search: see `HashingDevice::warm_hashing`.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn warm_hashing(&self, metric: Metric, kind: ElementKind, dim: usize, family: Family) {
        match self {
            Self::Cpu(_) => {}
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.warm_hashing(metric, kind, dim, family),
        }
    }

    /// Prepares the device for k-means: see `KMeansDevice::warm_kmeans`.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn warm_kmeans(&self, rows: KMeansKind, metric: Metric, k: usize, draws: bool) {
        match self {
            Self::Cpu(_) => {}
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.warm_kmeans(rows, metric, k, draws),
        }
    }

    /// Prepares the device for DBSCAN: see `DbscanDevice::warm_dbscan`.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn warm_dbscan(&self, metric: Metric, kind: ElementKind, dim: usize, has_weights: bool) {
        match self {
            Self::Cpu(_) => {}
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.warm_dbscan(metric, kind, dim, has_weights),
        }
    }

    /// This device, or the CPU for an element type that only the CPU supports.
    pub fn for_kind(&self, kind: ElementKind) -> Self {
        if kind == ElementKind::Sets { Self::cpu() } else { self.clone() }
    }

    /// Runs a task on this device.
    pub fn run<T: OnDevice>(&self, task: T) -> T::Output {
        match self {
            Self::Cpu(device) => task.run(device),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => task.run(device),
        }
    }
}

/// Operations below which `auto` stays on the CPU: about the time to start CUDA (0.34 s on an H100)
/// at 50 G operations per second.
const WORTH_A_GPU: f64 = 2e10;

/// The devices of this machine, the CPU first.
pub fn devices() -> Vec<DeviceInfo> {
    let cpu = std::iter::once(CpuDevice::new().info());
    #[cfg(feature = "cuda")]
    return cpu.chain(cuda::list()).collect();
    #[cfg(not(feature = "cuda"))]
    cpu.collect()
}

/// The reason why no GPU is usable, as a message for users; `None` if one is.
pub fn why_no_gpu() -> Option<String> {
    #[cfg(feature = "cuda")]
    return cuda::why_none();
    #[cfg(not(feature = "cuda"))]
    Some("this build has no CUDA support (feature \"cuda\")".to_string())
}
