// Products of rows and centroids in half precision on tensor cores, as every architecture from sm_80 on
// has them: what `assign_tiles.cu` is made of.

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
constexpr bool HAS_TILES = DIM <= 128;
#else
constexpr bool HAS_TILES = false;
#endif

constexpr u32 STEPS = HAS_TILES ? (DIM + 15) / 16 : 1;  // of 16 elements
constexpr u32 HALF_DIM = (DIM + 15) / 16 * 16;

constexpr u32 TILE = 64;   // centroids that are brought to shared memory at a time
constexpr u32 PART = 32;   // … and multiplied at a time
constexpr u32 SLOTS = 4;   // rows of a thread: of 32 rows of a warp, lane / 4 + 8 i
constexpr u32 WARPS = 4;   // of a block
constexpr u32 BLOCKS = 4;  // of a multiprocessor
constexpr u32 STAGES = 3;  // tiles in shared memory
constexpr u32 STRIDE = HALF_DIM + 8;  // of a centroid there; odd in units of 16 bytes
constexpr u32 STAGE_BYTES = TILE * STRIDE * 2 + TILE * 4;

// Products of SLOTS rows with 8 of each 32 centroids: [i / 2][n][i % 2 * 2 + which].
typedef float Sums[SLOTS / 2][PART / 8][4];

// Where an element of a centroid is among the halves of all.
__device__ __forceinline__ u64 half_place(u32 cluster, u32 j) {
    return (u64)cluster * HALF_DIM + j;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
__device__ __forceinline__ void copy_16(void* shared_to, const void* from) {
    const u32 to = (u32)__cvta_generic_to_shared(shared_to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `LATE` groups of copies are under way.
template <u32 LATE> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATE) : "memory");
}

// Four 8 x 8 matrices of halves, whose rows the lanes point to.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const unsigned short* from) {
    const u32 address = (u32)__cvta_generic_to_shared(from);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// 16 rows x 16 elements times 16 elements x 8 centroids.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
__device__ __forceinline__ void copy_16(void*, const void*) {}
__device__ __forceinline__ void commit_copies() {}
template <u32 LATE> __device__ __forceinline__ void wait_for_copies() {}
__device__ __forceinline__ void load_matrices(u32 (&)[4], const unsigned short*) {}
__device__ __forceinline__ void multiply_add(float (&)[4], const u32 (&)[4], u32, u32) {}
#endif

__device__ __forceinline__ void bring_tile(const Job& job, unsigned char* stage, u32 tile) {
    constexpr u32 CHUNKS = HALF_DIM / 8;
    const unsigned short* from = job.half_centroids + (u64)tile * TILE * HALF_DIM;
    unsigned short* to = reinterpret_cast<unsigned short*>(stage);
    for (u32 i = threadIdx.x; i < TILE * CHUNKS; i += 32 * WARPS) {
        copy_16(to + i / CHUNKS * STRIDE + i % CHUNKS * 8, from + (u64)i * 8);
    }
    unsigned char* squares = stage + TILE * STRIDE * 2;
    if (threadIdx.x < TILE / 4) {
        copy_16(squares + threadIdx.x * 16, job.half_squares + tile * TILE + threadIdx.x * 4);
    }
}

// Products of the rows of a block with the centroids of tiles `begin` to `end`. `row_of` says where the
// rows are that the block counts from 0; a thread's are 8 SLOTS warp + lane / 4 + 8 i. For each part of
// a tile, `use` gets its number and the products of the thread's rows with its share of the part.
template <typename RowOf, typename Use>
__device__ __forceinline__ void multiply_tiles(const Job& job, RowOf&& row_of, float bias, u32 begin,
                                               u32 end, Use&& use) {
    unsigned char* stages = reinterpret_cast<unsigned char*>(shared);
    const u32 lane = threadIdx.x % 32;
    bring_tile(job, stages, begin);
    commit_copies();
    if (begin + 1 < end) bring_tile(job, stages + STAGE_BYTES, begin + 1);
    commit_copies();
    u32 a[2][STEPS][4];
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        const u32 own = row_of(threadIdx.x / 32 * 8 * SLOTS + lane / 4 + 8 * i);
        const u32* row =
            reinterpret_cast<const u32*>(job.half_rows + (u64)own * HALF_DIM) + lane % 4;
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            a[i / 2][step][i % 2] = __ldg(row + step * 8);
            a[i / 2][step][i % 2 + 2] = __ldg(row + step * 8 + 4);
        }
    }
    for (u32 tile = begin; tile < end; tile++) {
        wait_for_copies<1>();
        __syncthreads();
        const unsigned char* stage = stages + (tile - begin) % STAGES * STAGE_BYTES;
        if (tile + 2 < end) {
            bring_tile(job, stages + (tile + 2 - begin) % STAGES * STAGE_BYTES, tile + 2);
        }
        commit_copies();
        // Lanes 0 to 7 point to centroids 0 to 7, elements 0 to 7; the next eight to elements 8 to
        // 15; the others to centroids 8 to 15.
        const unsigned short* centroids = reinterpret_cast<const unsigned short*>(stage) +
                                          (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8;
        const float2* squares = reinterpret_cast<const float2*>(stage + TILE * STRIDE * 2);
#pragma unroll
        for (u32 part = 0; part < TILE / PART; part++) {
            Sums sums;
#pragma unroll
            for (u32 n = 0; n < PART / 8; n++) {
                const float2 square = squares[(part * PART / 8 + n) * 4 + lane % 4];
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    sums[m][n][0] = sums[m][n][2] = add(bias, square.x);
                    sums[m][n][1] = sums[m][n][3] = add(bias, square.y);
                }
            }
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
#pragma unroll
                for (u32 n = 0; n < PART / 8; n += 2) {
                    u32 b[4];
                    load_matrices(b, centroids + (part * PART + n * 8) * STRIDE + step * 16);
#pragma unroll
                    for (u32 m = 0; m < 2; m++) {
                        multiply_add(sums[m][n], a[m][step], b[0], b[1]);
                        multiply_add(sums[m][n + 1], a[m][step], b[2], b[3]);
                    }
                }
            }
            use(tile * (TILE / PART) + part, sums);
        }
    }
}
