// Swizzled tiles: tiles of rows as they lie in shared memory, in steps of 32 bytes.
//
// A numeric row has 16 fp16 numbers a step: its elements, zeros, and four numbers that add the threshold test
// to the product. For a base row these are -|x|^2 / 2 (or the corresponding term of the metric) in two parts,
// then 1 and 1; for a query 1 and 1, then its negated threshold in two parts. A pair passes if its sum is not
// negative. For bit rows see filter/bits.cuh.

#include "common/arithmetic.cuh"

// Added to a query's hit counter if hits were lost: more than any list has room for.
enum : u32 { LOST = 1u << 31 };

// A tile is cut into panels of 2^log steps (128-byte rows for log 2, 64-byte rows for log 1); the remaining
// steps form panels of 64 and 32 bytes. This is the pitch of the panel that holds a step, …
__host__ __device__ constexpr u32 panel_pitch(u32 steps, u32 step, u32 log) {
    const u32 whole = steps >> log << log;
    return step < whole                                 ? 32 << log
           : steps - whole >= 2 && step - whole < 2     ? 64
                                                        : 32;
}
// … its first step, …
__host__ __device__ constexpr u32 panel_first(u32 steps, u32 step, u32 log) {
    const u32 whole = steps >> log << log;
    return step < whole ? step >> log << log : whole + (steps - whole >= 2 && step - whole >= 2 ? 2 : 0);
}
// … and its offset in a tile of `rows` rows.
__host__ __device__ constexpr u32 panel_start(u32 steps, u32 step, u32 log, u32 rows) {
    return panel_first(steps, step, log) * rows * 32;
}
// The byte offset of an fp16 number in a tile. Chunks of 16 bytes stay together: swizzling permutes them
// within 128, 64 or 32 bytes, as the descriptor of wgmma.mma_async and ldmatrix expect.
__device__ __forceinline__ u32 swizzled_offset(u32 steps, u32 log, u32 rows, u32 row, u32 column) {
    const u32 step = column / 16, pitch = panel_pitch(steps, step, log);
    const u32 swizzle = pitch == 128 ? row & 7 : pitch == 64 ? row >> 1 & 3 : row >> 2 & 1;
    const u32 in_panel = row * pitch + (column - panel_first(steps, step, log) * 16) * 2;
    return panel_start(steps, step, log, rows) + (in_panel ^ swizzle << 4);
}
