// From rows to LSH keys: the same hash values, integers and keys as in src/index/lsh, bit for bit. The
// families are p-stable projections (Datar et al. 2004), random hyperplanes (Charikar 2002) and sampled bits.
//
// A hash value is a dot product in f64, summed in the order of the dimensions with fused multiply-adds. It is
// first summed in f32 with an error bound; only if the bound admits two integers is the f64 sum computed. A
// block stages its rows and some functions of a table in shared memory, a few dimensions at a time; a thread
// hashes a few of the rows.

#include "common/warp.cuh"

// The rounding of hash values to integers: p-stable values down or towards zero, hyperplanes to their sign
// bit; sampled bits are read as they are.
enum Kind { FLOOR, ZERO, SIGNS, READ_BITS };

// The largest absolute slot number of a p-stable function.
constexpr double MOST_SLOT = 16777216.0;

// The hash functions of some tables. The same struct as in src/device/cuda/hashing/launch.rs.
struct Functions {
    double width;     // of slots
    double inverse;   // 1 / width; NaN if that is not a normal number
    u32 count;        // functions of a table
    u32 stride;       // coefficients per dimension, padding included
    u32 tables;
    u32 dim;          // elements of a row
    u32 kind;         // a Kind
    u32 bits;         // of an integer in a key
    u32 is_clamped;   // whether values out of range are put into the outermost slots
    float margin;     // error bound of an f32 dot product, relative to the product of the lengths of row and function
};

// The tables that are being built, and a launch's range of rows. The same struct as in
// src/device/cuda/hashing/launch.rs.
struct Building {
    u64 rows;          // per table
    u64 first;         // the launch's first row
    u64 end;
    u32 tables;
    u32 section_bits;  // leading bits of a key that number its section
};

// SplitMix64's mixing, as in src/random.rs.
__device__ __forceinline__ u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The inverse of `mix`.
__device__ __forceinline__ u64 unmix(u64 z) {
    z = (z ^ (z >> 31) ^ (z >> 62)) * 0x319642b2d24d8ec3ull;
    z = (z ^ (z >> 27) ^ (z >> 54)) * 0x96de1b173f119089ull;
    return z ^ (z >> 30) ^ (z >> 60);
}

// Whether a key is the concatenation of its integers, which takes 64 bits at most; else it is a sum of their
// multiples.
__device__ __forceinline__ bool is_packed(const Functions& of) { return of.bits * of.count <= 64; }

// The multiplier of a function's integer in a key.
__device__ __forceinline__ u64 multiplier(const Functions& of, u32 function) {
    if (is_packed(of)) return function < of.count ? 1ull << of.bits * (of.count - 1 - function) : 0;
    return mix((u64)(function + 1) * 0x9e3779b97f4a7c15ull) | 1;
}

// The bits of an integer that enter the key.
__device__ __forceinline__ u64 mask_of(const Functions& of) {
    return is_packed(of) ? ~0ull >> (64 - of.bits) : ~0ull;
}

// The slot of a value. NaN, the result of an overflow, is in slot 0 where slots are clamped.
__device__ __forceinline__ int slot_of(const Functions& of, double value, double offset,
                                       bool& is_in_range) {
    const double shifted = __dadd_rn(value, __dmul_rn(offset, of.width));
    // The product is within 4 units in the last place of the quotient, so both are on the same side of every
    // integer unless one is that near. Below the normal numbers, units are larger.
    double at = __dmul_rn(shifted, of.inverse);
    const double apart = fabs(__dsub_rn(at, rint(at)));
    if (!(apart > __fma_rn(fabs(at), 1e-15, 1e-300))) at = __ddiv_rn(shifted, of.width);
    double slot = of.kind == FLOOR ? floor(at) : trunc(at);
    if (of.is_clamped) {
        if (slot < -MOST_SLOT) slot = -MOST_SLOT;
        if (slot > MOST_SLOT) slot = MOST_SLOT;
    }
    is_in_range = is_in_range && fabs(slot) <= MOST_SLOT;
    return fabs(slot) <= MOST_SLOT ? (int)slot : 0;
}

// Writes the key of a row in a table, and the rank of the row in its section.
__device__ __forceinline__ void note_key(const Building& building, u32 table, u64 row, u64 raw,
                                         u64* __restrict__ keys, u32* __restrict__ ranks,
                                         u32* __restrict__ sections) {
    const u64 key = mix(raw);
    const u64 at = (u64)table * building.rows + row;
    keys[at] = key;
    if (ranks) {
        const u64 section = key >> (64 - building.section_bits);
        ranks[at] = atomicAdd(&sections[((u64)table << building.section_bits) + section], 1u);
    }
}

// Marks a slot out of range; no integer has this value.
constexpr int NO_WHOLE = -2147483647 - 1;

// The integer of a row and a function, from the f64 sum.
__device__ __noinline__ int exact_whole(const Functions& of, const Scalar* row, const double* numbers,
                                        double offset) {
    // Enough loads in flight to hide their latency.
    constexpr u32 TOGETHER = 16;
    double sum = 0.0;
    for (u32 begin = 0; begin < of.dim; begin += TOGETHER) {
        double x[TOGETHER], other[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            const bool is_there = begin + i < of.dim;
            x[i] = is_there ? (double)row[begin + i] : 0.0;
            other[i] = is_there ? numbers[(u64)(begin + i) * of.stride] : 0.0;
        }
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            if (begin + i < of.dim) sum = __fma_rn(x[i], other[i], sum);
        }
    }
    if (of.kind == SIGNS) return sum >= 0.0;
    bool is_in_range = true;
    const int slot = slot_of(of, sum, offset, is_in_range);
    return is_in_range || of.is_clamped ? slot : NO_WHOLE;
}

// The maximum number of functions that are summed together; for each such batch all rows are staged again.
constexpr u32 MOST = 20;

// Functions in shared memory: their coefficients in the staged dimensions, offsets, lengths and multipliers.
struct Some {
    float numbers[STAGED * MOST];
    float offsets[MOST];
    float lengths[MOST];
    u64 multipliers[MOST];
};

// A thread's rows, `blockDim.x` apart, and the error bounds of their sums.
struct Own {
    u64 at[ROWS];
    float margins[ROWS];   // relative to a function's length
    float smallest[ROWS];  // absolute, for values near the smallest positive number
    u64 raw[ROWS];
    bool is_in_range;
};

// The rows of a block in shared memory, in the staged dimensions. The distance between rows, `pitch`, is odd,
// which avoids bank conflicts.
struct Tile {
    float* elements;
    u32 pitch;

    // Stages some dimensions of all rows.
    __device__ __forceinline__ void fill(const Scalar* __restrict__ rows, const Building& building, u64 first,
                                         u32 dim, u32 begin, u32 here) const {
        const Scalar* all = rows + begin;
        // Rows are then aligned to 16 bytes.
        if (sizeof(Scalar) == 4 && dim % 4 == 0) {
            fill_by<true>(all, building, first, dim, here);
        } else {
            fill_by<false>(all, building, first, dim, here);
        }
    }

    // The same with eight threads per row, each of which has several loads in flight.
    template <bool BY_16_BYTES>
    __device__ __forceinline__ void fill_by(const Scalar* __restrict__ rows, const Building& building, u64 first,
                                            u32 dim, u32 here) const {
        constexpr u32 LANES = 8, EACH = STAGED / LANES, ROWS_TOGETHER = 8;
        static_assert(EACH == 4, "16 bytes of f32");
        const u32 d = threadIdx.x % LANES * EACH, apart = blockDim.x / LANES;
        float* to = elements + threadIdx.x / LANES * pitch + d;
        if (d >= here) return;
        for (u32 r = threadIdx.x / LANES; r < blockDim.x * ROWS; r += apart * ROWS_TOGETHER) {
            union { uint4 all; float one[EACH]; } x[ROWS_TOGETHER];
#pragma unroll
            for (u32 n = 0; n < ROWS_TOGETHER; n++) {
                // Rows past the end are replaced by the last row; their values are not used.
                const Scalar* row = rows + min(first + r + n * apart, building.end - 1) * dim + d;
                if constexpr (BY_16_BYTES) {
                    x[n].all = *reinterpret_cast<const uint4*>(row);
                } else {
#pragma unroll
                    for (u32 i = 0; i < EACH; i++) x[n].one[i] = d + i < here ? (float)row[i] : 0.0f;
                }
            }
#pragma unroll
            for (u32 n = 0; n < ROWS_TOGETHER; n++) {
#pragma unroll
                for (u32 i = 0; i < EACH; i++) {
                    if (BY_16_BYTES || d + i < here) to[i] = x[n].one[i];
                }
                to += apart * pitch;
            }
        }
    }
};

// Adds the integers of `N` functions, from `first` on, to the keys of a thread's rows.
template <u32 N>
__device__ __forceinline__ void add_functions(
    const Functions& of, u32 first, const Scalar* __restrict__ rows, const double* __restrict__ numbers,
    const double* __restrict__ offsets, const Building& building, const Tile& tile, Some& some, Own& own) {
    float sums[ROWS][N];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
        for (u32 i = 0; i < N; i++) sums[r][i] = 0.0f;
    }
    for (u32 begin = 0; begin < of.dim; begin += STAGED) {
        const u32 here = min((u32)STAGED, of.dim - begin);
        __syncthreads();
        for (u32 i = threadIdx.x; i < here * N; i += blockDim.x) {
            const u32 function = first + i % N;
            some.numbers[i] =
                function < of.stride ? (float)numbers[(u64)(begin + i / N) * of.stride + function] : 0.0f;
        }
        if (begin == 0 && threadIdx.x < N && first + threadIdx.x < of.stride) {
            const u32 function = first + threadIdx.x;
            some.offsets[threadIdx.x] = (float)offsets[function];
            some.lengths[threadIdx.x] = (float)offsets[of.stride + function];
            some.multipliers[threadIdx.x] = multiplier(of, function);
        }
        // Up to STAGED dimensions, rows are staged once and stay.
        if (of.dim > STAGED) tile.fill(rows, building, own.at[0] - threadIdx.x, of.dim, begin, here);
        __syncthreads();
        const float* elements = tile.elements + threadIdx.x * tile.pitch;
#pragma unroll 2
        for (u32 d = 0; d < here; d++) {
            float x[ROWS];
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) x[r] = elements[r * blockDim.x * tile.pitch + d];
#pragma unroll
            for (u32 i = 0; i < N; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(some.numbers + d * N + i);
                const float some_numbers[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (u32 n = 0; n < 4; n++) {
#pragma unroll
                    for (u32 r = 0; r < ROWS; r++) {
                        sums[r][i + n] = __fmaf_rn(x[r], some_numbers[n], sums[r][i + n]);
                    }
                }
            }
        }
    }
    const u64 mask = mask_of(of);
    const float inverse = (float)of.inverse;
    u32 unsure[ROWS] = {};
    const auto off = [&](u32 i, u32 r) {
        return __fmaf_rn(some.lengths[i], own.margins[r], own.smallest[r]);
    };
    const auto add = [&](u32 i, u32 r, int whole, bool is_sure) {
        if (is_sure) {
            own.raw[r] += ((u64)(long long)whole & mask) * some.multipliers[i];
        } else {
            unsure[r] |= 1u << i;
        }
    };
    if (of.kind == SIGNS) {
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            if (first + i >= of.count) continue;
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                add(i, r, sums[r][i] >= 0.0f, fabsf(sums[r][i]) > off(i, r));
            }
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            if (first + i >= of.count) continue;
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                // Up to 2^22, the low bits of `nearest` are the nearest integer. The error bound `off_at`
                // grows with the slot's number, so that every larger value is recomputed in f64.
                constexpr float LARGE = 12582912.0f;
                const float at = __fmaf_rn(sums[r][i], inverse, some.offsets[i]);
                const float nearest = at + LARGE, rounded = nearest - LARGE;
                const float off_at = __fmaf_rn(fabsf(at), 2.4e-7f, 4.8e-7f);
                int whole = __float_as_int(nearest) - __float_as_int(LARGE) - (rounded > at);
                if (of.kind == ZERO && at < 0.0f) whole++;
                add(i, r, whole, fabsf(at - rounded) > __fmaf_rn(off(i, r), inverse * 1.001f, off_at));
            }
        }
    }
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        for (u32 left = unsure[r]; left != 0; left &= left - 1) {
            const u32 i = __ffs((int)left) - 1, function = first + i;
            const Scalar* row = rows + min(own.at[r], building.end - 1) * of.dim;
            const int whole = exact_whole(of, row, numbers + function, offsets[function]);
            own.is_in_range = own.is_in_range && whole != NO_WHOLE;
            own.raw[r] += ((u64)(long long)whole & mask) * some.multipliers[i];
        }
    }
}

// The keys of rows in all tables. `numbers` has, per table and dimension, the coefficients of all functions;
// `offsets` has, per table, the offsets of p-stable functions, in widths and at most 1, and the lengths of
// all functions, rounded up. If `ranks` is null, rows are not counted by section. ROWS rows per thread;
// `out_of_range` is set if a slot is.
extern "C" __global__ __launch_bounds__(128, 3) void hash_rows(
    const Scalar* __restrict__ rows, const double* __restrict__ numbers,
    const double* __restrict__ offsets, u64* __restrict__ keys, u32* __restrict__ ranks,
    u32* __restrict__ sections, u32* __restrict__ out_of_range, const __grid_constant__ Functions of,
    const __grid_constant__ Building building) {
    extern __shared__ float elements[];
    __shared__ __align__(16) Some some;
    const u64 first_row = building.first + (u64)blockIdx.x * blockDim.x * ROWS;
    const Tile tile = {elements, min(of.dim, (u32)STAGED) | 1};
    Own own;
    own.is_in_range = true;
    float squares[ROWS] = {};
    for (u32 begin = 0; begin < of.dim; begin += STAGED) {
        const u32 here = min((u32)STAGED, of.dim - begin);
        __syncthreads();
        tile.fill(rows, building, first_row, of.dim, begin, here);
        __syncthreads();
        for (u32 d = 0; d < here; d++) {
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                const float x = elements[(threadIdx.x + r * blockDim.x) * tile.pitch + d];
                squares[r] = __fmaf_rn(x, x, squares[r]);
            }
        }
    }
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        own.at[r] = first_row + threadIdx.x + r * blockDim.x;
        // Squares below the smallest positive number may be lost.
        const float length = __fmaf_rn(sqrtf(squares[r]), 1.0f + of.margin, of.dim * 1e-22f);
        own.smallest[r] = of.dim * 3e-45f * (1.0f + length);
        own.margins[r] = __fmaf_rn(length, of.margin, own.smallest[r]);
    }
    const u32 together = (of.tables + gridDim.y - 1) / gridDim.y;
    const u32 last = min(of.tables, (blockIdx.y + 1) * together);
    for (u32 table = blockIdx.y * together; table < last; table++) {
        const double* of_table = numbers + (u64)table * of.dim * of.stride;
        const double* own_offsets = offsets + (u64)table * 2 * of.stride;
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) own.raw[r] = 0;
        for (u32 first = 0; first < of.count; first += MOST) {
            const u32 left = of.count - first;
            if (left <= 8) {
                add_functions<8>(of, first, rows, of_table, own_offsets, building, tile, some, own);
            } else if (left <= 12) {
                add_functions<12>(of, first, rows, of_table, own_offsets, building, tile, some, own);
            } else if (left <= 16) {
                add_functions<16>(of, first, rows, of_table, own_offsets, building, tile, some, own);
            } else {
                add_functions<MOST>(of, first, rows, of_table, own_offsets, building, tile, some, own);
            }
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            if (own.at[r] >= building.end) continue;
            note_key(building, table, own.at[r], own.raw[r], keys, ranks, sections);
        }
    }
    if (!own.is_in_range && !of.is_clamped) *out_of_range = 1;
}

// The keys of bit rows in all tables; `numbers` has, per table, the positions of the sampled bits.
extern "C" __global__ __launch_bounds__(128) void hash_bits(
    const u32* __restrict__ rows, const u32* __restrict__ numbers, u64* __restrict__ keys,
    u32* __restrict__ ranks, u32* __restrict__ sections, Functions of, Building building) {
    const u64 row = building.first + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= building.end) return;
    const u32* own = rows + row * of.dim;
    const u32 together = (of.tables + gridDim.y - 1) / gridDim.y;
    const u32 last = min(of.tables, (blockIdx.y + 1) * together);
    for (u32 table = blockIdx.y * together; table < last; table++) {
        const u32* bits = numbers + (u64)table * of.stride;
        u64 raw = 0;
        for (u32 i = 0; i < of.count; i++) {
            const u64 bit = own[bits[i] / 32] >> (bits[i] % 32) & 1;
            raw = is_packed(of) ? raw << 1 | bit : raw + bit * multiplier(of, i);
        }
        note_key(building, table, row, raw, keys, ranks, sections);
    }
}
