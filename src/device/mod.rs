//! Where the arithmetic happens: a sealed trait of coarse, fused primitives, and its two
//! implementations, SIMD code on the CPU and CUDA kernels on a GPU.
//!
//! What is O(rows × rows) lives in a primitive; everything else (tiling, retries, numbering) lives
//! once, above, in [`crate::algo`]. The contract of a primitive is on the trait and nowhere else:
//! both implementations give the same bits.

mod clusters;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod sums;

use std::fmt;
use std::ops::AddAssign;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::matrix::{ElementKind, Rows};
use crate::metric::Metric;

pub use clusters::{
    ClusterSums, End, GroupEnd, GroupStart, LloydStart, Resident, Spread, Stretch, shift,
    squares_are_finite,
};
pub use cpu::{CpuDevice, in_parallel};
#[cfg(feature = "cuda")]
pub use cuda::CudaDevice;

mod sealed {
    pub trait Sealed {}
}

/// The primitives that algorithms are made of.
///
/// Rows live on the device between primitives, in whatever layout suits it. A primitive may return
/// before the device has finished, except the ones that return values to the host.
pub trait Device: sealed::Sealed + Send + Sync + 'static {
    /// Base rows on the device.
    type Base: Send + Sync;
    /// Query rows on the device.
    type Queries: Send + Sync;
    /// The neighbours found so far, one list per query.
    type Nearest: Send;

    /// What the device is.
    fn info(&self) -> DeviceInfo;

    /// How much fits at a time.
    fn capacity(&self, shape: &Shape) -> Capacity;

    /// Put base rows, prepared for the metric, on the device.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if they do not fit.
    fn upload_base(&self, rows: &Rows, metric: Metric) -> Result<Self::Base>;

    /// Put query rows, prepared for the metric, on the device.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if they do not fit.
    fn upload_queries(&self, rows: &Rows, metric: Metric) -> Result<Self::Queries>;

    /// Empty lists for these queries, of at most `k` neighbours each.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if they do not fit.
    fn nearest(&self, queries: &Self::Queries, k: usize) -> Result<Self::Nearest>;

    /// Merge base rows into the lists: afterwards each list holds the `k` smallest of
    /// `(distance, number of the base row)` among its entries before and all pairs of its query
    /// with `base`, ascending. Distances are those of [`crate::metric`], bit by bit.
    ///
    /// All base rows of the calls on one set of lists have distinct numbers; the calls may come in
    /// any order.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the flag is raised; the lists are then useless.
    fn top_k(
        &self,
        queries: &Self::Queries,
        base: &Self::Base,
        pairing: &Pairing<'_>,
        nearest: &mut Self::Nearest,
    ) -> Result<()>;

    /// Bring the lists to the host.
    ///
    /// # Errors
    /// Whatever went wrong in the primitives before that returned early.
    fn download(&self, nearest: Self::Nearest) -> Result<Neighbors>;

    /// The nearest base row of every query: `top_k` of 1, with nothing before.
    ///
    /// # Errors
    /// Those of [`nearest`](Self::nearest), [`top_k`](Self::top_k) and
    /// [`download`](Self::download).
    fn nearest_one(
        &self,
        queries: &Self::Queries,
        base: &Self::Base,
        pairing: &Pairing<'_>,
    ) -> Result<Neighbors> {
        let mut nearest = self.nearest(queries, 1)?;
        self.top_k(queries, base, pairing, &mut nearest)?;
        self.download(nearest)
    }

    /// Move the rows whose label changed from their old clusters to their new ones; without old
    /// labels, put all rows into clusters.
    fn regroup(
        &self,
        rows: &Rows,
        weights: Option<&[f64]>,
        labels: (Option<&[u32]>, &[u32]),
        sums: &mut ClusterSums,
    ) {
        cpu::regroup(rows, weights, labels, sums);
    }

    /// Keep rows of equal weight, prepared for squared Euclidean distances, on the device for
    /// Lloyd's rounds. No squared distance between two of them overflows. `None` if searching in
    /// every round is the way on this device, or for these rows.
    ///
    /// # Errors
    /// What the device says, but for a lack of memory.
    fn reside(&self, rows: &Rows, start: &LloydStart<'_>) -> Result<Option<Box<dyn Resident>>> {
        let _ = (rows, start);
        Ok(None)
    }

    /// Lloyd's rounds on many groups of rows in one job, at most `limit` each. A group that has to be
    /// finished elsewhere, because a cluster is empty or the device is not made for it, has `None`.
    ///
    /// # Errors
    /// What the device says, but for a lack of memory.
    fn rounds_of_groups(
        &self,
        rows: &Rows,
        groups: &[GroupStart],
        limit: usize,
    ) -> Result<(Vec<Option<GroupEnd>>, Work)> {
        let _ = (rows, limit);
        Ok((vec![None; groups.len()], Work::default()))
    }

    /// Choose, of some rows, the one that leaves the least of Σ weight · distance to the nearest
    /// chosen row, the first of equals.
    fn spread(&self, spread: &mut Spread, candidates: &[u32]) -> u32 {
        cpu::spread(spread, candidates)
    }
}

/// Which pairs of rows a call compares, and when to stop.
#[derive(Debug)]
pub struct Pairing<'a> {
    /// The metric both sides were prepared for.
    pub metric: Metric,
    /// Number of the first base row; the others follow.
    pub first_base: u32,
    /// In a join of rows with themselves, the number of the first query row: a query is never
    /// paired with the base row of its own number.
    pub first_query: Option<u32>,
    /// For each query, the number of a base row that is probably near. A device may use it to rule
    /// others out; the answer is the same.
    pub near: Option<&'a [u32]>,
    /// Checked between tiles.
    pub cancel: &'a Cancel,
}

/// The sizes that decide how much memory a call needs.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Type of the elements of both sides.
    pub kind: ElementKind,
    /// Numbers, or bits, in a row.
    pub dim: usize,
    /// Neighbours per query.
    pub k: usize,
}

/// Rows that fit on a device together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Base rows.
    pub base: usize,
    /// Query rows, with their lists.
    pub queries: usize,
}

/// The neighbours of a block of queries.
#[derive(Debug, Clone)]
pub struct Neighbors {
    /// Length of every query's list.
    pub per_query: usize,
    /// Numbers of the base rows, list after list, nearest first.
    pub rows: Vec<u32>,
    /// Their distances.
    pub distances: Distances,
    /// What it took.
    pub work: Work,
}

/// Distances, in the precision of the rows. Distances between strings of bits are f32.
#[derive(Debug, Clone, PartialEq)]
pub enum Distances {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
}

/// What a computation took, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Pairs of rows whose sum was computed, or bounded by one product.
    pub pairs: u64,
    /// Pairs ruled out in groups, without looking at them.
    pub pruned: u64,
    /// Pairs computed a second time in the exact order, because a product could not decide.
    pub rechecked: u64,
    /// Query rows that were looked at again: in a search, because their candidates overflowed; in
    /// Lloyd's rounds, because products left open which centroid is the nearest.
    pub redone: u64,
    /// Bytes sent to the device.
    pub bytes_sent: u64,
    /// Time spent sending them.
    pub transfer: Duration,
    /// Time spent computing.
    pub kernel: Duration,
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.pairs += other.pairs;
        self.pruned += other.pruned;
        self.rechecked += other.rechecked;
        self.redone += other.redone;
        self.bytes_sent += other.bytes_sent;
        self.transfer += other.transfer;
        self.kernel += other.kernel;
    }
}

/// A flag that stops work nobody waits for any more.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Ask the work to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// # Errors
    /// [`Error::Cancelled`] if the flag is raised.
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// What a device is, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The name that selects it: `cpu`, `cuda:0`.
    pub name: String,
    /// The product, and what of it is used.
    pub description: String,
    /// Bytes of its own memory; `None` if it uses the host's.
    pub memory: Option<u64>,
}

/// Which device a user asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum DeviceChoice {
    /// A GPU if there is one and the work is worth it.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number; 0 is the driver's first.
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

/// Something to do on whichever device was chosen.
pub trait OnDevice {
    /// What comes out.
    type Output;
    /// Do it.
    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output;
}

impl AnyDevice {
    /// The CPU of this machine.
    pub fn cpu() -> Self {
        Self::Cpu(Arc::new(CpuDevice::new()))
    }

    /// The GPU of this number, with at most `memory` bytes of its memory (0: nearly all that is
    /// free).
    ///
    /// # Errors
    /// [`Error::NoDevice`] says why there is none.
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
        Err(Error::NoDevice { asked: format!("cuda:{ordinal}"), reason, available })
    }

    /// The device for a computation of about `operations` arithmetic operations.
    ///
    /// `auto` takes the first GPU if there is one and the work outweighs waking it up.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if a device asked for by name is not there.
    pub fn choose(choice: DeviceChoice, memory: u64, operations: f64) -> Result<Self> {
        match choice {
            DeviceChoice::Cpu => Ok(Self::cpu()),
            DeviceChoice::Cuda(ordinal) => Self::cuda(ordinal, memory),
            DeviceChoice::Auto if operations < WORTH_A_GPU => Ok(Self::cpu()),
            DeviceChoice::Auto => Ok(Self::cuda(0, memory).unwrap_or_else(|_| Self::cpu())),
        }
    }

    /// What [`choose`](Self::choose) would say for about so many operations, if anybody knows how
    /// many, for EXPLAIN: `cpu`, `auto (cuda:0)`, or `auto`. Asks the driver, but wakes no GPU up.
    pub fn foresee(choice: DeviceChoice, operations: Option<f64>) -> String {
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

    /// What the device is.
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

    /// Do something on this device.
    pub fn run<T: OnDevice>(&self, task: T) -> T::Output {
        match self {
            Self::Cpu(device) => task.run(device),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => task.run(device),
        }
    }
}

/// Operations below which `auto` stays on the CPU: about the time it takes to start CUDA (0.34 s
/// on an H100) at 50 G operations per second.
const WORTH_A_GPU: f64 = 2e10;

/// The devices of this machine, the CPU first.
pub fn devices() -> Vec<DeviceInfo> {
    let cpu = std::iter::once(CpuDevice::new().info());
    #[cfg(feature = "cuda")]
    return cpu.chain(cuda::list()).collect();
    #[cfg(not(feature = "cuda"))]
    cpu.collect()
}

/// Why there is no GPU to use, if there is none; for people.
pub fn why_no_gpu() -> Option<String> {
    #[cfg(feature = "cuda")]
    return cuda::why_none();
    #[cfg(not(feature = "cuda"))]
    Some("this build has no CUDA support (feature \"cuda\")".to_string())
}
