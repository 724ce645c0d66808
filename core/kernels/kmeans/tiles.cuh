// fp16 products of rows and centroids on tensor cores, on every architecture from sm_80 on: the basis of
// `assign_tiles.cuh`. The WARPS of a block process TILE centroids at a time, of which shared memory holds
// STAGES slices: up to NARROW_DIM elements are one slice, and a row stays in registers; of wider rows, a
// slice has SLICE elements, and rows are read again for each tile.

#include "common/copy.cuh"
#include "kmeans/fp16.cuh"

constexpr float UNIT = 5.9604645e-8f;                 // 2^-24
constexpr bool BY_WARPS = HAS_TILES && !BY_WARPGROUPS;  // whether single warps multiply
constexpr u32 STEPS = HAS_TILES ? FP16_DIM / 16 : 1;  // multiplications of 16 elements each
constexpr u32 SLICES = IS_WIDE ? FP16_DIM / SLICE : 1;
constexpr u32 SLICE_DIM = FP16_DIM / SLICES;

constexpr u32 PART = 32;   // centroids multiplied at a time, of the TILE in shared memory
constexpr u32 SLOTS = 4;   // rows per thread: numbers lane / 4 + 8 i of its warp's 32
constexpr u32 BLOCKS = IS_WIDE ? 3 : 4;  // resident per multiprocessor
// Distance between centroids in shared memory, in fp16 numbers; odd in units of 16 bytes.
constexpr u32 STRIDE = SLICE_DIM + 8;
constexpr u32 STAGE_BYTES = TILE * STRIDE * 2 + TILE * 4;

// Products of SLOTS rows with 8 of each 32 centroids: [i / 2][n][i % 2 * 2 + which].
typedef float Products[SLOTS / 2][PART / 8][4];

// The index of an element of a centroid in `fp16_centroids`. Wide rows are permuted so that a thread loads 16
// adjacent elements of a slice at once, at the positions of the thread's elements in the slice's
// multiplications.
__device__ __forceinline__ u64 fp16_place(u32 cluster, u32 j) {
    const u64 start = (u64)cluster * FP16_DIM;
    if constexpr (!IS_WIDE) return start + j;
    const u32 of_slice = j % SLICE, step = of_slice % 16 / 4, high = of_slice % 4 / 2;
    return start + (j - of_slice) + step * 16 + high * 8 + of_slice / 16 * 2 + j % 2;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
// Loads four 8 x 8 matrices of fp16 numbers; each lane points to one of their rows.
// PTX ISA, Warp Level Matrix Multiply-Accumulate Instructions: ldmatrix.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const unsigned short* from) {
    const u32 address = (u32)__cvta_generic_to_shared(from);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// 16 rows x 16 elements times 16 elements x 8 centroids.
// PTX ISA, Warp Level Matrix Multiply-Accumulate Instructions: mma.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
__device__ __forceinline__ void load_matrices(u32 (&)[4], const unsigned short*) {}
__device__ __forceinline__ void multiply_add(float (&)[4], const u32 (&)[4], u32, u32) {}
#endif

__device__ __forceinline__ void bring_slice(const Fp16Buffers& buffers, unsigned char* stage, u32 tile, u32 slice) {
    constexpr u32 CHUNKS = SLICE_DIM / 8;
    const unsigned short* from = reinterpret_cast<const unsigned short*>(buffers.fp16_centroids) +
                                 (u64)tile * TILE * FP16_DIM + slice * SLICE_DIM;
    unsigned short* to = reinterpret_cast<unsigned short*>(stage);
    for (u32 i = threadIdx.x; i < TILE * CHUNKS; i += 32 * WARPS) {
        const u32 centroid = i / CHUNKS, chunk = i % CHUNKS * 8;
        copy_16(to + centroid * STRIDE + chunk, from + (u64)centroid * FP16_DIM + chunk);
    }
    unsigned char* squares = stage + TILE * STRIDE * 2;
    if (threadIdx.x < TILE / 4) {
        copy_16(squares + threadIdx.x * 16, buffers.half_squares + tile * TILE + threadIdx.x * 4);
    }
}

// The address of a lane's row for `load_matrices`, from the start of a stage: lanes 0 to 7 point to elements
// 0 to 7 of centroids 0 to 7, lanes 8 to 15 to elements 8 to 15 of these, lanes 16 to 31 to the same elements
// of centroids 8 to 15.
__device__ __forceinline__ const unsigned short* centroids_of(const unsigned char* stage) {
    const u32 lane = threadIdx.x % 32;
    return reinterpret_cast<const unsigned short*>(stage) + (lane % 8 + lane / 16 * 8) * STRIDE +
           lane / 8 % 2 * 8;
}

// Initialises the products of a part: the bias plus the centroids' half squares.
__device__ __forceinline__ void begin_products(Products& products, const unsigned char* stage, u32 part,
                                               float bias) {
    const float2* squares = reinterpret_cast<const float2*>(stage + TILE * STRIDE * 2);
#pragma unroll
    for (u32 n = 0; n < PART / 8; n++) {
        const float2 square = squares[(part * PART / 8 + n) * 4 + threadIdx.x % 4];
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            products[m][n][0] = products[m][n][2] = add(bias, square.x);
            products[m][n][1] = products[m][n][3] = add(bias, square.y);
        }
    }
}

// Adds products of 16 elements of rows with those of a part.
__device__ __forceinline__ void add_products(Products& products, const u32 (&a)[2][4],
                                             const unsigned short* centroids) {
#pragma unroll
    for (u32 n = 0; n < PART / 8; n += 2) {
        u32 b[4];
        load_matrices(b, centroids + n * 8 * STRIDE);
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            multiply_add(products[m][n], a[m], b[0], b[1]);
            multiply_add(products[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// The same as `multiply_tiles`, for wide rows.
template <typename RowOf, typename Use>
__device__ __forceinline__ void multiply_slices(const Fp16Buffers& buffers, RowOf&& row_of, float bias, u32 begin,
                                                u32 end, Use&& use) {
    unsigned char* stages = reinterpret_cast<unsigned char*>(shared);
    const u32 lane = threadIdx.x % 32, slices = (end - begin) * SLICES;
    bring_slice(buffers, stages, begin, 0);
    commit_copies();
    if (slices > 1) bring_slice(buffers, stages + STAGE_BYTES, begin + 1 / SLICES, 1 % SLICES);
    commit_copies();
    u32 rows[SLOTS];
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        rows[i] = row_of(threadIdx.x / 32 * 8 * SLOTS + lane / 4 + 8 * i);
    }
    Products products[TILE / PART];
    for (u32 i = 0; i < slices; i++) {
        const u32 tile = begin + i / SLICES, slice = i % SLICES;
        // 4 multiplications, each of two pairs of rows, in the operand order of `multiply_add`.
        u32 a[SLICE / 16][2][4];
#pragma unroll
        for (u32 slot = 0; slot < SLOTS; slot++) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 chunk = slice * (SLICE / 8) + lane % 4 * 2 + half;
                const unsigned char* from = buffers.fp16_rows + row_chunk(rows[slot], chunk);
                const uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
                a[half * 2][slot / 2][slot % 2] = words.x;
                a[half * 2][slot / 2][slot % 2 + 2] = words.y;
                a[half * 2 + 1][slot / 2][slot % 2] = words.z;
                a[half * 2 + 1][slot / 2][slot % 2 + 2] = words.w;
            }
        }
        wait_for_groups<1>();
        __syncthreads();
        const unsigned char* stage = stages + i % STAGES * STAGE_BYTES;
        if (i + 2 < slices) {
            bring_slice(buffers, stages + (i + 2) % STAGES * STAGE_BYTES, begin + (i + 2) / SLICES,
                        (i + 2) % SLICES);
        }
        commit_copies();
#pragma unroll
        for (u32 part = 0; part < TILE / PART; part++) {
            if (slice == 0) begin_products(products[part], stage, part, bias);
#pragma unroll
            for (u32 step = 0; step < SLICE / 16; step++) {
                add_products(products[part], a[step],
                             centroids_of(stage) + part * PART * STRIDE + step * 16);
            }
            if (slice == SLICES - 1) use(tile * (TILE / PART) + part, products[part]);
        }
    }
}

// Products of the rows of a block with the centroids of tiles `begin` to `end`. `row_of` maps a row's index
// in the block to its position; a thread's indices are 8 SLOTS warp + lane / 4 + 8 i. For each part of a
// tile, `use` gets its number and the products of the thread's rows with the thread's share of the part.
template <typename RowOf, typename Use>
__device__ __forceinline__ void multiply_tiles(const Fp16Buffers& buffers, RowOf&& row_of, float bias, u32 begin,
                                               u32 end, Use&& use) {
    if constexpr (IS_WIDE) return multiply_slices(buffers, row_of, bias, begin, end, use);
    unsigned char* stages = reinterpret_cast<unsigned char*>(shared);
    const u32 lane = threadIdx.x % 32;
    bring_slice(buffers, stages, begin, 0);
    commit_copies();
    if (begin + 1 < end) bring_slice(buffers, stages + STAGE_BYTES, begin + 1, 0);
    commit_copies();
    u32 a[STEPS][2][4];
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        const u32 row = row_of(threadIdx.x / 32 * 8 * SLOTS + lane / 4 + 8 * i);
        const auto word = [&](u32 chunk) {
            return __ldg(reinterpret_cast<const u32*>(buffers.fp16_rows + row_chunk(row, chunk)) + lane % 4);
        };
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            a[step][i / 2][i % 2] = word(2 * step);
            a[step][i / 2][i % 2 + 2] = word(2 * step + 1);
        }
    }
    for (u32 tile = begin; tile < end; tile++) {
        wait_for_groups<1>();
        __syncthreads();
        const unsigned char* stage = stages + (tile - begin) % STAGES * STAGE_BYTES;
        if (tile + 2 < end) {
            bring_slice(buffers, stages + (tile + 2 - begin) % STAGES * STAGE_BYTES, tile + 2, 0);
        }
        commit_copies();
#pragma unroll
        for (u32 part = 0; part < TILE / PART; part++) {
            Products products;
            begin_products(products, stage, part, bias);
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                add_products(products, a[step],
                             centroids_of(stage) + part * PART * STRIDE + step * 16);
            }
            use(tile * (TILE / PART) + part, products);
        }
    }
}
