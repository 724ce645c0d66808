//! The swizzled tiles of rows and centroids that warpgroups multiply: their shape, which
//! `kernels/kmeans/sm90_warpgroup_assign.cuh` relies on.

/// Rows of a swizzled tile of rows, and of centroids.
pub(super) const SWIZZLED_ROWS: usize = 128;
pub(super) const SWIZZLED_CENTROIDS: usize = 256;

/// fp16 numbers behind the elements of a row.
const BEHIND: usize = 6;

/// Bytes of a row in a multiplication, and of a stage of the ring buffer: two multiplications of a
/// tile of centroids.
const STEP: usize = 32;
const STAGE: usize = 2 * STEP * SWIZZLED_CENTROIDS;

/// Shared memory of a block on sm_90, the only architecture with warpgroup products, without
/// mbarriers.
const SHARED: usize = 226 << 10;

/// The fewest stages needed to keep the warpgroups busy, and the most that help.
const LEAST_STAGES: usize = 4;
const MOST_STAGES: usize = 9;

/// The shape of swizzled tiles for one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SwizzledTiles {
    /// Multiplications per row, of 16 fp16 numbers.
    steps: usize,
    /// Stages of the ring buffer of centroids, and tiles of rows in shared memory.
    stages: usize,
    buffers: usize,
}

impl SwizzledTiles {
    /// The shape for rows of `dim` elements; `None` if they are too long.
    pub(super) fn of(dim: usize) -> Option<Self> {
        let steps = (dim + BEHIND).div_ceil(16);
        let with = |buffers: usize| {
            let left = SHARED.checked_sub(buffers * SWIZZLED_ROWS * steps * STEP)?;
            let stages = (left / STAGE).min(MOST_STAGES);
            (stages >= LEAST_STAGES).then_some(Self { steps, stages, buffers })
        };
        with(2).or_else(|| with(1))
    }

    /// The compile-time parameters of kernels with this shape, or without swizzled tiles.
    pub(super) fn parameters(swizzled: Option<Self>) -> [String; 3] {
        let Self { steps, stages, buffers } =
            swizzled.unwrap_or(Self { steps: 0, stages: 0, buffers: 0 });
        let of = |name: &str, value: usize| format!("WARPGROUP_{name}={value}u");
        [of("STEPS", steps), of("STAGES", stages), of("BUFFERS", buffers)]
    }

    /// Bytes of shared memory of a block.
    pub(super) fn shared(self) -> usize {
        let barriers = 16 * (self.stages + self.buffers * self.steps.div_ceil(2));
        self.stages * STAGE + self.buffers * SWIZZLED_ROWS * self.steps * STEP + barriers
    }

    /// Bytes of `rows` rows, in whole swizzled tiles.
    pub(super) fn row_bytes(self, rows: usize) -> usize {
        rows.next_multiple_of(SWIZZLED_ROWS) * self.steps * STEP
    }

    /// Bytes of `centroids` centroids, in whole swizzled tiles.
    pub(super) fn centroid_bytes(self, centroids: usize) -> usize {
        centroids.next_multiple_of(SWIZZLED_CENTROIDS) * self.steps * STEP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_fit_into_shared_memory() {
        let shape = |steps, stages, buffers| Some(SwizzledTiles { steps, stages, buffers });
        assert_eq!(SwizzledTiles::of(11), shape(2, 9, 2));
        assert_eq!(SwizzledTiles::of(128), shape(9, 9, 2));
        assert_eq!(SwizzledTiles::of(384), shape(25, 7, 1));
        const LONGEST: usize = 634;
        assert_eq!(SwizzledTiles::of(LONGEST), shape(40, 4, 1));
        assert_eq!(SwizzledTiles::of(LONGEST + 1), None);
        for dim in 1..=LONGEST {
            let swizzled = SwizzledTiles::of(dim).unwrap();
            assert!(swizzled.shared() <= 227 << 10, "{dim}: {swizzled:?}");
        }
    }
}
