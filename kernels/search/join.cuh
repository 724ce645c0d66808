// The nearest of the rows in their own buckets, for all rows of a table at once: a thread per row.
//
// Threads beside each other have rows of the same bucket, which they compare with the same others. Table
// after table, the k nearest of each row stay in a list in its order; a row found again is there already.

#include "search/buckets.cuh"

// A part of a table's rows, and of each bucket. The same struct as in
// src/device/cuda/search/launch_join.rs.
struct Join {
    u32 first;   // the launch's first place
    u32 end;
    u32 from;    // the first row of each bucket
    u32 count;   // rows of each bucket
    u32 k;
    u32 dim;     // elements of a row
};
static_assert(sizeof(Join) == 24, "the host has the same struct");

// Rows of a bucket that are compared at a time.
constexpr u32 TOGETHER = 4;

// Puts an entry into a sorted list, unless it is there.
__device__ __noinline__ void insert(Entry* list, u32 k, Entry entry) {
    u32 at = k - 1;
    while (at > 0 && entry < list[at - 1]) at--;
    if (at > 0 && !(list[at - 1] < entry)) return;
    for (u32 i = k - 1; i > at; i--) list[i] = list[i - 1];
    list[at] = entry;
}

// `rows` and `own` are those of one table, `lists` has k entries for each row, `work` for each row those
// visited and compared.
extern "C" __global__ __launch_bounds__(128) void join_buckets(
    const Scalar* __restrict__ base, const u32* __restrict__ rows, const uint2* __restrict__ own,
    const u32* __restrict__ left_out, Entry* __restrict__ lists, ulonglong2* __restrict__ work,
    Join join) {
    const u32 place = join.first + blockIdx.x * blockDim.x + threadIdx.x;
    if (place >= join.end) return;
    const u32 row = rows[place];
    if (left_out && left_out[row / 32] >> (row % 32) & 1) return;
    const uint2 bucket = own[row];
    const u32 size = bucket.y - bucket.x;
    if (size <= join.from) return;
    const u32 end = bucket.x + min(size, join.from + join.count);
    const Scalar* of_row = base + (u64)row * join.dim;
    Entry* list = lists + (u64)row * join.k;
    Entry worst = list[join.k - 1];
    u32 compared = 0;
    for (u32 i = bucket.x + join.from; i < end; i += TOGETHER) {
        u32 others[TOGETHER];
        const Scalar* of_others[TOGETHER];
        Real distances[TOGETHER];
#pragma unroll
        for (u32 n = 0; n < TOGETHER; n++) {
            // At the end, one is compared more than once.
            others[n] = rows[min(i + n, end - 1)];
            of_others[n] = base + (u64)others[n] * join.dim;
        }
        distances_of_rows(of_row, of_others, join.dim, distances);
#pragma unroll
        for (u32 n = 0; n < TOGETHER; n++) {
            const u32 other = others[n];
            if (i + n >= end || other == row) continue;
            if (left_out && left_out[other / 32] >> (other % 32) & 1) continue;
            compared++;
            const Entry entry = Entry::of(distances[n], other);
            if (entry < worst) {
                insert(list, join.k, entry);
                worst = list[join.k - 1];
            }
        }
    }
    work[row].x += end - bucket.x - join.from;
    work[row].y += compared;
}

// The lists of the base rows that queries are: a thread for each rank of each query. `counts` gets the
// length of each list, `all_work` what was visited and compared.
extern "C" __global__ __launch_bounds__(256) void take_lists(
    const Entry* __restrict__ lists, const ulonglong2* __restrict__ work,
    const u32* __restrict__ own, u32* __restrict__ found, Real* __restrict__ distances,
    u32* __restrict__ counts, u64* __restrict__ all_work, u32 queries, u32 k) {
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 visited = 0, compared = 0;
    if (at < (u64)queries * k) {
        const u32 query = (u32)(at / k), rank = (u32)(at % k);
        const Entry* list = lists + (u64)own[query] * k;
        if (rank == 0) {
            visited = work[own[query]].x;
            compared = work[own[query]].y;
        }
        if (!list[rank].is_none()) {
            found[at] = list[rank].number();
            distances[at] = list[rank].distance();
            if (rank + 1 == k || list[rank + 1].is_none()) counts[query] = rank + 1;
        }
    }
    for (u32 apart = 16; apart > 0; apart /= 2) {
        visited += __shfl_xor_sync(0xffffffffu, visited, apart);
        compared += __shfl_xor_sync(0xffffffffu, compared, apart);
    }
    if (Warp::rank() == 0 && visited > 0) {
        atomicAdd(&all_work[0], visited);
        atomicAdd(&all_work[1], compared);
    }
}
