//! The memory for rows in another order.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::structs::Rounds;
use crate::device::cuda::driver::launch::address;
use crate::device::cuda::driver::memory::Buffer;
use crate::error::Result;

/// Where rows, their labels and their original numbers are moved to.
pub(super) struct Sorted {
    rows: Buffer,
    labels: Buffer,
    /// The next, and those of the rows as they are.
    numbers: [Buffer; 2],
}

impl Sorted {
    /// Memory for so many rows of so many f32.
    pub(super) fn new(
        (rows, dim): (usize, usize),
        allocate: impl Fn(usize) -> Result<Buffer>,
    ) -> Result<Self> {
        let numbers = [allocate(rows * 4)?, allocate(rows * 4)?];
        Ok(Self { rows: allocate(rows * dim * 4)?, labels: allocate(rows * 4)?, numbers })
    }

    /// Where rows, numbers and labels go.
    pub(super) fn targets(&self, stream: &Arc<CudaStream>) -> [u64; 3] {
        let Self { rows, labels, numbers: [numbers, _] } = self;
        [rows, numbers, labels].map(|buffer| address(stream, buffer))
    }

    /// Makes what has been moved here the rows and labels of rounds.
    pub(super) fn swap(
        &mut self,
        (rows, labels): (&mut Buffer, &mut Buffer),
        rounds: &mut Rounds,
        stream: &Arc<CudaStream>,
    ) {
        [rounds.rows, rounds.numbers, rounds.labels] = self.targets(stream);
        std::mem::swap(rows, &mut self.rows);
        std::mem::swap(labels, &mut self.labels);
        self.numbers.swap(0, 1);
    }
}
