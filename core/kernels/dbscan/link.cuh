// Connects core rows that are within eps of each other, in the union-find structure.

#include "dbscan/union_find.cuh"

// In `known`: the core rows of a node may be in several sets.
constexpr u32 UNKNOWN = 0xffffffff;

// Makes every row a set of its own.
extern "C" __global__ __launch_bounds__(256) void alone(const __grid_constant__ Dbscan all, u32 count) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < count) all.parents[row] = row;
}

// Joins the core rows of each tile, and replaces `near` of a core row by its set within the tile. A warp per
// tile.
extern "C" __global__ __launch_bounds__(128) void link_within_tiles(const __grid_constant__ Dbscan all) {
    const u32 tile = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (tile >= all.tile_count) return;
    const u64 core = all.core[tile];
    const u64 slot = (u64)tile * TILE + Warp::rank();
    u64 near[2];
    u32 rows[2];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const bool is_core = core >> (r * 32 + Warp::rank()) & 1;
        near[r] = is_core ? all.near[slot + r * 32] & core : 0;
        rows[r] = is_core ? all.order[slot + r * 32] : NONE;
    }
    u32 sets = 0;
    u32 known = EMPTY;
    u64 open = core;
    while (open != 0) {
        // Breadth-first search: rows that were reached reach others, until the set is complete.
        u64 set = open & (0 - open), searched = 0;
        while ((set & ~searched) != 0) {
            u64 more = 0;
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                if ((set & ~searched) >> (r * 32 + Warp::rank()) & 1) more |= near[r];
            }
            for (u32 stride = 16; stride > 0; stride /= 2) {
                more |= __shfl_xor_sync(0xffffffff, more, stride);
            }
            searched = set;
            set |= more;
        }
        u32 first = NONE;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            if (set >> (r * 32 + Warp::rank()) & 1) first = min(first, rows[r]);
        }
        for (u32 stride = 16; stride > 0; stride /= 2) {
            first = min(first, __shfl_xor_sync(0xffffffff, first, stride));
        }
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            if (set >> (r * 32 + Warp::rank()) & 1) {
                all.parents[rows[r]] = first;
                all.near[slot + r * 32] = set;
            }
        }
        known = sets == 0 ? first : UNKNOWN;
        sets++;
        open &= ~set;
    }
    if (Warp::rank() == 0) all.known[tile] = known;
}

// The visitor that joins a query, core rows of one tile, with the core rows of other tiles.
struct Linking {
    const Dbscan& all;
    Query& query;
    Work& work;
    u32 query_tile;
    u64 query_rows;
    u32 known;  // a row of the query, if all are in one set; else UNKNOWN

    __device__ __forceinline__ Verdict verdict(u32 level, u32 node, const float* box, bool) {
        const u32 other = all.known[place_of(all, level, node)];
        if (other == EMPTY) return SKIP;
        if (is_outside(all, query, box)) {
            work.pruned++;
            return SKIP;
        }
        if (known != UNKNOWN && other < EMPTY && first_of(all, known) == first_of(all, other)) {
            work.joined++;
            return SKIP;
        }
        return ENTER;
    }
    __device__ __forceinline__ void whole(u32, u32) {}
    __device__ __forceinline__ bool is_done() const { return false; }

    // The rows of a tile with a bit in `rows` that are not in the set with root `first`.
    __device__ __forceinline__ u64 rows_beyond(u64 rows, u32 tile, u32 first) const {
        const u32* order = all.order + (u64)tile * TILE + Warp::rank();
        const auto is_beyond = [&](u32 r) {
            return rows >> (r * 32 + Warp::rank()) & 1 && first_of(all, order[r * 32]) != first;
        };
        return rows_that(is_beyond(0), is_beyond(1));
    }
    // The root of the set that has all of these rows of a tile, or UNKNOWN if they are in several.
    __device__ __forceinline__ u32 set_of(u64 rows, u32 tile) const {
        const u32* order = all.order + (u64)tile * TILE + Warp::rank();
        u32 least = NONE, most = 0;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            if ((rows >> (r * 32 + Warp::rank()) & 1) == 0) continue;
            const u32 first = first_of(all, order[r * 32]);
            least = min(least, first);
            most = max(most, first);
        }
        for (u32 stride = 16; stride > 0; stride /= 2) {
            least = min(least, __shfl_xor_sync(0xffffffff, least, stride));
            most = max(most, __shfl_xor_sync(0xffffffff, most, stride));
        }
        return least == most ? least : UNKNOWN;
    }
    // Joins the query with the core rows of another tile.
    __device__ __forceinline__ void tile(u32 tile) {
        u64 rows = query_rows, open = all.core[tile];
        u32 other = all.known[tile];
        // In many dimensions a tile often becomes one set late, and comparing costs more than reading the
        // parents again.
        if (DIM == 0 && other >= EMPTY && known != UNKNOWN) other = set_of(open, tile);
        // Leaves out rows that are already in the same set.
        if (other < EMPTY) {
            rows = rows_beyond(rows, query_tile, first_of(all, other));
        } else if (known != UNKNOWN) {
            open = rows_beyond(open, tile, first_of(all, known));
        }
        if (rows == 0 || open == 0) return;
        const float* box = boxes_of(all, 0, tile / 32) + tile % 32;
        rows = rows_near(all, query, rows, box);
        if (rows == 0) return;
        const bool is_one = other < EMPTY && known != UNKNOWN;
        const auto join_with = [&](u32 row, u64 others) {
            // One row is enough if all are in one set.
            if (other < EMPTY) others &= 0 - others;
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const u32 lane = r * 32 + Warp::rank();
                if (others >> lane & 1) join(all, row, all.order[(u64)tile * TILE + lane]);
            }
        };
        const u32* order = all.order + (u64)query_tile * TILE;
        if (is_within(all, query, box)) {
            for (u64 left = rows; left != 0; left &= left - 1) {
                join_with(order[__ffsll(left) - 1], open);
                if (known != UNKNOWN) return;
            }
            return;
        }
        compare(all, rows, tile, open, query, work, [&](u32 row, u64 near) {
            near &= open;
            if (near == 0) return false;
            join_with(order[row], near);
            if (known != UNKNOWN) open &= ~near;
            return is_one || open == 0;
        });
    }
};

// Stripes of the item order: consecutive items are distant tiles, so that sets in all parts of the tree grow
// early.
constexpr u32 STRIPES = 64;

// The queries of a tile: each of its sets of joined core rows if there are at most FEW_SETS, else its core
// rows in QUARTERs of the tile. In many dimensions a few rows take as long as COLUMNS rows: if sets have
// fewer than half of that on average, all core rows are one query.
constexpr u32 FEW_SETS = 6, QUARTER = TILE / 4;
struct Queries {
    u64 core, heads;
    u64 sets[2];  // of a lane's rows
    bool are_sets;

    __device__ __forceinline__ Queries(const Dbscan& all, u32 tile) {
        core = tile < all.tile_count ? all.core[tile] : 0;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 lane = r * 32 + Warp::rank();
            sets[r] = core >> lane & 1 ? all.near[(u64)tile * TILE + lane] : 0;
        }
        heads = rows_that(__ffsll(sets[0]) == 1 + Warp::rank(), __ffsll(sets[1]) == 33 + Warp::rank());
        const u32 few = DIM == 0 ? max(1u, 2 * __popcll(core) / COLUMNS) : FEW_SETS;
        are_sets = __popcll(heads) <= few;
        if (are_sets) return;
        heads = DIM == 0 ? 1ull : 1ull | 1ull << QUARTER | 1ull << 2 * QUARTER | 1ull << 3 * QUARTER;
    }
    // The rows of the query whose first row is `head`.
    __device__ __forceinline__ u64 rows(u32 head) const {
        const u64 set = __shfl_sync(0xffffffff, head < 32 ? sets[0] : sets[1], head % 32);
        return are_sets ? set : DIM == 0 ? core : core & ((1ull << QUARTER) - 1) << head;
    }
};

// The items of a launch. In few dimensions an item is a tile or, with 4 parts, a quarter of it. In many
// dimensions it is a tile with one part of all tiles, ordered part by part, so that warps visit the same
// tiles at the same time.
struct Links {
    u32 tiles, parts, length, count;

    __device__ __forceinline__ Links(u32 tiles, u32 parts) : tiles(tiles), parts(parts) {
        length = ((DIM == 0 ? tiles : tiles * parts) + STRIPES - 1) / STRIPES;
        count = length * STRIPES * (DIM == 0 ? parts : 1);
    }
    __device__ __forceinline__ u32 place(u32 item) const {
        const u32 of_part = item % (length * STRIPES);
        return of_part % STRIPES * length + of_part / STRIPES;
    }
    __device__ __forceinline__ u32 tile(u32 item) const { return DIM == 0 ? place(item) : place(item) / parts; }
    __device__ __forceinline__ u32 part(u32 item) const {
        return DIM == 0 ? item / (length * STRIPES) : place(item) % parts;
    }
};

// Joins the core rows of each tile with those of the `next` following tiles of its group. A cursor has the
// first row of the current query in its highest 6 bits.
extern "C" __global__ __launch_bounds__(64, RESIDENT) void link_tiles(
    const __grid_constant__ Dbscan all, u32 next, u32 parts) {
    __shared__ Query queries[2];
    Query& query = queries[threadIdx.x / 32];
    const Stage stage(all);
    const Links links(all.tile_count, parts);
    Work work;
    bool has_worked = false;
    for (;;) {
        const u32 item = stage.take(all, links.count, has_worked);
        if (item >= links.count) break;
        const u32 tile = links.tile(item), part = links.part(item);
        // The range of tiles to visit.
        u32 begin = tile + 1, end = begin;
        if (tile < all.tile_count) end = begin + min(all.ranges[tile].y - begin, next);
        if constexpr (DIM == 0) {
            const Part of_all = {part, parts};
            begin = max(begin, of_all.start(all.tile_count));
            end = min(end, of_all.end(all.tile_count));
        }
        if (begin >= end) {
            stage.put(all, item, DONE);
            continue;
        }
        u32 cursor = all.cursors[item];
        const Queries tile_queries(all, tile);
        u64 heads = tile_queries.heads & ~0ull << (cursor >> 26);
        if (DIM != 0 && parts > 1) {
            const u64 of_part = 1ull << part * QUARTER;
            heads &= tile_queries.are_sets ? (part == 0 ? ~0ull : 0) : of_part;
        }
        cursor &= (1u << 26) - 1;
        bool is_over = false;
        for (; heads != 0 && !is_over; heads &= heads - 1) {
            const u32 head = __ffsll(heads) - 1;
            const u64 rows = tile_queries.rows(head);
            if (rows == 0) continue;
            u32 slots[2];
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const u32 lane = r * 32 + Warp::rank();
                slots[r] = rows >> lane & 1 ? tile * TILE + lane : NONE;
            }
            load(all, slots, query);
            load_coordinates(all, query);
            const u32 known = tile_queries.are_sets ? all.order[(u64)tile * TILE + head] : UNKNOWN;
            Linking linking = {all, query, work, tile, rows, known};
            if (DIM == 0 && known == UNKNOWN) linking.known = linking.set_of(rows, tile);
            const u32 reached = walk(all, stage, begin + cursor, end, work, linking);
            cursor = 0;
            if (reached < end) {
                stage.put(all, item, head << 26 | (reached - begin));
                is_over = true;
            }
        }
        __syncwarp();
        if (!is_over) stage.put(all, item, DONE);
    }
    work.add_to(all.progress);
}

// Makes every row's parent the root of its set.
extern "C" __global__ __launch_bounds__(256) void flatten(const __grid_constant__ Dbscan all, u32 count) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < count) all.parents[row] = first_of(all, row);
}

// Computes `known` and `least` of the nodes of a level, from their rows or from the level below, and the sets
// of core rows within a tile. A warp per node.
extern "C" __global__ __launch_bounds__(128) void know(const __grid_constant__ Dbscan all, u32 level) {
    const u32 node = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (node >= nodes_of(all, level)) return;
    u32 least = NONE, most = 0;
    bool is_unknown = false;
    if (level == 0) {
        const u64 core = all.core[node];
        u32 firsts[2];
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 lane = r * 32 + Warp::rank();
            const bool is_core = core >> lane & 1;
            firsts[r] = is_core ? first_of(all, all.order[(u64)node * TILE + lane]) : NONE;
            if (!is_core) continue;
            least = min(least, firsts[r]);
            most = max(most, firsts[r]);
        }
        // The sets of the tile at this time.
        for (u64 open = core; open != 0;) {
            const u32 head = __ffsll(open) - 1;
            const u32 first = __shfl_sync(0xffffffff, head < 32 ? firsts[0] : firsts[1], head % 32);
            const u64 set = rows_that(firsts[0] == first, firsts[1] == first);
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                if (firsts[r] == first) all.near[(u64)node * TILE + r * 32 + Warp::rank()] = set;
            }
            open &= ~set;
        }
    } else {
        const u32 child = node * 32 + Warp::rank();
        if (child < nodes_of(all, level - 1)) {
            const u32 place = place_of(all, level - 1, child), known = all.known[place];
            is_unknown = known == UNKNOWN;
            least = all.least[place];
            most = known < EMPTY ? known : 0;
        }
    }
    for (u32 stride = 16; stride > 0; stride /= 2) {
        least = min(least, __shfl_xor_sync(0xffffffff, least, stride));
        most = max(most, __shfl_xor_sync(0xffffffff, most, stride));
    }
    is_unknown = __any_sync(0xffffffff, is_unknown);
    if (Warp::rank() == 0) {
        const u32 place = place_of(all, level, node);
        all.least[place] = least;
        all.known[place] = is_unknown ? UNKNOWN : least == NONE ? EMPTY : least == most ? least : UNKNOWN;
    }
}
