//! The launches of Lloyd's rounds: assigning rows, adding them to their clusters, moving centroids.
#![allow(unsafe_code)]

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};

use super::kernels::{
    ADDED_ROWS, AssignStrategy, LANE_ROWS, SORTED_ROWS, TILE, WARPS, WarpgroupKernels, ranks,
    stages_bytes,
};
use super::row_type::Element;
use super::sorted::SortTargets;
use super::structs::Fp16Buffers;
use super::swizzled_tiles::{SWIZZLED_CENTROIDS, SWIZZLED_ROWS};
use super::workspace::KMeansWorkspace;
use crate::device::cuda::driver::launch::{Counted, config};
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::job::Job;

/// Threads of a block of `warpgroup_find`.
const WARPGROUP_THREADS: usize = 384;

/// Whether rows are sorted again after this number of assignments, which grows by factors of four:
/// fewer and fewer rows move.
fn is_time_to_sort(assigned: usize) -> bool {
    assigned.is_power_of_two() && assigned.trailing_zeros().is_multiple_of(2)
}

impl KMeansWorkspace {
    /// Finds every row's nearest centroid, and lists the rows whose cluster changed. `is_last`:
    /// also if rounds have ended.
    pub(super) fn assign(&mut self, is_last: bool, job: &Job) -> Result<()> {
        let is_last = u32::from(is_last);
        if self.gaps.as_ref().is_some_and(|gaps| gaps.are_known) {
            let all = config(self.count.div_ceil(1024), 1024, 0);
            // SAFETY: `list_rows` takes (Rounds, u32 is_last), 1,024 threads a block and a thread for each row:
            // it reads the gaps and labels of rows that have been compared, and the drifts of their clusters, and
            // writes `listed`. The three have room, as there are gaps.
            unsafe {
                self.launch(&self.kernels.list_rows, "list_rows", all, |launch, kernel| {
                    launch.arg(&kernel.rounds).arg(&is_last);
                })
            }?;
        }
        self.compare(is_last, job)?;
        self.assigned += 1;
        if let Some(gaps) = &mut self.gaps {
            gaps.are_known = true;
        }
        Ok(())
    }

    fn compare(&mut self, is_last: u32, job: &Job) -> Result<()> {
        match self.strategy {
            AssignStrategy::SortMeans => {
                let kernels = self.kernels.clone();
                let (function, name, rows) = if self.assigned == 0 {
                    (&kernels.assign_first, "assign_first", 256 * LANE_ROWS)
                } else {
                    self.sort_centroids(is_last)?;
                    match is_last {
                        0 => (&kernels.assign_sort_means, "assign_sort_means", 256),
                        _ => (&kernels.assign_last, "assign_last", 256),
                    }
                };
                self.in_pieces(rows, self.counted(), job, |kernel, blocks| {
                    let (first, all) = ((blocks.start * rows) as u32, config(blocks.len(), 256, 0));
                    // SAFETY: all take (Rounds, SortedCentroids, u32 first, u32 is_last), 256
                    // threads a block, for rows from `first` on. `assign_first` writes the labels
                    // of all rows, and reads none; `assign_sort_means` and `assign_last` then read
                    // them and the lists just written by `sort_centroids`, and write labels and
                    // `moved`.
                    unsafe {
                        kernel.launch(function, name, all, |launch, kernel| {
                            launch
                                .arg(&kernel.rounds)
                                .arg(&kernel.sorted_centroids)
                                .arg(&first)
                                .arg(&is_last);
                        })
                    }
                })
            }
            AssignStrategy::Tiles => self.assign_by_tiles(is_last, job),
        }
    }

    /// Sorts the centroids by their distances from each centroid, and sorts rows if it is time.
    fn sort_centroids(&mut self, is_last: u32) -> Result<()> {
        let size = self.k.next_power_of_two();
        let lists = config(self.k, size.clamp(64, 512) / 2, size * 8);
        let (list, size) = (&self.kernels.sort_centroids, size as u32);
        // SAFETY: `sort_centroids` takes (Rounds, SortedCentroids, u32 size, u32 is_last), a block
        // of up to 256 threads for each centroid, and shared memory for `size` u64, a power of two
        // from `k` on: `k` of them go to the centroid's own part of `lists`, which has room for
        // k × k.
        unsafe {
            self.launch(list, "sort_centroids", lists, |launch, workspace| {
                launch
                    .arg(&workspace.rounds)
                    .arg(&workspace.sorted_centroids)
                    .arg(&size)
                    .arg(&is_last);
            })
        }?;
        if is_last == 0 && is_time_to_sort(self.assigned) {
            self.sort(ranks(self.strategy, self.k))?;
        }
        Ok(())
    }

    fn assign_by_tiles(&mut self, is_last: u32, job: &Job) -> Result<()> {
        let centroids = config(self.k.next_multiple_of(SWIZZLED_CENTROIDS).div_ceil(8), 256, 0);
        // SAFETY: `round_centroids` takes (Rounds, Fp16Buffers, u32 is_last), 256 threads a block
        // and a warp for each centroid of whole swizzled tiles: it writes `fp16_centroids`,
        // `half_squares` and `far`, which have room for these, and the status.
        unsafe {
            let kernel = &self.kernels.round_centroids;
            self.launch_fp16(kernel, "round_centroids", centroids, is_last)
        }?;
        let kernels = self.kernels.clone();
        match &kernels.by_warpgroups {
            Some(warpgroups) => self.assign_by_warpgroups(warpgroups, is_last, job)?,
            None => self.assign_by_warps(is_last, job)?,
        }
        let pairs = config(self.blocks(8), 128, 0);
        let compare = &kernels.compare_candidates;
        // SAFETY: the three take (Rounds, Fp16Buffers, u32 is_last) and any number of blocks, of
        // 128, 256 and 256 threads. `compare_candidates` reads the pairs that products have listed,
        // `room_for_pairs` at most, of places in `uncertain` and centroids below `k`, and writes
        // `nearest`, and `distances` of f64. `name_nearest`, of f64 alone, has both and `clusters`.
        // `settle` reads what they wrote of the rows in `uncertain`, and writes labels, gaps and
        // `moved`.
        unsafe {
            self.launch_fp16(compare, "compare_candidates", pairs, is_last)?;
            if kernels.row_type.element == Element::F64 {
                let pairs = config(self.blocks(8), 256, 0);
                self.launch_fp16(&kernels.name_nearest, "name_nearest", pairs, is_last)?;
            }
            let uncertain = config(self.blocks(2), 256, 0);
            self.launch_fp16(&kernels.settle, "settle", uncertain, is_last)
        }
    }

    fn assign_by_warpgroups(
        &mut self,
        kernels: &WarpgroupKernels,
        is_last: u32,
        job: &Job,
    ) -> Result<()> {
        let grid = config(self.blocks(1), WARPGROUP_THREADS, kernels.swizzled.shared());
        // SAFETY: `warpgroup_find` reads the swizzled tiles of rows and of centroids, which were
        // rounded before, and writes `results` of the rows in its tiles.
        unsafe {
            let (find, counted) = (&kernels.find, self.counted());
            self.for_swizzled_tiles(find, "warpgroup_find", grid, counted, is_last, job)
        }?;
        let all = config(self.count.div_ceil(256), 256, 0);
        // SAFETY: `take_certain` takes (Rounds, Fp16Buffers, u32 is_last), 256 threads a block and a
        // thread for each row: it reads `results`, which the launches before have written of all
        // rows to compare, and writes labels, gaps, `moved`, `uncertain` and `least`.
        unsafe { self.launch_fp16(&self.kernels.take_certain, "take_certain", all, is_last) }?;
        // Only of uncertain rows, which are few.
        // SAFETY: `warpgroup_candidates` reads the swizzled tiles of uncertain rows and of all
        // centroids, and `least`, and lists pairs, as far as there is room.
        unsafe {
            let (candidates, counted) = (&kernels.candidates, Counted::AtMost);
            self.for_swizzled_tiles(candidates, "warpgroup_candidates", grid, counted, is_last, job)
        }
    }

    /// Launches a kernel for all swizzled tiles of rows, some at a time.
    ///
    /// # Safety
    /// The requirements of [`launch`](Self::launch), for a kernel that takes `Rounds`,
    /// `Fp16Buffers`, the first swizzled tile of rows, the one after the last, and whether it is
    /// the last round.
    unsafe fn for_swizzled_tiles(
        &mut self,
        function: &CudaFunction,
        name: &'static str,
        grid: LaunchConfig,
        counted: Counted,
        is_last: u32,
        job: &Job,
    ) -> Result<()> {
        self.in_pieces(SWIZZLED_ROWS, counted, job, |workspace, some| {
            let (first, end) = (some.start as u32, some.end as u32);
            // SAFETY: the caller's; tiles up to `end` exist.
            unsafe {
                workspace.launch(function, name, grid, |launch, workspace| {
                    launch.arg(&workspace.rounds).arg(&workspace.fp16);
                    launch.arg(&first).arg(&end).arg(&is_last);
                })
            }
        })
    }

    fn assign_by_warps(&mut self, is_last: u32, job: &Job) -> Result<()> {
        let (rows, threads) = (32 * WARPS, 32 * WARPS);
        let shared = stages_bytes(self.kernels.row_type.dim);
        self.in_pieces(rows, self.counted(), job, |workspace, blocks| {
            let (first, all) = (blocks.start as u32, config(blocks.len(), threads, shared));
            let function = &workspace.kernels.assign_tiles;
            // SAFETY: `assign_tiles` takes (Rounds, Fp16Buffers, u32 first_block, u32 is_last),
            // `WARPS` warps and `stages_bytes` a block, each of 32 rows a warp from its own on: it
            // reads the rows and centroids that were rounded before, and writes labels, gaps,
            // `moved`, `uncertain` and `least`.
            unsafe {
                workspace.launch(function, "assign_tiles", all, |launch, workspace| {
                    launch.arg(&workspace.rounds).arg(&workspace.fp16).arg(&first).arg(&is_last);
                })
            }
        })?;
        let mut some = config(self.count.div_ceil(rows).min(self.blocks(1)), threads, shared);
        // In parts of all centroids: few rows are uncertain, and each block compares them with its
        // part.
        some.grid_dim.1 = (self.k.div_ceil(TILE) / 2).clamp(1, 8) as u32;
        // SAFETY: `find_candidates` takes (Rounds, Fp16Buffers, u32 is_last), blocks as
        // `assign_tiles` and any number of them, in any number of parts: it reads `uncertain` and
        // `least`, and lists pairs, as far as there is room.
        unsafe {
            let kernel = &self.kernels.find_candidates;
            self.launch_fp16(kernel, "find_candidates", some, is_last)
        }
    }

    /// Whether the number of compared rows is exact: after the first time, rows may be skipped.
    fn counted(&self) -> Counted {
        Counted::of_all(self.assigned == 0)
    }

    /// Launches a kernel for `rows` rows, in pieces of bounded work.
    fn in_pieces(
        &mut self,
        rows: usize,
        counted: Counted,
        job: &Job,
        launch: impl Fn(&Self, std::ops::Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let blocks = self.count.div_ceil(rows);
        let per_block = (rows * self.k * self.kernels.row_type.dim) as f64;
        let mut next = 0;
        while next < blocks {
            job.check()?;
            let most = ((self.rate.of_a_launch() / per_block) as usize).max(1);
            let some = next..blocks.min(next.saturating_add(most));
            launch(self, some.clone())?;
            let work = some.len() as f64 * per_block;
            self.throttle.launched(&self.stream, &self.rate, work, counted)?;
            next = some.end;
        }
        Ok(())
    }

    /// Adds the moved rows to the sums or, if no row is added yet and rows can be sorted, all rows.
    pub(super) fn add(&mut self) -> Result<()> {
        assert!(self.assigned > 0, "rows have clusters");
        let are_added = std::mem::replace(&mut self.are_added, true);
        if !are_added && self.at_places.is_some() {
            let (labels, positions) = match self.strategy {
                AssignStrategy::SortMeans => {
                    self.sort(1)?;
                    (self.rounds.labels, 0)
                }
                AssignStrategy::Tiles => {
                    // The memory of two lists of u32, which each round overwrites.
                    let Fp16Buffers { uncertain, least, .. } = self.fp16;
                    let to = SortTargets { rows: 0, numbers: uncertain, labels: least };
                    // SAFETY: all rows were assigned just before, both have room for a u32 of each, and one
                    // rank is what `at_places` has room for.
                    unsafe { self.order(to, 1) }?;
                    (least, uncertain)
                }
            };
            let threads = self.count.div_ceil(ADDED_ROWS) * self.kernels.row_type.width();
            let all = config(threads.div_ceil(256), 256, 0);
            // SAFETY: `add_sorted` takes (Rounds, Sums, const u32* labels, const u32* positions), 256 threads a
            // block and a thread for each sum of `ADDED_ROWS` rows. Labels, and positions unless they are null,
            // are `count` u32, sorted on this stream just before: clusters below `k`, and each row once.
            return unsafe {
                self.launch(&self.kernels.add_sorted, "add_sorted", all, |launch, kernel| {
                    launch.arg(&kernel.rounds).arg(&kernel.in_sums).arg(&labels).arg(&positions);
                })
            };
        }
        let some = config(self.blocks(8), 256, 0);
        // SAFETY: `add_moved` takes (Rounds, Sums), 256 threads a block and any number of them: it reads `moved`,
        // which assigning has written as far as the status says, or the labels of all rows, and adds to the
        // sums of clusters below `k`.
        unsafe { self.launch_sums(&self.kernels.add_moved, "add_moved", some) }
    }

    /// Moves every centroid to the mean of its rows, unless rounds end.
    pub(super) fn update(&self) -> Result<()> {
        assert!(self.assigned > 0, "rows have clusters");
        if self.sums.singles.is_some() {
            let some = config(self.blocks(8), 256, 0);
            // SAFETY: both take (Rounds, Sums), 256 threads a block and any number of them: they read the labels
            // of all rows, which are below `k`, and write `first_rows` and then `differing`, which there are.
            unsafe {
                self.launch_sums(&self.kernels.find_first_rows, "find_first_rows", some)?;
                self.launch_sums(&self.kernels.find_differing, "find_differing", some)?;
            }
        }
        let clusters = config(self.k.div_ceil(8), 256, 0);
        // SAFETY: `finish_round` takes (Rounds, Sums), 256 threads a block and a warp for each cluster: it reads
        // the sums, and writes the set of centroids that is not valid, `shifts`, drifts and the status.
        unsafe { self.launch_sums(&self.kernels.finish_round, "finish_round", clusters) }
    }

    /// Sorts rows by cluster and, within a cluster, into `ranks` ranks by the number of centroids
    /// to compare. All rows must have a cluster.
    fn sort(&mut self, ranks: usize) -> Result<()> {
        let Some(mut sorted) = self.sorted.take() else { return Ok(()) };
        let targets = sorted.targets(&self.stream);
        // SAFETY: callers have assigned all rows; the targets have room for them, are not the rows
        // that are moved, and stay in this workspace, whose `at_places` has room for the most ranks
        // of its strategy.
        unsafe { self.order(targets, ranks) }?;
        sorted.swap(&mut self.rows, &mut self.labels, &mut self.rounds, &self.stream);
        self.sorted = Some(sorted);
        Ok(())
    }

    /// Writes numbers and labels of all rows, and rows of few elements, in the order of their
    /// clusters to other memory of the same size.
    ///
    /// # Safety
    /// All rows are in a cluster. `numbers` and `labels` are the addresses of `count` u32 each, and
    /// `rows`, unless it is null, of `count` rows: memory of this workspace that its
    /// [`RoundsOnDevice`](super::structs::RoundsOnDevice) do not name. There are at most as many
    /// `ranks` as `at_places` has room for; where there are several, centroids have been listed.
    unsafe fn order(&mut self, targets: SortTargets, ranks: usize) -> Result<()> {
        let SortTargets { rows, numbers, labels } = targets;
        let Some(counts) = &mut self.at_places else { return Ok(()) };
        self.stream.memset_zeros(counts.slice_mut()).map_err(failed("cuMemsetD8Async"))?;
        let (kernels, places) = (&self.kernels, self.k * ranks);
        let blocks = config(self.count.div_ceil(SORTED_ROWS), 1024, places * 4);
        let ranks = ranks as u32;
        let (counts, all) = (self.sorted_centroids.sorted_counts, places as u32);
        let total = counts + u64::from(all) * 4;
        // SAFETY: `sort_count` takes (Rounds, SortedCentroids, u32 ranks), 1,024 threads and
        // k × ranks u32 of shared memory a block, each for `SORTED_ROWS` rows, all of which are in
        // clusters below `k`; it counts in `sorted_counts`, zero before, and notes places in
        // `moved`, which no list needs any more. `add_up` takes (u32* counts, u32 total, u32
        // together, u32* sums): one block adds up these counts, and writes what the buffer has one
        // more u32 for. `sort_move` takes (Rounds, SortedCentroids, u32 ranks, Scalar* rows, u32*
        // numbers, u32* labels) in the grid of `sort_count`: it moves each row to a position of its
        // own below `count`, for which the targets have room, none of which `rounds` names.
        unsafe {
            self.launch(&kernels.sort_count, "sort_count", blocks, |launch, workspace| {
                launch.arg(&workspace.rounds).arg(&workspace.sorted_centroids).arg(&ranks);
            })?;
            self.launch(&kernels.add_up, "add_up", config(1, 1024, 0), |launch, _| {
                launch.arg(&counts).arg(&all).arg(&all).arg(&total);
            })?;
            self.launch(&kernels.sort_move, "sort_move", blocks, |launch, kernel| {
                launch.arg(&kernel.rounds).arg(&kernel.sorted_centroids).arg(&ranks);
                launch.arg(&rows).arg(&numbers).arg(&labels);
            })
        }
    }
}
