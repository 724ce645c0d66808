// From keys to LSH tables: the rows of every table, bucket by bucket.
//
// The leading bits of a key are the number of its section; a section has a few rows on average. Rows are
// first placed section by section, by the ranks that hashing gave them; then the few keys of a section are
// sorted. The order of rows in a bucket is arbitrary, and answers do not depend on it.
//
// Buckets are found by the query's keys and by keys that differ from them in one or two bits: multi-probe LSH
// (Lv et al. 2007) with a fixed order of probes.

#include "common/scan.cuh"
#include "hashing/keys.cuh"

// The largest section that is sorted by one thread per row; larger ones are sorted by a block.
constexpr u32 SMALL = 64;

// The first position of every section: relative to its piece of PIECE sections, and the first position of
// every piece. The same struct as in src/device/cuda/hashing/launch.rs.
struct Begins {
    const u32* of_sections;
    const u32* of_pieces;
    u32 pieces;   // of a table
    u32 padding;

    __device__ __forceinline__ u32 begin(const Building& building, u32 table, u64 section) const {
        if (section >> building.section_bits) return (u32)building.rows;
        return of_sections[((u64)table << building.section_bits) + section]
             + of_pieces[table * pieces + (u32)(section / PIECE)];
    }
    __device__ __forceinline__ uint2 range(const Building& building, u32 table, u64 key) const {
        const u64 section = key >> (64 - building.section_bits);
        return make_uint2(begin(building, table, section), begin(building, table, section + 1));
    }
};

// Per table: the number of non-empty buckets, the size of the largest, and the sum of the squared sizes.
struct Sizes {
    u64 buckets, largest, squares;
};

// Adds the sizes found by all threads of a block, with one atomic per block and number: many blocks add to
// them.
__device__ __forceinline__ void add_sizes(Sizes sizes, Sizes* all) {
    constexpr u32 ALL = 0xffffffffu;
    __shared__ Sizes of_warps[32];
    for (u32 stride = 16; stride > 0; stride /= 2) {
        sizes.buckets += __shfl_xor_sync(ALL, sizes.buckets, stride);
        sizes.squares += __shfl_xor_sync(ALL, sizes.squares, stride);
        sizes.largest = max(sizes.largest, __shfl_xor_sync(ALL, sizes.largest, stride));
    }
    if (Warp::rank() == 0) of_warps[threadIdx.x / 32] = sizes;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 warp = 1; warp < blockDim.x / 32; warp++) {
            sizes.buckets += of_warps[warp].buckets;
            sizes.squares += of_warps[warp].squares;
            sizes.largest = max(sizes.largest, of_warps[warp].largest);
        }
        if (sizes.buckets > 0) {
            atomicAdd(&all->buckets, sizes.buckets);
            atomicAdd(&all->squares, sizes.squares);
            atomicMax(&all->largest, sizes.largest);
        }
    }
    __syncthreads();
}

// A row, placed in its section.
struct __align__(16) Placed {
    u64 key;
    u32 row;
    u32 padding;
};

// The output of sorting: rows, their keys (may be null), and the bucket of each row as a range of the table
// (may be null), which is empty for a row that is alone in its bucket. The same struct as in
// src/device/cuda/hashing/launch.rs.
struct Tables {
    u32* rows;
    u64* keys;
    uint2* home_buckets;
    Sizes* sizes;   // by table
};

// Places rows section by section.
extern "C" __global__ __launch_bounds__(256) void place_rows(
    const u64* __restrict__ keys, const u32* __restrict__ ranks, Begins begins,
    Placed* __restrict__ placed, Building building) {
    const u64 row = building.first + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= building.end) return;
    for (u32 table = blockIdx.y; table < building.tables; table += gridDim.y) {
        const u64 of_table = (u64)table * building.rows;
        const u64 key = keys[of_table + row];
        const u64 section = key >> (64 - building.section_bits);
        const u64 to = of_table + begins.begin(building, table, section) + ranks[of_table + row];
        placed[to] = {key, (u32)row, 0};
    }
}

// Sorts the rows of small sections by key, and lists large sections. A thread per position.
extern "C" __global__ __launch_bounds__(256) void sort_sections(
    const Placed* __restrict__ placed, Begins begins, Tables to, uint2* __restrict__ large,
    u32* __restrict__ large_count, Building building) {
    const u64 place = building.first + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (u32 table = blockIdx.y; table < building.tables; table += gridDim.y) {
        Sizes sizes = {0, 0, 0};
        if (place < building.end) {
            const u64 of_table = (u64)table * building.rows;
            const Placed* of_rows = placed + of_table;
            const u64 key = of_rows[place].key;
            const uint2 section = begins.range(building, table, key);
            if (section.y - section.x > SMALL) {
                if (place == section.x) {
                    large[atomicAdd(large_count, 1u)] = make_uint2(table, section.x);
                }
            } else {
                u32 less = 0, equal = 0, before = 0;
                for (u32 i = section.x; i < section.y; i++) {
                    const u64 other = of_rows[i].key;
                    less += other < key;
                    equal += other == key;
                    before += other == key && i < place;
                }
                const u32 start = section.x + less, row = of_rows[place].row;
                to.rows[of_table + start + before] = row;
                if (to.keys) to.keys[of_table + start + before] = key;
                if (to.home_buckets) {
                    const u32 end = equal == 1 ? start : start + equal;
                    to.home_buckets[of_table + row] = make_uint2(start, end);
                }
                if (before == 0) sizes = {1, equal, (u64)equal * equal};
            }
        }
        add_sizes(sizes, &to.sizes[table]);
    }
}

// Sorts the rows of large sections, which have few distinct keys: a block per section.
extern "C" __global__ __launch_bounds__(1024) void sort_large_sections(
    const Placed* __restrict__ placed, Begins begins, Tables to, const uint2* __restrict__ large,
    const u32* __restrict__ large_count, Building building) {
    __shared__ u64 least;
    for (u32 listed = blockIdx.x; listed < *large_count; listed += gridDim.x) {
        const u32 table = large[listed].x;
        const u64 of_table = (u64)table * building.rows;
        const Placed* of_rows = placed + of_table;
        const uint2 section = begins.range(building, table, of_rows[large[listed].y].key);
        u32 start = section.x;
        u64 last = 0;
        while (start < section.y) {
            // The smallest key above the last one.
            const bool is_first = start == section.x;
            __syncthreads();
            if (threadIdx.x == 0) least = ~0ull;
            __syncthreads();
            u64 thread_least = ~0ull;
            for (u32 i = section.x + threadIdx.x; i < section.y; i += blockDim.x) {
                const u64 key = of_rows[i].key;
                if (key < thread_least && (is_first || key > last)) thread_least = key;
            }
            atomicMin(&least, thread_least);
            __syncthreads();
            const u64 key = least;
            u32 end = start;
            for (u32 i = section.x; i < section.y; i += blockDim.x) {
                const u32 place = i + threadIdx.x;
                const bool is_here = place < section.y && of_rows[place].key == key;
                u32 all;
                const u32 at = end + sum_before(is_here, all);
                if (is_here) {
                    to.rows[of_table + at] = of_rows[place].row;
                    if (to.keys) to.keys[of_table + at] = key;
                }
                end += all;
            }
            if (to.home_buckets) {
                const uint2 bucket = make_uint2(start, end - start == 1 ? start : end);
                for (u32 i = section.x + threadIdx.x; i < section.y; i += blockDim.x) {
                    if (of_rows[i].key == key) to.home_buckets[of_table + of_rows[i].row] = bucket;
                }
            }
            if (threadIdx.x == 0) {
                const u64 size = end - start;
                atomicAdd(&to.sizes[table].buckets, 1ull);
                atomicAdd(&to.sizes[table].squares, size * size);
                atomicMax(&to.sizes[table].largest, size);
            }
            start = end;
            last = key;
        }
    }
}

// The first `probes` masks with zero, one or two bits set; bits of the first functions come first.
struct Flips {
    u32 count;    // functions
    u32 first, second;

    __device__ __forceinline__ u64 next(u32 probe) {
        if (probe == 0) return 0;
        if (probe <= count) {
            first = 0;
            second = 0;
            return bit(probe - 1);
        }
        if (++second == count) second = ++first + 1;
        return bit(first) | bit(second);
    }
    __device__ __forceinline__ u64 bit(u32 function) const { return 1ull << (count - 1 - function); }
};

// The buckets of queries in all tables, query by query, and the number of rows that each query visits:
// `probes` buckets per table, whose keys differ from the query's in at most two bits. A thread per query and
// table; `queries` describes the query keys, `building` the tables.
extern "C" __global__ __launch_bounds__(128) void find_buckets(
    const u64* __restrict__ query_keys, const u64* __restrict__ keys, Begins begins,
    uint2* __restrict__ ranges, u64* __restrict__ visited, u32 functions, u32 probes,
    Building queries, Building building) {
    const u64 query = queries.first + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (query >= queries.end) return;
    for (u32 table = blockIdx.y; table < queries.tables; table += gridDim.y) {
        const u64 home = query_keys[(u64)table * queries.rows + query];
        const u64* of_table = keys + (u64)table * building.rows;
        uint2* to = ranges + (query * queries.tables + table) * probes;
        Flips flips = {functions, 0, 0};
        u64 all = 0;
        for (u32 probe = 0; probe < probes; probe++) {
            const u64 flipped = flips.next(probe);
            const u64 key = probe == 0 ? home : mix(unmix(home) ^ flipped);
            const uint2 section = begins.range(building, table, key);
            // The section's first key >= `key`, and its first key > `key`.
            u32 bounds[2];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u32 low = section.x, high = section.y;
                while (low < high) {
                    const u32 middle = low + (high - low) / 2;
                    if (of_table[middle] < key || (i == 1 && of_table[middle] == key)) {
                        low = middle + 1;
                    } else {
                        high = middle;
                    }
                }
                bounds[i] = low;
            }
            to[probe] = make_uint2(bounds[0], bounds[1]);
            all += bounds[1] - bounds[0];
        }
        if (all > 0) atomicAdd(&visited[query], all);
    }
}
