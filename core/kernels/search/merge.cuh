// Lists between passes: empty lists, merging a pass's candidates, and another search for queries whose
// candidates overflow.

#include "search/lists.cuh"

// Lowers the threshold of a list once it has all it needs: the next pass only offers pairs before the list's last
// entry that matters.
__device__ __forceinline__ void tighten(const Entry* list, const Pass& pass, Entry* worst, Threshold* threshold) {
    const Entry last = last_that_matters(pass, list);
    if (last.is_none() || !(last < *worst)) return;
    *worst = last;
    *threshold = threshold_of(last.distance());
}

// Empties lists. A thread per entry of `places` queries, padding included; padding has a threshold and no
// list.
extern "C" __global__ __launch_bounds__(256) void clear_lists(Entry* entries, Entry* worst,
                                                              Threshold* thresholds, u32* counts, u32 queries,
                                                              u32 places, u32 k, u32 slots) {
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, query = thread / k;
    const u32 i = (u32)(thread % k);
    if (query >= places) return;
    const bool is_padding = query >= queries;
    if (i == 0) {
        thresholds[query] = is_padding ? threshold_of_none() : threshold_of_all();
        worst[query] = Entry::none();
        counts[query] = 0;
    }
    if (!is_padding) entries[query * slots + i] = Entry::none();
}

// The buffers of a merge: one element, or `slots` entries, per query.
struct Lists {
    Entry* entries;
    Entry* worst;
    Threshold* thresholds;
    u32* counts;
    u32* overflowed;        // queries whose candidates overflow
    u32* overflowed_count;  // their number
};

// Reads and resets the candidate counter of a query. If the candidates overflow, returns 0 and records the
// query for `search_again`.
template <typename Group>
__device__ __forceinline__ u32 take_candidates(const Lists& lists, const Pass& pass, u32 query) {
    if (pass.dense) return pass.dense;
    const u32 count = lists.counts[query];
    Group::sync();
    const bool has_overflowed = count > pass.slots - pass.k;
    if (Group::rank() == 0 && count > 0) {
        lists.counts[query] = 0;
        if (has_overflowed) lists.overflowed[atomicAdd(lists.overflowed_count, 1u)] = query;
    }
    return has_overflowed ? 0 : count;
}

// Merges one query's candidates in shared memory.
template <typename Group>
__device__ __forceinline__ void merge_in(Entry* work, const Lists& lists, const Pass& pass,
                                         u32 query) {
    const u32 count = take_candidates<Group>(lists, pass, query);
    if (count == 0) return;
    Entry* list = lists.entries + (u64)query * pass.slots;
    for (u32 i = Group::rank(); i < pass.k + count; i += Group::size()) work[i] = list[i];
    sort<Group>(work, pass.k + count);
    for (u32 i = Group::rank(); i < pass.k; i += Group::size()) list[i] = work[i];
    if (Group::rank() == 0) tighten(work, pass, lists.worst + query, lists.thresholds + query);
}

// Merges queries from `first` to `end`, one warp per query. Shared memory: `slots` entries per warp.
extern "C" __global__ __launch_bounds__(256) void merge_by_warp(Entry* entries, Entry* worst,
                                                                Threshold* thresholds, u32* counts,
                                                                u32* overflowed, u32* overflowed_count,
                                                                Pass pass, u32 first, u32 end,
                                                                const u32* flag) {
    if (!has_work(flag)) return;
    const u32 warp = threadIdx.x / 32;
    const u32 query = first + blockIdx.x * (blockDim.x / 32) + warp;
    if (query >= end) return;
    merge_in<Warp>((Entry*)shared + warp * pass.slots,
                   {entries, worst, thresholds, counts, overflowed, overflowed_count}, pass, query);
}

// Merges queries from `first` on, one block per query. Shared memory: `slots` entries.
extern "C" __global__ __launch_bounds__(512) void merge_by_block(Entry* entries, Entry* worst,
                                                                 Threshold* thresholds, u32* counts,
                                                                 u32* overflowed, u32* overflowed_count,
                                                                 Pass pass, u32 first, u32 end,
                                                                 const u32* flag) {
    if (!has_work(flag)) return;
    merge_in<Block>((Entry*)shared, {entries, worst, thresholds, counts, overflowed, overflowed_count}, pass,
                    first + blockIdx.x);
}

// Merges queries from `first` on, one block per query, sorting in global memory: for lists too large for
// shared memory.
extern "C" __global__ __launch_bounds__(1024) void merge_in_place(Entry* entries, Entry* worst,
                                                                  Threshold* thresholds, u32* counts,
                                                                  u32* overflowed, u32* overflowed_count,
                                                                  Pass pass, u32 first, u32 end,
                                                                  const u32* flag) {
    if (!has_work(flag)) return;
    const u32 query = first + blockIdx.x;
    const u32 count = take_candidates<Block>(
        {entries, worst, thresholds, counts, overflowed, overflowed_count}, pass, query);
    if (count == 0) return;
    Entry* list = entries + (u64)query * pass.slots;
    sort<Block>(list, pass.k + count);
    if (threadIdx.x == 0) tighten(list, pass, worst + query, thresholds + query);
}

// The entry of one pair, summed in the order of the scan.
__device__ Entry entry_of_pair(const Scalar* query, const Scalar* row, u32 dim, u32 number) {
    Total total = 0;
    Bits bits = {0, 0};
    for (u32 d = 0; d < dim; ++d) {
        const Scalar q = query[(u64)d * PANEL], x = row[(u64)d * PANEL];
        total = Step<SUM>::of(q, x, total);
        if constexpr (SUM == SHARED_BITS) {
            bits.query += __popc(q);
            bits.row += __popc(x);
        }
    }
    return Entry::of(distance_of(total, bits), number);
}

// Searches some visits of a pass again for the queries whose candidates overflow, and which still have their
// lists from before the pass. Blocks of PANEL threads take queries in turn and walk the visits' panels, a row
// per thread, merging whenever the next panel might overflow. The result is the exact list, for every order
// of rows.
extern "C" __global__ __launch_bounds__(PANEL) void search_again(
    const Scalar* __restrict__ queries, const Scalar* __restrict__ base, Entry* entries,
    Entry* worst, Threshold* thresholds, const u32* overflowed, const u32* overflowed_count, u64* redone,
    Pass pass) {
    __shared__ u32 appended;
    const u32 total = *overflowed_count;
    const u32 room = pass.slots - pass.k - PANEL;
    for (u32 entry = blockIdx.x; entry < total; entry += gridDim.x) {
        const u32 query = overflowed[entry];
        const Scalar* of_query =
            queries + (u64)(query / PANEL) * pass.dim * PANEL + query % PANEL;
        Entry* list = entries + (u64)query * pass.slots;
        Entry last = worst[query];
        if (threadIdx.x == 0) appended = 0;
        __syncthreads();
        for (u32 visit = pass.begin; visit < pass.end; ++visit) {
            const u32 panel = panel_of_visit(pass, visit);
            const u32 row = base_row(panel, threadIdx.x, pass.panels);
            if (is_eligible(pass, query, row)) {
                const Entry entry = entry_of_pair(
                    of_query, base + (u64)panel * pass.dim * PANEL + threadIdx.x, pass.dim,
                    pass.first_base + row);
                if (entry < last) list[pass.k + atomicAdd(&appended, 1u)] = entry;
            }
            __syncthreads();
            const u32 count = appended;
            __syncthreads();
            if (count <= room && visit + 1 < pass.end) continue;
            sort<Block>(list, pass.k + count);
            const Entry bound = last_that_matters(pass, list);
            if (bound < last) last = bound;
            if (threadIdx.x == 0) appended = 0;
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            tighten(list, pass, worst + query, thresholds + query);
            if (pass.begin == pass.start) atomicAdd(redone, 1ull);
        }
        __syncthreads();
    }
}

// Extends lists from `have` to `want` entries by empty entries. A thread per query.
extern "C" __global__ __launch_bounds__(128) void lengthen_lists(Entry* entries, u32 queries, u32 have,
                                                                 u32 want, u32 slots) {
    const u32 query = blockIdx.x * blockDim.x + threadIdx.x;
    if (query >= queries) return;
    for (u32 i = have; i < want; ++i) entries[(u64)query * slots + i] = Entry::none();
}

// Finds the lists whose threshold was too low: those with free entries, if they may lack a row that matters. They
// are emptied and recorded in `overflowed`. A thread per query.
extern "C" __global__ __launch_bounds__(128) void find_short(Entry* entries, Entry* worst,
                                                             Threshold* thresholds, u32* overflowed,
                                                             u32* overflowed_count, Pass pass) {
    const u32 query = blockIdx.x * blockDim.x + threadIdx.x;
    if (query >= pass.queries) return;
    Entry* list = entries + (u64)query * pass.slots;
    if (!list[pass.k - 1].is_none()) return;
    // Rows outside the list are not before the entry in `worst`.
    const bool is_limited_list = is_limited(pass) && !list[pass.enough - 1].is_none();
    if (is_limited_list && !(worst[query] < last_that_matters(pass, list))) return;
    for (u32 i = 0; i < pass.k; ++i) list[i] = Entry::none();
    worst[query] = Entry::none();
    thresholds[query] = threshold_of_all();
    overflowed[atomicAdd(overflowed_count, 1u)] = query;
}

// Splits the first `per_query` entries of every list into rows and distances. A thread per entry.
extern "C" __global__ __launch_bounds__(256) void gather(const Entry* __restrict__ entries,
                                                         u32* __restrict__ rows,
                                                         Real* __restrict__ distances, u32 queries,
                                                         u32 per_query, u32 slots) {
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x, query = at / per_query;
    if (query >= queries) return;
    const Entry entry = entries[query * slots + at % per_query];
    rows[at] = entry.number();
    distances[at] = entry.distance();
}
