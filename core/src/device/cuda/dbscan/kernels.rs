//! The kernels of DBSCAN.

use std::sync::{Arc, LazyLock};

use cudarc::driver::CudaFunction;

use crate::device::cuda::driver::compile::Program;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::function;
use crate::device::cuda::driver::modules::Once;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::matrix::ElementKind;
use crate::metric::{Metric, Sum};

/// Rows of a tile.
pub(super) const TILE: usize = 64;
/// Splitters of a coordinate: they divide a sample of it into parts of equal size.
pub(super) const SPLITTERS: usize = 257;
/// Keys that a block sorts.
pub(super) const SORTED_KEYS: usize = 2048;
/// Tiles of a section: their listed rows are counted together.
pub(super) const SECTION: usize = 2048;

/// Constants that `kernels/dbscan` shares with this folder.
const CONSTANTS: [(&str, usize); 4] =
    [("TILE", TILE), ("SPLITTERS", SPLITTERS), ("SORTED_KEYS", SORTED_KEYS), ("SECTION", SECTION)];

/// The most coordinates that boxes have.
const MOST_COORDINATES: usize = 16;

/// The compile-time parameters of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct DbscanKernelSpec {
    kind: ElementKind,
    metric: Metric,
    /// Elements of a row on the device, if kernels are unrolled for that dimension, else 0.
    fixed_dim: usize,
    /// Whether rows have weights.
    is_weighted: bool,
    /// Whether tensor-core products filter pairs.
    is_filtered: bool,
}

impl DbscanKernelSpec {
    /// Parameters for rows of `dim` elements (for bits, words of 32), with or without weights, on a
    /// device with or without tensor-core products.
    pub(super) fn new(
        kind: ElementKind,
        metric: Metric,
        dim: usize,
        is_weighted: bool,
        has_products: bool,
    ) -> Self {
        let has_products = has_products && metric.sum() != Sum::Absolute;
        let largest = match kind {
            ElementKind::F32 => 32,
            ElementKind::Bits if has_products => 4,
            _ => 16,
        };
        let fixed_dim = if dim <= largest { dim } else { 0 };
        Self { kind, metric, fixed_dim, is_weighted, is_filtered: has_products && fixed_dim == 0 }
    }

    /// Whether tensor-core products filter pairs.
    pub(super) fn is_filtered(&self) -> bool {
        self.is_filtered
    }

    /// Slices of 64 bytes of a row of `dim` elements: of fp16 numbers, or of words of bits.
    pub(super) fn slices(&self, dim: usize) -> usize {
        dim.div_ceil(if self.kind == ElementKind::Bits { 16 } else { 32 })
    }

    /// Whether kernels know the number of elements: `DIM` is not 0.
    pub(super) fn is_unrolled(&self) -> bool {
        self.fixed_dim != 0
    }

    /// Elements that are loaded together: as `WIDTH` in `kernels/dbscan/rows.cuh`.
    pub(super) fn width(&self) -> usize {
        match (self.fixed_dim, self.kind) {
            (1, _) => 1,
            (2, _) | (_, ElementKind::F64) => 2,
            _ => 4,
        }
    }

    /// Coordinates of boxes: as `COORDINATES` in `kernels/dbscan/rows.cuh`.
    pub(super) fn coordinates(&self) -> usize {
        match (self.kind, self.fixed_dim) {
            (ElementKind::Bits, _) => 1,
            (_, 0) => MOST_COORDINATES,
            (_, dim) => dim.min(MOST_COORDINATES),
        }
    }

    fn defines(&self) -> [String; 5] {
        let element = match self.kind {
            ElementKind::F32 => "F32",
            ElementKind::F64 => "F64",
            ElementKind::Bits => "BITS",
            ElementKind::Sets => unreachable!("dbscan takes no sets"),
        };
        [
            format!("ELEMENT={element}"),
            format!("METRIC={}", self.metric.name().to_uppercase()),
            format!("DIM={}", self.fixed_dim),
            format!("WEIGHTED={}", u8::from(self.is_weighted)),
            format!("FILTERED={}", u8::from(self.is_filtered)),
        ]
    }
}

/// Threads of a block of a [`Staged`] kernel: two warps.
pub(super) const STAGED_THREADS: usize = 64;

/// A kernel whose warps take items until a launch has lasted long enough.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) function: CudaFunction,
    pub(super) name: &'static str,
    /// Resident blocks; more would only start when these have used up the launch's time.
    pub(super) blocks: usize,
}

/// The kernels for rows of one kind, loaded on a device.
#[derive(Debug)]
pub(super) struct DbscanKernels {
    pub(super) spec: DbscanKernelSpec,
    /// Cycles a second.
    pub(super) clock: f64,
    pub(super) keys: CudaFunction,
    pub(super) groups_of: CudaFunction,
    pub(super) count_digits: CudaFunction,
    pub(super) add_up: CudaFunction,
    pub(super) move_keys: CudaFunction,
    pub(super) fill_tiles: CudaFunction,
    pub(super) round_tiles: CudaFunction,
    pub(super) bound_tiles: CudaFunction,
    pub(super) bound_nodes: CudaFunction,
    pub(super) count_within_tiles: Staged,
    pub(super) count_others: CudaFunction,
    pub(super) list_others: CudaFunction,
    pub(super) count_near: Staged,
    pub(super) alone: CudaFunction,
    pub(super) link_within_tiles: CudaFunction,
    pub(super) link_tiles: Staged,
    pub(super) flatten: CudaFunction,
    pub(super) know: CudaFunction,
    pub(super) attach: Staged,
    pub(super) finish: CudaFunction,
}

impl DbscanKernels {
    /// The kernels for `spec`, compiled and loaded by the first caller.
    pub(super) fn get(gpu: &Gpu, spec: DbscanKernelSpec) -> Result<Arc<Self>> {
        static LOADED: LazyLock<Once<(usize, DbscanKernelSpec), DbscanKernels>> =
            LazyLock::new(Once::default);
        LOADED.get((gpu.ordinal, spec), || Self::load(gpu, spec))
    }

    fn load(gpu: &Gpu, spec: DbscanKernelSpec) -> Result<Self> {
        let programs = ["dbscan.cu", "dbscan_count.cu", "dbscan_link.cu", "dbscan_attach.cu"]
            .map(|file| Program::new(file, &spec.defines(), &CONSTANTS));
        let modules = gpu.load_all(&programs)?;
        let [order, count, link, attach] = &modules[..] else {
            unreachable!("a module for each program")
        };
        let multiprocessors = gpu.limits.multiprocessors;
        let staged = |module, name| -> Result<Staged> {
            let function = function(module, name)?;
            let call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
            let threads = STAGED_THREADS as u32;
            let blocks = function.occupancy_max_active_blocks_per_multiprocessor(threads, 0, None);
            let blocks = blocks.map_err(failed(call))? as usize * multiprocessors;
            Ok(Staged { function, name, blocks: blocks.max(1) })
        };
        Ok(Self {
            spec,
            clock: gpu.limits.clock,
            keys: function(order, "keys")?,
            groups_of: function(order, "groups_of")?,
            count_digits: function(order, "count_digits")?,
            add_up: function(order, "add_up")?,
            move_keys: function(order, "move_keys")?,
            fill_tiles: function(order, "fill_tiles")?,
            round_tiles: function(order, "round_tiles")?,
            bound_tiles: function(order, "bound_tiles")?,
            bound_nodes: function(order, "bound_nodes")?,
            count_within_tiles: staged(count, "count_within_tiles")?,
            count_others: function(count, "count_others")?,
            list_others: function(count, "list_others")?,
            count_near: staged(count, "count_near")?,
            alone: function(link, "alone")?,
            link_within_tiles: function(link, "link_within_tiles")?,
            link_tiles: staged(link, "link_tiles")?,
            flatten: function(link, "flatten")?,
            know: function(link, "know")?,
            attach: staged(attach, "attach")?,
            finish: function(attach, "finish")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_elements_are_unrolled() {
        let of = |kind, dim| {
            let spec = DbscanKernelSpec::new(kind, Metric::L2, dim, false, false);
            (spec.fixed_dim, spec.width(), spec.coordinates())
        };
        assert_eq!(of(ElementKind::F32, 1), (1, 1, 1));
        assert_eq!(of(ElementKind::F32, 32), (32, 4, 16));
        assert_eq!(of(ElementKind::F32, 33), (0, 4, 16));
        assert_eq!(of(ElementKind::F64, 3), (3, 2, 3));
        assert_eq!(of(ElementKind::F64, 17), (0, 2, 16));
        assert_eq!(of(ElementKind::Bits, 2), (2, 2, 1));
    }

    #[test]
    fn others_have_products_where_there_are_any() {
        let of =
            |kind, metric, dim| DbscanKernelSpec::new(kind, metric, dim, false, true).is_filtered;
        assert!(of(ElementKind::F32, Metric::L2, 33) && of(ElementKind::F64, Metric::Cosine, 17));
        assert!(!of(ElementKind::F32, Metric::L2, 32) && !of(ElementKind::F32, Metric::L1, 33));
        assert!(
            of(ElementKind::Bits, Metric::Hamming, 5) && !of(ElementKind::Bits, Metric::Jaccard, 4)
        );
        let slices =
            |kind, dim| DbscanKernelSpec::new(kind, Metric::L2, dim, false, true).slices(dim);
        assert_eq!((slices(ElementKind::F64, 33), slices(ElementKind::Bits, 33)), (2, 3));
    }
}
