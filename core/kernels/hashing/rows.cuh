// The LSH keys of rows of numbers, in batches of BATCH functions, which are hyperplanes if IS_SIGNS; rows are aligned
// to 16 bytes if IS_ALIGNED. One program for each, since a kernel for all takes longer to compile than all others of
// this family together.
//
// A hash value is a dot product in f64, summed in the order of the dimensions with fused multiply-adds. It is
// first summed in f32 with an error bound; only if the bound admits two integers is the f64 sum computed. A
// block stages its rows and a batch of a table's functions in shared memory, a few dimensions at a time; a thread
// hashes a few of the rows.

#include "hashing/keys.cuh"

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
    if (IS_SIGNS) return sum >= 0.0;
    bool is_in_range = true;
    const int slot = slot_of(of, sum, offset, is_in_range);
    return is_in_range || of.is_clamped ? slot : NO_WHOLE;
}

// BATCH functions in shared memory: their coefficients in the staged dimensions, offsets, lengths and multipliers.
struct Batch {
    float numbers[STAGED * BATCH];
    float offsets[BATCH];
    float lengths[BATCH];
    u64 multipliers[BATCH];
};

// A thread's rows, `blockDim.x` apart, and the error bounds of their sums.
struct ThreadRows {
    u64 at[ROWS];
    float margins[ROWS];   // relative to a function's length
    float smallest[ROWS];  // absolute, for values near the smallest positive number
    u64 raw[ROWS];
    bool is_in_range;
};

// The rows of a block in shared memory, in the staged dimensions. The distance between rows, `pitch`, is odd,
// which avoids bank conflicts.
struct StagedRows {
    float* elements;
    u32 pitch;

    // Stages some dimensions of all rows, with eight threads per row, each of which has several loads in flight.
    __device__ __forceinline__ void fill(const Scalar* __restrict__ all, const Building& building, u64 first,
                                         u32 dim, u32 begin, u32 here) const {
        constexpr u32 LANES = 8, EACH = STAGED / LANES, ROWS_TOGETHER = 8;
        static_assert(EACH == 4, "16 bytes of f32");
        const u32 d = threadIdx.x % LANES * EACH, row_stride = blockDim.x / LANES;
        const Scalar* rows = all + begin;
        float* to = elements + threadIdx.x / LANES * pitch + d;
        if (d >= here) return;
        for (u32 r = threadIdx.x / LANES; r < blockDim.x * ROWS; r += row_stride * ROWS_TOGETHER) {
            union { uint4 all; float one[EACH]; } x[ROWS_TOGETHER];
#pragma unroll
            for (u32 n = 0; n < ROWS_TOGETHER; n++) {
                // Rows past the end are replaced by the last row; their values are not used.
                const Scalar* row = rows + min(first + r + n * row_stride, building.end - 1) * dim + d;
                if (IS_ALIGNED) {
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
                    if (IS_ALIGNED || d + i < here) to[i] = x[n].one[i];
                }
                to += row_stride * pitch;
            }
        }
    }
};

// Adds the integers of a batch of functions, from `first` on, to the keys of a thread's rows.
__device__ __forceinline__ void add_functions(
    const Functions& of, u32 first, const Scalar* __restrict__ rows, const double* __restrict__ numbers,
    const double* __restrict__ offsets, const Building& building, const StagedRows& tile, Batch& some,
    ThreadRows& thread_rows) {
    float sums[ROWS][BATCH];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) sums[r][i] = 0.0f;
    }
    for (u32 begin = 0; begin < of.dim; begin += STAGED) {
        const u32 here = min((u32)STAGED, of.dim - begin);
        __syncthreads();
        for (u32 i = threadIdx.x; i < here * BATCH; i += blockDim.x) {
            const u32 function = first + i % BATCH;
            some.numbers[i] =
                function < of.stride ? (float)numbers[(u64)(begin + i / BATCH) * of.stride + function] : 0.0f;
        }
        if (begin == 0 && threadIdx.x < BATCH && first + threadIdx.x < of.stride) {
            const u32 function = first + threadIdx.x;
            some.offsets[threadIdx.x] = (float)offsets[function];
            some.lengths[threadIdx.x] = (float)offsets[of.stride + function];
            some.multipliers[threadIdx.x] = multiplier(of, function);
        }
        // Up to STAGED dimensions, rows are staged once and stay.
        if (of.dim > STAGED) tile.fill(rows, building, thread_rows.at[0] - threadIdx.x, of.dim, begin, here);
        __syncthreads();
        const float* elements = tile.elements + threadIdx.x * tile.pitch;
#pragma unroll 2
        for (u32 d = 0; d < here; d++) {
            float x[ROWS];
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) x[r] = elements[r * blockDim.x * tile.pitch + d];
#pragma unroll
            for (u32 i = 0; i < BATCH; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(some.numbers + d * BATCH + i);
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
        return __fmaf_rn(some.lengths[i], thread_rows.margins[r], thread_rows.smallest[r]);
    };
    const auto add = [&](u32 i, u32 r, int whole, bool is_sure) {
        if (is_sure) {
            thread_rows.raw[r] += ((u64)(long long)whole & mask) * some.multipliers[i];
        } else {
            unsure[r] |= 1u << i;
        }
    };
    if (IS_SIGNS) {
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            if (first + i >= of.count) continue;
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                add(i, r, sums[r][i] >= 0.0f, fabsf(sums[r][i]) > off(i, r));
            }
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
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
    // One loop for all rows, whose values are selected: the sums are in registers.
#pragma unroll 1
    for (u32 r = 0; r < ROWS; r++) {
        u32 left = 0;
        u64 at = 0, raw = 0;
#pragma unroll
        for (u32 each = 0; each < ROWS; each++) {
            if (each == r) left = unsure[each], at = thread_rows.at[each];
        }
        for (; left != 0; left &= left - 1) {
            const u32 i = __ffs((int)left) - 1, function = first + i;
            const Scalar* row = rows + min(at, building.end - 1) * of.dim;
            const int whole = exact_whole(of, row, numbers + function, offsets[function]);
            thread_rows.is_in_range = thread_rows.is_in_range && whole != NO_WHOLE;
            raw += ((u64)(long long)whole & mask) * some.multipliers[i];
        }
#pragma unroll
        for (u32 each = 0; each < ROWS; each++) {
            if (each == r) thread_rows.raw[each] += raw;
        }
    }
}

// The keys of rows in all tables. `numbers` has, per table and dimension, the coefficients of all functions;
// `offsets` has, per table, the offsets of p-stable functions, in widths and at most 1, and the lengths of
// all functions, rounded up. If `ranks` is null, rows are not counted by section. ROWS rows per thread;
// `out_of_range` is set if a slot is. Functions are summed in batches; for each, all rows are staged again.
extern "C" __global__ __launch_bounds__(128, 3) void hash_rows(
    const Scalar* __restrict__ rows, const double* __restrict__ numbers,
    const double* __restrict__ offsets, u64* __restrict__ keys, u32* __restrict__ ranks,
    u32* __restrict__ sections, u32* __restrict__ out_of_range, const __grid_constant__ Functions of,
    const __grid_constant__ Building building) {
    extern __shared__ float elements[];
    __shared__ __align__(16) Batch some;
    const u64 first_row = building.first + (u64)blockIdx.x * blockDim.x * ROWS;
    const StagedRows tile = {elements, min(of.dim, (u32)STAGED) | 1};
    ThreadRows thread_rows;
    thread_rows.is_in_range = true;
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
        thread_rows.at[r] = first_row + threadIdx.x + r * blockDim.x;
        // Squares below the smallest positive number may be lost.
        const float length = __fmaf_rn(sqrtf(squares[r]), 1.0f + of.margin, of.dim * 1e-22f);
        thread_rows.smallest[r] = of.dim * 3e-45f * (1.0f + length);
        thread_rows.margins[r] = __fmaf_rn(length, of.margin, thread_rows.smallest[r]);
    }
    const u32 together = (of.tables + gridDim.y - 1) / gridDim.y;
    const u32 last = min(of.tables, (blockIdx.y + 1) * together);
    for (u32 table = blockIdx.y * together; table < last; table++) {
        const double* of_table = numbers + (u64)table * of.dim * of.stride;
        const double* table_offsets = offsets + (u64)table * 2 * of.stride;
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) thread_rows.raw[r] = 0;
        for (u32 first = 0; first < of.count; first += BATCH) {
            add_functions(of, first, rows, of_table, table_offsets, building, tile, some, thread_rows);
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            if (thread_rows.at[r] >= building.end) continue;
            note_key(building, table, thread_rows.at[r], thread_rows.raw[r], keys, ranks, sections);
        }
    }
    if (!thread_rows.is_in_range && !of.is_clamped) *out_of_range = 1;
}
