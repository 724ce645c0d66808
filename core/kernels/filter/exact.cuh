// The distances of the pairs that passed the filter, merged into the lists.
//
// Hits are base positions. They are stored in a query's list behind its neighbours, in the slots that hold
// candidates in unfiltered passes.

#include "common/copy.cuh"
#include "filter/state.cuh"
#include "search/lists.cuh"

constexpr u32 VECTOR = 16 / sizeof(Scalar);

// A filtered pass, and the row-major copies of both sides: the base by position. The same struct as in
// src/device/cuda/search/filter/launch.rs.
struct Filtered {
    const Scalar* queries;
    const Scalar* base;
    const u32* order;  // position before sorting, by sorted position; null if rows are not sorted
    const u32* state;
    Entry* entries;
    Entry* worst;
    Threshold* list_thresholds;
    u32* counts;
    u32* overflowed;
    u32* overflowed_count;
    u32 pitch, vectors;  // elements from row to row, and vectors of 16 bytes in a row
    u32 room, padding;   // slots for hits of a query
};

__device__ __forceinline__ const u32* hits_of(const Filtered& filtered, const Pass& pass, u32 query) {
    return (const u32*)(filtered.entries + (u64)query * pass.slots + pass.k);
}

// Reads and resets a query's hit counter. If the hits overflow their slots, the query is recorded in
// `overflowed` and 0 is returned. All threads of a group have the same query, or none.
template <typename Group>
__device__ __forceinline__ u32 take_hits(const Filtered& filtered, u32 query, bool is_query) {
    const u32 count = is_query ? filtered.counts[query] : 0;
    const bool is_given_up = filtered.state[GIVEN_UP];
    Group::sync();
    if (Group::rank() == 0 && count > 0) {
        filtered.counts[query] = 0;
        if (count > filtered.room && !is_given_up) {
            filtered.overflowed[atomicAdd(filtered.overflowed_count, 1u)] = query;
        }
    }
    return count > filtered.room || is_given_up ? 0 : count;
}

// Lowers the threshold of a list to `last`, the last of its entries that matters.
__device__ __forceinline__ void tighten_list(const Filtered& filtered, u32 query, Entry last) {
    if (last.is_none() || !(last < filtered.worst[query])) return;
    filtered.worst[query] = last;
    filtered.list_thresholds[query] = threshold_of(last.distance());
}

// The base row at a position if it may be a neighbour of the query, else ~0.
__device__ __forceinline__ u32 row_at(const Filtered& filtered, const Pass& pass, u32 query,
                                      u32 position) {
    if (position == ~0u || position / PANEL >= pass.panels) return ~0u;
    if (filtered.order) position = filtered.order[position];
    const u32 visit = position / PANEL;
    const u32 row = base_row(panel_of_visit(pass, visit), position % PANEL, pass.panels);
    return is_eligible(pass, query, row) ? row : ~0u;
}

union Vector {
    uint4 whole;
    Scalar parts[VECTOR];
};
// The total of a pair, and the set bits of its rows.
struct PairSums {
    Total total = 0;
    Bits bits = {0, 0};

    __device__ __forceinline__ void add(Vector q, Vector x) {
#pragma unroll
        for (u32 i = 0; i < VECTOR; ++i) {
            total = Step<SUM>::of(q.parts[i], x.parts[i], total);
            if constexpr (SUM == SHARED_BITS) {
                bits.query += __popc(q.parts[i]);
                bits.row += __popc(x.parts[i]);
            }
        }
    }
    __device__ __forceinline__ Entry entry(const Pass& pass, u32 row) const {
        return Entry::of(distance_of(total, bits), pass.first_base + row);
    }
};

// The list entry of one hit, or none.
__device__ __forceinline__ Entry entry_of_hit(const Filtered& filtered, const Pass& pass, u32 query,
                                              u32 position) {
    const u32 row = row_at(filtered, pass, query, position);
    if (row == ~0u) return Entry::none();
    const uint4* q = (const uint4*)(filtered.queries + (u64)query * filtered.pitch);
    const uint4* x = (const uint4*)(filtered.base + (u64)position * filtered.pitch);
    PairSums sums;
    u32 i = 0;
    for (; i + 8 <= filtered.vectors; i += 8) {  // eight loads at a time
        Vector rows[8];
#pragma unroll
        for (u32 j = 0; j < 8; ++j) rows[j].whole = __ldg(x + i + j);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) sums.add({__ldg(q + i + j)}, rows[j]);
    }
#pragma unroll 4
    for (; i < filtered.vectors; ++i) sums.add({__ldg(q + i)}, {__ldg(x + i)});
    return sums.entry(pass, row);
}

// The value of another lane in a group of WIDTH lanes.
template <typename Get, typename E> __device__ __forceinline__ E exchange(const E& value, Get get) {
    union Words {
        E entry;
        u64 words[sizeof(E) / 8];
    } all = {value};
#pragma unroll
    for (u32 i = 0; i < sizeof(E) / 8; ++i) all.words[i] = get(all.words[i]);
    return all.entry;
}
template <typename E> __device__ __forceinline__ E lesser(const E& a, const E& b) { return b < a ? b : a; }
template <typename E> __device__ __forceinline__ E greater(const E& a, const E& b) { return b < a ? a : b; }

// Merges one entry per lane into a sorted list of one entry per lane, whose first k entries count. WIDTH
// lanes share a list.
template <u32 WIDTH>
__device__ __forceinline__ void offer_to_lanes(Entry& list, Entry entry, u32 k, u32 lane) {
    const Entry worst = exchange(list, [&](u64 x) { return __shfl_sync(~0u, x, k - 1, WIDTH); });
    if (__ballot_sync(~0u, entry < worst) == 0) return;
#pragma unroll
    for (u32 size = 2; size <= WIDTH; size *= 2) {
#pragma unroll
        for (u32 stride = size / 2; stride > 0; stride /= 2) {
            const Entry other = exchange(entry, [&](u64 x) { return __shfl_xor_sync(~0u, x, stride); });
            const bool is_low = ((lane & stride) == 0) == ((lane & size) == 0);
            entry = is_low ? lesser(entry, other) : greater(entry, other);
        }
    }
    // The element-wise minimum with the reversed entries is bitonic; a bitonic merge then sorts it.
    const Entry from_end =
        exchange(entry, [&](u64 x) { return __shfl_sync(~0u, x, WIDTH - 1 - lane, WIDTH); });
    list = lesser(list, from_end);
#pragma unroll
    for (u32 stride = WIDTH / 2; stride > 0; stride /= 2) {
        const Entry other = exchange(list, [&](u64 x) { return __shfl_xor_sync(~0u, x, stride); });
        list = (lane & stride) == 0 ? lesser(list, other) : greater(list, other);
    }
}

// Lists of at most WIDTH neighbours: WIDTH lanes per query, one lane per hit.
template <u32 WIDTH> struct Lanes {
    static __device__ __forceinline__ u32 rank() { return threadIdx.x % WIDTH; }
    static __device__ __forceinline__ void sync() { __syncwarp(); }
};
template <u32 WIDTH, typename EntryOf>
__device__ __forceinline__ void merge_hits(const Filtered& filtered, const Pass& pass, EntryOf&& entry_of) {
    const u32 query = (blockIdx.x * blockDim.x + threadIdx.x) / WIDTH, lane = Lanes<WIDTH>::rank();
    const u32 count = take_hits<Lanes<WIDTH>>(filtered, query, query < pass.queries);
    if (__ballot_sync(~0u, count > 0) == 0) return;
    Entry* entries = filtered.entries + (u64)query * pass.slots;
    Entry list = count > 0 && lane < pass.k ? entries[lane] : Entry::none();
    const Entry bound = count > 0 ? filtered.worst[query] : Entry::none();
    u32 most = count;
    for (u32 stride = WIDTH; stride < 32; stride *= 2) most = max(most, __shfl_xor_sync(~0u, most, stride));
    const u32* hits = hits_of(filtered, pass, query);
    for (u32 i = lane; i - lane < most; i += WIDTH) {
        const u32 position = i < count ? hits[i] : ~0u;
        Entry entry = entry_of(query, position);
        if (!(entry < bound)) entry = Entry::none();
        offer_to_lanes<WIDTH>(list, entry, pass.k, lane);
    }
    const u32 bounding = is_limited(pass) ? pass.enough - 1 : 0;
    const Entry last_of_enough = exchange(list, [&](u64 x) { return __shfl_sync(~0u, x, bounding, WIDTH); });
    if (count == 0) return;
    if (lane < pass.k) entries[lane] = list;
    if (lane == pass.k - 1) tighten_list(filtered, query, last_that_matters(pass, list, last_of_enough));
}
extern "C" __global__ __launch_bounds__(256) void merge_hits_16(Filtered filtered, Pass pass) {
    merge_hits<16>(filtered, pass,
                   [&](u32 query, u32 position) { return entry_of_hit(filtered, pass, query, position); });
}
extern "C" __global__ __launch_bounds__(256) void merge_hits_32(Filtered filtered, Pass pass) {
    merge_hits<32>(filtered, pass,
                   [&](u32 query, u32 position) { return entry_of_hit(filtered, pass, query, position); });
}

// The entries of a warp's hits: 8 lanes fetch 128 bytes of a row, 4 rows at a time, into shared memory (a
// stride of 9 vectors avoids bank conflicts). Fetches run STAGES - 1 steps ahead, and each lane sums its own
// row.
constexpr u32 GATHERED = 32 * 9;
template <u32 STAGES>
__device__ __forceinline__ Entry entry_together(const Filtered& filtered, const Pass& pass, u32 query,
                                                u32 position, uint4* gathered) {
    const u32 lane = Warp::rank(), row = row_at(filtered, pass, query, position);
    const u32 valid_position = row == ~0u ? ~0u : position;
    const uint4* of_query = (const uint4*)(filtered.queries + (u64)query * filtered.pitch);
    u32 others[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) others[i] = __shfl_sync(~0u, valid_position, i * 4 + lane / 8);
    const auto bring = [&](u32 start) {
        uint4* to = gathered + start / 8 % STAGES * GATHERED + lane / 8 * 9 + lane % 8;
        const u32 vector = start + lane % 8;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            if (others[i] == ~0u || vector >= filtered.vectors) continue;
            copy_16(to + i * 4 * 9, (const uint4*)(filtered.base + (u64)others[i] * filtered.pitch) + vector);
        }
        commit_copies();
    };
#pragma unroll
    for (u32 stage = 0; stage + 1 < STAGES; ++stage) bring(8 * stage);
    PairSums sums;
    for (u32 start = 0; start < filtered.vectors; start += 8) {
        bring(start + 8 * (STAGES - 1));
        wait_for_groups<STAGES - 1>();
        __syncwarp();
        const uint4* mine = gathered + start / 8 % STAGES * GATHERED + lane * 9;
        if (start + 8 <= filtered.vectors) {
#pragma unroll
            for (u32 i = 0; i < 8; ++i) sums.add({__ldg(of_query + start + i)}, {mine[i]});
        } else {
            for (u32 i = 0; start + i < filtered.vectors; ++i) sums.add({__ldg(of_query + start + i)}, {mine[i]});
        }
        __syncwarp();
    }
    return row == ~0u ? Entry::none() : sums.entry(pass, row);
}

// Short lists of long rows: a warp per query. Shared memory: AHEAD times GATHERED vectors per warp.
extern "C" __global__ __launch_bounds__(64) void merge_hits_by_warp(Filtered filtered, Pass pass) {
    uint4* gathered = (uint4*)shared + threadIdx.x / 32 * (AHEAD * GATHERED);
    merge_hits<32>(filtered, pass, [&](u32 query, u32 position) {
        return entry_together<AHEAD>(filtered, pass, query, position, gathered);
    });
}

// Longer lists: a block per query. Shared memory: `slots` entries, then GATHERED vectors per warp.
extern "C" __global__ __launch_bounds__(256) void merge_hits_by_block(Filtered filtered, Pass pass) {
    __shared__ u32 filled;
    const u32 query = blockIdx.x;
    const u32 count = take_hits<Block>(filtered, query, true);
    if (count == 0) return;
    Entry* work = (Entry*)shared;
    uint4* gathered = (uint4*)(work + pass.slots) + threadIdx.x / 32 * GATHERED;
    Entry* entries = filtered.entries + (u64)query * pass.slots;
    const u32* hits = hits_of(filtered, pass, query);
    if (threadIdx.x == 0) filled = pass.k;
    for (u32 i = threadIdx.x; i < pass.k; i += blockDim.x) work[i] = entries[i];
    __syncthreads();
    const Entry worst = filtered.worst[query];
    for (u32 i = threadIdx.x; i / 32 * 32 < count; i += blockDim.x) {
        const u32 position = i < count ? hits[i] : ~0u;
        const Entry entry = entry_together<1>(filtered, pass, query, position, gathered);
        if (entry < worst) {
            const u32 at = atomicAdd(&filled, 1u);
            if (at < pass.slots) work[at] = entry;
        }
    }
    __syncthreads();
    const u32 all = filled;
    if (all > pass.slots) {
        if (threadIdx.x == 0) filtered.overflowed[atomicAdd(filtered.overflowed_count, 1u)] = query;
        return;
    }
    if (all == pass.k) return;
    sort<Block>(work, all);
    for (u32 i = threadIdx.x; i < pass.k; i += blockDim.x) entries[i] = work[i];
    if (threadIdx.x == 0) tighten_list(filtered, query, last_that_matters(pass, work));
}
