//! Tables on a device, once queries have visited so many rows that it pays to send them there.

use std::sync::{Arc, Mutex, PoisonError};

use super::finder::Finder;
use crate::device::Device;
use crate::error::Result;
use crate::job::Job;

/// Rows of tables that are sent in the time in which the host visits one.
const SENT_PER_VISIT: u64 = 8;

/// The tables of a finder on a device, if they are there.
pub(super) struct SentTables<D: Device>(Mutex<State<D>>);

enum State<D: Device> {
    /// Rows that were visited so far.
    NotYet(u64),
    There(Arc<D::Tables>),
    Never,
}

impl<D: Device> Default for SentTables<D> {
    fn default() -> Self {
        Self(Mutex::new(State::NotYet(0)))
    }
}

impl<D: Device> SentTables<D> {
    /// The tables, if it pays: about so many more rows are about to be visited in them.
    pub fn get(
        &self,
        (device, finder): (&D, &Finder),
        visited: u64,
        job: &Job,
    ) -> Result<Option<Arc<D::Tables>>> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::NotYet(before) = *state {
            let all = before.saturating_add(visited);
            *state = State::NotYet(all);
            let (_, rows) = finder.counts();
            if rows == 0 || all.saturating_mul(SENT_PER_VISIT) < rows {
                return Ok(None);
            }
            let bytes = finder.sizes().0 * size_of::<u32>();
            let _reserved = job.reserve("buckets of tables", bytes)?;
            let tables = finder.rows_of_tables();
            *state = match device.tables(&tables, job)? {
                Some(tables) => State::There(Arc::new(tables)),
                None => State::Never,
            };
        }
        Ok(match &*state {
            State::There(tables) => Some(tables.clone()),
            State::NotYet(_) | State::Never => None,
        })
    }
}
