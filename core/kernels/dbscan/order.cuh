// A spatial order of rows: Z-order (Morton) keys, and a stable radix sort by key.
//
// A key interleaves bits of some coordinates. A coordinate is first mapped to its quantile in a sample of the
// rows, so that outliers cost no bits.

#include "common/scan.cuh"
#include "dbscan/rows.cuh"

// The parameters of keys. The same struct as in src/device/cuda/dbscan/structs.rs.
struct Keys {
    const float* splitters;   // for each coordinate SPLITTERS, ascending
    const u32* bits;          // for each coordinate: the bits of a key that it occupies
};

// The quantile of a value in the sample, as a 32-bit fraction.
__device__ __forceinline__ u32 share_below(const float* splitters, float x) {
    u32 low = 0, high = SPLITTERS - 1;  // splitters[low] <= x < splitters[high], unless x is outside all splitters
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (splitters[middle] <= x) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const float width = splitters[low + 1] - splitters[low];
    const float part = width > 0 ? (x - splitters[low]) / width : 0;
    const float inside = part > 0 ? (part < 1 ? part : 1) : 0;
    const u32 parts = (u32)fminf(inside * 16777216.0f, 16777215.0f);
    // SPLITTERS is 257, so the interval number is the highest 8 bits.
    return low << 24 | parts;
}

// Computes the keys of rows. A thread per row.
extern "C" __global__ __launch_bounds__(256) void keys(
    const __grid_constant__ Dbscan all, Keys how, u32* keys, u32* rows, u32 count) {
    __shared__ float splitters[COORDINATES * SPLITTERS];
    for (u32 i = threadIdx.x; i < COORDINATES * SPLITTERS; i += blockDim.x) {
        splitters[i] = how.splitters[i];
    }
    __syncthreads();
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= count) return;
    u32 key = 0;
#pragma unroll
    for (u32 i = 0; i < COORDINATES; i++) {
        u32 share = share_below(splitters + i * SPLITTERS, (float)coordinate(all, row, i));
        // From the highest bit down.
        for (u32 bits = how.bits[i]; bits != 0; share <<= 1) {
            const u32 bit = 0x80000000u >> __clz(bits);
            if (share >> 31) key |= bit;
            bits ^= bit;
        }
    }
    keys[row] = key;
    rows[row] = row;
}

// The group (SQL partition) of each row.
extern "C" __global__ __launch_bounds__(256) void groups_of(
    const __grid_constant__ Dbscan all, const u32* rows, u32* groups, u32 count) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    u32 low = 0, high = all.group_count - 1;
    while (low < high) {
        const u32 middle = (low + high) / 2;
        if (rows[i] < all.ends[middle]) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    groups[i] = low;
}

constexpr u32 DIGITS = 256, SORT_WARPS = 8;
// Keys per warp.
constexpr u32 SEGMENT = SORTED_KEYS / SORT_WARPS;

// Calls `each` with every key of a warp's segment, its digit, and the lanes that have the same digit.
template <typename Each>
__device__ __forceinline__ void each_digit(const u32* keys, u32 count, u32 shift, Each each) {
    const u32 first = blockIdx.x * SORTED_KEYS + threadIdx.x / 32 * SEGMENT;
    for (u32 step = 0; step < SEGMENT; step += 32) {
        const u32 i = first + step + Warp::rank();
        const u32 digit = i < count ? keys[i] >> shift & (DIGITS - 1) : DIGITS;
        each(i, digit, __match_any_sync(0xffffffff, digit));
    }
}

// The digit histogram of each block: counts[digit][block].
extern "C" __global__ __launch_bounds__(256) void count_digits(
    const u32* keys, u32 count, u32 shift, u32* counts) {
    __shared__ u32 block_counts[DIGITS];
    block_counts[threadIdx.x] = 0;
    __syncthreads();
    each_digit(keys, count, shift, [&](u32, u32 digit, u32 same) {
        if (digit < DIGITS && __ffs(same) - 1 == Warp::rank()) atomicAdd(&block_counts[digit], __popc(same));
    });
    __syncthreads();
    counts[threadIdx.x * gridDim.x + blockIdx.x] = block_counts[threadIdx.x];
}

// Moves keys and rows to their positions by a digit; equal digits keep their order.
extern "C" __global__ __launch_bounds__(256) void move_keys(
    const u32* keys, const u32* rows, u32 count, u32 shift, const u32* offsets, const u32* sums,
    u32* keys_to, u32* rows_to) {
    __shared__ u32 places[SORT_WARPS][DIGITS];
    u32 all_digits;
    const u32 smaller = sum_before(sums[threadIdx.x], all_digits);
    const u32 warp = threadIdx.x / 32;
    for (u32 i = 0; i < SORT_WARPS; i++) places[i][threadIdx.x] = 0;
    __syncthreads();
    each_digit(keys, count, shift, [&](u32, u32 digit, u32 same) {
        if (digit < DIGITS && __ffs(same) - 1 == Warp::rank()) places[warp][digit] += __popc(same);
        __syncwarp();
    });
    __syncthreads();
    u32 place = smaller + offsets[threadIdx.x * gridDim.x + blockIdx.x];
    for (u32 i = 0; i < SORT_WARPS; i++) {
        const u32 warp_count = places[i][threadIdx.x];
        places[i][threadIdx.x] = place;
        place += warp_count;
    }
    __syncthreads();
    each_digit(keys, count, shift, [&](u32 i, u32 digit, u32 same) {
        const u32 before = __popc(same & ((1u << Warp::rank()) - 1));
        const u32 to = digit < DIGITS ? places[warp][digit] + before : 0;
        __syncwarp();
        if (digit < DIGITS) {
            keys_to[to] = keys[i];
            rows_to[to] = rows[i];
            if (before == 0) places[warp][digit] += __popc(same);
        }
        __syncwarp();
    });
}
