//! Every kernel launch of DBSCAN, and the memory that they share.
//!
//! Kernels get the buffers of a [`Workspace`] as [`Dbscan`]; they run in the order of one stream. Stages
//! that take long are launched again and again: each launch ends in time and records how far it is.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaStream, DeviceRepr, LaunchArgs, LaunchConfig, PushKernelArg,
};

use super::kernels::{Kernels, SECTION, SORTED_KEYS, SPLITTERS, STAGED_THREADS, Staged, TILE};
use super::order::Order;
use super::structs::{Dbscan, Keys, LEVELS, Products, Progress, RowDirection, Weight};
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{address, config, launch_seconds};
use crate::device::cuda::driver::memory::{Buffer, Memory};
use crate::device::cuda::driver::sys::{self, failed};
use crate::error::Result;
use crate::job::Job;
use crate::metric::power_of_two_near_inverse;

/// Bytes of a strip of a row; see `kernels/dbscan/products.cuh`.
const STRIP: usize = 64;

/// Tiles that are visited together by all warps, in many dimensions; and into how many such parts all of them are cut at
/// most.
const TILES_OF_PART: usize = 256;
const MOST_PARTS: usize = 64;

/// Digits of keys that are sorted at a time.
const DIGITS: usize = 256;

/// Rows and what is compared with them, to be sent to the device.
pub(super) struct Shape<'a> {
    /// The rows, one after the other, and how many.
    pub(super) rows: Buffer,
    pub(super) count: usize,
    /// Elements of a row as the device counts them: bits are words of 32.
    pub(super) dim: usize,
    /// Bytes of an element.
    pub(super) scalar: usize,
    pub(super) directions: &'a [RowDirection],
    /// For each row, or none if all weigh 1.
    pub(super) weights: &'a [Weight],
    pub(super) enough: Weight,
    pub(super) ends: &'a [usize],
    pub(super) order: &'a Order,
    pub(super) bounds: Bounds,
}

/// What sums and bounds on them are compared with; see `kernels/dbscan/rows.cuh`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    pub(super) limit: f64,
    pub(super) sure: f64,
    pub(super) may: f64,
    pub(super) beyond: f32,
    pub(super) inside: f32,
    /// Of the squared distance of rows, or of their unit vectors.
    pub(super) squares: (f64, f64),
}

/// Rows on a device, with all buffers that DBSCAN needs.
pub(super) struct Workspace {
    kernels: Arc<Kernels>,
    stream: Arc<CudaStream>,
    all: Dbscan,
    count: usize,
    /// Nodes of each level.
    nodes: Vec<usize>,
    progress: Buffer,
    cursors: Buffer,
    firsts: Buffer,
    is_core: Buffer,
    /// The memory behind the other addresses.
    _kept: Vec<Buffer>,
}

impl Workspace {
    /// Memory for rows, whose arrival has already been waited for.
    ///
    /// In one piece: it is a list of what there is, each in its size.
    pub(super) fn new(
        kernels: Arc<Kernels>,
        stream: &Arc<CudaStream>,
        memory: &Arc<Memory>,
        shape: Shape<'_>,
    ) -> Result<Self> {
        let Shape { rows, count, dim, scalar, directions, weights, enough, ends, order, bounds } =
            shape;
        let first_tiles = first_tiles(ends);
        let tiles = first_tiles[ends.len()] as usize;
        let (slots, coordinates) = (tiles * TILE, kernels.spec.coordinates());
        let chunks = dim.div_ceil(kernels.spec.width());
        let is_filtered = kernels.spec.is_filtered();
        let strips = if is_filtered { kernels.spec.strips(dim) } else { 0 };
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
        let mut all = Dbscan {
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
            products: Products {
                strips: place(slots * strips * STRIP)?,
                rounded: place(if is_filtered { slots * 16 } else { 0 })?,
                most: place(if is_filtered { tiles * 8 } else { 0 })?,
                ..products(order, bounds.squares, strips)
            },
            dim: dim as u32,
            chunk_count: chunks as u32,
            tile_count: tiles as u32,
            group_count: ends.len() as u32,
            cycles: (launch_seconds() * kernels.clock) as u64,
            node_starts,
            box_starts,
            ..Dbscan::default()
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
        // Items are parts of tiles, in 64 stripes, or rows, at least 8 but where there are few for each warp; or
        // two for each warp.
        let warps = |staged: &Staged| staged.blocks * STAGED_THREADS / 32;
        let staged = [&kernels.count_near, &kernels.link_tiles, &kernels.attach];
        let most = staged.map(warps).into_iter().max().unwrap_or(0);
        let items = parts(&kernels, tiles).max(4) * tiles.next_multiple_of(64) + 2 * most;
        let (progress, cursors) = (allocate(size_of::<Progress>())?, allocate(items * 4)?);
        let (firsts, is_core) = (allocate(count * 4)?, allocate(count)?);
        all.progress = address(stream, &progress);
        all.cursors = address(stream, &cursors);
        (all.firsts, all.is_core) = (address(stream, &firsts), address(stream, &is_core));
        let stream = stream.clone();
        let _kept = kept;
        let mut workspace =
            Self { kernels, stream, all, count, nodes, progress, cursors, firsts, is_core, _kept };
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

    /// Orders rows and puts them into tiles, with boxes over them.
    pub(super) fn order(&mut self, memory: &Arc<Memory>, order: &Order) -> Result<()> {
        assert_eq!(order.splitters.len(), self.kernels.spec.coordinates() * SPLITTERS);
        let (count, blocks) = (self.count, self.count.div_ceil(SORTED_KEYS));
        let allocate = |bytes: usize| memory.allocate(&self.stream, bytes);
        let mut sort = Sort {
            keys: [allocate(count * 4)?, allocate(count * 4)?],
            rows: [allocate(count * 4)?, allocate(count * 4)?],
            counts: allocate(DIGITS * blocks * 4)?,
            sums: allocate(DIGITS * 4)?,
        };
        let mut send = Sending { stream: &self.stream, memory, kept: Vec::new() };
        let how =
            Keys { splitters: send.values(&order.splitters)?, bits: send.values(&order.bits)? };
        let _kept = send.kept;
        let (each, rows) = (config(count.div_ceil(256), 256, 0), count as u32);
        self.launch(&self.kernels.keys, ("keys", each), |launch, all| {
            let [keys, _] = &mut sort.keys;
            let [numbers, _] = &mut sort.rows;
            launch.arg(all).arg(&how).arg(keys.slice_mut()).arg(numbers.slice_mut()).arg(&rows);
        })?;
        self.sort(&mut sort, 32)?;
        let groups = self.all.group_count;
        if groups > 1 {
            self.launch(&self.kernels.groups_of, ("groups_of", each), |launch, all| {
                let ([keys, _], [numbers, _]) = (&mut sort.keys, &sort.rows);
                launch.arg(all).arg(numbers.slice()).arg(keys.slice_mut()).arg(&rows);
            })?;
            self.sort(&mut sort, u32::BITS - (groups - 1).leading_zeros())?;
        }
        let [numbers, _] = sort.rows;
        self.all.sorted = address(&self.stream, &numbers);
        let slots = self.nodes[0] * TILE;
        let kernels = self.kernels.clone();
        self.run(&kernels.fill_tiles, ("fill_tiles", config(slots.div_ceil(128), 128, 0)))?;
        if kernels.spec.is_filtered() {
            self.run(&kernels.round_tiles, ("round_tiles", config(self.nodes[0], 256, 0)))?;
        }
        self.run(&kernels.bound_tiles, ("bound_tiles", self.by_tile()))?;
        for level in 1..self.nodes.len() {
            self.run_level(&kernels.bound_nodes, "bound_nodes", level)?;
        }
        // What is sorted is freed after the kernels that read it: they are in the same stream.
        self.all.sorted = 0;
        Ok(())
    }

    /// Sorts by this many bits of the keys, the lowest.
    fn sort(&self, sort: &mut Sort, bits: u32) -> Result<()> {
        let blocks = self.count.div_ceil(SORTED_KEYS);
        let (count, in_digit) = (self.count as u32, blocks as u32);
        let in_all = in_digit * DIGITS as u32;
        let all = config(blocks, 256, 0);
        let kernels = &self.kernels;
        for shift in (0..bits).step_by(8) {
            let Sort { keys: [keys, keys_to], rows: [rows, rows_to], counts, sums } = sort;
            self.launch(&kernels.count_digits, ("count_digits", all), |launch, _| {
                launch.arg(keys.slice()).arg(&count).arg(&shift).arg(counts.slice_mut());
            })?;
            self.launch(&kernels.add_up, ("add_up", config(DIGITS, 256, 0)), |launch, _| {
                launch.arg(counts.slice_mut()).arg(&in_all).arg(&in_digit).arg(sums.slice_mut());
            })?;
            self.launch(&kernels.move_keys, ("move_keys", all), |launch, _| {
                launch.arg(keys.slice()).arg(rows.slice()).arg(&count).arg(&shift);
                launch.arg(counts.slice()).arg(sums.slice());
                launch.arg(keys_to.slice_mut()).arg(rows_to.slice_mut());
            })?;
            sort.keys.swap(0, 1);
            sort.rows.swap(0, 1);
        }
        Ok(())
    }

    /// Finds the core rows.
    pub(super) fn count(&mut self, job: &Job) -> Result<()> {
        let kernels = self.kernels.clone();
        self.stage(&kernels.count_own, None, job)?;
        self.list()?;
        self.stage(&kernels.count_near, None, job)
    }

    /// Joins core rows within eps of each other.
    pub(super) fn link(&mut self, job: &Job) -> Result<()> {
        let kernels = self.kernels.clone();
        self.run_rows(&kernels.alone, "alone")?;
        self.run(&kernels.link_own, ("link_own", self.by_tile()))?;
        // Most tiles are joined with the next one: then most others are joined already.
        self.link_tiles(1, job)?;
        self.know()?;
        self.link_tiles(u32::MAX, job)?;
        self.know()
    }

    /// Makes every row's parent its root, and finds out which nodes' core rows are joined.
    fn know(&self) -> Result<()> {
        self.run_rows(&self.kernels.flatten, "flatten")?;
        let mut levels = 0..self.nodes.len();
        levels.try_for_each(|level| self.run_level(&self.kernels.know, "know", level))
    }

    /// Gives rows that are not core to clusters.
    pub(super) fn attach(&mut self, job: &Job) -> Result<()> {
        let kernels = self.kernels.clone();
        self.run(&kernels.count_others, ("count_others", self.by_tile()))?;
        self.list()?;
        self.stage(&kernels.attach, None, job)?;
        self.run(&kernels.finish, ("finish", self.by_tile()))
    }

    /// Whether each row is core, and the first row of its cluster.
    pub(super) fn found(&self, gpu: &Gpu, job: &Job) -> Result<(Vec<bool>, Vec<u32>)> {
        let (stream, count, from) = (&self.stream, self.count, &gpu.downloader);
        let core: Vec<u8> = from.read(stream, self.is_core.slice(), count, job)?;
        let firsts = from.read(stream, self.firsts.slice(), count, job)?;
        Ok((core.iter().map(|core| *core != 0).collect(), firsts))
    }

    /// What has been done.
    pub(super) fn progress(&self) -> Result<Progress> {
        let read = sys::read(&self.stream, self.progress.slice(), 1);
        Ok(read.map_err(failed("cuMemcpyDtoHAsync"))?[0])
    }

    /// Lists the rows that tiles have counted.
    fn list(&self) -> Result<()> {
        let (kernels, sections) = (&self.kernels, self.nodes[0].div_ceil(SECTION));
        let Dbscan { offsets, sections: sums, tile_count, .. } = self.all;
        let (section, count) = (SECTION as u32, sections as u32);
        self.launch(&kernels.add_up, ("add_up", config(sections, 256, 0)), |launch, _| {
            launch.arg(&offsets).arg(&tile_count).arg(&section).arg(&sums);
        })?;
        // The sum of all sections goes after the last one.
        let last = sums + u64::from(count) * 4;
        self.launch(&kernels.add_up, ("add_up", config(1, 1024, 0)), |launch, _| {
            launch.arg(&sums).arg(&count).arg(&count).arg(&last);
        })?;
        self.run(&kernels.list_others, ("list_others", self.by_tile()))
    }

    fn link_tiles(&mut self, next: u32, job: &Job) -> Result<()> {
        let kernels = self.kernels.clone();
        let parts = match kernels.spec.is_unrolled() {
            false if next == 1 => 1,
            _ => parts(&kernels, self.nodes[0]),
        };
        self.stage(&kernels.link_tiles, Some((next, parts as u32)), job)
    }

    /// Launches a stage until it has no items left. `more` are the kernel's arguments after the rows.
    fn stage(&mut self, staged: &Staged, more: Option<(u32, u32)>, job: &Job) -> Result<()> {
        let clear = || failed("cuMemsetD8Async");
        self.stream.memset_zeros(self.cursors.slice_mut()).map_err(clear())?;
        let grid = config(staged.blocks.min(8 * self.nodes[0]), STAGED_THREADS, 0);
        loop {
            job.check()?;
            // What is next, and whether something is left.
            let mut state = self.progress.slice_mut().slice_mut(..8);
            self.stream.memset_zeros(&mut state).map_err(clear())?;
            self.launch(&staged.function, (staged.name, grid), |launch, all| {
                launch.arg(all);
                if let Some((first, second)) = &more {
                    launch.arg(first).arg(second);
                }
            })?;
            if self.progress()?.unfinished == 0 {
                return Ok(());
            }
        }
    }

    /// A warp for each tile.
    fn by_tile(&self) -> LaunchConfig {
        config(self.nodes[0].div_ceil(4), 128, 0)
    }

    /// A warp for each node of a level.
    fn run_level(&self, function: &CudaFunction, name: &'static str, level: usize) -> Result<()> {
        let (grid, level) = (config(self.nodes[level].div_ceil(4), 128, 0), level as u32);
        self.launch(function, (name, grid), |launch, all| {
            launch.arg(all).arg(&level);
        })
    }

    /// A thread for each row.
    fn run_rows(&self, function: &CudaFunction, name: &'static str) -> Result<()> {
        let (grid, count) = (config(self.count.div_ceil(256), 256, 0), self.count as u32);
        self.launch(function, (name, grid), |launch, all| {
            launch.arg(all).arg(&count);
        })
    }

    fn run(&self, function: &CudaFunction, grid: (&'static str, LaunchConfig)) -> Result<()> {
        self.launch(function, grid, |launch, all| {
            launch.arg(all);
        })
    }

    /// Launches a kernel with the arguments that `add` gives it.
    fn launch<'a>(
        &'a self,
        function: &'a CudaFunction,
        (name, grid): (&'static str, LaunchConfig),
        add: impl FnOnce(&mut LaunchArgs<'a>, &'a Dbscan),
    ) -> Result<()> {
        let mut launch = self.stream.launch_builder(function);
        add(&mut launch, &self.all);
        // SAFETY: the struct's buffers live as long as this workspace, in the sizes that `new` gives
        // them, and are used on this stream only; kernels touch tiles, nodes, slots and rows below the
        // counts in the struct, and were compiled for its rows. What is sorted has room for all rows,
        // and counts for all digits of all blocks. Arguments are those that the kernel declares.
        unsafe { launch.launch(grid) }.map_err(failed(name))?;
        Ok(())
    }
}

/// Into how many parts the work of so many tiles is cut that are joined with all next ones. Few tiles are: there should
/// be some items for each warp. In many dimensions, so many, too, that a part of all tiles stays in the cache.
fn parts(kernels: &Kernels, tiles: usize) -> usize {
    let blocks = kernels.link_tiles.blocks;
    if kernels.spec.is_unrolled() {
        return if tiles < 8 * blocks { 4 } else { 1 };
    }
    let few = 2 * blocks * STAGED_THREADS / 32 / tiles;
    few.max(tiles.div_ceil(TILES_OF_PART)).clamp(1, MOST_PARTS)
}

/// What products compare rows by, but for where they are: in units of the widest dimension's spread.
fn products(order: &Order, (below, up_to): (f64, f64), strips: usize) -> Products {
    let unit = power_of_two_near_inverse(order.spread);
    let surely = below.max(0.0).sqrt() * unit * (1.0 - 1e-6);
    let maybe = up_to.max(0.0).sqrt() * unit * (1.0 + 1e-6);
    // To the nearest f32, which the factors make up for, but not where there are fewer bits, or none: then nothing is
    // within eps for certain.
    let is_normal = below >= 0.0 && surely >= f64::from(f32::MIN_POSITIVE);
    Products {
        unit,
        surely: if is_normal { surely as f32 } else { -1.0 },
        maybe: (maybe as f32).max(f32::MIN_POSITIVE),
        count: strips as u32,
        ..Products::default()
    }
}

/// Buffers for sorting: keys and rows, and where those sorted by another digit go.
struct Sort {
    keys: [Buffer; 2],
    rows: [Buffer; 2],
    /// For each digit, how many keys each block has; and their sums.
    counts: Buffer,
    sums: Buffer,
}

/// Values that are sent to the device.
struct Sending<'a> {
    stream: &'a Arc<CudaStream>,
    memory: &'a Arc<Memory>,
    kept: Vec<Buffer>,
}

impl Sending<'_> {
    fn values<T: DeviceRepr>(&mut self, values: &[T]) -> Result<u64> {
        let mut buffer = self.memory.allocate(self.stream, size_of_val(values))?;
        sys::write(self.stream, buffer.slice_mut(), values)?;
        let place = address(self.stream, &buffer);
        self.kept.push(buffer);
        Ok(place)
    }
}

/// The first tile of each group, and the number of tiles: groups have tiles of their own.
pub(super) fn first_tiles(ends: &[usize]) -> Vec<u32> {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let tiles = starts.zip(ends).map(|(start, end)| (end - start).div_ceil(TILE) as u32);
    let mut first = vec![0];
    for tiles in tiles {
        first.push(first[first.len() - 1] + tiles);
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_less_than_a_normal_number_is_never_certain() {
        let of = |spread, squares| {
            let order = Order {
                dims: Vec::new(),
                splitters: Vec::new(),
                bits: Vec::new(),
                centre: Vec::new(),
                spread,
            };
            let products = products(&order, squares, 2);
            (products.surely, products.maybe)
        };
        let (surely, maybe) = of(4.0, (64.0, 64.0));
        assert!((1.9..2.0).contains(&surely) && (2.0..2.1).contains(&maybe));
        // eps in units is 100.6 times the least f32, which the nearest f32 exceeds; and less than any f32.
        let eps: f64 = 100.6 * 2f64.powi(-22);
        assert_eq!(of(2f64.powi(127), (eps * eps, eps * eps)), (-1.0, f32::MIN_POSITIVE));
        assert_eq!(of(2f64.powi(500), (1e-300, 1e-300)), (-1.0, f32::MIN_POSITIVE));
        assert_eq!(of(1.0, (-1e-9, 1e-9)).0, -1.0);
    }

    #[test]
    fn groups_have_tiles_of_their_own() {
        assert_eq!(first_tiles(&[0, 1, 65, 65, 130]), [0, 0, 1, 2, 2, 4]);
        assert_eq!(first_tiles(&[64]), [0, 1]);
    }
}
