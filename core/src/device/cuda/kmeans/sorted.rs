//! The memory for rows sorted by cluster.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::structs::RoundsOnDevice;
use crate::device::cuda::driver::launch::address;
use crate::device::cuda::driver::memory::Buffer;
use crate::error::Result;

/// The target buffers of sorting: rows, their labels and their original numbers.
pub(super) struct Sorted {
    rows: Buffer,
    labels: Buffer,
    /// The numbers of the next order, and of the current one.
    numbers: [Buffer; 2],
}

/// The addresses to which sorting writes rows, unless null, and the numbers and labels of all rows.
#[derive(Clone, Copy)]
pub(super) struct SortTargets {
    pub(super) rows: u64,
    pub(super) numbers: u64,
    pub(super) labels: u64,
}

impl Sorted {
    /// Allocates memory for `rows` rows of `dim` f32.
    pub(super) fn new(
        rows: usize,
        dim: usize,
        allocate: impl Fn(usize) -> Result<Buffer>,
    ) -> Result<Self> {
        let numbers = [allocate(rows * 4)?, allocate(rows * 4)?];
        Ok(Self { rows: allocate(rows * dim * 4)?, labels: allocate(rows * 4)?, numbers })
    }

    /// The addresses of the targets.
    pub(super) fn targets(&self, stream: &Arc<CudaStream>) -> SortTargets {
        let Self { rows, labels, numbers: [numbers, _] } = self;
        let [rows, numbers, labels] = [rows, numbers, labels].map(|to| address(stream, to));
        SortTargets { rows, numbers, labels }
    }

    /// Makes the targets the rows and labels of rounds.
    pub(super) fn swap(
        &mut self,
        rows: &mut Buffer,
        labels: &mut Buffer,
        rounds: &mut RoundsOnDevice,
        stream: &Arc<CudaStream>,
    ) {
        SortTargets { rows: rounds.rows, numbers: rounds.numbers, labels: rounds.labels } =
            self.targets(stream);
        std::mem::swap(rows, &mut self.rows);
        std::mem::swap(labels, &mut self.labels);
        self.numbers.swap(0, 1);
    }
}
