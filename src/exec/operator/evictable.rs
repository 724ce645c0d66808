//! Memory held between queries, such as resident indexes, and its release when another consumer
//! needs it.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use datafusion::error::Result;
use datafusion::execution::memory_pool::{
    MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation,
};

use crate::parallel::lock;

/// An owner of evictable memory, held between queries.
pub(in crate::exec) trait Evictable: Send + Sync {
    /// Releases memory that no query uses, or some of it. Returns whether any was released.
    fn evict(&self, of: MemoryOf) -> bool;
}

/// The memory that is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::exec) enum MemoryOf {
    /// Any pool that cannot evict by itself.
    Host,
    /// The [`EvictingPool`] at this address.
    Pool(usize),
    Device,
}

/// The owners registered by all sessions of the process.
static EVICTABLES: Mutex<Vec<Weak<dyn Evictable>>> = Mutex::new(Vec::new());

/// Registers an owner.
pub(in crate::exec) fn register(owner: Weak<dyn Evictable>) {
    let mut owners = lock(&EVICTABLES);
    owners.retain(|owner| owner.strong_count() > 0);
    owners.push(owner);
}

/// Releases idle memory of one owner. Returns whether there was any: callers try again until there is
/// none.
pub(in crate::exec) fn evict_idle(of: MemoryOf) -> bool {
    let owners = lock(&EVICTABLES).clone();
    owners.iter().filter_map(Weak::upgrade).any(|owner| owner.evict(of))
}

/// Grows a reservation; as long as the pool refuses, idle memory is released.
pub(in crate::exec) fn grow(reservation: &MemoryReservation, bytes: usize) -> Result<()> {
    loop {
        match reservation.try_grow(bytes) {
            Err(_) if evict_idle(MemoryOf::Host) => {}
            done => return done,
        }
    }
}

/// A memory pool that releases the idle bases of its sessions before it refuses any consumer, operators
/// of DataFusion included.
#[derive(Debug)]
pub struct EvictingPool(pub Arc<dyn MemoryPool>);

impl fmt::Display for EvictingPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl MemoryPool for EvictingPool {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn register(&self, consumer: &MemoryConsumer) {
        self.0.register(consumer);
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        self.0.unregister(consumer);
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        self.0.grow(reservation, additional);
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        self.0.shrink(reservation, shrink);
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        loop {
            match self.0.try_grow(reservation, additional) {
                Err(_) if evict_idle(MemoryOf::Pool(std::ptr::from_ref(self).addr())) => {}
                done => return done,
            }
        }
    }

    fn reserved(&self) -> usize {
        self.0.reserved()
    }

    fn memory_limit(&self) -> MemoryLimit {
        self.0.memory_limit()
    }
}
