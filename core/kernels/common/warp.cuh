// Thread groups that cooperate: a warp or a block.

#include "common/arithmetic.cuh"

// Dynamic shared memory, in the size given at launch.
extern __shared__ uint4 shared[];

struct Warp {
    static __device__ __forceinline__ u32 rank() { return threadIdx.x % 32; }
    static __device__ __forceinline__ u32 size() { return 32; }
    static __device__ __forceinline__ void sync() { __syncwarp(); }
};
struct Block {
    static __device__ __forceinline__ u32 rank() { return threadIdx.x; }
    static __device__ __forceinline__ u32 size() { return blockDim.x; }
    static __device__ __forceinline__ void sync() { __syncthreads(); }
};

// Sums a value over 32 lanes in a fixed order; every lane gets the sum.
template <typename T> __device__ __forceinline__ T add_lanes(T value) {
#pragma unroll
    for (u32 stride = 16; stride > 0; stride /= 2) {
        value = add(value, __shfl_xor_sync(0xffffffffu, value, stride));
    }
    return value;
}

// The maximum of a value over 32 lanes; every lane gets it.
template <typename T> __device__ __forceinline__ T largest_of_lanes(T value) {
#pragma unroll
    for (u32 stride = 16; stride > 0; stride /= 2) {
        const T other = __shfl_xor_sync(0xffffffffu, value, stride);
        if (other > value) value = other;
    }
    return value;
}
