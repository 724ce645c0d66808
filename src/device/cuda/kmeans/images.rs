//! The images of rows and centroids that groups of warps multiply: their shape, which `kernels/kmeans/by_groups.cuh`
//! relies on.

/// Rows of an image of rows, and of one of centroids.
pub(super) const IMAGE_ROWS: usize = 128;
pub(super) const IMAGE_CENTROIDS: usize = 256;

/// Halves behind the elements of a row.
const BEHIND: usize = 6;

/// Bytes of a multiplication's part of a row, and of a stage of the ring of centroids: two multiplications of an image.
const STEP: usize = 32;
const STAGE: usize = 2 * STEP * IMAGE_CENTROIDS;

/// Shared memory of a block on the only architecture that has such products, but for barriers.
const SHARED: usize = 226 << 10;

/// The fewest stages that keep the groups busy, and the most that are of use.
const LEAST_STAGES: usize = 4;
const MOST_STAGES: usize = 9;

/// The shape for rows of one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Images {
    /// Multiplications for each row, of 16 halves.
    steps: usize,
    /// Stages of the ring of centroids, and images of rows that are in shared memory.
    stages: usize,
    buffers: usize,
}

impl Images {
    /// The shape for rows of so many elements; `None` if they are too long.
    pub(super) fn of(dim: usize) -> Option<Self> {
        let steps = (dim + BEHIND).div_ceil(16);
        let with = |buffers: usize| {
            let left = SHARED.checked_sub(buffers * IMAGE_ROWS * steps * STEP)?;
            let stages = (left / STAGE).min(MOST_STAGES);
            (stages >= LEAST_STAGES).then_some(Self { steps, stages, buffers })
        };
        with(2).or_else(|| with(1))
    }

    /// The parameters of kernels for rows of this shape, or of none.
    pub(super) fn parameters(images: Option<Self>) -> [String; 3] {
        let Self { steps, stages, buffers } =
            images.unwrap_or(Self { steps: 0, stages: 0, buffers: 0 });
        let of = |name: &str, value: usize| format!("GROUP_{name}={value}u");
        [of("STEPS", steps), of("STAGES", stages), of("BUFFERS", buffers)]
    }

    /// Bytes of shared memory of a block.
    pub(super) fn shared(self) -> usize {
        let barriers = 16 * (self.stages + self.buffers * self.steps.div_ceil(2));
        self.stages * STAGE + self.buffers * IMAGE_ROWS * self.steps * STEP + barriers
    }

    /// Bytes of so many rows, and of so many centroids, in whole images.
    pub(super) fn row_bytes(self, rows: usize) -> usize {
        rows.next_multiple_of(IMAGE_ROWS) * self.steps * STEP
    }

    /// See [`row_bytes`](Self::row_bytes).
    pub(super) fn centroid_bytes(self, centroids: usize) -> usize {
        centroids.next_multiple_of(IMAGE_CENTROIDS) * self.steps * STEP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_fit_into_shared_memory() {
        let shape = |steps, stages, buffers| Some(Images { steps, stages, buffers });
        assert_eq!(Images::of(11), shape(2, 9, 2));
        assert_eq!(Images::of(128), shape(9, 9, 2));
        assert_eq!(Images::of(384), shape(25, 7, 1));
        assert_eq!(Images::of(634), shape(40, 4, 1));
        assert_eq!(Images::of(635), None);
        for dim in 1..635 {
            let images = Images::of(dim).unwrap();
            assert!(images.shared() <= 227 << 10, "{dim}: {images:?}");
        }
    }
}
