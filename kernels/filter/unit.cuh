// A launch of the filter, and how it is cut into units of work.

#include "filter/image.cuh"
#include "filter/least.cuh"

// One launch of the filter. The same struct as in src/device/cuda/search/filter/launch.rs.
struct Filter {
    const unsigned char* tiles;    // the base, in images
    const unsigned char* queries;  // rows of halves, or images
    const u32* thresholds;         // the last two halves of every query's row, or its `Least`
    u32* hits;                     // positions of the rows that passed, by query
    u32* counts;                   // their numbers
    u32* scratch;                  // the same of a thread, for each multiprocessor
    const u32* given_up;           // whether there is nothing to do
    const float* fewest;           // the fewest bits of a row of each tile, if it is of bits
    u64 hits_pitch;                // words of `hits` per query
    u32 room;                      // hits that a query has room for …
    u32 scratch_room;              // … and a thread, of one row
    u32 query_rows, query_blocks, splits;
    u32 begin, end;                // tiles
    u32 steps;                     // steps in a row
    u32 scratch_slots;             // multiprocessors that have scratch
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
