//! The kernels of the filter, and the launches of filtered passes. The rules of all launches are in
//! `search/launch.rs`.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use cudarc::driver::{CudaFunction, CudaStream, PushKernelArg};

use super::super::launch_lists::{ListBuffers, Pass};
use super::super::passes::{FIRST_WINDOW, PANEL, WINDOW};
use super::super::spec::{definitions, entry_bytes, real_bytes, scalar_bytes};
use super::buffers::{FilterBuffers, PackedWith, QueryBuffers, Scratch};
use super::form::{
    AHEAD, BY_LANES, Form, GATHERED_BYTES, LONG_BYTES, QUERY_NORM_BYTES, STATIC_BYTES,
    THRESHOLD_BYTES, merging_bytes, pitch, room,
};
use super::launch_bits::BitPacker;
use super::launch_numbers::{NumberPacker, PARTS};
use crate::device::cuda::driver::compile::Program;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{
    Rate, address, allow_shared, check_size, config, function,
};
use crate::device::cuda::driver::modules::Once;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// Constants that `kernels/filter` shares with this folder.
const CONSTANTS: [(&str, usize); 6] = [
    ("AHEAD", AHEAD),
    ("PANEL", PANEL),
    ("PARTS", PARTS),
    ("RUN", super::super::spec::RUN),
    ("FIRST_WINDOW", FIRST_WINDOW),
    ("WINDOW", WINDOW),
];

/// Words of a filter's state, of which the first says whether it has been given up. See
/// `kernels/filter/state.cuh`.
pub(super) const STATE_WORDS: usize = 3;

/// The filter is given up if the hits of more than one query in this many overflow.
const MOST_OVERFLOWED: u32 = 16;

/// The maximum slots for hits of a row in a thread's scratch list.
const MOST_OF_A_THREAD: usize = 512;

/// Threads of most kernels.
const THREADS: usize = 256;

/// The initial rate: fp16 products per cycle of a multiprocessor.
const PER_CYCLE: f64 = 1024.0;

/// The kernels of the filter for a kind of rows, a metric and a form, loaded on a device.
#[derive(Debug)]
pub(super) struct FilterKernels {
    pub(super) form: Form,
    pub(super) kind: ElementKind,
    pub(super) packer: Packer,
    multiprocessors: usize,
    filter: CudaFunction,
    judge: CudaFunction,
    merge_hits_16: CudaFunction,
    merge_hits_32: CudaFunction,
    merge_hits_by_warp: CudaFunction,
    merge_hits_by_block: CudaFunction,
    /// Pairs × fp16 numbers per second.
    pub(super) rate: Arc<Rate>,
}

/// The kernels that pack rows.
#[derive(Debug)]
pub(super) enum Packer {
    Numbers(NumberPacker),
    Bits(BitPacker),
}

/// One launch of the filter. The same struct as in `kernels/filter/unit.cuh`, which documents it.
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
    fewest: u64,
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

/// A filtered pass. The same struct as in `kernels/filter/exact.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Filtered {
    queries: u64,
    base: u64,
    order: u64,
    state: u64,
    entries: u64,
    worst: u64,
    list_thresholds: u64,
    counts: u64,
    overflowed: u64,
    overflowed_count: u64,
    pitch: u32,
    vectors: u32,
    room: u32,
    padding: u32,
}

kernel_struct!(Filter, 112, {
    tiles: 0, queries: 8, thresholds: 16, hits: 24, counts: 32, scratch: 40, given_up: 48,
    fewest: 56, hits_pitch: 64, room: 72, scratch_room: 76, query_rows: 80, query_blocks: 84,
    splits: 88, begin: 92, end: 96, steps: 100, scratch_slots: 104, padding: 108,
});
kernel_struct!(Filtered, 96, {
    queries: 0, base: 8, order: 16, state: 24, entries: 32, worst: 40, list_thresholds: 48,
    counts: 56, overflowed: 64, overflowed_count: 72, pitch: 80, vectors: 84, room: 88, padding: 92,
});

/// The program of all kernels except the filter itself.
fn surroundings(kind: ElementKind, metric: Metric) -> Program {
    let [element, metric] = definitions(kind, metric);
    let file = if kind == ElementKind::Bits { "bit_filter.cu" } else { "filter.cu" };
    Program::new(file, &[element, metric, "DIM=0".to_string()], &CONSTANTS)
}

impl FilterKernels {
    /// The kernels for such rows, compiled and loaded by the first caller.
    pub(super) fn get(
        gpu: &Gpu,
        kind: ElementKind,
        metric: Metric,
        form: Form,
    ) -> Result<Arc<Self>> {
        static LOADED: LazyLock<Once<(usize, ElementKind, Metric, Form), FilterKernels>> =
            LazyLock::new(Once::default);
        LOADED.get((gpu.ordinal, kind, metric, form), || Self::load(gpu, kind, metric, form))
    }

    fn load(gpu: &Gpu, kind: ElementKind, metric: Metric, form: Form) -> Result<Self> {
        let modules = gpu.load_all(&[surroundings(kind, metric), form.program()])?;
        let [module, products] = [&modules[0], &modules[1]];
        let kernels = Self {
            form,
            kind,
            packer: match kind {
                ElementKind::Bits => Packer::Bits(BitPacker::load(module, form)?),
                _ => Packer::Numbers(NumberPacker::load(module, kind, form)?),
            },
            multiprocessors: gpu.limits.multiprocessors,
            filter: function(products, "filter")?,
            judge: function(module, "judge")?,
            merge_hits_16: function(module, "merge_hits_16")?,
            merge_hits_32: function(module, "merge_hits_32")?,
            merge_hits_by_warp: function(module, "merge_hits_by_warp")?,
            merge_hits_by_block: function(module, "merge_hits_by_block")?,
            rate: Arc::new(gpu.limits.rate(PER_CYCLE)),
        };
        allow_shared(&kernels.filter, form.shared())?;
        allow_shared(&kernels.merge_hits_by_block, gpu.limits.shared - STATIC_BYTES)?;
        Ok(kernels)
    }

    /// Multiprocessors with scratch lists: more than exist, as some of their numbers are not used.
    fn scratch_slots(&self) -> usize {
        self.multiprocessors + self.multiprocessors / 4
    }

    /// Slots for hits of a row in a thread's scratch list.
    fn scratch_room(&self, lists: &ListBuffers) -> usize {
        (room(self.kind, lists.k, lists.slots) / 4).next_multiple_of(8).min(MOST_OF_A_THREAD)
    }

    /// Bytes of the scratch lists of all threads.
    pub(super) fn scratch_bytes(&self, lists: &ListBuffers) -> usize {
        self.scratch_slots() * self.form.keeping() * 2 * self.scratch_room(lists) * 4
    }

    /// Finds the pairs of all queries with rows of these tiles that may be within the
    /// thresholds.
    pub(super) fn filter(
        &self,
        stream: &Arc<CudaStream>,
        buffers: FilterBuffers<'_>,
        lists: &ListBuffers,
        tiles: Range<usize>,
        k: usize,
    ) -> Result<()> {
        let FilterBuffers { base, queries, scratch } = buffers;
        let Range { start: begin, end } = tiles;
        self.check(queries, lists, scratch);
        assert!(k <= lists.k);
        let form = self.form;
        assert!(begin < end);
        check_size(&base.tiles, end * form.tile * form.row_bytes(), 1);
        check_size(&scratch.hits, self.scratch_bytes(lists), 1);
        let blocks = lists.queries.div_ceil(form.queries());
        check_size(&queries.tiles, blocks * form.queries() * form.row_bytes(), 1);
        check_size(&queries.thresholds, blocks * form.queries(), THRESHOLD_BYTES);
        let splits = form.splits(blocks, end - begin, self.multiprocessors);
        let entry = entry_bytes(self.kind);
        let filter = Filter {
            tiles: address(stream, &base.tiles),
            queries: address(stream, &queries.tiles),
            thresholds: address(stream, &queries.thresholds),
            hits: address(stream, &lists.entries) + (k * entry) as u64,
            counts: address(stream, &lists.counts),
            scratch: address(stream, &scratch.hits),
            given_up: address(stream, &scratch.state),
            fewest: match &base.with {
                PackedWith::Sorted { fewest, .. } => {
                    check_size(fewest, end, 4);
                    address(stream, fewest)
                }
                PackedWith::Fp16 { .. } => 0,
            },
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
        let grid = (units * form.cluster).min(form.most_blocks(self.multiprocessors));
        let mut launch = stream.launch_builder(&self.filter);
        launch.arg(&filter);
        // SAFETY: tiles below `end` and whole blocks of queries are there; hits are written below `room`
        // of lists of queries below `query_rows`, whose candidates take as many words, and below
        // `scratch_room` of a thread's own place, which is there for slots below `scratch_slots`. Blocks
        // whose threads have such a place run one at a time on a multiprocessor, since their registers or
        // their ring leave no room for another.
        unsafe { launch.launch(config(grid, form.threads(), form.shared())) }
            .map_err(failed("filter"))
            .map(drop)
    }

    /// Gives the filter up if the hits of too many queries overflow.
    pub(super) fn judge(
        &self,
        stream: &Arc<CudaStream>,
        lists: &ListBuffers,
        scratch: &Scratch,
        k: usize,
    ) -> Result<()> {
        check_size(&lists.counts, lists.queries, 4);
        check_size(&scratch.state, STATE_WORDS, 4);
        let queries = lists.queries as u32;
        let most_hits = room(self.kind, k, lists.slots) as u32;
        let mut launch = stream.launch_builder(&self.judge);
        launch.arg(lists.counts.slice()).arg(scratch.state.slice()).arg(&queries);
        launch.arg(&most_hits).arg(&MOST_OVERFLOWED);
        let grid = config(lists.queries.div_ceil(THREADS), THREADS, 0);
        // SAFETY: a counter per query; sizes are checked above.
        unsafe { launch.launch(grid) }.map_err(failed("judge")).map(drop)
    }

    /// Computes the distances of hits and merges them into the lists, unless the filter is given
    /// up.
    pub(super) fn merge_hits(
        &self,
        stream: &Arc<CudaStream>,
        buffers: FilterBuffers<'_>,
        lists: &mut ListBuffers,
        pass: &Pass,
    ) -> Result<()> {
        let FilterBuffers { base, queries, scratch } = buffers;
        self.check(queries, lists, scratch);
        let (kind, dim, k) = (self.kind, pass.dim as usize, pass.k as usize);
        let (scalar, pitch) = (scalar_bytes(kind), pitch(kind, dim));
        assert!(pass.queries as usize == lists.queries && pass.dense == 0);
        assert!(k <= lists.k && pass.slots as usize == lists.slots);
        check_size(&base.rows, pass.panels as usize * PANEL * pitch, scalar);
        check_size(&queries.rows, lists.queries * pitch, scalar);
        check_size(&lists.overflowed, lists.queries, 4);
        let overflowed_count = lists.overflowed_count.slice_mut();
        stream.memset_zeros(overflowed_count).map_err(failed("cuMemsetD8Async"))?;
        let filtered = Filtered {
            queries: address(stream, &queries.rows),
            base: address(stream, &base.rows),
            order: match &base.with {
                PackedWith::Sorted { order, .. } => {
                    check_size(order, pass.panels as usize * PANEL, 4);
                    address(stream, order)
                }
                PackedWith::Fp16 { .. } => 0,
            },
            state: address(stream, &scratch.state),
            entries: address(stream, &lists.entries),
            worst: address(stream, &lists.worst),
            list_thresholds: address(stream, &lists.thresholds),
            counts: address(stream, &lists.counts),
            overflowed: address(stream, &lists.overflowed),
            overflowed_count: address(stream, &lists.overflowed_count),
            pitch: pitch as u32,
            vectors: (dim * scalar).div_ceil(16) as u32,
            room: room(kind, k, lists.slots) as u32,
            padding: 0,
        };
        let (function, grid) = if k > BY_LANES {
            let shared = merging_bytes(kind, lists.slots);
            (&self.merge_hits_by_block, config(lists.queries, THREADS, shared))
        } else if dim * scalar >= LONG_BYTES {
            let shared = 2 * AHEAD * GATHERED_BYTES;
            (&self.merge_hits_by_warp, config(lists.queries.div_ceil(2), 2 * BY_LANES, shared))
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
        unsafe { launch.launch(grid) }.map_err(failed("merge_hits")).map(drop)
    }

    /// Checks the sizes that kernels on lists and thresholds rely on.
    pub(super) fn check(&self, queries: &QueryBuffers, lists: &ListBuffers, scratch: &Scratch) {
        let all = lists.queries;
        assert!(all > 0 && lists.k >= 1 && lists.slots > lists.k);
        check_size(&lists.entries, all * lists.slots, entry_bytes(self.kind));
        check_size(&lists.worst, all, entry_bytes(self.kind));
        check_size(&lists.thresholds, all, real_bytes(self.kind));
        check_size(&lists.counts, all, 4);
        check_size(&lists.overflowed_count, 1, 4);
        check_size(&queries.query_norms, all, QUERY_NORM_BYTES);
        check_size(&queries.thresholds, all, THRESHOLD_BYTES);
        check_size(&queries.tiles, all * self.form.row_bytes(), 1);
        check_size(&scratch.state, STATE_WORDS, 4);
    }
}
