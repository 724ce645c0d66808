// The steps of a Lloyd round after the assignment: sums, means, and the convergence test.

#include "kmeans/wide.cuh"

// A number as a multiple of a step, and the rest as a multiple of a part of a step.
struct Steps {
    u64 whole = 0, parts = 0;
};

// The weight of a row, by its original number.
__device__ __forceinline__ double weight_of(const Sums& sums, u32 number) {
    return WEIGHTED ? sums.weights[number] : 1.0;
}

// A row's term in a sum: an element times the row's weight, or the weight itself. Rounds are given up if the
// product is not rounded to 53 bits.
__device__ __forceinline__ Number number_in(const Rounds& rounds, Scalar x, double weight, u32 j) {
    if constexpr (!WEIGHTED) return x;
    if (j == DIM) return (Number)weight;
    const double product = multiply((double)x, weight), magnitude = fabs(product);
    // A product this small may be the result of rounding up to the smallest normal number.
    const bool is_rounded = magnitude > Limits<double>::smallest() && magnitude < Limits<double>::infinity();
    if (!is_rounded && x != 0) rounds.status->end = GIVEN_UP;
    return (Number)product;
}

// Converts a number to steps and parts. False if it is no multiple of a part, or above the limit.
__device__ __forceinline__ bool in_steps(const Sums& sums, u32 j, Number x, Steps& out) {
    const double inverse = sums.inverse[j], steps = __dmul_rn((double)x, inverse);
    if constexpr (!HAS_PARTS) {
        const long long whole = __double2ll_rn(steps);
        out.whole = (u64)whole;
        return fabs(steps) <= sums.limit && __ll2double_rn(whole) == steps;
    } else {
        const double whole = rint(steps), rest = __dmul_rn(__dadd_rn(steps, -whole), sums.limit), parts = rint(rest);
        out.whole = (u64)__double2ll_rn(whole), out.parts = (u64)__double2ll_rn(parts);
        // Checked by multiplying back: numbers too small for the inverse become 0.
        const bool is_all = __dmul_rn(steps, power_of_two(-exponent_of(inverse))) == x;
        return fabs(steps) <= sums.limit && parts == rest && is_all;
    }
}

// Adds a number to a wide sum, or subtracts it.
__device__ __forceinline__ void add_wide(const Sums& sums, u32 cluster, u32 j, Number x,
                                         bool is_minus) {
    sums.is_wide[cluster] = 1;
    add_to_bins(reinterpret_cast<u64*>(sums.wide) + ((u64)cluster * WIDTH + j) * BINS, x, is_minus);
}

// Adds steps to the sum of a cluster.
__device__ __forceinline__ void add_steps(const Sums& sums, u32 cluster, u32 j, Steps steps) {
    const u64 place = (u64)cluster * WIDTH + j;
    atomicAdd(reinterpret_cast<u64*>(sums.sums) + place, steps.whole);
    if (HAS_PARTS) atomicAdd(reinterpret_cast<u64*>(sums.parts) + place, steps.parts);
}

// Adds a number to the sum of a cluster, or subtracts it.
__device__ __forceinline__ void add_number(const Sums& sums, u32 cluster, u32 j, Number x, bool is_minus) {
    Steps steps;
    if (in_steps(sums, j, x, steps)) {
        add_steps(sums, cluster, j, is_minus ? Steps{0 - steps.whole, 0 - steps.parts} : steps);
    } else {
        add_wide(sums, cluster, j, x, is_minus);
    }
}

__device__ __forceinline__ void add_count(const Sums& sums, u32 cluster, u64 rows) {
    atomicAdd(reinterpret_cast<u64*>(sums.counts + cluster), rows);
}

// Adds the rows that moved to their new clusters, and subtracts them from their old ones. There are
// `step` threads; neighbouring ones add neighbouring numbers.
__device__ __forceinline__ void add_moved_rows(
    const Rounds& rounds, const Sums& sums, u64 first, u64 step) {
    const u64 numbers = (u64)rounds.status->moved * WIDTH;
    for (u64 i = first; i < numbers; i += step) {
        const u32 j = i % WIDTH;
        const Moved moved = rounds.moved[i / WIDTH];
        const u32 to = rounds.labels[moved.row];
        const double weight = weight_of(sums, number_of(rounds, moved.row));
        if (weight == 0) continue;
        const Scalar element = j < DIM ? rounds.rows[(u64)moved.row * DIM + j] : 0;
        const Number x = number_in(rounds, element, weight, j);
        add_number(sums, to, j, x, false);
        if (j == 0) add_count(sums, to, 1);
        if (moved.before == NO_CLUSTER) continue;
        add_number(sums, moved.before, j, x, true);
        if (j == 0) add_count(sums, moved.before, 0 - 1ull);
    }
}

// Adds the rows that moved to the sums. Any grid.
extern "C" __global__ __launch_bounds__(256) void add_moved(Rounds rounds, Sums sums) {
    if (rounds.status->end != GOING_ON) return;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    add_moved_rows(rounds, sums, first, (u64)gridDim.x * blockDim.x);
}

// Adds all rows to the sums of their clusters, which are empty before. `labels` are sorted by cluster;
// `positions` has the row of each label, or is null if rows are in that order. A thread sums one term over
// ADDED_ROWS rows, and adds to the cluster's sum whenever the cluster changes.
extern "C" __global__ __launch_bounds__(256) void add_sorted(
    Rounds rounds, Sums sums, const u32* labels, const u32* positions) {
    if (rounds.status->end != GOING_ON) return;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 j = thread % WIDTH;
    const u64 first = thread / WIDTH * ADDED_ROWS;
    const u64 last = first + ADDED_ROWS < rounds.count ? first + ADDED_ROWS : rounds.count;
    if (first >= rounds.count) return;
    u32 cluster = labels[first];
    Steps sum;
    u64 rows = 0;
    const auto pass_on = [&] {
        add_steps(sums, cluster, j, sum);
        if (j == 0) add_count(sums, cluster, rows);
        sum = {}, rows = 0;
    };
    // All loads are issued before the first value is used.
    constexpr u32 TOGETHER = 8;
    for (u64 start = first; start < last; start += TOGETHER) {
        u32 clusters[TOGETHER];
        Scalar x[TOGETHER];
        double weights[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            const u64 row = start + i < last ? start + i : last - 1;
            clusters[i] = labels[row];
            const u64 at = positions == nullptr ? row : positions[row];
            x[i] = j < DIM ? rounds.rows[at * DIM + j] : 0;
            weights[i] = weight_of(sums, number_of(rounds, (u32)at));
        }
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            if (start + i >= last) break;
            if (clusters[i] != cluster) pass_on();
            cluster = clusters[i];
            if (weights[i] == 0) continue;
            Steps steps;
            const Number number = number_in(rounds, x[i], weights[i], j);
            if (in_steps(sums, j, number, steps)) {
                sum.whole += steps.whole, sum.parts += steps.parts;
            } else {
                add_wide(sums, cluster, j, number, false);
            }
            rows++;
        }
    }
    pass_on();
}

// The mean of a cluster of equal rows is that row, which rounding may miss: in the sum and quotient of
// float64, or in a direction. `note_first_rows` and then `note_differing` find such clusters once a round,
// among those that no longer have two rows known to differ. `step` is the number of threads.
__device__ __forceinline__ bool is_mixed(const Rounds& rounds, const Sums& sums, u32 cluster) {
    const u64 rows = __ldcg(sums.differing + cluster);
    const u32 one = (u32)rows, other = (u32)(rows >> 32);
    return one < rounds.count && rounds.labels[one] == cluster && rounds.labels[other] == cluster;
}
__device__ __forceinline__ void note_first_rows(const Rounds& rounds, const Sums& sums, u32 first, u32 step) {
    for (u32 row = first; row < rounds.count; row += step) {
        const u32 cluster = rounds.labels[row];
        if (is_mixed(rounds, sums, cluster) || row >= __ldcg(&sums.first_rows[cluster])) continue;
        atomicMin(&sums.first_rows[cluster], row);
    }
}
__device__ __forceinline__ void note_differing(const Rounds& rounds, const Sums& sums, u32 first, u32 step) {
    for (u32 row = first; row < rounds.count; row += step) {
        const u32 cluster = rounds.labels[row];
        if (is_mixed(rounds, sums, cluster)) continue;
        const u32 other = __ldcg(&sums.first_rows[cluster]);
        for (u32 j = 0; j < DIM && row != other; j++) {
            if (rounds.rows[(u64)row * DIM + j] == rounds.rows[(u64)other * DIM + j]) continue;
            sums.differing[cluster] = (u64)row << 32 | other;
            break;
        }
    }
}

// Any grid, for both kernels.
extern "C" __global__ __launch_bounds__(256) void find_first_rows(Rounds rounds, Sums sums) {
    if (rounds.status->end != GOING_ON) return;
    note_first_rows(rounds, sums, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}
extern "C" __global__ __launch_bounds__(256) void find_differing(Rounds rounds, Sums sums) {
    if (rounds.status->end != GOING_ON) return;
    note_differing(rounds, sums, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

// The row that all rows of a cluster equal, or null; resets the cluster's first row. By a warp.
__device__ __forceinline__ const Scalar* take_single(const Rounds& rounds, const Sums& sums, u32 cluster) {
    const u32 row = __ldcg(&sums.first_rows[cluster]);
    const bool is_single = !is_mixed(rounds, sums, cluster);
    __syncwarp();
    if (threadIdx.x % 32 == 0) sums.first_rows[cluster] = NO_ROW;
    return is_single ? rounds.rows + (u64)row * DIM : nullptr;
}

// Divides a mean by its length, as `Metric::prepare` does, by a warp. If the directions cancel out, the
// centroid stays.
__device__ __forceinline__ void take_direction(const Rounds& rounds, u32 cluster, Scalar* mean) {
    const u32 lane = threadIdx.x % 32;
    double largest = 0, square = 0;
    for (u32 j = lane; j < DIM; j += 32) largest = fmax(largest, fabs((double)mean[j]));
    largest = largest_of_lanes(largest);
    // Any power of two near the largest element gives the same direction.
    const double scale = power_of_two(largest == 0 ? 0 : max(-1000, min(1000, -exponent_of(largest))));
    for (u32 start = 0; start < DIM; start += 32) {
        const double x = start + lane < DIM ? multiply((double)mean[start + lane], scale) : 0;
        const double term = multiply(x, x);
        for (u32 i = 0; i < 32; i++) square = add(square, __shfl_sync(0xffffffffu, term, i));
    }
    const double inverse = __ddiv_rn(1, root(square));
    const Scalar* before = current_centroids(rounds) + (u64)cluster * DIM;
    for (u32 j = lane; j < DIM; j += 32) {
        mean[j] = square == 0 ? before[j] : (Scalar)multiply(multiply((double)mean[j], scale), inverse);
    }
}

// Writes the mean of a cluster to the set of centroids that is not valid, by a warp: the sum and the quotient
// are rounded to float64, then the quotient to the type of rows. The mean of equal rows is that row. By
// cosine the mean is a direction.
__device__ __forceinline__ void take_mean(const Rounds& rounds, const Sums& sums, u32 cluster) {
    const u32 lane = threadIdx.x % 32;
    const long long count = sums.counts[cluster];
    // Also if the cluster's rows have no weight.
    const Scalar* single = HAS_SINGLES ? take_single(rounds, sums, cluster) : nullptr;
    if (count == 0) {
        if (lane == 0) atomicAdd(&rounds.status->empty, 1u);
        return;
    }
    const bool is_wide = sums.is_wide[cluster] != 0;
    Scalar* next = rounds.centroids + ((u64)(1 - rounds.status->current) * rounds.k + cluster) * DIM;
    const auto total = [&](u32 j) {
        const u64 place = (u64)cluster * WIDTH + j;
        const int exponent = -exponent_of(sums.inverse[j]);
        return is_wide ? wide_total(sums, place, exponent) : total_of(sums, place, exponent);
    };
    const Scaled weight = WEIGHTED ? total(DIM) : Scaled{__ll2double_rn(count), 0};
    for (u32 j = lane; j < DIM; j += 32) {
        next[j] = HAS_SINGLES && single != nullptr ? single[j] : (Scalar)over(total(j), weight);
    }
    if (METRIC == COSINE && single == nullptr) take_direction(rounds, cluster, next);
}

// Whether all clusters have means, and at least one row moved.
__device__ __forceinline__ bool is_whole(const Rounds& rounds) {
    return __ldcg(&rounds.status->empty) == 0 && rounds.status->moved != 0;
}

// An upper bound on the distance with this square.
__device__ __forceinline__ float distance_above(double square) {
    return __double2float_ru(__dsqrt_ru(__dmul_ru(square, 1.000000000001)));
}

// Computes the squared distance that a centroid moved, by a warp; unused if its cluster has no weight.
__device__ __forceinline__ double take_shift(const Rounds& rounds, const Sums& sums, u32 cluster) {
    const u32 current = rounds.status->current, lane = threadIdx.x % 32;
    const Scalar* old = rounds.centroids + ((u64)current * rounds.k + cluster) * DIM;
    const Scalar* next = rounds.centroids + ((u64)(1 - current) * rounds.k + cluster) * DIM;
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
            const double cluster_shift = __ldcg(&sums.shifts[i]);
            shift = __dadd_rn(shift, cluster_shift);
            longest = fmax(longest, cluster_shift);
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
    status->empty = status->arrived = status->unchanged = status->listed = 0;
    status->largest_centroid = status->largest_error = status->has_far = 0;
}

// Computes all means, and their distances from the centroids before. A warp per cluster; the last block to
// arrive ends the round.
extern "C" __global__ __launch_bounds__(256) void finish_round(Rounds rounds, Sums sums) {
    if (rounds.status->end != GOING_ON) return;
    const u32 cluster = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (cluster < rounds.k) {
        take_mean(rounds, sums, cluster);
        // Each lane reads only values that it has written.
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

// Writes the label of each row, by original row number.
extern "C" __global__ __launch_bounds__(256) void copy_labels(Rounds rounds, u32* labels) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rounds.count) labels[number_of(rounds, row)] = rounds.labels[row];
}

// Writes, by original row number, each row's cluster and its distance from that centroid. A thread per row;
// 128 threads.
extern "C" __global__ __launch_bounds__(128) void costs(Rounds rounds, u32* labels, Scalar* costs) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    const Scalar* centroids = current_centroids(rounds);
    const bool is_row = row < rounds.count;
    const u32 cluster = is_row ? rounds.labels[row] & ~UNDECIDED : 0;
    Real distance = 0;
    if constexpr (DIM <= 32) {
        if (is_row) {
            Scalar values[DIM];
            load_row(values, rounds.rows + (u64)row * DIM);
            distance = distance_between(values, centroids + (u64)cluster * DIM);
        }
    } else {
        // A warp stages some elements of 32 rows and of their centroids at a time.
        Total total = 0;
        constexpr u32 STAGED = 128 / sizeof(Scalar), ROWS = 32 / STAGED;
        __shared__ Scalar tiles[4][2][32][STAGED + 1];
        const u32 lane = threadIdx.x % 32, first = row - lane, column = lane % STAGED;
        auto& tile = tiles[threadIdx.x / 32];
        for (u32 start = 0; start < DIM; start += STAGED) {
            const u32 j = start + column;
            for (u32 r = lane / STAGED; r < 32; r += ROWS) {
                const u32 other = __shfl_sync(0xffffffffu, cluster, r);
                if (first + r >= rounds.count || j >= DIM) continue;
                tile[0][r][column] = rounds.rows[(u64)(first + r) * DIM + j];
                tile[1][r][column] = centroids[(u64)other * DIM + j];
            }
            __syncwarp();
            const u32 width = DIM - start < STAGED ? DIM - start : STAGED;
            for (u32 i = 0; i < width; i++) {
                total = add_pair(tile[0][lane][i], tile[1][lane][i], total);
            }
            __syncwarp();
        }
        distance = finish_pair(total);
    }
    if (!is_row) return;
    const u32 number = number_of(rounds, row);
    labels[number] = cluster;
    costs[number] = distance;
}
