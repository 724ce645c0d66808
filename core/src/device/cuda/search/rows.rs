//! Rows on a GPU, in the layouts that calls have needed.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::CudaEvent;

use super::Sides;
use super::exact_values::ExactValues;
use super::filter::PackedBase;
use super::launch::SearchKernels;
use super::launch_buckets::BucketKernels;
use super::launch_layouts::{InPanels, Piece};
use super::passes::{PANEL, panels};
use super::spec::{SearchSpec, device_dim, scalar_bytes};
use crate::device::cuda::device::{CudaDevice, TensorCores};
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::device::cuda::driver::upload::{PIECE_BYTES, Transfer, bytes_of};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::metric::{Metric, Sum};
use crate::parallel::lock;
use crate::rows::Rows;

/// Rows, with their layouts on the GPU.
pub struct CudaRows {
    pub(super) rows: Rows,
    pub(super) metric: Metric,
    pub(super) layouts: Arc<Layouts>,
    /// The rows that contain these, and the position of the first of these there.
    pub(super) whole: Option<(Arc<Layouts>, usize)>,
}

/// The layouts of some rows.
#[derive(Default)]
pub(super) struct Layouts {
    pub(super) base: LayoutSlot<RowPanels>,
    queries: LayoutSlot<RowPanels>,
    pub(super) plain: LayoutSlot<Plain>,
    pub(super) given: LayoutSlot<ExactValues>,
    /// Whether lists were ranked by the definition, which reads these rows.
    pub(super) was_ranked: AtomicBool,
}

impl Layouts {
    /// Drops the layouts that only the definition reads. Current users keep them until they are
    /// done.
    pub(super) fn forget_exact(&self) {
        *lock(&self.plain) = None;
        *lock(&self.given) = None;
        self.was_ranked.store(false, Ordering::Relaxed);
    }
}

pub(super) type LayoutSlot<T> = Mutex<Option<Arc<T>>>;

/// Rows in panels on the device.
pub(super) struct RowPanels {
    pub(super) kernels: Arc<SearchKernels>,
    pub(super) buffer: Buffer,
    pub(super) rows: usize,
    pub(super) stored_dim: usize,
    /// Completes when all rows have arrived.
    pub(super) ready: CudaEvent,
    /// The transfer of the rows, until it is accounted for.
    transfer: Mutex<Option<Transfer>>,
    /// The same rows packed for products, once they are needed; none if the filter is of no use for
    /// them.
    packed: LayoutSlot<Option<Arc<PackedBase>>>,
}

/// Rows on the device in row-major order.
pub(super) struct Plain {
    pub(super) buffer: Buffer,
    /// Completes when all rows have arrived.
    pub(super) ready: CudaEvent,
}

impl RowPanels {
    /// The rows, as input of packing.
    pub(super) fn rows(&self) -> InPanels<'_> {
        InPanels { buffer: &self.buffer, rows: self.rows, dim: self.stored_dim }
    }

    /// These base rows packed for products, after all rows that have arrived in the compute stream.
    /// `None` if the filter is of no use, or there is no memory for it.
    pub(super) fn packed(
        &self,
        device: &CudaDevice,
        by: TensorCores,
    ) -> Result<Option<Arc<PackedBase>>> {
        let made = get_or_make(&self.packed, || {
            match PackedBase::of(device, by, &self.kernels, self.rows()) {
                Err(Error::DeviceMemory { .. }) => Ok(None),
                packed => Ok(packed?.map(Arc::new)),
            }
        })?;
        Ok(Option::clone(&made))
    }

    /// The transfer of the rows; only the first caller gets it.
    pub(super) fn take_transfer(&self) -> Option<Transfer> {
        lock(&self.transfer).take()
    }
}

/// The side of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PanelLayout {
    /// Dealt out to panels in runs; see `kernels/search/lists.cuh`.
    Base,
    /// Filling panels in order, negated where the sum asks for it.
    Queries { negate: bool },
}

/// The value of a slot, made if it is empty. Two callers may both make it, as no lock is held
/// meanwhile.
pub(super) fn get_or_make<T>(
    slot: &LayoutSlot<T>,
    make: impl FnOnce() -> Result<T>,
) -> Result<Arc<T>> {
    let layout = lock(slot).clone();
    match layout {
        Some(made) => Ok(made),
        None => {
            let made = Arc::new(make()?);
            Ok(lock(slot).get_or_insert(made).clone())
        }
    }
}

impl CudaRows {
    pub(super) fn new(rows: &Rows, metric: Metric) -> Self {
        Self { rows: rows.clone(), metric, layouts: Arc::default(), whole: None }
    }

    pub(super) fn slice(&self, range: Range<usize>) -> Self {
        let (whole, first) = match &self.whole {
            Some((whole, first)) => (whole.clone(), first + range.start),
            None => (self.layouts.clone(), range.start),
        };
        let rows = self.rows.slice(range);
        Self { rows, metric: self.metric, layouts: Arc::default(), whole: Some((whole, first)) }
    }

    /// The layout of a base.
    pub(super) fn base(&self, device: &CudaDevice, job: &Job) -> Result<Arc<RowPanels>> {
        get_or_make(&self.layouts.base, || self.upload(device, PanelLayout::Base, job))
    }

    /// The layout of queries, made from that of the base if the device has it.
    pub(super) fn queries(&self, device: &CudaDevice, job: &Job) -> Result<Arc<RowPanels>> {
        let negate = self.metric.sum() == Sum::Products;
        get_or_make(&self.layouts.queries, || {
            let (whole, first) = match &self.whole {
                Some((whole, first)) => (whole, *first),
                None => (&self.layouts, 0),
            };
            let base = lock(&whole.base).clone();
            match base {
                Some(base) => base.queries_of(device, first..first + self.rows.len(), negate),
                None => self.upload(device, PanelLayout::Queries { negate }, job),
            }
        })
    }

    /// The kernels that compare these rows.
    pub(super) fn kernels(&self, gpu: &Gpu) -> Result<Arc<SearchKernels>> {
        let matrix = self.rows.matrix();
        SearchKernels::get(gpu, SearchSpec::of_rows(matrix.kind(), self.metric, matrix.dim()))
    }

    /// The kernels that compare these rows in LSH buckets.
    pub(super) fn bucket_kernels(&self, gpu: &Gpu) -> Result<Arc<BucketKernels>> {
        let matrix = self.rows.matrix();
        BucketKernels::get(gpu, SearchSpec::of_rows(matrix.kind(), self.metric, matrix.dim()))
    }

    /// The rows in row-major order.
    pub(super) fn plain(&self, device: &CudaDevice, job: &Job) -> Result<Arc<Plain>> {
        get_or_make(&self.layouts.plain, || {
            let CudaDevice { gpu, memory, .. } = device;
            let (buffer, ready, _) = gpu.uploader.upload_plain(memory, &self.rows, job)?;
            Ok(Plain { buffer, ready })
        })
    }

    /// Packs rows into panels as they arrive.
    fn upload(&self, device: &CudaDevice, side: PanelLayout, job: &Job) -> Result<RowPanels> {
        let CudaDevice { gpu, memory, .. } = device;
        let kernels = self.kernels(gpu)?;
        let (rows, matrix) = (&self.rows, self.rows.matrix());
        let dim = device_dim(matrix.kind(), matrix.dim());
        let stored_dim = kernels.spec.stored_dim(dim as u32) as usize;
        let scalar = scalar_bytes(matrix.kind());
        let uploader = &gpu.uploader;
        let begin = uploader.timestamp()?;
        let size = panels(rows.len()) * PANEL * stored_dim * scalar;
        let mut buffer = memory.allocate(uploader.stream(), size)?;
        // Padding rows and dimensions are zero.
        let zeros = uploader.stream().memset_zeros(buffer.slice_mut());
        zeros.map_err(failed("cuMemsetD8Async"))?;
        let (deal_to, negate) = match side {
            PanelLayout::Base => (panels(rows.len()), false),
            PanelLayout::Queries { negate } => (0, negate),
        };
        let bytes = bytes_of(rows)?;
        let all = pieces(rows.len(), dim, PIECE_BYTES / scalar).map(|(row, count, first, dims)| {
            let start = (row * dim + first) * scalar;
            let piece = Piece {
                rows: count as u32,
                dims: dims as u32,
                first_row: row as u32,
                first_dim: first as u32,
                stored_dim: stored_dim as u32,
                deal_to: deal_to as u32,
                negate,
            };
            (&bytes[start..start + count * dims * scalar], piece)
        });
        uploader.send(all, job, |stream, landed, piece| {
            kernels.pack(stream, landed, &mut buffer, &piece)
        })?;
        let (end, ready) = (uploader.timestamp()?, uploader.timestamp()?);
        let transfer = Mutex::new(Some(Transfer { bytes: rows.bytes() as u64, begin, end }));
        let packed = LayoutSlot::default();
        Ok(RowPanels { kernels, buffer, rows: rows.len(), stored_dim, ready, transfer, packed })
    }
}

impl RowPanels {
    /// Some base rows in the layout of queries, without another upload.
    fn queries_of(&self, device: &CudaDevice, some: Range<usize>, negate: bool) -> Result<Self> {
        let CudaDevice { gpu, memory, .. } = device;
        gpu.compute.wait(&self.ready).map_err(failed("cuStreamWaitEvent"))?;
        let begin = gpu.timestamp()?;
        let (kernels, rows, stored_dim) = (self.kernels.clone(), some.len(), self.stored_dim);
        let scalar = scalar_bytes(kernels.spec.kind);
        let mut buffer =
            memory.allocate(&gpu.compute, panels(rows) * PANEL * stored_dim * scalar)?;
        kernels.take_queries(&gpu.compute, self.rows(), some, &mut buffer, negate)?;
        let (end, ready) = (gpu.timestamp()?, gpu.timestamp()?);
        let transfer = Mutex::new(Some(Transfer { bytes: 0, begin, end }));
        Ok(Self {
            kernels,
            buffer,
            rows,
            stored_dim,
            ready,
            transfer,
            packed: LayoutSlot::default(),
        })
    }
}

impl<'a> Sides<&'a RowPanels> {
    pub(super) fn buffers(self) -> Sides<&'a Buffer> {
        Sides { queries: &self.queries.buffer, base: &self.base.buffer }
    }
}

impl Sides<&CudaRows> {
    /// Both sides in row-major order; the compute stream waits until they are there.
    pub(super) fn plain(self, device: &CudaDevice, job: &Job) -> Result<Sides<Arc<Plain>>> {
        let Self { queries, base } = self;
        let (queries, base) = (queries.plain(device, job)?, base.plain(device, job)?);
        wait_for(&device.gpu, &queries.ready)?;
        wait_for(&device.gpu, &base.ready)?;
        Ok(Sides { queries, base })
    }
}

/// Makes the compute stream wait until a layout is ready.
pub(super) fn wait_for(gpu: &Gpu, ready: &CudaEvent) -> Result<()> {
    gpu.compute.wait(ready).map_err(failed("cuStreamWaitEvent"))
}

/// Cuts rows into contiguous pieces of at most `room` elements: whole rows, or parts of one row
/// that alone is too long. Yields (first row, rows, first element, elements per row).
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
}
