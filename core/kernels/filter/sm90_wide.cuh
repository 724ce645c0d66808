// The filter for wide rows: both operands are in shared memory, and sums are floats or bit counts.
//
// A block has WARPGROUPS warpgroups with 64 queries each, and a warp that streams the base's tiles, in panels
// of 2^LOG steps, through a ring buffer of STAGES. Queries stay in registers (IN_REGISTERS) or in shared
// memory (RESIDENT), or are streamed beside the base. The two blocks of a CLUSTER share every panel of the
// base: each loads half of it and multicasts it to both. Block or cluster c processes unit c: a block of
// queries for each of its blocks, and a share of the tiles.

#include "common/sm90_wgmma.cuh"
#include "filter/sm90_hits.cuh"

constexpr u32 BLOCK_QUERIES = WARPGROUPS * 64;
constexpr bool STREAMED = !IN_REGISTERS && !RESIDENT;
constexpr u32 IN_PANEL = 1 << LOG, PANELS = (STEPS + IN_PANEL - 1) / IN_PANEL;
constexpr u32 LAST = STEPS - (PANELS - 1) * IN_PANEL, PITCH = 32 << LOG;
// In bytes: a panel of the queries and of the base, and all panels of a block's queries and of a tile.
constexpr u32 QUERY_PANEL = BLOCK_QUERIES * PITCH, BASE_PANEL = TILE * PITCH;
constexpr u32 QUERY_TILE_BYTES = QUERY_PANEL * PANELS, BASE_TILE_BYTES = BASE_PANEL * PANELS;
constexpr u32 STAGE = BASE_PANEL + (STREAMED ? QUERY_PANEL : 0);
// Behind the ring buffer: the queries, if they stay; the mbarriers of full and of empty stages, and that of
// the queries.
constexpr u32 QUERIES_AT = STAGES * STAGE, FULL = QUERIES_AT + (RESIDENT ? QUERY_TILE_BYTES : 0);
constexpr u32 EMPTY = FULL + 8 * STAGES, QUERIES_FULL = EMPTY + 8 * STAGES;
// Of the warpgroups, and of one more, a single warp of which streams.
constexpr u32 THREADS = WARPGROUPS * 128 + 128;

#if OF_BITS
typedef int Sum32;
#else
typedef float Sum32;
#endif

__device__ __forceinline__ void stream_panels(const Filter& filter, const Unit& unit, u32 ring,
                                              u32 rank) {
    const unsigned char* queries =
        filter.queries + (u64)(unit.queries * CLUSTER + rank) * QUERY_TILE_BYTES;
    if (RESIDENT) {
        barrier_expect(ring + QUERIES_FULL, QUERY_TILE_BYTES);
        bulk_copy(ring + QUERIES_AT, queries, QUERY_TILE_BYTES, ring + QUERIES_FULL);
    }
    RingPosition<STAGES> position;
    for (u32 tile = unit.begin; tile < unit.end; ++tile) {
        const unsigned char* from = filter.tiles + (u64)tile * BASE_TILE_BYTES;
        for (u32 panel = 0; panel < PANELS; ++panel, position.advance()) {
            const u32 to = ring + position.stage * STAGE, arrived = ring + FULL + 8 * position.stage;
            barrier_wait(ring + EMPTY + 8 * position.stage, position.parity ^ 1);
            barrier_expect(arrived, STAGE);
            if (CLUSTER == 2) {
                const u32 half = rank * (BASE_PANEL / 2);
                bulk_copy_to_both(to + half, from + (u64)panel * BASE_PANEL + half, BASE_PANEL / 2,
                                  arrived);
            } else {
                bulk_copy(to, from + (u64)panel * BASE_PANEL, BASE_PANEL, arrived);
            }
            if (STREAMED) {
                bulk_copy(to + BASE_PANEL, queries + (u64)panel * QUERY_PANEL, QUERY_PANEL, arrived);
            }
        }
    }
}

// A thread's fragment of the rows `row` and `row` + 8 of its warp's 16 queries.
__device__ __forceinline__ void load_queries(const Filter& filter, u32 row, u32 (&a)[STEPS][4]) {
    constexpr u32 WORDS = PANELS * IN_PANEL * 8;
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step) {
        const u32* from = (const u32*)filter.queries + (u64)row * WORDS + step * 8 + Warp::rank() % 4;
        a[step][0] = from[0];
        a[step][1] = from[WORDS * 8];
        a[step][2] = from[4];
        a[step][3] = from[WORDS * 8 + 4];
    }
}

// Computes a thread's sums, tile after tile, and records its hits.
__device__ __forceinline__ void compare_tiles(const Filter& filter, const Unit& unit, u32 ring,
                                              u32 rank, u32 thread, u32 warpgroup) {
    const u32 lane = thread % 32, row = warpgroup * 64 + thread / 32 * 16 + lane / 4;
    const u32 query = (unit.queries * CLUSTER + rank) * BLOCK_QUERIES + row;
    ThreadHits hits(filter, WARPGROUPS * 128, threadIdx.x);
#if IN_REGISTERS
    u32 in_registers[STEPS][4];
    load_queries(filter, query, in_registers);
#endif
#if OF_BITS
    const Least of_row[2] = {least_of(filter, query), least_of(filter, query + 8)};
#endif
    Sum32 sums[TILE / 2];
    RingPosition<STAGES> position;
    const auto release = [&](u32 which) {
        if (CLUSTER == 2) {
            if (thread < 2) barrier_arrive_in(ring + EMPTY + 8 * which, thread);
        } else if (thread == 0) {
            barrier_arrive(ring + EMPTY + 8 * which);
        }
    };
    // Adds the products of `steps` steps of a panel, once it has arrived.
    const auto add_panel = [&](u32 panel, u32 steps) {
        barrier_wait(ring + FULL + 8 * position.stage, position.parity);
        const u32 b = ring + position.stage * STAGE;
        products_fence();
#pragma unroll
        for (u32 step = 0; step < IN_PANEL; ++step) {
            if (step >= steps) break;
            const u64 rows = descriptor(b + 32 * step, PITCH);
#if IN_REGISTERS
            add_products(sums, in_registers[panel * IN_PANEL + step], rows, panel | step);
#else
            const u32 panels = RESIDENT ? ring + QUERIES_AT + panel * QUERY_PANEL : b + BASE_PANEL;
            const u32 a = panels + warpgroup * 64 * PITCH + 32 * step;
            add_products(sums, descriptor(a, PITCH), rows, panel | step);
#endif
        }
        products_commit();
    };
    if (RESIDENT) barrier_wait(ring + QUERIES_FULL, 0);
    for (u32 tile = unit.begin; tile < unit.end; ++tile) {
#if OF_BITS
        // Loaded while products are computed.
        const float fewest = filter.fewest[tile];
#endif
        u32 before = 0;
#pragma unroll(IN_REGISTERS ? PANELS : 1)
        for (u32 panel = 0; panel + 1 < PANELS; ++panel, position.advance()) {
            add_panel(panel, IN_PANEL);
            products_wait<1>();
            if (panel) release(before);
            before = position.stage;
        }
        add_panel(PANELS - 1, LAST);
        products_wait_for(sums);
        if (PANELS > 1) release(before);
        release(position.stage);
        position.advance();
#if OF_BITS
        const int least[2] = {of_row[0].in_tile(fewest), of_row[1].in_tile(fewest)};
        examine(sums, least, tile * TILE + lane % 4 * 2, hits);
#else
        examine(sums, tile * TILE + lane % 4 * 2, hits);
#endif
    }
    hits.hand_over(filter, query);
}

extern "C" __global__ __launch_bounds__(THREADS, 1)
#if CLUSTER == 2
    __cluster_dims__(2, 1, 1)
#endif
    void filter(const __grid_constant__ Filter filter) {
    if (*filter.given_up) return;
    // Forced into registers: otherwise loops read special registers again.
    u32 ring = shared_address(matrices), thread = threadIdx.x % 128, rank = blockIdx.x % CLUSTER;
    asm volatile("" : "+r"(ring), "+r"(thread), "+r"(rank));
    if (threadIdx.x == 0) {
        init_ring<STAGES>(ring + FULL, ring + EMPTY, WARPGROUPS * CLUSTER);
        barrier_init(ring + QUERIES_FULL, 1);
        barrier_fence();
    }
    __syncthreads();
    if (CLUSTER == 2) cluster_sync();
    const Unit unit(filter, blockIdx.x / CLUSTER);
    const u32 warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        lower_registers<PRODUCER_REGISTERS>();
        if (thread == 0) stream_panels(filter, unit, ring, rank);
    } else {
        raise_registers<consumer_registers(WARPGROUPS)>();
        compare_tiles(filter, unit, ring, rank, thread, warpgroup);
    }
    if (CLUSTER == 2) cluster_sync();
}
