//! The memory that the kernels of DBSCAN share, and the launch of one of them.
//!
//! Kernels get the buffers of a [`DbscanWorkspace`] as [`DbscanOnDevice`]; they run in the order of
//! one stream.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaStream, DeviceRepr, LaunchArgs, LaunchConfig, PushKernelArg,
};

use super::kernels::{DbscanKernels, SECTION, STAGED_THREADS, Staged, TILE};
use super::order::Order;
use super::structs::{
    DbscanOnDevice, DirectionOnDevice, LEVELS, ProductsOnDevice, ProgressOnDevice, Weight,
};
use super::tiles::{first_tiles, parts, products};
use crate::device::contract::CertainSquares;
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{address, config, launch_seconds};
use crate::device::cuda::driver::memory::{Buffer, Memory};
use crate::device::cuda::driver::sys::{self, failed};
use crate::error::Result;
use crate::job::Job;

/// Bytes of a slice of a row; see `kernels/dbscan/products.cuh`.
const SLICE: usize = 64;

/// The input of DBSCAN, to be sent to the device.
pub(super) struct WorkspaceInput<'a> {
    /// The rows in row-major order, and their number.
    pub(super) rows: Buffer,
    pub(super) count: usize,
    /// Elements of a row as the device counts them: bits are words of 32.
    pub(super) dim: usize,
    /// Bytes of an element.
    pub(super) scalar: usize,
    pub(super) directions: &'a [DirectionOnDevice],
    /// For each row, or none if all weigh 1.
    pub(super) weights: &'a [Weight],
    pub(super) enough: Weight,
    pub(super) ends: &'a [usize],
    pub(super) order: &'a Order,
    pub(super) thresholds: SumThresholds,
}

/// Thresholds of sums, and of lower and upper bounds on them; see `kernels/dbscan/rows.cuh`.
#[derive(Debug, Clone, Copy)]
pub(super) struct SumThresholds {
    pub(super) limit: f64,
    pub(super) sure: f64,
    pub(super) may: f64,
    pub(super) beyond: f32,
    pub(super) inside: f32,
    /// Thresholds of the squared distance of rows, or of their unit vectors.
    pub(super) squares: CertainSquares,
}

/// Rows on a device, with all buffers that DBSCAN needs.
pub(super) struct DbscanWorkspace {
    pub(super) kernels: Arc<DbscanKernels>,
    pub(super) stream: Arc<CudaStream>,
    pub(super) all: DbscanOnDevice,
    pub(super) count: usize,
    /// Nodes of each level.
    pub(super) nodes: Vec<usize>,
    pub(super) done: Stage,
    pub(super) progress: Buffer,
    pub(super) cursors: Buffer,
    pub(super) firsts: Buffer,
    pub(super) is_core: Buffer,
    /// Owns the memory behind the addresses in `all`.
    _buffers: Vec<Buffer>,
}

/// The last stage that was launched. A stage reads the results of all stages before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Nothing,
    Order,
    Count,
    Link,
}

impl DbscanWorkspace {
    /// Allocates memory for rows that have arrived on the device.
    ///
    /// In one piece: it is one list of buffers and their sizes.
    pub(super) fn new(
        kernels: Arc<DbscanKernels>,
        CudaDevice { gpu, memory, .. }: &CudaDevice,
        input: WorkspaceInput<'_>,
    ) -> Result<Self> {
        let WorkspaceInput {
            rows,
            count,
            dim,
            scalar,
            directions,
            weights,
            enough,
            ends,
            order,
            thresholds,
        } = input;
        let stream = &gpu.compute;
        let first_tiles = first_tiles(ends);
        let tiles = first_tiles[ends.len()] as usize;
        let (slots, coordinates) = (tiles * TILE, kernels.spec.coordinates());
        let chunks = dim.div_ceil(kernels.spec.width());
        let is_filtered = kernels.spec.is_filtered();
        let slices = if is_filtered { kernels.spec.slices(dim) } else { 0 };
        let mut nodes = vec![tiles];
        while nodes[nodes.len() - 1] > 1 {
            nodes.push(nodes[nodes.len() - 1].div_ceil(32));
        }
        let (mut node_starts, mut box_starts) = ([0; LEVELS], [0; LEVELS]);
        let (mut all_nodes, mut all_boxes) = (0, 0);
        for (level, nodes) in nodes.iter().enumerate() {
            (node_starts[level], box_starts[level]) = (all_nodes as u32, all_boxes as u32);
            (all_nodes, all_boxes) = (all_nodes + nodes, all_boxes + nodes.div_ceil(32));
        }
        let mut buffers = Vec::new();
        let mut place = |bytes: usize| -> Result<u64> {
            let buffer = memory.allocate(stream, bytes)?;
            let place = address(stream, &buffer);
            buffers.push(buffer);
            Ok(place)
        };
        let mut all = DbscanOnDevice {
            order: place(slots * 4)?,
            ranges: place(tiles * 8)?,
            chunks: place(slots * chunks * kernels.spec.width() * scalar)?,
            inverses: place(if directions.is_empty() { 0 } else { slots * 8 })?,
            bits: place(slots * 4)?,
            boxes: place(all_boxes * coordinates * 64 * 4)?,
            totals: place(all_nodes * size_of::<Weight>())?,
            core: place(tiles * 8)?,
            near: place(slots * 8)?,
            parents: place(count * 4)?,
            known: place(all_nodes * 4)?,
            least: place(all_nodes * 4)?,
            offsets: place(tiles * 4)?,
            sections: place((tiles.div_ceil(SECTION) + 1) * 4)?,
            list: place(slots * 4)?,
            counted: place(slots * size_of::<Weight>())?,
            enough,
            limit: thresholds.limit,
            sure: thresholds.sure,
            may: thresholds.may,
            beyond: thresholds.beyond,
            inside: thresholds.inside,
            products: ProductsOnDevice {
                slices: place(slots * slices * SLICE)?,
                rounded: place(if is_filtered { slots * 16 } else { 0 })?,
                most: place(if is_filtered { tiles * 8 } else { 0 })?,
                ..products(order, thresholds.squares, slices)
            },
            dim: dim as u32,
            chunk_count: chunks as u32,
            tile_count: tiles as u32,
            group_count: ends.len() as u32,
            cycles: (launch_seconds() * kernels.clock) as u64,
            node_starts,
            box_starts,
            ..DbscanOnDevice::default()
        };
        let mut send = Sending { stream, memory, buffers: Vec::new() };
        let ends: Vec<u32> = ends.iter().map(|end| *end as u32).collect();
        all.rows = address(stream, &rows);
        (all.ends, all.first_tiles) = (send.values(&ends)?, send.values(&first_tiles)?);
        all.box_dims = send.values(&order.dims)?;
        if is_filtered {
            all.products.centre = send.values(&order.centre)?;
        }
        if !directions.is_empty() {
            all.directions = send.values(directions)?;
        }
        if !weights.is_empty() {
            all.weights = send.values(weights)?;
        }
        buffers.extend(send.buffers);
        buffers.push(rows);
        let allocate = |bytes: usize| memory.allocate(stream, bytes);
        // Items are parts of tiles, in 64 stripes, or rows: at least 8 each or, if there are too
        // few for that, two items per warp.
        let warps = |staged: &Staged| staged.blocks * STAGED_THREADS / 32;
        let staged = [&kernels.count_near, &kernels.link_tiles, &kernels.attach];
        let most = staged.map(warps).into_iter().max().unwrap_or(0);
        let items = parts(&kernels, tiles).max(4) * tiles.next_multiple_of(64) + 2 * most;
        let (progress, cursors) = (allocate(size_of::<ProgressOnDevice>())?, allocate(items * 4)?);
        let (firsts, is_core) = (allocate(count * 4)?, allocate(count)?);
        all.progress = address(stream, &progress);
        all.cursors = address(stream, &cursors);
        (all.firsts, all.is_core) = (address(stream, &firsts), address(stream, &is_core));
        let stream = stream.clone();
        let _buffers = buffers;
        let done = Stage::Nothing;
        let mut workspace = Self {
            kernels,
            stream,
            all,
            count,
            nodes,
            done,
            progress,
            cursors,
            firsts,
            is_core,
            _buffers,
        };
        workspace.clear()?;
        Ok(workspace)
    }

    fn clear(&mut self) -> Result<()> {
        let call = || failed("cuMemsetD8Async");
        let Self { stream, progress, is_core, firsts, .. } = self;
        stream.memset_zeros(progress.slice_mut()).map_err(call())?;
        stream.memset_zeros(is_core.slice_mut()).map_err(call())?;
        sys::fill(stream, firsts.slice_mut(), 0xff).map_err(call())
    }

    /// Whether each row is core, and the first row of its cluster.
    pub(super) fn labels(&self, gpu: &Gpu, job: &Job) -> Result<(Vec<bool>, Vec<u32>)> {
        let (stream, count, from) = (&self.stream, self.count, &gpu.downloader);
        let core: Vec<u8> = from.read(stream, self.is_core.slice(), count, job)?;
        let firsts = from.read(stream, self.firsts.slice(), count, job)?;
        Ok((core.iter().map(|core| *core != 0).collect(), firsts))
    }

    /// Counters of the work done.
    pub(super) fn progress(&self) -> Result<ProgressOnDevice> {
        let read = sys::read(&self.stream, self.progress.slice(), 1);
        Ok(read.map_err(failed("cuMemcpyDtoHAsync"))?[0])
    }

    /// A grid of one warp per tile.
    pub(super) fn by_tile(&self) -> LaunchConfig {
        config(self.nodes[0].div_ceil(4), 128, 0)
    }

    /// Launches a kernel with one warp per node of a level.
    ///
    /// # Safety
    /// The requirements of [`launch`](Self::launch), for a kernel that takes `Dbscan` and the
    /// level.
    pub(super) unsafe fn run_level(
        &self,
        function: &CudaFunction,
        name: &'static str,
        level: usize,
    ) -> Result<()> {
        let (grid, level) = (config(self.nodes[level].div_ceil(4), 128, 0), level as u32);
        // SAFETY: the caller's; there is such a level.
        unsafe {
            self.launch(function, name, grid, |launch, all| {
                launch.arg(all).arg(&level);
            })
        }
    }

    /// A grid of one thread per row.
    ///
    /// # Safety
    /// The requirements of [`launch`](Self::launch), for a kernel that takes `Dbscan` and the
    /// number of rows.
    pub(super) unsafe fn run_rows(
        &self,
        function: &CudaFunction,
        name: &'static str,
    ) -> Result<()> {
        let (grid, count) = (config(self.count.div_ceil(256), 256, 0), self.count as u32);
        // SAFETY: the caller's; `count` is the number of rows.
        unsafe {
            self.launch(function, name, grid, |launch, all| {
                launch.arg(all).arg(&count);
            })
        }
    }

    /// # Safety
    /// The requirements of [`launch`](Self::launch), for a kernel that takes `Dbscan` alone.
    pub(super) unsafe fn run(
        &self,
        function: &CudaFunction,
        name: &'static str,
        grid: LaunchConfig,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe {
            self.launch(function, name, grid, |launch, all| {
                launch.arg(all);
            })
        }
    }

    /// Launches a kernel with the arguments that `add` gives it.
    ///
    /// # Safety
    /// - `function` is one of this workspace's kernels, and declares the parameters that `add`
    ///   gives it, in this order and of these types; the grid has the blocks and threads asked for
    ///   at the kernel's head.
    /// - Addresses beside those in [`DbscanOnDevice`] are of memory in the sizes that the kernel
    ///   touches, different ones for what it writes. It stays allocated until the kernel has run,
    ///   or is freed in the order of this stream, and nothing but this stream uses it until then.
    /// - What the kernel reads has been written, by what was launched on this stream before.
    pub(super) unsafe fn launch<'a>(
        &'a self,
        function: &'a CudaFunction,
        name: &'static str,
        grid: LaunchConfig,
        add: impl FnOnce(&mut LaunchArgs<'a>, &'a DbscanOnDevice),
    ) -> Result<()> {
        let mut launch = self.stream.launch_builder(function);
        add(&mut launch, &self.all);
        // SAFETY: arguments, grid and order are as the caller says. The struct's buffers live as
        // long as this workspace, in the sizes that `new` gives them, and are used on this stream
        // only; kernels touch tiles, nodes, slots and rows below the counts in the struct, and were
        // compiled for its rows.
        unsafe { launch.launch(grid) }.map_err(failed(name)).map(drop)
    }
}

/// Values that are sent to the device.
pub(super) struct Sending<'a> {
    pub(super) stream: &'a Arc<CudaStream>,
    pub(super) memory: &'a Arc<Memory>,
    pub(super) buffers: Vec<Buffer>,
}

impl Sending<'_> {
    pub(super) fn values<T: DeviceRepr>(&mut self, values: &[T]) -> Result<u64> {
        let mut buffer = self.memory.allocate(self.stream, size_of_val(values))?;
        sys::write(self.stream, buffer.slice_mut(), values)?;
        let place = address(self.stream, &buffer);
        self.buffers.push(buffer);
        Ok(place)
    }
}
