//! Copies hash tables to a device once the queries have visited enough rows for the copy to pay
//! off: all tables at once or, if the device lacks memory, in groups for each block of queries.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::algo::knn::lsh::candidates::CandidateGenerator;
use crate::device::{Device, Hashing};
use crate::error::{Error, Result};
use crate::job::{Job, Phase};
use crate::parallel::lock;

/// Rows of tables that are copied in the time in which the host visits one row.
const COPIED_PER_VISIT: u64 = 8;

/// Residency of a candidate generator's tables on a device.
pub(in crate::algo::knn::lsh) struct ResidentTables<D: Device>(Mutex<CopyState<D>>);

enum CopyState<D: Device> {
    /// Not copied yet; the number of rows visited until now.
    NotCopied(u64),
    Copied(Arc<D::HashTables>),
    /// The device has memory for at most this number of tables, possibly 0.
    AtMost(usize),
}

/// Copies of tables on a device.
pub(in crate::algo::knn::lsh) enum TableCopies<D: Device> {
    All(Arc<D::HashTables>),
    /// At most this number at a time, to be copied for each block of queries.
    AtMost(usize),
}

impl<D: Device> Default for ResidentTables<D> {
    fn default() -> Self {
        Self(Mutex::new(CopyState::NotCopied(0)))
    }
}

impl<D: Device> ResidentTables<D> {
    fn state(&self) -> MutexGuard<'_, CopyState<D>> {
        lock(&self.0)
    }

    /// The tables, if the copy pays off; about `visited` more rows are about to be visited in them.
    pub fn get(
        &self,
        hashing: &Hashing<D>,
        generator: &CandidateGenerator,
        visited: u64,
        job: &Job,
    ) -> Result<Option<TableCopies<D>>> {
        let (tables, rows) = generator.counts();
        let pays = |visited: u64| rows > 0 && visited.saturating_mul(COPIED_PER_VISIT) >= rows;
        // The lock makes concurrent callers wait for the tables that are being copied.
        let mut state = self.state();
        if let CopyState::NotCopied(before) = *state {
            let all = before.saturating_add(visited);
            *state = CopyState::NotCopied(all);
            if !pays(all) {
                return Ok(None);
            }
            *state = match copy_tables::<D>(hashing, generator, 0..tables, job) {
                Ok(tables) => CopyState::Copied(Arc::new(tables)),
                Err(Error::DeviceMemory { .. } | Error::HostMemory { .. }) => {
                    CopyState::AtMost(tables / 2)
                }
                Err(error) => return Err(error),
            };
        }
        Ok(match &*state {
            CopyState::Copied(tables) => Some(TableCopies::All(tables.clone())),
            CopyState::AtMost(most) if *most > 0 && pays(visited) => {
                Some(TableCopies::AtMost(*most))
            }
            CopyState::NotCopied(_) | CopyState::AtMost(_) => None,
        })
    }

    /// Records the largest number of tables for which the device has memory.
    pub fn at_most(&self, tables: usize) {
        *self.state() = CopyState::AtMost(tables);
    }

    /// Whether the device lacked memory for all tables.
    pub fn is_limited(&self) -> bool {
        matches!(*self.state(), CopyState::AtMost(_))
    }
}

/// Copies the tables `numbers` to a device.
pub(in crate::algo::knn::lsh) fn copy_tables<D: Device>(
    hashing: &Hashing<D>,
    generator: &CandidateGenerator,
    numbers: Range<usize>,
    job: &Job,
) -> Result<D::HashTables> {
    job.enter(Phase::Build);
    let _reserved = job.reserve("bucket offsets", generator.bytes_of_buckets(numbers.clone()))?;
    let tables = generator.rows_of_tables(numbers);
    job.retry_after_eviction(|| hashing.tables(&tables, job))
}
