//! Results from the device to the host.
//!
//! Like rows on their way there (see `upload`), they pass through pinned memory: several threads copy a
//! piece from it, and take the pages of new memory from the system, while the next piece arrives.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::slice;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DeviceRepr, PinnedHostSlice};

use super::copiers::Copiers;
use super::sys::{self, failed};
use crate::error::Result;
use crate::job::Job;

/// Bytes of a pinned buffer.
const PIECE_BYTES: usize = 4 << 20;

/// How long a reader waits without going to sleep.
const AWAKE: Duration = Duration::from_micros(100);

/// The path from the device.
pub(in crate::device::cuda) struct Downloader {
    copiers: Arc<Copiers>,
    pinned: Mutex<[Pinned; 2]>,
}

struct Pinned {
    buffer: PinnedHostSlice<u8>,
    /// Passes when the buffer has arrived.
    arrived: CudaEvent,
}

impl Downloader {
    /// Buffers of its own.
    pub(in crate::device::cuda) fn new(
        context: &Arc<CudaContext>,
        copiers: Arc<Copiers>,
    ) -> Result<Self> {
        let pinned = || -> Result<Pinned> {
            let buffer =
                sys::allocate_pinned(context, PIECE_BYTES).map_err(failed("cuMemHostAlloc"))?;
            let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
            let arrived = context.new_event(flags).map_err(failed("cuEventCreate"))?;
            Ok(Pinned { buffer, arrived })
        };
        Ok(Self { copiers, pinned: Mutex::new([pinned()?, pinned()?]) })
    }

    /// The first `count` values of a device buffer, after all earlier work in the stream.
    ///
    /// # Panics
    /// If the buffer is shorter.
    pub(in crate::device::cuda) fn read<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        from: &CudaSlice<u8>,
        count: usize,
        job: &Job,
    ) -> Result<Vec<T>> {
        let mut values = Room::new(count);
        self.fill(stream, [(from, values.bytes())], job)?;
        // SAFETY: `fill` has written all bytes.
        Ok(unsafe { values.values() })
    }

    /// The first values of two buffers, as [`read`](Self::read) has those of one.
    pub(in crate::device::cuda) fn read_both<T: DeviceRepr, U: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        (one, count): (&CudaSlice<u8>, usize),
        (other, others): (&CudaSlice<u8>, usize),
        job: &Job,
    ) -> Result<(Vec<T>, Vec<U>)> {
        let (mut values, mut other_values) = (Room::new(count), Room::new(others));
        let parts = [(one, values.bytes()), (other, other_values.bytes())];
        self.fill(stream, parts, job)?;
        // SAFETY: `fill` has written all bytes of both.
        Ok(unsafe { (values.values(), other_values.values()) })
    }

    /// Copies from the beginning of device buffers: two pieces are under way at a time.
    fn fill<const N: usize>(
        &self,
        stream: &Arc<CudaStream>,
        parts: [(&CudaSlice<u8>, &mut [MaybeUninit<u8>]); N],
        job: &Job,
    ) -> Result<()> {
        let pieces = parts.into_iter().flat_map(|(from, to)| {
            assert!(to.len() <= from.len());
            let pieces = to.chunks_mut(PIECE_BYTES).enumerate();
            pieces.map(move |(i, to)| (from.slice(i * PIECE_BYTES..i * PIECE_BYTES + to.len()), to))
        });
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        let [free, busy] = &mut *pinned;
        let (mut free, mut busy) = (free, busy);
        let mut arriving: Option<&mut [MaybeUninit<u8>]> = None;
        for piece in pieces.map(Some).chain([None]) {
            job.check()?;
            let next = match piece {
                Some((from, to)) => {
                    sys::copy_to_host(stream, &from, &mut free.buffer, &free.arrived)?;
                    Some(to)
                }
                None => None,
            };
            if let Some(to) = arriving.take() {
                busy.wait()?;
                let bytes = busy.buffer.as_slice().map_err(failed("cuEventSynchronize"))?;
                self.copiers.fill(&bytes[..to.len()], to);
            }
            arriving = next;
            std::mem::swap(&mut free, &mut busy);
        }
        Ok(())
    }
}

impl Pinned {
    /// Waits until the buffer has arrived: awake at first, as going to sleep and waking up takes as long as a
    /// small piece.
    fn wait(&self) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < AWAKE {
            if self.arrived.is_complete() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.arrived.synchronize().map_err(failed("cuEventSynchronize"))
    }
}

/// Room for so many values.
struct Room<T>(Vec<T>, usize);

impl<T: DeviceRepr> Room<T> {
    fn new(count: usize) -> Self {
        Self(Vec::with_capacity(count), count)
    }

    fn bytes(&mut self) -> &mut [MaybeUninit<u8>] {
        let room = &mut self.0.spare_capacity_mut()[..self.1];
        // SAFETY: the same memory, which is borrowed for as long, and u8 has no alignment.
        unsafe { slice::from_raw_parts_mut(room.as_mut_ptr().cast(), size_of_val(room)) }
    }

    /// # Safety
    /// All bytes have been written.
    unsafe fn values(mut self) -> Vec<T> {
        // SAFETY: `new` has made room for as many; all bytes are some number of these types.
        unsafe { self.0.set_len(self.1) };
        self.0
    }
}
