//! The kernel launches of DBSCAN's phases, once rows are in order: counting, linking, attaching.
//!
//! A stage that takes long is launched again and again: each launch ends in time, and records how
//! far it is.
#![allow(unsafe_code)]

use cudarc::driver::PushKernelArg;

use super::kernels::{SECTION, STAGED_THREADS, Staged};
use super::structs::DbscanOnDevice;
use super::tiles::parts;
use super::workspace::{DbscanWorkspace, Stage};
use crate::device::cuda::driver::launch::config;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::job::Job;

impl DbscanWorkspace {
    /// Finds the core rows.
    pub(super) fn count(&mut self, job: &Job) -> Result<()> {
        assert_eq!(self.done, Stage::Order);
        let kernels = self.kernels.clone();
        // SAFETY: `count_within_tiles` takes (Dbscan): it reads tiles in order, and writes `near`, `core` and `offsets`
        // of each.
        unsafe { self.stage(&kernels.count_within_tiles, &[], job) }?;
        self.list()?;
        // SAFETY: `count_near` takes (Dbscan): it reads the slots that `list` lists, and writes `counted` at
        // their places and their bits of `core`.
        unsafe { self.stage(&kernels.count_near, &[], job) }?;
        self.done = Stage::Count;
        Ok(())
    }

    /// Joins core rows within eps of each other.
    pub(super) fn link(&mut self, job: &Job) -> Result<()> {
        assert_eq!(self.done, Stage::Count);
        let kernels = self.kernels.clone();
        // SAFETY: `alone` takes (Dbscan, u32 count) and makes each of `count` rows its own parent. `link_within_tiles`
        // takes (Dbscan), a warp for each tile: it joins rows of a tile that are in `core`, which counting has
        // written; `order` gives rows below `count` for them, which have parents from then on.
        unsafe {
            self.run_rows(&kernels.alone, "alone")?;
            self.run(&kernels.link_within_tiles, "link_within_tiles", self.by_tile())?;
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
        unsafe { self.run(&kernels.count_others, "count_others", self.by_tile()) }?;
        self.list()?;
        // SAFETY: `attach` takes (Dbscan): it reads the slots that `list` lists, the boxes and what is known of
        // nodes, and writes `firsts` of rows below `count`.
        unsafe { self.stage(&kernels.attach, &[], job) }?;
        // SAFETY: `finish` takes (Dbscan), a warp for each tile: it writes `firsts` and `is_core` of its rows,
        // whose parents are roots since `know`.
        unsafe { self.run(&kernels.finish, "finish", self.by_tile()) }
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
            self.launch(&kernels.add_up, "add_up", config(sections, 256, 0), |launch, _| {
                launch.arg(&offsets).arg(&tile_count).arg(&section).arg(&sums);
            })?;
            self.launch(&kernels.add_up, "add_up", config(1, 1024, 0), |launch, _| {
                launch.arg(&sums).arg(&count).arg(&count).arg(&last);
            })?;
            self.run(&kernels.list_others, "list_others", self.by_tile())
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
        // of which have parents. Where `next` is 1 these nodes are tiles, of which `link_within_tiles` has written what is
        // known; before the next launch `know` writes it for all levels.
        unsafe { self.stage(&kernels.link_tiles, &[next, parts as u32], job) }
    }

    /// Launches a stage until it has no items left. `more` are the kernel's arguments after the rows.
    ///
    /// # Safety
    /// The requirements of [`launch`](Self::launch), for a kernel that takes `Dbscan` and as many u32
    /// as there are in `more`.
    unsafe fn stage(&mut self, staged: &Staged, more: &[u32], job: &Job) -> Result<()> {
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
                self.launch(&staged.function, staged.name, grid, |launch, all| {
                    launch.arg(all);
                    for argument in more {
                        launch.arg(argument);
                    }
                })
            }?;
            if self.progress()?.unfinished == 0 {
                return Ok(());
            }
        }
    }
}
