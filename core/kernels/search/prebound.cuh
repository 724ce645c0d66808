// Initial thresholds of empty lists, before rows are scanned (prebounds): the rows of some panels
// are dealt to 32 groups, and the k-th smallest of the groups' minima is an upper bound on the distance of
// the k-th nearest row. Minima are taken over totals or, where distances do not grow with totals, over
// distances.

#include "search/scan.cuh"

// Minima that a thread keeps per query: in f32, one for each of its row vectors.
constexpr u32 PARTS = 32 / ACROSS;

// Whether distances grow with totals.
constexpr bool TOTAL_TELLS = SUM != SHARED_BITS;

// The sink of a scan that keeps only minima of totals or distances.
struct Least {
    static const bool KEEPS_LEAST = true;
    Threshold totals[QUERIES][PARTS];

    __device__ __forceinline__ Least() {
#pragma unroll
        for (u32 q = 0; q < QUERIES; ++q) {
#pragma unroll
            for (u32 part = 0; part < PARTS; ++part) totals[q][part] = threshold_of_all();
        }
    }
    __device__ __forceinline__ Threshold threshold(u32 query) const { return threshold_of_all(); }

    __device__ __forceinline__ void keep_least(const ThreadSums& tile, u32 first_query, u32 panel,
                                               Place place, const Pass& pass) {
#pragma unroll
        for (u32 x = 0; x < ROWS; ++x) {
            const u32 row = base_row(panel, place.row_lane(x), pass.panels);
            // The number of the query that is this row, if there is one.
            const u64 itself = (u64)pass.first_base + row - pass.first_query;
            const bool is_row = row < pass.rows;
#pragma unroll
            for (u32 q = 0; q < QUERIES; ++q) {
                const u64 query = first_query + place.query_lane(q);
                const Threshold total = TOTAL_TELLS
                                            ? (Threshold)tile.totals[q][x]
                                            : (Threshold)distance_of(tile.totals[q][x], tile.bits(q, x));
                const bool counts = is_row && query != itself;
                if (counts && total < totals[q][x / (ROWS / PARTS)]) {
                    totals[q][x / (ROWS / PARTS)] = total;
                }
            }
        }
    }
};

// The minima over 32 groups of rows, for each query and split of a pass's visits.
extern "C" __global__ __launch_bounds__(SCAN_THREADS, SCAN_BLOCKS_PER_SM) void scan_least(
    const Scalar* __restrict__ queries, const Scalar* __restrict__ base, Threshold* __restrict__ least,
    Pass pass) {
    Least sink;
    scan_into(sink, queries, base, pass);
    const Place place;
#pragma unroll
    for (u32 q = 0; q < QUERIES; ++q) {
        const u32 query = blockIdx.x * PANEL + place.query_lane(q);
        if (query >= pass.queries) continue;
        Threshold* to = least + ((u64)query * gridDim.y + blockIdx.y) * 32 + place.row / VECTOR * PARTS;
#pragma unroll
        for (u32 part = 0; part < PARTS; ++part) to[part] = sink.totals[q][part];
    }
}

// The thresholds of lists of `k` <= 32 neighbours from these minima. A warp per query.
extern "C" __global__ __launch_bounds__(256) void bound_lists(const Threshold* __restrict__ least,
                                                              Entry* __restrict__ worst,
                                                              Threshold* __restrict__ thresholds, u32 queries,
                                                              u32 splits, u32 k) {
    const u32 query = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = Warp::rank();
    if (query >= queries) return;
    Threshold total = threshold_of_all();
    for (u32 split = 0; split < splits; ++split) {
        const Threshold other = least[((u64)query * splits + split) * 32 + lane];
        total = other < total ? other : total;
    }
#pragma unroll
    for (u32 size = 2; size <= 32; size *= 2) {
#pragma unroll
        for (u32 stride = size / 2; stride > 0; stride /= 2) {
            const Threshold other = __shfl_xor_sync(~0u, total, stride);
            const bool is_low = ((lane & stride) == 0) == ((lane & size) == 0);
            total = (other < total) == is_low ? other : total;
        }
    }
    if (lane != k - 1 || !(total < threshold_of_all())) return;
    const Real distance = TOTAL_TELLS ? distance_of((Total)total, Bits()) : (Real)total;
    worst[query] = Entry::of(distance, ~0u);
    thresholds[query] = threshold_of(distance);
}
