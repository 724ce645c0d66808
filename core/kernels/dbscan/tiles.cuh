// Fills tiles with rows, and computes the bounding boxes of tiles and nodes.

#include "dbscan/query.cuh"

// Fills the slots of tiles with rows in their order. A thread per slot.
extern "C" __global__ __launch_bounds__(128) void fill_tiles(const __grid_constant__ Dbscan all) {
    const u64 slot = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 tile = slot / TILE, lane = slot % TILE;
    if (tile >= all.tile_count) return;
    u32 low = 0, high = all.group_count - 1;  // the last group whose first tile is at most this one
    while (low < high) {
        const u32 middle = (low + high + 1) / 2;
        if (all.first_tiles[middle] <= tile) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    const uint2 range = {all.first_tiles[low], all.first_tiles[low + 1]};
    const u32 start = low == 0 ? 0 : all.ends[low - 1];
    const u64 position = start + (u64)(tile - range.x) * TILE + lane;
    const u32 row = position < all.ends[low] ? all.sorted[position] : NONE;
    all.order[slot] = row;
    if (lane == 0) all.ranges[tile] = range;

    Direction of = {1, 0, 1};
    if (IS_DIRECTION && row != NONE) of = all.directions[row];
    if constexpr (IS_DIRECTION) all.inverses[slot] = (Real)of.inverse;
    if constexpr (HAS_BITS) all.bits[slot] = row == NONE ? 0 : bits_of(all, row);
    for (u32 chunk = 0; chunk < all.chunk_count; chunk++) {
        Chunk values;
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++) {
            const u32 column = chunk * WIDTH + i;
            Scalar x = 0;
            if (row != NONE && column < all.dim) {
                if constexpr (IS_DIRECTION) {
                    x = (Scalar)centred(all, row, column, of);
                } else {
                    x = all.rows[(u64)row * all.dim + column];
                }
            }
            values.of[i] = x;
        }
        all.chunks[((u64)tile * all.chunk_count + chunk) * TILE + lane] = values;
    }
}

// Bounding boxes and weights of tiles. A warp per tile.
extern "C" __global__ __launch_bounds__(128) void bound_tiles(const __grid_constant__ Dbscan all) {
    const u32 tile = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (tile >= all.tile_count) return;
    u32 rows[2];
    Weight total = {0, 0};
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        rows[i] = all.order[(u64)tile * TILE + i * 32 + Warp::rank()];
        if (rows[i] != NONE) total = plus(all, total, weight_of(all, rows[i]));
    }
    total = add_weights(all, total);
    if (Warp::rank() == 0) all.totals[tile] = total;
    float* boxes = boxes_of(all, 0, tile / 32) + tile % 32;
    for (u32 i = 0; i < COORDINATES; i++) {
        float low = Limits<float>::infinity(), high = -low;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            if (rows[r] == NONE) continue;
            const double x = coordinate_at(all, tile * TILE + r * 32 + Warp::rank(), i);
            low = fminf(low, __double2float_rd(x));
            high = fmaxf(high, __double2float_ru(x));
        }
        for (u32 stride = 16; stride > 0; stride /= 2) {
            low = fminf(low, __shfl_xor_sync(0xffffffff, low, stride));
            high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, stride));
        }
        if (Warp::rank() == 0) {
            boxes[2 * i * 32] = low;
            boxes[(2 * i + 1) * 32] = high;
        }
    }
}

// Bounding boxes and weights of the nodes of a level above 0. A warp per node.
extern "C" __global__ __launch_bounds__(128) void bound_nodes(const __grid_constant__ Dbscan all, u32 level) {
    const u32 node = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (node >= nodes_of(all, level)) return;
    const u32 child = node * 32 + Warp::rank();
    const bool is_there = child < nodes_of(all, level - 1);
    const float* from = boxes_of(all, level - 1, node) + Warp::rank();
    float* to = boxes_of(all, level, node / 32) + node % 32;
    for (u32 i = 0; i < COORDINATES; i++) {
        float low = is_there ? from[2 * i * 32] : Limits<float>::infinity();
        float high = is_there ? from[(2 * i + 1) * 32] : -Limits<float>::infinity();
        for (u32 stride = 16; stride > 0; stride /= 2) {
            low = fminf(low, __shfl_xor_sync(0xffffffff, low, stride));
            high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, stride));
        }
        if (Warp::rank() == 0) {
            to[2 * i * 32] = low;
            to[(2 * i + 1) * 32] = high;
        }
    }
    Weight total = is_there ? all.totals[place_of(all, level - 1, child)] : Weight{0, 0};
    total = add_weights(all, total);
    if (Warp::rank() == 0) all.totals[place_of(all, level, node)] = total;
}
