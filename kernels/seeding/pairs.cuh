// Compares every row with every candidate: few elements are read as fast as whole numbers would be.

#include "seeding/shares.cuh"

// Dynamic shared memory: as many rows of DIM elements as there are candidates. A block takes `together`
// rows, at most BLOCK_ROWS.
extern "C" __global__ __launch_bounds__(SEED_THREADS, RESIDENT) void compare_pairs(
    Seeding seeding, u32 drawn, u32 together) {
    __shared__ Parts gains[MOST_CANDIDATES];
    if (!is_going_on(seeding)) return;
    Scalar* candidates = reinterpret_cast<Scalar*>(shared);
    clear(gains);
    for (u32 i = threadIdx.x; i < drawn * DIM; i += SEED_THREADS) {
        candidates[i] = seeding.rows[(u64)seeding.candidates[i / DIM] * DIM + i % DIM];
    }
    __syncthreads();
    if constexpr (DIM <= MOST_PAIRED) {
        const u32 end = min(seeding.count, (blockIdx.x + 1) * together);
        u32 row = blockIdx.x * together + threadIdx.x;
        Scalar own[DIM], next[DIM];
        Real cost = 0;
        // The next row is on its way while this one is compared.
        const auto bring = [&] {
            if (row >= end) return;
            load(next, seeding.rows + (u64)row * DIM);
            cost = seeding.costs[row];
        };
        bring();
        while (row < end) {
            const u32 this_row = row;
            const Real own_cost = cost;
#pragma unroll
            for (u32 j = 0; j < DIM; j++) own[j] = next[j];
            row += SEED_THREADS;
            bring();
            u32 lowered = 0;
            for (u32 candidate = 0; candidate < drawn; candidate++) {
                Scalar other[DIM];
                load(other, candidates + candidate * DIM);
                const Real distance = distance_of(add_pair(other, own, Total(0)), Bits{0, 0});
                if (distance < own_cost) {
                    lower(seeding, gains, this_row, candidate, own_cost, distance);
                    lowered |= 1u << candidate;
                }
            }
            seeding.lowered[this_row] = lowered;
        }
    }
    finish(seeding, gains, drawn);
}
