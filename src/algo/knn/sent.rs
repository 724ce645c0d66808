//! Tables on a device, once queries have visited so many rows that it pays to send them there: all of them,
//! or where there is no memory for all, some after others for each block of queries.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::finder::Finder;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::job::{Job, Phase};

/// Rows of tables that are sent in the time in which the host visits one.
const SENT_PER_VISIT: u64 = 8;

/// The tables of a finder on a device, if they are there.
pub(super) struct SentTables<D: Device>(Mutex<State<D>>);

enum State<D: Device> {
    /// Rows that were visited so far.
    NotYet(u64),
    There(Arc<D::Tables>),
    /// There is memory for at most so many tables; 0 if for none.
    AtMost(usize),
}

/// Tables on a device.
pub(super) enum Sent<D: Device> {
    All(Arc<D::Tables>),
    /// So many at a time, to be sent for each block of queries.
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

    /// The tables, if it pays: about so many more rows are about to be visited in them.
    pub fn get(
        &self,
        (device, finder): (&D, &Finder),
        visited: u64,
        job: &Job,
    ) -> Result<Option<Sent<D>>> {
        let (tables, rows) = finder.counts();
        let pays = |visited: u64| rows > 0 && visited.saturating_mul(SENT_PER_VISIT) >= rows;
        // Others wait for the tables that are being sent.
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

    /// Remembers that there is no memory for more than this many tables at a time.
    pub fn at_most(&self, tables: usize) {
        *self.state() = State::AtMost(tables);
    }

    /// Whether there was no memory for all of them.
    pub fn is_limited(&self) -> bool {
        matches!(*self.state(), State::AtMost(_))
    }
}

/// Sends the tables of these numbers to a device.
pub(super) fn send<D: Device>(
    (device, finder): (&D, &Finder),
    numbers: Range<usize>,
    job: &Job,
) -> Result<D::Tables> {
    job.enter(Phase::Build);
    let _reserved = job.reserve("buckets of tables", finder.bytes_of_buckets(numbers.clone()))?;
    let tables = finder.rows_of_tables(numbers);
    job.with_room(|| device.tables(&tables, job))
}
