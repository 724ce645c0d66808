// Quantised rows for tensor cores: slices of fp16 numbers, or of bits. See products.cuh.

#include "common/fp16.cuh"
#include "dbscan/query.cuh"

// The range of a row's largest element, in units: rows above it are not quantised, rows below it are rounded
// to 0.
constexpr double LARGEST = 1099511627776.0, SMALLEST = 1 / LARGEST;
// The exponent of a row's largest fp16 number; elements down to 2^-21 of it are normal numbers.
constexpr int TOP = 7;
// The maximum deviation of a unit vector's squared length from 1; `squares` in src/device/contract/dbscan.rs
// relies on it.
constexpr double UNIT_LENGTH = 1e-9;

// An element of a row, or of its unit vector, minus the centre, in units.
__device__ __forceinline__ double from_centre(const Dbscan& all, u32 row, u32 i, const Direction& of) {
    double x;
    if constexpr (IS_DIRECTION) {
        x = __dmul_rn(centred(all, row, i, of), of.inverse);
    } else {
        x = element(all, row, i);
    }
    return __dmul_rn(__dadd_rn(x, -all.products.centre[i]), all.products.unit);
}

// An element of a row's unit vector; 0 for metrics that do not compare directions.
__device__ __forceinline__ double of_unit_vector(const Dbscan& all, u32 row, u32 i, const Direction& of) {
    if (!IS_DIRECTION) return 0;
    return __dmul_rn(centred(all, row, i, of), of.inverse);
}

// Quantises a row into the slices of its slot. By a whole warp.
__device__ __forceinline__ RoundedRow round_row(const Dbscan& all, u32 slot, u32 row) {
    u32* to = reinterpret_cast<u32*>(all.products.slices + (u64)slot * all.products.count * 4);
    const u32 words = all.products.count * 16;
    Direction of = {1, 0, 1};
    if (IS_DIRECTION && row != NONE) of = all.directions[row];
    const u32 dim = row == NONE ? 0 : all.dim;
    double largest = 0;
    for (u32 i = Warp::rank(); i < dim; i += 32) largest = fmax(largest, fabs(from_centre(all, row, i, of)));
    largest = largest_of_lanes(largest);
    // The scale and its inverse.
    float scale = 0;
    double inverse = 0;
    if (largest >= SMALLEST && largest < LARGEST) {
        const int power = TOP - ilogb(largest);
        scale = ldexpf(1, -power);
        inverse = ldexp(1.0, power);
    }
    double square = 0, lost = 0, length = 0;
    for (u32 word = Warp::rank(); word < words; word += 32) {
        u32 both = 0;
#pragma unroll
        for (u32 part = 0; part < 2; part++) {
            const u32 i = word * 2 + part;
            if (i >= dim) continue;
            const double x = from_centre(all, row, i, of), unit = of_unit_vector(all, row, i, of);
            const unsigned short half = inverse > 0 && x == x ? to_fp16(x * inverse) : 0;
            const double rounded = from_fp16(half) * scale;
            square += rounded * rounded;
            lost += (x - rounded) * (x - rounded);
            length += unit * unit;
            both |= (u32)half << part * 16;
        }
        to[word] = both;
    }
    square = add_lanes(square);
    lost = add_lanes(lost);
    length = add_lanes(length);
    // Includes the rounding errors of subtracting the centre and of these sums.
    const double error = sqrt(lost) * (1 + 1e-7) + (sqrt(square) + sqrt(lost)) * 1e-12;
    // fmax ignores NaN elements, so `lost` is checked as well.
    const bool is_fit = largest < LARGEST && lost < LARGEST * LARGEST * LARGEST &&
                        (!IS_DIRECTION || row == NONE || fabs(length - 1) < UNIT_LENGTH);
    return RoundedRow{is_fit ? __double2float_rn(square) : 0, is_fit ? scale : 0,
                   is_fit ? __double2float_ru(error) : Limits<float>::infinity(), 0};
}

// Quantises a tile's rows, and records their norms, scales and errors. A block per tile, a warp for every
// eighth row.
extern "C" __global__ __launch_bounds__(256) void round_tiles(const __grid_constant__ Dbscan all) {
    const u32 tile = blockIdx.x, warp = threadIdx.x / 32;
    float error = 0, square = 0;
    for (u32 i = warp; i < TILE; i += 8) {
        const u32 slot = tile * TILE + i, row = all.order[slot];
        if constexpr (HAS_FP16) {
            const RoundedRow rounded = round_row(all, slot, row);
            if (Warp::rank() == 0) all.products.rounded[slot] = rounded;
            error = fmaxf(error, rounded.error);
            square = fmaxf(square, rounded.square);
        } else {
            u32* to = reinterpret_cast<u32*>(all.products.slices + (u64)slot * all.products.count * 4);
            for (u32 word = Warp::rank(); word < all.products.count * 16; word += 32) {
                const bool is_there = row != NONE && word < all.dim;
                to[word] = is_there ? (u32)all.rows[(u64)row * all.dim + word] : 0;
            }
        }
    }
    if constexpr (HAS_FP16) {
        __shared__ float2 most[8];
        if (Warp::rank() == 0) most[warp] = float2{error, square};
        __syncthreads();
        if (threadIdx.x != 0) return;
        for (u32 i = 1; i < 8; i++) {
            error = fmaxf(error, most[i].x);
            square = fmaxf(square, most[i].y);
        }
        all.products.most[tile] = float2{error, square};
    }
}
