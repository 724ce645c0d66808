// When the filter gives up.

#include "common/arithmetic.cuh"

// In `state`: whether the filter has been given up, queries with more hits than there is room for, and
// blocks that have counted theirs.
constexpr u32 GIVEN_UP = 0, CROWDED = 1, COUNTED = 2;

// Counts the queries with too many hits. If that is one in `most`, the filter is given up, now and in later
// passes: other kernels then look at `state`. A thread per query.
extern "C" __global__ __launch_bounds__(256) void judge(u32* __restrict__ counts, u32* state,
                                                        u32 queries, u32 room, u32 most) {
    __shared__ bool is_last;
    const u32 query = blockIdx.x * blockDim.x + threadIdx.x;
    const bool is_crowded = query < queries && counts[query] > room;
    const u32 crowded = __syncthreads_count(is_crowded);
    if (threadIdx.x == 0) {
        if (crowded) atomicAdd(state + CROWDED, crowded);
        __threadfence();
        is_last = atomicAdd(state + COUNTED, 1u) == gridDim.x - 1;
        if (is_last) {
            __threadfence();
            const u32 all = atomicAdd(state + CROWDED, 0u);
            if ((u64)all * most > queries) state[GIVEN_UP] = 1;
        }
    }
}
