//! One search on the device: the lists of a block of queries, the launches that merge base rows into
//! them, and the way back to the host.
//!
//! Nothing here waits for the device, except to keep the host from running far ahead of it (so that
//! a cancelled search stops soon) and to bring the lists home.

pub(super) mod launch;
pub(super) mod passes;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags;

use self::launch::{Kernels, Lists, entry_bytes, real_bytes};
use self::passes::{PANEL, SearchPasses};
use super::driver::gpu::Gpu;
use super::driver::memory::Memory;
use super::driver::sys::{self, failed};
use super::driver::upload::{Panels, Transfer, elapsed};
use crate::device::contract::{Distances, Neighbors, Pairing, Work};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::ElementKind;

/// Launches of full size that may be waiting for the device.
const AHEAD: usize = 3;

/// In `Pass::first_query`: queries and base rows are different rows. No base row has this number or
/// a later one, so no query meets itself.
const NOT_A_SELF_JOIN: u64 = 1 << 32;

/// The neighbours found so far.
pub(in crate::device::cuda) struct Search {
    kernels: Arc<Kernels>,
    lists: Lists,
    /// Base rows offered so far, and whether each query was one of them.
    offered: u64,
    is_self_join: bool,
    account: Account,
    pace: Pace,
}

/// What a search took, as events until somebody asks.
#[derive(Default)]
struct Account {
    pairs: u64,
    transfers: Vec<Transfer>,
    computing: Vec<(CudaEvent, CudaEvent)>,
}

/// How far the host is ahead of the device.
#[derive(Default)]
struct Pace {
    operations: f64,
    ahead: VecDeque<CudaEvent>,
}

/// Bytes that a query's list takes on the device, with what it takes to bring it home.
pub(in crate::device::cuda) fn list_bytes(kind: ElementKind, k: usize) -> usize {
    let per_query = entry_bytes(kind) + real_bytes(kind) + 2 * size_of::<u32>();
    let brought_home = k * (real_bytes(kind) + size_of::<u32>());
    passes::slots(k) * entry_bytes(kind) + per_query + brought_home
}

impl Search {
    /// Empty lists.
    pub(in crate::device::cuda) fn new(
        gpu: &Gpu,
        memory: &Arc<Memory>,
        queries: &Panels,
        k: usize,
    ) -> Result<Self> {
        let kind = queries.kernels.spec().kind();
        let (rows, slots) = (queries.rows, passes::slots(k));
        let padded = rows.next_multiple_of(PANEL);
        let buffer = |count: usize, bytes: usize| memory.allocate(&gpu.compute, count * bytes);
        let mut lists = Lists {
            queries: rows,
            k,
            slots,
            entries: buffer(rows * slots, entry_bytes(kind))?,
            worst: buffer(padded, entry_bytes(kind))?,
            reach: buffer(padded, real_bytes(kind))?,
            counts: buffer(padded, 4)?,
            crowded: buffer(rows, 4)?,
            crowded_count: buffer(1, 4)?,
            redone: buffer(1, 8)?,
        };
        gpu.compute.memset_zeros(lists.redone.slice_mut()).map_err(failed("cuMemsetD8Async"))?;
        if rows > 0 {
            queries.kernels.clear_lists(&gpu.compute, &mut lists)?;
        }
        let kernels = queries.kernels.clone();
        let (account, pace) = (Account::default(), Pace::default());
        Ok(Self { kernels, lists, offered: 0, is_self_join: false, account, pace })
    }

    /// Merge base rows into the lists.
    pub(in crate::device::cuda) fn add(
        &mut self,
        gpu: &Gpu,
        queries: &Panels,
        base: &Panels,
        pairing: &Pairing<'_>,
        job: &Job,
    ) -> Result<()> {
        job.check()?;
        for side in [queries, base] {
            self.account.transfers.extend(side.take_transfer());
            gpu.compute.wait(&side.ready).map_err(failed("cuStreamWaitEvent"))?;
        }
        self.is_self_join |= pairing.first_query.is_some();
        if queries.rows > 0 && base.rows > 0 {
            let begin = gpu.timestamp()?;
            self.run_passes(gpu, queries, base, pairing, job)?;
            self.account.computing.push((begin, gpu.timestamp()?));
            self.account.pairs += queries.rows as u64 * base.rows as u64;
        }
        self.offered += base.rows as u64;
        Ok(())
    }

    fn run_passes(
        &mut self,
        gpu: &Gpu,
        queries: &Panels,
        base: &Panels,
        pairing: &Pairing<'_>,
        job: &Job,
    ) -> Result<()> {
        let mut pass = self.pass(base, pairing);
        for step in SearchPasses::new(base.rows, self.lists.k, self.offered as usize) {
            pass.start = step.visits.start as u32;
            pass.dense = if step.is_dense { (step.visits.len() * PANEL) as u32 } else { 0 };
            for visits in passes::launches(&step.visits, queries.rows, base.stored_dim) {
                job.check()?;
                (pass.begin, pass.end) = (visits.start as u32, visits.end as u32);
                let lists = &mut self.lists;
                self.kernels.scan(&gpu.compute, &queries.buffer, &base.buffer, lists, &pass)?;
                let work = passes::operations(visits.len(), queries.rows, base.stored_dim);
                self.pace.launched(gpu, work)?;
            }
            pass.begin = pass.start;
            let lists = &mut self.lists;
            self.kernels.merge(&gpu.compute, &queries.buffer, &base.buffer, lists, &pass)?;
        }
        Ok(())
    }

    /// What all passes of a call have in common.
    fn pass(&self, base: &Panels, pairing: &Pairing<'_>) -> launch::Pass {
        let panels = passes::panels(base.rows);
        launch::Pass {
            first_query: pairing.first_query.map_or(NOT_A_SELF_JOIN, u64::from),
            first_base: pairing.first_base,
            queries: self.lists.queries as u32,
            rows: base.rows as u32,
            dim: base.stored_dim as u32,
            panels: panels as u32,
            stride: passes::stride(panels) as u32,
            start: 0,
            begin: 0,
            end: 0,
            k: self.lists.k as u32,
            slots: self.lists.slots as u32,
            dense: 0,
        }
    }

    /// Bring the lists home.
    pub(in crate::device::cuda) fn finish(
        self,
        gpu: &Gpu,
        memory: &Arc<Memory>,
    ) -> Result<Neighbors> {
        let kind = self.kernels.spec().kind();
        let eligible = self.offered.saturating_sub(u64::from(self.is_self_join));
        let per_query = (self.lists.k as u64).min(eligible) as usize;
        let count = self.lists.queries * per_query;
        let mut rows = memory.allocate(&gpu.compute, count * size_of::<u32>())?;
        let mut distances = memory.allocate(&gpu.compute, count * real_bytes(kind))?;
        if count > 0 {
            let lists = &self.lists;
            self.kernels.gather(&gpu.compute, lists, per_query, &mut rows, &mut distances)?;
        }
        let home = failed("cuMemcpyDtoHAsync");
        let rows = sys::read::<u32>(&gpu.compute, rows.slice(), count).map_err(&home)?;
        let distances = match kind {
            ElementKind::F64 => {
                sys::read(&gpu.compute, distances.slice(), count).map(Distances::F64)
            }
            _ => sys::read(&gpu.compute, distances.slice(), count).map(Distances::F32),
        };
        let redone = sys::read::<u64>(&gpu.compute, self.lists.redone.slice(), 1).map_err(&home)?;
        let work = self.account.settle(redone[0])?;
        Ok(Neighbors { per_query, rows, distances: distances.map_err(&home)?, work })
    }
}

impl Account {
    fn settle(self, redone: u64) -> Result<Work> {
        let mut work = Work { pairs: self.pairs, redone, ..Work::default() };
        for transfer in &self.transfers {
            work.bytes_sent += transfer.bytes;
            work.transfer += transfer.time()?;
        }
        let times = self.computing.iter().map(|(begin, end)| elapsed(begin, end));
        work.kernel = times.sum::<Result<Duration>>()?;
        Ok(work)
    }
}

impl Pace {
    /// Account for a launch, and wait if too many full-sized ones are under way.
    fn launched(&mut self, gpu: &Gpu, operations: f64) -> Result<()> {
        self.operations += operations;
        if self.operations < passes::LAUNCH_OPERATIONS {
            return Ok(());
        }
        self.operations = 0.0;
        let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        self.ahead.push_back(gpu.compute.record_event(flags).map_err(failed("cuEventRecord"))?);
        if self.ahead.len() > AHEAD
            && let Some(oldest) = self.ahead.pop_front()
        {
            oldest.synchronize().map_err(failed("cuEventSynchronize"))?;
        }
        Ok(())
    }
}
