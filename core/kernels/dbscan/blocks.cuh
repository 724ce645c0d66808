// Distance sums of pairs, in registers, and their comparison with eps.

#include "dbscan/query.cuh"

// Adds one element of a pair: f64 as in the definition, f32 and directions without a fixed rounding.
__device__ __forceinline__ u32 accumulate(u32 x, u32 y, u32 sum) {
    return sum + __popc(SUM == SHARED_BITS ? x & y : x ^ y);
}
__device__ __forceinline__ float accumulate(float x, float y, float sum) {
    const float difference = add(x, -y);
    return IS_DIRECTION     ? fused(x, y, sum)
           : SUM == SQUARES ? fused(difference, difference, sum)
                            : add(sum, magnitude(difference));
}
__device__ __forceinline__ double accumulate(double x, double y, double sum) {
    const double difference = add(x, -y);
    return add(sum, IS_DIRECTION     ? multiply(x, y)
                    : SUM == SQUARES ? multiply(difference, difference)
                                     : magnitude(difference));
}

// Whether two rows with this sum are certainly within eps (`sure`), and whether they may be (`may`).
// `inverses` is the product of both inverse lengths, `bits` the sum of both numbers of set bits. f64 sums in
// the order of the definition decide.
template <bool IN_ORDER = ELEMENT == F64 && !IS_DIRECTION>
__device__ __forceinline__ void decide(
    const Dbscan& all, Total sum, Real inverses, u32 bits, bool& sure, bool& may) {
    if constexpr (SUM == DIFFERENT_BITS) {
        sure = may = (double)sum <= all.limit;
    } else if constexpr (SUM == SHARED_BITS) {
        const u32 either = bits - sum;
        const float share = __fdividef(__uint2float_rn(sum), __uint2float_rn(either));
        const float distance = either == 0 ? 0 : 1 - share;
        sure = (double)distance <= all.sure;
        may = (double)distance <= all.may;
    } else {
        Real distance = sum;
        if constexpr (IS_DIRECTION) distance = add(Real(1), -multiply(distance, inverses));
        if constexpr (IN_ORDER) {
            sure = may = distance <= all.limit;
            return;
        }
        sure = distance <= (Real)all.sure;
        // NaN, from rows that are out of range, counts as undecided.
        may = !(distance > (Real)all.may);
    }
}

// The 64-bit mask of a predicate: each lane has bits `lane` and `lane + 32`.
__device__ __forceinline__ u64 rows_that(bool first, bool second) {
    const u32 low = __ballot_sync(0xffffffff, first), high = __ballot_sync(0xffffffff, second);
    return (u64)high << 32 | low;
}

// Lists the rows of a query that have a bit in `rows`, and returns their number.
__device__ __forceinline__ u32 list_compared(u64 rows, Query& query) {
    __syncwarp();
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const u32 row = r * 32 + Warp::rank();
        if (rows >> row & 1) query.compared[__popcll(rows & ((1ull << row) - 1))] = row;
    }
    __syncwarp();
    return __popcll(rows);
}

// Many dimensions: a warp computes a block of sums, COLUMNS rows of a query by a tile; a lane has LANE_COLUMNS
// by 8 of them, in steps of 4 and 8.
constexpr u32 LANE_COLUMNS = COLUMNS / 4;
typedef Total BlockSums[LANE_COLUMNS][8];

// Computes the sums of the query's compared rows from `first` on. False if no pair can be within eps.
__device__ __forceinline__ bool add_block(
    const Dbscan& all, u32 tile, u32 first, u32 last, Query& query, BlockSums& sums) {
    const u32 lane = Warp::rank(), column = lane % COLUMNS;
    const u32 slot = query.slots[query.compared[min(first + column, last - 1)]];
    const Chunk* from = all.chunks + (u64)(slot / TILE) * all.chunk_count * TILE + slot % TILE;
    const Chunk* others = all.chunks + (u64)tile * all.chunk_count * TILE + lane;
#pragma unroll
    for (u32 i = 0; i < LANE_COLUMNS; i++) {
#pragma unroll
        for (u32 j = 0; j < 8; j++) sums[i][j] = 0;
    }
    for (u32 start = 0; start < all.chunk_count; start += STAGED) {
        const u32 some = min(STAGED, all.chunk_count - start);
        __syncwarp();
        for (u32 i = lane / COLUMNS; i < some; i += 32 / COLUMNS) {
            query.chunks[i][column] = from[(u64)(start + i) * TILE];
        }
        for (u32 i = 0; i < some; i++) {
            query.others[i][lane] = others[(u64)(start + i) * TILE];
            query.others[i][lane + 32] = others[(u64)(start + i) * TILE + 32];
        }
        __syncwarp();
        for (u32 chunk = 0; chunk < some; chunk++) {
            Chunk x[LANE_COLUMNS];
#pragma unroll
            for (u32 i = 0; i < LANE_COLUMNS; i++) x[i] = query.chunks[chunk][i * 4 + lane / 8];
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                const Chunk y = query.others[chunk][j * 8 + lane % 8];
#pragma unroll
                for (u32 i = 0; i < LANE_COLUMNS; i++) {
#pragma unroll
                    for (u32 e = 0; e < WIDTH; e++) {
                        sums[i][j] = accumulate(x[i].of[e], y.of[e], sums[i][j]);
                    }
                }
            }
        }
        // Sums of signed products may fall again, and bits are cheap; only growing sums end early.
        if constexpr (SUM == SQUARES || SUM == ABSOLUTE) {
            Total least = sums[0][0];
#pragma unroll
            for (u32 i = 0; i < LANE_COLUMNS; i++) {
#pragma unroll
                for (u32 j = 0; j < 8; j++) least = min(least, sums[i][j]);
            }
            if (!__any_sync(0xffffffff, least <= (Total)all.may)) return false;
        }
    }
    return true;
}

// For each of the query's compared rows from `first` on: a bit for each row of the tile within eps, in
// query.near, by its index among the compared rows. False if no bit is set.
__device__ __forceinline__ bool find_in_block(
    const Dbscan& all, u32 tile, u32 first, u32 last, u64 others, Query& query, Work& work) {
    BlockSums sums;
    if (!add_block(all, tile, first, last, query, sums)) return false;
    const u32 lane = Warp::rank();
    const u64 slot = (u64)tile * TILE;
#pragma unroll
    for (u32 i = 0; i < LANE_COLUMNS; i++) {
        const u32 place = first + i * 4 + lane / 8, row = query.compared[min(place, last - 1)];
        u64 sure = 0, may = 0;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            const u32 other = j * 8 + lane % 8;
            bool is_sure, may_be;
            Real inverses = 1;
            u32 bits = 0;
            if constexpr (IS_DIRECTION) {
                inverses = multiply(query.inverses[row], all.inverses[slot + other]);
            }
            if constexpr (SUM == SHARED_BITS) bits = query.bits[row] + all.bits[slot + other];
            decide(all, sums[i][j], inverses, bits, is_sure, may_be);
            sure |= (u64)is_sure << other;
            may |= (u64)may_be << other;
        }
        u64 open = place < last ? may & ~sure & others : 0;
        work.rechecked += __popcll(open);
        for (; open != 0; open &= open - 1) {
            const u32 other = all.order[slot + __ffsll(open) - 1];
            if (holds(all, all.order[query.slots[row]], other)) sure |= open & (0 - open);
        }
        for (u32 stride = 1; stride < 8; stride *= 2) {
            sure |= __shfl_xor_sync(0xffffffff, sure, stride);
        }
        if (lane % 8 == 0) query.near[first + i * 4 + lane / 8] = sure;
    }
    __syncwarp();
    return true;
}
