//! Copies hash tables to a device once the queries have visited enough rows for the copy to pay
//! off: all tables at once or, if the device lacks memory, in groups for each block of queries.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::finder::Finder;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::job::{Job, Phase};

/// Rows of tables that are copied in the time in which the host visits one row.
const SENT_PER_VISIT: u64 = 8;

/// The tables of a finder and their state on a device.
pub(super) struct SentTables<D: Device>(Mutex<State<D>>);

enum State<D: Device> {
    /// Not copied yet; the number of rows visited until now.
    NotYet(u64),
    There(Arc<D::Tables>),
    /// The device has memory for at most this number of tables, possibly 0.
    AtMost(usize),
}

/// Tables on a device.
pub(super) enum Sent<D: Device> {
    All(Arc<D::Tables>),
    /// At most this number at a time, to be copied for each block of queries.
    AtMost(usize),
}

impl<D: Device> Default for SentTables<D> {
    fn default() -> Self {
        Self(Mutex::new(State::NotYet(0)))
    }
}

impl<D: Device> SentTables<D> {
    fn state(&self) -> MutexGuard<'_, State<D>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tables, if the copy pays off; about `visited` more rows are about to be visited in them.
    pub fn get(
        &self,
        (device, finder): (&D, &Finder),
        visited: u64,
        job: &Job,
    ) -> Result<Option<Sent<D>>> {
        let (tables, rows) = finder.counts();
        let pays = |visited: u64| rows > 0 && visited.saturating_mul(SENT_PER_VISIT) >= rows;
        // The lock makes concurrent callers wait for the tables that are being copied.
        let mut state = self.state();
        if let State::NotYet(before) = *state {
            let all = before.saturating_add(visited);
            *state = State::NotYet(all);
            if !pays(all) {
                return Ok(None);
            }
            *state = match send((device, finder), 0..tables, job) {
                Ok(tables) => State::There(Arc::new(tables)),
                Err(Error::DeviceMemory { .. } | Error::HostMemory { .. }) => {
                    State::AtMost(tables / 2)
                }
                Err(error) => return Err(error),
            };
        }
        Ok(match &*state {
            State::There(tables) => Some(Sent::All(tables.clone())),
            State::AtMost(most) if *most > 0 && pays(visited) => Some(Sent::AtMost(*most)),
            State::NotYet(_) | State::AtMost(_) => None,
        })
    }

    /// Records the largest number of tables for which the device has memory.
    pub fn at_most(&self, tables: usize) {
        *self.state() = State::AtMost(tables);
    }

    /// Whether the device lacked memory for all tables.
    pub fn is_limited(&self) -> bool {
        matches!(*self.state(), State::AtMost(_))
    }
}

/// Copies the tables `numbers` to a device.
pub(super) fn send<D: Device>(
    (device, finder): (&D, &Finder),
    numbers: Range<usize>,
    job: &Job,
) -> Result<D::Tables> {
    job.enter(Phase::Build);
    let _reserved = job.reserve("bucket offsets", finder.bytes_of_buckets(numbers.clone()))?;
    let tables = finder.rows_of_tables(numbers);
    job.with_room(|| device.tables(&tables, job))
}
