// Packing of bit rows for bit products, which count the bits that both rows of a pair have.
//
// With b(q) and b(x) the numbers of set bits in both rows, a pair is within distance d if it shares at least
//   Hamming:  (b(q) + b(x)) / 2 - d / 2,
//   Jaccard:  s (b(q) + b(x)) with s = (1 - d) / (2 - d)
// bits. The filter replaces b(x) by the minimum m over the rows of a tile: a pair passes if it shares at least
//   s b(q) - (d / 2 for Hamming) + s m
// bits, s being 1/2 for Hamming. Rows are sorted by their set bits, so m is near b(x): in windows that start with
// FIRST_WINDOW panels and double up to WINDOW panels.

#include "filter/swizzled_tile.cuh"
#include "filter/least.cuh"
#include "filter/state.cuh"
#include "search/lists.cuh"

// The layout of packed bit rows. The same struct as in src/device/cuda/search/filter/launch_bits.rs.
struct BitPack {
    u32 rows, dim;         // rows; words of a row in a panel
    u32 panels, stride;    // of the base
    u32 pitch;             // words of a row in row-major order
    u32 steps, log, tile;  // steps in a row, as it is stored; see `swizzled_offset`; rows of a tile, or 0
};

__host__ __device__ constexpr u32 log_2(u32 power) { return power > 1 ? 1 + log_2(power / 2) : 0; }

// The address of a base row by its position before rows are sorted, or null.
__device__ __forceinline__ const u32* row_of(const u32* base, const BitPack& pack, u32 position) {
    const u32 visit = position / PANEL, place = position % PANEL;
    if (visit >= pack.panels) return nullptr;
    const u32 panel = (u32)((u64)visit * pack.stride % pack.panels);
    if (base_row(panel, place, pack.panels) >= pack.rows) return nullptr;
    return base + (u64)panel * pack.dim * PANEL + place;
}

__device__ __forceinline__ u32 bits_of(const u32* row, const BitPack& pack) {
    u32 bits = 0;
#pragma unroll 8
    for (u32 d = 0; d < pack.dim; ++d) bits += __popc(row[(u64)d * PANEL]);
    return bits;
}

// The number of windows before those of WINDOW panels.
constexpr u32 SMALL_WINDOWS = log_2(WINDOW / FIRST_WINDOW) + 1;

// Sorts the positions of every window by their rows' set bits, and writes a lower bound on the set bits of
// each panel. Positions without a row come last. A block per window; shared memory: one word per position.
extern "C" __global__ __launch_bounds__(1024) void sort_rows(const u32* __restrict__ base,
                                                             u32* __restrict__ order,
                                                             float* __restrict__ fewest, BitPack pack) {
    // A key has a row's set bits (saturated) above its position.
    constexpr u32 PLACES = log_2(WINDOW * PANEL), NO_ROW = (1u << (32 - PLACES)) - 1;
    const u32 window = blockIdx.x;
    const u32 panels = window >= SMALL_WINDOWS ? WINDOW : FIRST_WINDOW << (window ? window - 1 : 0);
    const u32 before = window >= SMALL_WINDOWS ? (window - SMALL_WINDOWS + 1) * WINDOW : window ? panels : 0;
    const u32 first = before * PANEL, count = panels * PANEL;
    u32* keys = (u32*)shared;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        const u32* row = row_of(base, pack, first + i);
        keys[i] = (row ? min(bits_of(row, pack), NO_ROW - 1) : NO_ROW) << PLACES | i;
    }
    sort_power_of_two<Block>(keys, count);
    for (u32 i = threadIdx.x; i < count && first + i < pack.panels * PANEL; i += blockDim.x) {
        order[first + i] = first + (keys[i] & (WINDOW * PANEL - 1));
        if (i % PANEL == 0) fewest[(first + i) / PANEL] = (float)(keys[i] >> PLACES);
    }
}

// The byte offset of a word of a row, in swizzled tiles or, where `tile` is 0, in row-major order.
__device__ __forceinline__ u64 place_of(const BitPack& pack, u64 row, u32 word) {
    if (pack.tile == 0) return row * (pack.steps * 32) + word * 4;
    return row / pack.tile * pack.tile * (pack.steps * 32) +
           swizzled_offset(pack.steps, pack.log, pack.tile, row % pack.tile, word * 2);
}

// Writes a row, or zeros, to its place in swizzled tiles, and a row also in row-major order.
__device__ __forceinline__ void pack_row(const u32* row, unsigned char* tiles, u32* rows, u64 at,
                                         const BitPack& pack) {
    const u32 all = max(pack.steps * 8, pack.pitch);
    for (u32 start = 0; start < all; start += 4) {
        u32 words[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            words[i] = row && start + i < pack.dim ? row[(u64)(start + i) * PANEL] : 0;
        }
        const uint4 four = make_uint4(words[0], words[1], words[2], words[3]);
        if (row && start < pack.pitch) *(uint4*)(rows + at * pack.pitch + start) = four;
        if (start < pack.steps * 8) *(uint4*)(tiles + place_of(pack, at, start)) = four;
    }
}

// Packs base rows in their sorted order. A block per panel of the swizzled tiles, a thread per row.
extern "C" __global__ __launch_bounds__(PANEL) void pack_base(const u32* __restrict__ base,
                                                              const u32* __restrict__ order,
                                                              unsigned char* __restrict__ tiles,
                                                              u32* __restrict__ rows, BitPack pack) {
    const u32 position = blockIdx.x * PANEL + threadIdx.x;
    pack_row(row_of(base, pack, order[position]), tiles, rows, position, pack);
}

// Packs queries, from their panels. A thread per row, padding included.
extern "C" __global__ __launch_bounds__(PANEL) void pack_queries(
    const u32* __restrict__ queries, unsigned char* __restrict__ tiles, u32* __restrict__ rows,
    u32* __restrict__ query_bits, Least* __restrict__ thresholds, BitPack pack) {
    const u32 query = blockIdx.x * PANEL + threadIdx.x;
    const u32* from = queries + (u64)blockIdx.x * pack.dim * PANEL + threadIdx.x;
    const u32* row = query < pack.rows ? from : nullptr;
    pack_row(row, tiles, rows, query, pack);
    thresholds[query] = Least::unreachable();
    if (row) query_bits[query] = bits_of(row, pack);
}

// The filter thresholds of queries, from the distance thresholds of their lists. A thread per query.
extern "C" __global__ __launch_bounds__(256) void set_thresholds(
    const Threshold* __restrict__ list_thresholds, const u32* __restrict__ query_bits, Least* __restrict__ thresholds,
    u32* __restrict__ counts, u32* state, BitPack pack) {
    const u32 query = blockIdx.x * blockDim.x + threadIdx.x;
    if (query == 0) state[OVERFLOWED] = state[COUNTED] = 0;
    if (query >= pack.rows) return;
    const double bits = query_bits[query], most = pack.dim * 32.0, threshold = list_thresholds[query];
    Least least = Least::unreachable();
    bool tells = true;
    if (threshold >= 0) {
        // A lower bound on the similarity 1 - d, with a margin for rounding.
        const double alike = fmax(0.0, 1 - 1e-6 - threshold);
        const double share = SUM == DIFFERENT_BITS ? 0.5 : alike / (1 + alike);
        const double beside = SUM == DIFFERENT_BITS ? fmin(threshold, most) / 2 : 0;
        // Margin for the rounding to float, below and in `Least::in_tile`.
        const double offset = share * bits - beside - 1e-6 * (bits + most);
        least = {__double2float_rd(offset), __double2float_rd(share)};
        // If every row passes, the query is marked as overflowed instead of recording hits.
        tells = offset + share * most > 0;
    }
    thresholds[query] = tells ? least : Least::unreachable();
    counts[query] = tells ? 0 : LOST;
}
