//! What is kept between queries, and given up when something else wants the memory.

use std::sync::{Mutex, PoisonError, Weak};

use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryReservation;

/// Something that keeps memory between queries.
pub(super) trait Keeper: Send + Sync {
    /// Gives up what no query uses. Returns whether there was anything.
    fn release(&self) -> bool;
}

/// All that keep something, of all sessions.
static KEEPERS: Mutex<Vec<Weak<dyn Keeper>>> = Mutex::new(Vec::new());

/// Remembers something that may have memory to give up.
pub(super) fn register(keeper: Weak<dyn Keeper>) {
    let mut keepers = KEEPERS.lock().unwrap_or_else(PoisonError::into_inner);
    keepers.retain(|keeper| keeper.strong_count() > 0);
    keepers.push(keeper);
}

/// Gives up what no query uses. Returns whether there was anything.
pub(super) fn release_idle() -> bool {
    let keepers = KEEPERS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let keepers = keepers.iter().filter_map(Weak::upgrade);
    keepers.fold(false, |released, keeper| released | keeper.release())
}

/// Counts bytes as used; where they are refused, once more after idle memory has been given up.
pub(super) fn grow(reservation: &MemoryReservation, bytes: usize) -> Result<()> {
    match reservation.try_grow(bytes) {
        Err(_) if release_idle() => reservation.try_grow(bytes),
        done => done,
    }
}
