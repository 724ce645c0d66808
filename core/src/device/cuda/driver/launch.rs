//! Helpers of every family's launches: sizes, grids, and the throttle that bounds how far the host
//! runs ahead of the device.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use cudarc::driver::sys::{CUevent_flags, CUfunction_attribute};
use cudarc::driver::{
    CudaEvent, CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, DriverError,
    LaunchConfig,
};

use super::memory::Buffer;
use super::sys::failed;
use super::upload::elapsed;
use crate::error::Result;

/// Shared memory of a block without opting in to more.
const DEFAULT_SHARED: usize = 48 << 10;

/// Seconds of work between two marks, and the number of marks ahead of the device: cancelled work
/// ends within 200 ms.
const MARK_SECONDS: f64 = 0.04;
const MARKS_AHEAD: f64 = 3.0;

/// [`MARK_SECONDS`], or the value of `NEIGHBORS_TEST_LAUNCH_SECONDS`, if less: tests use it to cut
/// small work into many launches.
static SECONDS: LazyLock<f64> = LazyLock::new(|| {
    let variable = std::env::var("NEIGHBORS_TEST_LAUNCH_SECONDS").ok();
    let seconds = variable.and_then(|seconds| seconds.parse::<f64>().ok());
    seconds.map_or(MARK_SECONDS, |seconds| seconds.clamp(1e-9, MARK_SECONDS))
});

/// The target duration of a launch that ends by itself.
pub(in crate::device::cuda) fn launch_seconds() -> f64 {
    *SECONDS
}

/// The properties of a device that launches depend on.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cuda) struct Limits {
    /// Compute capability.
    pub(in crate::device::cuda) capability: (i32, i32),
    /// The most shared memory of a block, on request (opt-in).
    pub(in crate::device::cuda) shared: usize,
    /// Streaming multiprocessors.
    pub(in crate::device::cuda) multiprocessors: usize,
    /// Cycles of a multiprocessor per second.
    pub(in crate::device::cuda) clock: f64,
    /// The ratio of the rates of f32 and f64 sums.
    pub(in crate::device::cuda) double_penalty: f64,
}

impl Limits {
    /// The initial rate, in operations per second, for `per_cycle` operations per cycle of a
    /// multiprocessor.
    pub(in crate::device::cuda) fn rate(&self, per_cycle: f64) -> Rate {
        let cycles = self.multiprocessors as f64 * self.clock;
        Rate::new((cycles * per_cycle).max(SLOWEST))
    }
}

/// A lower bound on the rate of every device, in operations per second.
const SLOWEST: f64 = 1e9;

/// The throughput of a device for one kind of work, in operations per second, measured while it
/// runs.
#[derive(Debug)]
pub(in crate::device::cuda) struct Rate {
    now: AtomicU64,
    first: f64,
}

/// The factor by which a rate rises, up to its initial value, after work took less time than
/// expected and may have been skipped in part; and the least share of the expected time that counts
/// as done.
const RISE: f64 = 1.05;
const LEAST_DONE: f64 = 0.25;

impl Rate {
    fn new(first: f64) -> Self {
        Self { now: AtomicU64::new(first.to_bits()), first }
    }

    fn get(&self) -> f64 {
        f64::from_bits(self.now.load(Ordering::Relaxed))
    }

    /// The maximum number of operations of a launch.
    pub(in crate::device::cuda) fn of_a_launch(&self) -> f64 {
        self.get() * *SECONDS
    }

    /// Updates the rate with the time that some operations took.
    fn learn(&self, operations: f64, seconds: f64, counted: Counted) {
        let before = self.get();
        let measured = blended(before, operations, seconds);
        // Work that takes far less time than expected was skipped.
        let was_done = seconds * before > LEAST_DONE * operations;
        let rate = match counted {
            Counted::Exactly => measured,
            Counted::AtMost if measured < before => measured,
            Counted::AtMost if was_done => (before * RISE).min(self.first).max(before),
            _ => return,
        };
        self.now.store(rate.to_bits(), Ordering::Relaxed);
    }
}

/// The meaning of a launch's operation count for the rate of such work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::device::cuda) enum Counted {
    /// The exact number of operations.
    Exactly,
    /// An upper bound: the rate is lowered, or rises a little again.
    AtMost,
    /// Of another kind, or too few for the device: the rate stays.
    Guessed,
}

impl Counted {
    /// `Exactly` if all operations are done, else `AtMost`.
    pub(in crate::device::cuda) fn of_all(are_all_done: bool) -> Self {
        if are_all_done { Self::Exactly } else { Self::AtMost }
    }
}

/// A rate updated with a measurement: the mean of the old and the measured rate, the latter limited
/// to a factor of four.
fn blended(rate: f64, operations: f64, seconds: f64) -> f64 {
    let measured = operations / seconds.max(1e-6);
    (0.5 * (rate + measured.clamp(rate / 4.0, rate * 4.0))).max(SLOWEST)
}

/// The throttle of one stream: bounds how far the host runs ahead of the device.
#[derive(Debug, Default)]
pub(in crate::device::cuda) struct LaunchThrottle {
    /// The launches since the last mark.
    now: LaunchWindow,
    ahead: VecDeque<(CudaEvent, LaunchWindow)>,
    /// The last mark that the device has passed.
    passed: Option<CudaEvent>,
}

/// The launches between two marks.
#[derive(Debug, Default)]
struct LaunchWindow {
    /// The expected duration of the launches.
    seconds: f64,
    /// The rate of the first launch, and the operations of all launches at that rate.
    of_one_kind: Option<(Arc<Rate>, f64)>,
    /// The weakest `Counted` of all launches.
    counted: Option<Counted>,
    /// Whether the launches started at the mark before them. Otherwise the device was idle for an
    /// unknown time.
    is_timed: bool,
}

/// Below this share of [`MARK_SECONDS`], launches of another kind need no mark in between.
const WORTH_A_MARK: f64 = 0.25;

impl LaunchThrottle {
    /// Restarts the measurement after the host has waited for the device.
    pub(in crate::device::cuda) fn begin(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        let mark = stream.record_event(flags).map_err(failed("cuEventRecord"))?;
        while !self.ahead.is_empty() {
            self.wait_for_oldest()?;
        }
        (self.now, self.passed) =
            (LaunchWindow { is_timed: true, ..LaunchWindow::default() }, Some(mark));
        Ok(())
    }

    /// Accounts for a launch of `operations` at this rate, and waits if too much work is pending.
    pub(in crate::device::cuda) fn launched(
        &mut self,
        stream: &Arc<CudaStream>,
        rate: &Arc<Rate>,
        operations: f64,
        counted: Counted,
    ) -> Result<()> {
        if self.now.counted.is_none() {
            let last = self.ahead.back().map(|(mark, _)| mark).or(self.passed.as_ref());
            self.now.is_timed |= last.is_some_and(|mark| !mark.is_complete());
        }
        self.now.add(rate, operations, counted);
        if self.now.seconds < *SECONDS * WORTH_A_MARK {
            return Ok(());
        }
        let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        let mark = stream.record_event(flags).map_err(failed("cuEventRecord"))?;
        self.ahead.push_back((mark, std::mem::take(&mut self.now)));
        while self.pending() > MARKS_AHEAD * *SECONDS {
            self.wait_for_oldest()?;
        }
        Ok(())
    }

    /// Waits for the oldest mark, and updates the rate with the launches before it.
    fn wait_for_oldest(&mut self) -> Result<()> {
        let Some((oldest, window)) = self.ahead.pop_front() else { return Ok(()) };
        oldest.synchronize().map_err(failed("cuEventSynchronize"))?;
        if let Some(before) = self.passed.replace(oldest)
            && let Some(passed) = &self.passed
        {
            window.learn(elapsed(&before, passed)?.as_secs_f64());
        }
        Ok(())
    }

    /// Seconds of launched work that may not have ended.
    fn pending(&self) -> f64 {
        self.ahead.iter().map(|(_, window)| window.seconds).sum()
    }
}

impl LaunchWindow {
    fn add(&mut self, rate: &Arc<Rate>, operations: f64, counted: Counted) {
        let is_first = self.counted.is_none();
        self.seconds += operations / rate.get();
        self.counted = self.counted.max(Some(counted));
        match &mut self.of_one_kind {
            Some((window_rate, all)) if Arc::ptr_eq(window_rate, rate) => *all += operations,
            None if is_first => self.of_one_kind = Some((rate.clone(), operations)),
            _ => self.counted = Some(Counted::Guessed),
        }
    }

    /// Updates the rate with the measured duration of the launches.
    fn learn(&self, seconds: f64) {
        if let (true, Some((rate, operations)), Some(counted)) =
            (self.is_timed, &self.of_one_kind, self.counted)
        {
            rate.learn(*operations, seconds, counted);
        }
    }
}

/// A one-dimensional grid.
pub(in crate::device::cuda) fn config(
    blocks: usize,
    threads: usize,
    shared: usize,
) -> LaunchConfig {
    let blocks = u32::try_from(blocks).expect("a grid has fewer than 2^31 blocks");
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: shared as u32,
    }
}

/// # Panics
/// If a buffer does not hold `count` elements of `bytes` bytes each.
pub(in crate::device::cuda) fn check_size(buffer: &Buffer, count: usize, bytes: usize) {
    let (needed, held) = (count * bytes, buffer.slice().len());
    assert!(needed <= held, "a kernel needs {needed} bytes where there are {held}");
}

/// A kernel of a module.
pub(in crate::device::cuda) fn function(
    module: &Arc<CudaModule>,
    name: &'static str,
) -> Result<CudaFunction> {
    module.load_function(name).map_err(failed("cuModuleGetFunction"))
}

/// Allows a kernel more shared memory than the default.
pub(in crate::device::cuda) fn allow_shared(function: &CudaFunction, bytes: usize) -> Result<()> {
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let set = || -> Result<(), DriverError> {
        if bytes > DEFAULT_SHARED {
            function.set_attribute(attribute, bytes as i32)
        } else {
            Ok(())
        }
    };
    set().map_err(failed("cuFuncSetAttribute"))
}

/// The address of a buffer on the device.
pub(in crate::device::cuda) fn address(stream: &Arc<CudaStream>, buffer: &Buffer) -> u64 {
    let slice: &CudaSlice<u8> = buffer.slice();
    slice.device_ptr(stream).0
}

/// The address of a buffer on the device, or null.
pub(in crate::device::cuda) fn address_or_null(
    stream: &Arc<CudaStream>,
    buffer: Option<&Buffer>,
) -> u64 {
    buffer.map_or(0, |buffer| address(stream, buffer))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(per_second: f64) -> Arc<Rate> {
        Arc::new(Rate::new(per_second))
    }

    fn window(launches: &[(&Arc<Rate>, f64, Counted)]) -> LaunchWindow {
        let mut window = LaunchWindow { is_timed: true, ..LaunchWindow::default() };
        launches.iter().for_each(|(rate, operations, counted)| {
            window.add(rate, *operations, *counted);
        });
        window
    }

    #[test]
    fn only_windows_of_one_kind_of_work_that_was_counted_are_learned_from() {
        use Counted::{AtMost, Exactly, Guessed};
        let (scan, merge) = (rate(1e12), rate(1e10));
        let pure = window(&[(&scan, 1e10, Exactly), (&scan, 1e10, Exactly)]);
        assert!((pure.seconds - 0.02).abs() < 1e-12);
        pure.learn(0.01);
        assert_eq!(scan.get(), 1.5e12);
        let mut idle = window(&[(&scan, 1e10, Exactly)]);
        idle.is_timed = false;
        for other in [
            window(&[(&scan, 1e10, Exactly), (&merge, 1e8, Exactly)]),
            window(&[(&scan, 1e10, Exactly), (&scan, 1e10, Guessed)]),
            window(&[(&merge, 1e8, Guessed)]),
            idle,
        ] {
            other.learn(1.0);
        }
        assert_eq!((scan.get(), merge.get()), (1.5e12, 1e10));
        for fewer in [
            window(&[(&scan, 1e10, AtMost)]),
            window(&[(&scan, 1e10, Exactly), (&scan, 1e10, AtMost)]),
        ] {
            fewer.learn(1e-6);
        }
        assert_eq!(scan.get(), 1.5e12);
    }

    #[test]
    fn a_device_far_slower_than_expected_is_found_out_by_work_that_is_not_all_done() {
        let guessed = rate(1e13);
        for _ in 0..20 {
            let operations = guessed.of_a_launch();
            window(&[(&guessed, operations, Counted::AtMost)]).learn(operations / 1e11);
        }
        assert!((guessed.get() / 1e11 - 1.0).abs() < 0.01, "{}", guessed.get());
    }

    #[test]
    fn a_rate_that_was_lowered_in_error_rises_again() {
        let rate = rate(1e12);
        let all = |times, of_expected: f64| {
            for _ in 0..times {
                let work = window(&[(&rate, 1e10, Counted::AtMost)]);
                work.learn(of_expected * work.seconds);
            }
            rate.get()
        };
        assert!(all(5, 10.0) < 1e11);
        assert!(all(1, 0.5) < 1.1e11);
        assert!(all(100, 0.1) < 1.1e11, "almost nothing was done");
        assert_eq!(all(100, 0.5), 1e12);
    }

    #[test]
    fn a_rate_approaches_what_is_measured_and_survives_nonsense() {
        let rate = (0..20).fold(1e12, |rate, _| blended(rate, 5e10, 0.01));
        assert!((rate / 5e12 - 1.0).abs() < 0.01, "{rate}");
        assert!(blended(1e12, 1e12, 0.0) <= 4e12);
        assert!(blended(1e12, 0.0, 1e9) >= 2.5e11);
        assert_eq!(blended(SLOWEST, 0.0, 1.0), SLOWEST);
    }
}
