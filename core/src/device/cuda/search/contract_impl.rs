//! The search contract of a GPU.

use std::ops::Range;

use super::Sides;
use super::exact::Exact;
use super::filter::{self, bytes_per_query, bytes_per_row};
use super::launch::SearchKernels;
use super::launch_pairs::Pairs;
use super::lists::{Search, list_bytes};
use super::passes::PANEL;
use super::rows::CudaRows;
use super::spec::{SearchSpec, device_dim, real_bytes, scalar_bytes};
use crate::device::contract::{
    Candidates, Capacity, Definition, Distances, Neighbors, Outcome, Pairing, RowUse, SearchDevice,
    Shape,
};
use crate::device::cuda::device::{CudaDevice, TensorCores};
use crate::device::cuda::driver::launch::{Counted, LaunchThrottle};
use crate::device::cuda::driver::sys;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::ElementKind;
use crate::memory::room;
use crate::metric::Metric;
use crate::rows::Rows;

/// Pairs of a launch that computes distances of chosen pairs.
const PAIRS_TOGETHER: usize = 1 << 24;

/// Queries that keep every GPU busy. With fewer, each block takes half a millisecond beside its
/// comparisons.
const MOST_QUERIES: usize = 524_288;

/// Neighbours for which memory is reserved before the device has found them.
pub(super) const MOST_ROOM: usize = 1 << 28;

/// The maximum k: lists are sorted with 32-bit positions in their [slots](super::passes::slots).
const MOST_NEIGHBORS: usize = 1 << 28;

/// The top-k lists of a search, on a GPU.
pub struct CudaLists(Search);

impl SearchDevice for CudaDevice {
    type Rows = CudaRows;
    type Lists = CudaLists;

    /// Two chunks of base rows, so that one can arrive while the other is searched, and two blocks
    /// of queries with their lists, in at most a quarter of the memory. A base that fits as a whole
    /// uses the second chunk's memory for its vectors as given.
    fn capacity(&self, shape: &Shape) -> Capacity {
        capacity(self.memory.available() as usize, shape, self.tensor_cores(shape.kind))
    }

    fn rows(&self, rows: &Rows, metric: Metric) -> CudaRows {
        CudaRows::new(rows, metric)
    }

    fn slice(&self, rows: &CudaRows, range: Range<usize>) -> CudaRows {
        rows.slice(range)
    }

    fn warm_search(&self, metric: Metric, shape: &Shape, queries: usize) {
        let spec = SearchSpec::of_rows(shape.kind, metric, shape.dim);
        std::thread::scope(|scope| {
            scope.spawn(|| SearchKernels::get(&self.gpu, spec));
            filter::warm(self, spec, shape, queries);
        });
    }

    fn prepare(&self, rows: &CudaRows, for_use: RowUse, job: &Job) -> Result<()> {
        match for_use {
            RowUse::Base { .. } => rows.base(self, job).map(drop),
            RowUse::Queries => rows.queries(self, job).map(drop),
            RowUse::Gather => rows.plain(self, job).map(drop),
        }
    }

    fn new_lists(&self, queries: &CudaRows, k: usize) -> Result<CudaLists> {
        if k == 0 || k > MOST_NEIGHBORS {
            return Err(Error::InvalidArgument(format!(
                "k must be 1…{MOST_NEIGHBORS} on {}, not {k}",
                self.gpu.info.name
            )));
        }
        let kernels = queries.kernels(&self.gpu)?;
        Search::new(self, kernels, queries.rows.len(), k).map(CudaLists)
    }

    fn new_exact_lists(
        &self,
        queries: &CudaRows,
        base: &CudaRows,
        k: usize,
        definition: Definition,
        job: &Job,
    ) -> Result<Option<CudaLists>> {
        let is_of_f32 = base.rows.matrix().kind() == ElementKind::F32;
        if !is_of_f32 || definition.metric.searched(ElementKind::F32) != base.metric {
            return Ok(None);
        }
        if !definition.are_sums_exact && !base.kernels(&self.gpu)?.can_rank(k) {
            return Ok(None);
        }
        let mut lists = self.new_lists(queries, k)?;
        if definition.are_sums_exact {
            lists.0.outcome = Some(Outcome::of(definition.metric));
            return Ok(Some(lists));
        }
        lists.0.exact = Some(Exact::new(self, Sides { queries, base }, definition, job)?);
        Ok(Some(lists))
    }

    fn forget_exact(&self, base: &CudaRows) {
        base.layouts.forget_exact();
    }

    fn top_k(
        &self,
        queries: &CudaRows,
        base: &CudaRows,
        pairing: &Pairing<'_>,
        lists: &mut CudaLists,
        job: &Job,
    ) -> Result<()> {
        let (queries, base) = (queries.queries(self, job)?, base.base(self, job)?);
        lists.0.add(self, Sides { queries: &queries, base: &base }, pairing, job)
    }

    fn download(&self, lists: CudaLists, job: &Job) -> Result<Neighbors> {
        let mut neighbors = Neighbors::none(lists.0.kind());
        self.download_after(&mut neighbors, lists, job)?;
        Ok(neighbors)
    }

    fn download_after(&self, before: &mut Neighbors, lists: CudaLists, job: &Job) -> Result<()> {
        lists.0.finish(self, before, job)
    }

    fn preallocate(&self, kind: ElementKind, neighbors: usize) -> Neighbors {
        let mut none = Neighbors::none(kind);
        if neighbors > MOST_ROOM {
            return none;
        }
        none.rows = room(neighbors);
        match &mut none.distances {
            Distances::F32(distances) => *distances = room(neighbors),
            Distances::F64(distances) => *distances = room(neighbors),
        }
        none
    }

    fn distances_of(
        &self,
        queries: &CudaRows,
        base: &CudaRows,
        candidates: &Candidates<'_>,
        job: &Job,
    ) -> Result<Distances> {
        candidates.check(queries.rows.len(), base.rows.len())?;
        match base.rows.matrix().kind() {
            ElementKind::F64 => self.distances(queries, base, candidates, job).map(Distances::F64),
            _ => self.distances(queries, base, candidates, job).map(Distances::F32),
        }
    }
}

impl CudaDevice {
    /// See [`SearchDevice::distances_of`].
    fn distances<T: cudarc::driver::DeviceRepr + Clone + Default>(
        &self,
        queries: &CudaRows,
        base: &CudaRows,
        candidates: &Candidates<'_>,
        job: &Job,
    ) -> Result<Vec<T>> {
        if candidates.is_empty() {
            return Ok(vec![]);
        }
        let Self { gpu, memory, .. } = self;
        let (matrix, kind) = (base.rows.matrix(), base.rows.matrix().kind());
        let kernels = base.kernels(gpu)?;
        let sides = Sides { queries, base }.plain(self, job)?;
        let sides = Sides { queries: &sides.queries.buffer, base: &sides.base.buffer };
        let starts: Vec<u64> = candidates.starts().iter().map(|start| *start as u64).collect();
        let together = PAIRS_TOGETHER.min(candidates.len());
        let mut pairs = Pairs {
            queries: queries.rows.len(),
            base_rows: base.rows.len(),
            dim: device_dim(kind, matrix.dim()),
            starts: memory.allocate(&gpu.compute, starts.len() * 8)?,
            first: 0,
            count: 0,
            rows: memory.allocate(&gpu.compute, together * 4)?,
            distances: memory.allocate(&gpu.compute, together * real_bytes(kind))?,
        };
        sys::write(&gpu.compute, pairs.starts.slice_mut(), &starts)?;
        let mut throttle = LaunchThrottle::default();
        let (rate, of_a_pair) = (&kernels.distances_rate, (pairs.dim + 2) as f64);
        let mut distances = Vec::with_capacity(candidates.len());
        while distances.len() < candidates.len() {
            job.check()?;
            let most = ((rate.of_a_launch() / of_a_pair) as usize).max(1024).min(together);
            let rows = &candidates.rows()[distances.len()..];
            let rows = &rows[..most.min(rows.len())];
            (pairs.first, pairs.count) = (distances.len(), rows.len());
            sys::write(&gpu.compute, pairs.rows.slice_mut(), rows)?;
            throttle.begin(&gpu.compute)?;
            kernels.distances_of(&gpu.compute, sides, &mut pairs)?;
            let work = rows.len() as f64 * of_a_pair;
            throttle.launched(&gpu.compute, rate, work, Counted::Exactly)?;
            distances.extend(self.read::<T>(&pairs.distances, rows.len(), job)?);
        }
        Ok(distances)
    }
}

fn capacity(limit: usize, shape: &Shape, by: Option<TensorCores>) -> Capacity {
    let dim = device_dim(shape.kind, shape.dim);
    // Any metric, as the stored dimension is the same for all.
    let stored =
        SearchSpec::new(shape.kind, any_metric(shape.kind), dim as u32).stored_dim(dim as u32);
    let stored = stored as usize;
    let panel = stored * scalar_bytes(shape.kind);
    let (of_row, of_query) = by.map_or((0, 0), |by| {
        (bytes_per_row(shape.kind, stored, by), bytes_per_query(shape.kind, stored, by))
    });
    let (row, query) = (panel + of_row, panel + of_query + list_bytes(shape.kind, shape.k));
    let whole_panels = |rows: usize| (rows / PANEL).max(1) * PANEL;
    let queries = whole_panels((limit / 8 / query).min(MOST_QUERIES));
    let base = whole_panels(limit.saturating_sub(2 * queries * query) / 2 / row);
    Capacity { base: base.min(u32::MAX as usize / PANEL * PANEL), queries }
}

fn any_metric(kind: ElementKind) -> Metric {
    if kind == ElementKind::Bits { Metric::Hamming } else { Metric::L2 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(kind: ElementKind, dim: usize, k: usize) -> Shape {
        Shape { kind, dim, k, base: 1000 }
    }

    #[test]
    fn both_sides_fit_twice() {
        let limit = 8 << 30;
        for kind in [ElementKind::F32, ElementKind::F64, ElementKind::Bits] {
            for dim in [1, 33, 128, 4096] {
                let by =
                    [TensorCores::Warpgroups, TensorCores::Warps { shared: 99 << 10 }].map(Some);
                for (k, by) in [(1, None), (10, None), (10, by[0]), (1024, by[1])] {
                    let capacity = capacity(limit, &shape(kind, dim, k), by);
                    let words = device_dim(kind, dim);
                    let row = words * scalar_bytes(kind);
                    let (of_row, of_query) = by.map_or((0, 0), |by| {
                        (bytes_per_row(kind, words, by), bytes_per_query(kind, words, by))
                    });
                    let query = row + of_query + super::list_bytes(kind, k);
                    let used = 2 * (capacity.base * (row + of_row) + capacity.queries * query);
                    assert!(used <= limit, "{kind:?} {dim} {k}: {used}");
                    assert!(used > limit / 2, "{kind:?} {dim} {k}: {used}");
                }
            }
        }
    }

    #[test]
    fn the_least_is_a_panel() {
        let capacity = capacity(1 << 20, &shape(ElementKind::F64, 4096, 4096), None);
        assert_eq!(capacity, Capacity { base: PANEL, queries: PANEL });
    }
}
