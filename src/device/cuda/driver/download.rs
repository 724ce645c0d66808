//! Results from the device to the host.
//!
//! Like rows on their way there (see `upload`), they pass through pinned memory: several threads copy a
//! piece from it, and take the pages of new memory from the system, while the next piece arrives.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DeviceRepr, PinnedHostSlice};

use super::copiers::Copiers;
use super::sys::{self, failed};
use crate::error::Result;
use crate::job::Job;

/// Bytes of a pinned buffer.
const PIECE_BYTES: usize = 4 << 20;

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
    pub(in crate::device::cuda) fn read<T: DeviceRepr + Clone + Default>(
        &self,
        stream: &Arc<CudaStream>,
        from: &CudaSlice<u8>,
        count: usize,
        job: &Job,
    ) -> Result<Vec<T>> {
        let mut values = vec![T::default(); count];
        let to = sys::bytes_of_mut(&mut values);
        let place = |piece: usize| piece * PIECE_BYTES..to.len().min((piece + 1) * PIECE_BYTES);
        let places: Vec<Range<usize>> = (0..to.len().div_ceil(PIECE_BYTES)).map(place).collect();
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        for piece in 0..=places.len() {
            job.check()?;
            if let Some(place) = places.get(piece) {
                let Pinned { buffer, arrived } = &mut pinned[piece % 2];
                sys::copy_to_host(stream, &from.slice(place.clone()), buffer, arrived)?;
            }
            if piece > 0 {
                let place = places[piece - 1].clone();
                let Pinned { buffer, arrived } = &mut pinned[(piece - 1) % 2];
                arrived.synchronize().map_err(failed("cuEventSynchronize"))?;
                let bytes = buffer.as_slice().map_err(failed("cuEventSynchronize"))?;
                self.copiers.copy(&bytes[..place.len()], &mut to[place]);
            }
        }
        Ok(values)
    }
}
