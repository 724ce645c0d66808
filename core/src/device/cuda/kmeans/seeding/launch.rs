//! The launches of greedy k-means++ (Arthur & Vassilvitskii 2007), and the memory that they share.
//! Kernels run in the order of one stream.
#![allow(unsafe_code)]

use std::sync::{Arc, LazyLock};

use cudarc::driver::{CudaFunction, CudaStream, LaunchArgs, LaunchConfig, PushKernelArg};

use super::input::SeedingInput;
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::compile::Program;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{
    Limits, address, allow_shared, check_size, config, function,
};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::modules::Once;
use crate::device::cuda::driver::sys::{self, failed};
use crate::device::cuda::kmeans::kernels::MOST_ROWS;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::ElementKind;
use crate::metric::Metric;
use crate::rows::Rows;

/// Constants that `kernels/seeding` shares with this folder.
const CONSTANTS: [(&str, usize); 8] = [
    ("SHARE_ROWS", SHARE_ROWS),
    ("SEED_THREADS", SEED_THREADS),
    ("BLOCK_ROWS", BLOCK_ROWS),
    ("RESIDENT", RESIDENT),
    ("RESIDENT_SHORT", RESIDENT_SHORT),
    ("SHORT_BYTES", SHORT_BYTES),
    ("MOST_CANDIDATES", MOST_CANDIDATES),
    ("MOST_PAIRED", MOST_PAIRED),
];

/// Rows of a part, whose shares are summed together.
const SHARE_ROWS: usize = 128;
/// Threads of a comparing block, and the maximum number of its rows: a multiple of [`SHARE_ROWS`].
const SEED_THREADS: usize = 256;
const BLOCK_ROWS: usize = 4096;
/// Resident comparing blocks per multiprocessor, at least; for rows of up to `SHORT_BYTES` bytes,
/// more.
const RESIDENT: usize = 4;
const RESIDENT_SHORT: usize = 6;
const SHORT_BYTES: usize = 32;
/// The maximum number of candidates of a step, 2 + ⌊ln k⌋.
const MOST_CANDIDATES: usize = 24;
/// The maximum dimension for which rows are compared with all candidates, without codes.
const MOST_PAIRED: usize = 16;
/// The maximum dimension for which sums of squared 8-bit codes stay within 31 bits.
const MOST_DIM: usize = 1 << 14;

/// The maximum static shared memory of a comparing block.
const STATIC_BYTES: usize = 10 << 10;

/// The same struct as in `kernels/seeding/shares.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StateOnDevice {
    scale: [f64; 2],
    largest: u64,
    stop: u32,
    pub(super) chosen: u32,
    scaled: u32,
    compared: u32,
    longest: u32,
    best: u32,
    is_owed: u32,
    padding: u32,
}

/// The reason why steps ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    GoingOn,
    SmallShares,
    AllChosen,
}

impl StateOnDevice {
    pub(super) fn stop(&self) -> Stop {
        match self.stop {
            0 => Stop::GoingOn,
            1 => Stop::SmallShares,
            _ => Stop::AllChosen,
        }
    }

    /// The state that continues steps at another scale.
    fn at_scale(self, scale: [f64; 2]) -> Self {
        Self { scale, largest: 0, stop: 0, scaled: self.chosen, is_owed: 0, ..self }
    }
}

/// Addresses on the device, and numbers.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct SeedingOnDevice {
    state: u64,
    /// Row after row.
    rows: u64,
    /// `count` of f64, or null.
    weights: u64,
    /// `count` of the elements' type.
    costs: u64,
    /// A u64 for each [`SHARE_ROWS`], and for each block.
    totals: u64,
    block_totals: u64,
    /// [`MOST_CANDIDATES`] of u32.
    candidates: u64,
    /// `k` of u32.
    chosen: u64,
    /// [`MOST_CANDIDATES`] of two u64.
    gains: u64,
    /// The same for each candidate of a step.
    taken: u64,
    block_taken: u64,
    /// `count` of the elements' type for each candidate of a step.
    distances: u64,
    /// `count` of u32.
    lowered: u64,
    /// A u64 for each candidate of all steps.
    random: u64,
    count: u32,
    k: u32,
    /// Rows of a comparing block.
    together: u32,
    blocks: u32,
}

/// Addresses on the device, and a number.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct BoundsOnDevice {
    /// [`words`] per row, in whole units of 32 rows.
    words: u64,
    /// `count` of i32, and of f32.
    squares: u64,
    residuals: u64,
    /// dim of f64.
    centre: u64,
    inverse: f64,
}

kernel_struct!(StateOnDevice, 56, {
    scale: 0, largest: 16, stop: 24, chosen: 28, scaled: 32, compared: 36, longest: 40, best: 44,
    is_owed: 48, padding: 52,
});
kernel_struct!(SeedingOnDevice, 128, {
    state: 0, rows: 8, weights: 16, costs: 24, totals: 32, block_totals: 40, candidates: 48,
    chosen: 56, gains: 64, taken: 72, block_taken: 80, distances: 88, lowered: 96, random: 104,
    count: 112, k: 116, together: 120, blocks: 124,
});
kernel_struct!(BoundsOnDevice, 40, { words: 0, squares: 8, residuals: 16, centre: 24, inverse: 32 });

/// The kernels for rows of one kind, metric and dimension, loaded on a device.
#[derive(Debug)]
pub(super) struct SeedingKernels {
    dim: usize,
    multiprocessors: usize,
    begin: CudaFunction,
    draw_candidates: CudaFunction,
    take_best: CudaFunction,
    largest_share: CudaFunction,
    add_shares: CudaFunction,
    compare_pairs: CudaFunction,
    round_to_words: CudaFunction,
    compare_bounds: CudaFunction,
}

impl SeedingKernels {
    /// The kernels for such rows, compiled and loaded by the first caller.
    pub(super) fn get(
        gpu: &Gpu,
        kind: ElementKind,
        metric: Metric,
        dim: usize,
    ) -> Result<Arc<Self>> {
        static LOADED: LazyLock<Once<(usize, ElementKind, Metric, usize), SeedingKernels>> =
            LazyLock::new(Once::default);
        LOADED.get((gpu.ordinal, kind, metric, dim), || Self::load(gpu, kind, metric, dim))
    }

    fn load(gpu: &Gpu, kind: ElementKind, metric: Metric, dim: usize) -> Result<Self> {
        let element = if kind == ElementKind::F64 { "F64" } else { "F32" };
        let metric = metric.name().to_uppercase();
        let parameters =
            [format!("ELEMENT={element}"), format!("METRIC={metric}"), format!("DIM={dim}")];
        let module = gpu.load(&Program::new("seeding.cu", &parameters, &CONSTANTS))?;
        let function = |name| function(&module, name);
        let kernels = Self {
            dim,
            multiprocessors: gpu.limits.multiprocessors,
            begin: function("begin")?,
            draw_candidates: function("draw_candidates")?,
            take_best: function("take_best")?,
            largest_share: function("largest_share")?,
            add_shares: function("add_shares")?,
            compare_pairs: function("compare_pairs")?,
            round_to_words: function("round_to_words")?,
            compare_bounds: function("compare_bounds")?,
        };
        let most = bounds_bytes(dim, MOST_CANDIDATES);
        allow_shared(&kernels.compare_bounds, most.min(gpu.limits.shared - STATIC_BYTES))?;
        Ok(kernels)
    }

    /// Rows of a comparing block; for few rows, such that all blocks are resident.
    fn together(&self, rows: usize, row_bytes: usize) -> usize {
        let resident = if row_bytes <= SHORT_BYTES { RESIDENT_SHORT } else { RESIDENT };
        let rows = rows.div_ceil(self.multiprocessors * resident);
        rows.next_multiple_of(SHARE_ROWS).clamp(SEED_THREADS, BLOCK_ROWS)
    }
}

/// Whether the kernels support seeding from such rows, with `drawn` candidates per step.
pub(super) fn fits(rows: &Rows, drawn: usize, limits: Limits) -> bool {
    let matrix = rows.matrix();
    rows.len() <= MOST_ROWS && suits(matrix.kind(), matrix.dim(), drawn, limits)
}

/// The same for every moderate number of rows of this kind and dimension.
pub(super) fn suits(kind: ElementKind, dim: usize, drawn: usize, limits: Limits) -> bool {
    let has_bounds = limits.capability.0 >= 8
        && dim <= MOST_DIM
        && bounds_bytes(dim, drawn) + STATIC_BYTES <= limits.shared;
    let are_real = matches!(kind, ElementKind::F32 | ElementKind::F64);
    are_real && (dim <= MOST_PAIRED || has_bounds)
}

/// 32-bit words of a row's codes.
fn words(dim: usize) -> usize {
    dim.div_ceil(32) * 8
}

/// Dynamic shared memory of `compare_bounds`.
fn bounds_bytes(dim: usize, drawn: usize) -> usize {
    drawn.next_multiple_of(8) * (words(dim) + 4) * 4 + SEED_THREADS * (drawn + 1) * 4
}

/// The first chosen row, and the random numbers of the other steps: one for each candidate of a
/// step.
#[derive(Clone, Copy)]
pub(super) struct Draws<'a> {
    pub(super) first: u32,
    pub(super) candidates: usize,
    pub(super) random: &'a [u64],
}

/// The state of the steps, with all buffers that they need.
pub(super) struct SeedingWorkspace<'a> {
    kernels: Arc<SeedingKernels>,
    stream: Arc<CudaStream>,
    seeding: SeedingOnDevice,
    bounds: BoundsOnDevice,
    /// The maximum number of candidates of a step.
    drawn: u32,
    state: Buffer,
    chosen: Buffer,
    _rows: &'a Buffer,
    /// Owns the memory behind the other addresses.
    _buffers: Vec<Buffer>,
}

impl<'r> SeedingWorkspace<'r> {
    /// Allocates memory for the steps over rows that have arrived.
    pub(super) fn new(
        device: &CudaDevice,
        kernels: Arc<SeedingKernels>,
        input: &SeedingInput<'_>,
        uploaded: &'r Buffer,
        draws: Draws<'_>,
        job: &Job,
    ) -> Result<Self> {
        let Draws { first, candidates: drawn, random } = draws;
        let (count, k, dim) = (input.rows.len(), input.problem.k, kernels.dim);
        let element = if input.rows.matrix().kind() == ElementKind::F64 { 8 } else { 4 };
        assert!(fits(input.rows, drawn, device.gpu.limits) && drawn <= MOST_CANDIDATES && k > 1);
        assert!(random.len() == (k - 1) * drawn && drawn > 0 && (first as usize) < count);
        assert!(input.has_as_many(dim));
        check_size(uploaded, count * dim, element);
        let stream = device.gpu.compute.clone();
        let mut buffers = Vec::new();
        let mut keep = |buffer: Buffer| {
            let place = address(&stream, &buffer);
            buffers.push(buffer);
            place
        };
        let allocate = |bytes: usize| device.memory.allocate(&stream, bytes);
        let state = StateOnDevice { scale: [1.0; 2], compared: 1, ..StateOnDevice::default() };
        let (state, chosen) = (device.send_values(&[state], job)?, allocate(k * 4)?);
        let candidates: [u32; MOST_CANDIDATES] = std::array::from_fn(|_| first);
        let weights = input.weights.map(|weights| device.send_values(weights, job));
        let together = kernels.together(count, dim * element);
        let (parts, blocks) = (count.div_ceil(SHARE_ROWS), count.div_ceil(together));
        let seeding = SeedingOnDevice {
            state: address(&stream, &state),
            rows: address(&stream, uploaded),
            weights: weights.transpose()?.map_or(0, &mut keep),
            costs: keep(allocate(count * element)?),
            totals: keep(device.filled(parts * 8, 0)?),
            block_totals: keep(device.filled(blocks * 8, 0)?),
            candidates: keep(device.send_values(&candidates, job)?),
            chosen: address(&stream, &chosen),
            gains: keep(device.filled(MOST_CANDIDATES * 16, 0)?),
            taken: keep(allocate(drawn * parts * 8)?),
            block_taken: keep(allocate(drawn * blocks * 8)?),
            distances: keep(allocate(drawn * count * element)?),
            lowered: keep(allocate(count * 4)?),
            random: keep(device.send_values(random, job)?),
            count: count as u32,
            k: k as u32,
            together: together as u32,
            blocks: blocks as u32,
        };
        let mut bounds = BoundsOnDevice::default();
        if dim > MOST_PAIRED {
            bounds.words = keep(allocate(count.next_multiple_of(32) * words(dim) * 4)?);
            bounds.squares = keep(allocate(count * 4)?);
            bounds.residuals = keep(allocate(count * 4)?);
            bounds.centre = keep(device.send_values(&input.problem.origin, job)?);
        }
        let (drawn, _rows, _buffers) = (drawn as u32, uploaded, buffers);
        let steps =
            Self { kernels, stream, seeding, bounds, drawn, state, chosen, _rows, _buffers };
        // SAFETY: `begin` takes (Seeding) and any number of blocks of `SEED_THREADS`; it writes `count` costs.
        unsafe { steps.launch(&steps.kernels.begin, "begin", steps.rows()) }?;
        Ok(steps)
    }

    /// Whether rows are compared by codes first.
    pub(super) fn has_bounds(&self) -> bool {
        self.kernels.dim > MOST_PAIRED
    }

    /// Quantises rows, with `inverse` steps per unit.
    pub(super) fn round(&mut self, inverse: f64) -> Result<()> {
        assert!(self.has_bounds());
        self.bounds.inverse = inverse;
        let rows = (self.seeding.count as usize).next_multiple_of(32);
        let grid = config(rows.div_ceil(SEED_THREADS / 32), SEED_THREADS, 0);
        let kernel = &self.kernels.round_to_words;
        // SAFETY: `round_to_words` takes (Seeding, Bounds), `SEED_THREADS` a block and a warp for each row of whole
        // units of 32: it reads the rows and the centre, and writes words of all units, and squares and residuals
        // of `count` rows, for which `new` has made room.
        unsafe {
            self.launch_more(kernel, "round_to_words", grid, |launch, steps| {
                launch.arg(&steps.bounds);
            })
        }
    }

    /// Draws the candidates of a step, unless steps have ended: as many as `new` was told.
    pub(super) fn draw(&self, drawn: &u32) -> Result<()> {
        assert_eq!(*drawn, self.drawn);
        let (kernel, grid) = (&self.kernels.draw_candidates, config(1, 1024, 0));
        // SAFETY: `draw_candidates` takes (Seeding, u32 drawn), one block of 1,024 threads: it reads `drawn` of the
        // random numbers of a step, of which there are those of k - 1 steps, and ends steps after these. It reads
        // the sums of shares of all blocks, less what the launch before has written of one of its candidates, and
        // writes `drawn` candidates, all rows, at most k of `chosen`, the gains and the state.
        unsafe {
            self.launch_more(kernel, "draw_candidates", grid, |launch, _| {
                launch.arg(drawn);
            })
        }
    }

    /// Compares all rows with the first `drawn` candidates.
    pub(super) fn compare(&self, drawn: &u32) -> Result<()> {
        assert!((1..=self.drawn).contains(drawn));
        let candidates = *drawn as usize;
        if self.has_bounds() {
            let grid = self.blocks(bounds_bytes(self.kernels.dim, candidates));
            let kernel = &self.kernels.compare_bounds;
            // SAFETY: `compare_bounds` takes (Seeding, Bounds, u32 drawn), `SEED_THREADS` a block, with
            // `bounds_bytes` of shared memory, and `blocks` of them, each for rows of its own: it reads the words
            // that `round_to_words` wrote and the candidates drawn last, and writes costs, `lowered`, and what
            // each of up to the `drawn` candidates of `new` takes.
            unsafe {
                self.launch_more(kernel, "compare_bounds", grid, |launch, steps| {
                    launch.arg(&steps.bounds).arg(drawn);
                })
            }
        } else {
            // Elements have at most 8 bytes.
            let grid = self.blocks(candidates * self.kernels.dim * 8);
            let kernel = &self.kernels.compare_pairs;
            // SAFETY: `compare_pairs` takes (Seeding, u32 drawn), `SEED_THREADS` a block, with shared memory for
            // all candidates, and `blocks` of them, each for rows of its own: it reads rows and the candidates
            // drawn last, and writes the same as `compare_bounds`.
            unsafe {
                self.launch_more(kernel, "compare_pairs", grid, |launch, _| {
                    launch.arg(drawn);
                })
            }
        }
    }

    /// The state after all launches. Waits for them.
    pub(super) fn state(&self) -> Result<StateOnDevice> {
        let read = sys::read::<StateOnDevice>(&self.stream, self.state.slice(), 1);
        Ok(read.map_err(failed("cuMemcpyDtoHAsync"))?[0])
    }

    /// The largest weight times cost, after the best candidate of the last step was taken.
    pub(super) fn largest(&self) -> Result<f64> {
        // SAFETY: both take (Seeding), blocks of `SEED_THREADS` and any number of them, for `count`
        // rows: the first lowers costs by the distances from the candidate chosen last; the second
        // then reads the costs, and writes the state.
        unsafe {
            self.launch(&self.kernels.take_best, "take_best", self.rows())?;
            self.launch(&self.kernels.largest_share, "largest_share", self.rows())?;
        }
        Ok(f64::from_bits(self.state()?.largest))
    }

    /// Continues with shares at another scale. Waits for all launches.
    pub(super) fn rescale(&mut self, scale: [f64; 2]) -> Result<()> {
        let state = self.state()?.at_scale(scale);
        sys::write(&self.stream, self.state.slice_mut(), &[state])?;
        // SAFETY: `add_shares` takes (Seeding), `SEED_THREADS` a block and `blocks` of them, each for rows of its
        // own: it reads costs, and writes the sums of the shares of these.
        unsafe { self.launch(&self.kernels.add_shares, "add_shares", self.blocks(0)) }
    }

    /// The first `count` chosen rows.
    pub(super) fn chosen(&self, count: usize) -> Result<Vec<u32>> {
        let read = sys::read::<u32>(&self.stream, self.chosen.slice(), count);
        read.map_err(failed("cuMemcpyDtoHAsync"))
    }

    /// The grid of comparing kernels, with `shared` bytes of dynamic shared memory.
    fn blocks(&self, shared: usize) -> LaunchConfig {
        config(self.seeding.blocks as usize, SEED_THREADS, shared)
    }

    /// A grid for kernels that support any grid.
    fn rows(&self) -> LaunchConfig {
        let most = self.kernels.multiprocessors * 8;
        config((self.seeding.count as usize).div_ceil(SEED_THREADS).min(most), SEED_THREADS, 0)
    }

    /// # Safety
    /// The requirements of [`launch_more`](Self::launch_more), for a kernel that takes
    /// [`SeedingOnDevice`] alone.
    unsafe fn launch(
        &self,
        function: &CudaFunction,
        name: &'static str,
        grid: LaunchConfig,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.launch_more(function, name, grid, |_, _| {}) }
    }

    /// Launches a kernel with [`SeedingOnDevice`], and the arguments that `add` appends.
    ///
    /// # Safety
    /// - `function` is one of this workspace's kernels, and declares [`SeedingOnDevice`] and then
    ///   the parameters that `add` gives it, in this order and of these types; the grid has the
    ///   blocks, threads and shared memory asked for at the kernel's head.
    /// - The kernel is told of no more candidates than `new` was; the data it reads of these and of
    ///   [`BoundsOnDevice`] have been written by earlier launches on this stream.
    unsafe fn launch_more<'a>(
        &'a self,
        function: &'a CudaFunction,
        name: &'static str,
        grid: LaunchConfig,
        add: impl FnOnce(&mut LaunchArgs<'a>, &'a Self),
    ) -> Result<()> {
        let mut launch = self.stream.launch_builder(function);
        launch.arg(&self.seeding);
        add(&mut launch, self);
        // SAFETY: arguments, grid and order are as the caller says. The structs' buffers live as
        // long as this workspace, or are borrowed by it, have the sizes written at their fields,
        // and are used on this stream only; kernels touch rows below `count`, elements below `dim`,
        // for which they were compiled, and candidates below the number drawn, `MOST_CANDIDATES` at
        // most. Candidates are rows: the first was given, and others are drawn among them.
        unsafe { launch.launch(grid) }.map_err(failed(name)).map(drop)
    }
}
