//! The one place outside `device/cpu` that knows of threads.

use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Result;

/// The results of tasks that run on all cores, in the tasks' order.
pub(crate) fn in_parallel<I: Send, T: Send>(
    tasks: Vec<I>,
    run: impl Fn(I) -> T + Sync + Send,
) -> Vec<T> {
    tasks.into_par_iter().map(run).collect()
}

/// Threads at work for each core, up to which work gets as many threads as there are cores.
const FULL: usize = 4;

/// Threads at work for each core, up to which work gets a share of that: one in so many.
const MOST: usize = 8;
const SHARE: usize = 8;

/// Idle thread pools of each size that are kept for reuse.
const MOST_IDLE: usize = 4;

/// The threads of this process.
static POOLS: LazyLock<Pools> = LazyLock::new(Pools::of_process);

/// Runs work on threads that nothing else uses meanwhile: the caller may be a worker of rayon's
/// common pool, and work stolen from another statement would delay the end of this one.
///
/// The first [`FULL`] pieces of work have a thread for each core. Further ones have a share of them, so
/// that a short one need not wait for long ones; when that makes [`MOST`] threads for each core, they
/// wait for their turn, in the order in which they came. What comes of work does not depend on its
/// number of threads.
pub(crate) fn on_own_threads<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    POOLS.in_turn().run(work)
}

/// The same where the caller is a worker of such threads: it waits, and works on nothing else meanwhile.
/// This work has its threads at once, as others may wait for a lock that the caller holds.
pub(crate) fn on_other_threads<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let wanted = threads();
    std::thread::scope(|scope| {
        let done = scope.spawn(|| POOLS.at_once(wanted).run(work)).join();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Thread pools, each of which does one piece of work at a time.
struct Pools {
    cores: usize,
    state: Mutex<State>,
    /// Notified when threads are given back, and when it is another's turn.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Threads at work.
    busy: usize,
    idle: Vec<ThreadPool>,
    /// The next ticket to be given out, and the one whose turn it is.
    next: u64,
    turn: u64,
}

/// Threads for one piece of work, given back when it is dropped. There is no pool where the system starts
/// no threads.
struct Lease<'a> {
    pools: &'a Pools,
    pool: Option<ThreadPool>,
    threads: usize,
}

impl Pools {
    /// As many threads as rayon would have.
    fn of_process() -> Self {
        let first = pool_of(0);
        let pools = Self::of(first.as_ref().map_or(1, ThreadPool::current_num_threads));
        pools.lock().idle.extend(first);
        pools
    }

    fn of(cores: usize) -> Self {
        Self { cores, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Threads for work that waits for its turn, and for threads.
    fn in_turn(&self) -> Lease<'_> {
        let mut state = self.lock();
        let ticket = state.next;
        state.next += 1;
        let threads = loop {
            if state.turn == ticket
                && let Some(threads) = self.share(state.busy, self.cores)
            {
                break threads;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.turn += 1;
        self.changed.notify_all();
        self.lease(state, threads)
    }

    /// Threads for work that cannot wait: `wanted`, fewer or one.
    fn at_once(&self, wanted: usize) -> Lease<'_> {
        let state = self.lock();
        let threads = self.share(state.busy, wanted).unwrap_or(1);
        self.lease(state, threads)
    }

    /// Threads for work that has use for `wanted`, where so many are busy; `None` if there are none left.
    fn share(&self, busy: usize, wanted: usize) -> Option<usize> {
        let few = (self.cores / SHARE).clamp(1, wanted);
        let ways = [(wanted, FULL * self.cores), (few, MOST * self.cores)];
        let fits = |(threads, most): &(usize, usize)| busy + threads <= *most;
        ways.into_iter().find(fits).map(|(threads, _)| threads)
    }

    fn lease(&self, mut state: MutexGuard<'_, State>, threads: usize) -> Lease<'_> {
        state.busy += threads;
        let known = state.idle.iter().position(|pool| pool.current_num_threads() == threads);
        let idle = known.map(|place| state.idle.swap_remove(place));
        drop(state);
        Lease { pools: self, pool: idle.or_else(|| pool_of(threads)), threads }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pool of so many threads, or of rayon's number for 0.
fn pool_of(threads: usize) -> Option<ThreadPool> {
    let named = ThreadPoolBuilder::new().thread_name(|i| format!("neighbors-{i}"));
    named.num_threads(threads).build().ok()
}

impl Lease<'_> {
    fn run<T: Send>(self, work: impl FnOnce() -> T + Send) -> T {
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
        self.pools.changed.notify_all();
    }
}

/// How many tasks run at the same time.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads()
}

/// Below this many bytes, filling a buffer is not worth several threads.
const WORTH_THREADS: usize = 1 << 20;

/// Fills a buffer in parts of whole units, on threads of its own: the caller may hold locks that
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
    use super::*;

    #[test]
    fn work_at_the_same_time_has_threads_of_its_own() {
        let here = || std::thread::current().name().map(str::to_string);
        assert!(on_own_threads(here).is_some_and(|name| name.starts_with("neighbors-")));
        let barrier = std::sync::Barrier::new(3);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| on_own_threads(|| barrier.wait()));
            }
        });
    }

    /// Of much work at the same time, the first has all cores, more has some, and the rest waits.
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
        // 32 statements on 128 cores would be 4,096 threads, if each had all.
        let pools = Pools::of(128);
        let busy = (0..32).fold(0, |busy, _| busy + pools.share(busy, 128).unwrap());
        assert_eq!(busy, 4 * 128 + 28 * 16);
    }

    #[test]
    fn work_that_waits_comes_to_its_end() {
        let pools = Pools::of(2);
        let most = std::sync::atomic::AtomicUsize::new(0);
        let seen = || most.fetch_max(pools.lock().busy, std::sync::atomic::Ordering::SeqCst);
        std::thread::scope(|scope| {
            for i in 0..60 {
                let (pools, seen) = (&pools, &seen);
                scope.spawn(move || {
                    let sum = pools.in_turn().run(|| {
                        seen();
                        (0..1000u64).into_par_iter().sum::<u64>() + i
                    });
                    assert_eq!(sum, 499_500 + i);
                });
            }
        });
        assert!(most.into_inner() <= MOST * 2);
        let state = pools.lock();
        assert_eq!((state.busy, state.next, state.turn), (0, 60, 60));
        assert!(state.idle.len() <= 2 * MOST_IDLE);
    }

    /// Others may wait for a lock that its caller holds.
    #[test]
    fn work_for_a_worker_does_not_wait() {
        let pools = Pools::of(1);
        let held: Vec<_> = (0..MOST).map(|_| pools.in_turn()).collect();
        assert_eq!(pools.share(MOST, 1), None);
        assert_eq!(pools.at_once(1).run(|| 7), 7);
        drop(held);
        assert_eq!(pools.lock().busy, 0);
    }

    /// Threads are given back by work that panics, too.
    #[test]
    fn panics_leave_no_threads_at_work() {
        let pools = Pools::of(1);
        let work = || pools.in_turn().run::<()>(|| panic!("as it should"));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        assert!(panicked.is_err());
        assert_eq!(pools.lock().busy, 0);
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
