//! Lloyd's rounds on rows that stay on the device: launches are queued ahead, and the host checks
//! their progress now and then.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaEvent;

use super::kernels::{AssignStrategy, MOST_ROWS, RoundKernels};
use super::row_type::{RowType, UploadedRows};
use super::structs::{Status, labels_of};
use super::workspace::KMeansWorkspace;
use crate::device::ClusterSums;
use crate::device::contract::{Assignment, KMeansProblem, Labels, RoundsRun, StopReason, Work};
use crate::device::cuda::device::{CudaDevice, TensorCores};
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::memory::{Buffer, Memory};
use crate::device::cuda::driver::upload::elapsed;
use crate::error::Result;
use crate::job::{Job, Progress};
use crate::matrix::{ElementKind, Real};
use crate::rows::Rows;

/// Rounds between two checks of the status.
const ROUNDS_TOGETHER: usize = 16;

/// The rows of one problem on a GPU, with all buffers that its rounds need.
pub(super) struct Resident {
    gpu: Arc<Gpu>,
    memory: Arc<Memory>,
    workspace: KMeansWorkspace,
    empty: ClusterSums,
    rows: usize,
    /// Whether rows are assigned to their nearest centroids, with undecided rows marked in labels.
    is_assigned: bool,
    work: Work,
    computing: Vec<(CudaEvent, CudaEvent)>,
}

/// The rows of one problem, on the GPU already if `uploaded`, and empty sums of its clusters.
pub(super) struct ResidentInput<'a> {
    pub(super) rows: &'a Rows,
    pub(super) uploaded: Option<Buffer>,
    pub(super) weights: Option<&'a [f64]>,
    pub(super) problem: &'a KMeansProblem,
    pub(super) empty: &'a ClusterSums,
}

impl Resident {
    /// The kernels for such rows.
    pub(super) fn kernels(
        device: &CudaDevice,
        row_type: RowType,
        strategy: AssignStrategy,
    ) -> Result<Arc<RoundKernels>> {
        let by_warpgroups = device.tensor_cores(ElementKind::F32) == Some(TensorCores::Warpgroups);
        RoundKernels::get(&device.gpu, row_type, by_warpgroups && strategy == AssignStrategy::Tiles)
    }

    /// Uploads rows whose squared distances never overflow float32, unless they are on the GPU
    /// already.
    pub(super) fn open(
        device: &CudaDevice,
        input: ResidentInput<'_>,
        row_type: RowType,
        strategy: AssignStrategy,
        job: &Job,
    ) -> Result<Self> {
        let ResidentInput { rows, uploaded, weights, problem, empty } = input;
        assert!(rows.len() <= MOST_ROWS);
        let CudaDevice { gpu, memory, .. } = device;
        let kernels = Self::kernels(device, row_type, strategy)?;
        let (buffer, mut work) = match uploaded {
            Some(buffer) => (buffer, Work::default()),
            None => device.send_rows(rows, job)?,
        };
        work.bytes_sent += weights.map_or(0, size_of_val) as u64;
        let weights = weights.map(|weights| device.send_values(weights, job));
        let (count, weights) = (rows.len(), weights.transpose()?);
        let uploaded = UploadedRows { rows: buffer, count, weights };
        let workspace = KMeansWorkspace::new(kernels, device, uploaded, strategy, problem, empty)?;
        let (gpu, memory, empty) = (gpu.clone(), memory.clone(), empty.clone());
        let (is_assigned, computing) = (false, Vec::new());
        Ok(Self { gpu, memory, workspace, empty, rows: count, is_assigned, work, computing })
    }

    fn timed<T>(&mut self, task: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let begin = self.gpu.timestamp()?;
        self.workspace.begin()?;
        let done = task(self)?;
        let end = self.gpu.timestamp()?;
        self.computing.push((begin, end));
        Ok(done)
    }

    /// Sets centroids that do not come from rounds; the norms of rows stay known.
    fn set<T: Real>(&mut self, centroids: &[T]) -> Result<()> {
        let Status { largest_row, typical_row, .. } = self.workspace.status()?;
        self.is_assigned = false;
        self.workspace.set_centroids(centroids)?;
        self.workspace.reset_status(largest_row, typical_row)
    }

    /// Starts with these centroids; no row has a cluster.
    pub(super) fn start<T: Real>(&mut self, centroids: &[T]) -> Result<()> {
        self.workspace.clear()?;
        self.set(centroids)
    }

    /// Continues with other centroids; rows stay in their clusters.
    pub(super) fn resume_from<T: Real>(&mut self, centroids: &[T]) -> Result<()> {
        self.set(centroids)
    }

    /// Runs rounds until there is a [`StopReason`]. `None` if they are given up; then only the
    /// centroids on the device are valid.
    pub(super) fn run(&mut self, limit: usize, job: &Job) -> Result<Option<RoundsRun>> {
        let before = self.workspace.status()?;
        let (mut ordered, mut told) = (0, 0);
        let status = loop {
            job.check()?;
            let together = ROUNDS_TOGETHER.min(limit - ordered);
            self.timed(|resident| {
                for _ in 0..together {
                    resident.workspace.assign(false, job)?;
                    resident.workspace.add()?;
                    resident.workspace.update()?;
                }
                Ok(())
            })?;
            ordered += together;
            let status = self.workspace.status()?;
            let done = (status.iterations - before.iterations) as usize;
            let moved = status.moved_last as usize;
            job.rounds(|| Progress { rounds: done - told, moved, inertia: None });
            told = done;
            if !status.is_going_on() || ordered == limit {
                break status;
            }
        };
        let rounds = told;
        self.work.redone += status.rechecked - before.rechecked;
        self.work.pairs += rounds as u64 * self.rows as u64 * self.empty.clusters() as u64;
        if status.is_given_up() {
            return Ok(None);
        }
        let stop = status.stop_reason().unwrap_or(StopReason::Limit);
        Ok(Some(RoundsRun { rounds, moved: status.moved_last as usize, stop }))
    }

    /// Assigns every row to the cluster of its nearest centroid. False if that is given up.
    pub(super) fn assign(&mut self, job: &Job) -> Result<bool> {
        if self.is_assigned {
            return Ok(true);
        }
        self.timed(|resident| resident.workspace.assign(true, job))?;
        self.work.pairs += self.rows as u64 * self.empty.clusters() as u64;
        self.is_assigned = !self.workspace.status()?.is_given_up();
        Ok(self.is_assigned)
    }

    /// The cluster of every row after the last round.
    pub(super) fn labels(&mut self, job: &Job) -> Result<Labels> {
        Ok(labels_of(self.workspace.labels(&self.memory, &self.gpu, job)?))
    }

    /// The cluster of every row, and its distance from the cluster's centroid.
    pub(super) fn assignment<T: Real>(&mut self, job: &Job) -> Result<Assignment<T>> {
        let (labels, costs) = self.workspace.assigned(&self.memory, &self.gpu, job)?;
        Ok(Assignment { labels, costs })
    }

    /// The centroids.
    pub(super) fn centroids<T: Real>(&mut self) -> Result<Vec<T>> {
        let current = self.workspace.status()?.current;
        self.workspace.centroids(current, &self.gpu)
    }

    /// The sums of all clusters.
    pub(super) fn sums(&mut self, job: &Job) -> Result<ClusterSums> {
        self.workspace.sums(&self.empty, job)
    }

    /// The work done since the last call.
    pub(super) fn take_work(&mut self) -> Result<Work> {
        let times = self.computing.iter().map(|(begin, end)| elapsed(begin, end));
        self.work.kernel = times.sum::<Result<Duration>>()?;
        self.computing.clear();
        Ok(std::mem::take(&mut self.work))
    }
}
