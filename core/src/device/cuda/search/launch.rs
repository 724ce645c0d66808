//! The kernels of searches, and the rules of all their launches, which are in `launch_*`: one
//! function per kernel, which checks the sizes that the kernel relies on and picks its grid.
//!
//! Buffers are borrowed for the call, and kernels run later. A buffer outlives its kernels because
//! dropping it only retires it (see `driver::memory`), and streams order the kernels of one list.
//! Buffers are distinct allocations, so `__restrict__` holds; sizes in bytes are checked before
//! each launch against the kernel's accesses.

use std::sync::{Arc, LazyLock};

use cudarc::driver::CudaFunction;

use super::passes::PANEL;
use super::spec::{SearchSpec, real_bytes, scalar_bytes};
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{Limits, Rate, allow_shared, function};
use crate::device::cuda::driver::modules::Once;
use crate::error::Result;
use crate::matrix::ElementKind;

/// Warps of a block of `merge_by_warp`, one per query, and the maximum shared memory of that block.
pub(super) const WARPS: usize = 8;
pub(super) const WARPS_SHARED: usize = 32 << 10;

/// The kernels of one [`SearchSpec`], loaded on a device.
#[derive(Debug)]
pub(super) struct SearchKernels {
    pub(super) spec: SearchSpec,
    pub(super) shared_limit: usize,
    pub(super) multiprocessors: usize,
    pub(super) pack: CudaFunction,
    pub(super) scan: CudaFunction,
    pub(super) scan_least: CudaFunction,
    pub(super) bound_lists: CudaFunction,
    pub(super) lengthen_lists: CudaFunction,
    pub(super) find_short: CudaFunction,
    pub(super) clear_lists: CudaFunction,
    pub(super) merge_by_warp: CudaFunction,
    pub(super) merge_by_block: CudaFunction,
    pub(super) merge_in_place: CudaFunction,
    pub(super) search_again: CudaFunction,
    pub(super) gather: CudaFunction,
    pub(super) take_queries: CudaFunction,
    pub(super) distances_of: CudaFunction,
    pub(super) measure_lists: CudaFunction,
    pub(super) rank_by_warp: CudaFunction,
    pub(super) rank_by_block: CudaFunction,
    pub(super) unpack: CudaFunction,
    /// Pairs × dimensions per second, of a scan.
    pub(super) scan_rate: Arc<Rate>,
    /// The same for pairs of rows anywhere in memory, and for these by the definition, in float64.
    pub(super) distances_rate: Arc<Rate>,
    pub(super) exact_rate: Arc<Rate>,
    /// Entries × steps of a sort per second, in shared memory and in global memory.
    pub(super) merge_rates: [Arc<Rate>; 2],
}

/// The maximum f32 multiply-adds per cycle of a multiprocessor in a scan.
const PER_CYCLE: f64 = 64.0;

/// The slowdown of a sort's step per entry relative to a multiply-add, in shared and in global
/// memory.
const MERGE_PENALTIES: [f64; 2] = [40.0, 320.0];

/// The slowdown of pairs of rows anywhere in memory.
pub(super) const FETCH_PENALTY: f64 = 32.0;

/// The maximum multiply-adds per cycle of a multiprocessor, of the elements of a spec.
pub(super) fn per_cycle(spec: &SearchSpec, limits: &Limits) -> f64 {
    PER_CYCLE / if spec.kind == ElementKind::F64 { limits.double_penalty } else { 1.0 }
}

impl SearchKernels {
    /// The kernels for such rows and a metric, compiled and loaded by the first caller.
    pub(super) fn get(gpu: &Gpu, spec: SearchSpec) -> Result<Arc<Self>> {
        static LOADED: LazyLock<Once<(usize, SearchSpec), SearchKernels>> =
            LazyLock::new(Once::default);
        LOADED.get((gpu.ordinal, spec), || Self::load(gpu, spec))
    }

    fn load(gpu: &Gpu, spec: SearchSpec) -> Result<Self> {
        let modules =
            gpu.load_all(&[spec.program("search.cu"), spec.program("search_lists.cu")])?;
        let [module, lists] = &modules[..] else { unreachable!("a module for each program") };
        let limits = &gpu.limits;
        let per_cycle = per_cycle(&spec, limits);
        let kernels = Self {
            spec,
            shared_limit: limits.shared,
            multiprocessors: limits.multiprocessors,
            pack: function(module, "pack")?,
            scan: function(module, "scan")?,
            scan_least: function(module, "scan_least")?,
            bound_lists: function(module, "bound_lists")?,
            lengthen_lists: function(lists, "lengthen_lists")?,
            find_short: function(lists, "find_short")?,
            clear_lists: function(lists, "clear_lists")?,
            merge_by_warp: function(lists, "merge_by_warp")?,
            merge_by_block: function(lists, "merge_by_block")?,
            merge_in_place: function(lists, "merge_in_place")?,
            search_again: function(lists, "search_again")?,
            gather: function(lists, "gather")?,
            take_queries: function(module, "take_queries")?,
            distances_of: function(lists, "distances_of")?,
            measure_lists: function(lists, "measure_lists")?,
            rank_by_warp: function(lists, "rank_by_warp")?,
            rank_by_block: function(lists, "rank_by_block")?,
            unpack: function(lists, "unpack")?,
            scan_rate: Arc::new(limits.rate(per_cycle)),
            distances_rate: Arc::new(limits.rate(per_cycle / FETCH_PENALTY)),
            exact_rate: Arc::new(limits.rate(PER_CYCLE / limits.double_penalty / FETCH_PENALTY)),
            merge_rates: MERGE_PENALTIES.map(|slower| Arc::new(limits.rate(per_cycle / slower))),
        };
        allow_shared(&kernels.scan, kernels.scan_shared())?;
        allow_shared(&kernels.scan_least, kernels.scan_shared())?;
        allow_shared(&kernels.merge_by_block, limits.shared)?;
        allow_shared(&kernels.rank_by_block, limits.shared)?;
        Ok(kernels)
    }

    /// Shared memory of the scan; the kernel documents its layout.
    pub(super) fn scan_shared(&self) -> usize {
        let kind = self.spec.kind;
        let slices = (self.spec.staged_slices() * self.spec.slice()) as usize;
        PANEL * (real_bytes(kind) + slices * scalar_bytes(kind))
    }
}
