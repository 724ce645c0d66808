//! Device memory under a budget.
//!
//! Work is asynchronous: when the host drops a buffer, kernels that read it may still be queued. A
//! dropped buffer is therefore retired together with an event of the compute stream; it is freed, and
//! its bytes are returned to the budget, when that event has passed. A host that runs ahead of the
//! device is thus slowed down exactly when the budget is used up.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::sys::{CUevent_flags, CUresult};
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DriverError};

use super::sys::{self, failed};
use crate::error::{Error, Result};
use crate::parallel::lock;

/// The smallest allocation; the driver rounds up anyway.
const GRANULE: usize = 256;

/// The memory of a GPU that all handles use together, and its limit.
#[derive(Debug)]
pub(in crate::device::cuda) struct Shared {
    limit: AtomicU64,
    used: AtomicU64,
}

impl Shared {
    pub(in crate::device::cuda) fn new() -> Self {
        Self { limit: AtomicU64::new(0), used: AtomicU64::new(0) }
    }

    /// Sets the limit to this many bytes more than are used now.
    pub(in crate::device::cuda) fn allow(&self, more: u64) {
        let used = self.used.load(Ordering::Relaxed);
        self.limit.store(used.saturating_add(more), Ordering::Relaxed);
    }

    fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Counts bytes as used, if they are within the limit.
    fn take(&self, bytes: u64) -> bool {
        let fits = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.limit());
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn left(&self) -> u64 {
        self.limit().saturating_sub(self.used.load(Ordering::Relaxed))
    }
}

/// A budget, and the buffers that count against it.
pub(in crate::device::cuda) struct Memory {
    device: String,
    limit: u64,
    shared: Arc<Shared>,
    compute: Arc<CudaStream>,
    state: Mutex<MemoryUse>,
}

#[derive(Default)]
struct MemoryUse {
    used: u64,
    /// The maximum of `used`.
    peak: u64,
    retired: VecDeque<Retired>,
}

struct Retired {
    last_use: CudaEvent,
    slice: CudaSlice<u8>,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("device", &self.device).field("limit", &self.limit).finish()
    }
}

/// A piece of device memory, freed once the compute stream has passed its last use.
pub(in crate::device::cuda) struct Buffer {
    slice: Option<CudaSlice<u8>>,
    memory: Arc<Memory>,
}

impl Buffer {
    /// The memory, to read.
    pub(in crate::device::cuda) fn slice(&self) -> &CudaSlice<u8> {
        self.slice.as_ref().expect("taken only by drop")
    }

    /// The memory, to write.
    pub(in crate::device::cuda) fn slice_mut(&mut self) -> &mut CudaSlice<u8> {
        self.slice.as_mut().expect("taken only by drop")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(slice) = self.slice.take() {
            self.memory.retire(slice);
        }
    }
}

impl Memory {
    /// A budget of `limit` bytes, or of everything that other handles leave if `limit` is 0.
    /// `compute` is the stream on which buffers are last used.
    pub(in crate::device::cuda) fn new(
        device: String,
        limit: u64,
        shared: Arc<Shared>,
        compute: Arc<CudaStream>,
    ) -> Arc<Self> {
        let limit = if limit == 0 { shared.limit() } else { limit.min(shared.limit()) };
        Arc::new(Self { device, limit, shared, compute, state: Mutex::default() })
    }

    /// Bytes that this handle may use in all, while other handles' use stays the same.
    pub(in crate::device::cuda) fn available(&self) -> u64 {
        self.limit.min(self.shared.left() + self.state().used)
    }

    /// Bytes of these that are not used yet.
    pub(in crate::device::cuda) fn unused(&self) -> u64 {
        let used = self.state().used;
        self.available().saturating_sub(used)
    }

    /// The number of bytes in use.
    pub(in crate::device::cuda) fn used(&self) -> u64 {
        self.state().used
    }

    /// The maximum number of bytes in use.
    pub(in crate::device::cuda) fn peak(&self) -> u64 {
        self.state().peak
    }

    /// A buffer of at least `bytes` bytes, to be used first on `stream`.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if the budget, or the device, does not hold it.
    pub(in crate::device::cuda) fn allocate(
        self: &Arc<Self>,
        stream: &Arc<CudaStream>,
        bytes: usize,
    ) -> Result<Buffer> {
        let bytes = bytes.max(1).next_multiple_of(GRANULE);
        self.reserve(bytes as u64)?;
        let slice = sys::allocate(stream, bytes).or_else(|error| {
            if !is_out_of_memory(&error) {
                return Err(error);
            }
            self.free_all_retired()?;
            sys::allocate(stream, bytes)
        });
        match slice {
            Ok(slice) => Ok(Buffer { slice: Some(slice), memory: self.clone() }),
            Err(error) => {
                self.state().used -= bytes as u64;
                self.shared.give_back(bytes as u64);
                if is_out_of_memory(&error) {
                    Err(self.exhausted(bytes as u64))
                } else {
                    Err(failed("cuMemAllocAsync")(error))
                }
            }
        }
    }

    /// Counts bytes as used, waiting for retired buffers if necessary.
    fn reserve(&self, bytes: u64) -> Result<()> {
        let mut state = self.state();
        while state.retired.front().is_some_and(|oldest| oldest.last_use.is_complete()) {
            self.free_oldest(&mut state);
        }
        while state.used + bytes > self.limit || !self.shared.take(bytes) {
            let Some(oldest) = state.retired.front() else { return Err(self.exhausted(bytes)) };
            oldest.last_use.synchronize().map_err(failed("cuEventSynchronize"))?;
            self.free_oldest(&mut state);
        }
        state.used += bytes;
        state.peak = state.peak.max(state.used);
        Ok(())
    }

    fn retire(&self, slice: CudaSlice<u8>) {
        let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        match self.compute.record_event(flags) {
            Ok(last_use) => self.state().retired.push_back(Retired { last_use, slice }),
            Err(_) => {
                // The context is broken or out of events: wait instead. The next call that can
                // report an error does.
                let _ = self.compute.synchronize();
                self.state().used -= slice.len() as u64;
                self.shared.give_back(slice.len() as u64);
            }
        }
    }

    fn free_all_retired(&self) -> Result<(), DriverError> {
        let mut state = self.state();
        while let Some(oldest) = state.retired.front() {
            oldest.last_use.synchronize()?;
            self.free_oldest(&mut state);
        }
        drop(state);
        // Freed memory is back in the pool only when the streams have passed the frees.
        self.compute.context().synchronize()
    }

    fn exhausted(&self, needed: u64) -> Error {
        Error::DeviceMemory { device: self.device.clone(), needed, budget: self.limit }
    }

    fn free_oldest(&self, state: &mut MemoryUse) {
        if let Some(oldest) = state.retired.pop_front() {
            state.used -= oldest.slice.len() as u64;
            self.shared.give_back(oldest.slice.len() as u64);
        }
    }

    fn state(&self) -> MutexGuard<'_, MemoryUse> {
        // The counts are consistent at every point where a panic could happen.
        lock(&self.state)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // No waiting here: the frees are queued behind the last uses in their streams.
        let mut state = self.state();
        while let Some(oldest) = state.retired.front() {
            if oldest.slice.stream().wait(&oldest.last_use).is_err() {
                let _ = oldest.last_use.synchronize();
            }
            self.free_oldest(&mut state);
        }
    }
}

fn is_out_of_memory(error: &DriverError) -> bool {
    error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_share_what_there_is() {
        let shared = Shared::new();
        shared.allow(100);
        assert!(shared.take(60) && !shared.take(50));
        assert_eq!(shared.left(), 40);
        shared.give_back(60);
        assert!(shared.take(100) && !shared.take(1));
        // Another process has given something back.
        shared.allow(50);
        assert_eq!(shared.left(), 50);
        assert!(shared.take(50) && !shared.take(1));
    }
}
