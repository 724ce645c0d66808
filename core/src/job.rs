//! The context of long work: its cancellation, its memory budget, and the watcher of its phases.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// One piece of long work, as seen by its caller. Every loop over chunks takes one.
///
/// By default, a job is never cancelled, has an unlimited memory budget, and is not watched.
#[derive(Clone, Default)]
pub struct Job {
    cancel: Cancel,
    budget: Option<Arc<dyn Budget>>,
    watch: Option<Arc<dyn Watch>>,
}

/// A flag that stops work whose result is no longer needed.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

/// A counted and limited amount of host memory.
pub trait Budget: Send + Sync {
    /// Counts bytes as used.
    ///
    /// # Errors
    /// The reason for refusing them.
    fn grow(&self, bytes: usize) -> Result<(), String>;

    /// Counts bytes as free again.
    fn shrink(&self, bytes: usize);

    /// Evicts caches, or one of them, from device memory. Returns whether there were any.
    fn evict_from_device(&self) -> bool {
        false
    }
}

/// Receives the phases of work.
pub trait Watch: Send + Sync {
    /// Records that the work enters this phase.
    fn enter(&self, phase: Phase);

    /// Records the progress of rounds.
    fn rounds(&self, progress: Progress) {
        let _ = progress;
    }
}

/// The progress of k-means rounds since the last report.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Number of rounds.
    pub rounds: usize,
    /// Number of rows that the last round moved to another cluster.
    pub moved: usize,
    /// The inertia about the means of the last round: the weighted sum of the rows' costs; `None`
    /// if unknown.
    pub inertia: Option<f64>,
}

/// The phases of work that EXPLAIN ANALYZE distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Reading the batches of the inputs.
    Read,
    /// Making rows, checking them, choosing the device and building its layouts.
    Prepare,
    /// Sending the base to a device with its own memory.
    Upload,
    /// Tuning parameters on a sample.
    Tune,
    /// Hashing the base.
    Hash,
    /// Building hash tables.
    Build,
    /// Generating candidates.
    Find,
    /// Comparing candidates.
    Compare,
    /// Searching for neighbours.
    Search,
    /// Choosing initial centroids.
    Seed,
    /// Assigning rows to centroids.
    Assign,
    /// Moving centroids to the means of their rows.
    Update,
    /// Counting the rows near each row.
    Count,
    /// Connecting core rows.
    Link,
    /// Making batches of the results.
    Emit,
}

/// Bytes that are counted as used until this is dropped.
#[must_use]
pub struct Reserved {
    budget: Option<Arc<dyn Budget>>,
    bytes: usize,
}

impl Cancel {
    /// Requests that the work stops.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// # Errors
    /// [`Error::Cancelled`] if the flag is set.
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }
}

impl Job {
    /// A job that this flag cancels.
    pub fn new(cancel: Cancel) -> Self {
        Self { cancel, ..Self::default() }
    }

    /// The same job, within this budget.
    pub fn with_budget(self, budget: Arc<dyn Budget>) -> Self {
        Self { budget: Some(budget), ..self }
    }

    /// The same job, watched.
    pub fn with_watch(self, watch: Arc<dyn Watch>) -> Self {
        Self { watch: Some(watch), ..self }
    }

    /// A concurrent part of this job: it reports no phases.
    pub fn part(&self) -> Self {
        Self { watch: None, ..self.clone() }
    }

    /// The flag.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// # Errors
    /// [`Error::Cancelled`] if the job is cancelled.
    pub fn check(&self) -> Result<()> {
        self.cancel.check()
    }

    /// Records that the work enters this phase.
    pub fn enter(&self, phase: Phase) {
        if let Some(watch) = &self.watch {
            watch.enter(phase);
        }
    }

    /// Records the progress of rounds, if the job is watched.
    pub fn rounds(&self, progress: impl FnOnce() -> Progress) {
        if let Some(watch) = &self.watch {
            watch.rounds(progress());
        }
    }

    /// Does work; as long as it runs out of device memory, caches are evicted, and it runs again.
    ///
    /// # Errors
    /// Those of the work.
    pub fn retry_after_eviction<T>(&self, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match work() {
                Err(Error::DeviceMemory { .. }) if self.evict_from_device() => {}
                done => return done,
            }
        }
    }

    /// Evicts caches, or one of them, from device memory. Returns whether there were any.
    pub fn evict_from_device(&self) -> bool {
        self.budget.as_ref().is_some_and(|budget| budget.evict_from_device())
    }

    /// Counts bytes that are about to be allocated; `what` names them in the error.
    ///
    /// # Errors
    /// [`Error::HostMemory`] if the budget does not hold them.
    pub fn reserve(&self, what: &'static str, bytes: usize) -> Result<Reserved> {
        if let Some(budget) = &self.budget {
            budget.grow(bytes).map_err(|reason| Error::HostMemory { what, bytes, reason })?;
        }
        Ok(Reserved { budget: self.budget.clone(), bytes })
    }

    /// The same for memory that the work can do without: `None` if the budget does not hold it.
    pub fn try_reserve(&self, bytes: usize) -> Option<Reserved> {
        self.reserve("", bytes).ok()
    }
}

impl Reserved {
    /// Number of bytes that are counted.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reduces the number of bytes that are counted.
    pub fn shrink_to(&mut self, bytes: usize) {
        let less = self.bytes.saturating_sub(bytes);
        if let Some(budget) = &self.budget {
            budget.shrink(less);
        }
        self.bytes -= less;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Some(budget) = &self.budget {
            budget.shrink(self.bytes);
        }
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("cancel", &self.cancel).finish_non_exhaustive()
    }
}

impl fmt::Debug for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reserved").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    struct Hundred(AtomicUsize);

    impl Budget for Hundred {
        fn grow(&self, bytes: usize) -> Result<(), String> {
            let used = self.0.fetch_add(bytes, Ordering::Relaxed) + bytes;
            if used > 100 {
                self.shrink(bytes);
                return Err("there are 100".to_string());
            }
            Ok(())
        }

        fn shrink(&self, bytes: usize) {
            self.0.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    #[test]
    fn memory_is_counted_while_it_is_held() {
        let budget = Arc::new(Hundred(AtomicUsize::new(0)));
        let job = Job::default().with_budget(budget.clone());
        let held = job.reserve("rows", 60).unwrap();
        let refused = job.reserve("labels", 50).unwrap_err().to_string();
        assert!(refused.contains("labels") && refused.contains("there are 100"), "{refused}");
        drop(held);
        assert_eq!(budget.0.load(Ordering::Relaxed), 0);
        let mut held = job.reserve("labels", 50).unwrap();
        held.shrink_to(20);
        held.shrink_to(30);
        assert_eq!(budget.0.load(Ordering::Relaxed), 20);
    }

    #[test]
    fn a_cancelled_job_says_so() {
        let job = Job::default();
        assert!(job.check().is_ok());
        job.clone().part().cancel().cancel();
        assert!(matches!(job.check(), Err(Error::Cancelled)));
    }
}
