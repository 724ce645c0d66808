// Numeric rows as fp16: centred, scaled by a power of two, rounded, with bounds on the rounding errors.
//
// All arithmetic is in double, from the rows in panels. The *position* of a base row is the rank of its panel
// in the order of visits, times PANEL, plus its lane.

#include "common/fp16.cuh"
#include "common/scan.cuh"
#include "filter/swizzled_tile.cuh"
#include "search/lists.cuh"

// Panels that are sampled for the centre.
constexpr u32 SAMPLED = 64;
// Bins of the norm histogram: 3 bits of the mantissa each.
constexpr u32 BINS = 1u << 14;
// The maximum number of outliers: rows that the bounds leave out, and which pass for every query.
constexpr u32 MOST_ASIDE = 64;
// Test values that outweigh every product.
constexpr u32 NEVER = 0x0000fbffu, ALWAYS = 0x00007bffu;

// The centre, scale and error bounds of a packed base. Read back by the host, which has the same struct in
// src/device/cuda/search/filter/launch_numbers.rs.
struct Packing {
    double scale;
    double centre_norm;
    // Maxima over all rows but outliers, as bits of non-negative doubles: the scaled |x - m|, its rounding
    // error, the two test values; and |x| unscaled.
    u64 norm, lost, test, raw_norm;
    u32 last_bin;    // rows with norms in larger bins are outliers
    u32 is_finite;   // whether all other rows have finite norms
};

// Norms and rounding error of a query, scaled.
struct QueryNorms {
    double base;      // |q - m|^2, rounded down, or q·m unscaled, rounded up
    double raw_norm;  // |q| unscaled
    double norm;      // of the fp16 query
    double lost;      // rounding error
};

// A double as fp16, rounded up.
__device__ __forceinline__ unsigned short to_fp16_up(double x) {
    unsigned short half;
    const float above = __double2float_ru(x);
    // PTX ISA, Data Movement and Conversion Instructions: cvt.
    asm("cvt.rp.f16.f32 %0, %1;" : "=h"(half) : "f"(above));
    return half;
}
// Two fp16 numbers whose sum is at least x.
__device__ __forceinline__ u32 to_two_fp16(double x) {
    const unsigned short high = to_fp16(x);
    return (u32)to_fp16_up(x - from_fp16(high)) << 16 | high;
}

__device__ __forceinline__ u32 bin_of(double norm) {
    return (u32)min((u64)__double_as_longlong(norm) >> 49, (u64)BINS - 1);
}
// An upper bound on the norms of a bin.
__device__ __forceinline__ double end_of(u32 bin) {
    return __longlong_as_double((long long)((u64)(bin + 1) << 49));
}

// The centre: in every dimension the median of the means of some panels, which is robust to outliers. A block
// per dimension.
extern "C" __global__ __launch_bounds__(1024) void centre(const Scalar* __restrict__ base,
                                                          double* __restrict__ centre, u32 rows,
                                                          u32 dim, u32 panels) {
    __shared__ double means[SAMPLED];
    const u32 sampled = min(panels, SAMPLED), lane = Warp::rank();
    for (u32 i = threadIdx.x / 32; i < sampled; i += 32) {
        const u32 panel = (u64)i * panels / sampled;
        double sum = 0, count = 0;
        for (u32 place = lane; place < PANEL; place += 32) {
            if (base_row(panel, place, panels) >= rows) continue;
            sum += (double)base[((u64)panel * dim + blockIdx.x) * PANEL + place];
            count += 1;
        }
        sum = add_lanes(sum);
        count = add_lanes(count);
        const double mean = sum / count;
        if (lane == 0) means[i] = fabs(mean) < 1e300 ? mean : 0;
    }
    __syncthreads();
    if (threadIdx.x >= sampled) return;
    const double mean = means[threadIdx.x];
    u32 before = 0;
    for (u32 i = 0; i < sampled; ++i) {
        before += means[i] < mean || (means[i] == mean && i < threadIdx.x) ? 1 : 0;
    }
    if (before == sampled / 2) centre[blockIdx.x] = mean;
}

// The bin of every row's norm about the centre, and the number of rows in each bin. A block per panel.
extern "C" __global__ __launch_bounds__(PANEL) void norms(
    const Scalar* __restrict__ base, const double* __restrict__ centre,
    unsigned short* __restrict__ bins, u32* __restrict__ counts, u32 rows, u32 dim, u32 panels) {
    const u32 panel = blockIdx.x, place = threadIdx.x;
    const Scalar* from = base + (u64)panel * dim * PANEL + place;
    double squares = 0;
#pragma unroll 8
    for (u32 d = 0; d < dim; ++d) {
        const double x = (double)from[(u64)d * PANEL] - centre[d];
        squares = fma(x, x, squares);
    }
    const bool is_row = base_row(panel, place, panels) < rows;
    const u32 bin = is_row ? bin_of(sqrt(squares)) : BINS;
    bins[(u64)panel * PANEL + place] = (unsigned short)bin;
    // Norms are often alike: one atomic for all lanes with the same bin.
    u32 left = __ballot_sync(~0u, is_row);
    while (left) {
        const u32 first = __shfl_sync(~0u, bin, __ffs(left) - 1);
        const u32 same = __ballot_sync(~0u, bin == first);
        if (Warp::rank() == __ffs(left) - 1) atomicAdd(counts + first, __popc(same));
        left &= ~same;
    }
}

// The scale, and the norm above which rows are outliers. There are outliers only if the largest norm is more
// than twice the largest of the rest. One block of 1024 threads.
extern "C" __global__ __launch_bounds__(1024) void choose_scale(const u32* __restrict__ counts,
                                                                const double* __restrict__ centre,
                                                                Packing* packing, u32 dim) {
    constexpr u32 PER_THREAD = BINS / 1024;
    __shared__ u32 top, edge;
    __shared__ double squares[32];
    if (threadIdx.x == 0) top = edge = 0;
    // Thread 0 has the largest norms.
    const u32 first = BINS - 1 - threadIdx.x * PER_THREAD;
    u32 count = 0, all;
    for (u32 i = 0; i < PER_THREAD; ++i) count += counts[first - i];
    u32 above = sum_before(count, all);
    for (u32 i = 0; i < PER_THREAD; ++i) {
        const u32 here = counts[first - i];
        if (here > 0 && above == 0) top = first - i;
        if (here > 0 && above <= MOST_ASIDE && above + here > MOST_ASIDE) edge = first - i;
        above += here;
    }
    double square = 0;
    for (u32 d = threadIdx.x; d < dim; d += 1024) square = fma(centre[d], centre[d], square);
    square = add_lanes(square);
    if (Warp::rank() == 0) squares[threadIdx.x / 32] = square;
    __syncthreads();
    if (threadIdx.x > 0) return;
    square = 0;
    for (u32 i = 0; i < 32; ++i) square += squares[i];
    const u32 last = all > MOST_ASIDE && end_of(top) > 2 * end_of(edge) ? edge : top;
    // Scales norms up to the last bin's end to at most 64.
    const int exponent = (int)((u64)__double_as_longlong(end_of(last)) >> 52) - 1023;
    packing->scale = ldexp(1.0, 5 - max(exponent, -900));
    packing->centre_norm = sqrt(square) * (1 + 1e-12);
    packing->norm = packing->lost = packing->test = packing->raw_norm = 0;
    packing->last_bin = last;
    packing->is_finite = last < 0x7ffu << 3;
}

// The layout of fp16 rows. The same struct as in src/device/cuda/search/filter/launch_numbers.rs.
struct Pack {
    u32 rows, dim;         // rows; elements of a row in a panel
    u32 panels, stride;    // of the base
    u32 pitch;             // elements of a row in row-major order
    u32 steps;             // steps in a row
    u32 stored, log;       // the same as stored; see `swizzled_offset`
    u32 tile;              // rows of a tile, or 0
    u32 padding;
};

// Eight elements of a row.
struct Eight {
    Scalar raw[8];
    double scaled[8];

    __device__ __forceinline__ Eight(const Scalar* from, const double* centre, double scale, u32 start,
                                     u32 dim, bool is_row) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const bool is_there = is_row && start + i < dim;
            raw[i] = is_there ? from[(u64)(start + i) * PANEL] : Scalar(0);
            scaled[i] = is_there ? ((double)raw[i] - centre[start + i]) * scale : 0;
        }
    }
    __device__ __forceinline__ void negate(double scale, const double* centre, u32 start, u32 dim,
                                           bool is_row) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const bool is_there = is_row && start + i < dim;
            scaled[i] = is_there ? (-(double)raw[i] - centre[start + i]) * scale : 0;
        }
    }
    __device__ __forceinline__ void write(Scalar* to) const {
        constexpr u32 VECTOR = 16 / sizeof(Scalar);
        union {
            Scalar parts[8];
            uint4 vectors[8 / VECTOR];
        } all;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) all.parts[i] = raw[i];
#pragma unroll
        for (u32 i = 0; i < 8 / VECTOR; ++i) ((uint4*)to)[i] = all.vectors[i];
    }
};

// Sums over a row's elements.
struct RowSums {
    double squares = 0, lost = 0, mixed = 0, raw = 0;

    __device__ __forceinline__ void add(const RowSums& other) {
        squares += other.squares;
        lost += other.lost;
        mixed += other.mixed;
        raw += other.raw;
    }

    // Adds eight elements; returns them as fp16, or zeros.
    __device__ __forceinline__ uint4 add(const Eight& eight, const double* centre, u32 start, u32 dim,
                                         bool is_packed) {
        u32 fp16[4];
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const double x = eight.scaled[i], element = (double)eight.raw[i];
            const unsigned short half = is_packed ? to_fp16(x) : 0;
            const double left = x - from_fp16(half);
            squares = fma(x, x, squares);
            lost = fma(left, left, lost);
            if (SUM == PRODUCTS && start + i < dim) {
                mixed = fma(x, centre[start + i], mixed);
                raw = fma(element, element, raw);
            }
            fp16[i / 2] = i % 2 ? fp16[i / 2] | (u32)half << 16 : half;
        }
        return make_uint4(fp16[0], fp16[1], fp16[2], fp16[3]);
    }
};
// Error bound on sums in double, relative to the sum of magnitudes.
constexpr double SLACK = 1e-11;

__device__ __forceinline__ u64 bits_of(double x) { return (u64)__double_as_longlong(x); }

// Packs base rows by position: row-major into `rows`, and as fp16 into `tiles`. A block per panel of the
// swizzled tiles, a thread per row.
extern "C" __global__ __launch_bounds__(PANEL) void pack_base(
    const Scalar* __restrict__ base, const unsigned short* __restrict__ bins,
    const double* __restrict__ centre, Packing* packing, unsigned char* __restrict__ tiles,
    Scalar* __restrict__ rows, Pack pack) {
    __shared__ u64 largest[4];
    const u32 visit = blockIdx.x, place = threadIdx.x, columns = pack.steps * 16;
    const bool is_panel = visit < pack.panels;
    const u32 panel = is_panel ? (u32)((u64)visit * pack.stride % pack.panels) : 0;
    const bool is_row = is_panel && base_row(panel, place, pack.panels) < pack.rows;
    const bool is_aside = is_row && bins[(u64)panel * PANEL + place] > packing->last_bin;
    const bool is_packed = is_row && !is_aside;
    const double scale = packing->scale;
    const Scalar* from = base + (u64)panel * pack.dim * PANEL + place;
    const u64 position = (u64)visit * PANEL + place;
    unsigned char* tile = tiles + position / pack.tile * pack.tile * pack.stored * 32;
    const u32 in_tile = position % pack.tile;
    if (place < 4) largest[place] = 0;
    RowSums sums;
    for (u32 start = 0; start < columns; start += 8) {
        const Eight eight(from, centre, scale, start, pack.dim, is_row);
        if (start < pack.pitch) eight.write(rows + position * pack.pitch + start);
        uint4 fp16 = sums.add(eight, centre, start, pack.dim, is_packed);
        if (start + 8 == columns) {
            const double length = sqrt(sums.squares) * (1 + SLACK);
            const double slack = SLACK * packing->centre_norm * length;
            const double test = SUM == PRODUCTS ? (sums.mixed + slack) * scale
                                                : -0.5 * sums.squares * (1 - SLACK);
            fp16.z = is_packed ? to_two_fp16(test) : is_row ? ALWAYS : NEVER;
            fp16.w = 0x3c003c00u;
            __syncthreads();
            if (is_packed) {
                atomicMax(largest, bits_of(length));
                atomicMax(largest + 1, bits_of(sqrt(sums.lost) * (1 + SLACK) + length * 1e-15));
                atomicMax(largest + 2, bits_of(fabs(test) * 1.001 + 1e-6));
                atomicMax(largest + 3, bits_of(sqrt(sums.raw) * (1 + SLACK)));
            }
        }
        *(uint4*)(tile + swizzled_offset(pack.stored, pack.log, pack.tile, in_tile, start)) = fp16;
    }
    __syncthreads();
    u64* all = &packing->norm;
    if (place < 4 && largest[place] > all[place]) atomicMax(all + place, largest[place]);
}

// Packs queries from their panels: row-major into `rows`, and as fp16, row-major or in swizzled tiles. A
// block per panel, padding included, and `PARTS` threads per row. Under PRODUCTS both the panels and `rows`
// hold negated queries.
extern "C" __global__ __launch_bounds__(PARTS* PANEL) void pack_queries(
    const Scalar* __restrict__ queries, const double* __restrict__ centre,
    const Packing* __restrict__ packing, unsigned char* __restrict__ tiles,
    Scalar* __restrict__ rows, QueryNorms* __restrict__ query_norms, u32* __restrict__ thresholds, Pack pack) {
    __shared__ RowSums parts[PARTS][PANEL];
    const u32 place = threadIdx.x % PANEL, part = threadIdx.x / PANEL, columns = pack.steps * 16;
    const u32 query = blockIdx.x * PANEL + place;
    const bool is_row = query < pack.rows;
    const double scale = packing->scale;
    const Scalar* from = queries + (u64)blockIdx.x * pack.dim * PANEL + place;
    const auto eight_from = [&](u32 start) {
        Eight eight(from, centre, scale, start, pack.dim, is_row);
        if (SUM == PRODUCTS) eight.negate(scale, centre, start, pack.dim, is_row);
        return eight;
    };
    const auto sum_of_parts = [&](const RowSums& of_part) {
        __syncthreads();
        parts[part][place] = of_part;
        __syncthreads();
        RowSums all = parts[0][place];
        for (u32 other = 1; other < PARTS; ++other) all.add(parts[other][place]);
        return all;
    };
    RowSums sums;
    for (u32 start = 8 * part; start < pack.dim; start += 8 * PARTS) {
        const Eight eight = eight_from(start);
        for (u32 i = 0; i < 8; ++i) sums.squares = fma(eight.scaled[i], eight.scaled[i], sums.squares);
    }
    // Sums of products with norms up to 64 must not overflow fp16.
    const bool is_near = sum_of_parts(sums).squares < 256.0 * 256.0;
    sums = RowSums();
    for (u32 start = 8 * part; start < columns; start += 8 * PARTS) {
        const Eight eight = eight_from(start);
        if (is_row && start < pack.pitch) eight.write(rows + (u64)query * pack.pitch + start);
        uint4 fp16 = sums.add(eight, centre, start, pack.dim, is_row && is_near);
        if (start + 8 == columns) {
            fp16.z = is_row ? 0x3c003c00u : 0;
            fp16.w = NEVER;
        }
        const u64 at = pack.tile ? (u64)(query / pack.tile) * pack.tile * pack.stored * 32 +
                                       swizzled_offset(pack.stored, pack.log, pack.tile,
                                                       query % pack.tile, start)
                                 : ((u64)query * columns + start) * 2;
        *(uint4*)(tiles + at) = fp16;
    }
    sums = sum_of_parts(sums);
    if (part > 0) return;
    thresholds[query] = NEVER;
    if (!is_row) return;
    const double length = sqrt(sums.squares) * (1 + SLACK);
    const double lost = sqrt(sums.lost) * (1 + SLACK) + length * 1e-15;
    const double raw = sqrt(sums.raw) * (1 + SLACK), middle = packing->centre_norm;
    const double product = sums.mixed / scale + middle * middle;
    const double rounded_up = product + SLACK * middle * (middle + raw);
    const double base = SUM == PRODUCTS ? rounded_up : sums.squares * (1 - SLACK);
    query_norms[query] = {base, raw, (length + lost) * (1 + SLACK),
                          is_near ? lost : Limits<double>::infinity()};
}
