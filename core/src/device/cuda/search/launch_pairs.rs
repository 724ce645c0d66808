//! The launch for chosen pairs of a query and a base row.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaStream, PushKernelArg};

use super::Sides;
use super::launch::SearchKernels;
use super::spec::{real_bytes, scalar_bytes};
use crate::device::cuda::driver::launch::{check_size, config};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::matrix::ElementKind;

/// Pairs whose distances are to be computed.
pub(super) struct Pairs {
    /// Rows on both sides, and elements of a row.
    pub(super) queries: usize,
    pub(super) base_rows: usize,
    pub(super) dim: usize,
    /// Per query the position of its first pair, then the end of the last, of u64.
    pub(super) starts: Buffer,
    /// The number of the first pair, and the number of pairs.
    pub(super) first: usize,
    pub(super) count: usize,
    /// The base rows of the pairs.
    pub(super) rows: Buffer,
    pub(super) distances: Buffer,
}

impl SearchKernels {
    /// The distances of some pairs of a query and a base row.
    pub(super) fn distances_of(
        &self,
        stream: &Arc<CudaStream>,
        sides: Sides<&Buffer>,
        pairs: &mut Pairs,
    ) -> Result<()> {
        let kind = self.spec.kind;
        let (count, dim) = (pairs.count, pairs.dim);
        check_size(sides.queries, pairs.queries * dim, scalar_bytes(kind));
        check_size(sides.base, pairs.base_rows * dim, scalar_bytes(kind));
        check_size(&pairs.starts, pairs.queries + 1, 8);
        check_size(&pairs.rows, count, 4);
        check_size(&pairs.distances, count, real_bytes(kind));
        let threads = if kind == ElementKind::F64 { 64 } else { 128 };
        let (all, first) = (pairs.queries as u32, pairs.first as u64);
        let (dim, pairs_here) = (dim as u32, count as u32);
        let mut launch = stream.launch_builder(&self.distances_of);
        launch.arg(sides.queries.slice()).arg(sides.base.slice()).arg(pairs.starts.slice());
        launch.arg(pairs.rows.slice()).arg(pairs.distances.slice_mut());
        launch.arg(&all).arg(&first).arg(&pairs_here).arg(&dim);
        // SAFETY: starts ascend from 0 past `first + count`, so that the query found for a pair is
        // below `queries`, and rows are below `base_rows`: `Candidates` and its check hold. Sizes
        // are checked above.
        unsafe { launch.launch(config(count.div_ceil(threads), threads, 0)) }
            .map_err(failed("distances_of"))
            .map(drop)
    }
}
