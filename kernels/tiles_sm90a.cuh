// The products of `tiles.cuh` as Hopper multiplies: four warps at a time, with rows and centroids read from
// shared memory by the tensor cores; a copy engine puts the centroids there. (Rows in registers are
// multiplied half as fast.)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr u32 TILE = 128;   // centroids that are brought to shared memory at a time
constexpr u32 PART = TILE;  // … and multiplied at a time
constexpr u32 SLOTS = 2;    // rows of a thread: of 16 rows of a warp, lane / 4 + 8 i
constexpr u32 WARPS = 16;   // of a block: four groups of four
constexpr u32 GROUPS = WARPS / 4;
constexpr u32 BLOCKS = 1;   // of a multiprocessor
constexpr u32 STAGES = 3;   // tiles in shared memory
// Centroids lie in panels of 64 elements, 128 bytes a centroid, whose chunks of 16 bytes are swizzled
// as the tensor cores want them: chunk c of centroid r is at c ^ (r % 8).
constexpr u32 PANELS = (HALF_DIM + 63) / 64;
constexpr u32 PANEL_BYTES = TILE * 128;
constexpr u32 SQUARES_BYTES = TILE * 4;
constexpr u32 ROWS_PANEL_BYTES = 8 * SLOTS * WARPS * 128;
constexpr u32 ROWS_START = STAGES * PANELS * PANEL_BYTES;
constexpr u32 SQUARES_START = ROWS_START + PANELS * ROWS_PANEL_BYTES;
constexpr u32 BARRIERS_START = SQUARES_START + STAGES * SQUARES_BYTES;

typedef float Sums[1][PART / 8][4];

__device__ __forceinline__ u64 half_place(u32 cluster, u32 j) {
    const u32 row = cluster % TILE, chunk = j % 64 / 8 ^ row % 8;
    return ((u64)(cluster / TILE) * PANELS + j / 64) * (PANEL_BYTES / 2) + row * 64 + chunk * 8 +
           j % 8;
}

// Barriers in shared memory, by address. A phase passes when as many have arrived as `init` says, and
// as many bytes as were expected.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_end(u32 barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred passed;\n"
        "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 passed, [%0], %1;\n"
        "@!passed bra WAIT;\n}\n" ::"r"(barrier), "r"(phase) : "memory");
}
// Bytes from global to shared memory, which then count at a barrier.
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Halves in shared memory, as the tensor cores are told: from this address on, in panels of 128-byte
// rows, 8 of which take 1024 bytes, swizzled.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// 64 rows of four warps x 16 elements times 16 elements x 128 centroids, added to `d` unless it is the
// first step.
template <bool IS_FIRST>
__device__ __forceinline__ void multiply_add(float (&d)[PART / 8][4], u32 rows, u32 centroids) {
    if constexpr (IS_FIRST) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "%64, %65, 0, 1, 1, 0, 0;"
            : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3]),
              "=f"(d[1][0]), "=f"(d[1][1]), "=f"(d[1][2]), "=f"(d[1][3]),
              "=f"(d[2][0]), "=f"(d[2][1]), "=f"(d[2][2]), "=f"(d[2][3]),
              "=f"(d[3][0]), "=f"(d[3][1]), "=f"(d[3][2]), "=f"(d[3][3]),
              "=f"(d[4][0]), "=f"(d[4][1]), "=f"(d[4][2]), "=f"(d[4][3]),
              "=f"(d[5][0]), "=f"(d[5][1]), "=f"(d[5][2]), "=f"(d[5][3]),
              "=f"(d[6][0]), "=f"(d[6][1]), "=f"(d[6][2]), "=f"(d[6][3]),
              "=f"(d[7][0]), "=f"(d[7][1]), "=f"(d[7][2]), "=f"(d[7][3]),
              "=f"(d[8][0]), "=f"(d[8][1]), "=f"(d[8][2]), "=f"(d[8][3]),
              "=f"(d[9][0]), "=f"(d[9][1]), "=f"(d[9][2]), "=f"(d[9][3]),
              "=f"(d[10][0]), "=f"(d[10][1]), "=f"(d[10][2]), "=f"(d[10][3]),
              "=f"(d[11][0]), "=f"(d[11][1]), "=f"(d[11][2]), "=f"(d[11][3]),
              "=f"(d[12][0]), "=f"(d[12][1]), "=f"(d[12][2]), "=f"(d[12][3]),
              "=f"(d[13][0]), "=f"(d[13][1]), "=f"(d[13][2]), "=f"(d[13][3]),
              "=f"(d[14][0]), "=f"(d[14][1]), "=f"(d[14][2]), "=f"(d[14][3]),
              "=f"(d[15][0]), "=f"(d[15][1]), "=f"(d[15][2]), "=f"(d[15][3])
            : "l"(descriptor(rows)), "l"(descriptor(centroids)));
    } else {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "%64, %65, 1, 1, 1, 0, 0;"
            : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
              "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
              "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
              "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
              "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
              "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
              "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
              "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
              "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
              "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
              "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]),
              "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
              "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]),
              "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
              "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),
              "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
            : "l"(descriptor(rows)), "l"(descriptor(centroids)));
    }
}

template <typename RowOf, typename Use>
__device__ __forceinline__ void multiply_tiles(const Job& job, RowOf&& row_of, float bias, u32 begin,
                                               u32 end, Use&& use) {
    // Panels begin at multiples of 1024 bytes.
    const u32 base = ((u32)__cvta_generic_to_shared(shared) + 1023) / 1024 * 1024;
    const auto full = [&](u32 stage) { return base + BARRIERS_START + stage * 8; };
    const auto empty = [&](u32 stage) { return base + BARRIERS_START + (STAGES + stage) * 8; };
    // Groups of warps take turns in multiplying, so that some look at products while others multiply:
    // left alone, they all do the same at the same time.
    const auto turn = [&](u32 group) {
        return base + BARRIERS_START + (2 * STAGES + group) * 8;
    };
    const u32 lane = threadIdx.x % 32, tiles = end - begin, group = threadIdx.x / 128;
    const bool is_first = threadIdx.x == 0;
    const auto bring = [&](u32 tile) {
        const u32 stage = tile % STAGES, bytes = PANELS * PANEL_BYTES;
        const unsigned short* from = job.half_centroids + (u64)(begin + tile) * (bytes / 2);
        barrier_expect(full(stage), bytes + SQUARES_BYTES);
        copy_bytes(base + stage * bytes, from, bytes, full(stage));
        copy_bytes(base + SQUARES_START + stage * SQUARES_BYTES,
                   job.half_squares + (begin + tile) * TILE, SQUARES_BYTES, full(stage));
    };
    if (is_first) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            barrier_init(full(stage), 1);
            barrier_init(empty(stage), WARPS);
        }
        for (u32 i = 0; i < GROUPS; i++) barrier_init(turn(i), 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (is_first) {
        for (u32 tile = 0; tile < STAGES && tile < tiles; tile++) bring(tile);
    }
    // All rows of the block, swizzled like the centroids. What threads have written is then shown to
    // the tensor cores.
    constexpr u32 CHUNKS = HALF_DIM / 8;
    for (u32 i = threadIdx.x; i < 8 * SLOTS * WARPS * CHUNKS; i += 32 * WARPS) {
        const u32 row = i / CHUNKS, chunk = i % CHUNKS;
        const u32 to = base + ROWS_START + chunk / 8 * ROWS_PANEL_BYTES + row * 128 +
                       (chunk % 8 ^ row % 8) * 16;
        const uint4 halves = __ldg(
            reinterpret_cast<const uint4*>(job.half_rows + (u64)row_of(row) * HALF_DIM) + chunk);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(halves.x),
                     "r"(halves.y), "r"(halves.z), "r"(halves.w) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const u32 rows = base + ROWS_START + group * (64 * 128);
    for (u32 tile = 0; tile < tiles; tile++) {
        const u32 stage = tile % STAGES;
        barrier_wait(full(stage), tile / STAGES % 2);
        Sums products;
        // The first group begins without having been given its turn.
        const u32 turns = tile + (group > 0 ? 1 : 0);
        if (turns > 0) barrier_wait(turn(group), (turns - 1) % 2);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            const u32 own = rows + step / 4 * ROWS_PANEL_BYTES + step % 4 * 32;
            const u32 panel = base + (stage * PANELS + step / 4) * PANEL_BYTES;
            if (step == 0) {
                multiply_add<true>(products[0], own, panel);
            } else {
                multiply_add<false>(products[0], own, panel + step % 4 * 32);
            }
            if (step == STEPS / 2) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // The next one may begin when the tensor cores have enough to do until it has.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (lane == 0) barrier_arrive(turn((group + 1) % GROUPS));
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        // The products are there now, and not before, which the compiler is told by seeming to change
        // them.
#pragma unroll
        for (u32 i = 0; i < PART / 2; i++) {
            asm volatile("" : "+f"(products[0][i / 4][i % 4])::"memory");
        }
        const u32 squares = base + SQUARES_START + stage * SQUARES_BYTES + lane % 4 * 8;
        Sums sums;
#pragma unroll
        for (u32 n = 0; n < PART / 8; n++) {
            float x, y;
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(squares + n * 32));
            x = add(bias, x), y = add(bias, y);
            sums[0][n][0] = add(products[0][n][0], x), sums[0][n][1] = add(products[0][n][1], y);
            sums[0][n][2] = add(products[0][n][2], x), sums[0][n][3] = add(products[0][n][3], y);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty(stage));
        // The tile before last has been read by all but the slowest: its place is filled again.
        if (is_first && tile > 0 && tile - 1 + STAGES < tiles) {
            barrier_wait(empty((tile - 1) % STAGES), (tile - 1) / STAGES % 2);
            bring(tile - 1 + STAGES);
        }
        use(begin + tile, sums);
    }
    __syncthreads();
    if (is_first) {
        for (u32 i = 0; i < 2 * STAGES + GROUPS; i++) barrier_end(base + BARRIERS_START + i * 8);
    }
}

#endif
