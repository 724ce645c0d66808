// The filter of wide rows: both sides come from shared memory, and sums are floats.
//
// A block has 128 queries, two groups of four warps with 64 each, and a warp that streams the base's
// tiles, in panels of 32 columns, through a ring of STAGES. Queries stay in shared memory (RESIDENT), or
// come through the ring beside the base; then two blocks form a cluster and share every panel of the
// base: each loads half and sends it to both. Block c, or cluster c, has unit c: a block of queries and a
// share of the tiles.

#include "filter/found.cuh"

constexpr u32 CLUSTER = RESIDENT ? 1 : 2;
constexpr u32 STAGE = (RESIDENT ? 256 : 384) * 64;
constexpr u32 PANELS = (STEPS + 1) / 2;
// A panel of the queries and of the base, and all queries of a block, in bytes.
constexpr u32 QUERY_PANEL = 128 * 64, BASE_PANEL = 256 * 64, QUERIES = 128 * 32 * STEPS;
// Behind the ring: the queries, if they stay; the barriers of full stages, and of empty ones, and the
// one that queries arrive at.
constexpr u32 ASKED = STAGES * STAGE, FULL = ASKED + (RESIDENT ? QUERIES : 0);
constexpr u32 EMPTY = FULL + 8 * STAGES, ASKED_FULL = EMPTY + 8 * STAGES;

struct Unit {
    u32 queries, begin, end;  // the block of queries; tiles

    __device__ __forceinline__ Unit(const Filter& filter, u32 rank) {
        const u32 unit = blockIdx.x / CLUSTER, tiles = filter.end - filter.begin;
        const u64 split = unit / filter.query_blocks;
        queries = unit % filter.query_blocks * CLUSTER + rank;
        begin = filter.begin + tiles * split / filter.splits;
        end = filter.begin + tiles * (split + 1) / filter.splits;
    }
};

__device__ __forceinline__ void stream_panels(const Filter& filter, const Unit& unit, u32 ring,
                                              u32 rank) {
    const unsigned char* queries = filter.queries + (u64)unit.queries * QUERIES;
    if (RESIDENT) {
        barrier_expect(ring + ASKED_FULL, QUERIES);
        bulk_copy(ring + ASKED, queries, QUERIES, ring + ASKED_FULL);
    }
    u32 stage = 0, phase = 0;
    for (u32 tile = unit.begin; tile < unit.end; ++tile) {
        const unsigned char* from = filter.tiles + (u64)tile * (256 * 32 * STEPS);
        for (u32 panel = 0; panel < PANELS; ++panel) {
            const u32 pitch = STEPS % 2 && panel == PANELS - 1 ? 32 : 64;
            const u32 to = ring + stage * STAGE, arrived = ring + FULL + 8 * stage;
            barrier_wait(ring + EMPTY + 8 * stage, phase ^ 1);
            barrier_expect(arrived, (RESIDENT ? 256 : 384) * pitch);
            if (RESIDENT) {
                bulk_copy(to, from + (u64)panel * BASE_PANEL, 256 * pitch, arrived);
            } else {
                const u32 half = rank * 128 * pitch;
                bulk_copy_to_both(to + half, from + (u64)panel * BASE_PANEL + half, 128 * pitch,
                                  arrived);
                bulk_copy(to + BASE_PANEL, queries + (u64)panel * QUERY_PANEL, 128 * pitch, arrived);
            }
            if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
}

// A thread's sums of tile after tile.
__device__ __forceinline__ void compare_tiles(const Filter& filter, const Unit& unit, u32 ring,
                                              u32 thread, u32 group) {
    const u32 lane = thread % 32, row = group * 64 + thread / 32 * 16 + lane / 4;
    Found found(filter, 256, threadIdx.x);
    float sums[128];
    u32 stage = 0, phase = 0;
    const auto next = [&] {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    };
    const auto release = [&](u32 which) {
        if (CLUSTER == 2) {
            if (thread < 2) barrier_arrive_in(ring + EMPTY + 8 * which, thread);
        } else if (thread == 0) {
            barrier_arrive(ring + EMPTY + 8 * which);
        }
    };
    if (RESIDENT) barrier_wait(ring + ASKED_FULL, 0);
    for (u32 tile = unit.begin; tile < unit.end; ++tile) {
        u32 before = 0;
#pragma unroll 1
        for (u32 panel = 0; panel < STEPS / 2; ++panel) {
            barrier_wait(ring + FULL + 8 * stage, phase);
            const u32 b = ring + stage * STAGE;
            const u32 a = (RESIDENT ? ring + ASKED + panel * QUERY_PANEL : b + BASE_PANEL) + group * 64 * 64;
            products_fence();
            add_products(sums, descriptor(a, 64), descriptor(b, 64), panel);
            add_products(sums, descriptor(a + 32, 64), descriptor(b + 32, 64), 1);
            products_commit();
            products_wait<1>();
            if (panel) release(before);
            before = stage;
            next();
        }
        if (STEPS % 2) {
            barrier_wait(ring + FULL + 8 * stage, phase);
            const u32 b = ring + stage * STAGE;
            const u32 a = (RESIDENT ? ring + ASKED + (PANELS - 1) * QUERY_PANEL : b + BASE_PANEL) + group * 64 * 32;
            products_fence();
            add_products(sums, descriptor(a, 32), descriptor(b, 32), 1);
            products_commit();
            products_wait<0>();
            release(before);
            before = stage;
            next();
        } else {
            products_wait<0>();
        }
        release(before);
        examine(sums, tile * 256 + lane % 4 * 2, found);
    }
    found.hand_over(filter, unit.queries * 128 + row);
}

extern "C" __global__ __launch_bounds__(384, 1)
#if !RESIDENT
    __cluster_dims__(2, 1, 1)
#endif
    void filter(const __grid_constant__ Filter filter) {
    if (*filter.given_up) return;
    u32 ring = shared_address(matrices), thread = threadIdx.x % 128, rank = blockIdx.x % CLUSTER;
    asm volatile("" : "+r"(ring), "+r"(thread), "+r"(rank));
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            barrier_init(ring + FULL + 8 * stage, 1);
            barrier_init(ring + EMPTY + 8 * stage, 2 * CLUSTER);
        }
        barrier_init(ring + ASKED_FULL, 1);
        barrier_fence();
    }
    __syncthreads();
    if (CLUSTER == 2) cluster_sync();
    const Unit unit(filter, rank);
    const u32 group = threadIdx.x / 128;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread == 0) stream_panels(filter, unit, ring, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        compare_tiles(filter, unit, ring, thread, group);
    }
    if (CLUSTER == 2) cluster_sync();
}
