//! Values that the definition of a distance reads besides panels: directions, and vectors as given.

use std::sync::Mutex;

use cudarc::driver::CudaEvent;

use super::launch_exact::DIRECTION_BYTES;
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys;
use crate::device::cuda::driver::upload::{Transfer, bytes_of};
use crate::error::Result;
use crate::job::Job;
use crate::metric::Direction;
use crate::parallel::lock;
use crate::rows::Rows;

/// The directions of f32 rows and, if the search uses other vectors, then the vectors as given.
pub(super) struct ExactValues {
    pub(super) buffer: Buffer,
    pub(super) rows: usize,
    pub(super) has_vectors: bool,
    /// Completes when all values have arrived.
    pub(super) ready: CudaEvent,
    transfer: Mutex<Option<Transfer>>,
}

impl ExactValues {
    pub(super) fn of(
        device: &CudaDevice,
        rows: &Rows,
        directions: &[Direction],
        job: &Job,
    ) -> Result<Self> {
        let CudaDevice { gpu, memory, .. } = device;
        // The unit differs from 1 only for magnitudes beyond f32.
        assert!(directions.iter().all(|of| of.unit == 1.0));
        let bytes = directions.len() * DIRECTION_BYTES;
        let _reserved = job.reserve("row norms", bytes)?;
        let sent: Vec<f64> = directions.iter().flat_map(|of| [of.mean, of.inverse]).collect();
        let (given, has_vectors) = (rows.as_given(), !rows.are_as_given());
        let vectors: &[u8] = if has_vectors { bytes_of(&given)? } else { &[] };
        let begin = gpu.uploader.timestamp()?;
        let parts = [sys::bytes_of(&sent[..]), vectors];
        let (buffer, ready) = gpu.uploader.upload_parts(memory, &parts, job)?;
        let (bytes, end) = ((bytes + vectors.len()) as u64, gpu.uploader.timestamp()?);
        let transfer = Mutex::new(Some(Transfer { bytes, begin, end }));
        Ok(Self { buffer, rows: directions.len(), has_vectors, ready, transfer })
    }

    /// The transfer of these values; only the first caller gets it.
    pub(super) fn take_transfer(&self) -> Option<Transfer> {
        lock(&self.transfer).take()
    }
}
