//! Tables on a device, once queries have visited so many rows that it pays to send them there.

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
    /// There was no memory.
    GivenUp,
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
    ) -> Result<Option<Arc<D::Tables>>> {
        // Others wait for the tables that are being sent.
        let mut state = self.state();
        if let State::NotYet(before) = *state {
            let all = before.saturating_add(visited);
            *state = State::NotYet(all);
            let (_, rows) = finder.counts();
            if rows == 0 || all.saturating_mul(SENT_PER_VISIT) < rows {
                return Ok(None);
            }
            job.enter(Phase::Build);
            let bytes = finder.sizes().0 * size_of::<u32>();
            let tables = job.reserve("buckets of tables", bytes).and_then(|_reserved| {
                let tables = finder.rows_of_tables();
                device.tables(&tables, job)
            });
            *state = match tables {
                Ok(tables) => State::There(Arc::new(tables)),
                Err(Error::DeviceMemory { .. } | Error::HostMemory { .. }) => State::GivenUp,
                Err(error) => return Err(error),
            };
        }
        Ok(match &*state {
            State::There(tables) => Some(tables.clone()),
            State::NotYet(_) | State::GivenUp => None,
        })
    }

    /// Takes the tables from the device, which needs the memory.
    pub fn give_up(&self) {
        *self.state() = State::GivenUp;
    }

    /// Whether there was no memory for them.
    pub fn is_given_up(&self) -> bool {
        matches!(*self.state(), State::GivenUp)
    }
}
