// Tensor-core products of quantised rows: which pairs of a query and a tile are certainly within eps, which
// certainly not.
//
// Numbers. Let v be a row's quantised value minus the centre, and e its error bound. Then, for two rows,
//   | |x - y| - |v - w| | <= e(v) + e(w), and |v - w|^2 = |v|^2 + |w|^2 - 2 v.w.
// Tensor cores compute v.w: fp16 products are exact, and adding 16 of them to a float32 loses at most LOST units of
// 2^-24 of the largest of these numbers, which |v| |w| bounds. Pairs that remain open are summed by eight lanes each,
// and then by the definition.
//
// Bits. Bits that both rows have are counted. Hamming distances are exact; Jaccard distances are recomputed
// near eps.

#include "common/sm80_mma.cuh"
#include "dbscan/blocks.cuh"

// The sums of 64 query rows by 64 rows of a tile: a lane has four by eight fragments of 16 by 8 rows, with
// four sums each.
template <Element> struct ProductOf { typedef float Type; };
template <> struct ProductOf<BITS> { typedef int Type; };
typedef ProductOf<ELEMENT>::Type Product;
typedef Product Grid[4][8][4];

// More open pairs than this are compared in blocks: for numbers, a block takes as long as some hundred pairs.
constexpr u32 MOST_OPEN = ELEMENT == BITS ? TILE * TILE : 512;

// The result of `judge` if no pair is within eps.
constexpr u32 NONE_NEAR = 0xffffffff;

// Rounding errors in units of 2^-24: of adding a step of 16 products, and of everything else.
constexpr float LOST = 40, BESIDES = 16, UNIT = 5.9604645e-8f;

// The terms of a tile's row (`Judged`) and of a query's row (`Judge`) in the comparison of a pair.
struct Judged {
    float square, scale;
    u32 bits;

    Judged() = default;
    __device__ __forceinline__ Judged(const Dbscan& all, u64 slot) {
        if constexpr (HAS_FP16) {
            const float2 of = *reinterpret_cast<const float2*>(all.products.rounded + slot);
            square = of.x;
            scale = of.y;
        } else {
            bits = all.bits[slot];
        }
    }
};
struct Judge {
    float factor, surely, maybe;  // factor of products, and the thresholds of |w|^2 - 2 v.w
    u32 bits, most;

    __device__ __forceinline__ Judge(const Dbscan& all, const Query& query, u32 row, float2 others) {
        if constexpr (HAS_FP16) {
            const RoundedRow& of = query.rounded[row];
            const float lost = (2 * LOST * all.products.count + BESIDES) * UNIT;
            const float slack = __fmul_ru(lost, __fadd_ru(of.square, others.y));
            const float error = __fadd_ru(of.error, others.x);
            const float far = __fadd_ru(all.products.maybe, error), near = __fsub_rd(all.products.surely, error);
            factor = -2 * of.scale;
            maybe = __fsub_ru(__fadd_ru(__fmul_ru(far, far), slack), of.square);
            surely = near < 0 ? -Limits<float>::infinity()
                              : __fsub_rd(__fsub_rd(__fmul_rd(near, near), slack), of.square);
        } else {
            bits = query.bits[row];
            most = (u32)fmin(all.limit, 4294967295.0);
            surely = (float)all.sure;
            maybe = (float)all.may;
        }
    }
    // Whether a pair is within `limit`, one of the two thresholds.
    __device__ __forceinline__ bool holds(Product product, const Judged& other, float limit) const {
        if constexpr (HAS_FP16) {
            return __fmaf_rn(__fmul_rn(product, other.scale), factor, other.square) <= limit;
        } else if constexpr (SUM == DIFFERENT_BITS) {
            return bits + other.bits - 2 * product <= most;
        } else {
            const u32 either = bits + other.bits - product;
            return __uint2float_rn(either - product) <= __fmul_rn(limit, __uint2float_rn(either));
        }
    }
};

// The products of a query's first `count` compared rows with a tile's rows. Each lane of four takes 16 bytes of
// every slice, the same elements in both operands.
__device__ __forceinline__ void multiply(
    const Dbscan& all, u32 tile, u32 count, const Query& query, Grid& sums) {
    const u32 lane = Warp::rank(), slices = all.products.count;
    const uint4* first = all.products.slices + lane % 4;
    const uint4* query_rows[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        query_rows[i] = first + (u64)query.slots[query.compared[min(i * 8 + lane / 4, count - 1)]] * slices * 4;
    }
    const uint4* others = first + ((u64)tile * TILE + lane / 4) * slices * 4;
#pragma unroll
    for (u32 i = 0; i < 128; i++) sums[i / 32][i / 4 % 8][i % 4] = 0;
    for (u32 slice = 0; slice < slices; slice++) {
        // All loads are issued before the first is used.
        uint4 x[8], y[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) x[i] = __ldg(query_rows[i] + slice * 4);
#pragma unroll
        for (u32 j = 0; j < 8; j++) y[j] = __ldg(others + (j * 8 * slices + slice) * 4);
#pragma unroll
        for (u32 i = 0; i < 8; i += 2) {
            if (i * 8 >= count) continue;
            const u32 low[4] = {x[i].x, x[i + 1].x, x[i].y, x[i + 1].y};
            const u32 high[4] = {x[i].z, x[i + 1].z, x[i].w, x[i + 1].w};
#pragma unroll
            for (u32 j = 0; j < 8; j++) add_product(sums[i / 2][j], low, y[j].x, y[j].y);
#pragma unroll
            for (u32 j = 0; j < 8; j++) add_product(sums[i / 2][j], high, y[j].z, y[j].w);
        }
    }
}

// Classifies the pairs of a query's compared rows and a tile's rows: sets query.near and query.open for each
// row. Returns the number of open pairs, or NONE_NEAR.
__device__ __noinline__ u32 judge(const Dbscan& all, u32 tile, u32 count, u64 others, Query& query) {
    Grid sums;
    multiply(all, tile, count, query, sums);
    const u32 lane = Warp::rank(), column = lane % 4 * 2;
    float2 most = {0, 0};
    if constexpr (HAS_FP16) most = all.products.most[tile];
    const auto judge_of = [&](u32 place) {
        return Judge(all, query, query.compared[min(place, count - 1)], most);
    };
    Judged tiles[8][2];
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        tiles[i / 2][i % 2] = Judged(all, (u64)tile * TILE + i / 2 * 8 + column + i % 2);
    }
    u32 near = 0;  // a bit for every eight query rows with a pair that may be near
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (i * 8 >= count) continue;
        const Judge judge = judge_of(i * 8 + lane / 4);
        bool any = false;
#pragma unroll
        for (u32 j = 0; j < 16; j++) {
            any |= judge.holds(sums[i / 2][j / 2][i % 2 * 2 + j % 2], tiles[j / 2][j % 2], judge.maybe);
        }
        near |= (u32)any << i;
    }
    for (u32 stride = 16; stride > 0; stride /= 2) near |= __shfl_xor_sync(0xffffffff, near, stride);
    if (near == 0) return NONE_NEAR;
    u32 left = 0;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (i * 8 >= count) continue;
        if ((near >> i & 1) == 0) {
            if (lane < 8) query.near[i * 8 + lane] = query.open[i * 8 + lane] = 0;
            continue;
        }
        const u32 place = i * 8 + lane / 4;
        const Judge judge = judge_of(place);
        u64 sure = 0, may = 0;
#pragma unroll
        for (u32 j = 0; j < 16; j++) {
            const Product product = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
            sure |= (u64)judge.holds(product, tiles[j / 2][j % 2], judge.surely) << (j / 2 * 8 + j % 2);
            may |= (u64)judge.holds(product, tiles[j / 2][j % 2], judge.maybe) << (j / 2 * 8 + j % 2);
        }
        sure <<= column;
        may <<= column;
#pragma unroll
        for (u32 stride = 1; stride < 4; stride *= 2) {
            sure |= __shfl_xor_sync(0xffffffff, sure, stride);
            may |= __shfl_xor_sync(0xffffffff, may, stride);
        }
        if (lane % 4 != 0 || place >= count) continue;
        query.near[place] = sure & others;
        query.open[place] = may & ~sure & others;
        left += __popcll(may & ~sure & others);
    }
    for (u32 stride = 4; stride < 32; stride *= 2) left += __shfl_xor_sync(0xffffffff, left, stride);
    __syncwarp();
    return __shfl_sync(0xffffffff, left, 0);
}

// The distance sum of a pair of slots, by eight lanes.
__device__ __forceinline__ Total sum_of_pair(const Dbscan& all, u64 a, u64 b, u32 lanes) {
    const Chunk* x = all.chunks + a / TILE * all.chunk_count * TILE + a % TILE;
    const Chunk* y = all.chunks + b / TILE * all.chunk_count * TILE + b % TILE;
    Total sum = 0;
#pragma unroll 4
    for (u32 chunk = Warp::rank() % 8; chunk < all.chunk_count; chunk += 8) {
        const Chunk one = x[(u64)chunk * TILE], other = y[(u64)chunk * TILE];
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++) sum = accumulate(one.of[i], other.of[i], sum);
    }
    for (u32 stride = 1; stride < 8; stride *= 2) sum += __shfl_xor_sync(lanes, sum, stride);
    return sum;
}

// Decides the open pairs of a query's compared rows. Eight lanes take a row.
__device__ __forceinline__ void settle(const Dbscan& all, u32 tile, u32 count, Query& query, Work& work) {
    const u32 group = Warp::rank() / 8, lanes = 0xffu << group * 8;
    for (u32 place = group; place < count; place += 4) {
        const u32 row = query.compared[place], slot = query.slots[row];
        u64 near = 0;
        for (u64 open = query.open[place]; open != 0; open &= open - 1) {
            const u32 other = tile * TILE + __ffsll(open) - 1;
            const Total sum = sum_of_pair(all, slot, other, lanes);
            Real inverses = 1;
            u32 bits = 0;
            if constexpr (IS_DIRECTION) inverses = multiply(query.inverses[row], all.inverses[other]);
            if constexpr (SUM == SHARED_BITS) bits = query.bits[row] + all.bits[other];
            bool is_sure, may_be;
            decide<false>(all, sum, inverses, bits, is_sure, may_be);
            if (may_be && !is_sure) is_sure = holds(all, all.order[slot], all.order[other]);
            if (is_sure) near |= open & (0 - open);
            work.rechecked += Warp::rank() % 8 == 0;
        }
        if (Warp::rank() % 8 == 0) query.near[place] |= near;
    }
    __syncwarp();
}

// For each of the query's compared rows: a bit for each row of the tile within eps, in query.near. False if no
// bit is set.
__device__ __forceinline__ bool find_by_products(
    const Dbscan& all, u32 tile, u32 count, u64 others, Query& query, Work& work) {
    const u32 open = judge(all, tile, count, others, query);
    if (open == NONE_NEAR) return false;
    if (open <= MOST_OPEN) {
        if (open > 0) settle(all, tile, count, query, work);
        return true;
    }
    for (u32 first = 0; first < count; first += COLUMNS) {
        const bool is_any = find_in_block(all, tile, first, count, others, query, work);
        if (!is_any && first + Warp::rank() < min(count, first + COLUMNS)) query.near[first + Warp::rank()] = 0;
    }
    __syncwarp();
    return true;
}
