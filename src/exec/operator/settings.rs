//! The settings of an execution: where it computes, and in which portions. A specification has none
//! of them, since the answer does not depend on them: a plan may run elsewhere with others.

use crate::device::DeviceChoice;

/// The defaults.
const DEVICE_MEMORY: u64 = 0;
const BATCH_ROWS: usize = 131_072;

/// The settings of an execution, which do not change its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExecutionSettings {
    /// The requested device.
    pub device: DeviceChoice,
    /// Bytes of the device's memory to use; 0: nearly all that is free.
    pub device_memory: u64,
    /// The maximum number of queries that are searched together.
    pub batch_rows: usize,
}

impl Default for ExecutionSettings {
    fn default() -> Self {
        let (device_memory, batch_rows) = (DEVICE_MEMORY, BATCH_ROWS);
        Self { device: DeviceChoice::Auto, device_memory, batch_rows }
    }
}
