// The candidates of uncertain rows, as pairs of a row and a centroid, by warpgroup products.

#include "kmeans/sm90_warpgroup_assign.cuh"

// The candidates of a thread's rows, buffered in local memory until the last tile: one atomic on the length
// of the list per warp. Candidates that overflow the buffer are appended one by one.
struct FindCandidates {
    constexpr static u32 ROOM = 16;

    const Rounds& rounds;
    const Fp16Buffers& buffers;
    u32* candidates;  // centroids; the highest bit tells the row of the two
    u32 place = 0, count = 0;
    int limits[2] = {};

    __device__ __forceinline__ void begin(u32 first) {
        place = first;
        count = 0;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            // For rows past the end: a limit below the bits of every sum.
            const bool is_row = first + 8 * i < rounds.status->uncertain;
            limits[i] = is_row ? __float_as_int(buffers.least[first + 8 * i]) : (int)0x80000000;
        }
    }

    template <u32 HALF> __device__ __forceinline__ void take(const float (&sums)[128], u32 tile) {
        int lines[8], least = WORST;
#pragma unroll
        for (u32 line = 0; line < 8; ++line) {
            lines[line] = WORST;
#pragma unroll
            for (u32 column = 0; column < 8; ++column) {
                lines[line] = smaller(lines[line], bits_of<HALF>(sums, line, column));
            }
            least = smaller(least, lines[line]);
        }
        if (least > limits[HALF]) return;
        u32 passes[2] = {0, 0};
#pragma unroll
        for (u32 line = 0; line < 8; ++line) {
            if (lines[line] > limits[HALF]) continue;
#pragma unroll
            for (u32 column = 0; column < 8; ++column) {
                if (bits_of<HALF>(sums, line, column) <= limits[HALF]) {
                    passes[line / 4] |= 1u << (line % 4 * 8 + column);
                }
            }
        }
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
#pragma unroll 1
            for (u32 left = passes[half]; left != 0; left &= left - 1) {
                const u32 at = __ffs(left) - 1, centroid = centroid_in(tile, half * 4 + at / 8, at % 8);
                // The centroid may be one that pads the last tile, if every sum passes.
                if (centroid < rounds.k) add(centroid | HALF << 31);
            }
        }
    }

    __device__ __forceinline__ void add(u32 entry) {
        if (count < ROOM) {
            candidates[count++] = entry;
        } else if (__ldcg(&rounds.status->pairs) <= buffers.room_for_pairs) {
            // The check keeps the counter from wrapping around.
            note(atomicAdd(&rounds.status->pairs, 1u), entry);
        }
    }

    __device__ __forceinline__ void note(u32 at, u32 entry) {
        note_pair(buffers, at, {place + (entry >> 31) * 8, entry & 0x7fffffff});
    }

    // Called by all lanes of a warp.
    __device__ __forceinline__ void end(u32) {
        const u32 up_to = sum_up_to(count), all = __shfl_sync(0xffffffffu, up_to, 31);
        u32 start = buffers.room_for_pairs;
        if (all > 0 && Warp::rank() == 0 && __ldcg(&rounds.status->pairs) <= buffers.room_for_pairs) {
            start = atomicAdd(&rounds.status->pairs, all);
        }
        start = __shfl_sync(0xffffffffu, start, 0) + up_to - count;
        for (u32 i = 0; i < count; ++i) note(start + i, candidates[i]);
    }
};

// Lists the candidates of the uncertain rows in some swizzled tiles. Any grid.
extern "C" __global__ __launch_bounds__(THREADS, 1) void warpgroup_candidates(
    Rounds rounds, Fp16Buffers buffers, u32 first, u32 end, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    const Compared uncertain(buffers.uncertain, rounds.status->uncertain);
    const u32 all = (uncertain.count + SWIZZLED_ROWS - 1) / SWIZZLED_ROWS, tiles = tiles_of(rounds.k);
    if (all <= first) return;
    const u32 row_tiles = (all < end ? all : end) - first;
    // A few tiles of rows have too few blocks for all multiprocessors, so the centroids are divided as well.
    const u32 parts = gridDim.x / row_tiles > tiles ? tiles : gridDim.x > row_tiles ? gridDim.x / row_tiles : 1;
    const Span span = {0, row_tiles * parts, first, row_tiles, tiles, parts};
    u32 candidates[FindCandidates::ROOM];
    run_warpgroups(buffers, uncertain, span, FindCandidates{rounds, buffers, candidates});
}
