//! The order of rows by their clusters.

use cudarc::driver::PushKernelArg;

use super::super::kernels::{SORTED_ROWS, ranks};
use super::Workspace;
use crate::device::cuda::driver::launch::{address, config};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;

/// Memory for rows in another order, their labels and numbers.
pub(super) struct Sorted {
    pub(super) rows: Buffer,
    pub(super) labels: Buffer,
    pub(super) numbers: [Buffer; 2],
}

impl Workspace {
    /// Sorts rows by cluster, and within it by how many centroids they are compared with, if that makes
    /// assigning them faster. All rows must be in a cluster.
    pub(in super::super) fn sort(&mut self) -> Result<()> {
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
    pub(super) fn order(&mut self, (rows, numbers, labels): (u64, u64, u64)) -> Result<()> {
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
}
