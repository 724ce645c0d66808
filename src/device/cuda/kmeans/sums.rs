//! The memory of cluster sums on a device.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::element::Element;
use crate::device::ClusterSums;
use crate::device::cuda::driver::launch::address;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::{self, failed};
use crate::error::Result;

/// All zero without rows.
pub(super) struct SumsMemory {
    element: Element,
    pub(super) sums: Buffer,
    pub(super) counts: Buffer,
    pub(super) wide: Buffer,
    pub(super) is_wide: Buffer,
    /// Where sums have parts.
    pub(super) exact: Option<ExactMemory>,
}

/// The memory of parts of steps, and of what tells clusters of equal rows.
pub(super) struct ExactMemory {
    pub(super) parts: Buffer,
    /// All bits of each set between two rounds.
    pub(super) first_rows: Buffer,
    pub(super) is_mixed: Buffer,
}

impl SumsMemory {
    /// Memory for so many clusters of so many elements.
    pub(super) fn new(
        (k, dim): (usize, usize),
        element: Element,
        allocate: impl Fn(usize) -> Result<Buffer>,
    ) -> Result<Self> {
        let exact = || -> Result<ExactMemory> {
            let (first_rows, is_mixed) = (allocate(k * 4)?, allocate(k * 4)?);
            Ok(ExactMemory { parts: allocate(k * dim * 8)?, first_rows, is_mixed })
        };
        Ok(Self {
            element,
            sums: allocate(k * dim * 8)?,
            counts: allocate(k * 8)?,
            wide: allocate(k * dim * element.bins() * 8)?,
            is_wide: allocate(k * 4)?,
            exact: element.has_parts().then(exact).transpose()?,
        })
    }

    /// Where parts, first rows, and what tells which clusters are mixed are; null without them.
    pub(super) fn addresses(&self, stream: &Arc<CudaStream>) -> [u64; 3] {
        self.exact.as_ref().map_or([0; 3], |ExactMemory { parts, first_rows, is_mixed }| {
            [parts, first_rows, is_mixed].map(|buffer| address(stream, buffer))
        })
    }

    pub(super) fn clear(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        let Self { sums, counts, wide, is_wide, exact, .. } = self;
        let mut zeros = vec![sums, counts, wide, is_wide];
        if let Some(ExactMemory { parts, first_rows, is_mixed }) = exact {
            zeros.extend([parts, is_mixed]);
            let rows = sys::fill(stream, first_rows.slice_mut(), 0xff);
            rows.map_err(failed("cuMemsetD8Async"))?;
        }
        for buffer in zeros {
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
        let Self { element, sums, counts, wide, is_wide, exact } = self;
        let mut found = empty.cleared();
        found.sums.high = sys::read(stream, sums.slice(), k * dim).map_err(&home)?;
        if let Some(ExactMemory { parts, .. }) = exact {
            found.sums.low = sys::read(stream, parts.slice(), k * dim).map_err(&home)?;
        }
        found.counts = sys::read(stream, counts.slice(), k).map_err(&home)?;
        let is_wide: Vec<u32> = sys::read(stream, is_wide.slice(), k).map_err(&home)?;
        if is_wide.iter().all(|is_wide| *is_wide == 0) {
            return Ok(found);
        }
        let (size, least) = (element.bins(), element.least_exponent());
        let bins: Vec<i64> = sys::read(stream, wide.slice(), k * dim * size).map_err(&home)?;
        for (place, bins) in bins.chunks_exact(size).enumerate() {
            if bins.iter().any(|bin| *bin != 0) {
                found.sums.add_digits(place, bins, least);
            }
        }
        Ok(found)
    }
}
