// Rows and centroids as fp16, and their memory layout.

#include "common/fp16.cuh"
#include "filter/swizzled_tile.cuh"
#include "kmeans/rounds.cuh"

// The position of a row in the list of uncertain rows, and a centroid.
struct Pair {
    u32 row, centroid;
};

// The norms of a row rounded to fp16, and of its rounding error.
struct RoundedNorms {
    float length, error;
};

// The result of the warpgroups for a row: the best and the second best sum, as bits, and the centroid of the
// best.
struct WarpgroupResult {
    int best, second;
    u32 cluster, padding;
};

// The struct of src/device/cuda/kmeans/structs.rs, which documents sizes.
struct Fp16Buffers {
    unsigned char* fp16_rows;       // rows and centroids, scaled and rounded to fp16, …
    unsigned char* fp16_centroids;  // … for warpgroups in swizzled tiles
    RoundedNorms* rounded;
    float* half_squares;   // per centroid, for single warps: minus half the sum of the squared norms of its
                           // fp16 value and of its rounding error
    u32* far;              // per centroid, in whole tiles: whether it is an outlier
    u32* uncertain;        // positions of the uncertain rows
    float* least;          // per uncertain row: the least product or sum of a candidate
    u64* nearest;          // per uncertain row: distance and number of the nearest candidate; f64: its distance, …
    u32* clusters;         // … and its number
    Pair* pairs;
    double* distances;     // per pair, for float64
    WarpgroupResult* results;  // per row: the result of the warpgroups
    const double* origin;  // a point in the middle of the rows
    double scale, unscale;  // … by a power of two, and its inverse
    double absolute;       // maximum difference between products of centroids that are equally near in exact sums, at
                           // any distance: from underflow, or from the norms and product rounding of
                           // directions
    u32 room_for_pairs, padding;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
constexpr bool HAS_TILES = DIM <= TILES_DIM;
#else
constexpr bool HAS_TILES = false;
#endif

constexpr bool IS_WIDE = HAS_TILES && DIM > NARROW_DIM;
constexpr u32 FP16_DIM = IS_WIDE ? (DIM + SLICE - 1) / SLICE * SLICE : (DIM + 15) / 16 * 16;

// Warpgroups multiply swizzled tiles of rows and of centroids with SWIZZLED_STEPS times 16 fp16 numbers per row:
// the elements, three numbers for the term added to a product, and three for that of the other operand.
constexpr bool BY_WARPGROUPS = HAS_TILES && WARPGROUP_STEPS > 0;
constexpr u32 SWIZZLED_STEPS = BY_WARPGROUPS ? WARPGROUP_STEPS : 1;
constexpr u32 SWIZZLED_LOG = 1, SWIZZLED_ROWS = 128, SWIZZLED_CENTROIDS = 256;
static_assert(!BY_WARPGROUPS || DIM + 6 <= SWIZZLED_STEPS * 16,
              "a swizzled row has all elements and six more fp16 numbers");

// Above the bits of every warpgroup sum.
constexpr int WORST = 0x7fffffff;

// Lists an uncertain row at a position, with the least product or sum of a candidate.
__device__ __forceinline__ void note_uncertain(const Fp16Buffers& buffers, u32 at, u32 row, float least) {
    buffers.uncertain[at] = row;
    buffers.least[at] = least;
    buffers.nearest[at] = ~0ull;
    if (ELEMENT == F64) buffers.clusters[at] = ~0u;
}

// Writes a pair at a position of their list, if there is room.
__device__ __forceinline__ void note_pair(const Fp16Buffers& buffers, u32 at, Pair pair) {
    if (at < buffers.room_for_pairs) buffers.pairs[at] = pair;
}

// The byte offset of 8 fp16 numbers of a rounded row.
__device__ __forceinline__ u64 row_chunk(u32 row, u32 chunk) {
    if constexpr (!BY_WARPGROUPS) return ((u64)row * FP16_DIM + chunk * 8) * 2;
    return (u64)(row / SWIZZLED_ROWS) * (SWIZZLED_ROWS * SWIZZLED_STEPS * 32) +
           swizzled_offset(SWIZZLED_STEPS, SWIZZLED_LOG, SWIZZLED_ROWS, row % SWIZZLED_ROWS, chunk * 8);
}

// The byte offset of an element of a centroid in the swizzled tiles.
__device__ __forceinline__ u64 swizzled_place(u32 cluster, u32 j) {
    return (u64)(cluster / SWIZZLED_CENTROIDS) * (SWIZZLED_CENTROIDS * SWIZZLED_STEPS * 32) +
           swizzled_offset(SWIZZLED_STEPS, SWIZZLED_LOG, SWIZZLED_CENTROIDS, cluster % SWIZZLED_CENTROIDS, j);
}

__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }

// A number as the sum of three fp16 numbers times their scales, which holds every float32 below 2.6e8.
constexpr float PART_SCALES[3] = {4096.0f, 2.0f, 0.0009765625f};
__device__ __forceinline__ unsigned short part_of(float value, u32 which) {
    unsigned short half = 0;
#pragma unroll
    for (u32 i = 0; i < 3; i++) {
        if (i > which) break;
        half = to_fp16(value / PART_SCALES[i]);
        value -= from_fp16(half) * PART_SCALES[i];
    }
    return half;
}

// n, an upper bound on half the squared norm of a row, so large that a product minus n is negative: below
// -|h(x) - h(c)|^2 / 2 - |h(x)|^2 / 32 - 1e-3, while summation loses at most 2^-10 (|h(x)| + |h(c)|)^2.
__device__ __forceinline__ float norm_of(const RoundedNorms& row) {
    const float length = row.length + row.error;
    return __fmaf_rn(length * length, 0.53125f, 1e-3f);
}
