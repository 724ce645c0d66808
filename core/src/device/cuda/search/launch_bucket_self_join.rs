//! The launches of self-joins of LSH buckets.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, PushKernelArg};

use super::Sides;
use super::launch_buckets::{BucketKernels, BucketLists, DeviceSelfRows};
use super::spec::{JOINING, LANES, entry_bytes, scalar_bytes};
use crate::device::cuda::driver::launch::{address, address_or_null, check_size, config};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;

/// Threads of a block of `take_lists` and `add_visits`.
const TAKING: usize = 256;

/// Threads of a multiprocessor.
const TOGETHER: usize = 2048;

/// The same struct as in `kernels/search/bucket_self_join.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct JoinRange {
    pub(super) first: u32,
    pub(super) end: u32,
    pub(super) from: u32,
    pub(super) count: u32,
    pub(super) k: u32,
    pub(super) dim: u32,
}

kernel_struct!(JoinRange, 24, { first: 0, end: 4, from: 8, count: 12, k: 16, dim: 20 });

/// The tables of a join: the number of tables, and of rows in each.
pub(super) struct JoinedTables<'a> {
    pub(super) tables: usize,
    pub(super) table_rows: usize,
    /// The rows of all tables, of u32.
    pub(super) rows: &'a Buffer,
    /// The bucket of each row in each table, as two u32.
    pub(super) home_buckets: &'a Buffer,
    /// A bit for each base row that is left out, in words of 64.
    pub(super) left_out: Option<&'a Buffer>,
}

/// The nearest neighbours of each base row.
pub(super) struct JoinedLists {
    pub(super) k: usize,
    pub(super) rows: usize,
    /// `k` entries per row, ascending; missing entries have all bits set.
    pub(super) lists: Buffer,
    /// Per row the number of compared rows, of u64; `None` if these are all other rows of its
    /// buckets.
    pub(super) compared: Option<Buffer>,
}

impl BucketKernels {
    /// The kernel that joins rows for `k` neighbours, and its lanes per row.
    pub(super) fn join(&self, k: usize) -> (&CudaFunction, usize) {
        let is_small = self.spec.is_unrolled();
        match k {
            0..=8 if is_small => (&self.join_for_8, 1),
            9..=16 if is_small => (&self.join_for_16, 1),
            _ => (&self.join_buckets, LANES),
        }
    }

    /// Rows of a launch that fill the device.
    pub(super) fn joined_together(&self, k: usize) -> usize {
        self.multiprocessors * TOGETHER / self.join(k).1
    }

    /// Compares some rows of a table with the rows of their buckets.
    pub(super) fn join_buckets(
        &self,
        stream: &Arc<CudaStream>,
        base: &Buffer,
        joining: &JoinedTables<'_>,
        table: usize,
        joined: &mut JoinedLists,
        join: JoinRange,
    ) -> Result<()> {
        let (all, count) = (joining.tables * joining.table_rows, joining.table_rows);
        let kind = self.spec.kind;
        assert!(table < joining.tables && joined.rows == count && join.end as usize <= count);
        assert!(joined.k == join.k as usize && joined.k > 0);
        check_size(base, count * join.dim as usize, scalar_bytes(kind));
        check_size(joining.rows, all, 4);
        check_size(joining.home_buckets, all, 8);
        joining.left_out.iter().for_each(|bits| check_size(bits, count.div_ceil(64), 8));
        check_size(&joined.lists, count * joined.k, entry_bytes(kind));
        joined.compared.iter().for_each(|compared| check_size(compared, count, 8));
        assert!(
            join.first.is_multiple_of(32)
                && joining.left_out.is_none() == joined.compared.is_none()
        );
        let rows = address(stream, joining.rows) + (table * count * 4) as u64;
        let home_buckets = address(stream, joining.home_buckets) + (table * count * 8) as u64;
        let left_out = address_or_null(stream, joining.left_out);
        let compared = address_or_null(stream, joined.compared.as_ref());
        let (function, lanes) = self.join(joined.k);
        let mut launch = stream.launch_builder(function);
        launch.arg(base.slice()).arg(&rows).arg(&home_buckets).arg(&left_out);
        launch.arg(joined.lists.slice_mut()).arg(&compared).arg(&join);
        let threads = (join.end - join.first) as usize * lanes;
        // SAFETY: sizes are checked above; rows of tables are of the base, each once in a table, and
        // buckets are ranges of them: the lanes of a row have a list of their own.
        unsafe { launch.launch(config(threads.div_ceil(JOINING), JOINING, 0)) }
            .map_err(failed("join_buckets"))
            .map(drop)
    }

    /// Copies the lists of the base rows used as queries, and sums the rows that these have
    /// visited.
    pub(super) fn take_lists(
        &self,
        stream: &Arc<CudaStream>,
        joining: &JoinedTables<'_>,
        joined: &JoinedLists,
        self_rows: &DeviceSelfRows,
        to: &mut BucketLists,
    ) -> Result<()> {
        let BucketLists { queries, k, .. } = *to;
        to.check(self.spec.kind);
        assert!(joined.k == k);
        check_size(joining.home_buckets, joining.tables * joining.table_rows, 8);
        assert!(joined.rows == joining.table_rows);
        let self_rows = self_rows.on_device(stream, Sides { queries, base: joined.rows });
        let (count, per_query) = (queries as u32, k as u32);
        let mut launch = stream.launch_builder(&self.take_lists);
        launch.arg(joined.lists.slice()).arg(to.rows.slice_mut()).arg(to.distances.slice_mut());
        launch.arg(to.counts.slice_mut()).arg(&self_rows).arg(&count).arg(&per_query);
        // SAFETY: sizes are checked above, those of lists when they were made; queries are base rows, as
        // the caller has checked.
        unsafe { launch.launch(config((queries * k).div_ceil(TAKING), TAKING, 0)) }
            .map_err(failed("take_lists"))?;
        let (table_rows, tables) = (joining.table_rows as u32, joining.tables as u32);
        let compared = address_or_null(stream, joined.compared.as_ref());
        let mut launch = stream.launch_builder(&self.add_visits);
        launch.arg(joining.home_buckets.slice()).arg(&compared).arg(to.work.slice_mut());
        launch.arg(&self_rows).arg(&count).arg(&table_rows).arg(&tables);
        // SAFETY: `home_buckets` has a range for each row and table, `work` is as
        // `BucketLists::check` has it, and `compared`, if it is there, has an element for each row,
        // as it was made; queries are base rows, as the caller has checked.
        unsafe { launch.launch(config(queries.div_ceil(TAKING), TAKING, 0)) }
            .map_err(failed("add_visits"))
            .map(drop)
    }
}
