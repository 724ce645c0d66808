// Exact distances of chosen pairs of a query and a base row, from rows in their original layout.

#include "common/warp.cuh"

// Threads of a block; a warp stages 32 elements at a time of both rows of its 32 pairs.
constexpr u32 DISTANCES_THREADS = ELEMENT == F64 ? 64 : 128;

// The query of a pair: the last one whose pairs start at or before it.
__device__ __forceinline__ u32 query_of_pair(const u64* starts, u32 queries, u64 pair) {
    u32 low = 0, high = queries;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (starts[middle] <= pair) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// The distances of pairs. A thread per pair; the first pair has the number `first`.
extern "C" __global__ __launch_bounds__(DISTANCES_THREADS) void distances_of(
    const Scalar* __restrict__ queries, const Scalar* __restrict__ base,
    const u64* __restrict__ starts, const u32* __restrict__ rows, Real* __restrict__ distances,
    u32 query_rows, u64 first, u32 count, u32 dim) {
    __shared__ Scalar tiles[DISTANCES_THREADS / 32][2][32][33];
    const u32 pair = blockIdx.x * DISTANCES_THREADS + threadIdx.x;
    const u32 lane = Warp::rank(), warp_pairs = pair - lane;
    if (warp_pairs >= count) return;
    u32 query = 0, row = 0;
    if (pair < count) {
        query = query_of_pair(starts, query_rows, first + pair);
        row = rows[pair];
    }
    auto& tile = tiles[threadIdx.x / 32];
    Total total = 0;
    Bits bits = {0, 0};
    for (u32 start = 0; start < dim; start += 32) {
        const u32 width = min(32u, dim - start);
        for (u32 other = 0; other < 32; other++) {
            const u64 of_query = (u64)__shfl_sync(0xffffffffu, query, other) * dim + start;
            const u64 of_row = (u64)__shfl_sync(0xffffffffu, row, other) * dim + start;
            if (lane < width) {
                const Scalar q = queries[of_query + lane];
                tile[0][other][lane] = SUM == PRODUCTS ? -q : q;
                tile[1][other][lane] = base[of_row + lane];
            }
        }
        Warp::sync();
        for (u32 d = 0; d < width; d++) {
            const Scalar q = tile[0][lane][d], x = tile[1][lane][d];
            total = Step<SUM>::of(q, x, total);
            if constexpr (SUM == SHARED_BITS) {
                bits.query += __popc(q);
                bits.row += __popc(x);
            }
        }
        Warp::sync();
    }
    if (pair < count) distances[pair] = distance_of(total, bits);
}
