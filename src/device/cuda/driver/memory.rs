//! Device memory under a budget.
//!
//! Work is asynchronous: when the host drops a buffer, kernels that read it may still be waiting
//! their turn. A dropped buffer therefore retires together with an event of the compute stream; it
//! is freed, and its bytes are given back to the budget, when that event has passed. A host that
//! runs ahead of the device is thus slowed down exactly when the budget is used up.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUevent_flags, CUresult};
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DriverError};

use super::sys::{self, failed};
use crate::error::{Error, Result};

/// The smallest allocation; the driver rounds up anyway.
const GRANULE: usize = 256;

/// A budget, and the buffers that count against it.
pub(in crate::device::cuda) struct Memory {
    device: String,
    limit: u64,
    compute: Arc<CudaStream>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    used: u64,
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
    /// A budget of `limit` bytes. `compute` is the stream on which buffers are last used.
    pub(in crate::device::cuda) fn new(
        device: String,
        limit: u64,
        compute: Arc<CudaStream>,
    ) -> Arc<Self> {
        Arc::new(Self { device, limit, compute, state: Mutex::default() })
    }

    /// Bytes allowed in all.
    pub(in crate::device::cuda) fn limit(&self) -> u64 {
        self.limit
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
                if is_out_of_memory(&error) {
                    Err(self.exhausted(bytes as u64))
                } else {
                    Err(failed("cuMemAllocAsync")(error))
                }
            }
        }
    }

    /// Count bytes as used, waiting for retired buffers if that is what it takes.
    fn reserve(&self, bytes: u64) -> Result<()> {
        let mut state = self.state();
        while state.retired.front().is_some_and(|oldest| oldest.last_use.is_complete()) {
            state.free_oldest();
        }
        while state.used + bytes > self.limit {
            let Some(oldest) = state.retired.front() else { return Err(self.exhausted(bytes)) };
            oldest.last_use.synchronize().map_err(failed("cuEventSynchronize"))?;
            state.free_oldest();
        }
        state.used += bytes;
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
            }
        }
    }

    fn free_all_retired(&self) -> Result<(), DriverError> {
        let mut state = self.state();
        while let Some(oldest) = state.retired.front() {
            oldest.last_use.synchronize()?;
            state.free_oldest();
        }
        drop(state);
        // Freed memory is back in the pool only when the streams have passed the frees.
        self.compute.context().synchronize()
    }

    fn exhausted(&self, needed: u64) -> Error {
        Error::DeviceMemory { device: self.device.clone(), needed, budget: self.limit }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The numbers are right at every point where a panic could happen.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Nobody waits here: the frees are put behind the last uses in their streams.
        let mut state = self.state();
        while let Some(oldest) = state.retired.front() {
            if oldest.slice.stream().wait(&oldest.last_use).is_err() {
                let _ = oldest.last_use.synchronize();
            }
            state.free_oldest();
        }
    }
}

impl State {
    fn free_oldest(&mut self) {
        if let Some(oldest) = self.retired.pop_front() {
            self.used -= oldest.slice.len() as u64;
        }
    }
}

fn is_out_of_memory(error: &DriverError) -> bool {
    error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY
}
