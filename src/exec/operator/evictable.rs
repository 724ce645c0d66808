//! Memory held between queries, such as resident indexes, and its release when another consumer
//! needs it.

use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use datafusion::common::resources_err;
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
    /// Any pool that cannot evict by itself: memory in those that can is of no use there.
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

/// A memory pool that releases the idle bases and indexes of its sessions before it refuses any consumer, operators
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

/// A part of a pool for what is worth less than idle memory: its size is limited, and it releases none.
/// Once the limit is lifted, it is like the pool.
#[derive(Debug)]
pub(in crate::exec) struct LimitedPool {
    pool: Arc<dyn MemoryPool>,
    /// Bytes; negative if a consumer took more without asking.
    left: AtomicI64,
}

/// The bytes left of a part without a limit: more than any memory.
const LIFTED: i64 = i64::MAX / 2;

impl LimitedPool {
    /// A part of this many bytes.
    pub fn new(pool: &Arc<dyn MemoryPool>, bytes: usize) -> Arc<Self> {
        Arc::new(Self { pool: pool.clone(), left: AtomicI64::new(bytes as i64) })
    }

    /// Lifts the limit.
    pub fn lift(&self) {
        self.left.fetch_add(LIFTED, Ordering::Relaxed);
    }

    /// Takes bytes if there are as many; what was left before.
    fn take(&self, bytes: usize) -> Result<i64, i64> {
        let take = |left: i64| Some(left - bytes as i64).filter(|left| *left >= 0);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
    }
}

impl fmt::Display for LimitedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pool.fmt(f)
    }
}

impl MemoryPool for LimitedPool {
    fn name(&self) -> &str {
        self.pool.name()
    }

    fn register(&self, consumer: &MemoryConsumer) {
        self.pool.register(consumer);
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        self.pool.unregister(consumer);
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        self.left.fetch_sub(additional as i64, Ordering::Relaxed);
        self.pool.grow(reservation, additional);
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        self.left.fetch_add(shrink as i64, Ordering::Relaxed);
        self.pool.shrink(reservation, shrink);
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        let left = match self.take(additional) {
            Ok(left) => left,
            Err(left) => {
                return resources_err!(
                    "{} may take {} bytes more, not {additional}",
                    reservation.consumer().name(),
                    left.max(0)
                );
            }
        };
        let grown = match self.pool.downcast_ref::<EvictingPool>() {
            Some(pool) if left < LIFTED => pool.0.try_grow(reservation, additional),
            _ => self.pool.try_grow(reservation, additional),
        };
        if grown.is_err() {
            self.left.fetch_add(additional as i64, Ordering::Relaxed);
        }
        grown
    }

    fn reserved(&self) -> usize {
        self.pool.reserved()
    }

    fn memory_limit(&self) -> MemoryLimit {
        self.pool.memory_limit()
    }
}

#[cfg(test)]
mod tests {
    use datafusion::execution::memory_pool::GreedyMemoryPool;

    use super::*;

    /// Idle memory in a pool.
    struct Idle(Mutex<Vec<MemoryReservation>>, usize);

    impl Evictable for Idle {
        fn evict(&self, of: MemoryOf) -> bool {
            of == MemoryOf::Pool(self.1) && lock(&self.0).pop().is_some()
        }
    }

    #[test]
    fn a_part_of_a_pool_evicts_nothing_until_its_limit_is_lifted() {
        let pool: Arc<dyn MemoryPool> =
            Arc::new(EvictingPool(Arc::new(GreedyMemoryPool::new(100))));
        let reserve = |pool: &Arc<dyn MemoryPool>| MemoryConsumer::new("part").register(pool);
        let idle = reserve(&pool);
        idle.try_grow(60).expect("an empty pool");
        let evicting = pool.downcast_ref::<EvictingPool>().expect("the pool");
        let address = std::ptr::from_ref(evicting).addr();
        let owner: Arc<dyn Evictable> = Arc::new(Idle(Mutex::new(vec![idle]), address));
        register(Arc::downgrade(&owner));
        let limited = LimitedPool::new(&pool, 50);
        let part: Arc<dyn MemoryPool> = limited.clone();
        let of_part = reserve(&part);
        let refused = of_part.try_grow(51).expect_err("the limit").to_string();
        assert!(refused.contains("part may take 50 bytes more, not 51"), "{refused}");
        assert!(of_part.try_grow(41).is_err(), "idle memory stays");
        of_part.try_grow(40).expect("what is left");
        of_part.shrink(10);
        of_part.try_grow(10).expect("what was given back");
        of_part.grow(11);
        assert!(of_part.try_grow(1).is_err(), "more than the limit was taken without asking");
        of_part.shrink(11);
        limited.lift();
        of_part.try_grow(60).expect("idle memory has given way");
        assert_eq!(pool.reserved(), 100);
        drop(of_part);
        assert_eq!(pool.reserved(), 0);
    }
}
