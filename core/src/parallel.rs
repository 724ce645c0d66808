//! Threads: the only place outside `device/cpu` that manages them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::{Notify, oneshot};

use crate::error::Result;

/// Runs tasks on all threads of the current pool; returns the results in the order of the tasks.
///
/// A task should compute for a microsecond or more. Everywhere but here and where work is halved, rayon is
/// not called: its iterators would be compiled again for each kind of task.
pub fn in_parallel<I: Send, T: Send>(
    tasks: impl IntoIterator<Item = I>,
    run: impl Fn(I) -> T + Sync,
) -> Vec<T> {
    let tasks: Vec<_> = tasks.into_iter().map(|task| Mutex::new((Some(task), None))).collect();
    for_each(tasks.len(), &|place| {
        let task = lock(&tasks[place]).0.take();
        let result = task.map(&run);
        lock(&tasks[place]).1 = result;
    });
    let results =
        tasks.into_iter().map(|task| task.into_inner().unwrap_or_else(PoisonError::into_inner));
    results.filter_map(|(_, result)| result).collect()
}

/// Calls `run` with all numbers below `count`, on all threads of the current pool.
fn for_each(count: usize, run: &(dyn Fn(usize) + Sync)) {
    match count {
        0 | 1 => (0..count).for_each(run),
        _ => (0..count).into_par_iter().for_each(run),
    }
}

/// The values of all numbers below `count`, computed on all threads of the current pool, `of_task` of them
/// one after the other.
pub fn map_in_parallel<T: Send>(
    count: usize,
    of_task: usize,
    value: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let some = |first: usize| (first..count.min(first + of_task)).map(&value).collect::<Vec<_>>();
    let all = in_parallel((0..count).step_by(of_task), some);
    all.into_iter().flatten().collect()
}

/// Runs tasks on all threads of the current pool; returns the results in the order of the tasks. After an
/// error, tasks that have not begun are left out.
pub fn try_in_parallel<I: Send, T: Send, E: Send>(
    tasks: impl IntoIterator<Item = I>,
    run: impl Fn(I) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let has_failed = AtomicBool::new(false);
    let results = in_parallel(tasks, |task| {
        if has_failed.load(Ordering::Relaxed) {
            return None;
        }
        let result = run(task);
        if result.is_err() {
            has_failed.store(true, Ordering::Relaxed);
        }
        Some(result)
    });
    results.into_iter().flatten().collect()
}

/// The same for tasks that use scratch memory, made for each thread.
pub fn try_in_parallel_with<S: Send, I: Send, T: Send, E: Send>(
    tasks: impl IntoIterator<Item = I>,
    scratch: impl Fn() -> S + Sync,
    run: impl Fn(&mut S, I) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let idle = Mutex::new(Vec::new());
    try_in_parallel(tasks, |task| {
        let taken = lock(&idle).pop();
        let mut scratch_of_thread = taken.unwrap_or_else(&scratch);
        let result = run(&mut scratch_of_thread, task);
        lock(&idle).push(scratch_of_thread);
        result
    })
}

/// Locks a mutex, also after a panic of a thread that held it.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The value of a cell, made by the first caller. Callers at the same time may all make it: no lock
/// is held meanwhile, since `make` may run tasks in parallel, and a thread waiting for these may
/// begin another task that needs the same value.
pub fn get_or_make<T>(cell: &OnceLock<T>, make: impl FnOnce() -> T) -> &T {
    match cell.get() {
        Some(made) => made,
        None => {
            let made = make();
            cell.get_or_init(|| made)
        }
    }
}

/// The pieces of work that compute at the same time, beyond one per core.
const BESIDE: usize = 32;

/// The thread pools of this process.
static POOLS: LazyLock<Pools> = LazyLock::new(Pools::of_process);

/// Threads of a statement's own: on rayon's common pool, work stolen from another statement would
/// delay the end of this one.
///
/// A single piece of work has a thread for each core; beside others, one has half of what is left of
/// two for each core, and at least one, so that a short one need not wait for long ones. Beyond one
/// piece for each core and [`BESIDE`] more, work waits in the order of arrival. A future dropped while
/// it waits is skipped; one that is not polled on its turn delays all later ones. Results do not
/// depend on the number of threads.
pub async fn own_threads() -> Lease {
    POOLS.in_turn().await
}

/// Runs work on separate threads on behalf of a worker thread, which waits and does nothing else
/// meanwhile. The work gets threads immediately, since other threads may wait for a lock held by
/// the caller.
pub fn on_other_threads<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let requested = threads();
    thread::scope(|scope| {
        let done = scope.spawn(|| POOLS.at_once(requested).install(work)).join();
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
    /// Number of busy threads, and of pieces of work that took their turn.
    busy: usize,
    works: usize,
    /// Pools for reuse.
    idle: Vec<Arc<ThreadPool>>,
}

/// Threads for one piece of work, returned when this is dropped.
pub struct Lease {
    pools: &'static Pools,
    /// Acquired when the work begins, since starting threads takes time.
    pool: Option<Arc<ThreadPool>>,
    threads: usize,
    /// Whether it counts as work that took its turn.
    in_turn: bool,
}

impl PoolState {
    fn idle_threads(&self) -> usize {
        self.idle.iter().map(|pool| pool.current_num_threads()).sum()
    }
}

impl Pools {
    /// Pools for as many cores as rayon would use threads.
    fn of_process() -> Self {
        let first = pool_of(0);
        let pools = Self::of(first.as_ref().map_or(1, ThreadPool::current_num_threads));
        pools.lock().idle.extend(first.map(Arc::new));
        pools
    }

    fn of(cores: usize) -> Self {
        Self { cores, state: Mutex::default(), turn: Default::default(), given_back: Notify::new() }
    }

    /// Threads for work that waits for its turn, and then for threads.
    async fn in_turn(&'static self) -> Lease {
        let _turn = self.turn.lock().await;
        loop {
            if let Some(lease) = self.lease_share() {
                return lease;
            }
            self.given_back.notified().await;
        }
    }

    /// The number of pieces of work that compute at the same time, and of threads that are kept idle.
    fn most(&self) -> usize {
        self.cores + BESIDE
    }

    /// Number of threads for the next piece of work beside `works` others with `busy` threads; `None`
    /// if the limit is reached.
    fn share(&self, works: usize, busy: usize) -> Option<usize> {
        let free = (2 * self.cores).saturating_sub(busy);
        (works < self.most()).then_some((free / 2).clamp(1, self.cores))
    }

    /// Threads for a piece of work that takes its turn.
    fn lease_share(&'static self) -> Option<Lease> {
        let mut state = self.lock();
        let threads = self.share(state.works, state.busy)?;
        state.busy += threads;
        state.works += 1;
        Some(Lease { pools: self, pool: None, threads, in_turn: true })
    }

    /// Threads for work that cannot wait: `requested`, fewer or one.
    fn at_once(&'static self, requested: usize) -> Lease {
        let mut state = self.lock();
        let left = (self.cores + self.most()).saturating_sub(state.busy);
        let threads = requested.min(left).max(1);
        state.busy += threads;
        Lease { pools: self, pool: None, threads, in_turn: false }
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

impl Lease {
    /// The pool for the work: an idle one of its size, a new one or, where all threads have been
    /// started, an idle one of the closest size. `None` if the system cannot start threads.
    fn acquire(&mut self) -> Option<Arc<ThreadPool>> {
        let mut state = self.pools.lock();
        let sizes = state.idle.iter().map(|pool| pool.current_num_threads());
        let closest = sizes.enumerate().min_by_key(|(_, size)| size.abs_diff(self.threads));
        let is_full = state.busy + state.idle_threads() > self.pools.most();
        let takes = |(_, size): &(usize, usize)| is_full || *size == self.threads;
        let made = match closest.filter(takes) {
            Some(_) => None,
            None => pool_of(self.threads).map(Arc::new),
        };
        self.pool = match (made, closest) {
            (None, Some((place, size))) => {
                state.busy = state.busy - self.threads + size;
                self.threads = size;
                Some(state.idle.swap_remove(place))
            }
            (made, _) => made,
        };
        self.pool.clone()
    }

    /// Starts work on these threads, and returns where its result, or its panic, will arrive.
    pub fn start<T: Send + 'static>(
        mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> oneshot::Receiver<thread::Result<T>> {
        let (sender, receiver) = oneshot::channel();
        let pool = self.acquire();
        let whole = move || {
            let result = catch_unwind(AssertUnwindSafe(work));
            drop(self);
            // Nobody may wait any more.
            let _ = sender.send(result);
        };
        match pool {
            Some(pool) => pool.spawn(whole),
            None => whole(),
        }
        receiver
    }

    /// Runs work on these threads, and waits for it.
    fn install<T: Send>(mut self, work: impl FnOnce() -> T + Send) -> T {
        match self.acquire() {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.pools.lock();
        state.busy -= self.threads;
        state.works -= usize::from(self.in_turn);
        if state.busy + state.idle_threads() + self.threads <= self.pools.most() {
            state.idle.extend(self.pool.take());
        }
        drop(state);
        self.pools.given_back.notify_one();
    }
}

/// Number of threads of the current pool.
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Bytes from which filling a buffer pays off on several threads.
const WORTH_THREADS: usize = 1 << 20;

/// Fills a buffer in parts of whole units, on separate threads: the caller may hold locks that
/// rayon's workers wait for. `fill` gets the number of the first unit of a part, and the part.
pub fn fill_on_threads<T: Send>(
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
    thread::scope(|scope| {
        let parts = buffer.chunks_mut(per_thread * unit).enumerate();
        let fill = &fill;
        let running: Vec<_> =
            parts.map(|(i, part)| scope.spawn(move || fill(i * per_thread, part))).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<()>>| {
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
            let make = || in_parallel(0..64, |i: u64| i).iter().sum::<u64>();
            let values = in_parallel(0..64, |_: u64| *get_or_make(&cell, make));
            assert_eq!(values, [2016; 64]);
        }
    }

    /// Pools of a test's own.
    fn pools(cores: usize) -> &'static Pools {
        Box::leak(Box::new(Pools::of(cores)))
    }

    #[tokio::test]
    async fn work_at_the_same_time_has_threads_of_its_own() {
        let here = || thread::current().name().map(str::to_string);
        let name = own_threads().await.start(here).await.unwrap().unwrap();
        assert!(name.is_some_and(|name| name.starts_with("neighbors-")));
        let barrier = Arc::new(std::sync::Barrier::new(3));
        let start = |lease: Lease| {
            let barrier = barrier.clone();
            lease.start(move || barrier.wait())
        };
        let leases = [own_threads().await, own_threads().await, own_threads().await];
        for started in leases.map(start) {
            assert!(started.await.unwrap().is_ok());
        }
    }

    /// Few pieces of work have all cores, more have a share of them, and very many wait.
    #[test]
    fn threads_are_bounded_however_much_work_there_is() {
        for cores in [1, 2, 5, 16, 128] {
            let pools = Pools::of(cores);
            let (mut busy, mut shares) = (0, Vec::new());
            while let Some(threads) = pools.share(shares.len(), busy) {
                busy += threads;
                shares.push(threads);
            }
            assert!(shares.len() == cores + BESIDE && busy <= 2 * cores + shares.len());
            assert!(shares[0] == cores && shares[1] == (cores / 2).max(1));
            assert!(shares.iter().all(|threads| *threads > 0));
        }
        // On two cores, 32 pieces of work have 33 threads.
        let next = |busy, works| busy + Pools::of(2).share(works, busy).unwrap();
        assert_eq!((0..32).fold(0, next), 33);
    }

    /// Waiting work, every third piece of which is aborted, comes to its end.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn work_that_waits_comes_to_its_end() {
        let pools = pools(2);
        let work = |i: u64| async move {
            let lease = pools.in_turn().await;
            let sum = move || {
                let state = pools.lock();
                assert!(state.works <= pools.most());
                drop(state);
                (0..1000u64).into_par_iter().sum::<u64>() + i
            };
            lease.start(sum).await.expect("a result").expect("no panic")
        };
        let tasks: Vec<_> = (0..200).map(|i| tokio::spawn(work(i))).collect();
        tasks.iter().step_by(3).for_each(tokio::task::JoinHandle::abort);
        for (i, task) in tasks.into_iter().enumerate() {
            match task.await {
                Ok(sum) => assert_eq!(sum, 499_500 + i as u64),
                Err(error) => assert!(error.is_cancelled() && i % 3 == 0, "{i}: {error}"),
            }
        }
        // All threads are returned; work that was aborted while running may do so later.
        let mut all = Vec::new();
        while all.len() < pools.most() {
            all.push(pools.in_turn().await);
        }
    }

    /// Work whose predecessors are dropped is served next, before later work.
    #[test]
    fn the_next_does_not_wait_for_who_is_dropped() {
        let pools = pools(1);
        let mut held = all_threads(pools);
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
            let (pools, mut random) = (pools(cores), Random::new(cores as u64));
            let (mut held, mut waiting, mut dropped) = (Vec::new(), Vec::new(), 0);
            while dropped < 1000 {
                let place = |random: &mut Random, len: usize| random.below(len as u64) as usize;
                match random.below(4) {
                    0 if !held.is_empty() => drop(held.swap_remove(place(&mut random, held.len()))),
                    1 if !waiting.is_empty() => {
                        drop(waiting.remove(place(&mut random, waiting.len())));
                        dropped += 1;
                    }
                    _ if waiting.len() < 80 => waiting.push(Box::pin(pools.in_turn())),
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
                let left = pools.share(pools.lock().works, 0);
                assert!(waiting.is_empty() || left.is_none(), "{left:?} threads are left");
            }
            drop((held, waiting));
            assert_eq!(pools.lock().busy, 0);
        }
    }

    /// Other work may wait for a lock that its caller holds.
    #[test]
    fn work_for_a_worker_does_not_wait() {
        let pools = pools(1);
        let held = all_threads(pools);
        assert_eq!(pools.share(held.len(), 0), None);
        assert_eq!(pools.at_once(1).install(|| 7), 7);
        drop(held);
        assert_eq!(pools.lock().busy, 0);
    }

    /// Threads are returned after a panic, too.
    #[tokio::test]
    async fn panics_leave_no_threads_at_work() {
        let pools = pools(1);
        let work = || pools.at_once(1).install::<()>(|| panic!("as it should"));
        assert!(catch_unwind(AssertUnwindSafe(work)).is_err());
        let started = pools.in_turn().await.start(|| panic!("as it should"));
        assert!(started.await.unwrap().is_err());
        let state = pools.lock();
        assert_eq!((state.busy, state.works), (0, 0));
    }

    fn all_threads(pools: &'static Pools) -> Vec<Lease> {
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
