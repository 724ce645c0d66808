// The condition under which the filter is given up.

#include "common/arithmetic.cuh"

// Words of `state`: whether the filter is given up, the number of queries whose hits overflow, and the number
// of blocks that have added theirs.
constexpr u32 GIVEN_UP = 0, OVERFLOWED = 1, COUNTED = 2;

// Counts the queries whose hits overflow. If more than one in `most` does, the filter is given up, for this
// and all later passes: other kernels read it in `state`. A thread per query.
extern "C" __global__ __launch_bounds__(256) void judge(u32* __restrict__ counts, u32* state,
                                                        u32 queries, u32 room, u32 most) {
    __shared__ bool is_last;
    const u32 query = blockIdx.x * blockDim.x + threadIdx.x;
    const bool has_overflowed = query < queries && counts[query] > room;
    const u32 overflowed = __syncthreads_count(has_overflowed);
    if (threadIdx.x == 0) {
        if (overflowed) atomicAdd(state + OVERFLOWED, overflowed);
        __threadfence();
        is_last = atomicAdd(state + COUNTED, 1u) == gridDim.x - 1;
        if (is_last) {
            __threadfence();
            const u32 all = atomicAdd(state + OVERFLOWED, 0u);
            if ((u64)all * most > queries) state[GIVEN_UP] = 1;
        }
    }
}
