// Many small groups of rows, each with clusters of its own: one block runs the rounds of one group.

#include "kmeans/near.cuh"
#include "kmeans/sums.cuh"

// Puts every row into the cluster of its nearest centroid.
__device__ __forceinline__ void assign_group(const Rounds& rounds) {
    const Scalar* centroids = current_centroids(rounds);
    for (u32 start = 0; start < rounds.count; start += blockDim.x) {
        const u32 row = start + threadIdx.x;
        u32 before = NO_CLUSTER, cluster = NO_CLUSTER;
        if constexpr (IS_LOW) {
            if (row < rounds.count) {
                Nearest nearest[1];
                load_row(nearest[0].values, rounds.rows + (u64)row * DIM);
                before = rounds.labels[row];
                compare_all(rounds, centroids, nearest);
                cluster = nearest[0].cluster;
            }
        }
        move_row(rounds, cluster != before, row, before, cluster);
    }
}

// The rounds and sums of a group. The struct of src/device/cuda/kmeans/launch_groups.rs.
struct Group {
    Rounds rounds;
    Sums sums;
};
static_assert(sizeof(Group) == 176, "the host has the same struct");

// Runs at most `most` more rounds of each group. A block per group.
extern "C" __global__ __launch_bounds__(128) void cluster_groups(const Group* groups, u32 most) {
    __shared__ Group group;
    if (threadIdx.x == 0) group = groups[blockIdx.x];
    __syncthreads();
    const Rounds& rounds = group.rounds;
    const Sums& sums = group.sums;
    const Status* status = rounds.status;
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (u32 round = 0; round < most && status->end == GOING_ON; round++) {
        assign_group(rounds);
        __syncthreads();
        add_moved_rows(rounds, sums, threadIdx.x, blockDim.x);
        if constexpr (WEIGHTED) {
            __syncthreads();
            if (status->end != GOING_ON) return;
        }
        if constexpr (HAS_SINGLES) {
            note_first_rows(rounds, sums, threadIdx.x, blockDim.x);
            __syncthreads();
            note_differing(rounds, sums, threadIdx.x, blockDim.x);
        }
        __syncthreads();
        for (u32 i = warp; i < rounds.k; i += warps) take_mean(rounds, sums, i);
        __syncthreads();
        if (is_whole(rounds)) {
            for (u32 i = warp; i < rounds.k; i += warps) take_shift(rounds, sums, i);
        }
        __syncthreads();
        if (warp == 0) end_round(rounds, sums);
        __syncthreads();
    }
}

// After the last rounds, assigns the rows of groups and computes their costs: the distance of
// every row to its centroid. A block per group. `rows` and `costs` hold those of all groups.
extern "C" __global__ __launch_bounds__(128) void finish_groups(const Group* groups,
                                                                const Scalar* rows, Scalar* costs) {
    __shared__ Group group;
    if (threadIdx.x == 0) group = groups[blockIdx.x];
    __syncthreads();
    const Rounds& rounds = group.rounds;
    if (rounds.status->end == EMPTY_CLUSTER || rounds.status->end == GIVEN_UP) return;
    assign_group(rounds);
    __syncthreads();
    const Scalar* centroids = current_centroids(rounds);
    costs += (rounds.rows - rows) / DIM;
    for (u32 row = threadIdx.x; row < rounds.count; row += blockDim.x) {
        if constexpr (IS_LOW) {
            Scalar values[DIM];
            load_row(values, rounds.rows + (u64)row * DIM);
            costs[row] = distance_between(values, centroids + (u64)rounds.labels[row] * DIM);
        }
    }
}
