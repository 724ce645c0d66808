//! The strategies of k-means and DBSCAN on the CPU: pure functions of a problem's shape.
//!
//! **Rounds of k-means** ([`assignment`]), from 2²⁰ operations a round on (`compose::by_search`). The strategies are
//! tried in this order; one that refuses the rows, for lack of memory or for values near overflow, leaves them to the
//! next. After all others, the rows are searched in every round: a search compares every pair.
//!
//! | strategy | metric | dimensions | centroids |
//! |---|---|---|---|
//! | [`Exhaustive`](AssignmentStrategy::Exhaustive) | `sqeuclidean` | ≤ 32 | ≤ 16, with AVX-512 ≤ 24 |
//! | | `cosine` | ≤ 32 | ≤ 1,024 |
//! | [`Hamerly`](AssignmentStrategy::Hamerly) | `sqeuclidean` | ≤ 15 | ≤ 4,096 |
//! | | | ≤ 32 | ≤ 1,024 |
//! | | | ≤ 256 | ≤ 48, with AVX-512 ≤ 128 |
//! | [`Elkan`](AssignmentStrategy::Elkan) | any | ≥ 33 | ≤ 128, or bounds of a row (`2 k` bytes) ≤ 4 rows, with AVX-512 ≤ ¾ of a row |
//! | [`Drake`](AssignmentStrategy::Drake) | `sqeuclidean` | ≥ 16 | above the limits of `Hamerly` |
//! | | others | ≥ 16 | above 511 up to 32 dimensions, above 48 (with AVX-512 128) up to 256 |
//!
//! Given up for a search after a round: `Elkan` and `Drake` unless [`bounds_pay`], `Exhaustive` for the next strategy
//! unless [`codes_decide`].
//!
//! **First centroids** ([`seeding`]):
//!
//! | dimensions | `k` | strategy |
//! |---|---|---|
//! | ≤ 16 | > 64 | every pair for the first 32 centroids, then a [`CostFilter`] |
//! | 17 to 32 | > 32 | every pair for the first 16 centroids, then a [`CostFilter`] |
//! | > 32 | ≥ 16 | a [`CostFilter`], from [`PREFILTERED_VECTORS`] centroids on with a prefilter |
//! | any | fewer | every pair |
//!
//! **DBSCAN** ([`dbscan`]): rows of bits, by `l1` and of few dimensions are compared directly, behind boxes.
//!
//! | rows | dimensions | strategy |
//! |---|---|---|
//! | ≥ 2,048 | 32 to 16,384 | a sample chooses among products of 16-bit codes on up to 128 directions, on all dimensions, and direct sums |
//! | 256 to 2,047 | 32 to 16,384 | the same without directions |
//! | others | | direct sums |
//!
//! Times are those of `assign` unless stated, and their data sets those of `benches/README.md`; a limit without figures
//! has none in `benches/record`.
//!
//! [`CostFilter`]: super::quantize::cost_filter::CostFilter

use super::simd::level::Level;
use crate::metric::{Metric, Sum};

/// A strategy that assigns rows to their nearest centroids, round after round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AssignmentStrategy {
    /// Every row is compared with all centroids by 16-bit codes in every round.
    Exhaustive,
    /// One lower bound for each row.
    Hamerly,
    /// A lower bound for each row and centroid.
    Elkan,
    /// A list of lower bounds for each row.
    Drake,
}

/// The parts of a k-means problem on which the strategy of its rounds depends.
#[derive(Debug, Clone, Copy)]
pub struct AssignmentShape {
    pub metric: Metric,
    pub level: Level,
    pub dim: usize,
    /// Bytes of an element of a row.
    pub element: usize,
    pub k: usize,
}

/// The limits of [`AssignmentStrategy::Exhaustive`]: uniform8 (1M × 8), K = 16, 218 to 134 ms, K = 64 531 ms where `Hamerly` takes
/// 392 (Zen 5, 2026-11-29); `cosine`, K = 32, 10.6 to 0.62 s where searches were the alternative.
const EXHAUSTIVE_DIM: usize = 32;
const EXHAUSTIVE: usize = 16;
const EXHAUSTIVE_WITH_AVX512: usize = 24;
const EXHAUSTIVE_PRODUCTS: usize = 1024;

/// `(dim, k)` up to which comparing rows with all centroids is as fast as lists of bounds. AVX-512 and Hamerly's bounds
/// extend the range: sift128 at 10%, K = 64, `Hamerly` 1.81 and `Drake` 2.74 s, K = 128 2.14 and 1.99 s (Xeon with VNNI,
/// 2026-11-28); sift128 with AVX2, K = 64, `Hamerly` 0.45 to 0.49 and `Elkan` 0.58 to 0.59 s (Zen 3, 2026-11-28);
/// blobs24, K = 512, `Hamerly` 8 and `Drake` 41 ms.
const FEW_CENTROIDS: [(usize, usize); 3] = [(15, usize::MAX), (32, 511), (256, 48)];
const FEW_CENTROIDS_WITH_AVX512: (usize, usize) = (256, 128);
const FEW_CENTROIDS_WITH_HAMERLY: (usize, usize) = (32, 1024);

/// The most centroids of [`AssignmentStrategy::Hamerly`].
const HAMERLY: usize = 4096;

/// The least dimensions of [`AssignmentStrategy::Elkan`]: with fewer, quantised rows save too little time for their memory.
const ELKAN_DIM: usize = 33;

/// The most memory of a row's bounds, in quarters of the row's own. With AVX-512, comparing a row with many centroids is
/// faster than reading more bounds: sift128 at 10%, K = 1,024, `Drake` 2.06, `Elkan` 2.83 and `Hamerly` 5.73 s;
/// sentences384, K = 512, 0.261, 0.229 and 0.719 s (Xeon with VNNI, 2026-11-28).
const ELKAN_QUARTERS: usize = 16;
const ELKAN_QUARTERS_WITH_AVX512: usize = 3;
/// Bytes that the bounds of a row may take in any case.
const ELKAN_BYTES: usize = 256;

/// The strategies for these rounds, in the order in which they are tried.
pub fn assignment(shape: AssignmentShape) -> impl Iterator<Item = AssignmentStrategy> {
    let has_few = has_few_centroids(shape);
    let all = [
        (AssignmentStrategy::Exhaustive, suits_exhaustive(shape)),
        (
            AssignmentStrategy::Hamerly,
            has_few && shape.metric == Metric::SqEuclidean && shape.k <= HAMERLY,
        ),
        (AssignmentStrategy::Elkan, suits_elkan(shape)),
        (AssignmentStrategy::Drake, !has_few),
    ];
    all.into_iter().filter(|(_, suits)| *suits).map(|(strategy, _)| strategy)
}

fn suits_exhaustive(AssignmentShape { metric, level, dim, k, .. }: AssignmentShape) -> bool {
    let most = match metric {
        Metric::SqEuclidean if level.has_avx512() => EXHAUSTIVE_WITH_AVX512,
        Metric::SqEuclidean => EXHAUSTIVE,
        Metric::Cosine => EXHAUSTIVE_PRODUCTS,
        _ => return false,
    };
    dim <= EXHAUSTIVE_DIM && k <= most
}

/// Whether dimensions and centroids are so few that lists of bounds do not pay.
fn has_few_centroids(AssignmentShape { metric, level, dim, k, .. }: AssignmentShape) -> bool {
    let with_hamerly = (metric == Metric::SqEuclidean).then_some(FEW_CENTROIDS_WITH_HAMERLY);
    let with_avx512 = level.has_avx512().then_some(FEW_CENTROIDS_WITH_AVX512);
    let mut limits = FEW_CENTROIDS.into_iter().chain(with_avx512).chain(with_hamerly);
    limits.any(|(most_dim, most)| dim <= most_dim && k <= most)
}

/// Whether the bounds of a row are small compared with the row.
fn suits_elkan(AssignmentShape { level, dim, element, k, .. }: AssignmentShape) -> bool {
    let quarters = if level.has_avx512() { ELKAN_QUARTERS_WITH_AVX512 } else { ELKAN_QUARTERS };
    dim >= ELKAN_DIM && k * size_of::<u16>() <= (dim * element / 4 * quarters).max(ELKAN_BYTES)
}

/// Whether bounds decided enough in a round that computed this many pairs: up to one in `ONE_COMPUTED_IN` of all, and
/// `FREE` of each row.
pub fn bounds_pay(computed: usize, rows: usize, k: usize) -> bool {
    const ONE_COMPUTED_IN: usize = 8;
    const FREE: usize = 4;
    computed <= rows * (k / ONE_COMPUTED_IN + FREE)
}

/// Whether 16-bit codes decide enough rows that [`AssignmentStrategy::Exhaustive`] is the fastest.
pub fn codes_decide(undecided: usize, rows: usize) -> bool {
    const ONE_UNDECIDED_IN: usize = 8;
    undecided <= rows / ONE_UNDECIDED_IN
}

/// The strategy by which first centroids are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeedingStrategy {
    /// The number of centroids that are chosen by computing every pair, before integer bounds decide most pairs.
    pub exhaustive: usize,
    /// Whether a transposed copy of the rows is kept to compute every pair. Blocks of rows are otherwise transposed
    /// whenever they are read.
    pub is_transposed: bool,
}

/// `(dim, centroids)`: the first candidates lower the costs of many rows. Hence, with up to `dim` dimensions, every pair
/// is computed for the first `centroids`, or for all if `k ≤ 2 · centroids`.
const COMPUTED_FIRST: [(usize, usize); 2] = [(16, 32), (32, 16)];

/// The least `k` for which quantising all rows pays.
const QUANTIZED: usize = 16;

/// Up to this `k`, transposing rows whenever they are read is faster than writing to new memory.
const READ_ONCE: usize = 4;

/// From this many vectors on, the prefilter of a [`CostFilter`](super::quantize::cost_filter::CostFilter) pays: the first
/// vectors are near to many rows. sift128, whole seeding: K = 1,024 2.0 to 1.7 s, K = 128 88 to 108 ms.
pub const PREFILTERED_VECTORS: usize = 768;

/// The strategy of a seeding. Integer bounds: 50,000 rows of sift128, K = 1,024, 72 to 0.3 s.
pub fn seeding(dim: usize, k: usize) -> SeedingStrategy {
    let first = COMPUTED_FIRST.into_iter().find(|(most_dim, _)| dim <= *most_dim);
    let exhaustive = match first {
        Some((_, first)) if k > 2 * first => first,
        None if k >= QUANTIZED => 0,
        _ => k,
    };
    SeedingStrategy { exhaustive, is_transposed: k > READ_ONCE }
}

/// A strategy that compares rows of numbers with a tile of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DbscanStrategy {
    /// Sums in the rows' own type.
    Direct,
    /// Products of 16-bit codes first, if a sample says that they pay: on up to this many directions, or on all
    /// dimensions.
    Sampled { directions: usize },
}

/// A group of at least this many rows uses all threads by itself.
pub const LARGE_GROUP: usize = 1 << 14;

/// The least rows, and the dimensions, between which a sample may pay. With more dimensions bounds are loose.
const SAMPLED_ROWS: usize = 256;
const SAMPLED_DIM: std::ops::RangeInclusive<usize> = 32..=1 << 14;

/// Fewer rows are not worth finding directions for.
const PROJECTED_ROWS: usize = 2048;

/// The most directions.
pub const DIRECTIONS: usize = 128;

/// The strategy for a group of rows. Projections: sentences384, eps 0.3, count 237 to 44 ms.
pub fn dbscan(metric: Metric, rows: usize, dim: usize) -> DbscanStrategy {
    let has_product = matches!(metric.sum(), Sum::Squares | Sum::Products);
    if rows < SAMPLED_ROWS || !SAMPLED_DIM.contains(&dim) || !has_product {
        return DbscanStrategy::Direct;
    }
    let directions = if rows < PROJECTED_ROWS { 0 } else { DIRECTIONS.min(dim / 2) };
    DbscanStrategy::Sampled { directions }
}

/// Cost of a pair whose sum over `products` codes passes with this probability, in terms of such a sum: 50 for a
/// dimension in a float64 sum.
pub fn filter_cost(dim: usize, products: f64, passing: f64) -> f64 {
    const OF_SUM: f64 = 50.0;
    products + passing * OF_SUM * dim as f64
}

/// The share of a pair in the cost of projecting rows on directions.
pub fn projection_cost(dim: usize, directions: usize, rows: usize) -> f64 {
    const OF_PROJECTION: f64 = 2.0;
    OF_PROJECTION * dim as f64 * directions as f64 / rows as f64
}

/// Whether a pair of this cost is faster than a direct sum, 64 of which are computed at once.
pub fn filter_pays(cost: f64, dim: usize) -> bool {
    const OF_TILES: f64 = 2.0;
    cost <= OF_TILES * dim as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategies_are_those_of_the_table() {
        use AssignmentStrategy::{Drake, Elkan, Exhaustive, Hamerly};
        let of = |metric, dim, k| {
            let level = Level::all().pop().expect("every processor has a level");
            assignment(AssignmentShape { metric, level, dim, element: 4, k }).collect::<Vec<_>>()
        };
        let (squares, cosine) = (Metric::SqEuclidean, Metric::Cosine);
        assert_eq!(of(squares, 8, 16), [Exhaustive, Hamerly]);
        assert_eq!(of(squares, 8, 17), [Hamerly]);
        assert!(of(squares, 15, 4097).is_empty());
        assert_eq!(of(squares, 32, 1025), [Drake]);
        assert_eq!(of(squares, 128, 48), [Hamerly, Elkan]);
        assert_eq!(of(squares, 128, 49), [Elkan, Drake]);
        assert_eq!(of(squares, 128, 1025), [Drake]);
        assert_eq!(of(cosine, 32, 511), [Exhaustive]);
        assert_eq!(of(cosine, 32, 1025), [Drake]);
        assert_eq!(of(cosine, 33, 128), [Elkan, Drake]);
        assert!(of(Metric::L1, 8, 2).is_empty());
        let exhaustive = |dim, k| seeding(dim, k).exhaustive;
        assert_eq!([exhaustive(16, 64), exhaustive(16, 65), exhaustive(17, 33)], [64, 32, 16]);
        assert_eq!([exhaustive(33, 15), exhaustive(33, 16)], [15, 0]);
        assert_eq!(dbscan(squares, 255, 64), DbscanStrategy::Direct);
        assert_eq!(dbscan(squares, 2047, 64), DbscanStrategy::Sampled { directions: 0 });
        assert_eq!(dbscan(cosine, 2048, 64), DbscanStrategy::Sampled { directions: 32 });
        assert_eq!(dbscan(Metric::L1, 2048, 64), DbscanStrategy::Direct);
    }
}
