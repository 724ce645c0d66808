// Rows to keys: the same values, whole numbers and keys as in src/index/lsh, bit for bit.
//
// Values are sums of f64 in the order of the dimensions, each rounded once with its product. A thread has
// a few rows; the numbers of some functions of a table are in shared memory, in a few dimensions at a time.

#include "common/warp.cuh"

// How values become whole numbers: of p-stable functions by rounding down or towards zero, of
// hyperplanes by the sign; bits are read.
enum Kind { FLOOR, ZERO, SIGNS, READ_BITS };

// Slots of p-stable functions reach from minus this to this.
constexpr double MOST_SLOT = 16777216.0;

// The functions of some tables. The same struct as in src/device/cuda/hashing/launch.rs.
struct Functions {
    double width;     // of slots
    double inverse;   // 1 / width; NaN unless that is a normal number
    u32 count;        // functions of a table
    u32 stride;       // their numbers in a dimension, and what fills them up
    u32 tables;
    u32 dim;          // elements of a row
    u32 kind;         // a Kind
    u32 bits;         // of a whole number in a key
    u32 is_clamped;   // whether values too far away are in the outermost slots
    u32 padding;
};
static_assert(sizeof(Functions) == 48, "the host has the same struct");

// Tables that are being built, and the rows that a launch looks at. The same struct as in
// src/device/cuda/hashing/launch.rs.
struct Building {
    u64 rows;          // in each table
    u64 first;         // the launch's first row
    u64 end;
    u32 tables;
    u32 section_bits;  // leading bits of a key, which are the number of its section
};
static_assert(sizeof(Building) == 32, "the host has the same struct");

// SplitMix64's mixing, as in src/random.rs.
__device__ __forceinline__ u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The number that mixing made this of.
__device__ __forceinline__ u64 unmix(u64 z) {
    z = (z ^ (z >> 31) ^ (z >> 62)) * 0x319642b2d24d8ec3ull;
    z = (z ^ (z >> 27) ^ (z >> 54)) * 0x96de1b173f119089ull;
    return z ^ (z >> 30) ^ (z >> 60);
}

// What a key is made of: whole numbers side by side where 64 bits suffice, else a sum of their
// multiples.
struct Raw {
    u64 value;

    __device__ __forceinline__ void add(const Functions& of, u32 function, int whole) {
        const u64 number = (u64)(long long)whole;
        if (of.bits * of.count <= 64) {
            value = value << of.bits | (number & (~0ull >> (64 - of.bits)));
        } else {
            value += number * (mix((u64)(function + 1) * 0x9e3779b97f4a7c15ull) | 1);
        }
    }
};

// The slot of a value; what is no number, after an overflow, is in slot 0 where slots are clamped.
__device__ __forceinline__ int slot_of(const Functions& of, double value, double offset,
                                       bool& is_in_range) {
    const double shifted = __dadd_rn(value, __dmul_rn(offset, of.width));
    // Less than 4 units of the last place from the quotient, which is on the same side of all whole numbers
    // unless one is so near. Below the normal numbers, units are larger.
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

// Notes the key of a row in a table, and how many rows of its section came before.
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

// Elements of a row that are read at once, where rows begin at multiples of 16 bytes.
constexpr u32 TOGETHER = 16 / sizeof(Scalar);

// The rows of a thread, a block's threads apart: all take the same numbers of functions from shared memory.
struct Own {
    const Scalar* at[ROWS];
    bool is_there[ROWS];
    Raw raw[ROWS];
    bool is_in_range;
};

// Adds the whole numbers of `N` functions, from `first` on, of rows. `some` is shared.
template <u32 N>
__device__ __forceinline__ void add_functions(
    const Functions& of, u32 first, const double* __restrict__ numbers,
    const double* __restrict__ offsets, double* some, Own& own) {
    double sums[ROWS][N];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
        for (u32 i = 0; i < N; i++) sums[r][i] = 0.0;
    }
    for (u32 begin = 0; begin < of.dim; begin += STAGED) {
        const u32 here = min((u32)STAGED, of.dim - begin);
        __syncthreads();
        for (u32 i = threadIdx.x; i < here * N; i += blockDim.x) {
            some[i] = numbers[(u64)(begin + i / N) * of.stride + first + i % N];
        }
        __syncthreads();
        const auto step = [&](u32 d, const Scalar (&elements)[ROWS]) {
#pragma unroll
            for (u32 i = 0; i < N; i++) {
                const double number = some[d * N + i];
#pragma unroll
                for (u32 r = 0; r < ROWS; r++) {
                    sums[r][i] = __fma_rn((double)elements[r], number, sums[r][i]);
                }
            }
        };
        Scalar elements[ROWS];
        if (of.dim % TOGETHER == 0) {
#pragma unroll 1
            for (u32 d = 0; d < here; d += TOGETHER) {
                union { uint4 all; Scalar one[TOGETHER]; } x[ROWS];
#pragma unroll
                for (u32 r = 0; r < ROWS; r++) {
                    x[r].all = *reinterpret_cast<const uint4*>(own.at[r] + begin + d);
                }
#pragma unroll
                for (u32 i = 0; i < TOGETHER; i++) {
#pragma unroll
                    for (u32 r = 0; r < ROWS; r++) elements[r] = x[r].one[i];
                    step(d + i, elements);
                }
            }
        } else {
#pragma unroll 2
            for (u32 d = 0; d < here; d++) {
#pragma unroll
                for (u32 r = 0; r < ROWS; r++) elements[r] = own.at[r][begin + d];
                step(d, elements);
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        const u32 function = first + i;
        if (function >= of.count) continue;
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            int whole;
            if (of.kind == SIGNS) {
                whole = sums[r][i] >= 0.0;
            } else {
                whole = slot_of(of, sums[r][i], offsets[function], own.is_in_range);
            }
            own.raw[r].add(of, function, whole);
        }
    }
}

// The keys of rows in all tables. `numbers` has for each table and dimension those of all functions,
// `offsets` for each table those of p-stable functions, in widths. Without `ranks`, nothing is counted.
// A thread for a few rows; `out_of_range` is set where a slot is.
extern "C" __global__ __launch_bounds__(128) void hash_rows(
    const Scalar* __restrict__ rows, const double* __restrict__ numbers,
    const double* __restrict__ offsets, u64* __restrict__ keys, u32* __restrict__ ranks,
    u32* __restrict__ sections, u32* __restrict__ out_of_range, Functions of,
    Building building) {
    __shared__ __align__(16) double some[STAGED * 16];
    const u64 row = building.first + (u64)blockIdx.x * blockDim.x * ROWS + threadIdx.x;
    Own own;
    own.is_in_range = true;
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        own.is_there[r] = row + r * blockDim.x < building.end;
        // Others hash the first row, for nobody.
        own.at[r] = rows + (own.is_there[r] ? row + r * blockDim.x : building.first) * of.dim;
    }
    const u32 together = (of.tables + gridDim.y - 1) / gridDim.y;
    const u32 last = min(of.tables, (blockIdx.y + 1) * together);
    for (u32 table = blockIdx.y * together; table < last; table++) {
        const double* of_table = numbers + (u64)table * of.dim * of.stride;
        const double* own_offsets = offsets + (u64)table * of.stride;
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) own.raw[r] = {0};
        u32 first = 0;
        for (; first + 12 < of.count; first += 16) {
            add_functions<16>(of, first, of_table, own_offsets, some, own);
        }
        const u32 left = of.count > first ? of.count - first : 0;
        if (left > 8) {
            add_functions<12>(of, first, of_table, own_offsets, some, own);
        } else if (left > 4) {
            add_functions<8>(of, first, of_table, own_offsets, some, own);
        } else if (left > 0) {
            add_functions<4>(of, first, of_table, own_offsets, some, own);
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            if (!own.is_there[r]) continue;
            note_key(building, table, row + r * blockDim.x, own.raw[r].value, keys, ranks, sections);
        }
    }
    if (!own.is_in_range && !of.is_clamped) *out_of_range = 1;
}

// The keys of rows of bits in all tables: `numbers` has for each table the bits that are read.
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
        Raw raw = {0};
        for (u32 i = 0; i < of.count; i++) {
            raw.add(of, i, (int)(own[bits[i] / 32] >> (bits[i] % 32) & 1));
        }
        note_key(building, table, row, raw.value, keys, ranks, sections);
    }
}
