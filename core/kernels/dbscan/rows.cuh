// The rows of DBSCAN, in tiles of TILE neighbouring rows, under a tree of bounding boxes.
//
// A slot is a position in a tile. Groups of rows (SQL partitions) have tiles of their own: the last tile of a
// group may have free slots at its end. Nodes of level 0 are tiles; a node of a higher level has 32 nodes of
// the level below, possibly of several groups.

#include "common/warp.cuh"

// In place of a row or slot: none. In place of a cluster: noise.
constexpr u32 NONE = 0xffffffff;
// In `cursors`: an item is done.
constexpr u32 DONE = 0xffffffff;

// Elements of a row that are loaded together; a row consists of chunks, the last one padded with zeros, which
// change no sum.
constexpr u32 WIDTH = DIM == 1 ? 1 : DIM == 2 || ELEMENT == F64 ? 2 : 4;
struct alignas(sizeof(Scalar) * WIDTH) Chunk {
    Scalar of[WIDTH];
};
// Elements and chunks of a row, if they are known at compile time.
constexpr u32 ELEMENTS = DIM == 0 ? 1 : DIM;
constexpr u32 CHUNKS = (ELEMENTS + WIDTH - 1) / WIDTH;

// Coordinates of boxes: all dimensions, some of them, or the number of set bits.
constexpr u32 COORDINATES = ELEMENT == BITS ? 1 : DIM == 0 || DIM > 16 ? 16 : DIM;

// Whether rows are compared by the product of their directions.
constexpr bool IS_DIRECTION = SUM == PRODUCTS;

// Whether tensor-core products filter pairs: the host defines FILTERED if the device has them and the
// dimension is given at run time. HAS_FP16: numbers are then fp16.
constexpr bool IS_FILTERED = FILTERED, HAS_FP16 = IS_FILTERED && ELEMENT != BITS;
static_assert(!IS_FILTERED || (DIM == 0 && SUM != ABSOLUTE), "rows that products can compare");

// Whether the comparison reads the number of set bits of each row.
constexpr bool HAS_BITS = SUM == SHARED_BITS || (IS_FILTERED && ELEMENT == BITS);

// The direction of a row under cosine and pearson; see `Direction` in src/metric.rs. The same struct as in
// src/device/cuda/dbscan/structs.rs, as are the structs below.
struct Direction {
    double unit, mean, inverse;
};

// A weight as a 128-bit multiple of the smallest unit that occurs. Without weights (WEIGHTED is 0): the
// number of rows.
struct Weight {
    u64 low, high;
};

// A row minus the centre, in units, rounded to fp16 numbers times a power of two, the scale: the squared norm
// of the rounded row, the scale, and a bound on the rounding error.
struct RoundedRow {
    float square, scale, error, unused;
};

// The operands of tensor-core products.
struct Products {
    uint4* slices;         // by slot, `count` slices of 64 bytes: fp16 numbers, or bits
    RoundedRow* rounded;      // by slot
    float2* most;          // by tile: the largest error and square of its rows
    const double* centre;  // by dimension
    double unit;           // one over a unit: a power of two
    float surely, maybe;   // distances up to `surely` are within eps, distances above `maybe` are not
    u32 count, unused;     // slices of a row
};

// Counters of the work done, and of the items that a stage has left.
struct Progress {
    u32 next;        // the next item
    u32 unfinished;  // whether items are left
    u64 tested, pruned, joined, pairs, rechecked;
};

// The rows, and all state that kernels keep for them.
struct Dbscan {
    // The input.
    const Scalar* rows;           // row by row
    const Direction* directions;  // by row; for products
    const Weight* weights;        // by row, if WEIGHTED
    const u32* ends;              // the end of each group of rows
    const u32* first_tiles;       // the first tile of each group, then the number of tiles
    const u32* box_dims;          // COORDINATES
    // Rows in order.
    const u32* sorted;
    // Rows in tiles.
    u32* order;        // by slot: the row, or NONE
    uint2* ranges;     // by tile: the tiles of its group, from .x to .y
    Chunk* chunks;     // tile by tile: the first chunk of all its rows, the second, …
    Real* inverses;    // by slot, for products: one over the row's length
    u32* bits;         // by slot, if HAS_BITS: its number of set bits
    float* boxes;      // by level and 32 nodes: for each coordinate, 32 lows and 32 highs
    Weight* totals;    // by node: the weight of its rows, at most `enough`
    // The state.
    u64* core;         // by tile: a bit for each core row
    u64* near;         // by slot: a mask of the tile's rows within eps; later, for core rows, of the row's set
    u32* parents;      // by row: the union-find structure
    u32* known;        // by node: a row of the set that has all its core rows, UNKNOWN or EMPTY
    u32* least;        // by node: the least root of its core rows
    u32* offsets;      // by tile: listed rows before it, from the first tile of its section on
    u32* sections;     // by SECTION tiles: listed rows before them; after the last, all listed rows
    u32* list;         // slots of listed rows
    u32* cursors;      // by item of a stage: its progress
    Weight* counted;   // by position in the list
    u32* firsts;       // by row: its cluster's first row, or NONE
    unsigned char* is_core;  // by row
    Progress* progress;
    Weight enough;     // the weight that makes a row core
    double limit;      // sums or distances at most this are within eps
    double sure, may;  // thresholds of sums in any order: at most `sure` is within eps, more than `may` is not
    float beyond;      // a lower bound above this is beyond eps
    float inside;      // an upper bound at most this is within eps
    u32 dim, chunk_count, tile_count, group_count;
    u64 cycles;        // per launch
    u32 node_starts[8], box_starts[8];  // by level, in nodes and in 32 nodes
    Products products;  // if IS_FILTERED
};

// One element of a row, as float64.
__device__ __forceinline__ double element(const Dbscan& all, u32 row, u32 i) {
    return (double)all.rows[(u64)row * all.dim + i];
}

// The same, of the row's centred direction, without the division by its length.
__device__ __forceinline__ double centred(const Dbscan& all, u32 row, u32 i, const Direction& of) {
    return __dadd_rn(__dmul_rn(element(all, row, i), of.unit), -of.mean);
}

// Bits set in a row.
__device__ __forceinline__ u32 bits_of(const Dbscan& all, u32 row) {
    u32 bits = 0;
    if constexpr (ELEMENT == BITS) {
        for (u32 i = 0; i < all.dim; i++) bits += __popc(all.rows[(u64)row * all.dim + i]);
    }
    return bits;
}

// A coordinate of a row, for boxes and keys.
__device__ __forceinline__ double coordinate(const Dbscan& all, u32 row, u32 i) {
    if constexpr (ELEMENT == BITS) {
        return bits_of(all, row);
    } else if constexpr (IS_DIRECTION) {
        const Direction of = all.directions[row];
        return __dmul_rn(centred(all, row, all.box_dims[i], of), of.inverse);
    } else {
        return element(all, row, all.box_dims[i]);
    }
}

// Whether two rows are within eps by the definition, `Within` in src/device/contract/dbscan.rs.
__device__ __noinline__ bool holds(const Dbscan& all, u32 a, u32 b) {
    double sum = 0;
    if constexpr (ELEMENT == BITS) {
        u32 different = 0, both = 0, either = 0;
        for (u32 i = 0; i < all.dim; i++) {
            const u32 x = all.rows[(u64)a * all.dim + i], y = all.rows[(u64)b * all.dim + i];
            different += __popc(x ^ y);
            both += __popc(x & y);
            either += __popc(x | y);
        }
        if constexpr (SUM == DIFFERENT_BITS) return (double)different <= all.limit;
        const double distance = either == 0 ? 0 : __dadd_rn(1, -__ddiv_rn(both, either));
        return distance <= all.limit;
    } else if constexpr (IS_DIRECTION) {
        const Direction of_a = all.directions[a], of_b = all.directions[b];
        for (u32 i = 0; i < all.dim; i++) {
            const double x = __dmul_rn(centred(all, a, i, of_a), of_a.inverse);
            const double y = __dmul_rn(centred(all, b, i, of_b), of_b.inverse);
            const double difference = __dadd_rn(x, -y);
            sum = __dadd_rn(sum, __dmul_rn(difference, difference));
        }
        return __dmul_rn(0.5, sum) <= all.limit;
    } else {
        for (u32 i = 0; i < all.dim; i++) {
            const double difference = __dadd_rn(element(all, a, i), -element(all, b, i));
            sum = __dadd_rn(sum, SUM == SQUARES ? __dmul_rn(difference, difference) : fabs(difference));
        }
        return sum <= all.limit;
    }
}

// Whether a weight makes a row core.
__device__ __forceinline__ bool is_enough(const Dbscan& all, const Weight& weight) {
    const bool is_low_enough = weight.low >= all.enough.low;
    if (!WEIGHTED || weight.high == all.enough.high) return is_low_enough;
    return weight.high > all.enough.high;
}
// The sum of two weights, at most `enough`.
__device__ __forceinline__ Weight plus(const Dbscan& all, const Weight& a, const Weight& b) {
    if (!WEIGHTED) return Weight{a.low + b.low, 0};
    Weight sum = {a.low + b.low, a.high + b.high};
    if (sum.low < a.low) sum.high++;
    return is_enough(all, sum) ? all.enough : sum;
}

// The sum of the lanes' weights.
__device__ __forceinline__ Weight add_weights(const Dbscan& all, Weight total) {
    for (u32 stride = 16; stride > 0; stride /= 2) {
        const u64 low = __shfl_xor_sync(0xffffffff, total.low, stride);
        const u64 high = __shfl_xor_sync(0xffffffff, total.high, stride);
        total = plus(all, total, Weight{low, high});
    }
    return total;
}

// The weight of a row.
__device__ __forceinline__ Weight weight_of(const Dbscan& all, u32 row) {
    return WEIGHTED ? all.weights[row] : Weight{1, 0};
}

// The mask of a tile's rows; free slots are at the tile's end.
__device__ __forceinline__ u64 rows_of_tile(const Dbscan& all, u32 tile) {
    const u32* order = all.order + (u64)tile * TILE;
    const u32 low = __ballot_sync(0xffffffff, order[Warp::rank()] != NONE);
    const u32 high = __ballot_sync(0xffffffff, order[Warp::rank() + 32] != NONE);
    return (u64)high << 32 | low;
}

// The number of listed rows before a tile, and in all.
__device__ __forceinline__ u32 listed_before(const Dbscan& all, u32 tile) {
    return all.offsets[tile] + all.sections[tile / SECTION];
}
__device__ __forceinline__ u32 listed(const Dbscan& all) {
    return all.sections[(all.tile_count + SECTION - 1) / SECTION];
}

// Nodes of a level.
__device__ __forceinline__ u32 nodes_of(const Dbscan& all, u32 level) {
    return (all.tile_count + ((1ull << 5 * level) - 1)) >> 5 * level;
}
// The index of a node among all nodes.
__device__ __forceinline__ u32 place_of(const Dbscan& all, u32 level, u32 node) {
    return all.node_starts[level] + node;
}
// The boxes of 32 nodes of a level: COORDINATES times 32 lows and 32 highs.
__device__ __forceinline__ float* boxes_of(const Dbscan& all, u32 level, u32 parent) {
    return all.boxes + (u64)(all.box_starts[level] + parent) * (COORDINATES * 64);
}

// The items of a stage: warps take them one by one, until the launch has lasted `cycles`.
struct Stage {
    long long end;

    __device__ __forceinline__ explicit Stage(const Dbscan& all) { end = clock64() + all.cycles; }
    __device__ __forceinline__ bool is_over() const {
        return __any_sync(0xffffffff, clock64() >= end);
    }
    // The next unfinished item; `items` if none is left, or the launch is over.
    __device__ __forceinline__ u32 take(const Dbscan& all, u32 items, bool& has_worked) const {
        for (;;) {
            u32 item = 0;
            if (Warp::rank() == 0) item = atomicAdd(&all.progress->next, 1);
            item = __shfl_sync(0xffffffff, item, 0);
            if (item >= items) return items;
            if (all.cursors[item] == DONE) continue;
            if (has_worked && is_over()) {
                if (Warp::rank() == 0) all.progress->unfinished = 1;
                return items;
            }
            has_worked = true;
            return item;
        }
    }
    // Records the progress of an item.
    __device__ __forceinline__ void put(const Dbscan& all, u32 item, u32 cursor) const {
        if (Warp::rank() == 0) {
            all.cursors[item] = cursor;
            if (cursor != DONE) all.progress->unfinished = 1;
        }
    }
};

// Counters of a warp's work, added to `Progress` at its end.
struct Work {
    u32 tested = 0, pruned = 0, joined = 0;
    u64 pairs = 0, rechecked = 0;

    __device__ __forceinline__ void add_to(Progress* progress) const {
        const auto add = [](u64* to, u64 count) {
            for (u32 stride = 16; stride > 0; stride /= 2) {
                count += __shfl_xor_sync(0xffffffff, count, stride);
            }
            if (Warp::rank() == 0 && count > 0) atomicAdd(to, count);
        };
        add(&progress->tested, tested);
        add(&progress->pruned, pruned);
        add(&progress->joined, joined);
        add(&progress->pairs, pairs);
        add(&progress->rechecked, rechecked);
    }
};
