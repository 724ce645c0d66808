//! Launches that set the initial thresholds of lists, before rows are scanned (prebounds), and that
//! repair lists which are short or whose candidates overflow.
//!
//! Buffers are borrowed for the call, as in `launch`.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaStream, PushKernelArg};

use super::launch::{ListBuffers, Pass, SearchKernels};
use super::passes::PANEL;
use super::spec::real_bytes;
use crate::device::cuda::driver::launch::{check_size, config};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;

impl SearchKernels {
    /// The number of parts into which the panels that bound lists are cut, so that all
    /// multiprocessors are busy.
    pub(super) fn bounding_splits(&self, lists: &ListBuffers, visits: usize) -> usize {
        (2 * self.multiprocessors).div_ceil(lists.queries.div_ceil(PANEL)).clamp(1, visits)
    }

    /// Sets the thresholds of empty lists from a pass's visits; `least` holds 32 totals per query
    /// and split.
    pub(super) fn bound_lists(
        &self,
        stream: &Arc<CudaStream>,
        (queries, base): (&Buffer, &Buffer),
        (lists, least): (&mut ListBuffers, &mut Buffer),
        pass: &Pass,
    ) -> Result<()> {
        self.check_pass(queries, base, lists, pass);
        let splits = self.bounding_splits(lists, (pass.end - pass.begin) as usize);
        assert!(pass.k <= 32 && pass.dense == 0);
        check_size(least, lists.queries * splits * 32, real_bytes(self.spec().kind()));
        let mut launch = stream.launch_builder(&self.scan_least);
        launch.arg(queries.slice()).arg(base.slice()).arg(least.slice_mut()).arg(pass);
        // SAFETY: `check_pass` holds: whole panels on both sides; 32 totals are written for each query
        // below `queries` and each split.
        unsafe { launch.launch(self.scan_grid(lists, splits)) }.map_err(failed("scan_least"))?;
        let (count, splits) = (lists.queries as u32, splits as u32);
        let mut launch = stream.launch_builder(&self.bound_lists);
        launch.arg(least.slice()).arg(lists.worst.slice_mut()).arg(lists.reach.slice_mut());
        launch.arg(&count).arg(&splits).arg(&pass.k);
        // SAFETY: a warp for each query, with an element in `worst` and `reach`.
        unsafe { launch.launch(config(lists.queries.div_ceil(8), 256, 0)) }
            .map_err(failed("bound_lists"))?;
        Ok(())
    }

    /// Extends all lists from `have` to `want` neighbours by empty entries.
    pub(super) fn lengthen_lists(
        &self,
        stream: &Arc<CudaStream>,
        lists: &mut ListBuffers,
        (have, want): (usize, usize),
    ) -> Result<()> {
        self.check(lists);
        assert!(have <= want && want <= lists.k);
        let sizes = [lists.queries, have, want, lists.slots].map(|size| size as u32);
        let mut launch = stream.launch_builder(&self.lengthen_lists);
        launch.arg(lists.entries.slice_mut());
        sizes.iter().for_each(|size| {
            launch.arg(size);
        });
        // SAFETY: entries below `k` of lists of queries below `queries` are written; `check` holds.
        unsafe { launch.launch(config(lists.queries.div_ceil(128), 128, 0)) }
            .map_err(failed("lengthen_lists"))?;
        Ok(())
    }

    /// Empties the lists that are not full and may lack a row that matters, and records their
    /// queries as overflowed.
    pub(super) fn find_short(
        &self,
        stream: &Arc<CudaStream>,
        lists: &mut ListBuffers,
        pass: &Pass,
    ) -> Result<()> {
        self.check(lists);
        assert!(pass.k as usize <= lists.k && pass.queries as usize == lists.queries);
        assert!(pass.slots as usize == lists.slots);
        let overflowed_count = lists.overflowed_count.slice_mut();
        stream.memset_zeros(overflowed_count).map_err(failed("cuMemsetD8Async"))?;
        let mut launch = stream.launch_builder(&self.find_short);
        launch.arg(lists.entries.slice_mut()).arg(lists.worst.slice_mut());
        launch.arg(lists.reach.slice_mut()).arg(lists.overflowed.slice_mut());
        launch.arg(lists.overflowed_count.slice_mut()).arg(pass);
        // SAFETY: `check` holds: `k` entries of every list, and an element per query in the others.
        unsafe { launch.launch(config(lists.queries.div_ceil(128), 128, 0)) }
            .map_err(failed("find_short"))?;
        Ok(())
    }

    /// Searches the pass's visits `begin..end` again for the queries whose candidates overflow.
    pub(super) fn search_again(
        &self,
        stream: &Arc<CudaStream>,
        queries: &Buffer,
        base: &Buffer,
        lists: &mut ListBuffers,
        pass: &Pass,
    ) -> Result<()> {
        self.check_pass(queries, base, lists, pass);
        let blocks = lists.queries.min(16 * self.multiprocessors);
        let mut launch = stream.launch_builder(&self.search_again);
        launch.arg(queries.slice()).arg(base.slice()).arg(lists.entries.slice_mut());
        launch.arg(lists.worst.slice_mut()).arg(lists.reach.slice_mut());
        launch.arg(lists.overflowed.slice()).arg(lists.overflowed_count.slice());
        launch.arg(lists.redone.slice_mut()).arg(pass);
        // SAFETY: `check_pass` holds; the kernel writes to the `slots` entries of overflowed queries,
        // which are below `queries`, each in one block.
        unsafe { launch.launch(config(blocks, PANEL, 0)) }.map_err(failed("search_again"))?;
        Ok(())
    }
}
