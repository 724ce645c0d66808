//! The kernels of k-means, and the rows that they support.

use std::sync::{Arc, LazyLock};

use cudarc::driver::{CudaFunction, CudaModule};

use super::row_type::{DOUBLE_BINS, Element, RowType, SINGLE_BINS};
use super::swizzled_tiles::SwizzledTiles;
use crate::device::compose::LARGE_PROBLEM;
use crate::device::cuda::driver::compile::Program;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{Limits, Rate, allow_shared, function};
use crate::device::cuda::driver::modules::Once;
use crate::error::Result;
use crate::metric::Metric;

/// The maximum dimension and number of clusters for sorted centroids (Phillips 2002): the triangle
/// inequality rules out little in high dimensions.
const SORT_MEANS_DIM: usize = 10;
const SORT_MEANS_CLUSTERS: usize = 4096;

/// The maximum dimension of rows that fit into registers as fp16, the elements of a slice of wider
/// rows, and the maximum dimension of rows as fp16.
const NARROW_DIM: usize = 128;
const SLICE: usize = 64;
const TILES_DIM: usize = 1024;

/// Constants that `kernels/kmeans` shares with this folder.
const CONSTANTS: [(&str, usize); 11] = [
    ("TILE", TILE),
    ("NARROW_DIM", NARROW_DIM),
    ("SLICE", SLICE),
    ("TILES_DIM", TILES_DIM),
    ("WARPS", WARPS),
    ("STAGES", STAGES),
    ("LANE_ROWS", LANE_ROWS),
    ("SORTED_ROWS", SORTED_ROWS),
    ("ADDED_ROWS", ADDED_ROWS),
    ("SINGLE_BINS", SINGLE_BINS),
    ("DOUBLE_BINS", DOUBLE_BINS),
];

/// Centroids of a tile in shared memory, warps of a block, and tiles that shared memory has room
/// for.
pub(super) const TILE: usize = 64;
pub(super) const WARPS: usize = 4;
pub(super) const STAGES: usize = 3;
/// Rows that a thread compares with all centroids.
pub(super) const LANE_ROWS: usize = 4;
/// Rows that a block sorts.
pub(super) const SORTED_ROWS: usize = 8192;
/// Rows that a thread of `add_sorted` sums.
pub(super) const ADDED_ROWS: usize = 64;

/// The maximum number of rows: bins of 64 bits hold the sum of as many 32-bit digits.
pub(super) const MOST_ROWS: usize = 1 << 30;

/// Sort keys whose counts fit into shared memory, and the maximum number of them per cluster.
const PLACES: usize = 4096;
const RANKS: usize = 16;

/// The assignment of rows to their nearest centroids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AssignStrategy {
    /// Sorted centroids (Phillips 2002): `kernels/kmeans/sort_means.cuh`.
    SortMeans,
    /// fp16 products with error bounds: `kernels/kmeans/assign_tiles.cuh`.
    Tiles,
}

/// The warpgroup kernels, and the swizzled tiles that they multiply.
#[derive(Debug)]
pub(super) struct WarpgroupKernels {
    pub(super) swizzled: SwizzledTiles,
    pub(super) find: CudaFunction,
    pub(super) candidates: CudaFunction,
}

impl WarpgroupKernels {
    fn of(swizzled: SwizzledTiles, modules: &[Arc<CudaModule>]) -> Result<Self> {
        let load = |module, name| -> Result<CudaFunction> {
            let kernel = function(module, name)?;
            allow_shared(&kernel, swizzled.shared())?;
            Ok(kernel)
        };
        let [find, candidates] = modules else { unreachable!("a module for each kernel") };
        let find = load(find, "warpgroup_find")?;
        Ok(Self { swizzled, find, candidates: load(candidates, "warpgroup_candidates")? })
    }
}

/// The kernels for rows of one kind, loaded on a device.
#[derive(Debug)]
pub(super) struct RoundKernels {
    pub(super) row_type: RowType,
    pub(super) limits: Limits,
    pub(super) add_moved: CudaFunction,
    pub(super) add_sorted: CudaFunction,
    pub(super) find_first_rows: CudaFunction,
    pub(super) find_differing: CudaFunction,
    pub(super) finish_round: CudaFunction,
    pub(super) copy_labels: CudaFunction,
    pub(super) costs: CudaFunction,
    pub(super) list_rows: CudaFunction,
    pub(super) sort_centroids: CudaFunction,
    pub(super) assign_first: CudaFunction,
    pub(super) assign_sort_means: CudaFunction,
    pub(super) assign_last: CudaFunction,
    pub(super) sort_count: CudaFunction,
    pub(super) add_up: CudaFunction,
    pub(super) sort_move: CudaFunction,
    pub(super) round_rows: CudaFunction,
    pub(super) measure_rows: CudaFunction,
    pub(super) round_centroids: CudaFunction,
    pub(super) assign_tiles: CudaFunction,
    pub(super) find_candidates: CudaFunction,
    /// Replacements of `assign_tiles` and `find_candidates` by warpgroup products.
    pub(super) by_warpgroups: Option<WarpgroupKernels>,
    pub(super) take_certain: CudaFunction,
    pub(super) compare_candidates: CudaFunction,
    pub(super) name_nearest: CudaFunction,
    pub(super) settle: CudaFunction,
    /// Rates of rows × centroids × elements: of tensor-core products, and of exact sums.
    pub(super) products: Arc<Rate>,
    pub(super) sums: Arc<Rate>,
}

/// Operations per cycle of a multiprocessor: of tensor-core products, and of sums.
const PRODUCTS_PER_CYCLE: f64 = 512.0;
const SUMS_PER_CYCLE: f64 = 64.0;

impl RoundKernels {
    /// The kernels for such rows, compiled and loaded by the first caller. `by_warpgroups`:
    /// warpgroups may multiply.
    pub(super) fn get(gpu: &Gpu, row_type: RowType, by_warpgroups: bool) -> Result<Arc<Self>> {
        static LOADED: LazyLock<Once<(usize, RowType, bool), RoundKernels>> =
            LazyLock::new(Once::default);
        LOADED.get((gpu.ordinal, row_type, by_warpgroups), || {
            Self::load(gpu, row_type, by_warpgroups)
        })
    }

    fn load(gpu: &Gpu, row_type: RowType, by_warpgroups: bool) -> Result<Self> {
        let (dim, limits) = (row_type.dim, gpu.limits);
        let swizzled = SwizzledTiles::of(dim).filter(|_| by_warpgroups && has_tiles(dim, limits));
        let parameters =
            [&row_type.parameters()[..], &SwizzledTiles::parameters(swizzled)].concat();
        let program = |file| Program::new(file, &parameters, &CONSTANTS);
        let mut programs = vec![program("kmeans.cu"), program("kmeans_tiles.cu")];
        if swizzled.is_some() {
            let files = ["kmeans_sm90_find.cu", "kmeans_sm90_candidates.cu"];
            programs.extend(files.map(|file| program(file).for_one_architecture()));
        }
        let modules = gpu.load_all(&programs)?;
        let by_warpgroups = swizzled.map(|swizzled| WarpgroupKernels::of(swizzled, &modules[2..]));
        let (rounds, tiles) = (&modules[0], &modules[1]);
        let kernels = Self {
            row_type,
            limits,
            add_moved: function(rounds, "add_moved")?,
            add_sorted: function(rounds, "add_sorted")?,
            find_first_rows: function(rounds, "find_first_rows")?,
            find_differing: function(rounds, "find_differing")?,
            finish_round: function(rounds, "finish_round")?,
            copy_labels: function(rounds, "copy_labels")?,
            costs: function(rounds, "costs")?,
            list_rows: function(tiles, "list_rows")?,
            sort_centroids: function(rounds, "sort_centroids")?,
            assign_first: function(rounds, "assign_first")?,
            assign_sort_means: function(rounds, "assign_sort_means")?,
            assign_last: function(rounds, "assign_last")?,
            sort_count: function(rounds, "sort_count")?,
            add_up: function(rounds, "add_up")?,
            sort_move: function(rounds, "sort_move")?,
            round_rows: function(tiles, "round_rows")?,
            measure_rows: function(tiles, "measure_rows")?,
            round_centroids: function(tiles, "round_centroids")?,
            assign_tiles: function(tiles, "assign_tiles")?,
            by_warpgroups: by_warpgroups.transpose()?,
            take_certain: function(tiles, "take_certain")?,
            find_candidates: function(tiles, "find_candidates")?,
            compare_candidates: function(tiles, "compare_candidates")?,
            name_nearest: function(tiles, "name_nearest")?,
            settle: function(tiles, "settle")?,
            products: Arc::new(limits.rate(PRODUCTS_PER_CYCLE)),
            sums: Arc::new(limits.rate(SUMS_PER_CYCLE)),
        };
        if has_tiles(dim, limits) {
            let bytes = stages_bytes(dim);
            allow_shared(&kernels.assign_tiles, bytes)?;
            allow_shared(&kernels.find_candidates, bytes)?;
        }
        Ok(kernels)
    }
}

/// The kernels of small problems, one block per problem, for rows of one kind.
#[derive(Debug)]
pub(super) struct BatchedKernels {
    pub(super) row_type: RowType,
    pub(super) multiprocessors: usize,
    pub(super) cluster: CudaFunction,
    pub(super) finish: CudaFunction,
    /// The rate of rows × centroids × elements.
    pub(super) sums: Arc<Rate>,
}

impl BatchedKernels {
    /// The kernels for such rows, compiled and loaded by the first caller.
    pub(super) fn get(gpu: &Gpu, row_type: RowType) -> Result<Arc<Self>> {
        static LOADED: LazyLock<Once<(usize, RowType), BatchedKernels>> =
            LazyLock::new(Once::default);
        LOADED.get((gpu.ordinal, row_type), || Self::load(gpu, row_type))
    }

    fn load(gpu: &Gpu, row_type: RowType) -> Result<Self> {
        let parameters = [&row_type.parameters()[..], &SwizzledTiles::parameters(None)].concat();
        let module = gpu.load(&Program::new("kmeans_batched.cu", &parameters, &CONSTANTS))?;
        Ok(Self {
            row_type,
            multiprocessors: gpu.limits.multiprocessors,
            cluster: function(&module, "cluster_batched")?,
            finish: function(&module, "finish_batched")?,
            sums: Arc::new(gpu.limits.rate(SUMS_PER_CYCLE)),
        })
    }
}

/// Whether a problem of this size fills the device enough, if it is one of several.
pub(super) fn is_large(rows: usize, k: usize, dim: usize) -> bool {
    rows * k * dim >= LARGE_PROBLEM
}

/// The assignment strategy for such rows and `k` clusters, if there is one.
pub(super) fn assign_strategy(
    row_type: RowType,
    k: usize,
    limits: Limits,
) -> Option<AssignStrategy> {
    let RowType { element, metric, dim, .. } = row_type;
    let has_sort_means = element == Element::F32 && metric == Metric::SqEuclidean;
    if has_sort_means && dim <= SORT_MEANS_DIM && k <= SORT_MEANS_CLUSTERS {
        Some(AssignStrategy::SortMeans)
    } else if has_tiles(dim, limits) {
        Some(AssignStrategy::Tiles)
    } else {
        None
    }
}

fn has_tiles(dim: usize, limits: Limits) -> bool {
    dim <= TILES_DIM && limits.capability.0 >= 8 && stages_bytes(dim) <= limits.shared
}

/// The number of ranks that sorting distinguishes within a cluster; `None` if there are too many
/// clusters.
pub(super) fn ranks(strategy: AssignStrategy, k: usize) -> usize {
    match strategy {
        AssignStrategy::SortMeans => (PLACES / k).clamp(1, RANKS),
        AssignStrategy::Tiles => usize::from(k <= PLACES),
    }
}

impl RoundKernels {
    /// The swizzled tiles of the warpgroup kernels, if these are used.
    pub(super) fn swizzled_tiles(&self) -> Option<SwizzledTiles> {
        self.by_warpgroups.as_ref().map(|kernels| kernels.swizzled)
    }
}

/// Elements of a row as fp16, padded with zeros.
pub(super) fn fp16_dim(dim: usize) -> usize {
    dim.next_multiple_of(if dim > NARROW_DIM { SLICE } else { 16 })
}

/// Shared memory of a block that multiplies tiles.
pub(super) fn stages_bytes(dim: usize) -> usize {
    let slice = if dim > NARROW_DIM { SLICE } else { fp16_dim(dim) };
    STAGES * (TILE * (slice + 8) * 2 + TILE * 4)
}
