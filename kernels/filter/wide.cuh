// The filter for wide rows: both operands are in shared memory, and sums are floats or bit counts.
//
// A block has GROUPS warpgroups with 64 queries each, and a warp that streams the base's tiles, in panels of
// 2^LOG steps, through a ring buffer of STAGES. Queries stay in registers (HELD) or in shared memory
// (RESIDENT), or are streamed beside the base. The two blocks of a CLUSTER share every panel of the base:
// each loads half of it and multicasts it to both. Block or cluster c processes unit c: a block of queries
// for each of its blocks, and a share of the tiles.

#include "common/wgmma.cuh"
#include "filter/found.cuh"

constexpr u32 ASKED = GROUPS * 64;
constexpr bool STREAMED = !HELD && !RESIDENT;
constexpr u32 IN_PANEL = 1 << LOG, PANELS = (STEPS + IN_PANEL - 1) / IN_PANEL;
constexpr u32 LAST = STEPS - (PANELS - 1) * IN_PANEL, PITCH = 32 << LOG;
// In bytes: a panel of the queries and of the base, and all panels of a block's queries and of a tile.
constexpr u32 QUERY_PANEL = ASKED * PITCH, BASE_PANEL = TILE * PITCH;
constexpr u32 QUERY_IMAGE = QUERY_PANEL * PANELS, BASE_IMAGE = BASE_PANEL * PANELS;
constexpr u32 STAGE = BASE_PANEL + (STREAMED ? QUERY_PANEL : 0);
// Behind the ring buffer: the queries, if they stay; the mbarriers of full and of empty stages, and that of
// the queries.
constexpr u32 QUERIES_AT = STAGES * STAGE, FULL = QUERIES_AT + (RESIDENT ? QUERY_IMAGE : 0);
constexpr u32 EMPTY = FULL + 8 * STAGES, QUERIES_FULL = EMPTY + 8 * STAGES;
// Registers per thread of a warpgroup: 65536, less those of 128 streaming threads with 24 each.
constexpr u32 THREADS = GROUPS * 128 + 128;
constexpr u32 LEFT_REGISTERS = (65536 / THREADS / 8 * 8 * THREADS - 24 * 128) / (GROUPS * 128) / 8 * 8;
constexpr u32 GROUP_REGISTERS = LEFT_REGISTERS > 240 ? 240 : LEFT_REGISTERS;

#if OF_BITS
typedef int Sum32;
#else
typedef float Sum32;
#endif

// Position in the ring buffer: stage index and mbarrier phase parity.
struct Turn {
    u32 stage = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

__device__ __forceinline__ void stream_panels(const Filter& filter, const Unit& unit, u32 ring,
                                              u32 rank) {
    const unsigned char* queries =
        filter.queries + (u64)(unit.queries * CLUSTER + rank) * QUERY_IMAGE;
    if (RESIDENT) {
        barrier_expect(ring + QUERIES_FULL, QUERY_IMAGE);
        bulk_copy(ring + QUERIES_AT, queries, QUERY_IMAGE, ring + QUERIES_FULL);
    }
    Turn turn;
    for (u32 tile = unit.begin; tile < unit.end; ++tile) {
        const unsigned char* from = filter.tiles + (u64)tile * BASE_IMAGE;
        for (u32 panel = 0; panel < PANELS; ++panel, turn.advance()) {
            const u32 to = ring + turn.stage * STAGE, arrived = ring + FULL + 8 * turn.stage;
            barrier_wait(ring + EMPTY + 8 * turn.stage, turn.phase ^ 1);
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
                                              u32 rank, u32 thread, u32 group) {
    const u32 lane = thread % 32, row = group * 64 + thread / 32 * 16 + lane / 4;
    const u32 query = (unit.queries * CLUSTER + rank) * ASKED + row;
    Found found(filter, GROUPS * 128, threadIdx.x);
#if HELD
    u32 held[STEPS][4];
    load_queries(filter, query, held);
#endif
#if OF_BITS
    const Least of_row[2] = {least_of(filter, query), least_of(filter, query + 8)};
#endif
    Sum32 sums[TILE / 2];
    Turn turn;
    const auto release = [&](u32 which) {
        if (CLUSTER == 2) {
            if (thread < 2) barrier_arrive_in(ring + EMPTY + 8 * which, thread);
        } else if (thread == 0) {
            barrier_arrive(ring + EMPTY + 8 * which);
        }
    };
    // Adds the products of `steps` steps of a panel, once it has arrived.
    const auto add_panel = [&](u32 panel, u32 steps) {
        barrier_wait(ring + FULL + 8 * turn.stage, turn.phase);
        const u32 b = ring + turn.stage * STAGE;
        products_fence();
#pragma unroll
        for (u32 step = 0; step < IN_PANEL; ++step) {
            if (step >= steps) break;
            const u64 rows = descriptor(b + 32 * step, PITCH);
#if HELD
            add_products(sums, held[panel * IN_PANEL + step], rows, panel | step);
#else
            const u32 panels = RESIDENT ? ring + QUERIES_AT + panel * QUERY_PANEL : b + BASE_PANEL;
            const u32 a = panels + group * 64 * PITCH + 32 * step;
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
#pragma unroll(HELD ? PANELS : 1)
        for (u32 panel = 0; panel + 1 < PANELS; ++panel, turn.advance()) {
            add_panel(panel, IN_PANEL);
            products_wait<1>();
            if (panel) release(before);
            before = turn.stage;
        }
        add_panel(PANELS - 1, LAST);
        products_wait_for(sums);
        if (PANELS > 1) release(before);
        release(turn.stage);
        turn.advance();
#if OF_BITS
        const int least[2] = {of_row[0].in_tile(fewest), of_row[1].in_tile(fewest)};
        examine(sums, least, tile * TILE + lane % 4 * 2, found);
#else
        examine(sums, tile * TILE + lane % 4 * 2, found);
#endif
    }
    found.hand_over(filter, query);
}

extern "C" __global__ __launch_bounds__(THREADS, 1)
#if CLUSTER == 2
    __cluster_dims__(2, 1, 1)
#endif
    void filter(const __grid_constant__ Filter filter) {
    if (*filter.given_up) return;
    u32 ring = shared_address(matrices), thread = threadIdx.x % 128, rank = blockIdx.x % CLUSTER;
    asm volatile("" : "+r"(ring), "+r"(thread), "+r"(rank));
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            barrier_init(ring + FULL + 8 * stage, 1);
            barrier_init(ring + EMPTY + 8 * stage, GROUPS * CLUSTER);
        }
        barrier_init(ring + QUERIES_FULL, 1);
        barrier_fence();
    }
    __syncthreads();
    if (CLUSTER == 2) cluster_sync();
    const Unit unit(filter, blockIdx.x / CLUSTER);
    const u32 group = threadIdx.x / 128;
    if (group == GROUPS) {
        // PTX ISA, Miscellaneous Instructions: setmaxnreg.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread == 0) stream_panels(filter, unit, ring, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUP_REGISTERS));
        compare_tiles(filter, unit, ring, rank, thread, group);
    }
    if (CLUSTER == 2) cluster_sync();
}
