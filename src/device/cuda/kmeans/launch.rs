//! Every kernel launch of Lloyd's rounds over one set of rows, and the memory that they share.
//!
//! The kernels of a round work on one set of buffers, which a [`Workspace`] allocates in the sizes
//! that they rely on and keeps until it is dropped; [`Job`] is how kernels see it. Kernels run in
//! the order of one stream.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DevicePtr, DeviceRepr, LaunchConfig};
use cudarc::driver::{CudaSlice, PushKernelArg};
use cudarc::nvrtc::Ptx;

use crate::device::ClusterSums;
use crate::device::contract::{KMeansProblem, StopReason};
use crate::device::cuda::driver::memory::{Buffer, Memory};
use crate::device::cuda::driver::sys::{self, failed};
use crate::device::cuda::search::launch::{Limits, allow_shared, check_size, config};
use crate::error::Result;

/// Most elements of a row, and most clusters, for which looking at near centroids first pays: the
/// triangle inequality rules out little in high dimensions.
const NEAR_DIM: usize = 10;
const NEAR_CLUSTERS: usize = 4096;

/// Most elements of a row that fit into registers as halves.
const TILES_DIM: usize = 128;

/// Names in `kernels/tiles.cuh` and `kernels/assign_near.cu`.
const TILE: usize = 64;
const WARPS: usize = 4;
const STAGES: usize = 3;
const SORTED_ROWS: usize = 8192;
/// Rows that a thread of `add_sorted` adds up, and bins of a wide sum: names in
/// `kernels/clusters.cu`.
const ADDED_ROWS: usize = 64;
pub(in crate::device::cuda) const BINS: usize = 9;

/// Rows that bins have room for: each adds less than 2³².
pub(in crate::device::cuda) const MOST_ROWS: usize = 1 << 30;

/// Counts that sorting keeps in shared memory, and the most for each cluster.
const PLACES: usize = 4096;
const RANKS: usize = 16;

/// How rows find their nearest centroid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::device::cuda) enum Way {
    /// By `kernels/assign_near.cu`.
    Near,
    /// By `kernels/assign_tiles.cu`.
    Tiles,
}

/// The kernels for rows of one dimension, loaded on a device.
#[derive(Debug)]
pub(in crate::device::cuda) struct RoundKernels {
    pub(in crate::device::cuda) dim: usize,
    limits: Limits,
    add_moved: CudaFunction,
    add_sorted: CudaFunction,
    means: CudaFunction,
    finish_round: CudaFunction,
    costs: CudaFunction,
    list_centroids: CudaFunction,
    assign_near: CudaFunction,
    sort_count: CudaFunction,
    sort_add_up: CudaFunction,
    sort_move: CudaFunction,
    round_rows: CudaFunction,
    round_centroids: CudaFunction,
    assign_tiles: CudaFunction,
    find_candidates: CudaFunction,
    compare_candidates: CudaFunction,
    settle: CudaFunction,
    pub(in crate::device::cuda) cluster_groups: CudaFunction,
}

/// The same struct as in `kernels/clusters.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::device::cuda) struct Status {
    pub(in crate::device::cuda) end: u32,
    pub(in crate::device::cuda) iterations: u32,
    pub(in crate::device::cuda) current: u32,
    pub(in crate::device::cuda) moved_last: u32,
    pub(in crate::device::cuda) moved: u32,
    pub(in crate::device::cuda) uncertain: u32,
    pub(in crate::device::cuda) pairs: u32,
    pub(in crate::device::cuda) empty: u32,
    pub(in crate::device::cuda) arrived: u32,
    pub(in crate::device::cuda) largest_row: u32,
    pub(in crate::device::cuda) largest_centroid: u32,
    pub(in crate::device::cuda) largest_error: u32,
    pub(in crate::device::cuda) rechecked: u64,
}

/// Values of [`Status::end`]: names in `kernels/clusters.cuh`.
const GOING_ON: u32 = 0;
const STABLE: u32 = 1;
const CONVERGED: u32 = 2;
const EMPTY_CLUSTER: u32 = 3;
const CROWDED: u32 = 4;

impl Status {
    pub(super) fn is_going_on(&self) -> bool {
        self.end == GOING_ON
    }

    pub(super) fn is_crowded(&self) -> bool {
        self.end == CROWDED
    }

    /// Why rounds stopped, if they did.
    pub(super) fn stop_reason(&self) -> Option<StopReason> {
        match self.end {
            STABLE => Some(StopReason::Stable),
            CONVERGED => Some(StopReason::Converged),
            EMPTY_CLUSTER => Some(StopReason::EmptyCluster),
            _ => None,
        }
    }
}

// SAFETY: a C struct of integers without padding, laid out as the kernels declare it.
unsafe impl DeviceRepr for Status {}

/// The same struct as in `kernels/clusters.cuh`: addresses on the device, and numbers.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::device::cuda) struct Job {
    pub(in crate::device::cuda) status: u64,
    pub(in crate::device::cuda) rows: u64,
    /// `count` of u32, or null.
    pub(in crate::device::cuda) numbers: u64,
    /// 2 × k × dim of f32.
    pub(in crate::device::cuda) centroids: u64,
    /// `count` of u32.
    pub(in crate::device::cuda) labels: u64,
    /// `count` of two u32.
    pub(in crate::device::cuda) moved: u64,
    /// k × dim, and k, of i64.
    pub(in crate::device::cuda) sums: u64,
    pub(in crate::device::cuda) counts: u64,
    /// k × dim × [`BINS`] of i64, and k of u32.
    pub(in crate::device::cuda) wide: u64,
    pub(in crate::device::cuda) is_wide: u64,
    /// dim of f64, both.
    pub(in crate::device::cuda) inverse: u64,
    pub(in crate::device::cuda) origin: u64,
    /// k of f64.
    pub(in crate::device::cuda) shifts: u64,
    /// k × k of u64, and a u32 for each place in the order, on the way [`Way::Near`].
    pub(in crate::device::cuda) lists: u64,
    pub(in crate::device::cuda) sorted_counts: u64,
    /// `count` rows, and whole tiles of centroids, of [`half_dim`]; and what follows, on the way
    /// [`Way::Tiles`].
    pub(in crate::device::cuda) half_rows: u64,
    pub(in crate::device::cuda) half_centroids: u64,
    /// `count` of two f32.
    pub(in crate::device::cuda) rounded: u64,
    /// Whole tiles of f32.
    pub(in crate::device::cuda) half_squares: u64,
    /// `count` of u32, f32 and u64.
    pub(in crate::device::cuda) uncertain: u64,
    pub(in crate::device::cuda) least: u64,
    pub(in crate::device::cuda) nearest: u64,
    /// `room_for_pairs` of two u32.
    pub(in crate::device::cuda) pairs: u64,
    pub(in crate::device::cuda) limit: f64,
    pub(in crate::device::cuda) tolerance: f64,
    pub(in crate::device::cuda) scale: f64,
    pub(in crate::device::cuda) underflow: f64,
    pub(in crate::device::cuda) count: u32,
    pub(in crate::device::cuda) k: u32,
    pub(in crate::device::cuda) room_for_pairs: u32,
    pub(in crate::device::cuda) padding: u32,
}

// SAFETY: a C struct of integers and floats without padding, laid out as the kernels declare it.
unsafe impl DeviceRepr for Job {}

impl RoundKernels {
    /// Load a cubin.
    pub(in crate::device::cuda) fn load(
        context: &Arc<CudaContext>,
        dim: usize,
        cubin: Vec<u8>,
        limits: Limits,
    ) -> Result<Self> {
        let module =
            context.load_module(Ptx::from_binary(cubin)).map_err(failed("cuModuleLoadData"))?;
        let function = |name| module.load_function(name).map_err(failed("cuModuleGetFunction"));
        let kernels = Self {
            dim,
            limits,
            add_moved: function("add_moved")?,
            add_sorted: function("add_sorted")?,
            means: function("means")?,
            finish_round: function("finish_round")?,
            costs: function("costs")?,
            list_centroids: function("list_centroids")?,
            assign_near: function("assign_near")?,
            sort_count: function("sort_count")?,
            sort_add_up: function("sort_add_up")?,
            sort_move: function("sort_move")?,
            round_rows: function("round_rows")?,
            round_centroids: function("round_centroids")?,
            assign_tiles: function("assign_tiles")?,
            find_candidates: function("find_candidates")?,
            compare_candidates: function("compare_candidates")?,
            settle: function("settle")?,
            cluster_groups: function("cluster_groups")?,
        };
        if has_tiles(dim, limits) {
            let shared = stages_bytes(dim);
            allow_shared(&kernels.assign_tiles, shared)?;
            allow_shared(&kernels.find_candidates, shared)?;
        }
        Ok(kernels)
    }
}

/// Which way there is for rows of this dimension and so many clusters, if any.
pub(in crate::device::cuda) fn way(dim: usize, k: usize, limits: Limits) -> Option<Way> {
    if dim <= NEAR_DIM && k <= NEAR_CLUSTERS {
        Some(Way::Near)
    } else if has_tiles(dim, limits) {
        Some(Way::Tiles)
    } else {
        None
    }
}

fn has_tiles(dim: usize, limits: Limits) -> bool {
    dim <= TILES_DIM && limits.capability.0 >= 8 && stages_bytes(dim) <= limits.shared
}

/// Kinds of rows in a cluster that sorting tells apart.
fn ranks(k: usize) -> usize {
    (PLACES / k).clamp(1, RANKS)
}

fn half_dim(dim: usize) -> usize {
    dim.next_multiple_of(16)
}

/// Shared memory of a block that multiplies tiles.
fn stages_bytes(dim: usize) -> usize {
    STAGES * (TILE * (half_dim(dim) + 8) * 2 + TILE * 4)
}

/// Rows on a device and all that rounds need.
pub(in crate::device::cuda) struct Workspace {
    kernels: Arc<RoundKernels>,
    stream: Arc<CudaStream>,
    way: Way,
    count: usize,
    k: usize,
    job: Job,
    status: Buffer,
    centroids: Buffer,
    labels: Buffer,
    /// What there is of rows in clusters: all zero without rows.
    sums: Sums,
    rows: Buffer,
    /// Where sorted rows, their numbers and labels go.
    sorted: Option<Sorted>,
    /// The memory behind the other addresses of the job.
    _kept: Vec<Buffer>,
}

struct Sums {
    sums: Buffer,
    counts: Buffer,
    wide: Buffer,
    is_wide: Buffer,
}

struct Sorted {
    counts: Buffer,
    rows: Buffer,
    labels: Buffer,
    numbers: [Buffer; 2],
}

impl Workspace {
    /// Memory for rounds over `rows`, which `ready` has already been waited for.
    pub(in crate::device::cuda) fn new(
        kernels: Arc<RoundKernels>,
        stream: &Arc<CudaStream>,
        memory: &Arc<Memory>,
        rows: Buffer,
        (count, way): (usize, Way),
        (problem, empty): (&KMeansProblem, &ClusterSums),
    ) -> Result<Self> {
        let (dim, k) = (kernels.dim, problem.k);
        let steps = &empty.sums.steps;
        assert!(count <= MOST_ROWS && problem.origin.len() == dim && steps.inverse.len() == dim);
        check_size(&rows, count * dim, 4);
        let allocate = |bytes: usize| memory.allocate(stream, bytes);
        let mut kept = Vec::new();
        let mut place = |bytes: usize| -> Result<u64> {
            let buffer = allocate(bytes)?;
            let place = address(stream, &buffer);
            kept.push(buffer);
            Ok(place)
        };
        let scale = scale(problem.farthest);
        let mut job = Job {
            rows: address(stream, &rows),
            moved: place(count * 8)?,
            shifts: place(k * 8)?,
            limit: steps.limit(),
            tolerance: problem.tolerance,
            scale,
            // A unit of the smallest number for each of dim sums, on both sides of a comparison.
            underflow: 2.0 * (dim + 4) as f64 * 2f64.powi(-149) * scale * scale,
            count: count as u32,
            k: k as u32,
            ..Job::default()
        };
        let (status, centroids) = (allocate(size_of::<Status>())?, allocate(2 * k * dim * 4)?);
        let labels = allocate(count * 4)?;
        let sums = Sums {
            sums: allocate(k * dim * 8)?,
            counts: allocate(k * 8)?,
            wide: allocate(k * dim * BINS * 8)?,
            is_wide: allocate(k * 4)?,
        };
        (job.status, job.centroids) = (address(stream, &status), address(stream, &centroids));
        (job.labels, job.sums) = (address(stream, &labels), address(stream, &sums.sums));
        (job.counts, job.wide) = (address(stream, &sums.counts), address(stream, &sums.wide));
        job.is_wide = address(stream, &sums.is_wide);
        let (mut origin, mut inverse) = (allocate(dim * 8)?, allocate(dim * 8)?);
        sys::write(stream, origin.slice_mut(), &problem.origin)?;
        sys::write(stream, inverse.slice_mut(), &steps.inverse)?;
        (job.origin, job.inverse) = (address(stream, &origin), address(stream, &inverse));
        let mut sorted = None;
        match way {
            Way::Near => {
                job.lists = place(k * k * 8)?;
                let counts = allocate(k * ranks(k) * 4)?;
                job.sorted_counts = address(stream, &counts);
                sorted = Some(Sorted {
                    counts,
                    rows: allocate(count * dim * 4)?,
                    labels: allocate(count * 4)?,
                    numbers: [allocate(count * 4)?, allocate(count * 4)?],
                });
            }
            Way::Tiles => {
                let tiles = k.next_multiple_of(TILE);
                job.half_rows = place(count * half_dim(dim) * 2)?;
                job.half_centroids = place(tiles * half_dim(dim) * 2)?;
                job.rounded = place(count * 8)?;
                job.half_squares = place(tiles * 4)?;
                job.uncertain = place(count * 4)?;
                job.least = place(count * 4)?;
                job.nearest = place(count * 8)?;
                job.room_for_pairs = count.max(4096) as u32;
                job.pairs = place(job.room_for_pairs as usize * 8)?;
            }
        }
        kept.extend([origin, inverse]);
        let (kernels, stream) = (kernels, stream.clone());
        let mut workspace = Self {
            kernels,
            stream,
            way,
            count,
            k,
            job,
            status,
            centroids,
            labels,
            sums,
            rows,
            sorted,
            _kept: kept,
        };
        workspace.set_status(&Status::default())?;
        if way == Way::Tiles {
            let kernels = &workspace.kernels;
            workspace.launch(
                &kernels.round_rows,
                "round_rows",
                config(count.div_ceil(8), 256, 0),
            )?;
        }
        Ok(workspace)
    }

    /// What rounds have come to. Waits for them.
    pub(in crate::device::cuda) fn status(&self) -> Result<Status> {
        let read = sys::read::<Status>(&self.stream, self.status.slice(), 1);
        Ok(read.map_err(failed("cuMemcpyDtoHAsync"))?[0])
    }

    /// Change what the next launches find.
    pub(in crate::device::cuda) fn set_status(&mut self, status: &Status) -> Result<()> {
        sys::write(&self.stream, self.status.slice_mut(), std::slice::from_ref(status))
    }

    /// The valid centroids; `current` says which they are.
    pub(in crate::device::cuda) fn centroids(&self, current: u32) -> Result<Vec<f32>> {
        let size = self.k * self.kernels.dim;
        let both = sys::read::<f32>(&self.stream, self.centroids.slice(), 2 * size);
        let both = both.map_err(failed("cuMemcpyDtoHAsync"))?;
        Ok(both[current as usize * size..][..size].to_vec())
    }

    /// Make these the first of the two sets.
    pub(in crate::device::cuda) fn set_centroids(&mut self, centroids: &[f32]) -> Result<()> {
        assert_eq!(centroids.len(), self.k * self.kernels.dim);
        sys::write(&self.stream, self.centroids.slice_mut(), centroids)
    }

    /// No row is in a cluster.
    pub(in crate::device::cuda) fn clear(&mut self) -> Result<()> {
        let call = || failed("cuMemsetD8Async");
        let labels = sys::fill(&self.stream, self.labels.slice_mut(), 0xff);
        labels.map_err(call())?;
        let Sums { sums, counts, wide, is_wide } = &mut self.sums;
        for buffer in [sums, counts, wide, is_wide] {
            self.stream.memset_zeros(buffer.slice_mut()).map_err(call())?;
        }
        Ok(())
    }

    /// Sums of all clusters, in steps of `empty`.
    pub(in crate::device::cuda) fn sums(&self, empty: &ClusterSums) -> Result<ClusterSums> {
        let (stream, k, dim) = (&self.stream, self.k, self.kernels.dim);
        let home = failed("cuMemcpyDtoHAsync");
        let Sums { sums, counts, wide, is_wide } = &self.sums;
        let mut found = empty.cleared();
        found.sums.high = sys::read(stream, sums.slice(), k * dim).map_err(&home)?;
        found.counts = sys::read(stream, counts.slice(), k).map_err(&home)?;
        let is_wide: Vec<u32> = sys::read(stream, is_wide.slice(), k).map_err(&home)?;
        if is_wide.iter().all(|is_wide| *is_wide == 0) {
            return Ok(found);
        }
        let bins: Vec<i64> = sys::read(stream, wide.slice(), k * dim * BINS).map_err(&home)?;
        for (place, bins) in bins.chunks_exact(BINS).enumerate() {
            if bins.iter().any(|bin| *bin != 0) {
                found.sums.add_digits(place, bins);
            }
        }
        Ok(found)
    }

    /// Find every row's nearest centroid, and list the rows that it is new for. `is_last`: also if
    /// rounds have ended.
    pub(in crate::device::cuda) fn assign(&self, is_last: bool) -> Result<()> {
        let (kernels, is_last) = (&self.kernels, u32::from(is_last));
        match self.way {
            Way::Near => {
                let size = self.k.next_power_of_two();
                let lists = config(self.k, size.clamp(64, 512) / 2, size * 8);
                self.launch_with(&kernels.list_centroids, "list_centroids", lists, size as u32)?;
                let rows = config(self.count.div_ceil(256), 256, 0);
                self.launch_with(&kernels.assign_near, "assign_near", rows, is_last)
            }
            Way::Tiles => {
                let (rows, threads) = (32 * WARPS, 32 * WARPS);
                let shared = stages_bytes(kernels.dim);
                let centroids = config(self.k.next_multiple_of(TILE).div_ceil(8), 256, 0);
                self.launch_with(&kernels.round_centroids, "round_centroids", centroids, is_last)?;
                let blocks = self.count.div_ceil(rows);
                let all = config(blocks, threads, shared);
                self.launch_with(&kernels.assign_tiles, "assign_tiles", all, is_last)?;
                let mut some = config(blocks.min(self.blocks(1)), threads, shared);
                some.grid_dim.1 = 4;
                self.launch_with(&kernels.find_candidates, "find_candidates", some, is_last)?;
                let pairs = config(self.blocks(8), 128, 0);
                self.launch_with(
                    &kernels.compare_candidates,
                    "compare_candidates",
                    pairs,
                    is_last,
                )?;
                self.launch_with(&kernels.settle, "settle", config(self.blocks(2), 256, 0), is_last)
            }
        }
    }

    /// Add the listed rows to their clusters, or, in the first round, all rows, if they are sorted.
    pub(in crate::device::cuda) fn add(&mut self, is_first: bool) -> Result<()> {
        if is_first && self.way == Way::Near {
            self.sort()?;
            let threads = self.count.div_ceil(ADDED_ROWS) * self.kernels.dim;
            let all = config(threads.div_ceil(256), 256, 0);
            return self.launch(&self.kernels.add_sorted, "add_sorted", all);
        }
        let some = config(self.blocks(4), 256, 0);
        self.launch(&self.kernels.add_moved, "add_moved", some)
    }

    /// Move every centroid to the mean of its rows, unless rounds end.
    pub(in crate::device::cuda) fn update(&self) -> Result<()> {
        let kernels = &self.kernels;
        let clusters = config(self.k.div_ceil(8), 256, 0);
        self.launch(&kernels.means, "means", clusters)?;
        self.launch(&kernels.finish_round, "finish_round", clusters)
    }

    /// Put rows of a cluster next to each other, and in it those that look at as many others, if
    /// that makes assigning them faster. All rows are in a cluster.
    pub(in crate::device::cuda) fn sort(&mut self) -> Result<()> {
        let Some(mut sorted) = self.sorted.take() else { return Ok(()) };
        let kernels = &self.kernels;
        self.stream.memset_zeros(sorted.counts.slice_mut()).map_err(failed("cuMemsetD8Async"))?;
        let ranks = ranks(self.k);
        let blocks = config(self.count.div_ceil(SORTED_ROWS), 1024, self.k * ranks * 4);
        let ranks = ranks as u32;
        self.launch_with(&kernels.sort_count, "sort_count", blocks, ranks)?;
        self.launch_with(&kernels.sort_add_up, "sort_add_up", config(1, 1024, 0), ranks)?;
        let [numbers, _] = &mut sorted.numbers;
        let mut launch = self.stream.launch_builder(&kernels.sort_move);
        launch.arg(&self.job).arg(&ranks).arg(sorted.rows.slice_mut()).arg(numbers.slice_mut());
        launch.arg(sorted.labels.slice_mut());
        // SAFETY: as for `launch`; positions are below `count`, for which the targets have room.
        unsafe { launch.launch(blocks) }.map_err(failed("sort_move"))?;
        std::mem::swap(&mut self.rows, &mut sorted.rows);
        std::mem::swap(&mut self.labels, &mut sorted.labels);
        self.job.rows = address(&self.stream, &self.rows);
        self.job.labels = address(&self.stream, &self.labels);
        self.job.numbers = address(&self.stream, &sorted.numbers[0]);
        sorted.numbers.swap(0, 1);
        self.sorted = Some(sorted);
        Ok(())
    }

    /// Labels and costs of all rows, in their original order.
    pub(in crate::device::cuda) fn assigned(
        &self,
        memory: &Arc<Memory>,
    ) -> Result<(Vec<u32>, Vec<f32>)> {
        let mut labels = memory.allocate(&self.stream, self.count * 4)?;
        let mut costs = memory.allocate(&self.stream, self.count * 4)?;
        let mut launch = self.stream.launch_builder(&self.kernels.costs);
        launch.arg(&self.job).arg(labels.slice_mut()).arg(costs.slice_mut());
        // SAFETY: as for `launch`; numbers are below `count`, for which both targets have room.
        unsafe { launch.launch(config(self.count.div_ceil(128), 128, 0)) }
            .map_err(failed("costs"))?;
        let home = failed("cuMemcpyDtoHAsync");
        let labels = sys::read(&self.stream, labels.slice(), self.count).map_err(&home)?;
        Ok((labels, sys::read(&self.stream, costs.slice(), self.count).map_err(&home)?))
    }

    fn blocks(&self, per_multiprocessor: usize) -> usize {
        per_multiprocessor * self.kernels.limits.multiprocessors
    }

    fn launch(
        &self,
        function: &CudaFunction,
        name: &'static str,
        grid: LaunchConfig,
    ) -> Result<()> {
        let mut launch = self.stream.launch_builder(function);
        launch.arg(&self.job);
        // SAFETY: the job's buffers live as long as this workspace, have the sizes that are written
        // at its fields, and are used on this stream only; kernels touch positions of rows below
        // `count`, clusters below `k` and elements below `dim`, for which they were compiled. Lists
        // of rows hold each row once at most.
        unsafe { launch.launch(grid) }.map_err(failed(name))?;
        Ok(())
    }

    fn launch_with(
        &self,
        function: &CudaFunction,
        name: &'static str,
        grid: LaunchConfig,
        number: u32,
    ) -> Result<()> {
        let mut launch = self.stream.launch_builder(function);
        launch.arg(&self.job).arg(&number);
        // SAFETY: as for `launch`.
        unsafe { launch.launch(grid) }.map_err(failed(name))?;
        Ok(())
    }
}

pub(in crate::device::cuda) fn address(stream: &Arc<CudaStream>, buffer: &Buffer) -> u64 {
    let slice: &CudaSlice<u8> = buffer.slice();
    slice.device_ptr(stream).0
}

/// A power of two that brings elements, of which this one is the farthest from the origin, below 256.
fn scale(farthest: f64) -> f64 {
    if farthest == 0.0 {
        return 1.0;
    }
    2f64.powi((7.0 - farthest.log2().floor()).clamp(-1000.0, 1000.0) as i32)
}
