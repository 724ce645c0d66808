// Many small problems in one launch, such as SQL partitions: a block runs the rounds of one.

#include "kmeans/sort_means.cuh"
#include "kmeans/sums.cuh"

// Assigns every row to the cluster of its nearest centroid; in the last round, marks undecided rows.
template <bool IS_LAST>
__device__ __forceinline__ void assign_problem(const Rounds& rounds) {
    const Scalar* centroids = current_centroids(rounds);
    for (u32 start = 0; start < rounds.count; start += blockDim.x) {
        const u32 row = start + threadIdx.x;
        u32 before = NO_CLUSTER, cluster = NO_CLUSTER;
        bool is_open = false;
        if constexpr (IS_LOW) {
            if (row < rounds.count) {
                Nearest nearest[1];
                load_row(nearest[0].values, rounds.rows + (u64)row * DIM);
                before = rounds.labels[row];
                compare_all<1, IS_LAST>(rounds, centroids, nearest);
                cluster = nearest[0].cluster;
                is_open = IS_LAST && is_undecided(nearest[0].least, nearest[0].second);
            }
        }
        move_row(rounds, cluster != before, row, before, cluster);
        if (is_open) rounds.labels[row] |= UNDECIDED;
    }
}

// The rounds and sums of a problem. The struct of src/device/cuda/kmeans/launch_batched.rs.
struct BatchedRounds {
    Rounds rounds;
    Sums sums;
};

// Runs at most `most` more rounds of each problem. A block per problem.
extern "C" __global__ __launch_bounds__(128) void cluster_batched(const BatchedRounds* problems, u32 most) {
    __shared__ BatchedRounds problem;
    if (threadIdx.x == 0) problem = problems[blockIdx.x];
    __syncthreads();
    const Rounds& rounds = problem.rounds;
    const Sums& sums = problem.sums;
    const Status* status = rounds.status;
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (u32 round = 0; round < most && status->end == GOING_ON; round++) {
        assign_problem<false>(rounds);
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

// Assigns the rows of problems after their last round. A block per problem.
extern "C" __global__ __launch_bounds__(128) void finish_batched(const BatchedRounds* problems) {
    __shared__ BatchedRounds problem;
    if (threadIdx.x == 0) problem = problems[blockIdx.x];
    __syncthreads();
    const Rounds& rounds = problem.rounds;
    if (rounds.status->end == EMPTY_CLUSTER || rounds.status->end == GIVEN_UP) return;
    assign_problem<true>(rounds);
}
