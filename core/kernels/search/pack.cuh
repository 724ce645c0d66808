// Packing row-major rows into panels.

#include "search/lists.cuh"

// Packs one piece of rows into panels. `source` holds `rows` rows of `dims` elements: the dimensions
// from `first_dim` on of the rows from `first_row` on. The host has zeroed the padding before.
//
// A block of 32 x 8 threads transposes 32 rows x 32 dimensions through shared memory (one column
// wider than the tile, to avoid bank conflicts). Grid: row tiles x dimension tiles, dimensions first.
// `panels` is 0 for queries, which fill panels in order.
extern "C" __global__ __launch_bounds__(256) void pack(
    const Scalar* __restrict__ source, Scalar* __restrict__ packed, u32 rows, u32 dims,
    u32 first_row, u32 first_dim, u32 dim, u32 panels, u32 negate) {
    __shared__ Scalar tile[32][33];
    const u32 dim_tiles = (dims + 31) / 32;
    const u32 row_start = blockIdx.x / dim_tiles * 32, dim_start = blockIdx.x % dim_tiles * 32;
    const u32 x = threadIdx.x % 32, y = threadIdx.x / 32;
    for (u32 r = y; r < 32; r += 8) {
        if (row_start + r < rows && dim_start + x < dims) {
            tile[r][x] = source[(u64)(row_start + r) * dims + dim_start + x];
        }
    }
    __syncthreads();
    if (row_start + x >= rows) return;
    const u32 row = first_row + row_start + x;
    const u32 run = row / RUN;
    const u32 panel = panels == 0 ? row / PANEL : run % panels;
    const u32 lane = panels == 0 ? row % PANEL : run / panels * RUN + row % RUN;
    for (u32 d = y; d < 32 && dim_start + d < dims; d += 8) {
        const Scalar value = tile[x][d];
        packed[((u64)panel * dim + first_dim + dim_start + d) * PANEL + lane] =
            negate ? -value : value;
    }
}

// Copies base rows from `first` on to the layout of queries: a panel per block of PANEL threads, padded with
// zeros.
extern "C" __global__ __launch_bounds__(PANEL) void take_queries(
    const Scalar* __restrict__ base, Scalar* __restrict__ queries, u32 first, u32 rows, u32 dim,
    u32 base_panels, u32 negate) {
    const u32 query = blockIdx.x * PANEL + threadIdx.x;
    const u32 row = first + query, run = row / RUN;
    const u32 lane = run / base_panels * RUN + row % RUN;
    const Scalar* from = base + (u64)(run % base_panels) * dim * PANEL + lane;
    Scalar* to = queries + (u64)blockIdx.x * dim * PANEL + threadIdx.x;
    for (u32 d = 0; d < dim; d++) {
        Scalar value = 0;
        if (query < rows) value = from[(u64)d * PANEL];
        to[(u64)d * PANEL] = negate ? -value : value;
    }
}
