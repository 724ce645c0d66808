// Assignment of rows with many elements on tensor cores: by products of single warps here, or by warpgroups in
// `sm90_warpgroup_find.cuh`. Rows and centroids are rounded to fp16; their products, summed in float32, order a
// row's centroids up to a known error. If the best leads the second by more than this error, the row's cluster is
// certain; for the remaining rows every candidate, a centroid that may be the nearest, is compared exactly.
//
// Let x and c be a row and a centroid relative to the origin, h(x) and h(c) their fp16 values, and e(x) = x - h(x) and
// e(c) their errors. A product is BIAS + p, with
//     p = h(x).h(c) - (|h(c)|^2 + |e(c)|^2) / 2 = (|h(x)|^2 - |h(x) - h(c)|^2 - |e(c)|^2) / 2,
// where BIAS makes it positive, so that bits compare as integers. It approximates (|h(x)|^2 - |x - c|^2) / 2, up to
// (h(x) - h(c)).(e(x) - e(c)) + |e(x) - e(c)|^2 / 2 - |e(c)|^2 / 2, which is at most, with E = |e(x)| + |e(c)|,
//     |h(x) - h(c)| E + E^2 <= |x - c| E + 2 E^2   (Cauchy and Schwarz).
// So the error is the smaller, the nearer the centroid; centroids farther than the best do not matter.
// The summation error of tensor cores, whose rounding is not documented, is added: on Hopper, 17 numbers are truncated
// to 25 bits of the largest for every 16 elements, which loses at most 10 units of 2^-24 of it. The bound is 32
// units, two for each product: the loss of truncating all numbers to 24 bits of the largest, which is below 2 BIAS.

#include "kmeans/errors.cuh"
#include "kmeans/hamerly.cuh"
#include "kmeans/round.cuh"

constexpr u32 PLACES = PART / 4 - 1;          // mask: the low bits of a product hold its position within a part
constexpr u32 WARP_ROWS = 8 * SLOTS;          // rows per warp
constexpr u32 BLOCK_ROWS = WARPS * WARP_ROWS;
constexpr u32 PENDING = 64;  // pairs that a warp buffers

// Whether a row or the centroid of its best product is an outlier, or the exact sums are too coarse to tell
// centroids apart.
__device__ __forceinline__ bool is_far_away(const Rounds& rounds, const Fp16Buffers& buffers, const RoundedNorms& row,
                                            u32 cluster) {
    const float typical = __uint_as_float(rounds.status->typical_row);
    const bool are_coarse = !(buffers.absolute <= (double)typical * typical);
    return row.length > typical || buffers.far[cluster] != 0 || are_coarse;
}

// A lower bound on the gap of a row, from a lower bound on its best product and an upper bound on its second
// best. Unknown if a centroid is an outlier, whose product does not give its distance.
__device__ __forceinline__ float gap_of(const Rounds& rounds, const Fp16Buffers& buffers, const Errors& errors,
                                        const RoundedNorms& row, float2 products) {
    if (rounds.status->has_far != 0) return not_known();
    const float error = row.error + errors.largest_error, square = row.length * row.length;
    // From the rounded row to rounded centroids: see above. Lengths are up to 2e-6 too large.
    const float near = 1.00001f * (1.00001f * square - 2 * products.x);
    const float far = 0.99999f * (0.99999f * square - 2 * products.y) - errors.largest_error * errors.largest_error;
    const float nearest = __fadd_ru(__fsqrt_ru(fmaxf(near, 0.0f)), error);
    const float other = __fadd_rd(__fsqrt_rd(fmaxf(far, 0.0f)), -error);
    const float gap = gap_between(nearest, other, RELATIVE);
    const float lost = __fmaf_ru(2, __fsqrt_ru(errors.absolute), 1e-22f);
    return __double2float_rd(__dmul_rd(__fadd_rd(gap, -lost), buffers.unscale));
}

// The best two products of a row so far, as bits, and the part that holds the best.
struct Best {
    int first, second;
    u32 part;
};

// The centroid at a place of a part; places are relative to the lane.
__device__ __forceinline__ u32 centroid_at(u32 part, u32 place) {
    return part * PART + place / 2 * 8 + threadIdx.x % 4 * 2 + place % 2;
}

// The bits of a product, the lowest of which are replaced by its place: (product & high_bits) | place.
// PTX ISA, Logic and Shift Instructions: lop3.
__device__ __forceinline__ int placed(float product, u32 high_bits, u32 place) {
    int bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
        : "=r"(bits) : "r"(__float_as_int(product)), "r"(high_bits), "r"(place));
    return bits;
}

// Assigns every row whose cluster the products make certain, and lists the uncertain rows. A block per
// BLOCK_ROWS rows to compare, from `first_block` on.
extern "C" __global__ __launch_bounds__(32 * WARPS, BLOCKS) void assign_tiles(
    Rounds rounds, Fp16Buffers buffers, u32 first_block, u32 is_last) {
    if (!BY_WARPS || (rounds.status->end != GOING_ON && !is_last)) return;
    const Errors errors(rounds, buffers);
    const Compared compared(rounds);
    const u32 block = first_block + blockIdx.x;
    if (block * BLOCK_ROWS >= compared.count) return;
    const u32 lane = threadIdx.x % 32;
    const u32 first = (block * WARPS + threadIdx.x / 32) * WARP_ROWS + lane / 4;
    Best best[SLOTS];
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        best[i] = {(int)0x80000000, (int)0x80000000, 0};
    }
    // Kept in a register: lop3 has room for one constant, the place.
    u32 high_bits = ~PLACES;
    asm volatile("" : "+r"(high_bits));
    const auto examine = [&](u32 part, const Products& products) {
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
        const u32 place = block * BLOCK_ROWS + i;
        return place < compared.count ? compared.row(place) : 0;
    };
    multiply_tiles(buffers, row_of, errors.bias, 0, (rounds.k + TILE - 1) / TILE, examine);
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        int one = best[i].first, two = best[i].second;
        // A single centroid is certain, even if its product is NaN.
        u32 cluster = rounds.k == 1 ? 0 : centroid_at(best[i].part, one & PLACES);
#pragma unroll
        for (u32 stride = 1; stride < 4; stride *= 2) {
            const int other_one = __shfl_xor_sync(0xffffffffu, one, stride);
            const int other_two = __shfl_xor_sync(0xffffffffu, two, stride);
            const u32 other = __shfl_xor_sync(0xffffffffu, cluster, stride);
            two = larger(smaller(one, other_one), larger(two, other_two));
            if (other_one > one) one = other_one, cluster = other;
        }
        const u32 place = first + 8 * i;
        bool is_new = false;
        u32 row = 0, before = NO_CLUSTER;
        if (lane % 4 == 0 && place < compared.count) {
            row = compared.row(place);
            before = rounds.labels[row];
            const RoundedNorms rounded = buffers.rounded[row];
            const float high = __int_as_float(one), low = __int_as_float(two);
            const float margin = errors.margin(rounded, high, PLACES);
            float gap = not_known();
            // Written so that NaN is uncertain.
            const bool is_far = is_far_away(rounds, buffers, rounded, cluster);
            if (rounds.k == 1 || (!is_far && add(high, -low) > margin)) {
                is_new = cluster != before;
                const float off = errors.adding_up + errors.stored(PLACES);
                gap = gap_of(rounds, buffers, errors, rounded, {high - errors.bias - off, low - errors.bias + off});
            } else {
                const u32 at = atomicAdd(&rounds.status->uncertain, 1u);
                note_uncertain(buffers, at, row, is_far ? ALL : Errors::limit(add(high, -margin)));
            }
            note_gap(rounds, row, cluster, gap);
        }
        move_row(rounds, is_new, row, before, cluster);
    }
}

// Assigns every row whose cluster the warpgroups' sums make certain, and lists the uncertain rows. A thread
// per row to compare.
extern "C" __global__ __launch_bounds__(256) void take_certain(Rounds rounds, Fp16Buffers buffers, u32 is_last) {
    if (!BY_WARPGROUPS || (rounds.status->end != GOING_ON && !is_last)) return;
    const Compared compared(rounds);
    if (blockIdx.x * blockDim.x >= compared.count) return;
    const u32 place = blockIdx.x * blockDim.x + threadIdx.x;
    const Errors errors(rounds, buffers);
    bool is_new = false, is_uncertain = false;
    u32 row = 0, before = NO_CLUSTER, cluster = NO_CLUSTER;
    float least = 0;
    if (place < compared.count) {
        row = compared.row(place);
        const uint4 result = *reinterpret_cast<const uint4*>(&buffers.results[place]);
        const float best = __uint_as_float(result.x), second = __uint_as_float(result.y);
        const RoundedNorms rounded = buffers.rounded[row];
        const WarpgroupMargins margins(errors, rounded, best);
        before = rounds.labels[row];
        cluster = rounds.k == 1 ? 0 : result.z;
        // A single centroid is certain, even if its sum is NaN; otherwise the condition is written so that
        // NaN is uncertain. Equal sums do not tell which centroid is best, and both may be outliers.
        const bool is_tie = result.x == result.y && rounds.status->has_far != 0;
        const bool is_far = is_tie || is_far_away(rounds, buffers, rounded, cluster);
        is_uncertain = !(rounds.k == 1 || (!is_far && add(best, -second) > margins.lead));
        const float norm = norm_of(rounded), off = margins.adding_up;
        const float2 products = {best + norm - off, second + norm + off};
        note_gap(rounds, row, cluster, is_uncertain ? not_known() : gap_of(rounds, buffers, errors, rounded, products));
        is_new = !is_uncertain && cluster != before;
        least = is_far ? __int_as_float(WORST) : margins.least;
    }
    const u32 at = place_in(&rounds.status->moved, &rounds.status->uncertain, is_new, is_uncertain);
    if (is_new) record(rounds, at, row, before, cluster);
    if (is_uncertain) note_uncertain(buffers, at, row, least);
}

// Pairs that a warp has found, buffered in shared memory: one atomic on the length of the list for many
// pairs. Pairs that overflow the buffer are appended one by one.
struct Pending {
    u32 count;
    Pair pairs[PENDING];

    // May be called by any lanes.
    __device__ __forceinline__ void add(const Rounds& rounds, const Fp16Buffers& buffers, Pair pair) {
        const u32 place = atomicAdd(&count, 1u);
        if (place < PENDING) {
            pairs[place] = pair;
        } else if (__ldcg(&rounds.status->pairs) <= buffers.room_for_pairs) {
            // The check keeps the counter from wrapping around.
            note_pair(buffers, atomicAdd(&rounds.status->pairs, 1u), pair);
        }
    }

    // Appends all buffered pairs to the list if there are at least `least`. Called by all lanes.
    __device__ __forceinline__ void flush(const Rounds& rounds, const Fp16Buffers& buffers, u32 least) {
        __syncwarp();
        const u32 buffered = count < PENDING ? count : PENDING;
        if (buffered < least) return;
        u32 start = buffers.room_for_pairs;
        if (Warp::rank() == 0 && __ldcg(&rounds.status->pairs) <= buffers.room_for_pairs) {
            start = atomicAdd(&rounds.status->pairs, buffered);
        }
        start = __shfl_sync(0xffffffffu, start, 0);
        for (u32 i = Warp::rank(); i < buffered; i += 32) note_pair(buffers, start + i, pairs[i]);
        __syncwarp();
        if (Warp::rank() == 0) count = 0;
        __syncwarp();
    }
};

// Lists the candidates of uncertain rows, as pairs of a row and a centroid. Blocks as above, any number of
// them; the tiles are divided along the grid's y dimension.
extern "C" __global__ __launch_bounds__(32 * WARPS, BLOCKS) void find_candidates(
    Rounds rounds, Fp16Buffers buffers, u32 is_last) {
    if (!BY_WARPS || (rounds.status->end != GOING_ON && !is_last)) return;
    const Errors errors(rounds, buffers);
    const u32 lane = threadIdx.x % 32, count = rounds.status->uncertain;
    const u32 tiles = (rounds.k + TILE - 1) / TILE;
    const u32 begin = blockIdx.y * tiles / gridDim.y, end = (blockIdx.y + 1) * tiles / gridDim.y;
    if (begin == end) return;
    __shared__ Pending all_pending[WARPS];
    Pending& pending = all_pending[threadIdx.x / 32];
    if (lane == 0) pending.count = 0;
    __syncwarp();
    for (u32 start = blockIdx.x * BLOCK_ROWS; start < count; start += gridDim.x * BLOCK_ROWS) {
        const u32 first = start + threadIdx.x / 32 * WARP_ROWS + lane / 4;
        int least[SLOTS];
#pragma unroll
        for (u32 i = 0; i < SLOTS; i++) {
            const u32 at = first + 8 * i;
            least[i] = at < count ? __float_as_int(buffers.least[at]) : 0x7fffffff;
        }
        const auto examine = [&](u32 part, const Products& products) {
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
                    // The centroid may be one that pads the last tile, if every product passes.
                    const u32 centroid = centroid_at(part, place);
                    if (__float_as_int(product) < least[i] || centroid >= rounds.k) continue;
                    pending.add(rounds, buffers, {first + 8 * i, centroid});
                }
            }
            pending.flush(rounds, buffers, PENDING / 2);
        };
        const auto row_of = [&](u32 i) { return start + i < count ? buffers.uncertain[start + i] : 0; };
        multiply_tiles(buffers, row_of, errors.bias, begin, end, examine);
        __syncthreads();
    }
    pending.flush(rounds, buffers, 1);
}

// The distance of a row from a centroid, from the exact sum.
__device__ __forceinline__ Real exact_distance(const Scalar* row, const Scalar* centroid) {
    Total total = 0;
    if constexpr (HAS_VECTORS) {
#pragma unroll 8
        for (u32 j = 0; j < DIM; j += VECTOR) {
            const Vector x = *reinterpret_cast<const Vector*>(row + j);
            const Vector c = *reinterpret_cast<const Vector*>(centroid + j);
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) total = add_pair(x.parts[i], c.parts[i], total);
        }
    } else {
#pragma unroll 8
        for (u32 j = 0; j < DIM; j++) total = add_pair(row[j], centroid[j], total);
    }
    return finish_pair(total);
}

// The bits of a distance; non-negative numbers are ordered as their bits.
__device__ __forceinline__ u64 bits_of(double distance) { return (u64)__double_as_longlong(distance); }

// Computes the exact distances of the pairs. Any grid.
extern "C" __global__ __launch_bounds__(128) void compare_candidates(
    Rounds rounds, Fp16Buffers buffers, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    const u32 count = rounds.status->pairs;
    if (count > buffers.room_for_pairs) {
        if (threadIdx.x == 0 && blockIdx.x == 0) rounds.status->end = GIVEN_UP;
        return;
    }
    const Scalar* centroids = current_centroids(rounds);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const Pair pair = buffers.pairs[i];
        const Scalar* row = rounds.rows + (u64)buffers.uncertain[pair.row] * DIM;
        const Real distance = exact_distance(row, centroids + (u64)pair.centroid * DIM);
        if constexpr (ELEMENT == F64) {
            buffers.distances[i] = distance;
            atomicMin(&buffers.nearest[pair.row], bits_of(distance));
        } else {
            atomicMin(&buffers.nearest[pair.row], (u64)__float_as_uint(distance) << 32 | pair.centroid);
        }
    }
}

// For float64: finds the first of the centroids that are nearest to an uncertain row. Any grid.
extern "C" __global__ __launch_bounds__(256) void name_nearest(Rounds rounds, Fp16Buffers buffers, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    if (ELEMENT != F64 || rounds.status->end == GIVEN_UP) return;
    const u32 count = rounds.status->pairs;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const Pair pair = buffers.pairs[i];
        if (bits_of(buffers.distances[i]) == buffers.nearest[pair.row]) {
            atomicMin(&buffers.clusters[pair.row], pair.centroid);
        }
    }
}

// Assigns the uncertain rows. A thread per row of the list, any grid.
extern "C" __global__ __launch_bounds__(256) void settle(Rounds rounds, Fp16Buffers buffers, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    if (rounds.status->end == GIVEN_UP) return;
    const u32 count = rounds.status->uncertain, step = gridDim.x * blockDim.x;
    for (u32 start = blockIdx.x * blockDim.x; start < count; start += step) {
        const u32 at = start + threadIdx.x;
        u32 row = 0, before = NO_CLUSTER, cluster = NO_CLUSTER;
        if (at < count) {
            row = buffers.uncertain[at];
            before = rounds.labels[row];
            cluster = ELEMENT == F64 ? buffers.clusters[at] : (u32)buffers.nearest[at];
            if (cluster >= rounds.k) {
                // No product reached the limit, which only overflow can cause.
                rounds.status->end = GIVEN_UP;
                cluster = before;
            }
        }
        move_row(rounds, cluster != before, row, before, cluster);
        if (is_last && at < count) rounds.labels[row] |= UNDECIDED;
    }
}
