//! The launches of rounds of many small problems at once (SQL partitions), and
//! the memory that they share.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, PushKernelArg};

use super::kernels::{BatchedKernels, MOST_ROWS};
use super::row_type::{Element, RowType, UploadedRows};
use super::structs::{RoundsOnDevice, Status, SumsOnDevice, labels_of};
use crate::device::ClusterSums;
use crate::device::contract::Labels;
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{Counted, LaunchThrottle, address, config};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::{self, failed};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;

/// The maximum dimension of the rows of batched problems.
pub(super) const BATCHED_DIM: usize = 32;

/// A problem of a batch: rows (a SQL partition) that are clustered by themselves.
#[derive(Debug, Clone)]
pub(super) struct BatchedProblem<T> {
    /// The range of its rows among all rows.
    pub(super) rows: Range<usize>,
    /// Empty sums of its clusters.
    pub(super) empty: ClusterSums,
    /// Rounds end when the sum of the squared distances that centroids moved is at most this.
    pub(super) tolerance: f64,
    /// The initial centroids.
    pub(super) centroids: Vec<T>,
}

/// A problem of a batch after all rounds.
#[derive(Debug, Clone)]
pub(super) struct BatchedResult<T> {
    /// The centroids.
    pub(super) centroids: Vec<T>,
    /// For each row, the cluster of the nearest one.
    pub(super) labels: Labels,
}

/// The struct of `kernels/kmeans/batched.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct BatchedRounds {
    rounds: RoundsOnDevice,
    sums: SumsOnDevice,
}

kernel_struct!(BatchedRounds, 176, { rounds: 0, sums: 80 });

/// A batch of problems, with all buffers of their rounds: one struct per problem, in shared buffers.
pub(super) struct BatchedWorkspace {
    stream: Arc<CudaStream>,
    element: Element,
    /// The number of clusters of each problem.
    clusters: Vec<usize>,
    dim: usize,
    rows: usize,
    /// The operations of a round of each problem.
    work: Vec<f64>,
    status: Buffer,
    centroids: Buffer,
    labels: Buffer,
    problems: Buffer,
    /// Owns the memory behind the other addresses.
    _buffers: Vec<Buffer>,
}

impl BatchedWorkspace {
    /// Allocates memory for rounds over rows that have arrived.
    ///
    /// In one piece: it is one list of buffers and their sizes.
    pub(super) fn new<T: Real>(
        kernels: &BatchedKernels,
        CudaDevice { gpu, memory, .. }: &CudaDevice,
        uploaded: UploadedRows,
        problems: &[BatchedProblem<T>],
    ) -> Result<Self> {
        let (stream, row_type) = (&gpu.compute, kernels.row_type);
        uploaded.check(row_type);
        let UploadedRows { rows, count, weights } = uploaded;
        let RowType { element, dim, .. } = row_type;
        let width = row_type.width();
        let size = element.bytes();
        assert!(dim <= BATCHED_DIM && count <= MOST_ROWS);
        assert!(problems.iter().all(|problem| problem.rows.end <= count));
        let clusters: Vec<usize> =
            problems.iter().map(|problem| problem.empty.counts.len()).collect();
        let all: usize = clusters.iter().sum();
        let allocate = |bytes: usize| memory.allocate(stream, bytes);
        let mut buffers = Vec::new();
        let mut place = |bytes: usize, byte: u8| -> Result<u64> {
            let mut buffer = allocate(bytes)?;
            sys::fill(stream, buffer.slice_mut(), byte).map_err(failed("cuMemsetD8Async"))?;
            let place = address(stream, &buffer);
            buffers.push(buffer);
            Ok(place)
        };
        let (moved, sums) = (place(count * 8, 0)?, place(all * width * 8, 0)?);
        let (wide, is_wide) = (place(all * width * row_type.bins() * 8, 0)?, place(all * 4, 0)?);
        let (counts, shifts) = (place(all * 8, 0)?, place(all * 8, 0)?);
        let parts = if row_type.has_parts() { place(all * width * 8, 0)? } else { 0 };
        let (first_rows, differing) = match row_type.has_singles() {
            true => (place(all * 4, 0xff)?, place(all * 8, 0xff)?),
            false => (0, 0),
        };
        let of_cluster = |base: u64, bytes: u64| if base == 0 { 0 } else { base + bytes };
        let mut status = allocate(problems.len() * size_of::<Status>())?;
        let mut centroids = allocate(2 * all * dim * size)?;
        let mut labels = allocate(count * 4)?;
        for (buffer, byte) in [(&mut status, 0), (&mut labels, 0xff)] {
            sys::fill(stream, buffer.slice_mut(), byte).map_err(failed("cuMemsetD8Async"))?;
        }
        let all_steps = problems.iter().flat_map(|problem| problem.empty.inverse_steps());
        let all_steps: Vec<f64> = all_steps.collect();
        assert!(all_steps.len() == problems.len() * width);
        let mut inverse = allocate(all_steps.len() * 8)?;
        sys::write(stream, inverse.slice_mut(), &all_steps)?;
        // The two sets of a problem's centroids are adjacent.
        let both = problems.iter().flat_map(|g| [g.centroids.as_slice(), &g.centroids].concat());
        element.write(stream, &mut centroids, both)?;
        let at = |buffer: &Buffer| address(stream, buffer);
        let of_weights = weights.as_ref().map_or(0, at);
        let bases = (at(&status), at(&rows), at(&centroids), at(&labels), at(&inverse));
        let mut first = 0;
        let list = problems.iter().zip(&clusters).enumerate().map(|(i, (problem, k))| {
            assert!(problem.centroids.len() == k * dim);
            let (row, cluster) = (problem.rows.start as u64, first as u64);
            first += k;
            let (dim, width, size) = (dim as u64, width as u64, size as u64);
            BatchedRounds {
                rounds: RoundsOnDevice {
                    status: bases.0 + (i * size_of::<Status>()) as u64,
                    rows: bases.1 + row * dim * size,
                    numbers: 0,
                    centroids: bases.2 + 2 * cluster * dim * size,
                    labels: bases.3 + row * 4,
                    moved: moved + row * 8,
                    gaps: 0,
                    drifts: 0,
                    listed: 0,
                    count: problem.rows.len() as u32,
                    k: *k as u32,
                },
                sums: SumsOnDevice {
                    weights: of_cluster(of_weights, row * 8),
                    sums: sums + cluster * width * 8,
                    parts: of_cluster(parts, cluster * width * 8),
                    counts: counts + cluster * 8,
                    wide: wide + cluster * width * row_type.bins() as u64 * 8,
                    is_wide: is_wide + cluster * 4,
                    first_rows: of_cluster(first_rows, cluster * 4),
                    differing: of_cluster(differing, cluster * 8),
                    inverse: bases.4 + i as u64 * width * 8,
                    shifts: shifts + cluster * 8,
                    limit: problem.empty.sums.steps.limit(),
                    tolerance: problem.tolerance,
                },
            }
        });
        let list: Vec<BatchedRounds> = list.collect();
        let mut on_device = allocate(list.len() * size_of::<BatchedRounds>())?;
        sys::write(stream, on_device.slice_mut(), &list)?;
        buffers.extend([inverse, rows].into_iter().chain(weights));
        let work = problems
            .iter()
            .zip(&clusters)
            .map(|(problem, k)| (problem.rows.len() * k * dim) as f64);
        let (work, stream) = (work.collect(), stream.clone());
        Ok(Self {
            stream,
            element,
            clusters,
            dim,
            rows: count,
            work,
            status,
            centroids,
            labels,
            problems: on_device,
            _buffers: buffers,
        })
    }

    /// Runs all rounds, at most `limit` for each problem, and computes the final clusters.
    pub(super) fn run(&mut self, kernels: &BatchedKernels, limit: usize, job: &Job) -> Result<()> {
        let (mut throttle, rate) = (LaunchThrottle::default(), &kernels.sums);
        // A problem is the work of one block: the largest alone keeps one multiprocessor busy.
        let alone = kernels.multiprocessors as f64;
        let mut first = 0;
        while first < self.work.len() {
            let most = rate.of_a_launch();
            let mut sum = 0.0;
            let fits = self.work[first..].iter().take_while(|work| {
                sum += **work;
                sum <= most
            });
            let some = first..first + fits.count().max(1);
            let largest = self.work[some.clone()].iter().fold(0.0, |a: f64, b| a.max(*b));
            let of_a_round =
                self.work[some.clone()].iter().sum::<f64>().max(alone * largest).max(1.0);
            let mut left = limit;
            while left > 0 {
                job.check()?;
                let rounds = ((rate.of_a_launch() / of_a_round) as usize).clamp(1, left);
                throttle.begin(&self.stream)?;
                self.launch_rounds(kernels, &some, rounds)?;
                // Some problems may end earlier.
                let work = rounds as f64 * of_a_round;
                throttle.launched(&self.stream, rate, work, Counted::AtMost)?;
                left -= rounds;
                if left > 0 && self.are_done(&some)? {
                    break;
                }
            }
            self.launch_finish(kernels, &some)?;
            first = some.end;
        }
        Ok(())
    }

    fn launch_rounds(
        &self,
        kernels: &BatchedKernels,
        some: &Range<usize>,
        rounds: usize,
    ) -> Result<()> {
        let rounds = rounds.min(u32::MAX as usize) as u32;
        let problems = self.problems.slice().slice(some.start * size_of::<BatchedRounds>()..);
        let mut launch = self.stream.launch_builder(&kernels.cluster);
        launch.arg(&problems).arg(&rounds);
        // SAFETY: each struct's addresses point to as many elements as its fields say, inside
        // buffers that live as long as this workspace; problems have rows and clusters of their own.
        unsafe { launch.launch(config(some.len(), 128, 0)) }
            .map_err(failed("cluster_batched"))
            .map(drop)
    }

    fn launch_finish(&self, kernels: &BatchedKernels, some: &Range<usize>) -> Result<()> {
        let problems = self.problems.slice().slice(some.start * size_of::<BatchedRounds>()..);
        let mut launch = self.stream.launch_builder(&kernels.finish);
        launch.arg(&problems);
        // SAFETY: each struct's addresses point to as many elements as its fields say, inside
        // buffers that live as long as this workspace; no row is of two problems.
        unsafe { launch.launch(config(some.len(), 128, 0)) }
            .map_err(failed("finish_batched"))
            .map(drop)
    }

    /// Whether the rounds of some problems have ended. Waits for their launches.
    fn are_done(&self, some: &Range<usize>) -> Result<bool> {
        let status = sys::read::<Status>(&self.stream, self.status.slice(), self.work.len());
        let status = status.map_err(failed("cuMemcpyDtoHAsync"))?;
        Ok(!status[some.clone()].iter().any(Status::is_going_on))
    }

    /// The status and the result of each problem. Waits for their launches.
    pub(super) fn finish<T: Real>(
        self,
        problems: &[BatchedProblem<T>],
        gpu: &Gpu,
        job: &Job,
    ) -> Result<Vec<(Status, BatchedResult<T>)>> {
        let (element, all) = (self.element, self.clusters.iter().sum::<usize>());
        let status = sys::read::<Status>(&self.stream, self.status.slice(), problems.len());
        let status = status.map_err(failed("cuMemcpyDtoHAsync"))?;
        let centroids = element.read::<T>(gpu, &self.centroids, 2 * all * self.dim, job)?;
        let labels = gpu.downloader.read(&self.stream, self.labels.slice(), self.rows, job)?;
        let labels: Vec<u32> = labels;
        let mut start = 0;
        let ends = problems.iter().zip(status).zip(&self.clusters).map(|((problem, status), k)| {
            let size = k * self.dim;
            let valid = start + status.current as usize * size;
            start += 2 * size;
            let end = BatchedResult {
                centroids: centroids[valid..valid + size].to_vec(),
                labels: labels_of(labels[problem.rows.clone()].to_vec()),
            };
            (status, end)
        });
        Ok(ends.collect())
    }
}
