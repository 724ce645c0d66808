//! NVIDIA GPUs, found at run time: CUDA is not needed to build or to start.
//!
//! Kernels (`kernels/`) are compiled for the GPU at hand and cached on disk. From the outside in:
//!
//! | module | job |
//! |---|---|
//! | `handle` | which GPU, and how much of its memory |
//! | `search` | rows and their layouts, lists, passes of launches, chosen pairs |
//! | `hashing` | tables of hashes: rows to keys, keys to tables, keys to buckets |
//! | `kmeans` | sessions of k-means: rows that stay on the GPU, many groups in one launch |
//! | `dbscan` | rows in tiles under a tree of boxes, in stages of launches that end in time |
//! | `driver` | per-GPU state of a process: buffers under a budget, uploads beside running kernels, kernels from source and on disk |
//!
//! Unsafe code is in the modules that launch kernels and in those of the structs that kernels read, in the
//! families' folders, and in `driver`.

/// Asserts, when it is compiled, the size of a struct that kernels read, and where its fields begin.
/// `scripts/compile_kernels.py` asserts the same of the kernels' struct of that name, without `OnDevice`.
macro_rules! assert_layout {
    ($struct:ty, $size:literal, { $($field:ident: $offset:literal),+ $(,)? }) => {
        const _: () = {
            assert!(size_of::<$struct>() == $size);
            $(assert!(std::mem::offset_of!($struct, $field) == $offset);)+
        };
    };
}

mod dbscan;
mod driver;
mod handle;
mod hashing;
mod kmeans;
mod search;

pub(in crate::device) use handle::{list, why_none};

pub use handle::CudaDevice;
