//! Kernels compiled from source for one device, by the runtime compiler, if the disk cache does not
//! hold them.
//!
//! NVRTC sees no files, so a program's text is assembled here, as by a preprocessor: a line
//! `#include "…"` stands for a file of `kernels/`, once. Constants that host and kernels share are
//! defined by options. `scripts/compile_kernels.py` does the same for every architecture, without a
//! GPU: it reads [`OPTIONS`], and each family's `CONSTANTS`, from the sources.

use std::time::Instant;

use super::cache::{Cache, CacheKey};
use super::sys;
use crate::error::Result;

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../../kernels/", $name)))),*]
    };
}

/// Every file of kernels, by its name in `kernels/`.
const FILES: [(&str, &str); 86] = files![
    "bit_filter.cu",
    "common/arithmetic.cuh",
    "common/copy.cuh",
    "common/fp16.cuh",
    "common/scan.cuh",
    "common/sm80_mma.cuh",
    "common/sm90_ring.cuh",
    "common/sm90_wgmma.cuh",
    "common/sort.cuh",
    "common/warp.cuh",
    "dbscan.cu",
    "dbscan/attach.cuh",
    "dbscan/blocks.cuh",
    "dbscan/compare.cuh",
    "dbscan/count.cuh",
    "dbscan/fp16.cuh",
    "dbscan/link.cuh",
    "dbscan/order.cuh",
    "dbscan/products.cuh",
    "dbscan/query.cuh",
    "dbscan/rows.cuh",
    "dbscan/tiles.cuh",
    "dbscan/union_find.cuh",
    "dbscan/walk.cuh",
    "dbscan_attach.cu",
    "dbscan_count.cu",
    "dbscan_link.cu",
    "filter.cu",
    "filter/bits.cuh",
    "filter/exact.cuh",
    "filter/least.cuh",
    "filter/pack.cuh",
    "filter/sm80.cuh",
    "filter/sm90_hits.cuh",
    "filter/sm90_narrow.cuh",
    "filter/sm90_wide.cuh",
    "filter/state.cuh",
    "filter/swizzled_tile.cuh",
    "filter/thresholds.cuh",
    "filter/unit.cuh",
    "filter_sm80.cu",
    "filter_sm90_narrow.cu",
    "filter_sm90_wide.cu",
    "hashing.cu",
    "hashing/bits.cuh",
    "hashing/keys.cuh",
    "hashing/rows.cuh",
    "hashing/tables.cuh",
    "hashing_rows.cu",
    "kmeans.cu",
    "kmeans/assign_tiles.cuh",
    "kmeans/batched.cuh",
    "kmeans/errors.cuh",
    "kmeans/fp16.cuh",
    "kmeans/hamerly.cuh",
    "kmeans/round.cuh",
    "kmeans/rounds.cuh",
    "kmeans/sm90_warpgroup_assign.cuh",
    "kmeans/sm90_warpgroup_candidates.cuh",
    "kmeans/sm90_warpgroup_find.cuh",
    "kmeans/sort_means.cuh",
    "kmeans/sums.cuh",
    "kmeans/tiles.cuh",
    "kmeans/wide.cuh",
    "kmeans_batched.cu",
    "kmeans_sm90_candidates.cu",
    "kmeans_sm90_find.cu",
    "kmeans_tiles.cu",
    "search.cu",
    "search/distances_of.cuh",
    "search/bucket_self_join.cuh",
    "search/bucket_self_join_small.cuh",
    "search/buckets.cuh",
    "search/exact.cuh",
    "search/lists.cuh",
    "search/merge.cuh",
    "search/pack.cuh",
    "search/prebound.cuh",
    "search/scan.cuh",
    "search_buckets.cu",
    "search_lists.cu",
    "seeding.cu",
    "seeding/bounds.cuh",
    "seeding/draw.cuh",
    "seeding/pairs.cuh",
    "seeding/shares.cuh",
];

/// Options of every compilation. The compiler must not introduce fused multiply-adds: the order and
/// the rounding of every sum are fixed. It compiles the kernels of a program on all cores.
const OPTIONS: [&str; 3] = ["-std=c++17", "-fmad=false", "--split-compile=0"];

/// The first version of NVRTC that is known to compile on all cores.
const SPLITS: (i32, i32) = (13, 0);

/// A module: its file in `kernels/`, and its compile-time parameters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::device::cuda) struct Program {
    file: &'static str,
    defines: Vec<String>,
    /// Whether the module has instructions of this architecture only.
    is_for_one: bool,
}

impl Program {
    /// The program of a file in `kernels/`, with parameters `NAME=value`, and constants.
    pub(in crate::device::cuda) fn new(
        file: &'static str,
        parameters: &[String],
        constants: &[(&str, usize)],
    ) -> Self {
        let constants = constants.iter().map(|(name, value)| format!("-D{name}={value}u"));
        let parameters = parameters.iter().map(|parameter| format!("-D{parameter}"));
        Self { file, defines: parameters.chain(constants).collect(), is_for_one: false }
    }

    /// The same, with instructions of the device's architecture that no later one has.
    pub(in crate::device::cuda) fn for_one_architecture(self) -> Self {
        Self { is_for_one: true, ..self }
    }

    /// The cubin for an architecture, such as `sm_90`.
    ///
    /// # Errors
    /// [`crate::Error::Nvrtc`] with the compiler's log.
    pub(in crate::device::cuda) fn cubin(&self, arch: &str, cache: &Cache) -> Result<Vec<u8>> {
        let source = source(self.file);
        let splits = sys::nvrtc_version()? >= SPLITS;
        let known = OPTIONS.into_iter().filter(|option| splits || !option.starts_with("--split"));
        let mut options: Vec<String> = known.map(str::to_string).collect();
        options.push(format!("-arch={arch}{}", if self.is_for_one { "a" } else { "" }));
        options.extend_from_slice(&self.defines);

        let key = CacheKey::of(&[&source, &options.join(" "), sys::nvrtc_build()?]);
        if let Some(cubin) = cache.load(key) {
            return Ok(cubin);
        }
        let start = Instant::now();
        let name = format!("{} {}", self.file, self.defines.join(" "));
        let cubin = sys::nvrtc_compile(self.file, &name, &source, &options)?;
        log::debug!("compiled {name} for {arch} in {:.2?}", start.elapsed());
        cache.store(key, &cubin);
        Ok(cubin)
    }
}

/// The text of a file, with all files that it includes.
fn source(file: &str) -> String {
    let mut text = String::new();
    include(file, &mut vec![], &mut text);
    text
}

fn include(file: &str, seen: &mut Vec<String>, text: &mut String) {
    if seen.iter().any(|known| known == file) {
        return;
    }
    seen.push(file.to_string());
    let (_, content) = FILES.iter().find(|(name, _)| *name == file).expect("a file of kernels/");
    for line in content.lines() {
        match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            Some(other) => include(other, seen, text),
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULES: [&str; 20] = [
        "bit_filter.cu",
        "dbscan.cu",
        "dbscan_attach.cu",
        "dbscan_count.cu",
        "dbscan_link.cu",
        "filter.cu",
        "filter_sm80.cu",
        "filter_sm90_narrow.cu",
        "filter_sm90_wide.cu",
        "hashing.cu",
        "hashing_rows.cu",
        "kmeans.cu",
        "kmeans_batched.cu",
        "kmeans_sm90_candidates.cu",
        "kmeans_sm90_find.cu",
        "kmeans_tiles.cu",
        "search.cu",
        "search_buckets.cu",
        "search_lists.cu",
        "seeding.cu",
    ];

    #[test]
    fn a_program_has_every_file_it_needs_once() {
        for file in MODULES {
            let text = source(file);
            assert!(!text.contains("#include"), "{file}");
            assert_eq!(text.matches("enum Metric").count(), 1, "{file}");
        }
    }

    #[test]
    fn every_file_is_in_some_program() {
        let all = MODULES.map(source).concat();
        for (name, text) in FILES {
            let last = text.lines().rfind(|line| !line.is_empty()).unwrap();
            let is_used = last.starts_with("#include") || all.contains(last);
            assert!(is_used, "{name}");
        }
    }

    #[test]
    fn constants_are_defined_by_options() {
        let program = Program::new("search.cu", &["DIM=0".to_string()], &[("PANEL", 128)]);
        assert_eq!(program.defines, ["-DDIM=0", "-DPANEL=128u"]);
    }
}
