//! The memory of cluster sums on a device.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::device::ClusterSums;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::{self, failed};
use crate::device::cuda::kmeans::structs::BINS;
use crate::error::Result;

/// All zero without rows.
pub(super) struct SumsMemory {
    pub(super) sums: Buffer,
    pub(super) counts: Buffer,
    pub(super) wide: Buffer,
    pub(super) is_wide: Buffer,
}

impl SumsMemory {
    /// Memory for so many clusters of so many elements.
    pub(super) fn new(
        (k, dim): (usize, usize),
        allocate: impl Fn(usize) -> Result<Buffer>,
    ) -> Result<Self> {
        Ok(Self {
            sums: allocate(k * dim * 8)?,
            counts: allocate(k * 8)?,
            wide: allocate(k * dim * BINS * 8)?,
            is_wide: allocate(k * 4)?,
        })
    }

    pub(super) fn clear(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        let Self { sums, counts, wide, is_wide } = self;
        for buffer in [sums, counts, wide, is_wide] {
            stream.memset_zeros(buffer.slice_mut()).map_err(failed("cuMemsetD8Async"))?;
        }
        Ok(())
    }

    /// The sums, in steps of `empty`.
    pub(super) fn read(
        &self,
        stream: &Arc<CudaStream>,
        (k, dim): (usize, usize),
        empty: &ClusterSums,
    ) -> Result<ClusterSums> {
        let home = failed("cuMemcpyDtoHAsync");
        let Self { sums, counts, wide, is_wide } = self;
        let mut found = empty.cleared();
        found.sums.high = sys::read(stream, sums.slice(), k * dim).map_err(&home)?;
        found.counts = sys::read(stream, counts.slice(), k).map_err(&home)?;
        let is_wide: Vec<u32> = sys::read(stream, is_wide.slice(), k).map_err(&home)?;
        if is_wide.iter().all(|is_wide| *is_wide == 0) {
            return Ok(found);
        }
        let bins: Vec<i64> = sys::read(stream, wide.slice(), k * dim * BINS).map_err(&home)?;
        for (place, bins) in bins.chunks_exact(BINS).enumerate() {
            if bins.iter().any(|bin| *bin != 0) {
                found.sums.add_digits(place, bins);
            }
        }
        Ok(found)
    }
}
