//! Rows from the host into panels on the device.
//!
//! The host's rows are pageable, and a copy from pageable memory runs at a fifth of the link's speed.
//! So several threads copy them, piece by piece, into two pinned buffers; while one is being filled,
//! the other is on its way. Every piece is transposed into panels as it arrives. All of it happens on
//! the copy stream, beside whatever the compute stream is doing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, PinnedHostSlice};
use rayon::prelude::*;

use super::memory::{Buffer, Memory};
use super::sys::{self, failed};
use crate::device::cuda::search::launch::{Kernels, Piece, scalar_bytes};
use crate::device::cuda::search::passes::{PANEL, panels};
use crate::error::{Error, Result};
use crate::matrix::{ElementKind, Rows};

/// Bytes of a pinned buffer. Smaller ones lose speed to their own overhead (gpu-facts: 2 × 16 MiB
/// reach 48 of 55 GB/s).
const PIECE_BYTES: usize = 16 << 20;

/// Threads that copy into a pinned buffer, and the least that is worth a thread.
const COPIERS: usize = 8;
const WORTH_A_THREAD: usize = 256 << 10;

/// The way to the device: a stream, pinned buffers, and the place where rows land row by row.
#[derive(Debug)]
pub(in crate::device::cuda) struct Uploader {
    stream: Arc<CudaStream>,
    staging: Mutex<Staging>,
}

struct Staging {
    pinned: [Pinned; 2],
    next: usize,
    landed: CudaSlice<u8>,
}

impl std::fmt::Debug for Staging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Staging").field("bytes", &self.landed.len()).finish_non_exhaustive()
    }
}

struct Pinned {
    buffer: PinnedHostSlice<u8>,
    /// Passed when the buffer has been sent.
    sent: CudaEvent,
}

/// Rows in panels on the device.
pub(in crate::device::cuda) struct Panels {
    pub(in crate::device::cuda) kernels: Arc<Kernels>,
    pub(in crate::device::cuda) buffer: Buffer,
    pub(in crate::device::cuda) rows: usize,
    pub(in crate::device::cuda) stored_dim: usize,
    /// Passed when all rows are there.
    pub(in crate::device::cuda) ready: CudaEvent,
    /// What it took, until somebody accounts for it.
    transfer: Mutex<Option<Transfer>>,
}

/// Bytes sent and when.
pub(in crate::device::cuda) struct Transfer {
    pub(in crate::device::cuda) bytes: u64,
    begin: CudaEvent,
    end: CudaEvent,
}

impl Transfer {
    /// How long it took. Waits for its end.
    pub(in crate::device::cuda) fn time(&self) -> Result<Duration> {
        elapsed(&self.begin, &self.end)
    }
}

impl Panels {
    /// What the upload took; the first caller gets it.
    pub(in crate::device::cuda) fn take_transfer(&self) -> Option<Transfer> {
        self.transfer.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The time between two events. Waits for the second.
pub(in crate::device::cuda) fn elapsed(begin: &CudaEvent, end: &CudaEvent) -> Result<Duration> {
    let milliseconds = begin.elapsed_ms(end).map_err(failed("cuEventElapsedTime"))?;
    Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
}

/// Which side of a search rows are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::device::cuda) enum Side {
    /// Dealt out to panels in runs; see `kernels/lists.cuh`.
    Base,
    /// Filling panels in order, negated where the sum asks for it.
    Queries { negate: bool },
}

impl Uploader {
    /// A stream and buffers of its own.
    pub(in crate::device::cuda) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        let stream = context.new_stream().map_err(failed("cuStreamCreate"))?;
        let pinned = || -> Result<Pinned> {
            let buffer =
                sys::allocate_pinned(context, PIECE_BYTES).map_err(failed("cuMemHostAlloc"))?;
            let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
            let sent = stream.record_event(flags).map_err(failed("cuEventRecord"))?;
            Ok(Pinned { buffer, sent })
        };
        let pinned = [pinned()?, pinned()?];
        let landed = sys::allocate(&stream, PIECE_BYTES).map_err(failed("cuMemAllocAsync"))?;
        Ok(Self { stream, staging: Mutex::new(Staging { pinned, next: 0, landed }) })
    }

    /// Put rows into panels. Returns when the last piece has been read from the host's memory; the
    /// device may still be at work.
    pub(in crate::device::cuda) fn upload(
        &self,
        memory: &Arc<Memory>,
        kernels: &Arc<Kernels>,
        rows: &Rows,
        side: Side,
    ) -> Result<Panels> {
        let dim = device_dim(rows.matrix().kind(), rows.matrix().dim());
        let stored_dim = kernels.spec().stored_dim(dim as u32) as usize;
        let scalar = scalar_bytes(rows.matrix().kind());
        let begin = self.timestamp()?;
        let size = panels(rows.len()) * PANEL * stored_dim * scalar;
        let mut buffer = memory.allocate(&self.stream, size)?;
        // Padding rows and dimensions are zero.
        self.stream.memset_zeros(buffer.slice_mut()).map_err(failed("cuMemsetD8Async"))?;
        self.send(kernels, rows, &mut buffer, side, (dim, stored_dim))?;
        let (end, ready) = (self.timestamp()?, self.timestamp()?);
        let transfer = Mutex::new(Some(Transfer { bytes: rows.bytes() as u64, begin, end }));
        let kernels = kernels.clone();
        Ok(Panels { kernels, buffer, rows: rows.len(), stored_dim, ready, transfer })
    }

    /// An event of the copy stream that knows when it passed.
    fn timestamp(&self) -> Result<CudaEvent> {
        let timed = Some(CUevent_flags::CU_EVENT_DEFAULT);
        self.stream.record_event(timed).map_err(failed("cuEventRecord"))
    }

    /// Put rows on the device as they are, one after the other. Returns as
    /// [`upload`](Self::upload) does, with an event that passes when all are there.
    pub(in crate::device::cuda) fn upload_plain(
        &self,
        memory: &Arc<Memory>,
        rows: &Rows,
    ) -> Result<(Buffer, CudaEvent, Transfer)> {
        let begin = self.timestamp()?;
        let bytes = bytes_of(rows)?;
        let mut buffer = memory.allocate(&self.stream, bytes.len())?;
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        for (i, piece) in bytes.chunks(PIECE_BYTES).enumerate() {
            staging.send(&self.stream, piece)?;
            let start = i * PIECE_BYTES;
            let mut place = buffer.slice_mut().slice_mut(start..start + piece.len());
            (self.stream.memcpy_dtod(&staging.landed.slice(..piece.len()), &mut place))
                .map_err(failed("cuMemcpyDtoDAsync"))?;
        }
        drop(staging);
        let (end, ready) = (self.timestamp()?, self.timestamp()?);
        Ok((buffer, ready, Transfer { bytes: bytes.len() as u64, begin, end }))
    }

    fn send(
        &self,
        kernels: &Kernels,
        rows: &Rows,
        target: &mut Buffer,
        side: Side,
        (dim, stored_dim): (usize, usize),
    ) -> Result<()> {
        let bytes = bytes_of(rows)?;
        let scalar = scalar_bytes(rows.matrix().kind());
        let (deal_to, negate) = match side {
            Side::Base => (panels(rows.len()), false),
            Side::Queries { negate } => (0, negate),
        };
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        for (row, count, first_dim, dims) in pieces(rows.len(), dim, PIECE_BYTES / scalar) {
            let start = (row * dim + first_dim) * scalar;
            staging.send(&self.stream, &bytes[start..start + count * dims * scalar])?;
            let piece = Piece {
                rows: count as u32,
                dims: dims as u32,
                first_row: row as u32,
                first_dim: first_dim as u32,
                stored_dim: stored_dim as u32,
                deal_to: deal_to as u32,
                negate,
            };
            kernels.pack(&self.stream, &staging.landed, target, &piece)?;
        }
        Ok(())
    }
}

impl Staging {
    /// Bring bytes to the landing place, once the stream has done with what was there.
    fn send(&mut self, stream: &Arc<CudaStream>, bytes: &[u8]) -> Result<()> {
        let pinned = &mut self.pinned[self.next];
        self.next = 1 - self.next;
        pinned.sent.synchronize().map_err(failed("cuEventSynchronize"))?;
        let target = pinned.buffer.as_mut_slice().map_err(failed("cuEventSynchronize"))?;
        copy_with_threads(bytes, &mut target[..bytes.len()]);
        sys::copy_to_device(stream, &mut pinned.buffer, &pinned.sent, &mut self.landed, bytes.len())
    }
}

fn copy_with_threads(from: &[u8], to: &mut [u8]) {
    let part = from.len().div_ceil(COPIERS).max(WORTH_A_THREAD);
    to.par_chunks_mut(part)
        .zip(from.par_chunks(part))
        .for_each(|(to, from)| to.copy_from_slice(from));
}

/// Elements of a row as the device counts them: bits in words of 32.
pub(in crate::device::cuda) fn device_dim(kind: ElementKind, dim: usize) -> usize {
    kind.width(dim) * kind.bytes() / scalar_bytes(kind)
}

fn bytes_of(rows: &Rows) -> Result<&[u8]> {
    let bytes = match rows.matrix().kind() {
        ElementKind::F32 => rows.reals::<f32>().map(sys::bytes_of),
        ElementKind::F64 => rows.reals::<f64>().map(sys::bytes_of),
        ElementKind::Bits => rows.words().map(sys::bytes_of),
    };
    bytes.ok_or_else(|| Error::InvalidArgument("rows of an unknown element type".to_string()))
}

/// Cut rows into pieces of at most `room` elements that are contiguous: whole rows, or parts of one
/// row that alone is too long. Yields (first row, rows, first element, elements per row).
fn pieces(
    rows: usize,
    dim: usize,
    room: usize,
) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    let rows_at_once = (room / dim).max(1);
    let dims_at_once = dim.min(room);
    (0..rows).step_by(rows_at_once).flat_map(move |row| {
        let count = rows_at_once.min(rows - row);
        (0..dim)
            .step_by(dims_at_once)
            .map(move |first| (row, count, first, dims_at_once.min(dim - first)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_element_once() {
        for (rows, dim, room) in [(0, 3, 10), (1, 1, 1), (7, 3, 10), (5, 10, 10), (3, 25, 10)] {
            let mut next = 0;
            for (row, count, first, dims) in pieces(rows, dim, room) {
                assert_eq!(row * dim + first, next);
                assert!(count * dims <= room && (count == 1 || dims == dim));
                next += count * dims;
            }
            assert_eq!(next, rows * dim, "{rows} rows of {dim}");
        }
    }

    #[test]
    fn bits_are_words_of_32_on_the_device() {
        assert_eq!(device_dim(ElementKind::Bits, 1), 2);
        assert_eq!(device_dim(ElementKind::Bits, 512), 16);
        assert_eq!(device_dim(ElementKind::F64, 7), 7);
    }
}
