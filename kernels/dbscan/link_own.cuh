// Joins the core rows of each tile, and finds the sets of core rows once tiles are joined.

#include "dbscan/blocks.cuh"
#include "dbscan/sets.cuh"

// Every row by itself.
extern "C" __global__ __launch_bounds__(256) void alone(const __grid_constant__ Dbscan all, u32 count) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < count) all.parents[row] = row;
}

// Joins the core rows of each tile. What is near a core row is then its set. A warp for each.
extern "C" __global__ __launch_bounds__(128) void link_own(const __grid_constant__ Dbscan all) {
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
        // Rows that were found find others, until there are no more.
        u64 set = open & (0 - open), searched = 0;
        while ((set & ~searched) != 0) {
            u64 more = 0;
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                if ((set & ~searched) >> (r * 32 + Warp::rank()) & 1) more |= near[r];
            }
            for (u32 apart = 16; apart > 0; apart /= 2) {
                more |= __shfl_xor_sync(0xffffffff, more, apart);
            }
            searched = set;
            set |= more;
        }
        u32 first = NONE;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            if (set >> (r * 32 + Warp::rank()) & 1) first = min(first, rows[r]);
        }
        for (u32 apart = 16; apart > 0; apart /= 2) {
            first = min(first, __shfl_xor_sync(0xffffffff, first, apart));
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

// Makes the root of its set every row's parent.
extern "C" __global__ __launch_bounds__(256) void flatten(const __grid_constant__ Dbscan all, u32 count) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < count) all.parents[row] = first_of(all, row);
}

// What is known of the nodes of a level, from their rows, or from the level below: also which core rows of
// a tile are in one set. A warp for each.
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
        // Its sets, by now.
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
    for (u32 apart = 16; apart > 0; apart /= 2) {
        least = min(least, __shfl_xor_sync(0xffffffff, least, apart));
        most = max(most, __shfl_xor_sync(0xffffffff, most, apart));
    }
    is_unknown = __any_sync(0xffffffff, is_unknown);
    if (Warp::rank() == 0) {
        const u32 place = place_of(all, level, node);
        all.least[place] = least;
        all.known[place] = is_unknown ? UNKNOWN : least == NONE ? EMPTY : least == most ? least : UNKNOWN;
    }
}
