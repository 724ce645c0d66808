// From rows to LSH keys: the same hash values, integers and keys as in src/index/lsh, bit for bit. The
// families are p-stable projections (Datar et al. 2004), random hyperplanes (Charikar 2002) and sampled bits.

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
    const double distance = fabs(__dsub_rn(at, rint(at)));
    if (!(distance > __fma_rn(fabs(at), 1e-15, 1e-300))) at = __ddiv_rn(shifted, of.width);
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
