// Rounds rows and centroids to fp16.

#include "kmeans/tiles.cuh"

// The least number that three fp16 parts hold, and minus infinity as fp16.
constexpr float LEAST_OF_PARTS = -2.6e8f;
constexpr unsigned short MINUS_INFINITY = 0xfc00;

// Subtracts the origin from a row or centroid, scales and rounds it, by a warp; padding is zero. Norms are
// rounded up: sums of 1,024 squares have a relative error below 3e-6, differences of x and h(x) an error of
// 2^-24 of x. `use` gets each element's index, rounded value and exact value.
template <typename Use>
__device__ __forceinline__ RoundedNorms round_row(const Fp16Buffers& buffers, const Scalar* from,
                                             Use&& use) {
    float length = 0, error = 0;
#pragma unroll
    for (u32 start = 0; start < FP16_DIM; start += 32) {
        const u32 j = start + threadIdx.x % 32;
        if (FP16_DIM % 32 > 0 && j >= FP16_DIM) continue;
        double exact = 0;
        if (j < DIM) exact = ((double)from[j] - buffers.origin[j]) * buffers.scale;
        // Elements of rows are below 256; centroids given by the caller may have any value.
        const float x = (float)exact;
        const unsigned short half = to_fp16(fminf(fmaxf(x, -32768.0f), 32768.0f));
        const float rounded = from_fp16(half);
        length = __fmaf_rn(rounded, rounded, length);
        error = __fmaf_rn(x - rounded, x - rounded, error);
        use(j, half, exact);
    }
    length = __fsqrt_ru(add_lanes(length)) * 1.000002f;
    return {length, __fmaf_ru(__fsqrt_ru(add_lanes(error)), 1.000002f, length * 2 * UNIT)};
}

// Atomic maximum of non-negative floats. Most values are no larger than the current one, and a device
// serialises atomics on one address, so they are filtered by a plain load.
__device__ __forceinline__ void raise(u32* to, float value) {
    if (__float_as_uint(value) > __ldcg(to)) atomicMax(to, __float_as_uint(value));
}

// Rounds all rows, once. A warp per row.
extern "C" __global__ __launch_bounds__(256) void round_rows(Rounds rounds, Fp16Buffers buffers) {
    const u32 row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto put = [&](u32 j, unsigned short half) {
        *reinterpret_cast<unsigned short*>(buffers.fp16_rows + row_chunk(row, j / 8) + j % 8 * 2) = half;
    };
    if (row >= rounds.count) {
        if constexpr (BY_WARPGROUPS) {
            if (row >= (rounds.count + SWIZZLED_ROWS - 1) / SWIZZLED_ROWS * SWIZZLED_ROWS) return;
            for (u32 j = lane; j < SWIZZLED_STEPS * 16; j += 32) put(j, 0);
        }
        return;
    }
    const Scalar* from = rounds.rows + (u64)row * DIM;
    const RoundedNorms rounded = round_row(buffers, from, [&](u32 j, unsigned short half, double) {
        if (!BY_WARPGROUPS || j < DIM) put(j, half);
    });
    if constexpr (BY_WARPGROUPS) {
        const float norm = norm_of(rounded);
        for (u32 j = DIM + lane; j < SWIZZLED_STEPS * 16; j += 32) {
            const u32 i = j - DIM;
            put(j, i < 3 ? to_fp16(PART_SCALES[i]) : i < 6 ? part_of(-norm, i - 3) : 0);
        }
    }
    if (lane > 0) return;
    buffers.rounded[row] = rounded;
    raise(&rounds.status->largest_row, rounded.length);
}

// Estimates from a sample a norm exceeded by only few rows: twice the norm at that quantile. Those rows are then
// compared with all centroids. One block.
extern "C" __global__ __launch_bounds__(1024) void measure_rows(Rounds rounds, Fp16Buffers buffers) {
    // 16 adjacent bins span a factor of two.
    constexpr u32 SHIFT = 19, PER_THREAD = 4, LENGTHS = 1024 * PER_THREAD, SAMPLE = 65536;
    __shared__ u32 counts[LENGTHS];
    for (u32 i = threadIdx.x; i < LENGTHS; i += 1024) counts[i] = 0;
    __syncthreads();
    const u32 step = (rounds.count + SAMPLE - 1) / SAMPLE;
    for (u64 row = (u64)threadIdx.x * step; row < rounds.count; row += 1024 * step) {
        atomicAdd(&counts[__float_as_uint(buffers.rounded[row].length) >> SHIFT & (LENGTHS - 1)], 1u);
    }
    __syncthreads();
    // From the largest norm down.
    const u32 first = LENGTHS - 1 - threadIdx.x * PER_THREAD;
    u32 count = 0, all;
    for (u32 i = 0; i < PER_THREAD; i++) count += counts[first - i];
    u32 longer = sum_before(count, all);
    const u32 few = all / (2 * rounds.k);
    for (u32 i = 0; i < PER_THREAD; i++) {
        const u32 before = longer;
        longer += counts[first - i];
        const u32 end_of_bin = (first - i + 1) << SHIFT, twice = 1 << 23;
        if (before <= few && longer > few) rounds.status->typical_row = end_of_bin + twice;
    }
}

// Rounds all centroids, in every round. A warp per centroid of whole tiles; the centroids that pad the last
// tile are never the nearest.
extern "C" __global__ __launch_bounds__(256) void round_centroids(
    Rounds rounds, Fp16Buffers buffers, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    const u32 cluster = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto put = [&](u32 j, unsigned short half) {
        const u64 place = BY_WARPGROUPS ? swizzled_place(cluster, j) : 2 * fp16_place(cluster, j);
        *reinterpret_cast<unsigned short*>(buffers.fp16_centroids + place) = half;
    };
    if (cluster >= rounds.k) {
        constexpr u32 TOGETHER = BY_WARPGROUPS ? SWIZZLED_CENTROIDS : TILE;
        constexpr u32 ALL = BY_WARPGROUPS ? SWIZZLED_STEPS * 16 : FP16_DIM;
        if (cluster >= (rounds.k + TOGETHER - 1) / TOGETHER * TOGETHER) return;
        for (u32 j = lane; j < ALL; j += 32) put(j, BY_WARPGROUPS && j == DIM ? MINUS_INFINITY : 0);
        if (lane > 0) return;
        buffers.far[cluster] = 1;
        if (BY_WARPS) buffers.half_squares[cluster] = -Limits<float>::infinity();
        return;
    }
    double square = 0, in_parts = 0;
    const RoundedNorms rounded = round_row(buffers, current_centroids(rounds) + (u64)cluster * DIM,
                                [&](u32 j, unsigned short half, double x) {
                                    if (!BY_WARPGROUPS || j < DIM) put(j, half);
                                    const double value = from_fp16(half);
                                    square += x * x;
                                    in_parts += value * value + (x - value) * (x - value);
                                });
    square = add_lanes(square);
    float half_square = (float)(-0.5 * add_lanes(in_parts));
    const float length = __fmul_ru(__double2float_ru(__dsqrt_ru(square)), 1.000001f);
    const float typical = __uint_as_float(rounds.status->typical_row);
    // An outlier; also if swizzled tiles cannot hold its squared norm.
    const bool is_far = !(length <= 2 * typical) || (BY_WARPGROUPS && half_square < LEAST_OF_PARTS);
    if (is_far) {
        // For rows that are no outliers: an outlier centroid 5 times as far away is never the nearest;
        // otherwise its product is raised by the maximum effect of rounding and summation.
        const float error = rounded.error + 0.000495f * typical + 1e-5f, both = typical + length;
        const float raised = error * (both + 3 * error) + (100 * STEPS + 40) * UNIT * both * both;
        half_square = length <= 5 * typical ? __fmaf_ru(raised, 1.01f, half_square) : -Limits<float>::infinity();
    }
    if constexpr (BY_WARPGROUPS) {
        // Smaller values are raised to the least that fits.
        const float shown = fmaxf(half_square, LEAST_OF_PARTS);
        for (u32 j = DIM + lane; j < SWIZZLED_STEPS * 16; j += 32) {
            const u32 i = j - DIM;
            put(j, i < 3 ? part_of(shown, i) : i < 6 ? to_fp16(PART_SCALES[i - 3]) : 0);
        }
    }
    if (lane > 0) return;
    if (BY_WARPS) buffers.half_squares[cluster] = half_square;
    buffers.far[cluster] = is_far;
    if (is_far) {
        rounds.status->has_far = 1;
        return;
    }
    raise(&rounds.status->largest_centroid, length);
    raise(&rounds.status->largest_error, rounded.error);
}
