// Core rows: sums the weights of the rows within eps of each row until they reach `enough`.

#include "dbscan/walk.cuh"

// The weight of these rows of a tile.
__device__ __forceinline__ Weight weight_of_rows(const Dbscan& all, u32 tile, u64 rows) {
    if (!WEIGHTED) return Weight{(u64)__popcll(rows), 0};
    Weight total = {0, 0};
    for (; rows != 0; rows &= rows - 1) {
        const u32 row = all.order[(u64)tile * TILE + __ffsll(rows) - 1];
        total = plus(all, total, all.weights[row]);
    }
    return total;
}

// Finds, for each of a lane's two query rows, the rows of a tile within eps, and their weight.
__device__ __forceinline__ void weigh_near(
    const Dbscan& all, u64 rows, u32 tile, Query& query, Work& work, u64 (&near)[2],
    Weight (&weights)[2]) {
    find_near(all, rows, tile, rows_of_tile(all, tile), query, work, near);
#pragma unroll
    for (u32 r = 0; r < 2; r++) weights[r] = weight_of_rows(all, tile, near[r]);
}

// Compares the rows of each tile with each other, and marks those that are core by these alone. A warp takes
// one tile at a time.
extern "C" __global__ __launch_bounds__(64) void count_within_tiles(const __grid_constant__ Dbscan all) {
    __shared__ Query queries[2];
    Query& query = queries[threadIdx.x / 32];
    const Stage stage(all);
    Work work;
    bool has_worked = false;
    for (;;) {
        const u32 tile = stage.take(all, all.tile_count, has_worked);
        if (tile >= all.tile_count) break;
        const u64 rows = rows_of_tile(all, tile);
        u32 slots[2];
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 lane = r * 32 + Warp::rank();
            slots[r] = rows >> lane & 1 ? tile * TILE + lane : NONE;
        }
        load(all, slots, query);
        u64 near[2] = {0, 0};
        Weight weights[2];
        weigh_near(all, rows, tile, query, work, near, weights);
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            if (slots[r] != NONE) all.near[slots[r]] = near[r];
        }
        const u64 core =
            rows & rows_that(is_enough(all, weights[0]), is_enough(all, weights[1]));
        if (Warp::rank() == 0) {
            const uint2 range = all.ranges[tile];
            all.core[tile] = core;
            // Rows of other tiles may make more rows core.
            all.offsets[tile] = range.y - range.x > 1 ? __popcll(rows & ~core) : 0;
        }
        stage.put(all, tile, DONE);
    }
    work.add_to(all.progress);
}

// Counts the rows of each tile that are not core.
extern "C" __global__ __launch_bounds__(128) void count_others(const __grid_constant__ Dbscan all) {
    const u32 tile = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (tile >= all.tile_count) return;
    const u64 rows = rows_of_tile(all, tile);
    if (Warp::rank() == 0) all.offsets[tile] = __popcll(rows & ~all.core[tile]);
}

// Lists the non-core rows of the tiles that counted any.
extern "C" __global__ __launch_bounds__(128) void list_others(const __grid_constant__ Dbscan all) {
    const u32 tile = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (tile >= all.tile_count) return;
    const u32 start = listed_before(all, tile);
    const u64 rows = rows_of_tile(all, tile) & ~all.core[tile];
    if (start == (tile + 1 < all.tile_count ? listed_before(all, tile + 1) : listed(all))) return;
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const u32 lane = r * 32 + Warp::rank();
        if (rows >> lane & 1) {
            const u32 place = start + __popcll(rows & ((1ull << lane) - 1));
            all.list[place] = tile * TILE + lane;
            all.counted[place] = Weight{0, 0};
        }
    }
}

// The visitor that sums weights for the rows of a query.
struct Counting {
    const Dbscan& all;
    const Listed& listed;
    Query& query;
    Work& work;
    Weight totals[2];  // of a lane's rows
    u64 open;          // rows that are not yet known to be core

    __device__ __forceinline__ Verdict verdict(u32, u32, const float* box, bool is_all) {
        if (is_outside(all, query, box)) {
            work.pruned++;
            return SKIP;
        }
        if (is_all && listed.is_one_group && is_within(all, query, box)) {
            work.pruned++;
            return WHOLE;
        }
        return ENTER;
    }
    __device__ __forceinline__ void whole(u32 level, u32 node) {
        const Weight total = all.totals[place_of(all, level, node)];
#pragma unroll
        for (u32 r = 0; r < 2; r++) totals[r] = plus(all, totals[r], total);
        update();
    }
    __device__ __forceinline__ void tile(u32 tile) {
        const float* box = boxes_of(all, 0, tile / 32) + tile % 32;
        const u64 rows = rows_near(all, query, rows_with(listed, open, tile), box);
        if (rows == 0) return;
        u64 near[2];
        Weight more[2];
        weigh_near(all, rows, tile, query, work, near, more);
#pragma unroll
        for (u32 r = 0; r < 2; r++) totals[r] = plus(all, totals[r], more[r]);
        update();
    }
    __device__ __forceinline__ void update() {
        open &= ~rows_that(is_enough(all, totals[0]), is_enough(all, totals[1]));
    }
    __device__ __forceinline__ bool is_done() const { return open == 0; }
};

// Counts for the listed rows. A warp takes one item of the list at a time.
extern "C" __global__ __launch_bounds__(64, RESIDENT) void count_near(const __grid_constant__ Dbscan all) {
    __shared__ Query queries[2];
    Query& query = queries[threadIdx.x / 32];
    const Stage stage(all);
    const Items items(listed(all));
    Work work;
    bool has_worked = false;
    for (;;) {
        const u32 item = stage.take(all, items.count, has_worked);
        if (item >= items.count) break;
        const u32 first = items.first_of(item), last = items.last_of(item);
        const Listed listed = load(all, first, last, query);
        const u32 slots[2] = {query.slots[Warp::rank()], query.slots[32 + Warp::rank()]};
        Counting counting = {all, listed, query, work};
        counting.open = rows_that(slots[0] != NONE, slots[1] != NONE);
        u64 before[2];
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const volatile Weight& counted = all.counted[first + r * 32 + Warp::rank()];
            counting.totals[r] =
                slots[r] == NONE ? Weight{0, 0} : Weight{counted.low, counted.high};
            before[r] = counting.totals[r].low;
        }
        counting.update();
        const Part part = items.part_of(item);
        const u32 cursor = all.cursors[item];
        const u32 reached = walk_around(all, stage, listed, part, cursor, work, counting);
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            if (slots[r] == NONE) continue;
            Weight& counted = all.counted[first + r * 32 + Warp::rank()];
            if constexpr (HAS_PARTS) {
                // Warps with other parts may have added to the sum; the last one sees the total.
                const u64 more = counting.totals[r].low - before[r];
                counting.totals[r].low = atomicAdd(&counted.low, more) + more;
            } else {
                counted = counting.totals[r];
            }
            if (is_enough(all, counting.totals[r])) {
                atomicOr(&all.core[slots[r] / TILE], 1ull << slots[r] % TILE);
            }
        }
        __syncwarp();
        stage.put(all, item, reached);
    }
    work.add_to(all.progress);
}
