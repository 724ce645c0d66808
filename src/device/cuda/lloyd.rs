//! Lloyd's rounds on rows that stay on the device: launches run ahead of the host, which looks at
//! how far they have come now and then.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaEvent;

use super::gpu::Gpu;
use super::launch_groups::{GROUPS_DIM, GroupsWorkspace};
use super::launch_rounds::{MOST_ROWS, Status, Workspace, way};
use super::memory::Memory;
use super::sys::failed;
use super::upload::elapsed;
use crate::device::{
    Cancel, ClusterSums, End, GroupEnd, GroupStart, LloydStart, Resident, Stretch, Work,
};
use crate::error::Result;
use crate::matrix::Rows;

/// Rounds between two looks at the device.
const STRETCH: usize = 16;

/// Names in `kernels/clusters.cuh`.
const GOING_ON: u32 = 0;
const STABLE: u32 = 1;
const CONVERGED: u32 = 2;
const EMPTY_CLUSTER: u32 = 3;
const CROWDED: u32 = 4;

/// All rounds of many groups in one launch. `None` if these rows have no such way.
pub(super) fn rounds_of_groups(
    gpu: &Gpu,
    memory: &Arc<Memory>,
    rows: &Rows,
    groups: &[GroupStart],
    limit: usize,
) -> Result<Option<(Vec<Option<GroupEnd>>, Work)>> {
    let dim = rows.matrix().dim();
    let fits = dim <= GROUPS_DIM && rows.len() <= MOST_ROWS;
    if !fits || rows.reals::<f32>().is_none() || groups.is_empty() {
        return Ok(None);
    }
    let kernels = gpu.round_kernels(dim)?;
    let (buffer, ready, transfer) = gpu.uploader.upload_plain(memory, rows)?;
    gpu.compute.wait(&ready).map_err(failed("cuStreamWaitEvent"))?;
    let rows = (buffer, rows.len());
    let begin = gpu.timestamp()?;
    let workspace = GroupsWorkspace::start(&kernels, &gpu.compute, memory, rows, groups, limit)?;
    let end = gpu.timestamp()?;
    let found = workspace.finish(groups)?;
    let ends =
        found.into_iter().map(|(status, group)| (status.end != EMPTY_CLUSTER).then_some(group));
    let work = Work {
        bytes_sent: transfer.bytes,
        transfer: transfer.time()?,
        kernel: elapsed(&begin, &end)?,
        ..Work::default()
    };
    Ok(Some((ends.collect(), work)))
}

/// After so many rounds rows are sorted again: ever fewer of them move.
fn is_power_of_four(rounds: usize) -> bool {
    rounds.is_power_of_two() && rounds.trailing_zeros().is_multiple_of(2)
}

/// Rows on a GPU.
pub(super) struct Lloyd {
    gpu: Arc<Gpu>,
    memory: Arc<Memory>,
    workspace: Workspace,
    empty: ClusterSums,
    rows: usize,
    /// Rounds since the start.
    rounds: usize,
    work: Work,
    computing: Vec<(CudaEvent, CudaEvent)>,
}

impl Lloyd {
    /// `None` if these rows have no way of their own.
    pub(super) fn try_new(
        gpu: &Arc<Gpu>,
        memory: &Arc<Memory>,
        rows: &Rows,
        start: &LloydStart<'_>,
    ) -> Result<Option<Self>> {
        let (dim, k) = (rows.matrix().dim(), start.empty.counts.len());
        let fits = rows.reals::<f32>().is_some() && rows.len() <= MOST_ROWS;
        let way = way(dim, k, gpu.limits).filter(|_| fits);
        let Some(way) = way else { return Ok(None) };
        let kernels = gpu.round_kernels(dim)?;
        let (buffer, ready, transfer) = gpu.uploader.upload_plain(memory, rows)?;
        gpu.compute.wait(&ready).map_err(failed("cuStreamWaitEvent"))?;
        let shape = (rows.len(), way);
        let workspace = Workspace::new(kernels, &gpu.compute, memory, buffer, shape, start)?;
        let work =
            Work { bytes_sent: transfer.bytes, transfer: transfer.time()?, ..Work::default() };
        let (gpu, memory, empty) = (gpu.clone(), memory.clone(), start.empty.clone());
        let (rows, rounds, computing) = (rows.len(), 0, Vec::new());
        Ok(Some(Self { gpu, memory, workspace, empty, rows, rounds, work, computing }))
    }

    fn timed<T>(&mut self, task: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let begin = self.gpu.timestamp()?;
        let done = task(self)?;
        let end = self.gpu.timestamp()?;
        self.computing.push((begin, end));
        Ok(done)
    }

    /// Centroids of another origin; the length of the longest row stays known.
    fn set(&mut self, centroids: &[f32]) -> Result<()> {
        let Status { largest_row, .. } = self.workspace.status()?;
        self.workspace.set_centroids(centroids)?;
        self.workspace.set_status(&Status { largest_row, ..Status::default() })
    }
}

impl Resident for Lloyd {
    fn start(&mut self, centroids: &[f32]) -> Result<()> {
        self.rounds = 0;
        self.workspace.clear()?;
        self.set(centroids)
    }

    fn go_on(&mut self, centroids: &[f32]) -> Result<()> {
        self.set(centroids)
    }

    fn run(&mut self, limit: usize, cancel: &Cancel) -> Result<Stretch> {
        let before = self.workspace.status()?;
        let mut ordered = 0;
        let status = loop {
            cancel.check()?;
            let stretch = STRETCH.min(limit - ordered);
            self.timed(|lloyd| {
                for _ in 0..stretch {
                    lloyd.workspace.assign(false)?;
                    lloyd.workspace.add(lloyd.rounds == 0)?;
                    lloyd.workspace.update()?;
                    lloyd.rounds += 1;
                    if is_power_of_four(lloyd.rounds) && lloyd.rounds > 1 {
                        lloyd.workspace.sort()?;
                    }
                }
                Ok(())
            })?;
            ordered += stretch;
            let status = self.workspace.status()?;
            if status.end != GOING_ON || ordered == limit {
                break status;
            }
        };
        let rounds = (status.iterations - before.iterations) as usize;
        self.work.redone += status.rechecked - before.rechecked;
        self.work.pairs += rounds as u64 * self.rows as u64 * self.empty.counts.len() as u64;
        let end = match status.end {
            STABLE => End::Stable,
            CONVERGED => End::Converged,
            EMPTY_CLUSTER => End::EmptyCluster,
            CROWDED => End::Crowded,
            _ => End::Limit,
        };
        Ok(Stretch { rounds, moved: status.moved_last as usize, end })
    }

    fn assign(&mut self) -> Result<bool> {
        self.timed(|lloyd| lloyd.workspace.assign(true))?;
        self.work.pairs += self.rows as u64 * self.empty.counts.len() as u64;
        Ok(self.workspace.status()?.end != CROWDED)
    }

    fn assigned(&mut self) -> Result<(Vec<u32>, Vec<f32>)> {
        let memory = self.memory.clone();
        self.workspace.assigned(&memory)
    }

    fn centroids(&mut self) -> Result<Vec<f32>> {
        let current = self.workspace.status()?.current;
        self.workspace.centroids(current)
    }

    fn sums(&mut self) -> Result<ClusterSums> {
        self.workspace.sums(&self.empty)
    }

    fn take_work(&mut self) -> Result<Work> {
        let times = self.computing.iter().map(|(begin, end)| elapsed(begin, end));
        self.work.kernel = times.sum::<Result<Duration>>()?;
        self.computing.clear();
        Ok(std::mem::take(&mut self.work))
    }
}
