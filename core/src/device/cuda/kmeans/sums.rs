//! The memory of cluster sums on a device.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::row_type::RowType;
use crate::device::ClusterSums;
use crate::device::cuda::driver::launch::address_or_null;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::{self, failed};
use crate::error::Result;
use crate::job::Job;

/// The buffers of cluster sums; all zero without rows.
pub(super) struct SumsMemory {
    row_type: RowType,
    pub(super) sums: Buffer,
    /// Parts of steps, if sums have them.
    parts: Option<Buffer>,
    pub(super) counts: Buffer,
    pub(super) wide: Buffer,
    pub(super) is_wide: Buffer,
    /// The first row of each cluster, and two of its rows that differ, if means of equal rows may
    /// be rounded. All bits set: unknown.
    pub(super) singles: Option<[Buffer; 2]>,
}

impl SumsMemory {
    /// Allocates sums of `k` clusters.
    pub(super) fn new(
        k: usize,
        row_type: RowType,
        allocate: impl Fn(usize) -> Result<Buffer>,
    ) -> Result<Self> {
        let numbers = k * row_type.width();
        let singles = || Ok([allocate(k * 4)?, allocate(k * 8)?]);
        Ok(Self {
            row_type,
            parts: row_type.has_parts().then(|| allocate(numbers * 8)).transpose()?,
            sums: allocate(numbers * 8)?,
            counts: allocate(k * 8)?,
            wide: allocate(numbers * row_type.bins() * 8)?,
            is_wide: allocate(k * 4)?,
            singles: row_type.has_singles().then(singles).transpose()?,
        })
    }

    /// The addresses of parts, first rows and differing rows; null without them.
    pub(super) fn addresses(&self, stream: &Arc<CudaStream>) -> [u64; 3] {
        let [first_rows, differing] = [0, 1].map(|i| self.singles.as_ref().map(|both| &both[i]));
        [self.parts.as_ref(), first_rows, differing].map(|one| address_or_null(stream, one))
    }

    pub(super) fn clear(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        let Self { sums, parts, counts, wide, is_wide, singles, .. } = self;
        let mut zeros = vec![sums, counts, wide, is_wide];
        zeros.extend(parts);
        for rows in singles.iter_mut().flatten() {
            let none = sys::fill(stream, rows.slice_mut(), 0xff);
            none.map_err(failed("cuMemsetD8Async"))?;
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
        empty: &ClusterSums,
        job: &Job,
    ) -> Result<ClusterSums> {
        let home = failed("cuMemcpyDtoHAsync");
        let Self { row_type, sums, parts, counts, wide, is_wide, .. } = self;
        let (k, dim, width) = (empty.clusters(), row_type.dim, row_type.width());
        let mut clusters = empty.cleared();
        clusters.counts = sys::read(stream, counts.slice(), k).map_err(&home)?;
        let mut put = |numbers: Vec<i64>, is_low: bool| {
            let of_clusters = numbers.chunks_exact(width).enumerate();
            for (cluster, numbers) in of_clusters {
                let (elements, weight) = numbers.split_at(dim);
                clusters.sums.steps_mut(is_low)[cluster * dim..][..dim].copy_from_slice(elements);
                if let Some(weights) = &mut clusters.weights {
                    weights.steps_mut(is_low)[cluster..][..1].copy_from_slice(weight);
                }
            }
        };
        put(sys::read(stream, sums.slice(), k * width).map_err(&home)?, false);
        if let Some(parts) = parts {
            put(sys::read(stream, parts.slice(), k * width).map_err(&home)?, true);
        }
        let is_wide: Vec<u32> = sys::read(stream, is_wide.slice(), k).map_err(&home)?;
        let (bins, least) = (row_type.bins(), row_type.least_exponent());
        // One cluster at a time: the bins of all clusters can take gigabytes.
        for cluster in (0..k).filter(|cluster| is_wide[*cluster] != 0) {
            job.check()?;
            let bytes = width * bins * size_of::<i64>();
            let from = wide.slice().slice(cluster * bytes..(cluster + 1) * bytes);
            let cluster_digits: Vec<i64> = sys::read(stream, &from, width * bins).map_err(&home)?;
            let digits = cluster_digits.chunks_exact(bins).enumerate();
            for (j, digits) in digits.filter(|(_, digits)| digits.iter().any(|d| *d != 0)) {
                match &mut clusters.weights {
                    Some(weights) if j == dim => weights.add_digits(cluster, digits, least),
                    _ => clusters.sums.add_digits(cluster * dim + j, digits, least),
                }
            }
        }
        Ok(clusters)
    }
}
