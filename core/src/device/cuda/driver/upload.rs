//! Rows from the host to the device.
//!
//! The host's rows are pageable, and a copy from pageable memory runs at a fifth of the link's
//! speed. So several threads copy rows, piece by piece, into two pinned buffers; while one is being
//! filled, the other is being sent. All transfers run on the copy stream, concurrently with the
//! compute stream.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, PinnedHostSlice};

use super::copiers::Copiers;
use super::memory::{Buffer, Memory};
use super::sys::{self, failed};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::ElementKind;
use crate::parallel::lock;
use crate::rows::Rows;

/// Bytes of a pinned buffer. Smaller ones lose speed to their own overhead (gpu-facts: 2 × 16 MiB
/// reach 48 of 55 GB/s).
pub(in crate::device::cuda) const PIECE_BYTES: usize = 16 << 20;

/// The path to the device: a stream, pinned buffers, and a staging buffer for row-major rows.
#[derive(Debug)]
pub(in crate::device::cuda) struct Uploader {
    stream: Arc<CudaStream>,
    copiers: Arc<Copiers>,
    staging: Mutex<Staging>,
}

struct Staging {
    pinned: [PinnedUpload; 2],
    next: usize,
    landed: CudaSlice<u8>,
}

impl std::fmt::Debug for Staging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Staging").field("bytes", &self.landed.len()).finish_non_exhaustive()
    }
}

struct PinnedUpload {
    buffer: PinnedHostSlice<u8>,
    /// Completes when the buffer has been sent.
    sent: CudaEvent,
}

/// The number of bytes sent, and the begin and end of the transfer.
pub(in crate::device::cuda) struct Transfer {
    pub(in crate::device::cuda) bytes: u64,
    pub(in crate::device::cuda) begin: CudaEvent,
    pub(in crate::device::cuda) end: CudaEvent,
}

impl Transfer {
    /// The duration of the transfer. Waits for its end.
    pub(in crate::device::cuda) fn time(&self) -> Result<Duration> {
        elapsed(&self.begin, &self.end)
    }
}

/// The time between two events. Waits for the second.
pub(in crate::device::cuda) fn elapsed(begin: &CudaEvent, end: &CudaEvent) -> Result<Duration> {
    let milliseconds = begin.elapsed_ms(end).map_err(failed("cuEventElapsedTime"))?;
    Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
}

impl Uploader {
    /// An uploader with its own stream and buffers.
    pub(in crate::device::cuda) fn new(
        context: &Arc<CudaContext>,
        copiers: Arc<Copiers>,
    ) -> Result<Self> {
        let stream = context.new_stream().map_err(failed("cuStreamCreate"))?;
        let pinned = || -> Result<PinnedUpload> {
            let buffer =
                sys::allocate_pinned(context, PIECE_BYTES).map_err(failed("cuMemHostAlloc"))?;
            let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
            let sent = stream.record_event(flags).map_err(failed("cuEventRecord"))?;
            Ok(PinnedUpload { buffer, sent })
        };
        let pinned = [pinned()?, pinned()?];
        let landed = sys::allocate(&stream, PIECE_BYTES).map_err(failed("cuMemAllocAsync"))?;
        Ok(Self { stream, copiers, staging: Mutex::new(Staging { pinned, next: 0, landed }) })
    }

    /// Records an event with a timestamp on the copy stream.
    pub(in crate::device::cuda) fn timestamp(&self) -> Result<CudaEvent> {
        let timed = Some(CUevent_flags::CU_EVENT_DEFAULT);
        self.stream.record_event(timed).map_err(failed("cuEventRecord"))
    }

    /// Uploads rows in row-major order. Returns as [`send`](Self::send) does, with an event that
    /// completes when all rows have arrived.
    pub(in crate::device::cuda) fn upload_plain(
        &self,
        memory: &Arc<Memory>,
        rows: &Rows,
        job: &Job,
    ) -> Result<(Buffer, CudaEvent, Transfer)> {
        let begin = self.timestamp()?;
        let bytes = bytes_of(rows)?;
        let (buffer, end) = self.upload_parts(memory, &[bytes], job)?;
        let ready = self.timestamp()?;
        Ok((buffer, ready, Transfer { bytes: bytes.len() as u64, begin, end }))
    }

    /// Uploads bytes, one part after the other. Returns as [`send`](Self::send) does, with an event
    /// that completes when all parts have arrived.
    pub(in crate::device::cuda) fn upload_parts(
        &self,
        memory: &Arc<Memory>,
        parts: &[&[u8]],
        job: &Job,
    ) -> Result<(Buffer, CudaEvent)> {
        let mut buffer =
            memory.allocate(&self.stream, parts.iter().map(|part| part.len()).sum())?;
        let (to, mut end) = (buffer.slice_mut(), 0);
        let pieces = parts.iter().flat_map(|part| part.chunks(PIECE_BYTES)).map(|piece| {
            end += piece.len();
            (piece, end - piece.len()..end)
        });
        self.send(pieces, job, |stream, landed, place: Range<usize>| {
            let length = place.len();
            (stream.memcpy_dtod(&landed.slice(..length), &mut to.slice_mut(place)))
                .map_err(failed("cuMemcpyDtoDAsync"))
        })?;
        Ok((buffer, self.timestamp()?))
    }

    /// Sends pieces of the host's memory, one after the other, to the staging buffer on the device,
    /// where `arrived` processes each. Returns when the last piece has been read from the host's
    /// memory; the device may still be working.
    pub(in crate::device::cuda) fn send<'a, P>(
        &self,
        pieces: impl Iterator<Item = (&'a [u8], P)>,
        job: &Job,
        mut arrived: impl FnMut(&Arc<CudaStream>, &CudaSlice<u8>, P) -> Result<()>,
    ) -> Result<()> {
        for (bytes, piece) in pieces {
            job.check()?;
            // Other threads may send pieces in between.
            let mut staging = lock(&self.staging);
            staging.send(&self.stream, bytes, &self.copiers)?;
            arrived(&self.stream, &staging.landed, piece)?;
        }
        Ok(())
    }

    /// The copy stream.
    pub(in crate::device::cuda) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl Staging {
    /// Sends bytes to the staging buffer, once the stream no longer uses its previous contents.
    fn send(&mut self, stream: &Arc<CudaStream>, bytes: &[u8], copiers: &Copiers) -> Result<()> {
        let pinned = &mut self.pinned[self.next];
        self.next = 1 - self.next;
        pinned.sent.synchronize().map_err(failed("cuEventSynchronize"))?;
        let target = pinned.buffer.as_mut_slice().map_err(failed("cuEventSynchronize"))?;
        copiers.copy(bytes, &mut target[..bytes.len()]);
        sys::copy_to_device(stream, &mut pinned.buffer, &pinned.sent, &mut self.landed, bytes.len())
    }
}

/// The bytes of rows in row-major order.
pub(in crate::device::cuda) fn bytes_of(rows: &Rows) -> Result<&[u8]> {
    let bytes = match rows.matrix().kind() {
        ElementKind::F32 => rows.reals::<f32>().map(sys::bytes_of),
        ElementKind::F64 => rows.reals::<f64>().map(sys::bytes_of),
        ElementKind::Bits => rows.words().map(sys::bytes_of),
        ElementKind::Sets => None,
    };
    bytes.ok_or_else(|| Error::InvalidArgument("rows of an unknown element type".to_string()))
}
