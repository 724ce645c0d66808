//! Every kernel launch of the filter: one function per kernel, which checks the sizes that the kernel
//! relies on and picks its grid.
//!
//! Buffers are borrowed for the call, as in `search/launch.rs`.
#![allow(unsafe_code)]

use std::sync::{Arc, LazyLock};

use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, PushKernelArg};

use super::super::launch::{Lists, Pass};
use super::super::passes::PANEL;
use super::super::spec::{definitions, entry_bytes, real_bytes, scalar_bytes};
use super::buffers::{BaseBuffers, QueryBuffers, Scratch};
use super::form::{BY_LANES, Form, GATHERED_BYTES, STATIC_BYTES, pitch, room};
use crate::device::cuda::driver::compile::Program;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{
    Rate, address, allow_shared, check_size, config, function,
};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::modules::Once;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// Constants that `kernels/filter` shares with this folder.
const CONSTANTS: [(&str, usize); 2] = [("PANEL", PANEL), ("RUN", super::super::spec::RUN)];

/// Bins of norms. See `kernels/filter/pack.cuh`.
pub(super) const BINS: usize = 1 << 14;

/// Words of a filter's state, of which the first says whether it has been given up. See
/// `kernels/filter/thresholds.cuh`.
pub(super) const STATE_WORDS: usize = 3;

/// The filter is given up if one query in so many is crowded.
const MOST_CROWDED: u32 = 16;

/// The most hits of a row that a thread has room for.
const MOST_OF_A_THREAD: usize = 512;

/// Threads of most kernels.
const THREADS: usize = 256;

/// Products of halves per cycle of a multiprocessor at first.
const PER_CYCLE: f64 = 1024.0;

/// The kernels of the filter for a kind of rows, a metric and a form, loaded on a device.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) form: Form,
    pub(super) kind: ElementKind,
    multiprocessors: usize,
    centre: CudaFunction,
    norms: CudaFunction,
    choose_scale: CudaFunction,
    pack_base: CudaFunction,
    pack_queries: CudaFunction,
    set_thresholds: CudaFunction,
    filter: CudaFunction,
    judge: CudaFunction,
    merge_hits_16: CudaFunction,
    merge_hits_32: CudaFunction,
    merge_hits_by_block: CudaFunction,
    /// Pairs × halves per second.
    rate: Arc<Rate>,
}

/// How rows become halves. The same struct as in `kernels/filter/pack.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Pack {
    pub(super) rows: u32,
    pub(super) dim: u32,
    pub(super) panels: u32,
    pub(super) stride: u32,
    pub(super) pitch: u32,
    pub(super) steps: u32,
    pub(super) log: u32,
    pub(super) tile: u32,
}

// SAFETY: a C struct of integers, laid out as the kernels declare it.
unsafe impl DeviceRepr for Pack {}

/// What a base is packed with. The same struct as in `kernels/filter/pack.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Packing {
    scale: f64,
    centre_norm: f64,
    norm: u64,
    lost: u64,
    /// The largest halves of a test, as the bits of an f64.
    pub(super) test: u64,
    raw_norm: u64,
    last_bin: u32,
    pub(super) is_finite: u32,
}

// SAFETY: a C struct of numbers, laid out as the kernels declare it; every pattern of bits is a value.
unsafe impl DeviceRepr for Packing {}

/// What a threshold is reckoned from. See `Test` in `kernels/filter/thresholds.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Test {
    queries: u32,
    dim: u32,
    steps: u32,
    has_half_sums: u32,
}

// SAFETY: a C struct of integers, laid out as the kernels declare it.
unsafe impl DeviceRepr for Test {}

/// One launch of the filter. The same struct as in `kernels/filter/found.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Filter {
    tiles: u64,
    queries: u64,
    thresholds: u64,
    hits: u64,
    counts: u64,
    scratch: u64,
    given_up: u64,
    hits_pitch: u64,
    room: u32,
    scratch_room: u32,
    query_rows: u32,
    query_blocks: u32,
    splits: u32,
    begin: u32,
    end: u32,
    steps: u32,
    scratch_slots: u32,
    padding: u32,
}

// SAFETY: a C struct of integers, laid out as the kernels declare it.
unsafe impl DeviceRepr for Filter {}

/// A pass whose pairs were filtered. The same struct as in `kernels/filter/exact.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Filtered {
    queries: u64,
    base: u64,
    state: u64,
    entries: u64,
    worst: u64,
    reach: u64,
    counts: u64,
    crowded: u64,
    crowded_count: u64,
    pitch: u32,
    vectors: u32,
    room: u32,
    padding: u32,
}

// SAFETY: a C struct of integers, laid out as the kernels declare it.
unsafe impl DeviceRepr for Filtered {}

/// The structs of the kernels.
const _: () = assert!(size_of::<Packing>() == 56 && size_of::<Pack>() == 32);
const _: () = assert!(size_of::<Filter>() == 104 && size_of::<Filtered>() == 88);

impl Kernels {
    /// The kernels for some rows, compiled and loaded by the first caller.
    pub(super) fn get(
        gpu: &Gpu,
        kind: ElementKind,
        metric: Metric,
        form: Form,
    ) -> Result<Arc<Self>> {
        type Key = (usize, ElementKind, Metric, Form);
        static LOADED: LazyLock<Once<Key, Kernels>> = LazyLock::new(Once::default);
        LOADED.get((gpu.ordinal, kind, metric, form), || Self::load(gpu, kind, metric, form))
    }

    fn load(gpu: &Gpu, kind: ElementKind, metric: Metric, form: Form) -> Result<Self> {
        let [element, metric] = definitions(kind, metric);
        let defines = [element, metric, "DIM=0".to_string()];
        let module = gpu.load(&Program::new("filter.cu", &defines, &CONSTANTS))?;
        let products = gpu.load(&form.program())?;
        let kernels = Self {
            form,
            kind,
            multiprocessors: gpu.limits.multiprocessors,
            centre: function(&module, "centre")?,
            norms: function(&module, "norms")?,
            choose_scale: function(&module, "choose_scale")?,
            pack_base: function(&module, "pack_base")?,
            pack_queries: function(&module, "pack_queries")?,
            set_thresholds: function(&module, "set_thresholds")?,
            filter: function(&products, "filter")?,
            judge: function(&module, "judge")?,
            merge_hits_16: function(&module, "merge_hits_16")?,
            merge_hits_32: function(&module, "merge_hits_32")?,
            merge_hits_by_block: function(&module, "merge_hits_by_block")?,
            rate: Arc::new(gpu.limits.rate(PER_CYCLE)),
        };
        allow_shared(&kernels.filter, form.shared())?;
        allow_shared(&kernels.merge_hits_by_block, gpu.limits.shared - STATIC_BYTES)?;
        Ok(kernels)
    }

    /// Pairs × halves that the filter compares per second.
    pub(super) fn rate(&self) -> &Arc<Rate> {
        &self.rate
    }

    /// Multiprocessors whose threads have room for hits: more than there are, because some numbers are
    /// not used.
    fn scratch_slots(&self) -> usize {
        self.multiprocessors + self.multiprocessors / 4
    }

    /// Hits of a row that a thread has room for.
    fn scratch_room(&self, lists: &Lists) -> usize {
        (room(self.kind, lists.k, lists.slots) / 4).next_multiple_of(8).min(MOST_OF_A_THREAD)
    }

    /// Bytes for the hits of all threads.
    pub(super) fn scratch_bytes(&self, lists: &Lists) -> usize {
        self.scratch_slots() * self.form.comparing() * 2 * self.scratch_room(lists) * 4
    }

    /// Packs a base, with bins of its rows' norms and their counts, which are zeros at first.
    pub(super) fn pack_base(
        &self,
        stream: &Arc<CudaStream>,
        panels: &Buffer,
        (bins, counts): (&Buffer, &Buffer),
        packed: &BaseBuffers,
        (pack, visits): (&Pack, usize),
    ) -> Result<()> {
        let scalar = scalar_bytes(self.kind);
        let (dim, places) = (pack.dim as usize, visits * PANEL);
        assert!(pack.panels as usize <= visits && places.is_multiple_of(pack.tile as usize));
        assert!(pack.rows <= pack.panels * PANEL as u32 && pack.panels > 0 && dim > 0);
        check_size(panels, pack.panels as usize * PANEL * dim, scalar);
        check_size(bins, places, 2);
        check_size(counts, BINS, 4);
        check_size(&packed.centre, dim, 8);
        check_size(&packed.packing, 1, size_of::<Packing>());
        check_size(&packed.images, places * self.form.columns(), 2);
        check_size(&packed.rows, places * pack.pitch as usize, scalar);
        assert!(pack.pitch as usize <= self.form.columns());
        let mut launch = stream.launch_builder(&self.centre);
        launch.arg(panels.slice()).arg(packed.centre.slice());
        launch.arg(&pack.rows).arg(&pack.dim).arg(&pack.panels);
        // SAFETY: reads whole panels, writes an f64 per dimension; sizes are checked above, as for the
        // launches that follow.
        unsafe { launch.launch(config(dim, 1024, 0)) }.map_err(failed("centre"))?;
        let mut launch = stream.launch_builder(&self.norms);
        launch.arg(panels.slice()).arg(packed.centre.slice()).arg(bins.slice()).arg(counts.slice());
        launch.arg(&pack.rows).arg(&pack.dim).arg(&pack.panels);
        // SAFETY: reads whole panels, writes a bin per place; bins are below `BINS`.
        unsafe { launch.launch(config(pack.panels as usize, PANEL, 0)) }
            .map_err(failed("norms"))?;
        let mut launch = stream.launch_builder(&self.choose_scale);
        launch.arg(counts.slice()).arg(packed.centre.slice()).arg(packed.packing.slice());
        launch.arg(&pack.dim);
        // SAFETY: reads all bins and the centre, writes one struct.
        unsafe { launch.launch(config(1, 1024, 0)) }.map_err(failed("choose_scale"))?;
        let mut launch = stream.launch_builder(&self.pack_base);
        launch.arg(panels.slice()).arg(bins.slice()).arg(packed.centre.slice());
        launch.arg(packed.packing.slice()).arg(packed.images.slice()).arg(packed.rows.slice());
        launch.arg(pack);
        // SAFETY: visits below `panels` read their panel; all write the place of their position, of
        // `columns` halves and `pitch` elements.
        unsafe { launch.launch(config(visits, PANEL, 0)) }.map_err(failed("pack_base"))?;
        Ok(())
    }

    /// Packs queries for a base, and as many rows as fill blocks.
    pub(super) fn pack_queries(
        &self,
        stream: &Arc<CudaStream>,
        panels: &Buffer,
        base: &BaseBuffers,
        packed: &QueryBuffers,
        (pack, places): (&Pack, usize),
    ) -> Result<()> {
        let (scalar, rows, dim) = (scalar_bytes(self.kind), pack.rows as usize, pack.dim as usize);
        assert!(rows <= places && places.is_multiple_of(PANEL) && rows > 0);
        check_size(panels, rows.div_ceil(PANEL) * PANEL * dim, scalar);
        check_size(&base.centre, dim, 8);
        check_size(&packed.images, places * self.form.columns(), 2);
        check_size(&packed.rows, rows * pack.pitch as usize, scalar);
        check_size(&packed.asked, rows, 32);
        check_size(&packed.thresholds, places, 4);
        let mut launch = stream.launch_builder(&self.pack_queries);
        launch.arg(panels.slice()).arg(base.centre.slice()).arg(base.packing.slice());
        launch.arg(packed.images.slice()).arg(packed.rows.slice()).arg(packed.asked.slice());
        launch.arg(packed.thresholds.slice()).arg(pack);
        // SAFETY: only rows below `rows` are read, and written to `rows` and `asked`; all places have
        // `columns` halves and a threshold. Sizes are checked above.
        unsafe { launch.launch(config(places / PANEL, PANEL, 0)) }
            .map_err(failed("pack_queries"))?;
        Ok(())
    }

    /// Sets the thresholds of queries by the reaches of their lists.
    pub(super) fn set_thresholds(
        &self,
        stream: &Arc<CudaStream>,
        (base, queries): (&BaseBuffers, &QueryBuffers),
        lists: &Lists,
        scratch: &Scratch,
        dim: u32,
    ) -> Result<()> {
        self.check(queries, lists, scratch);
        let test = Test {
            queries: lists.queries as u32,
            dim,
            steps: self.form.steps as u32,
            has_half_sums: u32::from(self.form.has_half_sums()),
        };
        let images = if self.form.is_wide() { address(stream, &queries.images) } else { 0 };
        let log = self.form.log();
        let mut launch = stream.launch_builder(&self.set_thresholds);
        launch.arg(lists.reach.slice()).arg(queries.asked.slice()).arg(base.packing.slice());
        launch.arg(queries.thresholds.slice()).arg(lists.counts.slice());
        launch.arg(scratch.state.slice()).arg(&images).arg(&log).arg(&test);
        let grid = config(lists.queries.div_ceil(THREADS), THREADS, 0);
        // SAFETY: `check` holds: an element per query in each, and `columns` halves in images.
        unsafe { launch.launch(grid) }.map_err(failed("set_thresholds"))?;
        Ok(())
    }

    /// Finds the pairs of all queries with the rows of tiles `begin..end` that may be within reach.
    pub(super) fn filter(
        &self,
        stream: &Arc<CudaStream>,
        (base, queries): (&BaseBuffers, &QueryBuffers),
        lists: &Lists,
        scratch: &Scratch,
        (begin, end, k): (usize, usize, usize),
    ) -> Result<()> {
        self.check(queries, lists, scratch);
        assert!(k <= lists.k);
        let (form, columns) = (self.form, self.form.columns());
        assert!(begin < end);
        check_size(&base.images, end * form.tile() * columns, 2);
        check_size(&scratch.hits, self.scratch_bytes(lists), 1);
        let blocks = lists.queries.div_ceil(form.queries());
        check_size(&queries.images, blocks * form.queries() * columns, 2);
        let splits = form.splits(blocks, end - begin, self.multiprocessors);
        let entry = entry_bytes(self.kind);
        let filter = Filter {
            tiles: address(stream, &base.images),
            queries: address(stream, &queries.images),
            thresholds: address(stream, &queries.thresholds),
            hits: address(stream, &lists.entries) + (k * entry) as u64,
            counts: address(stream, &lists.counts),
            scratch: address(stream, &scratch.hits),
            given_up: address(stream, &scratch.state),
            hits_pitch: (lists.slots * entry / 4) as u64,
            room: room(self.kind, k, lists.slots) as u32,
            scratch_room: self.scratch_room(lists) as u32,
            query_rows: lists.queries as u32,
            query_blocks: blocks as u32,
            splits: splits as u32,
            begin: begin as u32,
            end: end as u32,
            steps: form.steps as u32,
            scratch_slots: self.scratch_slots() as u32,
            padding: 0,
        };
        let units = blocks * splits;
        let grid =
            if form.is_wide() { units * form.cluster() } else { units.min(self.multiprocessors) };
        let mut launch = stream.launch_builder(&self.filter);
        launch.arg(&filter);
        // SAFETY: tiles below `end` and whole blocks of queries are there; hits are written below `room`
        // of lists of queries below `query_rows`, whose candidates take as many words, and below
        // `scratch_room` of a thread's own place, which is there for slots below `scratch_slots`. One
        // block runs on a multiprocessor at a time, since its registers or its ring leave no room for
        // another.
        unsafe { launch.launch(config(grid, form.threads(), form.shared())) }
            .map_err(failed("filter"))?;
        Ok(())
    }

    /// Decides whether too many queries are crowded, and gives up the filter if so.
    pub(super) fn judge(
        &self,
        stream: &Arc<CudaStream>,
        lists: &Lists,
        scratch: &Scratch,
        k: usize,
    ) -> Result<()> {
        check_size(&lists.counts, lists.queries, 4);
        check_size(&scratch.state, STATE_WORDS, 4);
        let queries = lists.queries as u32;
        let most_hits = room(self.kind, k, lists.slots) as u32;
        let mut launch = stream.launch_builder(&self.judge);
        launch.arg(lists.counts.slice()).arg(scratch.state.slice()).arg(&queries);
        launch.arg(&most_hits).arg(&MOST_CROWDED);
        let grid = config(lists.queries.div_ceil(THREADS), THREADS, 0);
        // SAFETY: a counter per query; sizes are checked above.
        unsafe { launch.launch(grid) }.map_err(failed("judge"))?;
        Ok(())
    }

    /// Merges the pairs that passed into the lists, unless the filter has been given up.
    pub(super) fn merge_hits(
        &self,
        stream: &Arc<CudaStream>,
        (base, queries): (&BaseBuffers, &QueryBuffers),
        lists: &mut Lists,
        scratch: &Scratch,
        pass: &Pass,
    ) -> Result<()> {
        self.check(queries, lists, scratch);
        let (kind, dim, k) = (self.kind, pass.dim as usize, pass.k as usize);
        let (scalar, pitch) = (scalar_bytes(kind), pitch(kind, dim));
        assert!(pass.queries as usize == lists.queries && pass.dense == 0);
        assert!(k <= lists.k && pass.slots as usize == lists.slots);
        check_size(&base.rows, pass.panels as usize * PANEL * pitch, scalar);
        check_size(&queries.rows, lists.queries * pitch, scalar);
        check_size(&lists.crowded, lists.queries, 4);
        let crowded_count = lists.crowded_count.slice_mut();
        stream.memset_zeros(crowded_count).map_err(failed("cuMemsetD8Async"))?;
        let filtered = Filtered {
            queries: address(stream, &queries.rows),
            base: address(stream, &base.rows),
            state: address(stream, &scratch.state),
            entries: address(stream, &lists.entries),
            worst: address(stream, &lists.worst),
            reach: address(stream, &lists.reach),
            counts: address(stream, &lists.counts),
            crowded: address(stream, &lists.crowded),
            crowded_count: address(stream, &lists.crowded_count),
            pitch: pitch as u32,
            vectors: (dim * scalar).div_ceil(16) as u32,
            room: room(kind, k, lists.slots) as u32,
            padding: 0,
        };
        let (function, grid) = if k > BY_LANES {
            let shared = lists.slots * entry_bytes(kind) + GATHERED_BYTES;
            (&self.merge_hits_by_block, config(lists.queries, THREADS, shared))
        } else if k <= BY_LANES / 2 {
            let grid = config(lists.queries.div_ceil(2 * THREADS / BY_LANES), THREADS, 0);
            (&self.merge_hits_16, grid)
        } else {
            (&self.merge_hits_32, config(lists.queries.div_ceil(THREADS / BY_LANES), THREADS, 0))
        };
        let mut launch = stream.launch_builder(function);
        launch.arg(&filtered).arg(pass);
        // SAFETY: `check` holds. Positions are looked up only below `panels` × PANEL, where rows are; a
        // list and its hits are within its `slots` entries, or in shared memory for as many.
        unsafe { launch.launch(grid) }.map_err(failed("merge_hits"))?;
        Ok(())
    }

    /// Checks the sizes that kernels on lists and thresholds rely on.
    fn check(&self, queries: &QueryBuffers, lists: &Lists, scratch: &Scratch) {
        let all = lists.queries;
        assert!(all > 0 && lists.k >= 1 && lists.slots > lists.k);
        check_size(&lists.entries, all * lists.slots, entry_bytes(self.kind));
        check_size(&lists.worst, all, entry_bytes(self.kind));
        check_size(&lists.reach, all, real_bytes(self.kind));
        check_size(&lists.counts, all, 4);
        check_size(&lists.crowded_count, 1, 4);
        check_size(&queries.asked, all, 32);
        check_size(&queries.thresholds, all, 4);
        check_size(&queries.images, all.next_multiple_of(PANEL) * self.form.columns(), 2);
        check_size(&scratch.state, STATE_WORDS, 4);
    }
}
