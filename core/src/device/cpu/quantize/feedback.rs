//! Counters of earlier searches of a base, from which the next search chooses its layout.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Numbers of tasks left to the next layout, and of finished tasks: once more are left, new tasks begin with the
/// next layout.
#[derive(Debug, Default)]
pub(in crate::device::cpu) struct LayoutFeedback {
    left: AtomicU32,
    finished: AtomicU32,
    skipped: AtomicU32,
}

impl LayoutFeedback {
    pub(in crate::device::cpu) fn count(&self, is_left: bool) {
        let counter = if is_left { &self.left } else { &self.finished };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether more tasks were left than finished. One in 64 such calls says no, so that a task tries again.
    pub(in crate::device::cpu) fn are_mostly_left(&self) -> bool {
        let are_left = self.left.load(Ordering::Relaxed) > self.finished.load(Ordering::Relaxed);
        are_left && self.skipped.fetch_add(1, Ordering::Relaxed) % 64 != 63
    }
}

/// Counters of queries that guessed a threshold, and of wrong guesses.
#[derive(Debug, Default)]
pub(in crate::device::cpu) struct GuessFeedback {
    wrong: AtomicU64,
    all: AtomicU64,
}

/// Guesses stop once more than [`FEW_WRONG`] of them and more than one in [`ONE_WRONG_IN`] were wrong: searching
/// again then takes longer than guesses save.
const ONE_WRONG_IN: u64 = 64;
const FEW_WRONG: u64 = 16;

impl GuessFeedback {
    pub(in crate::device::cpu) fn count(&self, wrong: usize, all: usize) {
        self.wrong.fetch_add(wrong as u64, Ordering::Relaxed);
        self.all.fetch_add(all as u64, Ordering::Relaxed);
    }

    pub(in crate::device::cpu) fn are_mostly_right(&self) -> bool {
        let wrong = self.wrong.load(Ordering::Relaxed);
        wrong <= FEW_WRONG || wrong <= self.all.load(Ordering::Relaxed) / ONE_WRONG_IN
    }

    #[cfg(test)]
    pub(in crate::device::cpu) fn wrong(&self) -> u64 {
        self.wrong.load(Ordering::Relaxed)
    }
}
