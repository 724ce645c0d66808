// The tree traversal of a query.

#include "dbscan/compare.cuh"

// Resident blocks per multiprocessor, as many as registers allow.
constexpr u32 RESIDENT = IS_FILTERED ? 4 : DIM != 0 && DIM <= 8 && ELEMENT != F64 ? 12 : 6;

constexpr u32 LEVELS = 7;

// The decision of a visitor on a node.
enum Verdict { SKIP, ENTER, WHOLE };

// Visits the tiles from `from` up to `to`, in ascending order. Every lane decides on one of 32 nodes at a
// time: visitor.verdict(level, node, box, is_all), where `is_all` says whether all tiles of the node are in
// the range; only such nodes may be WHOLE. Then all lanes call visitor.whole(level, node) or, if all
// ancestors were entered, visitor.tile(tile). Ends when visitor.is_done(), or after a tile when the stage is
// over. Returns the tile to continue from, or `to`.
template <typename Visitor>
__device__ __forceinline__ u32 walk(
    const Dbscan& all, const Stage& stage, u32 from, u32 to, Work& work, Visitor& visitor) {
    if (from >= to) return to;
    u32 enter[LEVELS], whole[LEVELS], parents[LEVELS] = {}, level = 0;
    const auto test_nodes = [&] {
        const u32 parent = parents[level], node = parent * 32 + Warp::rank();
        const u64 start = (u64)node << 5 * level, next = (u64)(node + 1) << 5 * level;
        const u64 end = next < all.tile_count ? next : all.tile_count;
        Verdict verdict = SKIP;
        const bool is_there = start < to && end > from;
        if (is_there) {
            const float* box = boxes_of(all, level, parent) + Warp::rank();
            verdict = visitor.verdict(level, node, box, start >= from && end <= to);
            work.tested++;
        }
        enter[level] = __ballot_sync(0xffffffff, verdict == ENTER);
        whole[level] = __ballot_sync(0xffffffff, verdict == WHOLE);
    };
    while (from >> 5 * (level + 1) != (to - 1) >> 5 * (level + 1)) level++;
    const u32 top = level;
    parents[level] = from >> 5 * (level + 1);
    test_nodes();
    for (;;) {
        const u32 both = enter[level] | whole[level];
        if (both == 0) {
            if (level == top) return to;
            level++;
            continue;
        }
        const u32 bit = both & (0 - both), node = parents[level] * 32 + __ffs(both) - 1;
        if ((whole[level] & bit) != 0) {
            whole[level] ^= bit;
            visitor.whole(level, node);
        } else if (level > 0) {
            enter[level] ^= bit;
            level--;
            parents[level] = node;
            test_nodes();
            continue;
        } else {
            enter[level] ^= bit;
            visitor.tile(node);
            if (stage.is_over()) return node + 1;
        }
        if (visitor.is_done()) return to;
    }
}

// The rows of an item of the list, and the tiles that they may be compared with.
struct Listed {
    u32 start;        // the tile of the first row, where visits begin
    uint2 ranges[2];  // the tiles of the groups of a lane's rows
    uint2 range;      // the tiles of all rows' groups
    bool is_one_group;
};

// In many dimensions a tile takes long, and a few rows take as long as many: if there are few rows, the tiles
// to visit are cut into parts. Weights cannot be added up across parts.
constexpr bool HAS_PARTS = DIM == 0 && !WEIGHTED;
constexpr u32 MOST_PARTS = 64;

// One of `parts` parts of the visits of an item.
struct Part {
    u32 part, parts;

    // The first and the last visit of the part, of `count` visits.
    __device__ __forceinline__ u32 start(u32 count) const { return (u64)count * part / parts; }
    __device__ __forceinline__ u32 end(u32 count) const { return (u64)count * (part + 1) / parts; }
};

// The items of a list: 64 rows each for most of it, FEWER for the rest, so that warps end at about the same
// time. A short list is cut into smaller items, or its visits into parts, until every warp has an item.
constexpr u32 FEWER = DIM == 0 ? COLUMNS : 8;
struct Items {
    u32 listed, large, small, parts, count;

    __device__ __forceinline__ explicit Items(u32 listed) : listed(listed) {
        const u32 warps = gridDim.x * blockDim.x / 32;
        small = FEWER;
        while (!HAS_PARTS && small > 1 && listed / small < warps) small /= 2;
        const bool is_short = small < FEWER || listed / FEWER < warps;
        large = is_short ? 0 : listed / 4 * 3 / TILE;
        count = large + (listed - large * TILE + small - 1) / small;
        parts = HAS_PARTS && is_short && count > 0 ? max(1u, min(MOST_PARTS, 2 * warps / count)) : 1;
        count *= parts;
    }
    __device__ __forceinline__ Part part_of(u32 item) const { return Part{item % parts, parts}; }
    // The list positions of an item's first row, and after its last.
    __device__ __forceinline__ u32 first_of(u32 item) const { return place_of(item / parts); }
    __device__ __forceinline__ u32 last_of(u32 item) const { return place_of(item / parts + 1); }
    __device__ __forceinline__ u32 place_of(u32 group) const {
        if (group <= large) return group * TILE;
        return min(large * TILE + (group - large) * small, listed);
    }
};

__device__ __forceinline__ Listed load(const Dbscan& all, u32 first, u32 last, Query& query) {
    Listed listed = {all.list[first] / TILE};
    u32 slots[2], low = all.tile_count, high = 0;
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const u32 place = first + r * 32 + Warp::rank();
        slots[r] = place < last ? all.list[place] : NONE;
        if (slots[r] == NONE) continue;
        listed.ranges[r] = all.ranges[slots[r] / TILE];
        low = min(low, listed.ranges[r].x);
        high = max(high, listed.ranges[r].y);
    }
    for (u32 stride = 16; stride > 0; stride /= 2) {
        low = min(low, __shfl_xor_sync(0xffffffff, low, stride));
        high = max(high, __shfl_xor_sync(0xffffffff, high, stride));
    }
    listed.range = uint2{low, high};
    bool is_one = true;
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const uint2 range = listed.ranges[r];
        is_one = is_one && (slots[r] == NONE || (range.x == low && range.y == high));
    }
    listed.is_one_group = __all_sync(0xffffffff, is_one);
    load(all, slots, query);
    load_coordinates(all, query);
    return listed;
}

// Visits part of the tiles of the rows' groups: NEARBY tiles from the first row's tile on, then the tiles
// before it, then the rest. Continues after `cursor` tiles; returns the new cursor, or DONE.
template <typename Visitor>
__device__ __forceinline__ u32 walk_around(
    const Dbscan& all, const Stage& stage, const Listed& listed, const Part& part, u32 cursor,
    Work& work, Visitor& visitor) {
    // Tiles after the rows' own. In many dimensions tiles are large, and warps should visit the same tiles at the
    // same time.
    constexpr u32 NEARBY = DIM == 0 ? 32 : 0xffffffff;
    const u32 first = listed.range.x, last = listed.range.y, start = listed.start;
    const u32 nearby = min(NEARBY, last - start), with_those_before = nearby + (start - first);
    const u32 end = part.end(last - first);
    cursor = max(cursor, part.start(last - first));
    while (cursor < end) {
        const bool is_nearby = cursor < nearby, is_before = !is_nearby && cursor < with_those_before;
        // The tile number is `tiles` + cursor, for cursors below `until`.
        const u32 tiles = is_nearby ? start : is_before ? first - nearby : first;
        const u32 until = min(end, is_nearby ? nearby : is_before ? with_those_before : end);
        const u32 from = tiles + cursor, to = tiles + until;
        const u32 reached = walk(all, stage, from, to, work, visitor);
        if (visitor.is_done()) return DONE;
        cursor += reached - from;
        if (stage.is_over()) break;
    }
    return cursor < end ? cursor : DONE;
}

// The rows with a bit in `rows` that are in the group of a tile.
__device__ __forceinline__ u64 rows_with(const Listed& listed, u64 rows, u32 tile) {
    if (listed.is_one_group) return rows;
    const auto has = [&](const uint2& range) { return range.x <= tile && tile < range.y; };
    return rows & rows_that(has(listed.ranges[0]), has(listed.ranges[1]));
}
