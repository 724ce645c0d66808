//! Top-k lists by the definition: exact distances of the listed rows, computed on the device from
//! the vectors as given.
//!
//! Panels hold these vectors, unless directions are compared and vectors are not of length 1: then
//! the vectors are sent as well. In panels, every element of a row is in a different sector of
//! memory, so for many pairs a base is copied to row-major order, if there is memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Sides;
use super::exact_values::ExactValues;
use super::launch::SearchKernels;
use super::launch_exact::{DIRECTION_BYTES, ExactSide, Laid, Measured, Ranked};
use super::launch_lists::{LEAST_MERGED, ListBuffers};
use super::passes;
use super::rows::{CudaRows, Layouts, Plain, RowPanels, get_or_make, wait_for};
use crate::device::contract::{Definition, Distances, Neighbors};
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::copiers::ReservedTail;
use crate::device::cuda::driver::download::DownloadPart;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{Counted, LaunchThrottle};
use crate::device::cuda::driver::upload::Transfer;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::metric::Sum;
use crate::parallel::lock;

/// Pairs per row above which rows are copied to row-major order, which takes memory and time.
/// (Whole statements of 0.13M pairs of 0.5M × 384 on an H200 took 1.12 times as long as before with
/// a copy, and 1.05 times without.)
const PAIRS_FOR_A_ROW: usize = 2;

/// With at most this many rows per pair, a base is copied the second time that lists are ranked by
/// it, as further searches are likely to follow. (The kernels of 0.13M pairs of 300k × 384 took
/// 6.2 ms without a copy, and then 5.0; of 13,000 pairs of 200k × 960 1.8 and 1.6: H200,
/// 2026-11-30.)
const ROWS_FOR_A_PAIR: usize = 64;

/// That copy takes at most one byte of this many that are free.
const FREE_FOR_A_BYTE: u64 = 4;

/// The most pairs of a launch.
const MOST_PAIRS: usize = 1 << 30;

impl CudaRows {
    /// Values that the definition reads besides panels, if there are any, and the position of these
    /// rows there.
    fn given(&self, device: &CudaDevice, job: &Job) -> Result<Option<(Arc<ExactValues>, usize)>> {
        let Some(directions) = self.rows.directions() else { return Ok(None) };
        if let Some((whole, first)) = &self.whole {
            let of_whole = lock(&whole.given).clone();
            if let Some(given) = of_whole {
                return Ok(Some((given, *first)));
            }
        }
        let make = || ExactValues::of(device, &self.rows, directions, job);
        Ok(Some((get_or_make(&self.layouts.given, make)?, 0)))
    }
}

/// The rows of one side of a search, as the definition reads them.
struct ExactRows {
    rows: usize,
    dim: usize,
    /// The panels with these rows, their layout, and the position of the first row.
    panels: Arc<RowPanels>,
    laid: Laid,
    first: usize,
    /// All layouts of the rows in these panels.
    layouts: Arc<Layouts>,
    given: Option<(Arc<ExactValues>, usize)>,
}

impl ExactRows {
    fn of_base(base: &CudaRows, device: &CudaDevice, job: &Job) -> Result<Self> {
        let panels = base.base(device, job)?;
        Self::new(base, panels, base.layouts.clone(), 0, device, job)
    }

    /// The rows of queries. Queries that are base rows share the base's layouts.
    fn of_queries(queries: &CudaRows, device: &CudaDevice, job: &Job) -> Result<Self> {
        if let Some((whole, first)) = &queries.whole {
            let base = lock(&whole.base).clone();
            if let Some(panels) = base {
                return Self::new(queries, panels, whole.clone(), *first, device, job);
            }
        }
        let panels = queries.queries(device, job)?;
        let of_base = Self::new(queries, panels, queries.layouts.clone(), 0, device, job)?;
        let negated = queries.metric.sum() == Sum::Products;
        Ok(Self { laid: Laid::InOrder { negated }, ..of_base })
    }

    /// The rows from `first` on in the panels of a base.
    fn new(
        rows: &CudaRows,
        panels: Arc<RowPanels>,
        layouts: Arc<Layouts>,
        first: usize,
        device: &CudaDevice,
        job: &Job,
    ) -> Result<Self> {
        let laid = Laid::Dealt { panels: passes::panels(panels.rows) };
        let (count, dim) = (rows.rows.len(), rows.rows.matrix().dim());
        let given = rows.given(device, job)?;
        Ok(Self { rows: count, dim, panels, laid, first, layouts, given })
    }

    /// The rows in row-major order, if that copy exists or pays for `pairs` pairs.
    fn plain(
        &self,
        CudaDevice { gpu, memory, .. }: &CudaDevice,
        kernels: &SearchKernels,
        pairs: usize,
    ) -> Result<Option<Arc<Plain>>> {
        if self.given.as_ref().is_some_and(|(given, _)| given.has_vectors) {
            return Ok(None);
        }
        let plain = lock(&self.layouts.plain).clone();
        if plain.is_some() || !matches!(self.laid, Laid::Dealt { .. }) {
            return Ok(plain);
        }
        let (rows, bytes) = (self.panels.rows, self.panels.rows * self.dim * size_of::<f32>());
        let is_again = self.layouts.was_ranked.swap(true, Ordering::Relaxed)
            && pairs.saturating_mul(ROWS_FOR_A_PAIR) > rows
            && bytes as u64 <= memory.unused() / FREE_FOR_A_BYTE;
        if !is_again && pairs / PAIRS_FOR_A_ROW <= rows {
            return Ok(None);
        }
        let made = get_or_make(&self.layouts.plain, || {
            let mut buffer = memory.allocate(&gpu.compute, bytes)?;
            kernels.unpack(&gpu.compute, self.panels.rows(), self.dim, &mut buffer)?;
            Ok(Plain { buffer, ready: gpu.timestamp()? })
        });
        match made {
            Err(Error::DeviceMemory { .. }) => Ok(None),
            made => made.map(Some),
        }
    }

    /// The layout in which the definition reads the rows.
    fn side<'a>(&'a self, plain: Option<&'a Plain>) -> ExactSide<'a> {
        let given = self.given.as_ref().map(|(given, first)| (given, *first));
        let (values, dim, laid, first) = match (given, plain) {
            (Some((given, first)), _) if given.has_vectors => {
                let vectors = (&given.buffer, given.rows * DIRECTION_BYTES);
                (vectors, self.dim, Laid::Plain, first)
            }
            (_, Some(plain)) => ((&plain.buffer, 0), self.dim, Laid::Plain, self.first),
            _ => ((&self.panels.buffer, 0), self.panels.stored_dim, self.laid, self.first),
        };
        let directions = given.map(|(given, first)| (&given.buffer, first * DIRECTION_BYTES));
        ExactSide { values, dim, laid, first, rows: self.rows, directions }
    }

    /// Makes the compute stream wait for all layouts.
    fn wait(&self, gpu: &Gpu, plain: Option<&Plain>) -> Result<()> {
        wait_for(gpu, &self.panels.ready)?;
        if let Some((given, _)) = &self.given {
            wait_for(gpu, &given.ready)?;
        }
        plain.map_or(Ok(()), |plain| wait_for(gpu, &plain.ready))
    }
}

/// The part of a search that ranks its lists by the definition.
pub(super) struct Exact {
    definition: Definition,
    queries: ExactRows,
    base: ExactRows,
    ranked: Ranked,
}

impl Exact {
    /// Allocates all buffers except the optional copy to row-major order.
    pub(super) fn new(
        device: &CudaDevice,
        Sides { queries, base }: Sides<&CudaRows>,
        definition: Definition,
        job: &Job,
    ) -> Result<Self> {
        let room = |count: usize, bytes: usize| {
            device.memory.allocate(&device.gpu.compute, count.saturating_mul(bytes))
        };
        let (count, of_base) = (queries.rows.len(), base.rows.len());
        let ranked = count.saturating_mul(definition.k.min(of_base));
        // Before the base is sent, which would be useless without these.
        let ranked = Ranked {
            rows: room(ranked, size_of::<u32>())?,
            distances: room(ranked, size_of::<f64>())?,
            last: room(count, size_of::<f32>())?,
        };
        let base = ExactRows::of_base(base, device, job)?;
        let queries = ExactRows::of_queries(queries, device, job)?;
        Ok(Self { definition, queries, base, ranked })
    }

    /// The number of base rows.
    pub(super) fn base_rows(&self) -> usize {
        self.base.rows
    }

    /// The transfers for the definition's values.
    pub(super) fn take_transfers(&self) -> impl Iterator<Item = Transfer> {
        let given = [&self.queries, &self.base].map(|rows| rows.given.as_ref());
        given.into_iter().flatten().filter_map(|(given, _)| given.take_transfer())
    }

    /// Computes the distances of lists with `per_list` rows each, and sorts the lists by them.
    pub(super) fn rank(
        &mut self,
        device: &CudaDevice,
        kernels: &SearchKernels,
        lists: &mut ListBuffers,
        per_list: usize,
        throttle: &mut LaunchThrottle,
        job: &Job,
    ) -> Result<()> {
        let (gpu, queries) = (&device.gpu, lists.queries);
        let (dim, keep) = (self.base.dim, self.definition.k.min(per_list));
        let measured = Measured { dim, per_list, keep, metric: self.definition.metric };
        let pairs = queries * per_list;
        let of_base = self.base.plain(device, kernels, pairs)?;
        let of_queries = self.queries.plain(device, kernels, 0)?;
        self.base.wait(gpu, of_base.as_deref())?;
        self.queries.wait(gpu, of_queries.as_deref())?;
        let of_queries = self.queries.side(of_queries.as_deref());
        let of_base = self.base.side(of_base.as_deref());
        let sides = Sides { queries: &of_queries, base: &of_base };
        let (rate, of_a_pair) = (&kernels.exact_rate, (dim + 2) as f64);
        let together = ((rate.of_a_launch() / of_a_pair) as usize).clamp(1024, MOST_PAIRS);
        for first in (0..pairs).step_by(together) {
            job.check()?;
            let some = first..pairs.min(first + together);
            let work = some.len() as f64 * of_a_pair;
            kernels.measure_lists(&gpu.compute, sides, lists, some, &measured)?;
            throttle.launched(&gpu.compute, rate, work, Counted::Exactly)?;
        }
        let room = SearchKernels::room_to_rank(per_list);
        let of_a_list = (room as u32 * room.ilog2() * (room.ilog2() + 1) / 2) as f64;
        let rate = kernels.merge_rate(lists);
        let together = ((rate.of_a_launch() / of_a_list) as usize).max(LEAST_MERGED);
        for first in (0..queries).step_by(together) {
            job.check()?;
            let some = first..queries.min(first + together);
            let work = some.len() as f64 * of_a_list;
            kernels.rank_lists(&gpu.compute, lists, some, &measured, &mut self.ranked)?;
            throttle.launched(&gpu.compute, rate, work, Counted::Guessed)?;
        }
        Ok(())
    }

    /// Downloads ranked lists that had `per_list` rows each, and appends them to `to`.
    pub(super) fn download(
        &self,
        gpu: &Gpu,
        to: &mut Neighbors,
        per_list: usize,
        job: &Job,
    ) -> Result<()> {
        let keep = self.definition.k.min(per_list);
        assert!(to.rows.is_empty() || to.per_query == keep);
        let (stream, queries, ranked) = (&gpu.compute, self.queries.rows, &self.ranked);
        let Distances::F64(distances) = &mut to.distances else {
            unreachable!("distances by the definition are float64")
        };
        let mut rows = ReservedTail::new(&mut to.rows, queries * keep);
        let mut distances = ReservedTail::new(distances, queries * keep);
        let mut last = ReservedTail::new(&mut to.last, queries);
        let parts = &mut [
            DownloadPart { from: ranked.rows.slice(), to: &mut rows },
            DownloadPart { from: ranked.distances.slice(), to: &mut distances },
            DownloadPart { from: ranked.last.slice(), to: &mut last },
        ];
        gpu.downloader.fill(stream, parts, job)?;
        rows.close();
        distances.close();
        last.close();
        to.per_query = keep;
        Ok(())
    }
}
