//! The memory of Hamerly's lower bounds (Hamerly 2010: Making k-means even faster), by which `kernels/kmeans/hamerly.cuh` skips rows.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::device::cuda::driver::launch::address;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;

/// Hamerly's lower bounds on the gaps of rows.
pub(super) struct HamerlyBounds {
    of_rows: Buffer,
    drifts: Buffer,
    listed: Buffer,
    /// Whether all rows have a bound from these centroids or from their predecessors.
    pub(super) are_known: bool,
}

impl HamerlyBounds {
    /// Allocates bounds for `rows` rows and `k` clusters.
    pub(super) fn new(
        rows: usize,
        k: usize,
        allocate: impl Fn(usize) -> Result<Buffer>,
    ) -> Result<Self> {
        let [of_rows, listed] = [allocate(rows * 4)?, allocate(rows * 4)?];
        Ok(Self { of_rows, drifts: allocate(k * 4)?, listed, are_known: false })
    }

    /// The addresses of gaps, drifts and the list of rows; null without them.
    pub(super) fn addresses(gaps: Option<&Self>, stream: &Arc<CudaStream>) -> [u64; 3] {
        gaps.map_or([0; 3], |Self { of_rows, drifts, listed, .. }| {
            [of_rows, drifts, listed].map(|buffer| address(stream, buffer))
        })
    }

    /// Forgets all bounds: all rows are compared with the next centroids.
    pub(super) fn forget(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        self.are_known = false;
        stream.memset_zeros(self.drifts.slice_mut()).map_err(failed("cuMemsetD8Async"))
    }
}
