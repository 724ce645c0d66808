// Border rows: assigns each non-core row to the first cluster that has a core row within eps.

#include "dbscan/union_find.cuh"

struct Attaching {
    const Dbscan& all;
    const Listed& listed;
    Query& query;
    Work& work;
    u32 firsts[2];  // of a lane's rows
    u32 most;       // the maximum over all rows

    __device__ __forceinline__ Verdict verdict(u32 level, u32 node, const float* box, bool) {
        if (all.least[place_of(all, level, node)] >= most) return SKIP;
        if (is_outside(all, query, box)) {
            work.pruned++;
            return SKIP;
        }
        return ENTER;
    }
    __device__ __forceinline__ void whole(u32, u32) {}
    __device__ __forceinline__ bool is_done() const { return most == 0; }

    __device__ __forceinline__ void tile(u32 tile) {
        const u32 least = all.least[tile];
        const float* box = boxes_of(all, 0, tile / 32) + tile % 32;
        const u64 open = rows_that(is_open(0, least), is_open(1, least));
        const u64 rows = rows_near(all, query, rows_with(listed, open, tile), box);
        if (rows == 0) return;
        u64 near[2];
        find_near(all, rows, tile, all.core[tile], query, work, near);
        const bool is_one = all.known[tile] < EMPTY;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            if (is_one && near[r] != 0) firsts[r] = min(firsts[r], least);
            for (u64 open = is_one ? 0 : near[r]; open != 0; open &= open - 1) {
                const u32 row = all.order[(u64)tile * TILE + __ffsll(open) - 1];
                firsts[r] = min(firsts[r], all.parents[row]);
            }
        }
        update();
    }
    // Whether a core row of cluster `least` would lower a row's cluster.
    __device__ __forceinline__ bool is_open(u32 r, u32 least) const {
        return query.slots[r * 32 + Warp::rank()] != NONE && least < firsts[r];
    }
    __device__ __forceinline__ void update() {
        most = 0;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            if (query.slots[r * 32 + Warp::rank()] != NONE) most = max(most, firsts[r]);
        }
        for (u32 stride = 16; stride > 0; stride /= 2) {
            most = max(most, __shfl_xor_sync(0xffffffff, most, stride));
        }
    }
};

// Finds the first cluster of the listed rows. A warp takes one item of the list at a time.
extern "C" __global__ __launch_bounds__(64, RESIDENT) void attach(const __grid_constant__ Dbscan all) {
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
        Attaching attaching = {all, listed, query, work};
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 slot = query.slots[r * 32 + Warp::rank()];
            const volatile u32* firsts = all.firsts;
            attaching.firsts[r] = slot == NONE ? NONE : firsts[all.order[slot]];
        }
        attaching.update();
        const Part part = items.part_of(item);
        const u32 cursor = all.cursors[item];
        const u32 reached = walk_around(all, stage, listed, part, cursor, work, attaching);
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 slot = query.slots[r * 32 + Warp::rank()];
            if (slot != NONE) atomicMin(&all.firsts[all.order[slot]], attaching.firsts[r]);
        }
        __syncwarp();
        stage.put(all, item, reached);
    }
    work.add_to(all.progress);
}

// Writes, by row, whether it is core and its cluster. A warp per tile.
extern "C" __global__ __launch_bounds__(128) void finish(const __grid_constant__ Dbscan all) {
    const u32 tile = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (tile >= all.tile_count) return;
    const u64 core = all.core[tile];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const u32 lane = r * 32 + Warp::rank();
        if ((core >> lane & 1) == 0) continue;
        const u32 row = all.order[(u64)tile * TILE + lane];
        all.is_core[row] = 1;
        all.firsts[row] = all.parents[row];
    }
}
