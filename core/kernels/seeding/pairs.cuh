// Distances of every row to every candidate, for rows of few elements: reading these is as fast as reading
// codes.

#include "seeding/shares.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
constexpr u32 RESIDENT_PAIRS = DIM * sizeof(Scalar) <= SHORT_BYTES ? RESIDENT_SHORT : RESIDENT;
#else
constexpr u32 RESIDENT_PAIRS = RESIDENT;  // as many as fit
#endif

// Dynamic shared memory: DIM elements per candidate.
extern "C" __global__ __launch_bounds__(SEED_THREADS, RESIDENT_PAIRS) void compare_pairs(
    Seeding seeding, u32 drawn) {
    __shared__ PartialGains partial;
    if (!is_going_on(seeding)) return;
    Scalar* candidates = reinterpret_cast<Scalar*>(shared);
    clear(partial);
    for (u32 i = threadIdx.x; i < drawn * DIM; i += SEED_THREADS) {
        candidates[i] = seeding.rows[(u64)seeding.candidates[i / DIM] * DIM + i % DIM];
    }
    __syncthreads();
    const BlockRows block = rows_of_block(seeding);
    pay(seeding, block);
    const LastChoice chosen = chosen_last(seeding);
    if constexpr (DIM <= MOST_PAIRED) {
        for (u32 row = block.first + threadIdx.x; row < block.end; row += SEED_THREADS) {
            Scalar values[DIM];
            // Streaming loads: rows leave the L2 cache first, so that costs stay in it.
            load<true>(values, seeding.rows + (u64)row * DIM);
            const Cost before = cost_before(seeding, chosen, row);
            const Real cost = cost_now(seeding, chosen, row, before);
            if (before.lowered >> chosen.best & 1) seeding.costs[row] = cost;
            u32 lowered = 0;
#pragma unroll 2
            for (u32 candidate = 0; candidate < drawn; candidate++) {
                Scalar other[DIM];
                load(other, candidates + candidate * DIM);
                const Real distance = distance_of(add_pair(other, values, Total(0)), Bits{0, 0});
                if (distance < cost) {
                    seeding.distances[(u64)candidate * seeding.count + row] = distance;
                    lowered |= 1u << candidate;
                }
            }
            if (chosen.is_first || lowered != before.lowered) seeding.lowered[row] = lowered;
            // In a loop of its own: in the loop above lanes would diverge, as a candidate lowers the costs of
            // only some of them.
            for (u32 left = lowered; left != 0; left &= left - 1) {
                const u32 candidate = __ffs(left) - 1;
                const Real distance = seeding.distances[(u64)candidate * seeding.count + row];
                add_gain(seeding, partial.gains[(row - block.first) / SHARE_ROWS][candidate], row, cost, distance);
            }
        }
    }
    finish(seeding, partial, block, drawn);
}
