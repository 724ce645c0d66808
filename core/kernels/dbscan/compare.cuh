// Exact comparison of a query's rows with the rows of a tile; a lane has two rows of the tile.

#include "dbscan/products.cuh"

typedef Total PairSums[COLUMNS][2];

// A lane's rows of a tile.
struct LaneRows {
    u64 slot;  // of the first row; the second is 32 slots further
    Real inverses[2];
    u32 bits[2];
    Chunk values[2][CHUNKS];  // where DIM is not 0
};

__device__ __forceinline__ void load(const Dbscan& all, u32 tile, LaneRows& lane_rows) {
    lane_rows.slot = (u64)tile * TILE + Warp::rank();
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        lane_rows.inverses[r] = IS_DIRECTION ? all.inverses[lane_rows.slot + r * 32] : Real(1);
        lane_rows.bits[r] = SUM == SHARED_BITS ? all.bits[lane_rows.slot + r * 32] : 0;
        if constexpr (DIM != 0) {
            const Chunk* from = all.chunks + (u64)tile * CHUNKS * TILE + r * 32 + Warp::rank();
#pragma unroll
            for (u32 i = 0; i < CHUNKS; i++) lane_rows.values[r][i] = from[i * TILE];
        }
    }
}

// Adds the sums of a lane's rows and the query's compared rows from `first` on.
__device__ __forceinline__ void add_pairs(
    const LaneRows& lane_rows, u32 first, u32 last, const Query& query, PairSums& sums) {
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) {
        const u32 row = query.compared[min(first + i, last - 1)];
        sums[i][0] = sums[i][1] = 0;
#pragma unroll
        for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
            const Chunk x = query.chunks[chunk][row];
#pragma unroll
            for (u32 j = 0; j < WIDTH; j++) {
                // Padding elements of the last chunk are skipped.
                if (chunk * WIDTH + j >= ELEMENTS) continue;
                sums[i][0] = accumulate(x.of[j], lane_rows.values[0][chunk].of[j], sums[i][0]);
                sums[i][1] = accumulate(x.of[j], lane_rows.values[1][chunk].of[j], sums[i][1]);
            }
        }
    }
}

// Compares the rows of a query with a bit in `rows` with the rows of a tile with a bit in `others`. The whole
// warp calls `each` with a row of the query and a mask of the tile's rows within eps; ends when it returns
// true.
template <typename Each>
__device__ __forceinline__ void compare(
    const Dbscan& all, u64 rows, u32 tile, u64 others, Query& query, Work& work, Each each) {
    const u32 last = list_compared(rows, query);
    LaneRows lane_rows;
    load(all, tile, lane_rows);
    constexpr u32 STEP = IS_FILTERED ? TILE : COLUMNS;
    for (u32 first = 0; first < last; first += STEP) {
        const u32 some = min(STEP, last - first);
        if (Warp::rank() == 0) work.pairs += some * __popcll(others);
        u32 sure[2] = {0, 0}, may[2] = {0, 0};
        if constexpr (IS_FILTERED) {
            if (!find_by_products(all, tile, last, others, query, work)) continue;
        } else if constexpr (DIM == 0) {
            if (!find_in_block(all, tile, first, last, others, query, work)) continue;
        } else {
            PairSums sums;
            add_pairs(lane_rows, first, last, query, sums);
#pragma unroll
            for (u32 i = 0; i < COLUMNS; i++) {
                const u32 row = query.compared[min(first + i, last - 1)];
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    bool is_sure, may_be;
                    Real inverses = 1;
                    u32 bits = 0;
                    if constexpr (IS_DIRECTION) {
                        inverses = multiply(query.inverses[row], lane_rows.inverses[r]);
                    }
                    if constexpr (SUM == SHARED_BITS) bits = query.bits[row] + lane_rows.bits[r];
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
                    const u32 slot = query.slots[query.compared[first + __ffs(open) - 1]];
                    const bool is_near = holds(all, all.order[slot], all.order[lane_rows.slot + r * 32]);
                    if (is_near) sure[r] |= open & (0 - open);
                }
            }
        }
        for (u32 i = 0; i < some; i++) {
            const u32 row = query.compared[first + i];
            u64 near = DIM == 0 ? query.near[first + i] : rows_that(sure[0] >> i & 1, sure[1] >> i & 1);
            // A row is within eps of itself.
            const u32 slot = query.slots[row];
            if (slot / TILE == tile) near |= 1ull << slot % TILE;
            if (each(row, near & others)) return;
        }
    }
}

// From this number of query rows on, it is faster to give each lane a row of the query.
constexpr u32 MANY = 14;

// Compares the lane's row of a query, in the first `lanes` lanes, with the rows of a tile with a bit in
// `others`; returns the mask of those within eps. Not for run-time dimensions, where shared memory does not
// hold whole rows.
__device__ __forceinline__ u64 compare_by_lane(
    const Dbscan& all, u32 row, u32 lanes, u32 tile, u64 others, const Query& query, Work& work) {
    constexpr u32 TOGETHER = 8;
    const u32 row_slot = query.slots[row];
    const bool has_row = Warp::rank() < lanes;
    const Chunk* from = all.chunks + (u64)tile * CHUNKS * TILE;
    Chunk row_chunks[CHUNKS];
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) row_chunks[i] = query.chunks[i][row];
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
                    sums[i] = accumulate(row_chunks[chunk].of[j], y.of[j], sums[i]);
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
        u32 open = has_row ? may & ~sure & some : 0;
        work.rechecked += __popc(open);
        for (; open != 0; open &= open - 1) {
            const u32 other = all.order[slot + __ffs(open) - 1];
            if (holds(all, all.order[row_slot], other)) sure |= open & (0 - open);
        }
        near |= (u64)(sure & some) << first;
    }
    // A row is within eps of itself.
    if (row_slot / TILE == tile) near |= others & 1ull << row_slot % TILE;
    return has_row ? near : 0;
}

// Finds the rows of a tile with a bit in `others` that are within eps of rows of a query: `near` is, for each
// of a lane's two query rows, the mask of the tile's rows.
__device__ __forceinline__ void find_near(
    const Dbscan& all, u64 rows, u32 tile, u64 others, Query& query, Work& work, u64 (&near)[2]) {
    near[0] = near[1] = 0;
    if constexpr (DIM != 0) {
        while (__popcll(rows) >= MANY) {
            const u32 lanes = min(32, list_compared(rows, query));
            const u32 row = query.compared[min(Warp::rank(), lanes - 1)];
            const u64 mask = compare_by_lane(all, row, lanes, tile, others, query, work);
            // Moves the mask to the lane that owns the row.
            u32 left[2];
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const u32 owned_row = r * 32 + Warp::rank();
                const u32 place = __popcll(rows & ((1ull << owned_row) - 1));
                const u64 of_place = __shfl_sync(0xffffffff, mask, place % 32);
                const bool is_due = rows >> owned_row & 1, is_here = is_due && place < lanes;
                if (is_here) near[r] = of_place;
                left[r] = __ballot_sync(0xffffffff, is_due && !is_here);
            }
            rows = (u64)left[1] << 32 | left[0];
        }
        if (rows == 0) return;
    }
    compare(all, rows, tile, others, query, work, [&](u32 row, u64 mask) {
        if (row == Warp::rank()) near[0] = mask;
        if (row == 32 + Warp::rank()) near[1] = mask;
        return false;
    });
}
