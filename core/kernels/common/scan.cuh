// Prefix sums.

#include "common/warp.cuh"

// The inclusive prefix sum of a value over the lanes of a warp.
__device__ __forceinline__ u32 sum_up_to(u32 value) {
    for (u32 stride = 1; stride < 32; stride *= 2) {
        const u32 other = __shfl_up_sync(0xffffffff, value, stride);
        if (Warp::rank() >= stride) value += other;
    }
    return value;
}

// The exclusive prefix sum of a value over the threads of a block; `all` gets the total.
__device__ __forceinline__ u32 sum_before(u32 value, u32& all) {
    __shared__ u32 of_warps[32];
    const u32 up_to = sum_up_to(value);
    if (Warp::rank() == 31) of_warps[threadIdx.x / 32] = up_to;
    __syncthreads();
    u32 before = 0;
    all = 0;
    for (u32 i = 0; i < blockDim.x / 32; i++) {
        if (i < threadIdx.x / 32) before += of_warps[i];
        all += of_warps[i];
    }
    __syncthreads();
    return before + up_to - value;
}

// Exclusive prefix sums of `counts`, in place, in segments of `together` counts: `sums` gets the total of
// each segment. One block per segment.
extern "C" __global__ __launch_bounds__(1024) void add_up(
    u32* counts, u32 total, u32 together, u32* sums) {
    constexpr u32 PER_THREAD = 8;
    u32* row = counts + (u64)blockIdx.x * together;
    const u32 count = min(together, total - blockIdx.x * together);
    u32 before = 0;
    for (u32 start = 0; start < count; start += blockDim.x * PER_THREAD) {
        u32 thread_counts[PER_THREAD], sum = 0, all;
        const u32 first = start + threadIdx.x * PER_THREAD;
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) {
            thread_counts[i] = first + i < count ? row[first + i] : 0;
            sum += thread_counts[i];
        }
        u32 place = before + sum_before(sum, all);
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) {
            if (first + i < count) row[first + i] = place;
            place += thread_counts[i];
        }
        before += all;
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = before;
}
