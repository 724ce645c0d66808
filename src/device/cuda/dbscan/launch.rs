//! The kernel launches of DBSCAN once rows are in order, and the memory that all launches share.
//!
//! Kernels get the buffers of a [`DbscanWorkspace`] as [`DbscanOnDevice`]; they run in the order of one stream. Stages
//! that take long are launched again and again: each launch ends in time and records how far it is.
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
    pub(super) bounds: SumThresholds,
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
    pub(super) squares: (f64, f64),
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
    progress: Buffer,
    cursors: Buffer,
    firsts: Buffer,
    is_core: Buffer,
    /// Owns the memory behind the addresses in `all`.
    _kept: Vec<Buffer>,
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
        stream: &Arc<CudaStream>,
        memory: &Arc<Memory>,
        shape: WorkspaceInput<'_>,
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
            bounds,
        } = shape;
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
        let mut kept = Vec::new();
        let mut place = |bytes: usize| -> Result<u64> {
            let buffer = memory.allocate(stream, bytes)?;
            let place = address(stream, &buffer);
            kept.push(buffer);
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
            limit: bounds.limit,
            sure: bounds.sure,
            may: bounds.may,
            beyond: bounds.beyond,
            inside: bounds.inside,
            products: ProductsOnDevice {
                slices: place(slots * slices * SLICE)?,
                rounded: place(if is_filtered { slots * 16 } else { 0 })?,
                most: place(if is_filtered { tiles * 8 } else { 0 })?,
                ..products(order, bounds.squares, slices)
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
        let mut send = Sending { stream, memory, kept: Vec::new() };
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
        kept.extend(send.kept);
        kept.push(rows);
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
        let _kept = kept;
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
            _kept,
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

    /// Finds the core rows.
    pub(super) fn count(&mut self, job: &Job) -> Result<()> {
        assert_eq!(self.done, Stage::Order);
        let kernels = self.kernels.clone();
        // SAFETY: `count_own` takes (Dbscan): it reads tiles in order, and writes `near`, `core` and `offsets`
        // of each.
        unsafe { self.stage(&kernels.count_own, None, job) }?;
        self.list()?;
        // SAFETY: `count_near` takes (Dbscan): it reads the slots that `list` lists, and writes `counted` at
        // their places and their bits of `core`.
        unsafe { self.stage(&kernels.count_near, None, job) }?;
        self.done = Stage::Count;
        Ok(())
    }

    /// Joins core rows within eps of each other.
    pub(super) fn link(&mut self, job: &Job) -> Result<()> {
        assert_eq!(self.done, Stage::Count);
        let kernels = self.kernels.clone();
        // SAFETY: `alone` takes (Dbscan, u32 count) and makes each of `count` rows its own parent. `link_own`
        // takes (Dbscan), a warp for each tile: it joins rows of a tile that are in `core`, which counting has
        // written; `order` gives rows below `count` for them, which have parents from then on.
        unsafe {
            self.run_rows(&kernels.alone, "alone")?;
            self.run(&kernels.link_own, ("link_own", self.by_tile()))?;
        }
        // Most tiles are joined with the next one first; most other pairs of tiles are then in one
        // set.
        self.link_tiles(1, job)?;
        self.know()?;
        self.link_tiles(u32::MAX, job)?;
        self.know()?;
        self.done = Stage::Link;
        Ok(())
    }

    /// Makes every row's parent its root, and determines which nodes' core rows are in one set.
    fn know(&self) -> Result<()> {
        let (kernels, mut levels) = (&self.kernels, 0..self.nodes.len());
        // SAFETY: `flatten` takes (Dbscan, u32 count): it reads and writes the parents of `count` rows, all of
        // which have one. `know` takes (Dbscan, u32 level), a warp for each node: it writes `known` and `least`
        // of a level, for tiles from `core` and parents, and `near`; else from those of the level below, which
        // were written before.
        unsafe {
            self.run_rows(&kernels.flatten, "flatten")?;
            levels.try_for_each(|level| self.run_level(&kernels.know, "know", level))
        }
    }

    /// Assigns border rows to clusters.
    pub(super) fn attach(&mut self, job: &Job) -> Result<()> {
        assert_eq!(self.done, Stage::Link);
        let kernels = self.kernels.clone();
        // SAFETY: `count_others` takes (Dbscan), a warp for each tile: it writes `offsets` of each.
        unsafe { self.run(&kernels.count_others, ("count_others", self.by_tile())) }?;
        self.list()?;
        // SAFETY: `attach` takes (Dbscan): it reads the slots that `list` lists, the boxes and what is known of
        // nodes, and writes `firsts` of rows below `count`.
        unsafe { self.stage(&kernels.attach, None, job) }?;
        // SAFETY: `finish` takes (Dbscan), a warp for each tile: it writes `firsts` and `is_core` of its rows,
        // whose parents are roots since `know`.
        unsafe { self.run(&kernels.finish, ("finish", self.by_tile())) }
    }

    /// Whether each row is core, and the first row of its cluster.
    pub(super) fn found(&self, gpu: &Gpu, job: &Job) -> Result<(Vec<bool>, Vec<u32>)> {
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

    /// Lists the rows that tiles have counted.
    fn list(&self) -> Result<()> {
        let (kernels, sections) = (&self.kernels, self.nodes[0].div_ceil(SECTION));
        let DbscanOnDevice { offsets, sections: sums, tile_count, .. } = self.all;
        let (section, count) = (SECTION as u32, sections as u32);
        // The total of all sections goes behind the last one.
        let last = sums + u64::from(count) * 4;
        // SAFETY: `add_up` takes (u32* counts, u32 total, u32 together, u32* sums): first a block for each
        // section adds up its offsets of all tiles, which the launch before has written, and writes one of
        // `sections` sums; then one block adds up these, and writes what `sections` has one more u32 for.
        // `list_others` takes (Dbscan), a warp for each tile: it writes as many slots of the list as tiles have
        // counted, which is no more than all slots.
        unsafe {
            self.launch(&kernels.add_up, ("add_up", config(sections, 256, 0)), |launch, _| {
                launch.arg(&offsets).arg(&tile_count).arg(&section).arg(&sums);
            })?;
            self.launch(&kernels.add_up, ("add_up", config(1, 1024, 0)), |launch, _| {
                launch.arg(&sums).arg(&count).arg(&count).arg(&last);
            })?;
            self.run(&kernels.list_others, ("list_others", self.by_tile()))
        }
    }

    fn link_tiles(&mut self, next: u32, job: &Job) -> Result<()> {
        let kernels = self.kernels.clone();
        let parts = match kernels.spec.is_unrolled() {
            false if next == 1 => 1,
            _ => parts(&kernels, self.nodes[0]),
        };
        // SAFETY: `link_tiles` takes (Dbscan, u32 next, u32 parts): its items are `parts` of each tile, for which
        // `new` gave `cursors` room; it reads tiles, boxes and what is known of nodes, and joins core rows, all
        // of which have parents. Where `next` is 1 these nodes are tiles, of which `link_own` has written what is
        // known; before the next launch `know` writes it for all levels.
        unsafe { self.stage(&kernels.link_tiles, Some((next, parts as u32)), job) }
    }

    /// Launches a stage until it has no items left. `more` are the kernel's arguments after the rows.
    ///
    /// # Safety
    /// That of [`launch`](Self::launch), for a kernel that takes `Dbscan` and two u32, or `Dbscan` alone
    /// where there are no `more`.
    unsafe fn stage(&mut self, staged: &Staged, more: Option<(u32, u32)>, job: &Job) -> Result<()> {
        let clear = || failed("cuMemsetD8Async");
        self.stream.memset_zeros(self.cursors.slice_mut()).map_err(clear())?;
        let grid = config(staged.blocks.min(8 * self.nodes[0]), STAGED_THREADS, 0);
        loop {
            job.check()?;
            // The first two words: the next item, and whether items are left.
            let mut state = self.progress.slice_mut().slice_mut(..8);
            self.stream.memset_zeros(&mut state).map_err(clear())?;
            // SAFETY: the caller's. `cursors` and what is next are zero at the beginning, and the grid has the
            // threads that the kernel was compiled for.
            unsafe {
                self.launch(&staged.function, (staged.name, grid), |launch, all| {
                    launch.arg(all);
                    if let Some((first, second)) = &more {
                        launch.arg(first).arg(second);
                    }
                })
            }?;
            if self.progress()?.unfinished == 0 {
                return Ok(());
            }
        }
    }

    /// A grid of one warp per tile.
    pub(super) fn by_tile(&self) -> LaunchConfig {
        config(self.nodes[0].div_ceil(4), 128, 0)
    }

    /// Launches a kernel with one warp per node of a level.
    ///
    /// # Safety
    /// That of [`launch`](Self::launch), for a kernel that takes `Dbscan` and the level.
    pub(super) unsafe fn run_level(
        &self,
        function: &CudaFunction,
        name: &'static str,
        level: usize,
    ) -> Result<()> {
        let (grid, level) = (config(self.nodes[level].div_ceil(4), 128, 0), level as u32);
        // SAFETY: the caller's; there is such a level.
        unsafe {
            self.launch(function, (name, grid), |launch, all| {
                launch.arg(all).arg(&level);
            })
        }
    }

    /// A grid of one thread per row.
    ///
    /// # Safety
    /// That of [`launch`](Self::launch), for a kernel that takes `Dbscan` and the number of rows.
    unsafe fn run_rows(&self, function: &CudaFunction, name: &'static str) -> Result<()> {
        let (grid, count) = (config(self.count.div_ceil(256), 256, 0), self.count as u32);
        // SAFETY: the caller's; `count` is the number of rows.
        unsafe {
            self.launch(function, (name, grid), |launch, all| {
                launch.arg(all).arg(&count);
            })
        }
    }

    /// # Safety
    /// That of [`launch`](Self::launch), for a kernel that takes `Dbscan` alone.
    pub(super) unsafe fn run(
        &self,
        function: &CudaFunction,
        grid: (&'static str, LaunchConfig),
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe {
            self.launch(function, grid, |launch, all| {
                launch.arg(all);
            })
        }
    }

    /// Launches a kernel with the arguments that `add` gives it.
    ///
    /// # Safety
    /// - `function` is one of this workspace's kernels, and declares the parameters that `add` gives it, in
    ///   this order and of these types; the grid has the blocks and threads that it asks for at its head.
    /// - Addresses beside those in [`DbscanOnDevice`] are of memory in the sizes that the kernel touches, different
    ///   ones for what it writes. It stays allocated until the kernel has run, or is freed in the order of this
    ///   stream, and nothing but this stream uses it until then.
    /// - What the kernel reads has been written, by what was launched on this stream before.
    pub(super) unsafe fn launch<'a>(
        &'a self,
        function: &'a CudaFunction,
        (name, grid): (&'static str, LaunchConfig),
        add: impl FnOnce(&mut LaunchArgs<'a>, &'a DbscanOnDevice),
    ) -> Result<()> {
        let mut launch = self.stream.launch_builder(function);
        add(&mut launch, &self.all);
        // SAFETY: arguments, grid and order are as the caller says. The struct's buffers live as long as this
        // workspace, in the sizes that `new` gives them, and are used on this stream only; kernels touch
        // tiles, nodes, slots and rows below the counts in the struct, and were compiled for its rows.
        unsafe { launch.launch(grid) }.map_err(failed(name))?;
        Ok(())
    }
}

/// Values that are sent to the device.
pub(super) struct Sending<'a> {
    pub(super) stream: &'a Arc<CudaStream>,
    pub(super) memory: &'a Arc<Memory>,
    pub(super) kept: Vec<Buffer>,
}

impl Sending<'_> {
    pub(super) fn values<T: DeviceRepr>(&mut self, values: &[T]) -> Result<u64> {
        let mut buffer = self.memory.allocate(self.stream, size_of_val(values))?;
        sys::write(self.stream, buffer.slice_mut(), values)?;
        let place = address(self.stream, &buffer);
        self.kept.push(buffer);
        Ok(place)
    }
}
