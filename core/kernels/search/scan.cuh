// The scan: all pairs of a query panel with some base panels. Sums stay in registers; only pairs within their
// query's threshold are offered to the sink.
//
// A sink consumes these pairs. It has `threshold(query)`, `offer(pass, query, row, distance)`,
// and `offer_dense`, for passes in which every pair is a candidate; or, where it `KEEPS_LEAST`,
// `threshold` and `keep_least`.

#include "common/copy.cuh"
#include "search/lists.cuh"

// A thread's share of a 128 x 128 tile, in vectors of 16 bytes: doubles take half the rows, so that
// the sums still fit in registers.
constexpr u32 VECTOR = 16 / sizeof(Scalar);
constexpr u32 QUERY_VECTORS = 8 / VECTOR;
constexpr u32 ROW_VECTORS = 2;
constexpr u32 QUERIES = QUERY_VECTORS * VECTOR;
constexpr u32 ROWS = ROW_VECTORS * VECTOR;
constexpr u32 ACROSS = PANEL / ROWS;
constexpr u32 SCAN_THREADS = ACROSS * (PANEL / QUERIES);
constexpr u32 SCAN_BLOCKS_PER_SM = ELEMENT == F64 ? 1 : 2;

// Dimensions staged at a time. When the dimension is known it is the whole row, and the query panel
// stays in shared memory for the whole block; otherwise both sides are staged slice by slice.
constexpr bool RESIDENT = DIM > 0;
constexpr u32 SLICE = RESIDENT ? DIM : 64 / sizeof(Scalar);
constexpr u32 SLICE_SCALARS = SLICE * PANEL;
// Dimensions added up without a branch. Unknown dimensions are a multiple of it.
constexpr u32 GROUP = !RESIDENT ? 32 / sizeof(Scalar) : DIM <= 16 ? DIM : DIM % 8 == 0 ? 8 : DIM;

// Starts copying `dims` dimensions of a panel; consecutive dimensions are contiguous.
__device__ __forceinline__ void stage(Scalar* to, const Scalar* from, u32 dims) {
    for (u32 i = threadIdx.x; i < dims * (PANEL / VECTOR); i += SCAN_THREADS) {
        copy_16(to + i * VECTOR, from + i * VECTOR);
    }
}

// The offsets of a thread's query and row vectors in a panel. Eight threads of a warp lie side by side across
// rows and four across queries: loads of both operands are broadcast, without bank conflicts.
struct Place {
    // The first queries of the thread and of its warp, and the first row.
    u32 query, warp_query, row;
    __device__ __forceinline__ Place() {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        row = (warp % (ACROSS / 8) * 8 + lane % 8) * VECTOR;
        warp_query = warp / (ACROSS / 8) * 4 * VECTOR;
        query = warp_query + lane / 8 * VECTOR;
    }
    __device__ __forceinline__ u32 query_lane(u32 i) const {
        return i / VECTOR * (PANEL / QUERY_VECTORS) + query + i % VECTOR;
    }
    __device__ __forceinline__ u32 row_lane(u32 i) const {
        return i / VECTOR * (PANEL / ROW_VECTORS) + row + i % VECTOR;
    }
};

template <u32 VECTORS>
__device__ __forceinline__ void load(Scalar (&to)[VECTORS * VECTOR], const Scalar* from) {
    union Chunk {
        uint4 whole;
        Scalar parts[VECTOR];
    } chunk;
#pragma unroll
    for (u32 v = 0; v < VECTORS; ++v) {
        chunk.whole = *(const uint4*)(from + v * (PANEL / VECTORS));
#pragma unroll
        for (u32 i = 0; i < VECTOR; ++i) to[v * VECTOR + i] = chunk.parts[i];
    }
}

// A thread's sums.
struct ThreadSums {
    Total totals[QUERIES][ROWS];
    u32 query_bits[QUERIES], row_bits[ROWS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 q = 0; q < QUERIES; ++q) {
            query_bits[q] = 0;
#pragma unroll
            for (u32 x = 0; x < ROWS; ++x) totals[q][x] = 0;
        }
#pragma unroll
        for (u32 x = 0; x < ROWS; ++x) row_bits[x] = 0;
    }

    // Adds one dimension.
    __device__ __forceinline__ void step(const Scalar* queries, const Scalar* rows, Place place) {
        Scalar q[QUERIES], x[ROWS];
        load<QUERY_VECTORS>(q, queries + place.query);
        load<ROW_VECTORS>(x, rows + place.row);
#pragma unroll
        for (u32 i = 0; i < QUERIES; ++i) {
#pragma unroll
            for (u32 j = 0; j < ROWS; ++j) totals[i][j] = Step<SUM>::of(q[i], x[j], totals[i][j]);
        }
        if constexpr (SUM == SHARED_BITS) {
#pragma unroll
            for (u32 i = 0; i < QUERIES; ++i) query_bits[i] += __popc(q[i]);
#pragma unroll
            for (u32 j = 0; j < ROWS; ++j) row_bits[j] += __popc(x[j]);
        }
    }

    __device__ __forceinline__ Bits bits(u32 q, u32 x) const { return {query_bits[q], row_bits[x]}; }

    // Whether any pair of this query may be within the threshold.
    __device__ __forceinline__ bool any_within(u32 q, Threshold threshold) const {
        if constexpr (SUM == SHARED_BITS || ELEMENT == F64) {
            bool any = false;
#pragma unroll
            for (u32 x = 0; x < ROWS; ++x) any |= within(totals[q][x], bits(q, x), threshold);
            return any;
        } else {
            Total smallest = totals[q][0];
#pragma unroll
            for (u32 x = 1; x < ROWS; ++x) smallest = least(smallest, totals[q][x]);
            return within(smallest, Bits(), threshold);
        }
    }

    // Rotates this query's totals by one row; ROWS rotations restore the order.
    __device__ __forceinline__ void rotate(u32 q) {
        const Total total = totals[q][0];
        const u32 count = row_bits[0];
#pragma unroll
        for (u32 x = 0; x + 1 < ROWS; ++x) {
            totals[q][x] = totals[q][x + 1];
            row_bits[x] = row_bits[x + 1];
        }
        totals[q][ROWS - 1] = total;
        row_bits[ROWS - 1] = count;
    }
};

// The sink of `top_k`: candidates of the lists.
struct TopK {
    static const bool KEEPS_LEAST = false;

    const Threshold* thresholds;
    const Entry* worst;
    u32* counts;
    Entry* entries;

    // The threshold of a query: pairs beyond it do not matter.
    __device__ __forceinline__ Threshold threshold(u32 query) const { return thresholds[query]; }

    // In a dense pass every pair has a slot of its own, so no counter is needed.
    __device__ __forceinline__ void offer_dense(const Pass& pass, u32 query, u32 row, u32 slot,
                                                Real distance) const {
        entries[(u64)query * pass.slots + pass.k + slot] =
            is_eligible(pass, query, row) ? Entry::of(distance, pass.first_base + row)
                                           : Entry::none();
    }

    // The entry is compared, not just its distance, so that ties do not fill the list. The counter also
    // counts candidates past the last slot, which tells the merge that they overflow.
    __device__ __forceinline__ void offer(const Pass& pass, u32 query, u32 row,
                                          Real distance) const {
        if (!is_eligible(pass, query, row)) return;
        const Entry entry = Entry::of(distance, pass.first_base + row);
        if (!(entry < worst[query])) return;
        const u32 slot = atomicAdd(counts + query, 1u);
        if (slot < pass.slots - pass.k) {
            entries[(u64)query * pass.slots + pass.k + slot] = entry;
        }
    }
};

// Offers one query's pairs. A loop that rotates the totals: unrolled, it would be 64 copies of a rarely taken
// path.
template <typename Sink>
__device__ __forceinline__ void offer(ThreadSums& tile, u32 q, Threshold threshold, u32 query, u32 panel,
                                      u32 slot, Place place, const Pass& pass, const Sink& sink) {
#pragma unroll 1
    for (u32 x = 0; x < ROWS; ++x, tile.rotate(q)) {
        const u32 lane = place.row_lane(x);
        const u32 row = base_row(panel, lane, pass.panels);
        const Bits bits = tile.bits(q, 0);
        if (pass.dense) {
            sink.offer_dense(pass, query, row, slot + lane, distance_of(tile.totals[q][0], bits));
        } else if (within(tile.totals[q][0], bits, threshold)) {
            sink.offer(pass, query, row, distance_of(tile.totals[q][0], bits));
        }
    }
}

// Examines a finished tile: one test for all its pairs, then one per query, then one per pair.
template <typename Sink>
__device__ __forceinline__ void examine(ThreadSums& tile, const Threshold* thresholds, u32 first_query,
                                        u32 panel, u32 slot, Place place, const Pass& pass,
                                        const Sink& sink) {
    u32 hits = 0;
#pragma unroll
    for (u32 q = 0; q < QUERIES; ++q) {
        hits |= tile.any_within(q, thresholds[place.query_lane(q)]) ? 1u << q : 0u;
    }
    if (pass.dense) hits = ~0u;
    if (hits == 0) return;
#pragma unroll
    for (u32 q = 0; q < QUERIES; ++q) {
        const u32 query = first_query + place.query_lane(q);
        if ((hits >> q & 1) && query < pass.queries) {
            offer(tile, q, thresholds[place.query_lane(q)], query, panel, slot, place, pass, sink);
        }
    }
}

// The sequence of slices that a block stages: slice by slice of one panel after another.
struct Walk {
    u32 visit, panel, step, dim_done;

    __device__ __forceinline__ Walk(const Pass& pass) {
        visit = pass.begin + blockIdx.y;
        panel = panel_of_visit(pass, visit);
        step = panel_of_visit(pass, gridDim.y);
        dim_done = 0;
    }
    __device__ __forceinline__ bool is_over(const Pass& pass) const { return visit >= pass.end; }
    __device__ __forceinline__ u32 dims(u32 dim) const {
        return RESIDENT ? SLICE : min(SLICE, dim - dim_done);
    }
    __device__ __forceinline__ bool ends_panel(u32 dim) const {
        return RESIDENT || dim_done + SLICE >= dim;
    }
    __device__ __forceinline__ void advance(const Pass& pass) {
        if (!ends_panel(pass.dim)) {
            dim_done += SLICE;
            return;
        }
        dim_done = 0;
        visit += gridDim.y;
        // No overflow: both are below `panels`, which is below 2^26.
        panel += step;
        if (panel >= pass.panels) panel -= pass.panels;
    }
};

// Block (p, s) compares query panel p with the panels of visits begin + s, begin + s + gridDim.y, …;
// blocks that run together share base panels, which then come from L2.
//
// Shared: the thresholds of the panel, then per stage SLICE x 128 base elements, then the queries: the
// whole panel if RESIDENT, else the same slice per stage. Two stages: while one is summed, the other
// is filled. One barrier per slice is enough: the stage filled after it was last read before it.
// Sums: elements in ascending order, one thread per pair. In one piece, because it is a
// pipeline: what happens between the barriers should be seen together.
template <typename Sink>
__device__ __forceinline__ void scan_into(Sink& sink, const Scalar* __restrict__ queries,
                                          const Scalar* __restrict__ base, const Pass& pass) {
    Threshold* thresholds = (Threshold*)shared;
    Scalar* base_stages = (Scalar*)(thresholds + PANEL);
    Scalar* query_stages = base_stages + 2 * SLICE_SCALARS;
    const u32 dim = RESIDENT ? DIM : pass.dim;
    const u32 first_query = blockIdx.x * PANEL;
    const Scalar* query_panel = queries + (u64)first_query * dim;
    const Place place;
    // Warps without queries only copy: beside one query, the sums of a whole panel would take longer than
    // reading the base.
    const bool has_queries = first_query + place.warp_query < pass.queries;

    const auto fill = [&](const Walk& at, u32 stage_index) {
        const u32 dims = at.dims(dim);
        const u64 offset = ((u64)at.panel * dim + at.dim_done) * PANEL;
        stage(base_stages + stage_index * SLICE_SCALARS, base + offset, dims);
        if (!RESIDENT) {
            stage(query_stages + stage_index * SLICE_SCALARS, query_panel + at.dim_done * PANEL, dims);
        }
    };

    Walk now(pass);
    if (now.is_over(pass)) return;
    Walk next = now;
    for (u32 i = threadIdx.x; i < PANEL; i += SCAN_THREADS) {
        thresholds[i] = sink.threshold(first_query + i);
    }
    if (RESIDENT) stage(query_stages, query_panel, SLICE);
    fill(next, 0);
    ThreadSums tile;
    tile.clear();
    for (u32 stage_index = 0; !now.is_over(pass); stage_index ^= 1) {
        wait_for_copies();
        __syncthreads();
        next.advance(pass);
        if (!next.is_over(pass)) fill(next, stage_index ^ 1);

        const Scalar* rows = base_stages + stage_index * SLICE_SCALARS;
        const Scalar* query_slice = query_stages + (RESIDENT ? 0 : stage_index * SLICE_SCALARS);
        const u32 scalars = has_queries ? now.dims(dim) * PANEL : 0;
#pragma unroll 1
        for (u32 group = 0; group < scalars; group += GROUP * PANEL) {
#pragma unroll
            for (u32 d = 0; d < GROUP * PANEL; d += PANEL) {
                tile.step(query_slice + group + d, rows + group + d, place);
            }
        }
        if (has_queries && now.ends_panel(dim)) {
            if constexpr (Sink::KEEPS_LEAST) {
                sink.keep_least(tile, first_query, now.panel, place, pass);
            } else {
                examine(tile, thresholds, first_query, now.panel, (now.visit - pass.start) * PANEL,
                        place, pass, sink);
            }
            tile.clear();
        }
        now = next;
    }
}

extern "C" __global__ __launch_bounds__(SCAN_THREADS, SCAN_BLOCKS_PER_SM) void scan(
    const Scalar* __restrict__ queries, const Scalar* __restrict__ base,
    const Threshold* __restrict__ thresholds, const Entry* __restrict__ worst, u32* counts, Entry* entries,
    Pass pass, const u32* flag) {
    if (!has_work(flag)) return;
    TopK sink = {thresholds, worst, counts, entries};
    scan_into(sink, queries, base, pass);
}
