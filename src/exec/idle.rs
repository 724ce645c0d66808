//! Memory held between queries, such as resident indexes, and its release when another consumer
//! needs it.

use std::sync::{Mutex, PoisonError, Weak};

use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryReservation;

/// An owner of memory that is held between queries.
pub(super) trait Keeper: Send + Sync {
    /// Releases memory that no query uses. Returns whether any was released.
    fn release(&self) -> bool;
}

/// The owners registered by all sessions of the process.
static KEEPERS: Mutex<Vec<Weak<dyn Keeper>>> = Mutex::new(Vec::new());

/// Registers an owner.
pub(super) fn register(keeper: Weak<dyn Keeper>) {
    let mut keepers = KEEPERS.lock().unwrap_or_else(PoisonError::into_inner);
    keepers.retain(|keeper| keeper.strong_count() > 0);
    keepers.push(keeper);
}

/// Releases idle memory of all owners. Returns whether any was released.
pub(super) fn release_idle() -> bool {
    let keepers = KEEPERS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let keepers = keepers.iter().filter_map(Weak::upgrade);
    keepers.fold(false, |released, keeper| released | keeper.release())
}

/// Grows a reservation; if the pool refuses, once more after idle memory has been released.
pub(super) fn grow(reservation: &MemoryReservation, bytes: usize) -> Result<()> {
    match reservation.try_grow(bytes) {
        Err(_) if release_idle() => reservation.try_grow(bytes),
        done => done,
    }
}
