//! The one place outside `device/cpu` that knows of threads.

use rayon::prelude::*;

/// The results of tasks that run on all cores, in the tasks' order.
pub(crate) fn in_parallel<I: Send, T: Send>(
    tasks: Vec<I>,
    run: impl Fn(I) -> T + Sync + Send,
) -> Vec<T> {
    tasks.into_par_iter().map(run).collect()
}

/// How many tasks run at the same time.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads()
}
