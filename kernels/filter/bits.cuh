// Rows of bits for products of bits, which count the bits that both rows of a pair have.
//
// Distances also ask for the bits of each row alone. With |q| and |x| of them, of which |x| is at most M,
// a pair is within a distance if it shares at least s (|q| + |x|) bits, minus half the distance where that
// is Hamming's, with s of at most 1/2: it is 1/2 for Hamming's distance, and (1 - d) / (2 - d) for
// Jaccard's distance d. So rows have lanes behind their elements: row x has the first half of M - |x| of
// them, rounded up, and the query a share of 2 s of any first few, rounded up. The lanes that both have
// are at least s (M - |x|), and less than 1.5 more, and a pair passes if shared bits and lanes are at least
//   s (|q| + M), minus half the distance,
// which is the query's threshold.

#include "filter/image.cuh"
#include "filter/state.cuh"
#include "search/lists.cuh"

// Of all rows of the base, the most bits, and the most that a row does not have. Zeros at first. Read back
// by the host, which has the same struct in src/device/cuda/search/filter/launch_bits.rs.
struct BitRange {
    u32 most, most_clear;
};
static_assert(sizeof(BitRange) == 8, "the host has the same struct");

// How rows of bits are packed. The same struct as in src/device/cuda/search/filter/launch_bits.rs.
struct BitPack {
    u32 rows, dim;         // rows; words of a row in a panel
    u32 panels, stride;    // of the base
    u32 pitch;             // words of a row where rows lie one after the other
    u32 steps, log, tile;  // steps in a row, as it is stored; see `image_offset`; rows of a tile, or 0
    u32 most, lanes;       // the most bits of a base row; words of lanes
};
static_assert(sizeof(BitPack) == 40, "the host has the same struct");

// The threshold that nothing reaches.
constexpr int NOTHING = 0x7fffffff;
// Shares of lanes are in units of 2^-UNIT.
constexpr u32 UNIT = 20;

// The bits of every row. A block per panel, a thread per row.
extern "C" __global__ __launch_bounds__(PANEL) void count_bits(const u32* __restrict__ base,
                                                               BitRange* range, u32 rows, u32 dim,
                                                               u32 panels) {
    const u32* from = base + (u64)blockIdx.x * dim * PANEL + threadIdx.x;
    u32 count = 0;
#pragma unroll 8
    for (u32 d = 0; d < dim; ++d) count += __popc(from[(u64)d * PANEL]);
    const bool is_row = base_row(blockIdx.x, threadIdx.x, panels) < rows;
    const u32 most = __reduce_max_sync(~0u, is_row ? count : 0);
    const u32 most_clear = __reduce_max_sync(~0u, is_row ? dim * 32 - count : 0);
    if (threadIdx.x % 32 == 0) {
        if (most > range->most) atomicMax(&range->most, most);
        if (most_clear > range->most_clear) atomicMax(&range->most_clear, most_clear);
    }
}

// The first `count` lanes, as the word of 32 of them that follows `before` others.
__device__ __forceinline__ u32 first_lanes(u32 count, u32 before) {
    return count >= before + 32 ? ~0u : count > before ? (1u << (count - before)) - 1 : 0;
}

// Where a word of a row lies in images, or (without tiles) in rows one after the other, in bytes.
__device__ __forceinline__ u64 place_of(const BitPack& pack, u64 row, u32 word) {
    if (pack.tile == 0) return row * (pack.steps * 32) + word * 4;
    return row / pack.tile * pack.tile * (pack.steps * 32) +
           image_offset(pack.steps, pack.log, pack.tile, row % pack.tile, word * 2);
}

// Writes a row to its place in images, and as it is; returns its bits. Words behind its elements are
// `lanes(bits, lanes before the word)`.
template <typename Lanes>
__device__ __forceinline__ u32 pack_row(const u32* from, unsigned char* images, u32* rows, u64 at,
                                        bool is_row, const BitPack& pack, Lanes lanes) {
    u32 bits = 0;
    for (u32 d = 0; d < pack.dim; ++d) bits += is_row ? __popc(from[(u64)d * PANEL]) : 0;
    const u32 all = max(pack.steps * 8, pack.pitch);
    for (u32 start = 0; start < all; start += 4) {
        u32 words[4], raw[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 word = start + i;
            raw[i] = is_row && word < pack.dim ? from[(u64)word * PANEL] : 0;
            words[i] = word < pack.dim ? raw[i] : is_row ? lanes(bits, (word - pack.dim) * 32) : 0;
        }
        if (is_row && start < pack.pitch) {
            *(uint4*)(rows + at * pack.pitch + start) = make_uint4(raw[0], raw[1], raw[2], raw[3]);
        }
        if (start < pack.steps * 8) {
            *(uint4*)(images + place_of(pack, at, start)) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    return bits;
}

// Base rows, by position, as `pack_base` of numbers has them. A block per panel of the images' tiles, a
// thread per row.
extern "C" __global__ __launch_bounds__(PANEL) void pack_base(const u32* __restrict__ base,
                                                              unsigned char* __restrict__ images,
                                                              u32* __restrict__ rows, BitPack pack) {
    const u32 visit = blockIdx.x, place = threadIdx.x;
    const bool is_panel = visit < pack.panels;
    const u32 panel = is_panel ? (u32)((u64)visit * pack.stride % pack.panels) : 0;
    const bool is_row = is_panel && base_row(panel, place, pack.panels) < pack.rows;
    const u64 position = (u64)visit * PANEL + place;
    const u32* from = base + (u64)panel * pack.dim * PANEL + place;
    pack_row(from, images, rows, position, is_row, pack,
             [&](u32 bits, u32 before) { return first_lanes((pack.most - bits + 1) / 2, before); });
}

// Queries, from their panels. A thread per row, padding included.
extern "C" __global__ __launch_bounds__(PANEL) void pack_queries(
    const u32* __restrict__ queries, unsigned char* __restrict__ images, u32* __restrict__ rows,
    u32* __restrict__ asked, int* __restrict__ thresholds, BitPack pack) {
    const u32 query = blockIdx.x * PANEL + threadIdx.x;
    const bool is_row = query < pack.rows;
    const u32* from = queries + (u64)blockIdx.x * pack.dim * PANEL + threadIdx.x;
    const u32 bits =
        pack_row(from, images, rows, query, is_row, pack, [](u32, u32) { return 0; });
    thresholds[query] = NOTHING;
    if (is_row) asked[query] = bits;
}

// A query's threshold, and its share of lanes.
struct Share {
    int threshold;
    u32 of_lanes;

    __device__ __forceinline__ Share(Reach reach, u32 bits, const BitPack& pack) {
        threshold = NOTHING;
        of_lanes = 0;
        if (reach < 0) return;
        if (SUM == DIFFERENT_BITS) {
            const int distance = (int)fminf(reach, (float)(pack.dim * 32));
            threshold = ((int)(bits + pack.most) - distance + 1) >> 1;
            of_lanes = 1u << UNIT;
        } else {
            // A little less alike than it must be.
            const double alike = fmax(0.0, 1 - 1e-6 - (double)reach), share = alike / (1 + alike);
            threshold = (int)ceil(share * (bits + pack.most) - 1e-6);
            of_lanes = min((u32)ceil(2 * share * (1u << UNIT)), 1u << UNIT);
        }
    }
    // How many of the first lanes it has.
    __device__ __forceinline__ u32 of_first(u32 lanes) const {
        return (u32)(((u64)of_lanes * lanes + (1u << UNIT) - 1) >> UNIT);
    }
    // The word of lanes that follows `before` others.
    __device__ __forceinline__ u32 word(u32 before) const {
        u32 bits = 0;
        for (u32 i = 0; i < 32; ++i) {
            bits |= of_first(before + i + 1) > of_first(before + i) ? 1u << i : 0;
        }
        return bits;
    }
};

// The thresholds of queries from the reaches of their lists, and their lanes. A thread per query.
extern "C" __global__ __launch_bounds__(256) void set_thresholds(
    const Reach* __restrict__ reaches, const u32* __restrict__ asked, int* __restrict__ thresholds,
    u32* __restrict__ counts, u32* state, unsigned char* __restrict__ images, BitPack pack) {
    const u32 query = blockIdx.x * blockDim.x + threadIdx.x;
    if (query == 0) state[CROWDED] = state[COUNTED] = 0;
    if (query >= pack.rows) return;
    const Share share(reaches[query], asked[query], pack);
    // Of a query that all rows pass for, none need be noted.
    const bool tells = share.threshold > 0;
    thresholds[query] = tells ? share.threshold : NOTHING;
    counts[query] = tells ? 0 : LOST;
    for (u32 i = 0; i < pack.lanes; ++i) {
        *(u32*)(images + place_of(pack, query, pack.dim + i)) = share.word(i * 32);
    }
}
