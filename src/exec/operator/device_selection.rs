//! The device that an operator computes on, and the fallback when it fails.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use datafusion::common::runtime::SpawnedTask;

use super::evictable::{MemoryOf, evict_idle};
use crate::device::{AnyDevice, DeviceChoice};
use crate::error::{Error, Result};
use crate::parallel::lock;

/// The label of the device that computes, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, Default)]
pub(in crate::exec) struct DeviceLabel(Arc<Mutex<Option<String>>>);

impl DeviceLabel {
    /// The text to show, once it is known.
    pub fn shown(&self) -> Option<String> {
        self.lock().clone()
    }

    /// Records the device that computes.
    pub fn set(&self, device: &AnyDevice) {
        self.lock().get_or_insert(device.info().name);
    }

    /// Records that the CPU computes because `device` does not support the operation.
    pub fn set_host(&self, device: &AnyDevice, why: &str) {
        *self.lock() = Some(format!("cpu ({}: {why})", device.info().name));
    }

    /// Records that the CPU computes because another device failed.
    pub fn fall_back(&self, device: &AnyDevice, error: &dyn fmt::Display) {
        let failed = device.info().name;
        log::warn!("{failed} failed, the CPU goes on: {error}");
        *self.lock() = Some(format!("cpu ({failed} failed: {error})"));
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        lock(&self.0)
    }
}

/// The device that a statement requests, and the estimated number of operations, if statistics
/// tell.
#[derive(Debug, Clone, Copy)]
pub(in crate::exec) struct DeviceRequest {
    pub choice: DeviceChoice,
    pub operations: Option<f64>,
}

impl DeviceRequest {
    /// The device expected, for EXPLAIN.
    pub fn shown(self) -> String {
        AnyDevice::expected_device(self.choice, self.operations)
    }

    /// Initialises the GPU in the background, if one is expected, and passes it to `warm`:
    /// initialisation takes as long as reading a large file. Errors are reported when the device is
    /// chosen. The runtime waits for this task at shutdown, since a process must not exit during
    /// initialisation.
    pub fn warm_up(
        self,
        warm: impl FnOnce(&AnyDevice) + Send + 'static,
    ) -> Option<SpawnedTask<()>> {
        let ordinal = AnyDevice::gpu_ordinal(self.choice, self.operations)?;
        Some(SpawnedTask::spawn_blocking(move || {
            if let Ok(device) = AnyDevice::cuda(ordinal, 0) {
                warm(&device);
            }
        }))
    }
}

/// Whether the CPU takes over if this device fails: only if the device was not requested by name.
pub(in crate::exec) fn may_fall_back(choice: DeviceChoice, device: &AnyDevice) -> bool {
    choice == DeviceChoice::Auto && device.info().memory.is_some()
}

/// Runs work on a device. If the device fails and fallback is allowed, the work runs on the CPU.
/// Also returns the device that ran it.
///
/// # Errors
/// The errors of the last device tried.
pub(in crate::exec) fn run_or_fall_back<T>(
    device: AnyDevice,
    may_fall_back: bool,
    label: &DeviceLabel,
    mut run: impl FnMut(&AnyDevice) -> Result<T>,
) -> Result<(AnyDevice, T)> {
    let done = loop {
        match run(&device) {
            // Idle memory on the device is released, then the work runs again.
            Err(Error::DeviceMemory { .. }) if evict_idle(MemoryOf::Device) => {}
            done => break done,
        }
    };
    match done {
        Err(error) if may_fall_back && error.is_of_device() => {
            label.fall_back(&device, &error);
            let cpu = AnyDevice::cpu();
            let done = run(&cpu)?;
            Ok((cpu, done))
        }
        done => {
            label.set(&device);
            Ok((device, done?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_gpu_that_is_asked_for_is_initialised_early() {
        let ordinal_of = AnyDevice::gpu_ordinal;
        assert_eq!(ordinal_of(DeviceChoice::Cpu, Some(1e30)), None);
        assert_eq!(ordinal_of(DeviceChoice::Cuda(3), None), Some(3));
        assert_eq!(ordinal_of(DeviceChoice::Auto, None), None);
        assert_eq!(ordinal_of(DeviceChoice::Auto, Some(1.0)), None);
        assert_eq!(ordinal_of(DeviceChoice::Auto, Some(1e30)), Some(0));
        let warm_up = |choice| DeviceRequest { choice, operations: None }.warm_up(|_| {});
        assert!(warm_up(DeviceChoice::Cpu).is_none() && warm_up(DeviceChoice::Auto).is_none());
    }

    fn exhausted() -> Error {
        Error::DeviceMemory { device: "cuda:0".to_string(), needed: 2, budget: 1 }
    }

    #[test]
    fn the_cpu_goes_on_where_a_device_fails_and_says_so() {
        let label = DeviceLabel::default();
        let mut calls = 0;
        let run = |_: &AnyDevice| {
            calls += 1;
            if calls == 1 { Err(exhausted()) } else { Ok(calls) }
        };
        let (_, done) = run_or_fall_back(AnyDevice::cpu(), true, &label, run).unwrap();
        assert_eq!(done, 2);
        let shown = label.shown().unwrap();
        assert!(shown.starts_with("cpu (") && shown.contains("out of device memory"), "{shown}");
    }

    #[test]
    fn nothing_is_tried_twice_without_need() {
        let label = DeviceLabel::default();
        let once = |error: fn() -> Error, may| {
            let mut calls = 0;
            let run = |_: &AnyDevice| -> Result<()> {
                calls += 1;
                Err(error())
            };
            assert!(run_or_fall_back(AnyDevice::cpu(), may, &label, run).is_err());
            assert_eq!(calls, 1);
        };
        once(exhausted, false);
        once(|| Error::Cancelled, true);
        let cpu = run_or_fall_back(AnyDevice::cpu(), true, &label, |_| Ok(()));
        assert!(cpu.is_ok() && label.shown().as_deref() == Some("cpu"));
    }
}
