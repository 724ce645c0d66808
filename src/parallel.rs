//! The one place outside `device/cpu` that knows of threads.

use std::sync::{Mutex, PoisonError};

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

/// The maximum number of idle thread pools kept for reuse.
const MOST_IDLE: usize = 4;

/// Runs work on threads that nothing else uses meanwhile: the caller may be a worker of rayon's
/// common pool, and work stolen from another statement would delay the end of this one.
pub(crate) fn on_own_threads<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    static IDLE: Mutex<Vec<ThreadPool>> = Mutex::new(Vec::new());
    let idle = || IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    let found = idle().pop();
    let made = || ThreadPoolBuilder::new().thread_name(|i| format!("neighbors-{i}")).build();
    let Some(pool) = found.or_else(|| made().ok()) else {
        return work();
    };
    let done = pool.install(work);
    let mut idle = idle();
    if idle.len() < MOST_IDLE {
        idle.push(pool);
    }
    done
}

/// The same where the caller is a worker of such threads: it waits, and works on nothing else meanwhile.
pub(crate) fn on_other_threads<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let done = scope.spawn(|| on_own_threads(work)).join();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
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
