// The filter by products of single warps, on any device from sm_80 on.
//
// A block has 128 queries and tiles of 128 base rows; each of its eight warps has 64 queries and 32 rows.
// Panels of 2^LOG steps come through a ring buffer of STAGES: panels of the base or, unless RESIDENT, of both
// sides. Block b processes unit b.

#include "common/copy.cuh"
#include "common/sm80_mma.cuh"
#include "filter/unit.cuh"

constexpr u32 THREADS = 256, TILE = 128, ACROSS = 64, ALONG = 32;
constexpr u32 IN_PANEL = 1 << LOG, PANELS = (STEPS + IN_PANEL - 1) / IN_PANEL;
constexpr u32 LAST = STEPS - (PANELS - 1) * IN_PANEL, PITCH = 32 << LOG;
// A panel of either side, in bytes.
constexpr u32 PANEL_BYTES = TILE * PITCH, STAGE = PANEL_BYTES * (RESIDENT ? 1 : 2);
// Behind the ring buffer: the queries, if they stay.
constexpr u32 QUERIES_AT = STAGES * STAGE;

#if OF_BITS
typedef int Sum32;
__device__ __forceinline__ u32 word(int sum) { return (u32)sum; }
#else
typedef float Sum32;
__device__ __forceinline__ u32 word(float sum) { return __float_as_uint(sum); }
#endif

// The swizzle of a row's 16-byte chunks: see `swizzled_offset`.
__device__ __forceinline__ u32 swizzle_of(u32 row) {
    return LOG == 2 ? row & 7 : LOG == 1 ? row >> 1 & 3 : row >> 2 & 1;
}

// Starts copying whole panels.
__device__ __forceinline__ void fetch(unsigned char* to, const unsigned char* from, u32 bytes) {
    for (u32 i = threadIdx.x * 16; i < bytes; i += THREADS * 16) copy_16(to + i, from + i);
}

// The sums of a warp: four times 16 queries by four times 8 rows.
struct WarpSums {
    Sum32 all[4][4][4];

    // Starts sums so that passing pairs have sums >= 0.
    template <typename First> __device__ __forceinline__ void begin(First first) {
#pragma unroll
        for (u32 i = 0; i < 64; ++i) all[i / 16][i / 4 % 4][i % 4] = first(i / 16 * 2 + i / 2 % 2);
    }

    // Adds the products of `COUNT` steps of a panel, for this warp's queries and rows.
    template <u32 COUNT> __device__ __forceinline__ void add(u32 queries, u32 rows) {
        const u32 lane = Warp::rank(), swizzle = swizzle_of(lane);
        const u32 of_query = (lane & 15) * PITCH, of_row = ((lane >> 4) * 8 + lane % 8) * PITCH;
#pragma unroll
        for (u32 step = 0; step < COUNT; ++step) {
            u32 a[4][4], b[2][4];
            const u32 in_query = ((step * 2 + (lane >> 4)) ^ swizzle) * 16;
            const u32 in_row = ((step * 2 + (lane >> 3 & 1)) ^ swizzle) * 16;
#pragma unroll
            for (u32 i = 0; i < 4; ++i) load_matrices(a[i], queries + i * 16 * PITCH + of_query + in_query);
#pragma unroll
            for (u32 i = 0; i < 2; ++i) load_matrices(b[i], rows + i * 16 * PITCH + of_row + in_row);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    add_product(all[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }

    // Records the pairs that pass. `query` and `position` are those of the warp's first pair.
    __device__ __forceinline__ void examine(const Filter& filter, u32 query, u32 position) const {
        u32 signs = word(all[0][0][0]);
#pragma unroll
        for (u32 i = 1; i < 64; ++i) signs &= word(all[i / 16][i / 4 % 4][i % 4]);
        if (__builtin_expect(signs >> 31, 1)) return;
        query += Warp::rank() / 4;
        position += Warp::rank() % 4 * 2;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            u32 mask = 0;  // sign bits, the first at the top
#pragma unroll
            for (u32 i = 0; i < 32; ++i) {
                mask = __funnelshift_l(word(all[half * 2 + i / 16][i / 4 % 4][i % 4]), mask, 1);
            }
            mask = ~mask;
            while (mask) {
                const u32 i = __clz(mask);
                mask &= ~(0x80000000u >> i);
                note(filter, query + half * 32 + i / 16 * 16 + i / 2 % 2 * 8,
                     position + i / 4 % 4 * 8 + i % 2);
            }
        }
    }

    static __device__ __forceinline__ void note(const Filter& filter, u32 query, u32 position) {
        if (query >= filter.query_rows) return;
        const u32 at = atomicAdd(filter.counts + query, 1u);
        if (at < filter.room) filter.hits[query * filter.hits_pitch + at] = position;
    }
};

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void filter(
    const __grid_constant__ Filter filter) {
    if (*filter.given_up) return;
    unsigned char* ring = (unsigned char*)shared;
    const u32 ring_at = (u32)__cvta_generic_to_shared(ring);
    const Unit unit(filter, blockIdx.x);
    const u32 warp = threadIdx.x / 32, across = warp / 4 * ACROSS, along = warp % 4 * ALONG;
    const u32 query = unit.queries * TILE + across;
    const unsigned char* queries = filter.queries + (u64)unit.queries * (PANELS * PANEL_BYTES);
#if OF_BITS
    Least least[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) least[i] = least_of(filter, query + i * 8 + Warp::rank() / 4);
    float fewest = filter.fewest[unit.begin];
#endif
    if (RESIDENT) fetch(ring + QUERIES_AT, queries, PANELS * PANEL_BYTES);

    // Starts fetching the next panel, if there is one, and commits it as a group of copies.
    u32 next_tile = unit.begin, next_panel = 0, next_stage = 0;
    const auto fetch_next = [&] {
        if (next_tile < unit.end) {
            unsigned char* to = ring + next_stage * STAGE;
            const u64 panel = (u64)next_tile * PANELS + next_panel;
            fetch(to, filter.tiles + panel * PANEL_BYTES, PANEL_BYTES);
            if (!RESIDENT) fetch(to + PANEL_BYTES, queries + next_panel * PANEL_BYTES, PANEL_BYTES);
            if (++next_panel == PANELS) {
                next_panel = 0;
                ++next_tile;
            }
            next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
        }
        commit_copies();
    };
    for (u32 i = 0; i + 1 < STAGES; ++i) fetch_next();

    u32 stage = 0;
    WarpSums sums;
    // Waits until all warps have the next panel and have finished the one before.
    const auto panel_at = [&] {
        wait_for_groups<STAGES - 2>();
        __syncthreads();
        fetch_next();
        const u32 at = ring_at + stage * STAGE;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        return at;
    };
    const auto queries_at = [&](u32 at, u32 panel) {
        return (RESIDENT ? ring_at + QUERIES_AT + panel * PANEL_BYTES : at + PANEL_BYTES) + across * PITCH;
    };
    for (u32 tile = unit.begin; tile < unit.end; ++tile) {
#if OF_BITS
        sums.begin([&](u32 row) { return -least[row].in_tile(fewest); });
        fewest = filter.fewest[min(tile + 1, unit.end - 1)];
#else
        sums.begin([](u32) { return 0.0f; });
#endif
#pragma unroll 1
        for (u32 panel = 0; panel + 1 < PANELS; ++panel) {
            const u32 at = panel_at();
            sums.add<IN_PANEL>(queries_at(at, panel), at + along * PITCH);
        }
        const u32 at = panel_at();
        sums.add<LAST>(queries_at(at, PANELS - 1), at + along * PITCH);
        sums.examine(filter, query, tile * TILE + along);
    }
}
