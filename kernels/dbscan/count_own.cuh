// Which rows are core by the rows of their own tile.

#include "dbscan/compare.cuh"

// Compares the rows of each tile with each other, and finds those that this makes core. A warp takes
// tiles.
extern "C" __global__ __launch_bounds__(64) void count_own(const __grid_constant__ Dbscan all) {
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
            // Rows of other tiles may make more of them core.
            all.offsets[tile] = range.y - range.x > 1 ? __popcll(rows & ~core) : 0;
        }
        stage.put(all, tile, DONE);
    }
    work.add_to(all.progress);
}
