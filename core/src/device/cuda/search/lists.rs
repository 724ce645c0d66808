//! The top-k lists of a block of queries: their memory, the launches that merge base rows into
//! them, and the download to the host.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaEvent;

use super::Sides;
use super::exact::Exact;
use super::filter::{self, Filtering};
use super::launch::SearchKernels;
use super::launch_lists::{LEAST_MERGED, ListBuffers, Pass};
use super::passes::{self, PANEL, PassKind, SearchPasses};
use super::rows::{RowPanels, wait_for};
use super::spec::{entry_bytes, real_bytes};
use crate::device::contract::{Distances, Enough, Neighbors, Outcome, Pairing, QueryRows, Work};
use crate::device::cuda::device::{CudaDevice, PairStrategy};
use crate::device::cuda::driver::copiers::ReservedTail;
use crate::device::cuda::driver::download::Append;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{Counted, LaunchThrottle};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::{self, failed};
use crate::device::cuda::driver::upload::{Transfer, elapsed};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::ElementKind;

/// The speed of a scan relative to searching again for single queries.
const SEARCH_AGAIN_PENALTY: f64 = 16.0;

/// The same if few queries are searched again, as a filter with more overflowed queries is given up.
const FEW_AGAIN: f64 = 2.0;

/// In `Pass::first_query`: queries and base rows are different rows. No base row has this number or
/// a later one, so no query is compared with itself.
const NOT_A_SELF_JOIN: u64 = 1 << 32;

/// The neighbours found so far.
pub(super) struct Search {
    kernels: Arc<SearchKernels>,
    lists: ListBuffers,
    /// Base rows offered so far, and whether queries are base rows.
    offered: u64,
    is_self_join: bool,
    /// The state for lists by the definition, if these are wanted.
    pub(super) exact: Option<Exact>,
    /// The step from sums to distances, if these are wanted and the sums are exact.
    pub(super) outcome: Option<Outcome>,
    account: Account,
    throttle: LaunchThrottle,
}

/// The work of a search; times are kept as events until they are asked for.
#[derive(Default)]
struct Account {
    pairs: u64,
    transfers: Vec<Transfer>,
    computing: Vec<(CudaEvent, CudaEvent)>,
}

/// Bytes of a query's list on the device, with the memory needed to download it.
pub(super) fn list_bytes(kind: ElementKind, k: usize) -> usize {
    let per_query = entry_bytes(kind) + real_bytes(kind) + 2 * size_of::<u32>();
    // By the definition, distances are float64, and each list has a lower bound on sums.
    let brought_home = k * (size_of::<f64>() + size_of::<u32>()) + size_of::<f32>();
    passes::slots(k) * entry_bytes(kind) + per_query + brought_home
}

impl Search {
    /// Empty lists.
    pub(super) fn new(
        CudaDevice { gpu, memory, .. }: &CudaDevice,
        kernels: Arc<SearchKernels>,
        rows: usize,
        k: usize,
    ) -> Result<Self> {
        let (kind, slots) = (kernels.spec.kind, passes::slots(k));
        let padded = rows.next_multiple_of(PANEL);
        let buffer = |count: usize, bytes: usize| memory.allocate(&gpu.compute, count * bytes);
        let mut lists = ListBuffers {
            queries: rows,
            k,
            slots,
            entries: buffer(rows * slots, entry_bytes(kind))?,
            worst: buffer(padded, entry_bytes(kind))?,
            thresholds: buffer(padded, real_bytes(kind))?,
            counts: buffer(padded, 4)?,
            overflowed: buffer(rows, 4)?,
            overflowed_count: buffer(1, 4)?,
            redone: buffer(1, 8)?,
        };
        gpu.compute.memset_zeros(lists.redone.slice_mut()).map_err(failed("cuMemsetD8Async"))?;
        if rows > 0 {
            kernels.clear_lists(&gpu.compute, &mut lists)?;
        }
        let (account, throttle) = (Account::default(), LaunchThrottle::default());
        let (is_self_join, exact, outcome) = (false, None, None);
        Ok(Self { kernels, lists, offered: 0, is_self_join, exact, outcome, account, throttle })
    }

    /// The kind of the distances.
    pub(super) fn kind(&self) -> ElementKind {
        let is_exact = self.exact.is_some() || self.outcome.is_some();
        if is_exact { ElementKind::F64 } else { self.kernels.spec.kind }
    }

    /// Merges base rows into the lists.
    pub(super) fn add(
        &mut self,
        device: &CudaDevice,
        sides: Sides<&RowPanels>,
        pairing: &Pairing<'_>,
        job: &Job,
    ) -> Result<()> {
        job.check()?;
        let (gpu, Sides { queries, base }) = (&device.gpu, sides);
        for side in [queries, base] {
            self.account.transfers.extend(side.take_transfer());
            wait_for(gpu, &side.ready)?;
        }
        assert!(self.exact.is_none() || self.offered == 0 && pairing.first_base == 0);
        self.is_self_join |= pairing.queries != QueryRows::Separate;
        if queries.rows > 0 && base.rows > 0 {
            let begin = gpu.timestamp()?;
            self.run_passes(device, sides, pairing, job)?;
            self.account.computing.push((begin, gpu.timestamp()?));
            self.account.pairs += queries.rows as u64 * base.rows as u64;
        }
        self.offered += base.rows as u64;
        Ok(())
    }

    fn run_passes(
        &mut self,
        device: &CudaDevice,
        sides: Sides<&RowPanels>,
        pairing: &Pairing<'_>,
        job: &Job,
    ) -> Result<()> {
        let (gpu, base) = (&device.gpu, sides.base);
        let mut pass = self.pass(base, pairing);
        let filtering = self.filtering(device, sides)?;
        let tiles = filtering.as_ref().map(|filtering| filtering.tiles(base.stored_dim));
        let passes = SearchPasses::new(base.rows, self.lists.k, self.offered as usize);
        let passes = passes.filtered(tiles);
        let may_end_short = passes.may_end_short();
        let mut have = None;
        for step in passes {
            let (start, end) = (step.visits.start as u32, step.visits.end as u32);
            (pass.start, pass.begin, pass.end, pass.k) = (start, start, end, step.k as u32);
            let is_dense = step.kind == PassKind::Dense;
            pass.dense = if is_dense { (step.visits.len() * PANEL) as u32 } else { 0 };
            if step.kind == PassKind::Bounding {
                self.bound(device, sides.buffers(), &pass)?;
                continue;
            }
            if let Some(have) = have.replace(step.k).filter(|have| *have < step.k) {
                self.kernels.lengthen_lists(&gpu.compute, &mut self.lists, have..step.k)?;
            }
            // After a filtered pass, a scan runs only if the filter was given up.
            let filtering = filtering.as_ref().filter(|_| step.kind == PassKind::Filtered);
            if let Some(filtering) = filtering {
                let (lists, throttle) = (&mut self.lists, &mut self.throttle);
                filtering.run(gpu, lists, &pass, &step.visits, throttle, job)?;
            }
            let flag = filtering.map(Filtering::given_up);
            self.scan(gpu, sides, &mut pass, &step.visits, flag, job)?;
            self.merge(gpu, &pass, flag, job)?;
            if !is_dense {
                let penalty = if filtering.is_some() { FEW_AGAIN } else { SEARCH_AGAIN_PENALTY };
                self.search_again(gpu, sides, &mut pass, &step.visits, penalty, job)?;
            }
        }
        if may_end_short {
            self.kernels.find_short(&gpu.compute, &mut self.lists, &pass)?;
            pass.start = 0;
            let all = 0..pass.panels as usize;
            self.search_again(gpu, sides, &mut pass, &all, FEW_AGAIN, job)?;
        }
        Ok(())
    }

    /// Sets the thresholds of empty lists, from a few panels.
    fn bound(&mut self, device: &CudaDevice, sides: Sides<&Buffer>, pass: &Pass) -> Result<()> {
        let (compute, lists) = (&device.gpu.compute, &mut self.lists);
        let splits = self.kernels.bounding_splits(lists, (pass.end - pass.begin) as usize);
        let bytes = lists.queries * splits * 32 * real_bytes(self.kernels.spec.kind);
        let mut least = device.memory.allocate(compute, bytes)?;
        self.kernels.bound_lists(compute, sides, lists, &mut least, pass)
    }

    /// Compares all queries with the panels of some visits; skipped if `flag` is given and its
    /// word on the device is 0.
    fn scan(
        &mut self,
        gpu: &Gpu,
        sides: Sides<&RowPanels>,
        pass: &mut Pass,
        visits: &Range<usize>,
        flag: Option<&Buffer>,
        job: &Job,
    ) -> Result<()> {
        let (rate, buffers) = (self.kernels.scan_rate.clone(), sides.buffers());
        let (queries, dim) = (sides.queries.rows, sides.base.stored_dim);
        for visits in passes::launches(visits, queries, dim, rate.of_a_launch()) {
            job.check()?;
            (pass.begin, pass.end) = (visits.start as u32, visits.end as u32);
            self.kernels.scan(&gpu.compute, buffers, &mut self.lists, pass, flag)?;
            let work = passes::operations(visits.len(), queries, dim);
            self.throttle.launched(&gpu.compute, &rate, work, Counted::of_all(flag.is_none()))?;
        }
        Ok(())
    }

    /// Compares overflowed queries with the panels of some visits, `penalty` times slower than a scan
    /// if their number reaches the expected maximum.
    fn search_again(
        &mut self,
        gpu: &Gpu,
        sides: Sides<&RowPanels>,
        pass: &mut Pass,
        visits: &Range<usize>,
        penalty: f64,
        job: &Job,
    ) -> Result<()> {
        let (rate, buffers) = (self.kernels.scan_rate.clone(), sides.buffers());
        let (queries, dim) = (sides.queries.rows, sides.base.stored_dim);
        for visits in passes::launches(visits, queries, dim, rate.of_a_launch() / penalty) {
            job.check()?;
            (pass.begin, pass.end) = (visits.start as u32, visits.end as u32);
            self.kernels.search_again(&gpu.compute, buffers, &mut self.lists, pass)?;
            let work = passes::operations(visits.len(), queries, dim);
            self.throttle.launched(&gpu.compute, &rate, work * penalty, Counted::Guessed)?;
        }
        Ok(())
    }

    /// The filter for these rows, if it pays.
    fn filtering(
        &self,
        device: &CudaDevice,
        Sides { queries, base }: Sides<&RowPanels>,
    ) -> Result<Option<Filtering>> {
        let (spec, shared) = (&self.kernels.spec, self.kernels.shared_limit);
        let sizes = Sides { queries: queries.rows, base: base.rows };
        let always = !matches!(device.pair_strategy, PairStrategy::Best);
        let Some(by) = device.tensor_cores(spec.kind) else { return Ok(None) };
        if !filter::pays(spec, self.lists.k, shared, sizes, always) {
            return Ok(None);
        }
        let Some(packed) = base.packed(device, by)? else { return Ok(None) };
        match Filtering::new(device, packed, queries.rows(), &self.lists) {
            Err(Error::DeviceMemory { .. }) => Ok(None),
            filtering => filtering.map(Some),
        }
    }

    /// Merges a pass's candidates into the lists.
    fn merge(&mut self, gpu: &Gpu, pass: &Pass, flag: Option<&Buffer>, job: &Job) -> Result<()> {
        // The number of steps of the sorting network.
        let steps = (self.lists.slots.ilog2() * (self.lists.slots.ilog2() + 1) / 2) as f64;
        let per_query = self.lists.slots as f64 * steps;
        let rate = self.kernels.merge_rate(&self.lists).clone();
        let together = ((rate.of_a_launch() / per_query) as usize).max(LEAST_MERGED);
        for first in (0..self.lists.queries).step_by(together) {
            job.check()?;
            let count = together.min(self.lists.queries - first);
            let queries = first..first + count;
            self.kernels.merge(&gpu.compute, &mut self.lists, pass, queries, flag)?;
            let work = count as f64 * per_query;
            self.throttle.launched(&gpu.compute, &rate, work, Counted::of_all(flag.is_none()))?;
        }
        Ok(())
    }

    /// The parameters shared by all passes of a call. Only lists by the definition need not keep
    /// every neighbour: their bound on sums says up to which distance they are complete.
    fn pass(&self, base: &RowPanels, pairing: &Pairing<'_>) -> Pass {
        let panels = passes::panels(base.rows);
        let enough = pairing.enough.filter(|_| self.exact.is_some());
        let limits = enough.map_or([0.0; 3], Enough::limits::<f32>);
        Pass {
            first_query: match pairing.queries {
                QueryRows::Separate => NOT_A_SELF_JOIN,
                QueryRows::OfBase { first } => u64::from(first),
            },
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
            enough: enough.map_or(0, |enough| enough.k as u32),
            root: limits[0],
            factor: limits[1],
            absolute: limits[2],
        }
    }

    /// Downloads the lists, and appends them to `to`.
    pub(super) fn finish(
        mut self,
        device: &CudaDevice,
        to: &mut Neighbors,
        job: &Job,
    ) -> Result<()> {
        let CudaDevice { gpu, memory, .. } = device;
        let kind = self.kernels.spec.kind;
        let eligible = self.offered.saturating_sub(u64::from(self.is_self_join));
        let per_query = (self.lists.k as u64).min(eligible) as usize;
        if let Some(exact) = self.exact.take() {
            return self.finish_exactly(device, exact, per_query, to, job);
        }
        assert!(to.rows.is_empty() || to.per_query == per_query);
        let count = self.lists.queries * per_query;
        let mut rows = memory.allocate(&gpu.compute, count * size_of::<u32>())?;
        let mut distances = memory.allocate(&gpu.compute, count * real_bytes(kind))?;
        if count > 0 {
            let lists = &self.lists;
            self.kernels.gather(&gpu.compute, lists, per_query, &mut rows, &mut distances)?;
        }
        let redone = self.redone(gpu)?;
        let work = self.account.settle(redone)?;
        let from = distances.slice();
        let rows = Append { from: rows.slice(), to: ReservedTail::new(&mut to.rows, count) };
        let (stream, downloader) = (&gpu.compute, &gpu.downloader);
        match (&mut to.distances, self.outcome) {
            (Distances::F64(to), Some(outcome)) => {
                let to = ReservedTail::of_sums(to, count, outcome);
                downloader.append_both(stream, rows, Append { from, to }, job)?;
            }
            (Distances::F64(to), None) => {
                let to = ReservedTail::new(to, count);
                downloader.append_both(stream, rows, Append { from, to }, job)?;
            }
            (Distances::F32(to), _) => {
                let to = ReservedTail::new(to, count);
                downloader.append_both(stream, rows, Append { from, to }, job)?;
            }
        }
        if self.outcome.is_some() {
            // No unlisted row matters.
            to.last.resize(to.last.len() + self.lists.queries, f32::NAN);
        }
        to.per_query = per_query;
        to.work += work;
        Ok(())
    }

    /// The same for lists by the definition.
    fn finish_exactly(
        mut self,
        device: &CudaDevice,
        mut exact: Exact,
        per_query: usize,
        to: &mut Neighbors,
        job: &Job,
    ) -> Result<()> {
        let (gpu, queries) = (&device.gpu, self.lists.queries);
        assert!(self.offered == exact.base_rows() as u64);
        let begin = gpu.timestamp()?;
        if queries * per_query > 0 {
            let (lists, throttle) = (&mut self.lists, &mut self.throttle);
            exact.rank(device, &self.kernels, lists, per_query, throttle, job)?;
        }
        self.account.computing.push((begin, gpu.timestamp()?));
        self.account.transfers.extend(exact.take_transfers());
        let redone = self.redone(gpu)?;
        let mut work = self.account.settle(redone)?;
        work.rechecked += (queries * per_query) as u64;
        exact.download(gpu, to, per_query, job)?;
        to.work += work;
        Ok(())
    }

    /// The number of queries that were searched again.
    fn redone(&self, gpu: &Gpu) -> Result<u64> {
        let redone = sys::read::<u64>(&gpu.compute, self.lists.redone.slice(), 1);
        Ok(redone.map_err(failed("cuMemcpyDtoHAsync"))?[0])
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
