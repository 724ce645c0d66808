//! NVIDIA GPUs, found at run time: CUDA is not needed to build or to start.
//!
//! Kernels (`kernels/`) are compiled for the GPU at hand and cached on disk. From the outside in:
//!
//! | module | job |
//! |---|---|
//! | `device` | which GPU, and how much of its memory |
//! | `search` | rows and their layouts, top-k lists, passes of launches, chosen pairs |
//! | `hashing` | LSH tables: rows to keys, keys to tables, keys to buckets |
//! | `kmeans` | k-means sessions: GPU-resident rows, many small problems in one launch |
//! | `dbscan` | tiles under a tree of bounding boxes, stages of launches of bounded time |
//! | `driver` | per-GPU state of a process: memory budget, uploads beside kernels, compiled and cached kernels |
//!
//! Unsafe code is in the modules that launch kernels, in those of the structs read by kernels
//! (`kernel_struct!`), and in `driver`.

/// Lets kernels read a C struct of numbers, given with its size and the offsets of all its fields.
/// Both are asserted at compile time, and so is that there is no padding.
/// `scripts/compile_kernels.py` asserts the same for the kernels' struct of that name, without
/// `OnDevice`.
macro_rules! kernel_struct {
    ($struct:ty, $size:literal, { $($field:ident: $offset:literal),+ $(,)? }) => {
        const _: () = {
            const fn size<T>(_: fn(&$struct) -> &T) -> usize {
                size_of::<T>()
            }
            assert!(size_of::<$struct>() == $size && 0 $(+ size(|of| &of.$field))+ == $size);
            $(assert!(std::mem::offset_of!($struct, $field) == $offset);)+
        };
        // SAFETY: a C struct of numbers without padding, laid out as the kernels', as asserted
        // above.
        unsafe impl cudarc::driver::DeviceRepr for $struct {}
    };
}

mod dbscan;
mod device;
mod driver;
mod hashing;
mod kmeans;
mod search;

pub(in crate::device) use device::{list, why_none};

pub use device::CudaDevice;

use self::search::CudaTables;
use super::{Device, DeviceInfo, Hashing, sealed};

impl sealed::Sealed for CudaDevice {}

impl Device for CudaDevice {
    type HashTables = CudaTables;

    fn info(&self) -> DeviceInfo {
        self.gpu.info.clone()
    }

    fn hashing(&self) -> Option<&Hashing<Self>> {
        Some(self)
    }

    fn peak_memory(&self) -> u64 {
        self.memory.peak()
    }

    fn memory_in_use(&self) -> u64 {
        self.memory.used()
    }
}
