// The nearest neighbours of queries among the rows of some LSH buckets: a warp per query.
//
// A warp visits the rows of all buckets of a query, 32 at a time, independent of bucket sizes. Its bit field
// marks the rows it has seen, and is cleared by visiting the same rows again. A row seen for the first time
// is compared and, if it may be among the k nearest, appended to a candidate list in shared memory, which is
// sorted and truncated when full.

#include "search/lists.cuh"

// The number of no row.
constexpr u32 NOBODY = 0xffffffffu;

// The base rows that are the queries: those in `listed`, or `first` and its successors; `first` is NOBODY if
// queries are not base rows. The same struct as in src/device/cuda/search/launch_buckets.rs.
struct SelfRows {
    const u32* listed;
    u32 first;
    u32 padding;

    __device__ __forceinline__ u32 of(u32 query) const {
        if (listed) return listed[query];
        return first == NOBODY ? NOBODY : first + query;
    }
};

// The parameters of a launch. The same struct as in src/device/cuda/search/launch_buckets.rs.
struct BucketSearch {
    u64 table_rows;  // rows of a table
    u64 words;       // of 32 bits, in the bit field of a warp
    u32 first;       // the launch's first query
    u32 end;
    u32 tables;      // tables that are probed
    u32 dim;         // elements in a row
    u32 k;           // neighbours per query
    u32 slots;       // entries of a warp in shared memory, a power of two of at least k + 32
    u32 is_home;     // whether queries probe their home buckets
    u32 probes;      // buckets per query and table, if that number is the same for all
    SelfRows self_rows;  // the base rows that are the queries
};

// The distances from a query to `N` rows, each summed in the order of its elements. `N` independent sums hide
// the latency of additions.
template <u32 N>
__device__ __forceinline__ void distances_of_rows(const Scalar* __restrict__ query,
                                                  const Scalar* const (&rows)[N],
                                                  u32 run_time_dim, Real (&distances)[N]) {
    const u32 dim = DIM > 0 ? DIM : run_time_dim;
    constexpr u32 TOGETHER = 16 / sizeof(Scalar);
    Total totals[N];
    Bits bits[N];
#pragma unroll
    for (u32 n = 0; n < N; n++) {
        totals[n] = 0;
        bits[n] = {0, 0};
    }
    const auto step = [&](u32 n, Scalar q, Scalar x) {
        if constexpr (SUM == PRODUCTS) q = -q;
        totals[n] = Step<SUM>::of(q, x, totals[n]);
        if constexpr (SUM == SHARED_BITS) {
            bits[n].query += __popc(q);
            bits[n].row += __popc(x);
        }
    };
    if (dim % TOGETHER == 0) {
        // Rows are aligned to 16 bytes.
        for (u32 d = 0; d < dim; d += TOGETHER) {
            union Chunk { uint4 all; Scalar one[TOGETHER]; } q, x[N];
            q.all = *reinterpret_cast<const uint4*>(query + d);
#pragma unroll
            for (u32 n = 0; n < N; n++) x[n].all = *reinterpret_cast<const uint4*>(rows[n] + d);
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
#pragma unroll
                for (u32 n = 0; n < N; n++) step(n, q.one[i], x[n].one[i]);
            }
        }
    } else {
#pragma unroll 8
        for (u32 d = 0; d < dim; d++) {
#pragma unroll
            for (u32 n = 0; n < N; n++) step(n, query[d], rows[n][d]);
        }
    }
#pragma unroll
    for (u32 n = 0; n < N; n++) distances[n] = distance_of(totals[n], bits[n]);
}

// The table of a query's bucket; its buckets in table t begin at starts[t].
__device__ __forceinline__ u32 table_of(const u32* __restrict__ starts, u32 tables, u32 bucket) {
    u32 low = 0, high = tables;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (starts[middle] <= bucket) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// The bucket of each row in each table, as a range of the table's rows, which is empty for a row that is
// alone in its bucket. The buckets of table t begin at buckets[first_bucket[t]], ascending.
extern "C" __global__ void find_home_buckets(const u32* __restrict__ rows,
                                            const u32* __restrict__ buckets,
                                            const u64* __restrict__ first_bucket,
                                            uint2* __restrict__ home_buckets, u32 table_rows, u32 tables) {
    const u32 place = blockIdx.x * blockDim.x + threadIdx.x;
    if (place >= table_rows) return;
    for (u32 table = blockIdx.y; table < tables; table += gridDim.y) {
        const u32* starts = buckets + first_bucket[table];
        const u32 count = (u32)(first_bucket[table + 1] - first_bucket[table]);
        u32 low = 0, high = count;
        while (high - low > 1) {
            const u32 middle = low + (high - low) / 2;
            if (starts[middle] <= place) {
                low = middle;
            } else {
                high = middle;
            }
        }
        const u32 start = starts[low], end = low + 1 < count ? starts[low + 1] : table_rows;
        const u64 of_table = (u64)table * table_rows;
        home_buckets[of_table + rows[of_table + place]] = make_uint2(start, end - start == 1 ? start : end);
    }
}

// Calls `visit(row, is_there)` with all lanes for the rows of all buckets of a query, and returns the number
// of rows; `is_there` is false for lanes without a row. If `starts` is null, a query has `probes` buckets in
// each table.
template <typename Visit>
__device__ __forceinline__ u64 visit_rows(const BucketSearch& search, u32 query, u32 itself,
                                           const u32* __restrict__ rows,
                                           const uint2* __restrict__ ranges,
                                           const u32* __restrict__ starts, Visit visit) {
    constexpr u32 ALL = 0xffffffffu;
    const u32 lane = Warp::rank();
    const u64 first_table = (u64)query * search.tables;
    const u32* query_starts = starts + first_table;
    const u64 begin = starts ? query_starts[0] : first_table * search.probes;
    const u64 end = starts ? query_starts[search.tables] : begin + search.tables * search.probes;
    u64 visited = 0;
    for (u64 chunk = begin; chunk < end; chunk += 32) {
        const u64 bucket = chunk + lane;
        u32 size = 0;
        u64 place = 0;
        if (bucket < end) {
            const u32 table = starts ? table_of(query_starts, search.tables, (u32)bucket)
                                     : (u32)(bucket - begin) / search.probes;
            const uint2 range = ranges[search.is_home ? table * search.table_rows + itself : bucket];
            size = range.y - range.x;
            place = table * search.table_rows + range.x;
        }
        u32 sum = size;  // inclusive prefix sum of bucket sizes
#pragma unroll
        for (u32 stride = 1; stride < 32; stride *= 2) {
            const u32 before = __shfl_up_sync(ALL, sum, stride);
            if (lane >= stride) sum += before;
        }
        const u32 count = __shfl_sync(ALL, sum, 31);
        visited += count;
        place -= sum - size;
        for (u32 first = 0; first < count; first += 32) {
            const u32 i = first + lane;
            // The bucket of this row: the number of buckets that end at or before it.
            u32 source = 0;
#pragma unroll
            for (u32 step = 16; step > 0; step /= 2) {
                const u32 ends = __shfl_sync(ALL, sum, source + step - 1);
                if (ends <= i) source += step;
            }
            const u64 from = __shfl_sync(ALL, place, source);
            visit(i < count ? rows[from + i] : 0u, i < count);
        }
    }
    return visited;
}

// `counts` gets the number of neighbours of each query, `work` the numbers of visited rows and compared
// pairs. `seen` is zero before and after. `starts` and `left_out` may be null.
extern "C" __global__ void nearest_in_buckets(
    const Scalar* __restrict__ queries, const Scalar* __restrict__ base,
    const u32* __restrict__ rows, const uint2* __restrict__ ranges,
    const u32* __restrict__ starts, const u32* __restrict__ left_out, u32* __restrict__ seen,
    u32* __restrict__ nearest,
    Real* __restrict__ distances, u32* __restrict__ counts, u64* __restrict__ work,
    BucketSearch search) {
    constexpr u32 ALL = 0xffffffffu;
    const u32 lane = Warp::rank(), warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const u32 worker = blockIdx.x * warps + warp;
    Entry* entries = reinterpret_cast<Entry*>(shared) + (u64)warp * search.slots;
    u32* bits = seen + worker * search.words;
    u64 visited = 0, compared = 0;
    for (u64 at = (u64)search.first + worker; at < search.end; at += (u64)gridDim.x * warps) {
        const u32 query = (u32)at;
        const Scalar* of_query = queries + (u64)query * search.dim;
        const u32 itself = search.self_rows.of(query);
        u32 filled = 0;
        Entry worst = Entry::none();
        const auto compare = [&](u32 row, bool is_there) {
            bool is_new = is_there && row != itself;
            if (is_new && left_out) is_new = !(left_out[row / 32] >> (row % 32) & 1);
            if (is_new) {
                const u32 bit = 1u << (row % 32);
                is_new = !(atomicOr(&bits[row / 32], bit) & bit);
            }
            Entry entry = Entry::none();
            if (is_new) {
                compared++;
                const Scalar* const of_row[1] = {base + (u64)row * search.dim};
                Real distance[1];
                distances_of_rows(of_query, of_row, search.dim, distance);
                entry = Entry::of(distance[0], row);
            }
            const bool is_near = is_new && entry < worst;
            const u32 near = __ballot_sync(ALL, is_near);
            if (near == 0) return;
            if (is_near) entries[filled + __popc(near & ((1u << lane) - 1))] = entry;
            filled += __popc(near);
            if (filled + 32 > search.slots) {
                sort<Warp>(entries, filled);
                filled = min(filled, search.k);
                if (filled == search.k) worst = entries[filled - 1];
                Warp::sync();
            }
        };
        visited += visit_rows(search, query, itself, rows, ranges, starts, compare);
        Warp::sync();
        const auto forget = [&](u32 row, bool is_there) {
            if (is_there) bits[row / 32] = 0;
        };
        visit_rows(search, query, itself, rows, ranges, starts, forget);
        sort<Warp>(entries, filled);
        filled = min(filled, search.k);
        for (u32 i = lane; i < filled; i += 32) {
            nearest[(u64)query * search.k + i] = entries[i].number();
            distances[(u64)query * search.k + i] = entries[i].distance();
        }
        if (lane == 0) counts[query] = filled;
        Warp::sync();
    }
    for (u32 stride = 16; stride > 0; stride /= 2) {
        compared += __shfl_xor_sync(ALL, compared, stride);
    }
    if (lane == 0 && visited > 0) {
        atomicAdd(&work[0], visited);
        atomicAdd(&work[1], compared);
    }
}
