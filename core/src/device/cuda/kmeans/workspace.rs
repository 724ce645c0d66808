//! The memory that the kernels of Lloyd's rounds over one set of rows share.
//!
//! A [`KMeansWorkspace`] allocates it in the sizes that they rely on and keeps it until it is
//! dropped; kernels get it as [`RoundsOnDevice`], [`SumsOnDevice`], [`SortedCentroids`] and
//! [`Fp16Buffers`]. Kernels run in the order of one stream.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, LaunchArgs, LaunchConfig, PushKernelArg};

use super::fp16::fp16_buffers;
use super::hamerly::HamerlyBounds;
use super::kernels::{AssignStrategy, MOST_ROWS, RoundKernels, ranks};
use super::row_type::{RowType, UploadedRows};
use super::sorted::Sorted;
use super::structs::{Fp16Buffers, RoundsOnDevice, SortedCentroids, Status, SumsOnDevice};
use super::sums::SumsMemory;
use super::swizzled_tiles::SWIZZLED_ROWS;
use crate::device::ClusterSums;
use crate::device::contract::KMeansProblem;
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{LaunchThrottle, Rate, address, address_or_null, config};
use crate::device::cuda::driver::memory::{Buffer, Memory};
use crate::device::cuda::driver::sys::{self, failed};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;

/// Rows on a device, with all buffers that rounds need.
pub(super) struct KMeansWorkspace {
    pub(super) kernels: Arc<RoundKernels>,
    pub(super) stream: Arc<CudaStream>,
    pub(super) strategy: AssignStrategy,
    pub(super) count: usize,
    pub(super) k: usize,
    pub(super) rounds: RoundsOnDevice,
    pub(super) in_sums: SumsOnDevice,
    pub(super) sorted_centroids: SortedCentroids,
    pub(super) fp16: Fp16Buffers,
    pub(super) throttle: LaunchThrottle,
    /// The rate of assigning rows.
    pub(super) rate: Arc<Rate>,
    pub(super) status: Buffer,
    pub(super) centroids: Buffer,
    pub(super) labels: Buffer,
    /// The number of assignments since rows had no cluster, …
    pub(super) assigned: usize,
    /// … and whether rows are in the sums.
    pub(super) are_added: bool,
    /// Hamerly's lower bounds, by which rows are skipped, if they are used.
    pub(super) gaps: Option<HamerlyBounds>,
    /// The memory of cluster sums: all zero without rows.
    pub(super) sums: SumsMemory,
    pub(super) rows: Buffer,
    /// The number of rows of each sort key, if these fit into shared memory; then the total.
    pub(super) at_places: Option<Buffer>,
    /// Buffers for sorted rows, their numbers and labels.
    pub(super) sorted: Option<Sorted>,
    /// Owns the memory behind the other addresses.
    _buffers: Vec<Buffer>,
}

/// The maximum number of scales at which rows are rounded.
const MOST_SCALES: usize = 4;

/// Shorter rows may have lost elements to underflow.
const LEAST_TYPICAL: f32 = 1.0;

impl KMeansWorkspace {
    /// Allocates memory for rounds over `rows`, which have arrived, and so have their weights.
    ///
    /// In one piece: it is one list of buffers and their sizes.
    pub(super) fn new(
        kernels: Arc<RoundKernels>,
        CudaDevice { gpu, memory, .. }: &CudaDevice,
        uploaded: UploadedRows,
        strategy: AssignStrategy,
        problem: &KMeansProblem,
        empty: &ClusterSums,
    ) -> Result<Self> {
        let stream = &gpu.compute;
        uploaded.check(kernels.row_type);
        let UploadedRows { rows, count, weights } = uploaded;
        let (RowType { element, dim, .. }, k) = (kernels.row_type, problem.k);
        let steps = empty.inverse_steps();
        assert!(count <= MOST_ROWS && problem.origin.len() == dim);
        assert!(steps.len() == kernels.row_type.width());
        let allocate = |bytes: usize| memory.allocate(stream, bytes);
        let mut buffers = Vec::new();
        let mut place = |bytes: usize| -> Result<u64> {
            let buffer = allocate(bytes)?;
            let place = address(stream, &buffer);
            buffers.push(buffer);
            Ok(place)
        };
        let status = allocate(size_of::<Status>())?;
        let centroids = allocate(2 * k * dim * element.bytes())?;
        let labels = allocate(count * 4)?;
        let gaps = (strategy == AssignStrategy::Tiles)
            .then(|| HamerlyBounds::new(count, k, allocate))
            .transpose()?;
        let [of_rows, drifts, listed] = HamerlyBounds::addresses(gaps.as_ref(), stream);
        let sums = SumsMemory::new(k, kernels.row_type, allocate)?;
        let [parts, first_rows, differing] = sums.addresses(stream);
        let (mut origin, mut inverse) = (allocate(dim * 8)?, allocate(steps.len() * 8)?);
        sys::write(stream, origin.slice_mut(), &problem.origin)?;
        sys::write(stream, inverse.slice_mut(), &steps)?;
        let rounds = RoundsOnDevice {
            status: address(stream, &status),
            rows: address(stream, &rows),
            numbers: 0,
            centroids: address(stream, &centroids),
            labels: address(stream, &labels),
            moved: place(count * 8)?,
            gaps: of_rows,
            drifts,
            listed,
            count: count as u32,
            k: k as u32,
        };
        let in_sums = SumsOnDevice {
            weights: address_or_null(stream, weights.as_ref()),
            sums: address(stream, &sums.sums),
            parts,
            counts: address(stream, &sums.counts),
            wide: address(stream, &sums.wide),
            is_wide: address(stream, &sums.is_wide),
            first_rows,
            differing,
            inverse: address(stream, &inverse),
            shifts: place(k * 8)?,
            limit: empty.sums.steps.limit(),
            tolerance: problem.tolerance,
        };
        let (mut sorted_centroids, mut fp16, mut sorted) =
            (SortedCentroids::default(), Fp16Buffers::default(), None);
        let at_places = match ranks(strategy, k) {
            0 => None,
            ranks => Some(allocate((k * ranks + 1) * 4)?),
        };
        sorted_centroids.sorted_counts = address_or_null(stream, at_places.as_ref());
        match strategy {
            AssignStrategy::SortMeans => {
                sorted_centroids.lists = place(k * k * 8)?;
                sorted = Some(Sorted::new(count, dim, allocate)?);
            }
            AssignStrategy::Tiles => {
                let origin = address(stream, &origin);
                fp16 = fp16_buffers(problem, &kernels, count, origin, &mut place)?;
            }
        }
        buffers.extend([origin, inverse].into_iter().chain(weights));
        let rate =
            if strategy == AssignStrategy::Tiles { &kernels.products } else { &kernels.sums }
                .clone();
        let (kernels, stream) = (kernels, stream.clone());
        let mut workspace = Self {
            kernels,
            stream,
            strategy,
            count,
            k,
            rounds,
            in_sums,
            sorted_centroids,
            fp16,
            at_places,
            throttle: LaunchThrottle::default(),
            rate,
            status,
            centroids,
            labels,
            assigned: 0,
            are_added: false,
            gaps,
            sums,
            rows,
            sorted,
            _buffers: buffers,
        };
        workspace.reset_status(0, 0)?;
        if strategy == AssignStrategy::Tiles {
            workspace.round_rows()?;
        }
        Ok(workspace)
    }

    /// Rounds all rows to fp16, at a scale that suits most of them: an outlier may be large enough
    /// to make all other rows underflow.
    fn round_rows(&mut self) -> Result<()> {
        let at_first = self.fp16;
        for _ in 1..MOST_SCALES {
            let (typical, largest) = self.round_and_measure()?;
            if typical >= LEAST_TYPICAL {
                return Ok(());
            }
            if largest == 0.0 {
                break;
            }
            self.fp16.scale_up(f64::from(128.0 / typical.max(1e-6)));
            self.reset_status(0, 0)?;
        }
        // No scale suits most rows, for instance if most are equal: then no row counts as an
        // outlier.
        self.fp16 = at_first;
        self.reset_status(0, 0)?;
        let (_, largest) = self.round_and_measure()?;
        self.reset_status(largest.to_bits(), largest.max(LEAST_TYPICAL).to_bits())
    }

    /// Rounds all rows; returns a norm that few rows exceed, and the norm of the longest.
    fn round_and_measure(&self) -> Result<(f32, f32)> {
        assert_eq!(self.strategy, AssignStrategy::Tiles);
        let all = config(self.count.next_multiple_of(SWIZZLED_ROWS).div_ceil(8), 256, 0);
        let round = (&self.kernels.round_rows, "round_rows", all);
        let measure = (&self.kernels.measure_rows, "measure_rows", config(1, 1024, 0));
        for (kernel, name, grid) in [round, measure] {
            // SAFETY: both take (Rounds, Fp16Buffers), which `new` has filled in for
            // `AssignStrategy::Tiles`. `round_rows`, a warp for each row of whole swizzled tiles,
            // reads the rows and the origin and writes `fp16_rows` and `rounded`; `measure_rows`,
            // one block of 1,024 threads, reads `rounded` after it, and writes the status.
            unsafe {
                self.launch(kernel, name, grid, |launch, kernel| {
                    launch.arg(&kernel.rounds).arg(&kernel.fp16);
                })
            }?;
        }
        let Status { typical_row, largest_row, .. } = self.status()?;
        Ok((f32::from_bits(typical_row), f32::from_bits(largest_row)))
    }

    /// The status of rounds. Waits for all launches.
    pub(super) fn status(&self) -> Result<Status> {
        let read = sys::read::<Status>(&self.stream, self.status.slice(), 1);
        Ok(read.map_err(failed("cuMemcpyDtoHAsync"))?[0])
    }

    /// Restarts the measurement of launches.
    pub(super) fn begin(&mut self) -> Result<()> {
        self.throttle.begin(&self.stream)
    }

    /// Sets the status for the next launches to that before any round, with the bits of
    /// `largest_row` and `typical_row`.
    pub(super) fn reset_status(&mut self, largest_row: u32, typical_row: u32) -> Result<()> {
        let status = Status { largest_row, typical_row, ..Status::default() };
        sys::write(&self.stream, self.status.slice_mut(), &[status])
    }

    /// The valid centroids, in the set `current`.
    pub(super) fn centroids<T: Real>(&self, current: u32, gpu: &Gpu) -> Result<Vec<T>> {
        let (size, element) = (self.k * self.kernels.row_type.dim, self.kernels.row_type.element);
        // Usually few; the caller has no job that could be cancelled.
        let mut both = element.read(gpu, &self.centroids, 2 * size, &Job::default())?;
        Ok(both.drain(current as usize * size..).take(size).collect())
    }

    /// Stores these as the first of the two sets; all rows will be compared with them.
    pub(super) fn set_centroids<T: Real>(&mut self, centroids: &[T]) -> Result<()> {
        assert_eq!(centroids.len(), self.k * self.kernels.row_type.dim);
        let centroids = centroids.iter().copied();
        self.kernels.row_type.element.write(&self.stream, &mut self.centroids, centroids)?;
        self.gaps.as_mut().map_or(Ok(()), |gaps| gaps.forget(&self.stream))
    }

    /// Removes all rows from their clusters.
    pub(super) fn clear(&mut self) -> Result<()> {
        (self.assigned, self.are_added) = (0, false);
        let labels = sys::fill(&self.stream, self.labels.slice_mut(), 0xff);
        labels.map_err(failed("cuMemsetD8Async"))?;
        self.sums.clear(&self.stream)
    }

    /// Sums of all clusters, in steps of `empty`.
    pub(super) fn sums(&self, empty: &ClusterSums, job: &Job) -> Result<ClusterSums> {
        self.sums.read(&self.stream, empty, job)
    }

    /// Labels of all rows, in their original order.
    pub(super) fn labels(&self, memory: &Arc<Memory>, gpu: &Gpu, job: &Job) -> Result<Vec<u32>> {
        assert!(self.assigned > 0, "rows have clusters");
        let mut labels = memory.allocate(&self.stream, self.count * 4)?;
        let all = config(self.count.div_ceil(256), 256, 0);
        // SAFETY: `copy_labels` takes (Rounds, u32* labels), 256 threads a block and a thread for
        // each row. Row numbers are below `count`, each once, and the buffer has room for `count`
        // labels; nothing else uses it.
        unsafe {
            self.launch(&self.kernels.copy_labels, "copy_labels", all, |launch, kernel| {
                launch.arg(&kernel.rounds).arg(labels.slice_mut());
            })
        }?;
        gpu.downloader.read(&self.stream, labels.slice(), self.count, job)
    }

    /// Labels and costs of all rows, in their original order.
    pub(super) fn assigned<T: Real>(
        &self,
        memory: &Arc<Memory>,
        gpu: &Gpu,
        job: &Job,
    ) -> Result<(Vec<u32>, Vec<T>)> {
        assert!(self.assigned > 0, "rows have clusters");
        let element = self.kernels.row_type.element;
        let mut labels = memory.allocate(&self.stream, self.count * 4)?;
        let mut costs = memory.allocate(&self.stream, self.count * element.bytes())?;
        let all = config(self.count.div_ceil(128), 128, 0);
        // SAFETY: `costs` takes (Rounds, u32* labels, Scalar* costs), 128 threads a block and a
        // thread for each row. Rows have been assigned on this stream, so that their labels are
        // below `k`, except for the bit of undecided rows, which the kernel clears. Row numbers are
        // below `count`, each once, and two buffers have room for `count` labels and costs; nothing
        // else uses them.
        unsafe {
            self.launch(&self.kernels.costs, "costs", all, |launch, kernel| {
                launch.arg(&kernel.rounds).arg(labels.slice_mut()).arg(costs.slice_mut());
            })
        }?;
        let labels = gpu.downloader.read(&self.stream, labels.slice(), self.count, job)?;
        Ok((labels, element.read(gpu, &costs, self.count, job)?))
    }

    /// The number of blocks of a grid with `per_multiprocessor` blocks per multiprocessor.
    pub(super) fn blocks(&self, per_multiprocessor: usize) -> usize {
        per_multiprocessor * self.kernels.limits.multiprocessors
    }

    /// Launches a kernel with the arguments that `add` gives it.
    ///
    /// # Safety
    /// - `function` is one of this workspace's kernels, for its [`AssignStrategy`], and declares
    ///   the parameters that `add` gives it, in this order and of these types; the grid has the
    ///   blocks, threads and shared memory asked for at the kernel's head.
    /// - Addresses beside those in the structs are of memory in the sizes that the kernel touches, different ones
    ///   for what it writes. It stays allocated until the kernel has run, or is freed in the order of this stream,
    ///   and nothing but this stream uses it until then.
    /// - What the kernel reads has been written, by what was launched on this stream before; labels that it takes
    ///   for clusters are below `k`.
    pub(super) unsafe fn launch<'a>(
        &'a self,
        function: &'a CudaFunction,
        name: &'static str,
        grid: LaunchConfig,
        add: impl FnOnce(&mut LaunchArgs<'a>, &'a Self),
    ) -> Result<()> {
        let mut launch = self.stream.launch_builder(function);
        add(&mut launch, self);
        // SAFETY: arguments, grid and order are as the caller says. The structs' buffers live as long as this
        // workspace, have the sizes that are written at their fields, and are used on this stream only; kernels
        // touch positions and numbers of rows below `count`, clusters below `k`, and elements and sums below the
        // row type's `dim` and width, for which they were compiled. Lists of rows hold each row
        // once at most.
        unsafe { launch.launch(grid) }.map_err(failed(name)).map(drop)
    }

    /// # Safety
    /// The requirements of [`launch`](Self::launch), for a kernel that takes [`RoundsOnDevice`] and
    /// [`SumsOnDevice`].
    pub(super) unsafe fn launch_sums(
        &self,
        function: &CudaFunction,
        name: &'static str,
        grid: LaunchConfig,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe {
            self.launch(function, name, grid, |launch, kernel| {
                launch.arg(&kernel.rounds).arg(&kernel.in_sums);
            })
        }
    }

    /// # Safety
    /// The requirements of [`launch`](Self::launch), for a kernel that takes [`RoundsOnDevice`],
    /// [`Fp16Buffers`] and whether it is the last.
    pub(super) unsafe fn launch_fp16(
        &self,
        function: &CudaFunction,
        name: &'static str,
        grid: LaunchConfig,
        is_last: u32,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe {
            self.launch(function, name, grid, |launch, kernel| {
                launch.arg(&kernel.rounds).arg(&kernel.fp16).arg(&is_last);
            })
        }
    }
}
