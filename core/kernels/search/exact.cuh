// Distances of list entries by the definition (src/metric.rs), in float64, and lists sorted by these
// distances. For rows of f32.
//
// For such rows the sums of the definition cannot overflow or lose terms to underflow: the difference of two
// f32 is a multiple of 2^-149 below 2^129, so that squares are 0 or from 2^-298 to 2^258, and products below
// 2^256. All of these, and sums of 2^32 of them, are normal numbers of float64.

#include "search/lists.cuh"

// The rows of one side of a search, as the definition reads them. The same struct as in
// src/device/cuda/search/launch_exact.rs.
struct Side {
    const float* values;
    const double* directions;  // per row the mean of its values and the inverse of its length; or null
    u64 first;                 // position of the first row
    u32 dim;                   // elements of a row there
    u32 step;                  // from one element of a row to the next: 1, or PANEL in panels
    u32 dealt_to;              // panels that rows are dealt to; 0 if rows fill panels in order
    u32 negated;               // whether values are negated
};

// The position of a row's first element in panels; `dealt_to` is as in `Side`.
__device__ __forceinline__ u64 place_in_panels(u32 row, u32 dim, u32 dealt_to) {
    const u32 run = row / RUN;
    const u32 panel = dealt_to == 0 ? row / PANEL : run % dealt_to;
    const u32 lane = dealt_to == 0 ? row % PANEL : run / dealt_to * RUN + row % RUN;
    return (u64)panel * dim * PANEL + lane;
}

__device__ __forceinline__ u64 place_of(const Side& side, u32 row) {
    const u64 at = side.first + row;
    return side.step == 1 ? at * side.dim : place_in_panels((u32)at, side.dim, side.dealt_to);
}

// The coordinate of a unit vector. `Direction::of` has the unit 1 for f32, so there is no other factor.
__device__ __forceinline__ double coordinate(double value, double mean, double inverse) {
    return multiply(add(value, -mean), inverse);
}

// Adds a pair of coordinates to the sum of the definition.
__device__ __forceinline__ double add_exactly(double sum, double q, double x) {
    if constexpr (SUM == PRODUCTS) return add(sum, -multiply(q, x));
    const double difference = add(q, -x);
    return add(sum, SUM == ABSOLUTE ? magnitude(difference) : multiply(difference, difference));
}

// The step from a sum to its distance. The same numbers as in src/device/cuda/search/launch_exact.rs.
enum Outcome { SUM_ITSELF, ROOT, HALF };

__device__ __forceinline__ double distance_of_sum(double sum, u32 outcome) {
    return outcome == ROOT   ? root(sum)
         : outcome == HALF   ? multiply(0.5, sum)
                             : add(sum, 0.0);
}

// The distances of the first `per_list` entries of every list, written behind the entries, in the slots of
// candidates. A thread per entry, counted list by list; the first entry has the number `first`. A warp stages
// 32 dimensions of its 32 rows and of their queries at a time, each row with loads of the whole warp.
constexpr u32 MEASURING = 64;
extern "C" __global__ __launch_bounds__(MEASURING) void measure_lists(Side queries, Side base,
                                                                      Entry* entries, u64 first,
                                                                      u32 count, u32 dim,
                                                                      u32 per_list, u32 slots,
                                                                      u32 outcome) {
    if constexpr (ELEMENT == F32) {
        __shared__ double staged_queries[MEASURING / 32][32][33];
        __shared__ float listed[MEASURING / 32][32][33];
        const u32 entry = blockIdx.x * MEASURING + threadIdx.x;
        const u32 lane = Warp::rank(), warp = threadIdx.x / 32;
        if (entry - lane >= count) return;
        // Lanes past the last entry compute its pair again.
        const u64 number = first + min(entry, count - 1);
        const u32 query = (u32)(number / per_list);
        Entry* place = entries + (u64)query * slots + (u32)(number % per_list);
        const bool is_none = place->is_none();
        const u32 row = is_none ? 0 : place->number();
        const u64 from = place_of(base, row);
        double mean = 0, inverse = 1;
        if (base.directions) {
            mean = base.directions[2 * (u64)row];
            inverse = base.directions[2 * (u64)row + 1];
        }
        const u32 first_query = __shfl_sync(0xffffffffu, query, 0);
        const u32 last_query = __shfl_sync(0xffffffffu, query, 31);
        double sum = 0;
        for (u32 start = 0; start < dim; start += 32) {
            const u32 width = min(32u, dim - start);
            const u64 ahead = (u64)(start + lane);
            for (u32 q = first_query; q <= last_query; q++) {
                if (lane >= width) continue;
                const float value = queries.values[place_of(queries, q) + ahead * queries.step];
                double x = queries.negated ? -value : value;
                if (queries.directions) {
                    x = coordinate(x, queries.directions[2 * (u64)q], queries.directions[2 * (u64)q + 1]);
                }
                staged_queries[warp][q - first_query][lane] = x;
            }
#pragma unroll 8
            for (u32 other = 0; other < 32; other++) {
                const u64 of_other = __shfl_sync(0xffffffffu, from, other);
                if (lane < width) listed[warp][other][lane] = base.values[of_other + ahead * base.step];
            }
            Warp::sync();
            for (u32 d = 0; d < width; d++) {
                double x = listed[warp][lane][d];
                if (base.directions) x = coordinate(x, mean, inverse);
                sum = add_exactly(sum, staged_queries[warp][query - first_query][d], x);
            }
            Warp::sync();
        }
        const double distance = is_none ? Limits<double>::infinity() : distance_of_sum(sum, outcome);
        if (entry < count) *(double*)(place + per_list) = distance;
    }
}

// Sorts the entries of a list by distance and writes the first `keep`, and in `last` a lower bound on the
// sums of all rows outside the list, which is NaN if there is no such row.
template <typename Group>
__device__ __forceinline__ void rank_list(EntryOf<double>* work, const Entry* list, Entry worst, u32 query,
                                          u32 per_list, u32 keep, u32* rows, double* distances,
                                          float* last) {
    if constexpr (ELEMENT == F32) {
        for (u32 i = Group::rank(); i < per_list; i += Group::size()) {
            const double distance = *(const double*)(list + per_list + i);
            work[i] = EntryOf<double>::of(distance, list[i].number());
        }
        if (Group::rank() == 0) {
            const Entry end = list[per_list - 1];
            last[query] = (worst < end ? worst : end).distance();
        }
        sort<Group>(work, per_list);
        for (u32 i = Group::rank(); i < keep; i += Group::size()) {
            rows[(u64)query * keep + i] = work[i].number();
            distances[(u64)query * keep + i] = work[i].distance();
        }
    }
}

// Ranks queries from `first` to `end`, one warp per query. Shared memory: `room` entries per warp, the least
// power of two that is at least `per_list`.
extern "C" __global__ __launch_bounds__(256) void rank_by_warp(
    const Entry* __restrict__ entries, const Entry* __restrict__ worst, u32* __restrict__ rows,
    double* __restrict__ distances, float* __restrict__ last, u32 first, u32 end, u32 per_list, u32 slots, u32 keep,
    u32 room) {
    const u32 warp = threadIdx.x / 32;
    const u32 query = first + blockIdx.x * (blockDim.x / 32) + warp;
    if (query >= end) return;
    rank_list<Warp>((EntryOf<double>*)shared + warp * room, entries + (u64)query * slots, worst[query],
                    query, per_list, keep, rows, distances, last);
}

// Ranks queries from `first` on, one block per query. Shared memory: as many entries as for a warp.
extern "C" __global__ __launch_bounds__(256) void rank_by_block(
    const Entry* __restrict__ entries, const Entry* __restrict__ worst, u32* __restrict__ rows,
    double* __restrict__ distances, float* __restrict__ last, u32 first, u32 end, u32 per_list, u32 slots, u32 keep,
    u32 room) {
    const u32 query = first + blockIdx.x;
    rank_list<Block>((EntryOf<double>*)shared, entries + (u64)query * slots, worst[query], query, per_list,
                     keep, rows, distances, last);
}

// The reverse of `pack` for base rows: a block of 32 x 8 threads transposes 32 rows x 32 dimensions. Grid: row tiles x
// dimension tiles, dimensions first.
extern "C" __global__ __launch_bounds__(256) void unpack(const Scalar* __restrict__ packed,
                                                         Scalar* __restrict__ to, u32 rows, u32 dims,
                                                         u32 dim, u32 panels) {
    __shared__ Scalar tile[32][33];
    const u32 dim_tiles = (dims + 31) / 32;
    const u32 row_start = blockIdx.x / dim_tiles * 32, dim_start = blockIdx.x % dim_tiles * 32;
    const u32 x = threadIdx.x % 32, y = threadIdx.x / 32;
    if (row_start + x < rows) {
        const u64 from = place_in_panels(row_start + x, dim, panels);
        for (u32 d = y; d < 32 && dim_start + d < dims; d += 8) {
            tile[d][x] = packed[from + (u64)(dim_start + d) * PANEL];
        }
    }
    __syncthreads();
    if (dim_start + x >= dims) return;
    for (u32 r = y; r < 32 && row_start + r < rows; r += 8) {
        to[(u64)(row_start + r) * dims + dim_start + x] = tile[x][r];
    }
}
