// A launch of the filter, and its units of work.

#include "filter/swizzled_tile.cuh"
#include "filter/least.cuh"

// One launch of the filter. The same struct as in src/device/cuda/search/filter/launch.rs.
struct Filter {
    const unsigned char* tiles;    // the base, in swizzled tiles
    const unsigned char* queries;  // row-major fp16 rows, or swizzled tiles
    const u32* thresholds;         // the last two fp16 numbers of every query's row, or its `Least`
    u32* hits;                     // positions of the rows that passed, by query
    u32* counts;                   // number of hits, by query
    u32* scratch;                  // hits of each thread, by multiprocessor
    const u32* given_up;           // nonzero: the filter is given up
    const float* fewest;           // for bit rows: a lower bound on the set bits of each tile's rows
    u64 hits_pitch;                // words of `hits` per query
    u32 room;                      // slots for hits of a query …
    u32 scratch_room;              // … and of one row of a thread
    u32 query_rows, query_blocks, splits;
    u32 begin, end;                // tiles
    u32 steps;                     // steps in a row
    u32 scratch_slots;             // multiprocessors with scratch
    u32 padding;
};

// A block of queries and a share of the tiles.
struct Unit {
    u32 queries, begin, end;

    __device__ __forceinline__ Unit(const Filter& filter, u32 unit) {
        const u32 tiles = filter.end - filter.begin;
        const u64 split = unit / filter.query_blocks;
        queries = unit % filter.query_blocks;
        begin = filter.begin + tiles * split / filter.splits;
        end = filter.begin + tiles * (split + 1) / filter.splits;
    }
};

__device__ __forceinline__ Least least_of(const Filter& filter, u32 query) {
    return ((const Least*)filter.thresholds)[query];
}
