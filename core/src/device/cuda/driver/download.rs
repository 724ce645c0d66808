//! Results from the device to the host.
//!
//! Like rows on their way to the device (see `upload`), they pass through pinned memory: several
//! threads copy a piece from it, and fault in the pages of new memory, while the next piece
//! arrives.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DeviceRepr, PinnedHostSlice};

use super::copiers::{Copiers, Fill, ReservedTail};
use super::sys::{self, failed};
use crate::error::Result;
use crate::job::Job;
use crate::parallel::lock;

/// Bytes of a pinned buffer.
const PIECE_BYTES: usize = 4 << 20;

/// The time for which a reader busy-waits before it sleeps.
const AWAKE: Duration = Duration::from_micros(100);

/// The path from the device.
pub(in crate::device::cuda) struct Downloader {
    copiers: Arc<Copiers>,
    pinned: Mutex<[PinnedDownload; 2]>,
}

/// A device buffer, and the tail of a vector for its first values.
pub(in crate::device::cuda) struct Append<'a, T> {
    pub(in crate::device::cuda) from: &'a CudaSlice<u8>,
    pub(in crate::device::cuda) to: ReservedTail<'a, T>,
}

/// A device buffer, and the destination of its first bytes.
pub(in crate::device::cuda) struct DownloadPart<'a> {
    pub(in crate::device::cuda) from: &'a CudaSlice<u8>,
    pub(in crate::device::cuda) to: &'a mut dyn Fill,
}

struct PinnedDownload {
    buffer: PinnedHostSlice<u8>,
    /// Completes when the buffer has arrived.
    arrived: CudaEvent,
}

impl Downloader {
    /// A downloader with its own pinned buffers.
    pub(in crate::device::cuda) fn new(
        context: &Arc<CudaContext>,
        copiers: Arc<Copiers>,
    ) -> Result<Self> {
        let pinned = || -> Result<PinnedDownload> {
            let buffer =
                sys::allocate_pinned(context, PIECE_BYTES).map_err(failed("cuMemHostAlloc"))?;
            let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
            let arrived = context.new_event(flags).map_err(failed("cuEventCreate"))?;
            Ok(PinnedDownload { buffer, arrived })
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
        let mut values = Vec::new();
        let mut room = ReservedTail::new(&mut values, count);
        self.fill(stream, &mut [DownloadPart { from, to: &mut room }], job)?;
        room.close();
        Ok(values)
    }

    /// Fills the tails of two vectors, one after the other.
    pub(in crate::device::cuda) fn append_both<T: DeviceRepr, U: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        mut one: Append<'_, T>,
        mut other: Append<'_, U>,
        job: &Job,
    ) -> Result<()> {
        let parts = &mut [
            DownloadPart { from: one.from, to: &mut one.to },
            DownloadPart { from: other.from, to: &mut other.to },
        ];
        self.fill(stream, parts, job)?;
        one.to.close();
        other.to.close();
        Ok(())
    }

    /// Copies from the beginning of device buffers, with two pieces in flight.
    pub(in crate::device::cuda) fn fill(
        &self,
        stream: &Arc<CudaStream>,
        parts: &mut [DownloadPart<'_>],
        job: &Job,
    ) -> Result<()> {
        let pieces = parts.iter().enumerate().flat_map(|(part, download)| {
            let bytes = download.to.bytes();
            let starts = (0..bytes).step_by(PIECE_BYTES);
            starts.map(move |start| (part, start..bytes.min(start + PIECE_BYTES)))
        });
        let pieces: Vec<_> = pieces.collect();
        let mut pinned = lock(&self.pinned);
        for piece in 0..=pieces.len() {
            job.check()?;
            if let Some((part, place)) = pieces.get(piece) {
                let PinnedDownload { buffer, arrived } = &mut pinned[piece % 2];
                let from = parts[*part].from.slice(place.clone());
                sys::copy_to_host(stream, &from, buffer, arrived)?;
            }
            if piece > 0 {
                let (part, place) = &pieces[piece - 1];
                let arriving = &mut pinned[(piece - 1) % 2];
                arriving.wait()?;
                let bytes = arriving.buffer.as_slice().map_err(failed("cuEventSynchronize"))?;
                parts[*part].to.append(&bytes[..place.len()], &self.copiers);
            }
        }
        Ok(())
    }
}

impl PinnedDownload {
    /// Waits until the buffer has arrived: busy-waiting first, as going to sleep and waking up
    /// takes as long as a small piece.
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
