// The nearest neighbours of all rows of an LSH table in their own buckets, in one pass: LANES lanes of a warp
// per row.
//
// Rows of the same bucket are adjacent in a table, so the lanes of a warp read the same other rows. The k
// nearest of each row stay in a sorted list from table to table; a row that is found again is already in the
// list.

#include "common/scan.cuh"
#include "search/buckets.cuh"

// A range of a table's rows, and of each bucket. The same struct as in
// src/device/cuda/search/launch_bucket_self_join.rs.
struct JoinRange {
    u32 first;   // the launch's first position, a multiple of 32
    u32 end;
    u32 from;    // the first row of each bucket that is compared
    u32 count;   // compared rows of each bucket
    u32 k;
    u32 dim;     // elements of a row
};

// Rows of the bucket that each lane compares at a time. The host defines LANES, the lanes per row, and
// JOINING, the threads of a block (-D).
constexpr u32 TOGETHER = 4;

// Inserts an entry into a sorted list, unless the list has it.
__device__ __noinline__ void insert(Entry* list, u32 k, Entry entry) {
    u32 at = k - 1;
    while (at > 0 && entry < list[at - 1]) at--;
    if (at > 0 && !(list[at - 1] < entry)) return;
    for (u32 i = k - 1; i > at; i--) list[i] = list[i - 1];
    list[at] = entry;
}

// `rows` and `home_buckets` belong to one table, `lists` has k entries per row. `compared`, which may be null, counts
// the rows that each row is compared with.
extern "C" __global__ __launch_bounds__(JOINING) void join_buckets(
    const Scalar* __restrict__ base, const u32* __restrict__ rows, const uint2* __restrict__ home_buckets,
    const u32* __restrict__ left_out, Entry* lists, u64* __restrict__ compared, JoinRange join) {
    constexpr u32 ALL = 0xffffffffu;
    const u32 lane = threadIdx.x % LANES;
    const u64 place = join.first + ((u64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    const u32 row = place < join.end ? rows[place] : 0;
    bool is_there = place < join.end && !(left_out && left_out[row / 32] >> (row % 32) & 1);
    uint2 bucket = make_uint2(0, 0);
    if (is_there) bucket = home_buckets[row];
    const u32 size = bucket.y - bucket.x;
    is_there = is_there && size > join.from;
    const u32 begin = bucket.x + join.from;
    const u32 end = is_there ? bucket.x + min(size, join.from + join.count) : begin;
    const Scalar* of_row = base + (u64)row * join.dim;
    Entry* list = lists + (u64)row * join.k;
    Entry worst = list[join.k - 1];
    u32 count = 0;
    for (u32 first = begin; __any_sync(ALL, first < end); first += LANES * TOGETHER) {
        u32 others[TOGETHER];
        Real distances[TOGETHER];
        if (first < end) {
            const Scalar* of_others[TOGETHER];
#pragma unroll
            for (u32 n = 0; n < TOGETHER; n++) {
                // Past the end, the last row is compared again.
                others[n] = rows[min(first + n * LANES + lane, end - 1)];
                of_others[n] = base + (u64)others[n] * join.dim;
            }
            distances_of_rows(of_row, of_others, join.dim, distances);
        }
#pragma unroll
        for (u32 n = 0; n < TOGETHER; n++) {
            bool is_near = false;
            Entry entry = Entry::none();
            if (first + n * LANES + lane < end) {
                const u32 other = others[n];
                if (other != row && !(left_out && left_out[other / 32] >> (other % 32) & 1)) {
                    count++;
                    entry = Entry::of(distances[n], other);
                    is_near = entry < worst;
                }
            }
            if (!__any_sync(ALL, is_near)) continue;
            // The lanes of a row insert one after the other.
            for (u32 offering = 0; offering < LANES; offering++) {
                if (is_near && lane == offering && entry < list[join.k - 1]) {
                    insert(list, join.k, entry);
                }
                __syncwarp();
            }
            worst = list[join.k - 1];
        }
    }
    if (!compared) return;
    for (u32 stride = 1; stride < LANES; stride *= 2) count += __shfl_xor_sync(ALL, count, stride);
    if (is_there && lane == 0) compared[row] += count;
}

// Sums the rows that queries visit in their own buckets, and the pairs compared: all other rows of these buckets,
// if `compared` is null. A thread per query.
extern "C" __global__ __launch_bounds__(256) void add_visits(
    const uint2* __restrict__ ranges, const u64* __restrict__ compared, u64* __restrict__ work,
    SelfRows self_rows, u32 queries, u32 table_rows, u32 tables) {
    const u64 query = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 all[2] = {0, 0};
    if (query < queries) {
        const u32 row = self_rows.of((u32)query);
        for (u32 table = 0; table < tables; table++) {
            const uint2 range = ranges[(u64)table * table_rows + row];
            const u32 size = range.y - range.x;
            all[0] += size;
            all[1] += size > 0 ? size - 1 : 0;
        }
        if (compared) all[1] = compared[row];
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        for (u32 stride = 16; stride > 0; stride /= 2) {
            all[i] += __shfl_xor_sync(0xffffffffu, all[i], stride);
        }
        if (Warp::rank() == 0 && all[i] > 0) atomicAdd(&work[i], all[i]);
    }
}

// Copies the lists of the base rows that are the queries: a thread per rank and query. `counts` gets the
// length of each list.
extern "C" __global__ __launch_bounds__(256) void take_lists(
    const Entry* __restrict__ lists, u32* __restrict__ rows, Real* __restrict__ distances,
    u32* __restrict__ counts, SelfRows self_rows, u32 queries, u32 k) {
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (u64)queries * k) return;
    const u32 query = (u32)(at / k), rank = (u32)(at % k);
    const Entry* list = lists + (u64)self_rows.of(query) * k;
    if (list[rank].is_none()) return;
    rows[at] = list[rank].number();
    distances[at] = list[rank].distance();
    if (rank + 1 == k || list[rank + 1].is_none()) counts[query] = rank + 1;
}

// The first position of each list once lists are contiguous, and the end of the last, also in `total`. A
// block sums its own lengths and all before them.
extern "C" __global__ __launch_bounds__(1024) void add_up_lists(
    const u32* __restrict__ counts, u64* __restrict__ starts, u64* total, u32 queries) {
    constexpr u32 PER_THREAD = 4;
    __shared__ u64 of_warps[32];
    const u32 begin = blockIdx.x * blockDim.x * PER_THREAD, first = begin + threadIdx.x * PER_THREAD;
    u64 before = 0;
    for (u32 i = threadIdx.x; i < begin; i += blockDim.x) before += counts[i];
    for (u32 stride = 16; stride > 0; stride /= 2) before += __shfl_xor_sync(0xffffffffu, before, stride);
    if (Warp::rank() == 0) of_warps[threadIdx.x / 32] = before;
    u32 lengths[PER_THREAD], sum = 0, all;
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) {
        lengths[i] = first + i < queries ? counts[first + i] : 0;
        sum += lengths[i];
    }
    u64 place = sum_before(sum, all);
    for (u32 warp = 0; warp < blockDim.x / 32; warp++) place += of_warps[warp];
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) {
        if (first + i <= queries) starts[first + i] = place;
        if (first + i == queries) *total = place;
        place += lengths[i];
    }
}

// Makes lists of up to k neighbours contiguous: list i is moved to starts[i] .. starts[i + 1]. A thread per
// rank and query.
extern "C" __global__ __launch_bounds__(256) void close_gaps(
    const u32* __restrict__ rows, const Real* __restrict__ distances,
    const u64* __restrict__ starts, u32* __restrict__ rows_there, Real* __restrict__ distances_there,
    u32 queries, u32 k) {
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (u64)queries * k) return;
    const u32 query = (u32)(at / k), rank = (u32)(at % k);
    const u64 start = starts[query];
    if (rank >= starts[query + 1] - start) return;
    rows_there[start + rank] = rows[at];
    distances_there[start + rank] = distances[at];
}
