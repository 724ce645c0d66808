//! Memory held between queries, such as resident indexes, and its release when another consumer
//! needs it.

use std::sync::{Mutex, Weak};

use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryReservation;

use crate::parallel::lock;

/// An owner of evictable memory, held between queries.
pub(in crate::exec) trait Evictable: Send + Sync {
    /// Releases memory that no query uses. Returns whether any was released.
    fn evict(&self) -> bool;
}

/// The owners registered by all sessions of the process.
static EVICTABLES: Mutex<Vec<Weak<dyn Evictable>>> = Mutex::new(Vec::new());

/// Registers an owner.
pub(in crate::exec) fn register(owner: Weak<dyn Evictable>) {
    let mut owners = lock(&EVICTABLES);
    owners.retain(|owner| owner.strong_count() > 0);
    owners.push(owner);
}

/// Releases idle memory of all owners. Returns whether any was released.
pub(in crate::exec) fn evict_idle() -> bool {
    let owners = lock(&EVICTABLES).clone();
    let owners = owners.iter().filter_map(Weak::upgrade);
    owners.fold(false, |released, owner| released | owner.evict())
}

/// Grows a reservation; if the pool refuses, once more after idle memory has been released.
pub(in crate::exec) fn grow(reservation: &MemoryReservation, bytes: usize) -> Result<()> {
    match reservation.try_grow(bytes) {
        Err(_) if evict_idle() => reservation.try_grow(bytes),
        done => done,
    }
}
