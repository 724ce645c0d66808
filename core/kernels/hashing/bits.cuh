// The LSH keys of bit rows.

#include "hashing/keys.cuh"

// The keys of bit rows in all tables; `numbers` has, per table, the positions of the sampled bits.
extern "C" __global__ __launch_bounds__(128) void hash_bits(
    const u32* __restrict__ rows, const u32* __restrict__ numbers, u64* __restrict__ keys,
    u32* __restrict__ ranks, u32* __restrict__ sections, Functions of, Building building) {
    const u64 row = building.first + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= building.end) return;
    const u32* words = rows + row * of.dim;
    const u32 together = (of.tables + gridDim.y - 1) / gridDim.y;
    const u32 last = min(of.tables, (blockIdx.y + 1) * together);
    for (u32 table = blockIdx.y * together; table < last; table++) {
        const u32* bits = numbers + (u64)table * of.stride;
        u64 raw = 0;
        for (u32 i = 0; i < of.count; i++) {
            const u64 bit = words[bits[i] / 32] >> (bits[i] % 32) & 1;
            raw = is_packed(of) ? raw << 1 | bit : raw + bit * multiplier(of, i);
        }
        note_key(building, table, row, raw, keys, ranks, sections);
    }
}
