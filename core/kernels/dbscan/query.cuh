// The rows of a query, up to 64, and bounds on their distances from boxes.

#include "dbscan/rows.cuh"

// Rows of a query that are compared at the same time.
constexpr u32 COLUMNS = DIM != 0 ? 4 : ELEMENT == F64 ? 16 : 32;
// Staged in shared memory at a time: chunks of a row, rows of the query, and rows of the tile.
constexpr u32 STAGED = DIM == 0 ? 4 : CHUNKS;
constexpr u32 STAGED_ROWS = DIM == 0 ? COLUMNS : TILE;
constexpr u32 STAGED_OTHERS = DIM == 0 ? TILE : 1;

// Whether coordinates are exact in float32.
constexpr bool ARE_EXACT = ELEMENT == BITS || (ELEMENT == F32 && !IS_DIRECTION);

// Query rows that share a bounding box.
constexpr u32 FEW = 4;

// A query: rows in the shared memory of a warp.
struct Query {
    u32 slots[TILE];  // NONE if there is no row
    Real inverses[IS_DIRECTION ? TILE : 1];
    u32 bits[HAS_BITS ? TILE : 1];
    RoundedRow rounded[HAS_FP16 ? TILE : 1];
    // Coordinates, rounded down and up; the bounding boxes of every FEW rows, and of all rows.
    float lows[COORDINATES][TILE], highs[ARE_EXACT ? 1 : COORDINATES][TILE];
    float few_lows[COORDINATES][TILE / FEW], few_highs[COORDINATES][TILE / FEW];
    float low[COORDINATES], high[COORDINATES];
    // The rows that are being compared, and the staged chunks of their values.
    u32 compared[TILE];
    Chunk chunks[STAGED][STAGED_ROWS];
    // If DIM is 0: staged values of the tile's rows; for each compared row the masks of tile rows within eps,
    // and of those that are undecided.
    Chunk others[STAGED][STAGED_OTHERS];
    u64 near[DIM == 0 ? TILE : 1], open[IS_FILTERED ? TILE : 1];
};

// A coordinate of the row in a slot.
__device__ __forceinline__ double coordinate_at(const Dbscan& all, u32 slot, u32 i) {
    if constexpr (ELEMENT == BITS || IS_DIRECTION) {
        return coordinate(all, all.order[slot], i);
    } else {
        const u32 dim = all.box_dims[i];
        const u64 first = (u64)(slot / TILE) * all.chunk_count + dim / WIDTH;
        return all.chunks[first * TILE + slot % TILE].of[dim % WIDTH];
    }
}

// Loads the rows in these slots: each lane has rows `lane` and `lane + 32`.
__device__ __forceinline__ void load(const Dbscan& all, const u32 (&slots)[2], Query& query) {
    __syncwarp();
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const u32 row = r * 32 + Warp::rank(), slot = slots[r];
        query.slots[row] = slot;
        if (slot == NONE) continue;
        if constexpr (IS_DIRECTION) query.inverses[row] = all.inverses[slot];
        if constexpr (HAS_BITS) query.bits[row] = all.bits[slot];
        if constexpr (HAS_FP16) query.rounded[row] = all.products.rounded[slot];
        if constexpr (DIM != 0) {
            const Chunk* from = all.chunks + (u64)(slot / TILE) * CHUNKS * TILE + slot % TILE;
#pragma unroll
            for (u32 i = 0; i < CHUNKS; i++) query.chunks[i][row] = from[i * TILE];
        }
    }
    __syncwarp();
}

// Loads the coordinates of a query's rows, and their bounding box.
__device__ __forceinline__ void load_coordinates(const Dbscan& all, Query& query) {
    __syncwarp();
    for (u32 i = 0; i < COORDINATES; i++) {
        float least = Limits<float>::infinity(), most = -least;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 row = r * 32 + Warp::rank(), slot = query.slots[row];
            float low = Limits<float>::infinity(), high = -low;
            if (slot != NONE) {
                const double x = coordinate_at(all, slot, i);
                low = __double2float_rd(x);
                high = __double2float_ru(x);
            }
            query.lows[i][row] = low;
            if (!ARE_EXACT) query.highs[i][row] = high;
            for (u32 stride = 1; stride < FEW; stride *= 2) {
                low = fminf(low, __shfl_xor_sync(0xffffffff, low, stride));
                high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, stride));
            }
            if (row % FEW == 0) {
                query.few_lows[i][row / FEW] = low;
                query.few_highs[i][row / FEW] = high;
            }
            least = fminf(least, low);
            most = fmaxf(most, high);
        }
        for (u32 stride = 16; stride >= FEW; stride /= 2) {
            least = fminf(least, __shfl_xor_sync(0xffffffff, least, stride));
            most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, stride));
        }
        if (Warp::rank() == 0) {
            query.low[i] = least;
            query.high[i] = most;
        }
    }
    __syncwarp();
}

// A lower bound on the distance sum of a row in [low_of, high_of] and a row in a box, the lane's of 32; every
// step is rounded down.
template <typename Low, typename High>
__device__ __forceinline__ float least_sum(const float* box, Low low_of, High high_of) {
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < COORDINATES; i++) {
        const float low = box[2 * i * 32], high = box[(2 * i + 1) * 32];
        const float row_low = low_of(i), row_high = high_of(i);
        if constexpr (SUM == SHARED_BITS) {
            // Jaccard: at least the share of bits by which the fuller row exceeds the other.
            const float fewer = row_high < low ? row_high : high;
            const float more = row_high < low ? low : row_low;
            return fewer < more ? __fsub_rd(1, __fdiv_ru(fewer, more)) : 0;
        }
        const float gap = fmaxf(fmaxf(__fsub_rd(low, row_high), __fsub_rd(row_low, high)), 0);
        sum = SUM == SQUARES || IS_DIRECTION ? __fmaf_rd(gap, gap, sum) : __fadd_rd(sum, gap);
    }
    return sum;
}

// An upper bound on the same sum; every step is rounded up.
template <typename Low, typename High>
__device__ __forceinline__ float most_sum(const float* box, Low low_of, High high_of) {
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < COORDINATES; i++) {
        const float low = box[2 * i * 32], high = box[(2 * i + 1) * 32];
        if constexpr (SUM == SHARED_BITS) return 1;
        if constexpr (SUM == DIFFERENT_BITS) return __fadd_ru(high_of(i), high);
        const float gap = fmaxf(__fsub_ru(high, low_of(i)), __fsub_ru(high_of(i), low));
        sum = SUM == SQUARES || IS_DIRECTION ? __fmaf_ru(gap, gap, sum) : __fadd_ru(sum, gap);
    }
    return sum;
}

// Whether all rows of a box are beyond eps of all rows of a query (`is_outside`), and whether all are within
// eps (`is_within`).
__device__ __forceinline__ bool is_outside(const Dbscan& all, const Query& query, const float* box) {
    const float least = least_sum(box, [&](u32 i) { return query.low[i]; },
                                  [&](u32 i) { return query.high[i]; });
    if (least > all.beyond) return true;
    for (u32 few = 0; few < TILE / FEW; few++) {
        const float least = least_sum(box, [&](u32 i) { return query.few_lows[i][few]; },
                                      [&](u32 i) { return query.few_highs[i][few]; });
        if (!(least > all.beyond)) return false;
    }
    return true;
}
__device__ __forceinline__ bool is_within(const Dbscan& all, const Query& query, const float* box) {
    return most_sum(box, [&](u32 i) { return query.low[i]; },
                    [&](u32 i) { return query.high[i]; }) <= all.inside;
}

// The rows of a query with a bit in `rows` that may be within eps of a row in a box.
__device__ __forceinline__ u64 rows_near(
    const Dbscan& all, const Query& query, u64 rows, const float* box) {
    u32 near[2];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const u32 row = r * 32 + Warp::rank();
        const bool is_near =
            (rows >> row & 1) && !(least_sum(box, [&](u32 i) { return query.lows[i][row]; },
                                             [&](u32 i) {
                                                 return ARE_EXACT ? query.lows[i][row]
                                                                  : query.highs[i][row];
                                             }) > all.beyond);
        near[r] = __ballot_sync(0xffffffff, is_near);
    }
    return (u64)near[1] << 32 | near[0];
}
