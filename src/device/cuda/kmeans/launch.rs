//! Every kernel launch of Lloyd's rounds over one set of rows, and the memory that they share.
//!
//! The kernels of a round work on one set of buffers, which a [`Workspace`] allocates in the sizes
//! that they rely on and keeps until it is dropped; kernels get it as [`Rounds`], [`Sums`], [`Near`]
//! and [`Halves`]. Kernels run in the order of one stream.
#![allow(unsafe_code)]

mod gaps;
mod sums;

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, LaunchArgs, LaunchConfig, PushKernelArg};

use self::gaps::Gaps;
use self::sums::SumsMemory;
use super::halves::of_tiles;
use super::images::{IMAGE_CENTROIDS, IMAGE_ROWS};
use super::kernels::{
    ADDED_ROWS, MOST_ROWS, RoundKernels, SORTED_ROWS, TILE, WARPS, Way, ranks, stages_bytes,
};
use super::structs::{Halves, Near, Rounds, Status, Sums};
use crate::device::ClusterSums;
use crate::device::contract::KMeansProblem;
use crate::device::cuda::driver::launch::{Pace, Rate, address, check_size, config};
use crate::device::cuda::driver::memory::{Buffer, Memory};
use crate::device::cuda::driver::sys::{self, failed};
use crate::error::Result;
use crate::job::Job;

/// Rows on a device, with all buffers that rounds need.
pub(super) struct Workspace {
    kernels: Arc<RoundKernels>,
    stream: Arc<CudaStream>,
    way: Way,
    count: usize,
    k: usize,
    rounds: Rounds,
    in_sums: Sums,
    near: Near,
    halves: Halves,
    pace: Pace,
    /// The rate of assigning rows.
    rate: Arc<Rate>,
    status: Buffer,
    centroids: Buffer,
    labels: Buffer,
    /// What tells which rows need not be compared, if anything does.
    gaps: Option<Gaps>,
    /// The memory of cluster sums: all zero without rows.
    sums: SumsMemory,
    rows: Buffer,
    /// How many rows there are at each place of an order by cluster, where few places are enough; and in all.
    at_places: Option<Buffer>,
    /// Buffers for sorted rows, their numbers and labels.
    sorted: Option<Sorted>,
    /// The memory behind the other addresses.
    _kept: Vec<Buffer>,
}

/// How often rows are rounded at most, by other scales.
const MOST_SCALES: usize = 4;

/// Shorter rows may have lost elements.
const LEAST_TYPICAL: f32 = 1.0;

/// Threads of a block of `find_by_groups`.
const GROUP_THREADS: usize = 384;

struct Sorted {
    rows: Buffer,
    labels: Buffer,
    numbers: [Buffer; 2],
}

impl Workspace {
    /// Memory for rounds over `rows`, whose `ready` event has already been waited for.
    ///
    /// In one piece: it is a list of what there is, each in the size that its field says.
    pub(super) fn new(
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
        let (status, centroids) = (allocate(size_of::<Status>())?, allocate(2 * k * dim * 4)?);
        let labels = allocate(count * 4)?;
        let gaps = (way == Way::Tiles).then(|| Gaps::new((count, k), allocate)).transpose()?;
        let [of_rows, drifts, listed] = Gaps::addresses(gaps.as_ref(), stream);
        let sums = SumsMemory::new((k, dim), allocate)?;
        let (mut origin, mut inverse) = (allocate(dim * 8)?, allocate(dim * 8)?);
        sys::write(stream, origin.slice_mut(), &problem.origin)?;
        sys::write(stream, inverse.slice_mut(), &steps.inverse)?;
        let rounds = Rounds {
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
        let in_sums = Sums {
            sums: address(stream, &sums.sums),
            counts: address(stream, &sums.counts),
            wide: address(stream, &sums.wide),
            is_wide: address(stream, &sums.is_wide),
            inverse: address(stream, &inverse),
            shifts: place(k * 8)?,
            limit: steps.limit(),
            tolerance: problem.tolerance,
        };
        let (mut near, mut halves, mut sorted) = (Near::default(), Halves::default(), None);
        let at_places = match ranks(way, k) {
            0 => None,
            ranks => Some(allocate((k * ranks + 1) * 4)?),
        };
        near.sorted_counts = at_places.as_ref().map_or(0, |counts| address(stream, counts));
        match way {
            Way::Near => {
                near.lists = place(k * k * 8)?;
                sorted = Some(Sorted {
                    rows: allocate(count * dim * 4)?,
                    labels: allocate(count * 4)?,
                    numbers: [allocate(count * 4)?, allocate(count * 4)?],
                });
            }
            Way::Tiles => {
                let origin = address(stream, &origin);
                halves = of_tiles(problem, (&kernels, count), origin, &mut place)?;
            }
        }
        kept.extend([origin, inverse]);
        let rate = if way == Way::Tiles { &kernels.products } else { &kernels.sums }.clone();
        let (kernels, stream) = (kernels, stream.clone());
        let mut workspace = Self {
            kernels,
            stream,
            way,
            count,
            k,
            rounds,
            in_sums,
            near,
            halves,
            at_places,
            pace: Pace::default(),
            rate,
            status,
            centroids,
            labels,
            gaps,
            sums,
            rows,
            sorted,
            _kept: kept,
        };
        workspace.set_status(&Status::default())?;
        if way == Way::Tiles {
            workspace.round_rows()?;
        }
        Ok(workspace)
    }

    /// Rounds all rows to half precision, so that most of them have elements which that suits: one that is far away
    /// may be so large that nothing is left of the others.
    fn round_rows(&mut self) -> Result<()> {
        let at_first = self.halves;
        for _ in 1..MOST_SCALES {
            let (typical, largest) = self.round_and_measure()?;
            if typical >= LEAST_TYPICAL {
                return Ok(());
            }
            if largest == 0.0 {
                break;
            }
            self.halves.scale_up(f64::from(128.0 / typical.max(1e-6)));
            self.set_status(&Status::default())?;
        }
        // No scale suits most rows, as where most are equal: none of them counts as far away.
        self.halves = at_first;
        self.set_status(&Status::default())?;
        let (_, largest) = self.round_and_measure()?;
        let typical_row = largest.max(LEAST_TYPICAL).to_bits();
        self.set_status(&Status {
            largest_row: largest.to_bits(),
            typical_row,
            ..Status::default()
        })
    }

    /// Rounds all rows: a length that few exceed, and that of the longest.
    fn round_and_measure(&self) -> Result<(f32, f32)> {
        let all = config(self.count.next_multiple_of(IMAGE_ROWS).div_ceil(8), 256, 0);
        let round = (&self.kernels.round_rows, ("round_rows", all));
        let measure = (&self.kernels.measure_rows, ("measure_rows", config(1, 1024, 0)));
        for (kernel, grid) in [round, measure] {
            self.launch(kernel, grid, |launch, kernel| {
                launch.arg(&kernel.rounds).arg(&kernel.halves);
            })?;
        }
        let Status { typical_row, largest_row, .. } = self.status()?;
        Ok((f32::from_bits(typical_row), f32::from_bits(largest_row)))
    }

    /// The status of rounds. Waits for them.
    pub(super) fn status(&self) -> Result<Status> {
        let read = sys::read::<Status>(&self.stream, self.status.slice(), 1);
        Ok(read.map_err(failed("cuMemcpyDtoHAsync"))?[0])
    }

    /// Sets the status that the next launches read.
    pub(super) fn set_status(&mut self, status: &Status) -> Result<()> {
        sys::write(&self.stream, self.status.slice_mut(), std::slice::from_ref(status))
    }

    /// The valid centroids, in the set `current`.
    pub(super) fn centroids(&self, current: u32) -> Result<Vec<f32>> {
        let size = self.k * self.kernels.dim;
        let both = sys::read::<f32>(&self.stream, self.centroids.slice(), 2 * size);
        let both = both.map_err(failed("cuMemcpyDtoHAsync"))?;
        Ok(both[current as usize * size..][..size].to_vec())
    }

    /// Stores these as the first of the two sets: all rows are compared with them.
    pub(super) fn set_centroids(&mut self, centroids: &[f32]) -> Result<()> {
        assert_eq!(centroids.len(), self.k * self.kernels.dim);
        sys::write(&self.stream, self.centroids.slice_mut(), centroids)?;
        self.gaps.as_mut().map_or(Ok(()), |gaps| gaps.forget(&self.stream))
    }

    /// Takes all rows out of their clusters.
    pub(super) fn clear(&mut self) -> Result<()> {
        let labels = sys::fill(&self.stream, self.labels.slice_mut(), 0xff);
        labels.map_err(failed("cuMemsetD8Async"))?;
        self.sums.clear(&self.stream)
    }

    /// Sums of all clusters, in steps of `empty`.
    pub(super) fn sums(&self, empty: &ClusterSums) -> Result<ClusterSums> {
        self.sums.read(&self.stream, (self.k, self.kernels.dim), empty)
    }

    /// Finds every row's nearest centroid, and lists the rows whose cluster changed. `is_last`: also
    /// if rounds have ended.
    pub(super) fn assign(&mut self, is_last: bool, job: &Job) -> Result<()> {
        let is_last = u32::from(is_last);
        if self.are_gaps_known() {
            let all = config(self.count.div_ceil(1024), 1024, 0);
            self.launch(&self.kernels.list_rows, ("list_rows", all), |launch, kernel| {
                launch.arg(&kernel.rounds).arg(&is_last);
            })?;
        }
        self.compare(is_last, job)?;
        if let Some(gaps) = &mut self.gaps {
            gaps.are_known = true;
        }
        Ok(())
    }

    fn are_gaps_known(&self) -> bool {
        self.gaps.as_ref().is_some_and(|gaps| gaps.are_known)
    }

    fn compare(&mut self, is_last: u32, job: &Job) -> Result<()> {
        match self.way {
            Way::Near => {
                let size = self.k.next_power_of_two();
                let lists = config(self.k, size.clamp(64, 512) / 2, size * 8);
                let list = (&self.kernels.list_centroids, ("list_centroids", lists), size as u32);
                self.launch_near(list.0, list.1, list.2)?;
                self.in_pieces(256, job, |kernel, blocks| {
                    let (first, all) = ((blocks.start * 256) as u32, config(blocks.len(), 256, 0));
                    let function = &kernel.kernels.assign_near;
                    kernel.launch(function, ("assign_near", all), |launch, kernel| {
                        launch.arg(&kernel.rounds).arg(&kernel.near).arg(&first).arg(&is_last);
                    })
                })
            }
            Way::Tiles => self.assign_by_tiles(is_last, job),
        }
    }

    fn assign_by_tiles(&mut self, is_last: u32, job: &Job) -> Result<()> {
        let (rows, threads) = (32 * WARPS, 32 * WARPS);
        let shared = stages_bytes(self.kernels.dim);
        let centroids = config(self.k.next_multiple_of(IMAGE_CENTROIDS).div_ceil(8), 256, 0);
        self.launch_halves(&self.kernels.round_centroids, ("round_centroids", centroids), is_last)?;
        let kernels = self.kernels.clone();
        match &kernels.find_by_groups {
            Some((images, function)) => {
                let blocks = self.blocks(1);
                self.in_pieces(IMAGE_ROWS, job, |kernel, some| {
                    let (first, end) = (some.start as u32, some.end as u32);
                    let grid = config(some.len().min(blocks), GROUP_THREADS, images.shared());
                    kernel.launch(function, ("find_by_groups", grid), |launch, kernel| {
                        launch.arg(&kernel.rounds).arg(&kernel.halves);
                        launch.arg(&first).arg(&end).arg(&is_last);
                    })
                })?;
                let all = config(self.count.div_ceil(256), 256, 0);
                self.launch_halves(&kernels.take_found, ("take_found", all), is_last)?;
            }
            None => self.in_pieces(rows, job, |kernel, blocks| {
                let (first, all) = (blocks.start as u32, config(blocks.len(), threads, shared));
                let function = &kernel.kernels.assign_tiles;
                kernel.launch(function, ("assign_tiles", all), |launch, kernel| {
                    launch.arg(&kernel.rounds).arg(&kernel.halves).arg(&first).arg(&is_last);
                })
            })?,
        }
        let blocks = self.count.div_ceil(rows);
        let mut some = config(blocks.min(self.blocks(1)), threads, shared);
        // Parts of all centroids: few rows are uncertain, and each block goes through its part.
        some.grid_dim.1 = (self.k.div_ceil(TILE) / 2).clamp(1, 8) as u32;
        let kernels = &self.kernels;
        self.launch_halves(&kernels.find_candidates, ("find_candidates", some), is_last)?;
        let pairs = config(self.blocks(8), 128, 0);
        self.launch_halves(&kernels.compare_candidates, ("compare_candidates", pairs), is_last)?;
        let uncertain = config(self.blocks(2), 256, 0);
        self.launch_halves(&kernels.settle, ("settle", uncertain), is_last)
    }

    /// Launches a kernel for all rows, in blocks of a given size, with bounded work per launch.
    fn in_pieces(
        &mut self,
        rows: usize,
        job: &Job,
        launch: impl Fn(&Self, std::ops::Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let blocks = self.count.div_ceil(rows);
        let per_block = (rows * self.k * self.kernels.dim) as f64;
        let mut next = 0;
        while next < blocks {
            job.check()?;
            let most = ((self.rate.of_a_launch() / per_block) as usize).max(1);
            let some = next..blocks.min(next.saturating_add(most));
            launch(self, some.clone())?;
            let work = some.len() as f64 * per_block;
            self.pace.count(&self.stream, &self.rate, work, !self.are_gaps_known())?;
            next = some.end;
        }
        Ok(())
    }

    /// Adds the listed rows to their clusters, or, in the first round, all rows, if they are sorted.
    pub(super) fn add(&mut self, is_first: bool) -> Result<()> {
        if is_first && self.at_places.is_some() {
            let (labels, positions) = match self.way {
                Way::Near => {
                    self.sort()?;
                    (self.rounds.labels, 0)
                }
                Way::Tiles => {
                    // Of as many u32, which each round uses anew.
                    let Halves { uncertain, least, .. } = self.halves;
                    self.order((0, uncertain, least))?;
                    (least, uncertain)
                }
            };
            let threads = self.count.div_ceil(ADDED_ROWS) * self.kernels.dim;
            let all = config(threads.div_ceil(256), 256, 0);
            return self.launch(&self.kernels.add_sorted, ("add_sorted", all), |launch, kernel| {
                launch.arg(&kernel.rounds).arg(&kernel.in_sums).arg(&labels).arg(&positions);
            });
        }
        let some = config(self.blocks(8), 256, 0);
        self.launch_sums(&self.kernels.add_moved, ("add_moved", some))
    }

    /// Moves every centroid to the mean of its rows, unless rounds end.
    pub(super) fn update(&self) -> Result<()> {
        let clusters = config(self.k.div_ceil(8), 256, 0);
        self.launch_sums(&self.kernels.finish_round, ("finish_round", clusters))
    }

    /// Sorts rows by cluster, and within it by how many centroids they are compared with, if that makes
    /// assigning them faster. All rows must be in a cluster.
    pub(super) fn sort(&mut self) -> Result<()> {
        let Some(mut sorted) = self.sorted.take() else { return Ok(()) };
        let Sorted { rows, labels, numbers: [numbers, _] } = &sorted;
        let to = [rows, numbers, labels].map(|buffer| address(&self.stream, buffer));
        self.order(to.into())?;
        std::mem::swap(&mut self.rows, &mut sorted.rows);
        std::mem::swap(&mut self.labels, &mut sorted.labels);
        self.rounds.rows = address(&self.stream, &self.rows);
        self.rounds.labels = address(&self.stream, &self.labels);
        self.rounds.numbers = address(&self.stream, &sorted.numbers[0]);
        sorted.numbers.swap(0, 1);
        self.sorted = Some(sorted);
        Ok(())
    }

    /// Writes rows of few elements, numbers and labels of all rows in the order of their clusters to other memory for as
    /// many.
    fn order(&mut self, (rows, numbers, labels): (u64, u64, u64)) -> Result<()> {
        let Some(counts) = &mut self.at_places else { return Ok(()) };
        self.stream.memset_zeros(counts.slice_mut()).map_err(failed("cuMemsetD8Async"))?;
        let (kernels, ranks) = (&self.kernels, ranks(self.way, self.k));
        let places = self.k * ranks;
        let blocks = config(self.count.div_ceil(SORTED_ROWS), 1024, places * 4);
        let ranks = ranks as u32;
        self.launch_near(&kernels.sort_count, ("sort_count", blocks), ranks)?;
        let (counts, places) = (self.near.sorted_counts, places as u32);
        let total = counts + u64::from(places) * 4;
        self.launch(&kernels.add_up, ("add_up", config(1, 1024, 0)), |launch, _| {
            launch.arg(&counts).arg(&places).arg(&places).arg(&total);
        })?;
        self.launch(&kernels.sort_move, ("sort_move", blocks), |launch, kernel| {
            // Positions are below `count`, for which the targets have room.
            launch.arg(&kernel.rounds).arg(&kernel.near).arg(&ranks);
            launch.arg(&rows).arg(&numbers).arg(&labels);
        })
    }

    /// Labels and costs of all rows, in their original order.
    pub(super) fn assigned(&self, memory: &Arc<Memory>) -> Result<(Vec<u32>, Vec<f32>)> {
        let mut labels = memory.allocate(&self.stream, self.count * 4)?;
        let mut costs = memory.allocate(&self.stream, self.count * 4)?;
        let all = config(self.count.div_ceil(128), 128, 0);
        self.launch(&self.kernels.costs, ("costs", all), |launch, kernel| {
            // Numbers are below `count`, for which both targets have room.
            launch.arg(&kernel.rounds).arg(labels.slice_mut()).arg(costs.slice_mut());
        })?;
        let home = failed("cuMemcpyDtoHAsync");
        let labels = sys::read(&self.stream, labels.slice(), self.count).map_err(&home)?;
        Ok((labels, sys::read(&self.stream, costs.slice(), self.count).map_err(&home)?))
    }

    fn blocks(&self, per_multiprocessor: usize) -> usize {
        per_multiprocessor * self.kernels.limits.multiprocessors
    }

    /// Launches a kernel with the arguments that `add` gives it.
    fn launch<'a>(
        &'a self,
        function: &'a CudaFunction,
        (name, grid): (&'static str, LaunchConfig),
        add: impl FnOnce(&mut LaunchArgs<'a>, &'a Self),
    ) -> Result<()> {
        let mut launch = self.stream.launch_builder(function);
        add(&mut launch, self);
        // SAFETY: the structs' buffers live as long as this workspace, have the sizes that are written
        // at their fields, and are used on this stream only; kernels touch positions of rows below
        // `count`, clusters below `k` and elements below `dim`, for which they were compiled. Lists
        // of rows hold each row once at most. Arguments are those that the kernel declares.
        unsafe { launch.launch(grid) }.map_err(failed(name))?;
        Ok(())
    }

    fn launch_sums(
        &self,
        function: &CudaFunction,
        grid: (&'static str, LaunchConfig),
    ) -> Result<()> {
        self.launch(function, grid, |launch, kernel| {
            launch.arg(&kernel.rounds).arg(&kernel.in_sums);
        })
    }

    fn launch_halves(
        &self,
        function: &CudaFunction,
        grid: (&'static str, LaunchConfig),
        is_last: u32,
    ) -> Result<()> {
        self.launch(function, grid, |launch, kernel| {
            launch.arg(&kernel.rounds).arg(&kernel.halves).arg(&is_last);
        })
    }

    fn launch_near(
        &self,
        function: &CudaFunction,
        grid: (&'static str, LaunchConfig),
        number: u32,
    ) -> Result<()> {
        self.launch(function, grid, |launch, kernel| {
            launch.arg(&kernel.rounds).arg(&kernel.near).arg(&number);
        })
    }
}
