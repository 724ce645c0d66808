//! Kernels from source, for one device: the runtime compiler, asked only for what the disk cache
//! does not hold.
//!
//! Everything that distinguishes one compiled module from another is in [`Spec`] and the device's
//! architecture. `scripts/compile_kernels.py` reads [`SEARCH`], [`CLUSTERS`] and [`OPTIONS`] from this file and
//! compiles the same text for every architecture, without a GPU.

use std::fmt;
use std::time::Instant;

use super::cache::{Cache, Key};
use super::sys;
use crate::error::Result;
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// The kernels of a search, in the order in which they are concatenated: NVRTC sees no include files.
const SEARCH: [&str; 5] = [
    include_str!("../../../../kernels/arithmetic.cuh"),
    include_str!("../../../../kernels/lists.cuh"),
    include_str!("../../../../kernels/pack.cu"),
    include_str!("../../../../kernels/scan.cu"),
    include_str!("../../../../kernels/merge.cu"),
];

/// The kernels of Lloyd's rounds.
const CLUSTERS: [&str; 7] = [
    include_str!("../../../../kernels/arithmetic.cuh"),
    include_str!("../../../../kernels/clusters.cuh"),
    include_str!("../../../../kernels/clusters.cu"),
    include_str!("../../../../kernels/assign_near.cu"),
    include_str!("../../../../kernels/tiles.cuh"),
    include_str!("../../../../kernels/assign_tiles.cu"),
    include_str!("../../../../kernels/groups.cu"),
];

/// Options of every compilation. Without fused multiply-adds of the compiler's own making: the
/// order and the rounding of every sum is fixed.
const OPTIONS: [&str; 2] = ["-std=c++17", "-fmad=false"];

/// What a module is compiled for; also its key in memory and, with the sources, on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::device::cuda) struct Spec {
    kind: ElementKind,
    metric: Metric,
    /// Elements in a row if the kernels are unrolled for them, else 0.
    fixed_dim: u32,
}

impl Spec {
    /// For rows of this many elements as the device sees them (bits in words of 32).
    pub(in crate::device::cuda) fn new(kind: ElementKind, metric: Metric, dim: u32) -> Self {
        // Up to here a panel of queries and two of base rows lie in 48 KiB of shared memory.
        let largest = if kind == ElementKind::F64 { 16 } else { 32 };
        Self { kind, metric, fixed_dim: if dim <= largest { dim } else { 0 } }
    }

    pub(in crate::device::cuda) fn kind(&self) -> ElementKind {
        self.kind
    }

    /// Elements in a row as it lies in a panel: whole groups of what the scan adds up without a
    /// branch. See `GROUP` in `kernels/scan.cu`.
    pub(in crate::device::cuda) fn stored_dim(&self, dim: u32) -> u32 {
        match (self.fixed_dim, self.kind) {
            (0, ElementKind::F64) => dim.next_multiple_of(4),
            (0, _) => dim.next_multiple_of(8),
            _ => dim,
        }
    }

    /// Dimensions that the scan stages in shared memory at a time.
    pub(in crate::device::cuda) fn slice(&self) -> u32 {
        match (self.fixed_dim, self.kind) {
            (0, ElementKind::F64) => 8,
            (0, _) => 16,
            (dim, _) => dim,
        }
    }

    /// Panels' slices in the scan's shared memory: two stages of base rows, and the queries once if
    /// they stay for the whole block, else in two stages as well.
    pub(in crate::device::cuda) fn staged_slices(&self) -> u32 {
        if self.fixed_dim == 0 { 4 } else { 3 }
    }

    /// What to compile.
    pub(in crate::device::cuda) fn program(&self) -> Program {
        Program { name: self.to_string(), sources: &SEARCH, defines: self.defines() }
    }

    fn defines(&self) -> [String; 3] {
        let element = match self.kind {
            ElementKind::F32 => "F32",
            ElementKind::F64 => "F64",
            ElementKind::Bits => "BITS",
        };
        [
            format!("-DELEMENT={element}"),
            format!("-DMETRIC={}", self.metric.name().to_uppercase()),
            format!("-DDIM={}", self.fixed_dim),
        ]
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "top_k {}", self.defines().join(" "))
    }
}

/// A module: its sources and its compile-time parameters.
pub(in crate::device::cuda) struct Program {
    name: String,
    sources: &'static [&'static str],
    defines: [String; 3],
}

impl Program {
    /// Lloyd's rounds on rows of this many f32.
    pub(in crate::device::cuda) fn clusters(dim: usize) -> Self {
        let metric = Metric::SqEuclidean.name().to_uppercase();
        let defines =
            ["-DELEMENT=F32".to_string(), format!("-DMETRIC={metric}"), format!("-DDIM={dim}")];
        Self { name: format!("clusters -DDIM={dim}"), sources: &CLUSTERS, defines }
    }

    /// The cubin for an architecture, such as `sm_90`.
    ///
    /// # Errors
    /// [`crate::Error::Nvrtc`] with the compiler's log.
    pub(in crate::device::cuda) fn cubin(&self, arch: &str, cache: &Cache) -> Result<Vec<u8>> {
        let source = self.sources.concat();
        let mut options: Vec<String> = OPTIONS.map(str::to_string).to_vec();
        options.push(format!("-arch={arch}"));
        options.extend_from_slice(&self.defines);

        let (major, minor) = sys::nvrtc_version()?;
        let key = Key::of(&[&source, &options.join(" "), &format!("nvrtc {major}.{minor}")]);
        if let Some(cubin) = cache.load(key) {
            return Ok(cubin);
        }
        let start = Instant::now();
        let cubin = sys::nvrtc_compile(&self.name, &source, &options)?;
        log::debug!("compiled {} for {arch} in {:.2?}", self.name, start.elapsed());
        cache.store(key, &cubin);
        Ok(cubin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_dims_are_unrolled() {
        let slice = |kind, dim| Spec::new(kind, Metric::L2, dim).slice();
        assert_eq!(slice(ElementKind::F32, 32), 32);
        assert_eq!(slice(ElementKind::F32, 33), 16);
        assert_eq!(slice(ElementKind::F64, 16), 16);
        assert_eq!(slice(ElementKind::F64, 17), 8);
    }

    #[test]
    fn a_spec_names_what_kernels_define() {
        let spec = Spec::new(ElementKind::F32, Metric::InnerProduct, 100);
        assert_eq!(spec.to_string(), "top_k -DELEMENT=F32 -DMETRIC=INNER_PRODUCT -DDIM=0");
    }

    #[test]
    fn sources_have_no_includes() {
        assert!(SEARCH.iter().chain(&CLUSTERS).all(|source| !source.contains("#include")));
    }
}
