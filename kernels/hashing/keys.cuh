// Whole numbers to keys, bit for bit as in src/index/lsh, and the keys of rows of bits.

#include "common/warp.cuh"

// How values become whole numbers: of p-stable functions by rounding down or towards zero, of
// hyperplanes by the sign; bits are read.
enum Kind { FLOOR, ZERO, SIGNS, READ_BITS };

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
    float margin;     // how far a sum of f32 is off, at most, of the product of the lengths of row and function
};

// Tables that are being built, and the rows that a launch looks at. The same struct as in
// src/device/cuda/hashing/launch.rs.
struct Building {
    u64 rows;          // in each table
    u64 first;         // the launch's first row
    u64 end;
    u32 tables;
    u32 section_bits;  // leading bits of a key, which are the number of its section
};

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

// What a key is made of: whole numbers side by side where 64 bits suffice, else a sum of their multiples.
__device__ __forceinline__ bool is_packed(const Functions& of) { return of.bits * of.count <= 64; }

// By what the whole numbers of a function are multiplied.
__device__ __forceinline__ u64 multiplier(const Functions& of, u32 function) {
    if (is_packed(of)) return function < of.count ? 1ull << of.bits * (of.count - 1 - function) : 0;
    return mix((u64)(function + 1) * 0x9e3779b97f4a7c15ull) | 1;
}

// The bits of a whole number that count.
__device__ __forceinline__ u64 mask_of(const Functions& of) {
    return is_packed(of) ? ~0ull >> (64 - of.bits) : ~0ull;
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
        u64 raw = 0;
        for (u32 i = 0; i < of.count; i++) {
            const u64 bit = own[bits[i] / 32] >> (bits[i] % 32) & 1;
            raw = is_packed(of) ? raw << 1 | bit : raw + bit * multiplier(of, i);
        }
        note_key(building, table, row, raw, keys, ranks, sections);
    }
}
