//! The memory of `kernels/kmeans/gaps.cuh`, which tells the rows that need not be compared.

use crate::device::cuda::driver::memory::Buffer;
use crate::error::Result;

pub(super) struct Gaps {
    pub(super) of_rows: Buffer,
    pub(super) drifts: Buffer,
    pub(super) listed: Buffer,
    /// Whether all rows have been compared with the centroids, or with those that these come from.
    pub(super) are_known: bool,
}

impl Gaps {
    /// Memory for so many rows and clusters.
    pub(super) fn new(
        (rows, k): (usize, usize),
        allocate: impl Fn(usize) -> Result<Buffer>,
    ) -> Result<Self> {
        let [of_rows, listed] = [allocate(rows * 4)?, allocate(rows * 4)?];
        Ok(Self { of_rows, drifts: allocate(k * 4)?, listed, are_known: false })
    }
}
