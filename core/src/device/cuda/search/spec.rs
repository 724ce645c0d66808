//! The compile-time parameters of a search's kernels, and the sizes that follow from them.

use super::passes::PANEL;
use crate::device::cuda::driver::compile::Program;
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// Constants that `kernels/search` shares with this folder.
const CONSTANTS: [(&str, usize); 4] =
    [("PANEL", PANEL), ("RUN", RUN), ("LANES", LANES), ("JOINING", JOINING)];

/// Consecutive base rows in a panel.
pub(super) const RUN: usize = 8;

/// Lanes per row in a self-join of buckets.
pub(super) const LANES: usize = 4;

/// Threads of a block of a self-join of buckets.
pub(super) const JOINING: usize = 128;

/// The parameters of a module; also its key in memory and, with the sources, on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct SearchSpec {
    pub(super) kind: ElementKind,
    pub(super) metric: Metric,
    /// Elements in a row if the kernels are unrolled for them, else 0.
    fixed_dim: u32,
}

impl SearchSpec {
    /// Parameters for rows of `dim` elements on the device (bits in words of 32).
    pub(super) fn new(kind: ElementKind, metric: Metric, dim: u32) -> Self {
        // Up to this size a panel of queries and two of base rows fit into 48 KiB of shared memory.
        let largest = if kind == ElementKind::F64 { 16 } else { 32 };
        Self { kind, metric, fixed_dim: if dim <= largest { dim } else { 0 } }
    }

    /// Parameters for rows of `dim` elements, or bits.
    pub(super) fn of_rows(kind: ElementKind, metric: Metric, dim: usize) -> Self {
        Self::new(kind, metric, device_dim(kind, dim) as u32)
    }

    /// Whether kernels are unrolled for the elements of a row.
    pub(super) fn is_unrolled(&self) -> bool {
        self.fixed_dim > 0
    }

    /// Elements of a row in a panel: whole groups of elements that the scan adds up without a branch.
    /// See `GROUP` in `kernels/search/scan.cuh`.
    pub(super) fn stored_dim(&self, dim: u32) -> u32 {
        match (self.fixed_dim, self.kind) {
            (0, ElementKind::F64) => dim.next_multiple_of(4),
            (0, _) => dim.next_multiple_of(8),
            _ => dim,
        }
    }

    /// Dimensions that the scan stages in shared memory at a time.
    pub(super) fn slice(&self) -> u32 {
        match (self.fixed_dim, self.kind) {
            (0, ElementKind::F64) => 8,
            (0, _) => 16,
            (dim, _) => dim,
        }
    }

    /// The number of slices in the scan's shared memory: two stages of base rows, and the queries
    /// once if they stay for the whole block, else in two stages as well.
    pub(super) fn staged_slices(&self) -> u32 {
        if self.fixed_dim == 0 { 4 } else { 3 }
    }

    /// A program of `kernels/` to compile.
    pub(super) fn program(&self, file: &'static str) -> Program {
        Program::new(file, &self.defines(), &CONSTANTS)
    }

    fn defines(&self) -> [String; 3] {
        let [element, metric] = definitions(self.kind, self.metric);
        [element, metric, format!("DIM={}", self.fixed_dim)]
    }
}

/// The definitions of an element kind and a metric for kernels.
pub(super) fn definitions(kind: ElementKind, metric: Metric) -> [String; 2] {
    let element = match kind {
        ElementKind::F32 => "F32",
        ElementKind::F64 => "F64",
        ElementKind::Bits => "BITS",
        ElementKind::Sets => unreachable!("sets are compared on the host"),
    };
    [format!("ELEMENT={element}"), format!("METRIC={}", metric.name().to_uppercase())]
}

/// Elements of a row on the device, where bits are words of 32.
pub(super) fn device_dim(kind: ElementKind, dim: usize) -> usize {
    kind.width(dim) * kind.bytes() / scalar_bytes(kind)
}

/// Bytes of a list entry.
pub(super) fn entry_bytes(kind: ElementKind) -> usize {
    if kind == ElementKind::F64 { 16 } else { 8 }
}

/// Bytes of a distance, and of a threshold.
pub(super) fn real_bytes(kind: ElementKind) -> usize {
    if kind == ElementKind::F64 { 8 } else { 4 }
}

/// Bytes of an element on the device, where bits are words of 32.
pub(super) fn scalar_bytes(kind: ElementKind) -> usize {
    real_bytes(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_dims_are_unrolled() {
        let slice = |kind, dim| SearchSpec::new(kind, Metric::L2, dim).slice();
        assert_eq!(slice(ElementKind::F32, 32), 32);
        assert_eq!(slice(ElementKind::F32, 33), 16);
        assert_eq!(slice(ElementKind::F64, 16), 16);
        assert_eq!(slice(ElementKind::F64, 17), 8);
    }

    #[test]
    fn a_spec_names_what_kernels_define() {
        let spec = SearchSpec::new(ElementKind::F32, Metric::InnerProduct, 100);
        assert_eq!(spec.defines(), ["ELEMENT=F32", "METRIC=INNER_PRODUCT", "DIM=0"]);
    }

    #[test]
    fn bits_are_words_of_32_on_the_device() {
        assert_eq!(device_dim(ElementKind::Bits, 1), 2);
        assert_eq!(device_dim(ElementKind::Bits, 512), 16);
        assert_eq!(device_dim(ElementKind::F64, 7), 7);
    }
}
