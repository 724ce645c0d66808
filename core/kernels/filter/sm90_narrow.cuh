// The filter for rows that fit into registers.
//
// A block has WARPGROUPS warpgroups with 64 queries each, in registers, and one more warp that streams the
// base's tiles through a ring buffer of STAGES. Blocks are persistent: block b processes units b, b +
// gridDim.x, …; a unit is a block of queries and a share of the tiles.

#include "common/sm90_wgmma.cuh"
#include "filter/sm90_hits.cuh"

// Of the warpgroups, and of one more, a single warp of which streams.
constexpr u32 THREADS = WARPGROUPS * 128 + 128;

__device__ __forceinline__ void stream_tiles(const Filter& filter, u32 ring) {
    const u32 full = ring + STAGES * (TILE * STEPS * 32), empty = full + 8 * STAGES;
    const u32 units = filter.query_blocks * filter.splits;
    RingPosition<STAGES> position;
    for (u32 i = blockIdx.x; i < units; i += gridDim.x) {
        const Unit unit(filter, i);
        for (u32 tile = unit.begin; tile < unit.end; ++tile) {
            constexpr u32 BYTES = TILE * STEPS * 32;
            barrier_wait(empty + 8 * position.stage, position.parity ^ 1);
            barrier_expect(full + 8 * position.stage, BYTES);
            bulk_copy(ring + position.stage * BYTES, filter.tiles + (u64)tile * BYTES, BYTES,
                      full + 8 * position.stage);
            position.advance();
        }
    }
}

// A thread's fragment of the rows `row` and `row` + 8 of its warp's 16 queries, thresholds included.
__device__ __forceinline__ void load_queries(const Filter& filter, u32 row, u32 (&a)[STEPS][4]) {
    const u32 lane = Warp::rank();
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step) {
        const u32* from =
            (const u32*)filter.queries + (u64)row * (STEPS * 8) + step * 8 + lane % 4;
        a[step][0] = from[0];
        a[step][1] = from[STEPS * 64];
        a[step][2] = from[4];
        a[step][3] = from[STEPS * 64 + 4];
    }
    if (lane % 4 == 3) {
        a[STEPS - 1][2] = filter.thresholds[row];
        a[STEPS - 1][3] = filter.thresholds[row + 8];
    }
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void filter(
    const __grid_constant__ Filter filter) {
    if (*filter.given_up) return;
    // Forced into registers: otherwise the loop reads special registers again for every tile.
    u32 ring = shared_address(matrices), thread = threadIdx.x % 128;
    asm volatile("" : "+r"(ring), "+r"(thread));
    const u32 full = ring + STAGES * (TILE * STEPS * 32), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        init_ring<STAGES>(full, empty, WARPGROUPS);
        barrier_fence();
    }
    __syncthreads();
    const u32 warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        lower_registers<PRODUCER_REGISTERS>();
        if (thread == 0) stream_tiles(filter, ring);
        return;
    }
    raise_registers<consumer_registers(WARPGROUPS)>();
    const u32 lane = thread % 32, row = warpgroup * 64 + thread / 32 * 16 + lane / 4;
    const u32 units = filter.query_blocks * filter.splits;
    ThreadHits hits(filter, WARPGROUPS * 128, threadIdx.x);
    u32 sums[TILE / 4];
    RingPosition<STAGES> position;
    for (u32 i = blockIdx.x; i < units; i += gridDim.x) {
        const Unit unit(filter, i);
        const u32 first = unit.queries * (WARPGROUPS * 64);
        u32 a[STEPS][4];
        load_queries(filter, first + row, a);
        for (u32 tile = unit.begin; tile < unit.end; ++tile) {
            barrier_wait(full + 8 * position.stage, position.parity);
            const u32 b = ring + position.stage * (TILE * STEPS * 32);
            products_fence();
#pragma unroll
            for (u32 step = 0; step < STEPS; ++step) {
                const u32 panel = b + panel_start(STEPS, step, 2, TILE);
                const u32 inside = (step - panel_first(STEPS, step, 2)) * 32;
                const u64 where = descriptor(panel + inside, panel_pitch(STEPS, step, 2));
                add_products(sums, a[step], where, step != 0);
            }
            products_commit();
            products_wait_for(sums);
            if (thread == 0) barrier_arrive(empty + 8 * position.stage);
            position.advance();
            examine(sums, tile * TILE + lane % 4 * 2, hits);
        }
        hits.hand_over(filter, first + row);
    }
}
