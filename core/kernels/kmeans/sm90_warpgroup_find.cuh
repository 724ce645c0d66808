// The best two sums of every row, and the centroid of the best, by warpgroup products.
//
// A thread's 64 sums of a row and a tile form an 8 x 8 square. The thread keeps the minimum of the bits of
// each line and of each column over all tiles, and of the best two tiles. Every sum but the best differs from
// it in line, column or tile, so these minima determine the position of the best sum and the value of the
// second best. With ties the position may be wrong, but then the row is uncertain.

#include "kmeans/sm90_warpgroup_assign.cuh"

// The minima that a thread keeps for one of its two rows.
struct BestOfSquares {
    int lines[8], columns[8];
    int first, second;  // the minima of the best two tiles, …
    u32 tile;           // … and the number of the best tile

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) lines[i] = columns[i] = WORST;
        first = second = WORST;
        tile = 0;
    }

    // Updates the minima with the sums of a tile.
    template <typename Square> __device__ __forceinline__ void take(const Square& bits, u32 number) {
        int least = WORST;
#pragma unroll
        for (u32 line = 0; line < 8; ++line) {
            int of_line = bits(line, 0);
#pragma unroll
            for (u32 column = 1; column < 8; ++column) of_line = smaller(of_line, bits(line, column));
            lines[line] = smaller(lines[line], of_line);
            least = smaller(least, of_line);
        }
#pragma unroll
        for (u32 column = 0; column < 8; ++column) {
#pragma unroll
            for (u32 line = 0; line < 8; ++line) columns[column] = smaller(columns[column], bits(line, column));
        }
        second = smaller(second, larger(first, least));
        if (least < first) {
            first = least;
            tile = number;
        }
    }
};

// The smallest of eight numbers, its index, and the second smallest.
struct LeastTwo {
    int first = WORST, second = WORST;
    u32 place = 0;

    explicit __device__ __forceinline__ LeastTwo(const int (&of)[8]) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            second = smaller(second, larger(first, of[i]));
            if (of[i] < first) {
                first = of[i];
                place = i;
            }
        }
    }
};

// Writes the result for the row at `place`, combined over the four threads that share the row. No load is
// waited for here.
__device__ __forceinline__ void note_row(const Fp16Buffers& buffers, const BestOfSquares& best, u32 place,
                                         u32 count) {
    const u32 lane = threadIdx.x % 32;
    const LeastTwo line(best.lines), column(best.columns);
    int one = best.first, two = smaller(best.second, smaller(line.second, column.second));
    u32 cluster = centroid_in(best.tile, line.place, column.place);
#pragma unroll
    for (u32 stride = 1; stride < 4; stride *= 2) {
        const int other_one = __shfl_xor_sync(0xffffffffu, one, stride);
        const int other_two = __shfl_xor_sync(0xffffffffu, two, stride);
        const u32 other = __shfl_xor_sync(0xffffffffu, cluster, stride);
        two = smaller(larger(one, other_one), smaller(two, other_two));
        if (other_one < one) one = other_one, cluster = other;
    }
    if (lane % 4 > 0 || place >= count) return;
    *reinterpret_cast<uint4*>(&buffers.results[place]) = {(u32)one, (u32)two, cluster, 0};
}

// The task that finds the nearest centroids of a thread's rows.
struct FindNearest {
    const Fp16Buffers& buffers;
    u32 count;
    BestOfSquares best[2];

    __device__ __forceinline__ void begin(u32) {
        best[0].clear();
        best[1].clear();
    }
    template <u32 HALF> __device__ __forceinline__ void take(const float (&sums)[128], u32 tile) {
        best[HALF].take([&](u32 line, u32 column) { return bits_of<HALF>(sums, line, column); }, tile);
    }
    __device__ __forceinline__ void end(u32 place) {
        note_row(buffers, best[0], place, count);
        note_row(buffers, best[1], place + 8, count);
    }
};

// Finds the nearest centroids of the rows in some swizzled tiles. Any grid.
extern "C" __global__ __launch_bounds__(THREADS, 1) void warpgroup_find(
    Rounds rounds, Fp16Buffers buffers, u32 first, u32 end, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    const Compared compared(rounds);
    const u32 row_tiles = (compared.count + SWIZZLED_ROWS - 1) / SWIZZLED_ROWS;
    const WholeSpan span = {first, row_tiles < end ? row_tiles : end, tiles_of(rounds.k)};
    run_warpgroups(buffers, compared, span, FindNearest{buffers, compared.count});
}
