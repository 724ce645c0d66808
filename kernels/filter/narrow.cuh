// The filter for rows that fit into registers.
//
// A block has GROUPS warpgroups with 64 queries each, held in registers, and one more warp that streams the
// base's tiles through a ring buffer of STAGES. Blocks are persistent: block b processes units b, b +
// gridDim.x, …; a unit is a block of queries and a share of the tiles.

#include "common/wgmma.cuh"
#include "filter/found.cuh"

// Registers per thread of a warpgroup: 65536, less those of 128 streaming threads with 24 each.
constexpr u32 THREADS = GROUPS * 128 + 128;
constexpr u32 LEFT_REGISTERS = (65536 / THREADS / 8 * 8 * THREADS - 24 * 128) / (GROUPS * 128) / 8 * 8;
constexpr u32 GROUP_REGISTERS = LEFT_REGISTERS > 240 ? 240 : LEFT_REGISTERS;

__device__ __forceinline__ void stream_tiles(const Filter& filter, u32 ring) {
    const u32 full = ring + STAGES * (TILE * STEPS * 32), empty = full + 8 * STAGES;
    const u32 units = filter.query_blocks * filter.splits;
    u32 stage = 0, phase = 0;
    for (u32 i = blockIdx.x; i < units; i += gridDim.x) {
        const Unit unit(filter, i);
        for (u32 tile = unit.begin; tile < unit.end; ++tile) {
            constexpr u32 BYTES = TILE * STEPS * 32;
            barrier_wait(empty + 8 * stage, phase ^ 1);
            barrier_expect(full + 8 * stage, BYTES);
            bulk_copy(ring + stage * BYTES, filter.tiles + (u64)tile * BYTES, BYTES,
                      full + 8 * stage);
            if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
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
        for (u32 stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, GROUPS);
        }
        barrier_fence();
    }
    __syncthreads();
    const u32 group = threadIdx.x / 128;
    if (group == GROUPS) {
        // PTX ISA, Miscellaneous Instructions: setmaxnreg.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread == 0) stream_tiles(filter, ring);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUP_REGISTERS));
    const u32 lane = thread % 32, row = group * 64 + thread / 32 * 16 + lane / 4;
    const u32 units = filter.query_blocks * filter.splits;
    Found found(filter, GROUPS * 128, threadIdx.x);
    u32 sums[TILE / 4];
    u32 stage = 0, phase = 0;
    for (u32 i = blockIdx.x; i < units; i += gridDim.x) {
        const Unit unit(filter, i);
        const u32 first = unit.queries * (GROUPS * 64);
        u32 a[STEPS][4];
        load_queries(filter, first + row, a);
        for (u32 tile = unit.begin; tile < unit.end; ++tile) {
            barrier_wait(full + 8 * stage, phase);
            const u32 b = ring + stage * (TILE * STEPS * 32);
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
            if (thread == 0) barrier_arrive(empty + 8 * stage);
            if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
            examine(sums, tile * TILE + lane % 4 * 2, found);
        }
        found.hand_over(filter, first + row);
    }
}
