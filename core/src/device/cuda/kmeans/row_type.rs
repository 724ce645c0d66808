//! The type of GPU-resident rows: element, metric, dimension, weighted or not.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::device::contract::KMeansKind;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::check_size;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::{ElementKind, Elements, Real};
use crate::metric::Metric;

/// Bins of a wide sum of float32, and of float64.
pub(super) const SINGLE_BINS: usize = 9;
pub(super) const DOUBLE_BINS: usize = 66;

/// The element type of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Element {
    F32,
    F64,
}

/// The type of rows, for which k-means kernels are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RowType {
    pub(super) element: Element,
    /// `SqEuclidean` or `Cosine`.
    pub(super) metric: Metric,
    /// Elements of a row.
    pub(super) dim: usize,
    pub(super) has_weights: bool,
}

/// Rows that are on the GPU in row-major order, with their weights, if they have any.
pub(super) struct UploadedRows {
    pub(super) rows: Buffer,
    pub(super) count: usize,
    pub(super) weights: Option<Buffer>,
}

impl UploadedRows {
    /// # Panics
    /// If the buffers are too small for so many rows of a type, or if weights are there and of no
    /// use, or are missing.
    pub(super) fn check(&self, row_type: RowType) {
        let Self { rows, count, weights } = self;
        check_size(rows, count * row_type.dim, row_type.element.bytes());
        assert_eq!(weights.is_some(), row_type.has_weights);
        weights.iter().for_each(|weights| check_size(weights, *count, size_of::<f64>()));
    }
}

impl RowType {
    /// The type of rows of a kind, if such rows may stay on the GPU.
    pub(super) fn of(kind: KMeansKind) -> Option<Self> {
        let KMeansKind { elements, metric, dim, has_weights } = kind;
        let element = match elements {
            ElementKind::F32 => Element::F32,
            ElementKind::F64 => Element::F64,
            ElementKind::Bits | ElementKind::Sets => return None,
        };
        let is_known = matches!(metric, Metric::SqEuclidean | Metric::Cosine);
        is_known.then_some(Self { element, metric, dim, has_weights })
    }

    /// The compile-time parameters of kernels for such rows.
    pub(super) fn parameters(self) -> [String; 4] {
        let Self { element, metric, dim, has_weights } = self;
        [
            format!("ELEMENT={}", element.name()),
            format!("METRIC={}", metric.name().to_uppercase()),
            format!("DIM={dim}"),
            format!("WEIGHTED={}", u32::from(has_weights)),
        ]
    }

    /// Terms of a row in the sums: its weighted elements, and the weight if there are weights.
    pub(super) fn width(self) -> usize {
        self.dim + usize::from(self.has_weights)
    }

    /// Whether these terms have more bits than the steps of a sum hold.
    pub(super) fn has_parts(self) -> bool {
        self.element == Element::F64 || self.has_weights
    }

    /// Bins of a wide sum.
    pub(super) fn bins(self) -> usize {
        if self.has_parts() { DOUBLE_BINS } else { SINGLE_BINS }
    }

    /// The exponent of the smallest possible term.
    pub(super) fn least_exponent(self) -> i32 {
        if self.has_parts() { -1074 } else { -149 }
    }

    /// Whether rounding may change the mean of equal rows: see `kernels/kmeans/sums.cuh`.
    pub(super) fn has_singles(self) -> bool {
        self.element == Element::F64 || self.metric == Metric::Cosine
    }

    /// The maximum difference between half the squared distances of a row from two centroids that
    /// are equally near in exact sums, at any distance.
    pub(super) fn absolute_error(self) -> f64 {
        let terms = (self.dim + 4) as f64;
        match self.metric {
            // 1 - xc is summed with an error of dim + 4 units, for each of two centroids. The
            // squared distance also depends on the squared norms of directions, which differ from 1
            // by the rounding of each element, and of a sum of dim float64.
            Metric::Cosine => (2.0 * terms + 4.0) * self.element.unit() + terms * f64::EPSILON,
            // One unit of the smallest number for each of dim sums, on both sides of a comparison.
            _ => 2.0 * terms * self.element.smallest(),
        }
    }
}

impl Element {
    /// Its name in `kernels/common/arithmetic.cuh`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F64 => "F64",
        }
    }

    /// Bytes of an element.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::F64 => size_of::<f64>(),
        }
    }

    /// The smallest positive number.
    fn smallest(self) -> f64 {
        match self {
            Self::F32 => f32::from_bits(1).into(),
            Self::F64 => f64::from_bits(1),
        }
    }

    /// Half the gap between 1 and the next larger number.
    fn unit(self) -> f64 {
        match self {
            Self::F32 => f64::from(f32::EPSILON) / 2.0,
            Self::F64 => f64::EPSILON / 2.0,
        }
    }

    /// The first `count` numbers of a buffer, all of this type, after all earlier work in its
    /// compute stream.
    pub(super) fn read<T: Real>(
        self,
        gpu: &Gpu,
        from: &Buffer,
        count: usize,
        job: &Job,
    ) -> Result<Vec<T>> {
        let (stream, from) = (&gpu.compute, from.slice());
        let elements = match self {
            Self::F32 => Elements::F32(gpu.downloader.read(stream, from, count, job)?),
            Self::F64 => Elements::F64(gpu.downloader.read(stream, from, count, job)?),
        };
        Ok(T::values(elements).expect("rows have this type"))
    }

    /// Writes numbers of this type to the beginning of a buffer.
    pub(super) fn write<T: Real>(
        self,
        stream: &Arc<CudaStream>,
        to: &mut Buffer,
        values: impl Iterator<Item = T>,
    ) -> Result<()> {
        match self {
            Self::F32 => {
                let values: Vec<f32> = values.map(|x| x.to_f64() as f32).collect();
                sys::write(stream, to.slice_mut(), &values)
            }
            Self::F64 => {
                let values: Vec<f64> = values.map(Real::to_f64).collect();
                sys::write(stream, to.slice_mut(), &values)
            }
        }
    }
}
