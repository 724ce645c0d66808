//! The types of the elements of rows that stay on a GPU.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::device::contract::KMeansInput;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::{self, failed};
use crate::error::Result;
use crate::matrix::{ElementKind, Real};
use crate::metric::Metric;

/// Bins of a wide sum, by the type of elements.
pub(super) const SINGLE_BINS: usize = 9;
pub(super) const DOUBLE_BINS: usize = 66;

/// See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Element {
    F32,
    F64,
}

impl Element {
    /// The type of rows of a kind that may stay there by this metric, if they may.
    pub(super) fn of(kind: ElementKind, metric: Metric) -> Option<Self> {
        match kind {
            _ if metric != Metric::SqEuclidean => None,
            ElementKind::F32 => Some(Self::F32),
            ElementKind::F64 => Some(Self::F64),
            ElementKind::Bits | ElementKind::Sets => None,
        }
    }

    /// The type of the rows of an input, if they may stay there.
    pub(super) fn of_input(input: KMeansInput<'_>) -> Option<Self> {
        let element = Self::of(input.rows.matrix().kind(), input.metric);
        element.filter(|_| input.weights.is_none())
    }

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
    pub(super) fn smallest(self) -> f64 {
        match self {
            Self::F32 => f32::from_bits(1).into(),
            Self::F64 => f64::from_bits(1),
        }
    }

    /// The exponent of that.
    pub(super) fn least_exponent(self) -> i32 {
        match self {
            Self::F32 => -149,
            Self::F64 => -1074,
        }
    }

    /// Bins of a wide sum.
    pub(super) fn bins(self) -> usize {
        match self {
            Self::F32 => SINGLE_BINS,
            Self::F64 => DOUBLE_BINS,
        }
    }

    /// Whether sums have parts of steps: elements have more bits than a sum of steps has room for.
    pub(super) fn has_parts(self) -> bool {
        self == Self::F64
    }

    /// The first numbers of a buffer, all of this type. Waits for the stream.
    pub(super) fn read<T: Real>(
        self,
        stream: &Arc<CudaStream>,
        from: &Buffer,
        count: usize,
    ) -> Result<Vec<T>> {
        let home = failed("cuMemcpyDtoHAsync");
        Ok(match self {
            Self::F32 => {
                let read = sys::read::<f32>(stream, from.slice(), count).map_err(home)?;
                read.into_iter().map(|x| T::from_f64(x.into())).collect()
            }
            Self::F64 => {
                let read = sys::read::<f64>(stream, from.slice(), count).map_err(home)?;
                read.into_iter().map(T::from_f64).collect()
            }
        })
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
