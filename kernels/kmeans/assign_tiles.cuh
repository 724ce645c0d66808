// Assigning rows of many elements on tensor cores. Rows and centroids are rounded to half precision;
// their products, summed in float32, rank the centroids of a row up to a known error. Where the best
// leads the second by more than that, the row's cluster is certain; for the few other rows every
// centroid that may be the nearest is compared exactly.
//
// With x and c a row and a centroid relative to the origin, |x - c|^2 = |x|^2 - 2 (x.c - |c|^2 / 2).
// A product is BIAS + h(x).h(c) - |c|^2 / 2, where h rounds and BIAS makes it positive, so that bits
// compare as integers. Its error, except for BIAS, is at most
//     |x - h(x)| |c| + |h(x)| |c - h(c)|   (Cauchy and Schwarz)
// plus the tensor cores' error in summing. How they add is not documented: on Hopper, 17 numbers are
// truncated to 25 bits of the largest for every 16 elements, which loses at most 10 units of 2^-24 of
// it. The bound allows for 32 units, two for each product: the loss if all numbers are truncated to
// 24 bits of the largest. That largest is below 2 BIAS.

#include "kmeans/tiles.cuh"

constexpr float UNIT = 5.9604645e-8f;         // 2^-24
constexpr u32 PLACES = PART / 4 - 1;          // mask: the low bits of a product hold its position within a part
constexpr u32 WARP_ROWS = 8 * SLOTS;          // rows per warp
constexpr u32 BLOCK_ROWS = WARPS * WARP_ROWS;

__device__ __forceinline__ unsigned short to_half(float x) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
__device__ __forceinline__ float from_half(unsigned short h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}

// Subtracts the origin from a row or centroid, scales and rounds it, by a warp; padding is zero.
// Lengths are rounded up: sums of 1,024 squares have a relative error below 3e-6, differences of x and
// h(x) an error of 2^-24 of x. `use` gets each element's number, rounded value and exact value.
template <typename Use>
__device__ __forceinline__ Rounded round_row(const Halves& halves, const float* from,
                                             Use&& use) {
    float length = 0, error = 0;
#pragma unroll
    for (u32 start = 0; start < HALF_DIM; start += 32) {
        const u32 j = start + threadIdx.x % 32;
        if (HALF_DIM % 32 > 0 && j >= HALF_DIM) continue;
        double exact = 0;
        if (j < DIM) exact = ((double)from[j] - halves.origin[j]) * halves.scale;
        // Rows are below 256; centroids given by the caller may be anywhere.
        const float x = (float)exact;
        const unsigned short half = to_half(fminf(fmaxf(x, -32768.0f), 32768.0f));
        const float rounded = from_half(half);
        length = __fmaf_rn(rounded, rounded, length);
        error = __fmaf_rn(x - rounded, x - rounded, error);
        use(j, half, exact);
    }
    length = __fsqrt_ru(add_lanes(length)) * 1.000002f;
    return {length, __fmaf_ru(__fsqrt_ru(add_lanes(error)), 1.000002f, length * 2 * UNIT)};
}

// Rounds all rows, once. A warp per row.
extern "C" __global__ __launch_bounds__(256) void round_rows(Rounds rounds, Halves halves) {
    const u32 row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rounds.count) return;
    unsigned short* to = halves.half_rows + (u64)row * HALF_DIM;
    const Rounded rounded = round_row(halves, rounds.rows + (u64)row * DIM,
                                      [&](u32 j, unsigned short half, double) { to[j] = half; });
    if (threadIdx.x % 32 > 0) return;
    halves.rounded[row] = rounded;
    atomicMax(&rounds.status->largest_row, __float_as_uint(rounded.length));
}

// Rounds all centroids, every round. A warp per centroid of whole tiles; those that pad the last
// tile are never the nearest.
extern "C" __global__ __launch_bounds__(256) void round_centroids(
    Rounds rounds, Halves halves, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    const u32 cluster = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned short* to = halves.half_centroids;
    if (cluster >= rounds.k) {
        if (cluster >= (rounds.k + TILE - 1) / TILE * TILE) return;
        for (u32 j = lane; j < HALF_DIM; j += 32) to[half_place(cluster, j)] = 0;
        if (lane == 0) halves.half_squares[cluster] = -Limits<float>::infinity();
        return;
    }
    double square = 0;
    const Rounded rounded = round_row(halves, current_centroids(rounds) + (u64)cluster * DIM,
                                      [&](u32 j, unsigned short half, double x) {
                                          to[half_place(cluster, j)] = half;
                                          square += x * x;
                                      });
    square = add_lanes(square);
    if (lane > 0) return;
    halves.half_squares[cluster] = (float)(-0.5 * square);
    const float length = __fmul_ru(__double2float_ru(__dsqrt_ru(square)), 1.000001f);
    atomicMax(&rounds.status->largest_centroid, __float_as_uint(length));
    atomicMax(&rounds.status->largest_error, __float_as_uint(rounded.error));
}

// Error bounds of products, and the bias that makes them positive.
struct Errors {
    float bias, adding_up, largest_centroid, largest_error, underflow;

    explicit __device__ __forceinline__ Errors(const Rounds& rounds, const Halves& halves) {
        const Status* status = rounds.status;
        underflow = (float)halves.underflow;
        largest_centroid = __uint_as_float(status->largest_centroid);
        largest_error = __uint_as_float(status->largest_error);
        const float row = __uint_as_float(status->largest_row);
        bias = 1.01f * (row + largest_centroid) * largest_centroid + 1.0f;
        adding_up = (64 * STEPS + 8) * UNIT * bias;
    }

    // The lead over all others that the best product needs for its centroid to be the nearest in
    // exact sums, whose own relative error is at most DIM + 4 units, except for underflow.
    __device__ __forceinline__ float margin(const Rounded& row, float best) const {
        const float product = row.error * largest_centroid + row.length * largest_error + adding_up;
        const float length = row.length + row.error;
        const float square = fmaxf(length * length - 2 * (best - bias) + 2 * product, 0.0f);
        // Storing the place costs each of two products up to PLACES units of 2^-23 of 2 BIAS.
        const float places = 8 * (PLACES + 1) * UNIT * bias;
        return 1.001f * (2 * product + places + 1.1f * (DIM + 4) * UNIT * square + underflow) +
               1e-30f;
    }
};

// The best two products of a row so far, as bits, and the part that holds the best.
struct Best {
    int first, second;
    u32 part;
};

// The centroid at a place of a part; places are relative to the lane.
__device__ __forceinline__ u32 centroid_at(u32 part, u32 place) {
    return part * PART + place / 2 * 8 + threadIdx.x % 4 * 2 + place % 2;
}

// The bits of a product with the lowest replaced by the place: (product & high_bits) | place.
__device__ __forceinline__ int placed(float product, u32 high_bits, u32 place) {
    int bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
        : "=r"(bits) : "r"(__float_as_int(product)), "r"(high_bits), "r"(place));
    return bits;
}

__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }

// Assigns every row whose cluster the products make certain, and lists the others. A block per
// BLOCK_ROWS rows, from `first_block` on.
extern "C" __global__ __launch_bounds__(32 * WARPS, BLOCKS) void assign_tiles(
    Rounds rounds, Halves halves, u32 first_block, u32 is_last) {
    if (!HAS_TILES || (rounds.status->end != GOING_ON && !is_last)) return;
    const Errors errors(rounds, halves);
    const u32 block = first_block + blockIdx.x;
    const u32 lane = threadIdx.x % 32;
    const u32 first = (block * WARPS + threadIdx.x / 32) * WARP_ROWS + lane / 4;
    Best best[SLOTS];
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        best[i] = {(int)0x80000000, (int)0x80000000, 0};
    }
    // Kept in a register: an instruction has room for only one constant, the place.
    u32 high_bits = ~PLACES;
    asm volatile("" : "+r"(high_bits));
    const auto look = [&](u32 part, const Products& products) {
#pragma unroll
        for (u32 i = 0; i < SLOTS; i++) {
            int one = 0x80000000, two = 0x80000000;
#pragma unroll
            for (u32 n = 0; n < PART / 8; n++) {
                const int a = placed(products[i / 2][n][i % 2 * 2], high_bits, 2 * n);
                const int b = placed(products[i / 2][n][i % 2 * 2 + 1], high_bits, 2 * n + 1);
                const int high = larger(a, b), low = smaller(a, b);
                two = larger(larger(two, low), smaller(one, high));
                one = larger(one, high);
            }
            if (one > best[i].first) {
                best[i] = {one, larger(best[i].first, two), part};
            } else {
                best[i].second = larger(best[i].second, one);
            }
        }
    };
    const auto row_of = [&](u32 i) {
        const u32 row = block * BLOCK_ROWS + i;
        return row < rounds.count ? row : 0;
    };
    multiply_tiles(halves, row_of, errors.bias, 0, (rounds.k + TILE - 1) / TILE, look);
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        int one = best[i].first, two = best[i].second;
        // A single centroid is certain, even if its product is NaN.
        u32 cluster = rounds.k == 1 ? 0 : centroid_at(best[i].part, one & PLACES);
#pragma unroll
        for (u32 apart = 1; apart < 4; apart *= 2) {
            const int other_one = __shfl_xor_sync(0xffffffffu, one, apart);
            const int other_two = __shfl_xor_sync(0xffffffffu, two, apart);
            const u32 other = __shfl_xor_sync(0xffffffffu, cluster, apart);
            two = larger(smaller(one, other_one), larger(two, other_two));
            if (other_one > one) one = other_one, cluster = other;
        }
        const u32 row = first + 8 * i;
        bool is_new = false;
        u32 before = NO_CLUSTER;
        if (lane % 4 == 0 && row < rounds.count) {
            before = rounds.labels[row];
            const float high = __int_as_float(one);
            const float margin = errors.margin(halves.rounded[row], high);
            // Written so that NaN is not certain.
            if (rounds.k == 1 || add(high, -__int_as_float(two)) > margin) {
                is_new = cluster != before;
            } else {
                const u32 at = atomicAdd(&rounds.status->uncertain, 1u);
                halves.uncertain[at] = row;
                halves.least[at] = fmaxf(add(high, -margin), 0.0f);
                halves.nearest[at] = ~0ull;
            }
        }
        move_row(rounds, is_new, row, before, cluster);
    }
}

// Lists the pairs of an uncertain row and a centroid that may be its nearest. Blocks as above, any
// number of them; the tiles are divided along the grid's y dimension.
extern "C" __global__ __launch_bounds__(32 * WARPS, BLOCKS) void find_candidates(
    Rounds rounds, Halves halves, u32 is_last) {
    if (!HAS_TILES || (rounds.status->end != GOING_ON && !is_last)) return;
    const Errors errors(rounds, halves);
    const u32 lane = threadIdx.x % 32, count = rounds.status->uncertain;
    const u32 tiles = (rounds.k + TILE - 1) / TILE;
    const u32 begin = blockIdx.y * tiles / gridDim.y, end = (blockIdx.y + 1) * tiles / gridDim.y;
    if (begin == end) return;
    for (u32 start = blockIdx.x * BLOCK_ROWS; start < count; start += gridDim.x * BLOCK_ROWS) {
        const u32 first = start + threadIdx.x / 32 * WARP_ROWS + lane / 4;
        int least[SLOTS];
#pragma unroll
        for (u32 i = 0; i < SLOTS; i++) {
            const u32 at = first + 8 * i;
            least[i] = at < count ? __float_as_int(halves.least[at]) : 0x7fffffff;
        }
        const auto look = [&](u32 part, const Products& products) {
#pragma unroll
            for (u32 i = 0; i < SLOTS; i++) {
                int most = 0x80000000;
#pragma unroll
                for (u32 n = 0; n < PART / 8; n++) {
                    most = larger(most, __float_as_int(products[i / 2][n][i % 2 * 2]));
                    most = larger(most, __float_as_int(products[i / 2][n][i % 2 * 2 + 1]));
                }
                // A NaN product exceeds any limit, even that of a missing row.
                if (most < least[i] || first + 8 * i >= count) continue;
#pragma unroll
                for (u32 place = 0; place <= PLACES; place++) {
                    const float product = products[i / 2][place / 2][i % 2 * 2 + place % 2];
                    // Centroids that pad the last tile have NaN products if BIAS is infinite.
                    const u32 centroid = centroid_at(part, place);
                    if (__float_as_int(product) < least[i] || centroid >= rounds.k) continue;
                    // Far too many would make the count begin anew.
                    if (__ldcg(&rounds.status->pairs) > halves.room_for_pairs) continue;
                    const u32 at = atomicAdd(&rounds.status->pairs, 1u);
                    if (at < halves.room_for_pairs) {
                        halves.pairs[at] = {first + 8 * i, centroid};
                    }
                }
            }
            __syncwarp();
        };
        const auto row_of = [&](u32 i) { return start + i < count ? halves.uncertain[start + i] : 0; };
        multiply_tiles(halves, row_of, errors.bias, begin, end, look);
        __syncthreads();
    }
}

// Computes the exact distances of the pairs. Any grid.
extern "C" __global__ __launch_bounds__(128) void compare_candidates(
    Rounds rounds, Halves halves, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    const u32 count = rounds.status->pairs;
    if (count > halves.room_for_pairs) {
        if (threadIdx.x == 0 && blockIdx.x == 0) rounds.status->end = CROWDED;
        return;
    }
    const float* centroids = current_centroids(rounds);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const Pair pair = halves.pairs[i];
        const float* row = rounds.rows + (u64)halves.uncertain[pair.row] * DIM;
        const float* centroid = centroids + (u64)pair.centroid * DIM;
        float total = 0;
        if constexpr (DIM % 4 == 0) {
#pragma unroll 8
            for (u32 j = 0; j < DIM; j += 4) {
                const float4 x = *reinterpret_cast<const float4*>(row + j);
                const float4 c = *reinterpret_cast<const float4*>(centroid + j);
                total = Step<SQUARES>::of(x.x, c.x, total);
                total = Step<SQUARES>::of(x.y, c.y, total);
                total = Step<SQUARES>::of(x.z, c.z, total);
                total = Step<SQUARES>::of(x.w, c.w, total);
            }
        } else {
#pragma unroll 8
            for (u32 j = 0; j < DIM; j++) {
                total = Step<SQUARES>::of(row[j], centroid[j], total);
            }
        }
        atomicMin(&halves.nearest[pair.row], (u64)__float_as_uint(total) << 32 | pair.centroid);
    }
}

// Assigns the uncertain rows. A thread per row of the list, any grid of whole warps.
extern "C" __global__ __launch_bounds__(256) void settle(Rounds rounds, Halves halves, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    if (rounds.status->end == CROWDED) return;
    const u32 count = rounds.status->uncertain, step = gridDim.x * blockDim.x;
    for (u32 start = blockIdx.x * blockDim.x; start < count; start += step) {
        const u32 at = start + threadIdx.x;
        u32 row = 0, before = NO_CLUSTER, cluster = NO_CLUSTER;
        if (at < count) {
            row = halves.uncertain[at];
            before = rounds.labels[row];
            cluster = (u32)halves.nearest[at];
            if (cluster >= rounds.k) {
                // No product was large enough, which only overflow can cause.
                rounds.status->end = CROWDED;
                cluster = before;
            }
        }
        move_row(rounds, cluster != before, row, before, cluster);
    }
}
