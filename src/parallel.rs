//! Threads: the only place outside `device/cpu` that manages them.

use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::Notify;

use crate::error::Result;

/// Runs tasks on all threads of the current pool; returns the results in the order of the tasks.
pub(crate) fn in_parallel<I: Send, T: Send>(
    tasks: Vec<I>,
    run: impl Fn(I) -> T + Sync + Send,
) -> Vec<T> {
    tasks.into_par_iter().map(run).collect()
}

/// Locks a mutex, also after a panic of a thread that held it.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The value of a cell, made by the first caller. Callers at the same time may all make it: no lock
/// is held meanwhile, since `make` may run tasks in parallel, and a thread waiting for these may
/// begin another task that needs the same value.
pub(crate) fn get_or_make<T>(cell: &OnceLock<T>, make: impl FnOnce() -> T) -> &T {
    match cell.get() {
        Some(made) => made,
        None => {
            let made = make();
            cell.get_or_init(|| made)
        }
    }
}

/// Busy threads per core up to which new work gets one thread per core.
const FULL: usize = 4;

/// Busy threads per core up to which new work gets `1 / SHARE` of that.
const MOST: usize = 8;
const SHARE: usize = 8;

/// Idle thread pools of each size that are kept for reuse.
const MOST_IDLE: usize = 4;

/// The thread pools of this process.
static POOLS: LazyLock<Pools> = LazyLock::new(Pools::of_process);

/// Threads of a statement's own: on rayon's common pool, work stolen from another statement would
/// delay the end of this one.
///
/// The first [`FULL`] pieces of work have a thread for each core. Further ones have a share of
/// them, so that a short one need not wait for long ones; beyond [`MOST`] threads per core, work
/// waits in the order of arrival. A future dropped while it waits is skipped; one that is not
/// polled on its turn delays all later ones. Results do not depend on the number of threads.
pub(crate) async fn own_threads() -> Lease<'static> {
    POOLS.in_turn().await
}

/// Runs work on separate threads on behalf of a worker thread, which waits and does nothing else
/// meanwhile. The work gets threads immediately, since other threads may wait for a lock held by
/// the caller.
pub(crate) fn on_other_threads<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let requested = threads();
    std::thread::scope(|scope| {
        let done = scope.spawn(|| POOLS.at_once(requested).run(work)).join();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Thread pools, each of which does one piece of work at a time.
struct Pools {
    cores: usize,
    state: Mutex<PoolState>,
    /// Held by the first in the queue while it waits for threads.
    turn: tokio::sync::Mutex<()>,
    given_back: Notify,
}

#[derive(Default)]
struct PoolState {
    /// Number of busy threads.
    busy: usize,
    idle: Vec<ThreadPool>,
}

/// Threads for one piece of work, returned when this is dropped.
pub(crate) struct Lease<'a> {
    pools: &'a Pools,
    /// Acquired when the work begins, since starting threads takes time.
    pool: Option<ThreadPool>,
    threads: usize,
}

impl Pools {
    /// Pools for as many cores as rayon would use threads.
    fn of_process() -> Self {
        let first = pool_of(0);
        let pools = Self::of(first.as_ref().map_or(1, ThreadPool::current_num_threads));
        pools.lock().idle.extend(first);
        pools
    }

    fn of(cores: usize) -> Self {
        Self { cores, state: Mutex::default(), turn: Default::default(), given_back: Notify::new() }
    }

    /// Threads for work that waits for its turn, and then for threads.
    async fn in_turn(&self) -> Lease<'_> {
        let _turn = self.turn.lock().await;
        loop {
            if let Some(lease) = self.lease(self.cores, None) {
                return lease;
            }
            self.given_back.notified().await;
        }
    }

    /// Threads for work that cannot wait: `requested`, fewer or one.
    fn at_once(&self, requested: usize) -> Lease<'_> {
        self.lease(requested, Some(1)).expect("one thread at least")
    }

    /// Number of threads for work that can use `requested`, beside `busy` threads; `None` if the
    /// limit is reached.
    fn share(&self, busy: usize, requested: usize) -> Option<usize> {
        let few = (self.cores / SHARE).clamp(1, requested);
        let ways = [(requested, FULL * self.cores), (few, MOST * self.cores)];
        let fits = |(threads, most): &(usize, usize)| busy + threads <= *most;
        ways.into_iter().find(fits).map(|(threads, _)| threads)
    }

    /// Threads for work that can use `requested`; `otherwise` if the limit is reached.
    fn lease(&self, requested: usize, otherwise: Option<usize>) -> Option<Lease<'_>> {
        let mut state = self.lock();
        let threads = self.share(state.busy, requested).or(otherwise)?;
        state.busy += threads;
        Some(Lease { pools: self, pool: None, threads })
    }

    /// A pool of `threads` threads; `None` if the system cannot start them.
    fn pool(&self, threads: usize) -> Option<ThreadPool> {
        let mut state = self.lock();
        let known = state.idle.iter().position(|pool| pool.current_num_threads() == threads);
        let idle = known.map(|place| state.idle.swap_remove(place));
        drop(state);
        idle.or_else(|| pool_of(threads))
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        lock(&self.state)
    }
}

/// A pool of `threads` threads, or rayon's default for 0.
fn pool_of(threads: usize) -> Option<ThreadPool> {
    let named = ThreadPoolBuilder::new().thread_name(|i| format!("neighbors-{i}"));
    named.num_threads(threads).build().ok()
}

impl Lease<'_> {
    pub(crate) fn run<T: Send>(mut self, work: impl FnOnce() -> T + Send) -> T {
        self.pool = self.pools.pool(self.threads);
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let mut state = self.pools.lock();
        state.busy -= self.threads;
        let alike = |pool: &&ThreadPool| pool.current_num_threads() == self.threads;
        if state.idle.iter().filter(alike).count() < MOST_IDLE {
            state.idle.extend(self.pool.take());
        }
        drop(state);
        self.pools.given_back.notify_one();
    }
}

/// Number of threads of the current pool.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads()
}

/// Bytes from which filling a buffer pays off on several threads.
const WORTH_THREADS: usize = 1 << 20;

/// Fills a buffer in parts of whole units, on separate threads: the caller may hold locks that
/// rayon's workers wait for. `fill` gets the number of the first unit of a part, and the part.
pub(crate) fn fill_on_threads<T: Send>(
    buffer: &mut [T],
    unit: usize,
    fill: impl Fn(usize, &mut [T]) -> Result<()> + Sync,
) -> Result<()> {
    let units = buffer.len() / unit.max(1);
    let threads = threads().min(units);
    if threads < 2 || size_of_val(buffer) < WORTH_THREADS {
        return fill(0, buffer);
    }
    let per_thread = units.div_ceil(threads);
    std::thread::scope(|scope| {
        let parts = buffer.chunks_mut(per_thread * unit).enumerate();
        let fill = &fill;
        let running: Vec<_> =
            parts.map(|(i, part)| scope.spawn(move || fill(i * per_thread, part))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        running.into_iter().map(join).collect::<Vec<_>>().into_iter().collect()
    })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;
    use crate::random::Random;

    #[test]
    fn tasks_that_need_a_value_may_make_it_in_parallel() {
        for _ in 0..200 {
            let cell = OnceLock::new();
            let make = || in_parallel((0..64).collect(), |i: u64| i).iter().sum::<u64>();
            let values = in_parallel((0..64).collect(), |_: u64| *get_or_make(&cell, make));
            assert_eq!(values, [2016; 64]);
        }
    }

    #[tokio::test]
    async fn work_at_the_same_time_has_threads_of_its_own() {
        let here = || std::thread::current().name().map(str::to_string);
        assert!(own_threads().await.run(here).is_some_and(|name| name.starts_with("neighbors-")));
        let barrier = std::sync::Barrier::new(3);
        let leases = [own_threads().await, own_threads().await, own_threads().await];
        std::thread::scope(|scope| {
            for lease in leases {
                scope.spawn(|| lease.run(|| barrier.wait()));
            }
        });
    }

    /// With much concurrent work, the first pieces have all cores, later ones a share, and the rest
    /// waits.
    #[test]
    fn threads_are_bounded_however_much_work_there_is() {
        for cores in [1, 2, 5, 128] {
            let pools = Pools::of(cores);
            let (mut busy, mut shares) = (0, Vec::new());
            while let Some(threads) = pools.share(busy, cores) {
                busy += threads;
                shares.push(threads);
            }
            assert!(busy <= MOST * cores && shares[..FULL] == [cores; FULL], "{cores}: {shares:?}");
            assert!(shares.len() > FULL && shares.iter().all(|threads| *threads > 0), "{cores}");
        }
        // 32 statements on 128 cores would be 4,096 threads if each had all.
        let pools = Pools::of(128);
        let busy = (0..32).fold(0, |busy, _| busy + pools.share(busy, 128).unwrap());
        assert_eq!(busy, 4 * 128 + 28 * 16);
    }

    /// Waiting work, every third piece of which is aborted, comes to its end.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn work_that_waits_comes_to_its_end() {
        let pools: &Pools = Box::leak(Box::new(Pools::of(2)));
        let work = |i: u64| async move {
            let lease = pools.in_turn().await;
            let sum = move || {
                assert!(pools.lock().busy <= MOST * 2);
                (0..1000u64).into_par_iter().sum::<u64>() + i
            };
            tokio::task::spawn_blocking(move || lease.run(sum)).await.expect("no panic")
        };
        let tasks: Vec<_> = (0..60).map(|i| tokio::spawn(work(i))).collect();
        tasks.iter().step_by(3).for_each(tokio::task::JoinHandle::abort);
        for (i, task) in tasks.into_iter().enumerate() {
            match task.await {
                Ok(sum) => assert_eq!(sum, 499_500 + i as u64),
                Err(error) => assert!(error.is_cancelled() && i % 3 == 0, "{i}: {error}"),
            }
        }
        // All threads are returned; work that was aborted while running may do so later.
        let mut all = Vec::new();
        while all.iter().map(|lease: &Lease<'_>| lease.threads).sum::<usize>() < MOST * 2 {
            all.push(pools.in_turn().await);
        }
        assert!(pools.lock().idle.len() <= 2 * MOST_IDLE);
    }

    /// Work whose predecessors are dropped is served next, before later work.
    #[test]
    fn the_next_does_not_wait_for_who_is_dropped() {
        let pools = Pools::of(1);
        let mut held = all_threads(&pools);
        let mut waiting: Vec<_> = (0..4).map(|_| Box::pin(pools.in_turn())).collect();
        assert!(waiting.iter_mut().all(|waiting| waiting.as_mut().now_or_never().is_none()));
        waiting.drain(..2);
        held.pop();
        assert!(waiting[1].as_mut().now_or_never().is_none());
        assert!(waiting[0].as_mut().now_or_never().is_some());
        assert!(waiting[1].as_mut().now_or_never().is_some());
    }

    /// Work never waits while threads are left, and is served in order of arrival.
    #[test]
    fn whoever_is_dropped_no_turn_is_lost() {
        for cores in [1, 5, 128] {
            let (pools, mut random) = (Pools::of(cores), Random::new(cores as u64));
            let (mut held, mut waiting, mut dropped) = (Vec::new(), Vec::new(), 0);
            while dropped < 1000 {
                let place = |random: &mut Random, len: usize| random.below(len as u64) as usize;
                match random.below(4) {
                    0 if !held.is_empty() => drop(held.swap_remove(place(&mut random, held.len()))),
                    1 if !waiting.is_empty() => {
                        drop(waiting.remove(place(&mut random, waiting.len())));
                        dropped += 1;
                    }
                    _ if waiting.len() < 20 => waiting.push(Box::pin(pools.in_turn())),
                    _ => {}
                }
                // Sometimes several pieces arrive, or are dropped, between two polls.
                if random.below(2) == 0 {
                    continue;
                }
                let mut still = Vec::new();
                for mut next in waiting {
                    match next.as_mut().now_or_never() {
                        Some(lease) => {
                            assert!(still.is_empty(), "one that came earlier waits");
                            held.push(lease);
                        }
                        None => still.push(next),
                    }
                }
                waiting = still;
                let left = pools.share(pools.lock().busy, cores);
                assert!(waiting.is_empty() || left.is_none(), "{left:?} threads are left");
            }
            drop((held, waiting));
            assert_eq!(pools.lock().busy, 0);
        }
    }

    /// Other work may wait for a lock that its caller holds.
    #[test]
    fn work_for_a_worker_does_not_wait() {
        let pools = Pools::of(1);
        let held = all_threads(&pools);
        assert_eq!(pools.share(MOST, 1), None);
        assert_eq!(pools.at_once(1).run(|| 7), 7);
        drop(held);
        assert_eq!(pools.lock().busy, 0);
    }

    /// Threads are returned after a panic, too.
    #[test]
    fn panics_leave_no_threads_at_work() {
        let pools = Pools::of(1);
        let work = || pools.at_once(1).run::<()>(|| panic!("as it should"));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        assert!(panicked.is_err());
        assert_eq!(pools.lock().busy, 0);
    }

    fn all_threads(pools: &Pools) -> Vec<Lease<'_>> {
        std::iter::from_fn(|| pools.in_turn().now_or_never()).collect()
    }

    #[test]
    fn every_unit_is_filled_once_by_its_number() {
        for units in [0, 1, 7, 100_000] {
            let mut buffer = vec![0u32; units * 3];
            let fill = |first: usize, part: &mut [u32]| {
                for (i, unit) in part.chunks_mut(3).enumerate() {
                    unit.iter_mut().for_each(|x| *x += 1 + (first + i) as u32);
                }
                Ok(())
            };
            fill_on_threads(&mut buffer, 3, fill).unwrap();
            assert!(buffer.iter().enumerate().all(|(i, x)| *x as usize == 1 + i / 3));
        }
    }
}
