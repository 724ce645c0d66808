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

impl Sorted {
    /// Allocates memory for `rows` rows of `dim` f32.
    pub(super) fn new(
        (rows, dim): (usize, usize),
        allocate: impl Fn(usize) -> Result<Buffer>,
    ) -> Result<Self> {
        let numbers = [allocate(rows * 4)?, allocate(rows * 4)?];
        Ok(Self { rows: allocate(rows * dim * 4)?, labels: allocate(rows * 4)?, numbers })
    }

    /// The addresses of the targets for rows, numbers and labels.
    pub(super) fn targets(&self, stream: &Arc<CudaStream>) -> [u64; 3] {
        let Self { rows, labels, numbers: [numbers, _] } = self;
        [rows, numbers, labels].map(|buffer| address(stream, buffer))
    }

    /// Makes the targets the rows and labels of rounds.
    pub(super) fn swap(
        &mut self,
        (rows, labels): (&mut Buffer, &mut Buffer),
        rounds: &mut RoundsOnDevice,
        stream: &Arc<CudaStream>,
    ) {
        [rounds.rows, rounds.numbers, rounds.labels] = self.targets(stream);
        std::mem::swap(rows, &mut self.rows);
        std::mem::swap(labels, &mut self.labels);
        self.numbers.swap(0, 1);
    }
}
