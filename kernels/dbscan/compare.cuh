// The rows of a query, up to 64, against the rows of a tile, of which each lane has two.

#include "dbscan/rows.cuh"

// Rows of a query that are compared side by side.
constexpr u32 COLUMNS = DIM != 0 ? 4 : ELEMENT == F64 ? 16 : 32;
// Chunks and rows of a query, and rows of a tile, that are in shared memory at a time.
constexpr u32 STAGED = DIM == 0 ? 4 : CHUNKS;
constexpr u32 STAGED_ROWS = DIM == 0 ? COLUMNS : TILE;
constexpr u32 STAGED_OTHERS = DIM == 0 ? TILE : 1;

// Blocks of a multiprocessor, as far as registers go.
constexpr u32 RESIDENT = DIM != 0 && DIM <= 8 && ELEMENT != F64 ? 12 : 6;

// Coordinates are float32: no rounding.
constexpr bool ARE_EXACT = ELEMENT == BITS || (ELEMENT == F32 && !IS_DIRECTION);

// Rows of a query whose coordinates have a box of their own.
constexpr u32 FEW = 4;

// A query: rows in the shared memory of a warp.
struct Query {
    u32 slots[TILE];  // NONE if there is no row
    Real inverses[IS_DIRECTION ? TILE : 1];
    u32 bits[SUM == SHARED_BITS ? TILE : 1];
    // Coordinates, rounded down and up; the boxes of every FEW rows, and of all.
    float lows[COORDINATES][TILE], highs[ARE_EXACT ? 1 : COORDINATES][TILE];
    float few_lows[COORDINATES][TILE / FEW], few_highs[COORDINATES][TILE / FEW];
    float low[COORDINATES], high[COORDINATES];
    // The rows that are being compared, and their values: all or some.
    u32 wanted[TILE];
    Chunk chunks[STAGED][STAGED_ROWS];
    // Where DIM is 0: values of the tile's rows, and those within eps of each row compared.
    Chunk others[STAGED][STAGED_OTHERS];
    u64 found[COLUMNS];
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

// Loads the rows in these slots: each lane's are its own and 32 after it.
__device__ __forceinline__ void load(const Dbscan& all, const u32 (&slots)[2], Query& query) {
    __syncwarp();
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const u32 row = r * 32 + Warp::rank(), slot = slots[r];
        query.slots[row] = slot;
        if (slot == NONE) continue;
        if constexpr (IS_DIRECTION) query.inverses[row] = all.inverses[slot];
        if constexpr (SUM == SHARED_BITS) query.bits[row] = all.bits[slot];
        if constexpr (DIM != 0) {
            const Chunk* from = all.chunks + (u64)(slot / TILE) * CHUNKS * TILE + slot % TILE;
#pragma unroll
            for (u32 i = 0; i < CHUNKS; i++) query.chunks[i][row] = from[i * TILE];
        }
    }
    __syncwarp();
}

// Loads the coordinates of a query's rows, and their box.
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
            for (u32 apart = 1; apart < FEW; apart *= 2) {
                low = fminf(low, __shfl_xor_sync(0xffffffff, low, apart));
                high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, apart));
            }
            if (row % FEW == 0) {
                query.few_lows[i][row / FEW] = low;
                query.few_highs[i][row / FEW] = high;
            }
            least = fminf(least, low);
            most = fmaxf(most, high);
        }
        for (u32 apart = 16; apart >= FEW; apart /= 2) {
            least = fminf(least, __shfl_xor_sync(0xffffffff, least, apart));
            most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, apart));
        }
        if (Warp::rank() == 0) {
            query.low[i] = least;
            query.high[i] = most;
        }
    }
    __syncwarp();
}

// A lower bound on the sum of a row between two values of every coordinate and one in a box, which is
// one of 32; every step is rounded down.
template <typename Low, typename High>
__device__ __forceinline__ float least_sum(const float* box, Low low_of, High high_of) {
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < COORDINATES; i++) {
        const float low = box[2 * i * 32], high = box[(2 * i + 1) * 32];
        const float own_low = low_of(i), own_high = high_of(i);
        if constexpr (SUM == SHARED_BITS) {
            // At least the share of bits that the fuller row has beyond all of the other's.
            const float fewer = own_high < low ? own_high : high;
            const float more = own_high < low ? low : own_low;
            return fewer < more ? __fsub_rd(1, __fdiv_ru(fewer, more)) : 0;
        }
        const float gap = fmaxf(fmaxf(__fsub_rd(low, own_high), __fsub_rd(own_low, high)), 0);
        sum = SUM == SQUARES || IS_DIRECTION ? __fmaf_rd(gap, gap, sum) : __fadd_rd(sum, gap);
    }
    return sum;
}

// An upper bound on the same; every step is rounded up.
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

// Whether all rows of a box are too far from all of a query, and whether all are within eps.
__device__ __forceinline__ bool is_apart(const Dbscan& all, const Query& query, const float* box) {
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

// Those of these rows of a query that may be within eps of a row in a box.
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

// One more element of a pair: f64 as defined, f32 in any way.
__device__ __forceinline__ u32 accumulate(u32 x, u32 y, u32 sum) {
    return sum + __popc(SUM == SHARED_BITS ? x & y : x ^ y);
}
__device__ __forceinline__ float accumulate(float x, float y, float sum) {
    const float apart = add(x, -y);
    return IS_DIRECTION     ? fused(x, y, sum)
           : SUM == SQUARES ? fused(apart, apart, sum)
                            : add(sum, magnitude(apart));
}
__device__ __forceinline__ double accumulate(double x, double y, double sum) {
    const double apart = add(x, -y);
    return add(sum, IS_DIRECTION     ? multiply(x, y)
                    : SUM == SQUARES ? multiply(apart, apart)
                                     : magnitude(apart));
}

typedef Total Sums[COLUMNS][2];

// A lane's rows of a tile.
struct Own {
    u64 slot;  // of the first; the second is 32 further on
    Real inverses[2];
    u32 bits[2];
    Chunk values[2][CHUNKS];  // where DIM is not 0
};

__device__ __forceinline__ void load(const Dbscan& all, u32 tile, Own& own) {
    own.slot = (u64)tile * TILE + Warp::rank();
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        own.inverses[r] = IS_DIRECTION ? all.inverses[own.slot + r * 32] : Real(1);
        own.bits[r] = SUM == SHARED_BITS ? all.bits[own.slot + r * 32] : 0;
        if constexpr (DIM != 0) {
            const Chunk* from = all.chunks + (u64)tile * CHUNKS * TILE + r * 32 + Warp::rank();
#pragma unroll
            for (u32 i = 0; i < CHUNKS; i++) own.values[r][i] = from[i * TILE];
        }
    }
}

// Adds up the pairs of a lane's rows with the query's wanted rows from `first` on.
__device__ __forceinline__ void add_pairs(
    const Own& own, u32 first, u32 last, const Query& query, Sums& sums) {
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) {
        const u32 row = query.wanted[min(first + i, last - 1)];
        sums[i][0] = sums[i][1] = 0;
#pragma unroll
        for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
            const Chunk x = query.chunks[chunk][row];
#pragma unroll
            for (u32 j = 0; j < WIDTH; j++) {
                // Elements that fill a chunk up add nothing.
                if (chunk * WIDTH + j >= ELEMENTS) continue;
                sums[i][0] = accumulate(x.of[j], own.values[0][chunk].of[j], sums[i][0]);
                sums[i][1] = accumulate(x.of[j], own.values[1][chunk].of[j], sums[i][1]);
            }
        }
    }
}

// Whether two rows with this sum are within eps for certain, and whether they may be. `inverses` is the
// product of the rows' own, `bits` the sum of theirs.
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
        sure = distance <= (Real)all.sure;
        // Sums of a few rows that are out of range are no numbers: not more than anything.
        may = ELEMENT == F64 ? sure : !(distance > (Real)all.may);
    }
}

// A bit for each of 64 for which the lane that has it says so: each has its own and 32 after it.
__device__ __forceinline__ u64 rows_that(bool first, bool second) {
    const u32 low = __ballot_sync(0xffffffff, first), high = __ballot_sync(0xffffffff, second);
    return (u64)high << 32 | low;
}

// Lists the rows of a query that have a bit, and counts them.
__device__ __forceinline__ u32 list_wanted(u64 rows, Query& query) {
    __syncwarp();
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const u32 row = r * 32 + Warp::rank();
        if (rows >> row & 1) query.wanted[__popcll(rows & ((1ull << row) - 1))] = row;
    }
    __syncwarp();
    return __popcll(rows);
}

// Many dimensions: a warp adds up a block of sums, COLUMNS rows of a query by a tile; each lane has
// OWN_COLUMNS by 8 of them, in steps of 4 and 8.
constexpr u32 OWN_COLUMNS = COLUMNS / 4;
typedef Total BlockSums[OWN_COLUMNS][8];

// Adds up the pairs of the query's wanted rows from `first` on. False if none is within eps.
__device__ __forceinline__ bool add_block(
    const Dbscan& all, u32 tile, u32 first, u32 last, Query& query, BlockSums& sums) {
    const u32 lane = Warp::rank(), column = lane % COLUMNS;
    const u32 slot = query.slots[query.wanted[min(first + column, last - 1)]];
    const Chunk* from = all.chunks + (u64)(slot / TILE) * all.chunk_count * TILE + slot % TILE;
    const Chunk* others = all.chunks + (u64)tile * all.chunk_count * TILE + lane;
#pragma unroll
    for (u32 i = 0; i < OWN_COLUMNS; i++) {
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
            Chunk x[OWN_COLUMNS];
#pragma unroll
            for (u32 i = 0; i < OWN_COLUMNS; i++) x[i] = query.chunks[chunk][i * 4 + lane / 8];
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                const Chunk y = query.others[chunk][j * 8 + lane % 8];
#pragma unroll
                for (u32 i = 0; i < OWN_COLUMNS; i++) {
#pragma unroll
                    for (u32 e = 0; e < WIDTH; e++) {
                        sums[i][j] = accumulate(x[i].of[e], y.of[e], sums[i][j]);
                    }
                }
            }
        }
        // Sums of products may fall again; bits are few.
        if constexpr (SUM == SQUARES || SUM == ABSOLUTE) {
            Total least = sums[0][0];
#pragma unroll
            for (u32 i = 0; i < OWN_COLUMNS; i++) {
#pragma unroll
                for (u32 j = 0; j < 8; j++) least = min(least, sums[i][j]);
            }
            if (!__any_sync(0xffffffff, least <= (Total)all.may)) return false;
        }
    }
    return true;
}

// For each of the query's wanted rows from `first` on, a bit for each row of the tile within eps, in
// query.found. False if there is none.
__device__ __forceinline__ bool find_in_block(
    const Dbscan& all, u32 tile, u32 first, u32 last, u64 others, Query& query, Work& work) {
    BlockSums sums;
    if (!add_block(all, tile, first, last, query, sums)) return false;
    const u32 lane = Warp::rank();
    const u64 slot = (u64)tile * TILE;
#pragma unroll
    for (u32 i = 0; i < OWN_COLUMNS; i++) {
        const u32 place = first + i * 4 + lane / 8, row = query.wanted[min(place, last - 1)];
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
        for (u32 apart = 1; apart < 8; apart *= 2) {
            sure |= __shfl_xor_sync(0xffffffff, sure, apart);
        }
        if (lane % 8 == 0) query.found[i * 4 + lane / 8] = sure;
    }
    __syncwarp();
    return true;
}

// Compares rows of a query, those with a bit in `rows`, with those rows of a tile that have a bit in
// `others`. Calls `each` with a row of the query and a bit for each row of the tile within eps, for the
// whole warp; ends if it returns true.
template <typename Each>
__device__ __forceinline__ void compare(
    const Dbscan& all, u64 rows, u32 tile, u64 others, Query& query, Work& work, Each each) {
    const u32 last = list_wanted(rows, query);
    Own own;
    load(all, tile, own);
    for (u32 first = 0; first < last; first += COLUMNS) {
        const u32 some = min(COLUMNS, last - first);
        if (Warp::rank() == 0) work.pairs += some * __popcll(others);
        u32 sure[2] = {0, 0}, may[2] = {0, 0};
        if constexpr (DIM == 0) {
            if (!find_in_block(all, tile, first, last, others, query, work)) continue;
        } else {
            Sums sums;
            add_pairs(own, first, last, query, sums);
#pragma unroll
            for (u32 i = 0; i < COLUMNS; i++) {
                const u32 row = query.wanted[min(first + i, last - 1)];
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    bool is_sure, may_be;
                    Real inverses = 1;
                    u32 bits = 0;
                    if constexpr (IS_DIRECTION) {
                        inverses = multiply(query.inverses[row], own.inverses[r]);
                    }
                    if constexpr (SUM == SHARED_BITS) bits = query.bits[row] + own.bits[r];
                    decide(all, sums[i][r], inverses, bits, is_sure, may_be);
                    sure[r] |= (u32)is_sure << i;
                    may[r] |= (u32)may_be << i;
                }
            }
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const bool is_other = others >> (r * 32 + Warp::rank()) & 1;
                u32 open = is_other ? may[r] & ~sure[r] & (0xffffffff >> (32 - some)) : 0;
                work.rechecked += __popc(open);
                for (; open != 0; open &= open - 1) {
                    const u32 slot = query.slots[query.wanted[first + __ffs(open) - 1]];
                    const bool is_near = holds(all, all.order[slot], all.order[own.slot + r * 32]);
                    if (is_near) sure[r] |= open & (0 - open);
                }
            }
        }
        for (u32 i = 0; i < some; i++) {
            const u32 row = query.wanted[first + i];
            u64 found = DIM == 0 ? query.found[i] : rows_that(sure[0] >> i & 1, sure[1] >> i & 1);
            // A row is within eps of itself.
            const u32 slot = query.slots[row];
            if (slot / TILE == tile) found |= 1ull << slot % TILE;
            if (each(row, found & others)) return;
        }
    }
}

// Rows of a query from which on it is faster for each lane to have one of them.
constexpr u32 MANY = 14;

// Compares a row of the query for each of so many lanes with those rows of a tile that have a bit in
// `others`: returns a bit for each of them within eps. Not for rows of run-time dimension: they are not in
// shared memory as a whole.
__device__ __forceinline__ u64 compare_by_lane(
    const Dbscan& all, u32 row, u32 lanes, u32 tile, u64 others, const Query& query, Work& work) {
    constexpr u32 TOGETHER = 8;
    const u32 own_slot = query.slots[row];
    const bool is_wanted = Warp::rank() < lanes;
    const Chunk* from = all.chunks + (u64)tile * CHUNKS * TILE;
    Chunk own[CHUNKS];
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) own[i] = query.chunks[i][row];
    if (Warp::rank() == 0) work.pairs += lanes * __popcll(others);
    u64 near = 0;
    for (u32 first = 0; first < TILE; first += TOGETHER) {
        const u32 some = (u32)(others >> first) & ((1u << TOGETHER) - 1);
        if (some == 0) continue;
        Total sums[TOGETHER] = {};
#pragma unroll
        for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                const Chunk y = from[chunk * TILE + first + i];
#pragma unroll
                for (u32 j = 0; j < WIDTH; j++) {
                    if (chunk * WIDTH + j >= ELEMENTS) continue;
                    sums[i] = accumulate(own[chunk].of[j], y.of[j], sums[i]);
                }
            }
        }
        const u64 slot = (u64)tile * TILE + first;
        u32 sure = 0, may = 0;
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            bool is_sure, may_be;
            Real inverses = 1;
            u32 bits = 0;
            if constexpr (IS_DIRECTION) {
                inverses = multiply(query.inverses[row], all.inverses[slot + i]);
            }
            if constexpr (SUM == SHARED_BITS) bits = query.bits[row] + all.bits[slot + i];
            decide(all, sums[i], inverses, bits, is_sure, may_be);
            sure |= (u32)is_sure << i;
            may |= (u32)may_be << i;
        }
        u32 open = is_wanted ? may & ~sure & some : 0;
        work.rechecked += __popc(open);
        for (; open != 0; open &= open - 1) {
            const u32 other = all.order[slot + __ffs(open) - 1];
            if (holds(all, all.order[own_slot], other)) sure |= open & (0 - open);
        }
        near |= (u64)(sure & some) << first;
    }
    // A row is within eps of itself.
    if (own_slot / TILE == tile) near |= others & 1ull << own_slot % TILE;
    return is_wanted ? near : 0;
}

// Finds the rows of a tile with a bit in `others` that are within eps of rows of a query: each lane those
// of its two.
__device__ __forceinline__ void find_near(
    const Dbscan& all, u64 rows, u32 tile, u64 others, Query& query, Work& work, u64 (&near)[2]) {
    near[0] = near[1] = 0;
    if constexpr (DIM != 0) {
        while (__popcll(rows) >= MANY) {
            const u32 lanes = min(32, list_wanted(rows, query));
            const u32 row = query.wanted[min(Warp::rank(), lanes - 1)];
            const u64 found = compare_by_lane(all, row, lanes, tile, others, query, work);
            // To the lane that has the row.
            u32 left[2];
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const u32 own = r * 32 + Warp::rank();
                const u32 place = __popcll(rows & ((1ull << own) - 1));
                const u64 of_place = __shfl_sync(0xffffffff, found, place % 32);
                const bool is_wanted = rows >> own & 1, is_here = is_wanted && place < lanes;
                if (is_here) near[r] = of_place;
                left[r] = __ballot_sync(0xffffffff, is_wanted && !is_here);
            }
            rows = (u64)left[1] << 32 | left[0];
        }
        if (rows == 0) return;
    }
    compare(all, rows, tile, others, query, work, [&](u32 row, u64 found) {
        if (row == Warp::rank()) near[0] = found;
        if (row == 32 + Warp::rank()) near[1] = found;
        return false;
    });
}
