// The steps of a Lloyd round after rows are assigned: sums, means, and whether it was the last
// round.

#include "kmeans/rounds.cuh"

// Converts an element to steps. False if it is not a whole number of them, or above the limit.
__device__ __forceinline__ bool in_steps(const Sums& sums, u32 j, float x, long long& whole) {
    const double steps = __dmul_rn((double)x, sums.inverse[j]);
    whole = __double2ll_rn(steps);
    return fabs(steps) <= sums.limit && __ll2double_rn(whole) == steps;
}

// Adds an element to the BINS of a sum, or subtracts it: its 24 bits lie in two of them. Bins are of
// 32 bits and count multiples of 2^-149: they hold any float32 and, with the carry out of the last
// one, any sum of 2^32 of them.
__device__ __noinline__ void add_to_bins(u64* bins, float x, bool is_minus) {
    const u32 bits = __float_as_uint(x), exponent = bits >> 23 & 0xff;
    const u64 mantissa = (bits & 0x7fffff) | (exponent > 0 ? 0x800000 : 0);
    const u32 position = exponent > 0 ? exponent - 1 : 0;
    const u64 shifted = mantissa << position % 32;
    const u64 low = shifted & 0xffffffff, high = shifted >> 32;
    const bool is_negative = (bits >> 31 != 0) != is_minus;
    atomicAdd(&bins[position / 32], is_negative ? 0 - low : low);
    atomicAdd(&bins[position / 32 + 1], is_negative ? 0 - high : high);
}

// Adds an element to a wide sum, or subtracts it.
__device__ __forceinline__ void add_wide(const Sums& sums, u32 cluster, u32 j, float x,
                                         bool is_minus) {
    sums.is_wide[cluster] = 1;
    add_to_bins(reinterpret_cast<u64*>(sums.wide) + ((u64)cluster * DIM + j) * BINS, x, is_minus);
}

// Adds an element to the sum of a cluster, or subtracts it.
__device__ __forceinline__ void add_element(const Sums& sums, u32 cluster, u32 j, float x,
                                            bool is_minus) {
    long long whole;
    if (in_steps(sums, j, x, whole)) {
        atomicAdd(reinterpret_cast<u64*>(sums.sums + (u64)cluster * DIM + j),
                  is_minus ? 0 - (u64)whole : (u64)whole);
    } else {
        add_wide(sums, cluster, j, x, is_minus);
    }
}

__device__ __forceinline__ void add_count(const Sums& sums, u32 cluster, u64 rows) {
    atomicAdd(reinterpret_cast<u64*>(sums.counts + cluster), rows);
}

// Adds the rows that moved to their new clusters, and subtracts them from their old ones. There are
// `step` threads; neighbouring ones add neighbouring elements.
__device__ __forceinline__ void add_moved_rows(
    const Rounds& rounds, const Sums& sums, u64 first, u64 step) {
    const u64 elements = (u64)rounds.status->moved * DIM;
    for (u64 i = first; i < elements; i += step) {
        const u32 j = i % DIM;
        const Moved moved = rounds.moved[i / DIM];
        const u32 to = rounds.labels[moved.row];
        const float x = rounds.rows[(u64)moved.row * DIM + j];
        add_element(sums, to, j, x, false);
        if (j == 0) add_count(sums, to, 1);
        if (moved.before == NO_CLUSTER) continue;
        add_element(sums, moved.before, j, x, true);
        if (j == 0) add_count(sums, moved.before, 0 - 1ull);
    }
}

// Any grid.
extern "C" __global__ __launch_bounds__(256) void add_moved(Rounds rounds, Sums sums) {
    if (rounds.status->end != GOING_ON) return;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    add_moved_rows(rounds, sums, first, (u64)gridDim.x * blockDim.x);
}

// Adds all rows to their clusters, which are empty before; rows of a cluster follow each other in `labels`, and are at
// these positions, or at their own. A thread sums one element of ADDED_ROWS rows, and adds the sum to the cluster's where
// the cluster changes.
extern "C" __global__ __launch_bounds__(256) void add_sorted(
    Rounds rounds, Sums sums, const u32* labels, const u32* positions) {
    if (rounds.status->end != GOING_ON) return;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 j = thread % DIM;
    const u64 first = thread / DIM * ADDED_ROWS;
    const u64 last = first + ADDED_ROWS < rounds.count ? first + ADDED_ROWS : rounds.count;
    if (first >= rounds.count) return;
    u32 cluster = labels[first];
    u64 sum = 0, rows = 0;
    const auto pass_on = [&] {
        atomicAdd(reinterpret_cast<u64*>(sums.sums + (u64)cluster * DIM + j), sum);
        if (j == 0) add_count(sums, cluster, rows);
        sum = rows = 0;
    };
    // All of them are on their way before the first is added.
    constexpr u32 TOGETHER = 8;
    for (u64 start = first; start < last; start += TOGETHER) {
        u32 clusters[TOGETHER];
        float x[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            const u64 row = start + i < last ? start + i : last - 1;
            clusters[i] = labels[row];
            x[i] = rounds.rows[(positions == nullptr ? row : positions[row]) * DIM + j];
        }
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            if (start + i >= last) break;
            if (clusters[i] != cluster) pass_on();
            cluster = clusters[i];
            long long whole;
            if (in_steps(sums, j, x[i], whole)) {
                sum += (u64)whole;
            } else {
                add_wide(sums, cluster, j, x[i], false);
            }
            rows++;
        }
    }
    pass_on();
}

// The total of a sum of steps and a wide sum, rounded once, as by `Wide::rounded` in
// src/device/sums.rs. Their magnitude is below 2^160, which is 2^309 times 2^-149 and fits into ten
// digits of 32 bits.
__device__ __noinline__ double wide_total(const long long* bins, long long sum, double inverse) {
    constexpr u32 DIGITS = BINS + 1;
    // A step is at least 2^-149 and at most 2^104: a sum of steps lies in three digits.
    const u32 position = 149 + 1023 - (u32)(__double_as_longlong(inverse) >> 52);
    const u32 shift = position % 32, first = position / 32;
    const u64 steps = sum < 0 ? 0 - (u64)sum : (u64)sum;
    const u64 low = steps << shift, high = shift == 0 ? 0 : steps >> (64 - shift);
    u32 digits[DIGITS];
    long long carry = 0;
    for (u32 i = 0; i < DIGITS; i++) {
        const long long own = (long long)(i == first       ? low & 0xffffffff
                                          : i == first + 1 ? low >> 32
                                          : i == first + 2 ? high
                                                           : 0);
        const long long digit = (i < BINS ? bins[i] : 0) + carry + (sum < 0 ? -own : own);
        digits[i] = (u32)digit;
        carry = digit >> 32;
    }
    const bool is_negative = carry < 0;
    if (is_negative) {
        u32 one = 1;
        for (u32 i = 0; i < DIGITS; i++) {
            digits[i] = ~digits[i] + one;
            if (digits[i] != 0) one = 0;
        }
    }
    u32 top = DIGITS;
    while (top > 0 && digits[top - 1] == 0) top--;
    if (top == 0) return 0;
    // 64 bits from the highest set bit down; the last is sticky: it stands for all lower ones.
    const u32 a = digits[top - 1], b = top > 1 ? digits[top - 2] : 0, c = top > 2 ? digits[top - 3] : 0;
    const u32 zeros = __clz(a);
    u64 highest = ((u64)a << 32 | b) << zeros;
    bool is_more = (u32)(c << zeros) != 0;
    if (zeros > 0) highest |= c >> (32 - zeros);
    for (u32 i = 0; i + 3 < top; i++) is_more |= digits[i] != 0;
    if (is_more) highest |= 1;
    const int exponent = 32 * ((int)top - 2) - (int)zeros - 149;
    const double unit = __longlong_as_double((long long)(exponent + 1023) << 52);
    const double magnitude = __dmul_rn(__ull2double_rn(highest), unit);
    return is_negative ? -magnitude : magnitude;
}

// Writes the mean of a cluster to the set of centroids that is not valid, by a warp: the sum and the
// quotient are rounded to float64, and the quotient to float32. The mean of equal rows is that row.
__device__ __forceinline__ void take_mean(const Rounds& rounds, const Sums& sums, u32 cluster) {
    const u32 lane = threadIdx.x % 32;
    const long long count = sums.counts[cluster];
    if (count == 0) {
        if (lane == 0) atomicAdd(&rounds.status->empty, 1u);
        return;
    }
    const bool is_wide = sums.is_wide[cluster] != 0;
    float* next = rounds.centroids + ((u64)(1 - rounds.status->current) * rounds.k + cluster) * DIM;
    for (u32 j = lane; j < DIM; j += 32) {
        const u64 place = (u64)cluster * DIM + j;
        const long long sum = sums.sums[place];
        const double inverse = sums.inverse[j];
        // The inverse of a power of two, and the product with it, are exact.
        const double total = is_wide ? wide_total(sums.wide + place * BINS, sum, inverse)
                                     : __dmul_rn(__ll2double_rn(sum), __drcp_rn(inverse));
        next[j] = __double2float_rn(__ddiv_rn(total, __ll2double_rn(count)));
    }
}

// Whether all clusters have means, and at least one row moved.
__device__ __forceinline__ bool is_whole(const Rounds& rounds) {
    return __ldcg(&rounds.status->empty) == 0 && rounds.status->moved != 0;
}

// A distance that is not shorter than one with this square.
__device__ __forceinline__ float distance_above(double square) {
    return __double2float_ru(__dsqrt_ru(__dmul_ru(square, 1.000000000001)));
}

// Computes the squared distance that a centroid moved, by a warp; nobody needs it where a cluster has no rows.
__device__ __forceinline__ double take_shift(const Rounds& rounds, const Sums& sums, u32 cluster) {
    const u32 current = rounds.status->current, lane = threadIdx.x % 32;
    const float* old = rounds.centroids + ((u64)current * rounds.k + cluster) * DIM;
    const float* next = rounds.centroids + ((u64)(1 - current) * rounds.k + cluster) * DIM;
    double shift = 0;
    for (u32 j = lane; j < DIM; j += 32) {
        const double way = __dadd_rn((double)next[j], -(double)old[j]);
        shift = __dadd_rn(shift, __dmul_rn(way, way));
    }
    shift = add_lanes(shift);
    if (lane == 0) sums.shifts[cluster] = shift;
    return shift;
}

// Sums the squared distances that centroids moved, and decides whether rounds end; by a warp.
__device__ __forceinline__ void end_round(const Rounds& rounds, const Sums& sums) {
    const u32 lane = threadIdx.x % 32;
    double shift = 0, longest = 0;
    if (is_whole(rounds)) {
#pragma unroll 8
        for (u32 i = lane; i < rounds.k; i += 32) {
            const double own = __ldcg(&sums.shifts[i]);
            shift = __dadd_rn(shift, own);
            longest = fmax(longest, own);
        }
    }
    shift = add_lanes(shift);
    longest = largest_of_lanes(longest);
    if (lane > 0) return;
    Status* status = rounds.status;
    status->drift = __fadd_ru(status->drift, distance_above(longest));
    status->iterations++;
    if (status->moved == 0) {
        status->end = STABLE;
    } else if (__ldcg(&status->empty) > 0) {
        status->end = EMPTY_CLUSTER;
    } else {
        status->current = 1 - status->current;
        if (shift <= sums.tolerance) status->end = CONVERGED;
    }
    status->moved_last = status->moved;
    status->rechecked += status->uncertain;
    status->moved = status->uncertain = status->pairs = 0;
    status->empty = status->arrived = status->kept = status->listed = 0;
    status->largest_centroid = status->largest_error = status->has_far = 0;
}

// Computes all means, and how far they are from the centroids before. A warp per cluster; the last block to arrive ends
// the round.
extern "C" __global__ __launch_bounds__(256) void finish_round(Rounds rounds, Sums sums) {
    if (rounds.status->end != GOING_ON) return;
    const u32 cluster = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (cluster < rounds.k) {
        take_mean(rounds, sums, cluster);
        // What a lane reads, it has written.
        const float shift = distance_above(take_shift(rounds, sums, cluster));
        const bool has_drifts = rounds.drifts != nullptr;
        if (has_drifts && threadIdx.x % 32 == 0) rounds.drifts[cluster] = __fadd_ru(rounds.drifts[cluster], shift);
    }
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&rounds.status->arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (is_last && threadIdx.x < 32) end_round(rounds, sums);
}

// Writes, at the number of each row, its cluster and the squared distance to that centroid. A thread
// per row; 128 threads.
extern "C" __global__ __launch_bounds__(128) void costs(Rounds rounds, u32* labels, float* costs) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    const float* centroids = current_centroids(rounds);
    const bool is_row = row < rounds.count;
    const u32 cluster = is_row ? rounds.labels[row] : 0;
    float total = 0;
    if constexpr (DIM <= 32) {
        if (is_row) {
            float values[DIM];
            load_row(values, rounds.rows + (u64)row * DIM);
            total = square_distance(values, centroids + (u64)cluster * DIM);
        }
    } else {
        // A warp stages 32 elements of 32 rows, and of their centroids, at a time.
        __shared__ float tiles[4][2][32][33];
        const u32 lane = threadIdx.x % 32, first = row - lane;
        auto& tile = tiles[threadIdx.x / 32];
        for (u32 start = 0; start < DIM; start += 32) {
            const u32 j = start + lane;
            for (u32 r = 0; r < 32; r++) {
                const u32 other = __shfl_sync(0xffffffffu, cluster, r);
                if (first + r >= rounds.count || j >= DIM) continue;
                tile[0][r][lane] = rounds.rows[(u64)(first + r) * DIM + j];
                tile[1][r][lane] = centroids[(u64)other * DIM + j];
            }
            __syncwarp();
            const u32 width = DIM - start < 32 ? DIM - start : 32;
            for (u32 i = 0; i < width; i++) {
                total = Step<SQUARES>::of(tile[0][lane][i], tile[1][lane][i], total);
            }
            __syncwarp();
        }
    }
    if (!is_row) return;
    const u32 number = rounds.numbers == nullptr ? row : rounds.numbers[row];
    labels[number] = cluster;
    costs[number] = total;
}
