// The scan that offers candidates to lists.

#include "search/scan.cuh"

// The sink of `top_k`: candidates for the lists.
struct TopK {
    static const bool KEEPS_LEAST = false;

    const Reach* reaches;
    const Entry* worst;
    u32* counts;
    Entry* entries;

    // Nothing farther than this matters to a query.
    __device__ __forceinline__ Reach reach(u32 query) const { return reaches[query]; }

    // In a dense pass every pair has a slot of its own, so no counter is needed.
    __device__ __forceinline__ void offer_dense(const Pass& pass, u32 query, u32 row, u32 slot,
                                                Real distance) const {
        entries[(u64)query * pass.slots + pass.k + slot] =
            is_eligible(pass, query, row) ? Entry::of(distance, pass.first_base + row)
                                           : Entry::none();
    }

    // The whole entry is compared, not its distance, so that ties do not fill the list. Counting
    // goes on past the last slot: the merge sees that there were too many.
    __device__ __forceinline__ void offer(const Pass& pass, u32 query, u32 row,
                                          Real distance) const {
        if (!is_eligible(pass, query, row)) return;
        const Entry entry = Entry::of(distance, pass.first_base + row);
        if (!(entry < worst[query])) return;
        const u32 slot = atomicAdd(counts + query, 1u);
        if (slot < pass.slots - pass.k) {
            entries[(u64)query * pass.slots + pass.k + slot] = entry;
        }
    }
};

extern "C" __global__ __launch_bounds__(SCAN_THREADS, SCAN_BLOCKS_PER_SM) void scan(
    const Scalar* __restrict__ queries, const Scalar* __restrict__ base,
    const Reach* __restrict__ reach, const Entry* __restrict__ worst, u32* counts, Entry* entries,
    Pass pass, const u32* wanted) {
    if (!is_wanted(wanted)) return;
    TopK sink = {reach, worst, counts, entries};
    scan_into(sink, queries, base, pass);
}
