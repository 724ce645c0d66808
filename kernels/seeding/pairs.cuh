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
        for (u32 row = blockIdx.x * together + threadIdx.x; row < end; row += SEED_THREADS) {
            const Real cost = seeding.costs[row];
            Scalar own[DIM];
            load(own, seeding.rows + (u64)row * DIM);
            u32 lowered = 0;
#pragma unroll 2
            for (u32 candidate = 0; candidate < drawn; candidate++) {
                Scalar other[DIM];
                load(other, candidates + candidate * DIM);
                const Real distance = distance_of(add_pair(other, own, Total(0)), Bits{0, 0});
                if (distance < cost) {
                    seeding.distances[(u64)candidate * seeding.count + row] = distance;
                    lowered |= 1u << candidate;
                }
            }
            seeding.lowered[row] = lowered;
            // Apart from the loop above, where each candidate is nearer to other lanes' rows.
            for (u32 left = lowered; left != 0; left &= left - 1) {
                const u32 candidate = __ffs(left) - 1;
                const Real distance = seeding.distances[(u64)candidate * seeding.count + row];
                add_gain(seeding, gains[candidate], row, cost, distance);
            }
        }
    }
    finish(seeding, gains, drawn);
}
