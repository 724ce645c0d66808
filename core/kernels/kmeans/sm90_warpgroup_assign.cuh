// Warpgroup products of rows and centroids (sm_90a), at twice the rate of single warps. The error analysis is
// that of `assign_tiles.cuh`; the sum is its p minus n, with n > |h(x)|^2 / 2: sums are negative, and the
// larger of two sums has the smaller bits. All terms are fp16 products.
//
// Two warpgroups have 64 rows each, and two more warps stream rows and centroids, in panels of two
// multiplications: centroids through a ring buffer of stages, rows once. If the rows to compare are listed, a
// warp gathers them into swizzled tiles. If the ring buffer holds more than a tile, the warpgroups
// alternate (ping-pong): one multiplies while the other examines its sums.
//
// Blocks are persistent: block b processes items b, b + gridDim.x, … of a launch. An item is a swizzled tile
// of 128 rows and some tiles of centroids.

#include "common/copy.cuh"
#include "common/sm90_wgmma.cuh"
#include "kmeans/fp16.cuh"

constexpr u32 WARPGROUPS = 2, THREADS = WARPGROUPS * 128 + 128;
static_assert(WARPGROUPS * 64 == SWIZZLED_ROWS, "a block has a swizzled tile of rows");
constexpr u32 PANELS = (SWIZZLED_STEPS + 1) / 2;
static_assert(SWIZZLED_LOG == 1, "a panel has two steps");
// The pitch of a panel's rows, and the panel's offset in a swizzled tile.
__host__ __device__ constexpr u32 pitch_of(u32 panel) {
    return panel_pitch(SWIZZLED_STEPS, 2 * panel, SWIZZLED_LOG);
}
__host__ __device__ constexpr u32 start_of(u32 panel, u32 rows) {
    return panel_start(SWIZZLED_STEPS, 2 * panel, SWIZZLED_LOG, rows);
}

constexpr u32 ROW_TILE_BYTES = SWIZZLED_ROWS * SWIZZLED_STEPS * 32;
constexpr u32 CENTROID_TILE_BYTES = SWIZZLED_CENTROIDS * SWIZZLED_STEPS * 32;
constexpr u32 STAGE = SWIZZLED_CENTROIDS * 64;
constexpr bool PING_PONG = PANELS + 2 <= WARPGROUP_STAGES;
// Offsets in shared memory: the ring buffer, the rows, and the mbarriers of both.
constexpr u32 ROWS_AT = WARPGROUP_STAGES * STAGE, FULL = ROWS_AT + WARPGROUP_BUFFERS * ROW_TILE_BYTES;
constexpr u32 EMPTY = FULL + 8 * WARPGROUP_STAGES, ROWS_FULL = EMPTY + 8 * WARPGROUP_STAGES;
constexpr u32 ROWS_EMPTY = ROWS_FULL + 8 * WARPGROUP_BUFFERS * PANELS;

// The number of tiles of `centroids` centroids.
__device__ __forceinline__ u32 tiles_of(u32 centroids) {
    return (centroids + SWIZZLED_CENTROIDS - 1) / SWIZZLED_CENTROIDS;
}

// The centroid of a thread's sum at a line and a column of its 8 x 8 square; see `sm90_warpgroup_find.cuh`.
__device__ __forceinline__ u32 centroid_in(u32 tile, u32 line, u32 column) {
    return tile * SWIZZLED_CENTROIDS + (line * 4 + column / 2) * 8 + threadIdx.x % 4 * 2 + column % 2;
}

// The bits of that sum, for one of the thread's two rows.
template <u32 HALF> __device__ __forceinline__ int bits_of(const float (&sums)[128], u32 line, u32 column) {
    return __float_as_int(sums[(line * 4 + column / 2) * 4 + HALF * 2 + column % 2]);
}

// The items of a launch: each tile of rows with each part of the tiles of centroids.
struct Span {
    u32 first, end, first_row_tile, row_tiles, tiles, parts;

    __device__ __forceinline__ u32 row_tile(u32 item) const { return first_row_tile + item % row_tiles; }
    __device__ __forceinline__ u32 first_tile(u32 item) const { return item / row_tiles * tiles / parts; }
    __device__ __forceinline__ u32 end_tile(u32 item) const { return (item / row_tiles + 1) * tiles / parts; }
};

// The same for whole tiles of rows from the first on, without divisions.
struct WholeSpan {
    u32 first, end, tiles;

    __device__ __forceinline__ u32 row_tile(u32 item) const { return item; }
    __device__ __forceinline__ u32 first_tile(u32) const { return 0; }
    __device__ __forceinline__ u32 end_tile(u32) const { return tiles; }
};

template <typename Items>
__device__ __forceinline__ void stream_centroids(const unsigned char* centroids, const Items& span, u32 memory) {
    RingPosition<WARPGROUP_STAGES> position;
    for (u32 item = span.first + blockIdx.x; item < span.end; item += gridDim.x) {
        for (u32 tile = span.first_tile(item), end = span.end_tile(item); tile < end; ++tile) {
#pragma unroll
            for (u32 panel = 0; panel < PANELS; ++panel, position.advance()) {
                const u32 full = memory + FULL + 8 * position.stage, bytes = SWIZZLED_CENTROIDS * pitch_of(panel);
                barrier_wait(memory + EMPTY + 8 * position.stage, position.parity ^ 1);
                barrier_expect(full, bytes);
                bulk_copy(memory + position.stage * STAGE,
                          centroids + (u64)tile * CENTROID_TILE_BYTES + start_of(panel, SWIZZLED_CENTROIDS), bytes,
                          full);
            }
        }
    }
}

template <typename Items>
__device__ __forceinline__ void stream_rows(const unsigned char* rows, const Items& span, u32 memory) {
    u32 item_number = 0;
    for (u32 item = span.first + blockIdx.x; item < span.end; item += gridDim.x, ++item_number) {
        const u32 buffer = item_number % WARPGROUP_BUFFERS, parity = item_number / WARPGROUP_BUFFERS & 1;
#pragma unroll
        for (u32 panel = 0; panel < PANELS; ++panel) {
            const u32 barrier = 8 * (buffer * PANELS + panel), bytes = SWIZZLED_ROWS * pitch_of(panel);
            const u32 start = start_of(panel, SWIZZLED_ROWS), full = memory + ROWS_FULL + barrier;
            barrier_wait(memory + ROWS_EMPTY + barrier, parity ^ 1);
            barrier_expect(full, bytes);
            bulk_copy(memory + ROWS_AT + buffer * ROW_TILE_BYTES + start,
                      rows + (u64)span.row_tile(item) * ROW_TILE_BYTES + start, bytes, full);
        }
    }
}

// The same for listed rows, gathered by a warp.
template <typename Items>
__device__ __forceinline__ void collect_rows(const unsigned char* rows, const Compared& compared, const Items& span,
                                             u32 memory) {
    const auto number_at = [&](u32 place) { return compared.row(place < compared.count ? place : compared.count - 1); };
    u32 item_number = 0;
    for (u32 item = span.first + blockIdx.x; item < span.end; item += gridDim.x, ++item_number) {
        const u32 buffer = item_number % WARPGROUP_BUFFERS, parity = item_number / WARPGROUP_BUFFERS & 1;
        const u32 barriers = 8 * buffer * PANELS, row_tile = span.row_tile(item);
        u32 next = number_at(row_tile * SWIZZLED_ROWS + Warp::rank());
        for (u32 panel = 0; panel < PANELS; ++panel) {
            barrier_wait(memory + ROWS_EMPTY + barriers + 8 * panel, parity ^ 1);
        }
#pragma unroll 1
        for (u32 place = Warp::rank(); place < SWIZZLED_ROWS; place += 32) {
            const u32 number = next;
            if (place + 32 < SWIZZLED_ROWS) next = number_at(row_tile * SWIZZLED_ROWS + place + 32);
#pragma unroll
            for (u32 chunk = 0; chunk < 2 * SWIZZLED_STEPS; ++chunk) {
                const u32 to = buffer * ROW_TILE_BYTES +
                               swizzled_offset(SWIZZLED_STEPS, SWIZZLED_LOG, SWIZZLED_ROWS, place, chunk * 8);
                copy_16(matrices + ROWS_AT + to, rows + row_chunk(number, chunk));
            }
        }
        // Copies must be visible to products before the mbarriers complete.
        wait_for_copies();
        products_see_shared();
        __syncwarp();
        if (Warp::rank() > 0) continue;
        for (u32 panel = 0; panel < PANELS; ++panel) barrier_arrive(memory + ROWS_FULL + barriers + 8 * panel);
    }
}

// Lets the other warpgroup multiply (`ping_pong_arrive`), or waits until it does so (`ping_pong_wait`).
// PTX ISA, Parallel Synchronization and Communication Instructions: bar, barrier.
__device__ __forceinline__ void ping_pong_arrive(u32 warpgroup) {
    if (PING_PONG) asm volatile("bar.arrive %0, 256;" ::"r"(2 - warpgroup) : "memory");
}
// PTX ISA, Parallel Synchronization and Communication Instructions: bar, barrier.
__device__ __forceinline__ void ping_pong_wait(u32 warpgroup) {
    if (PING_PONG) asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
}

// Multiplies, by one of two warpgroups: `task` gets the sums of a tile, for two rows of each thread.
template <typename Items, typename Task>
__device__ __forceinline__ void multiply_swizzled(const Items& span, Task& task, u32 memory, u32 thread,
                                                  u32 warpgroup) {
    float sums[128];
    RingPosition<WARPGROUP_STAGES> position;
    const auto release = [&](u32 barrier) {
        if (thread == 0) barrier_arrive(memory + barrier);
    };
    u32 item_number = 0;
    if (warpgroup == 1) ping_pong_arrive(warpgroup);
    for (u32 item = span.first + blockIdx.x; item < span.end; item += gridDim.x, ++item_number) {
        const u32 buffer = item_number % WARPGROUP_BUFFERS, parity = item_number / WARPGROUP_BUFFERS & 1;
        const u32 rows = memory + ROWS_AT + buffer * ROW_TILE_BYTES, barriers = 8 * buffer * PANELS;
        const u32 begin = span.first_tile(item), end = span.end_tile(item);
        const u32 place = span.row_tile(item) * SWIZZLED_ROWS + warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
        task.begin(place);
        for (u32 tile = begin; tile < end; ++tile) {
            ping_pong_wait(warpgroup);
            u32 before = 0;
            const auto release_panel = [&](u32 panel) {
                release(EMPTY + 8 * before);
                if (tile + 1 == end) release(ROWS_EMPTY + barriers + 8 * panel);
            };
#pragma unroll
            for (u32 panel = 0; panel < PANELS; ++panel, position.advance()) {
                if (tile == begin) barrier_wait(memory + ROWS_FULL + barriers + 8 * panel, parity);
                barrier_wait(memory + FULL + 8 * position.stage, position.parity);
                const u32 pitch = pitch_of(panel);
                const u32 a = rows + start_of(panel, SWIZZLED_ROWS) + warpgroup * 64 * pitch;
                const u32 b = memory + position.stage * STAGE;
                products_fence();
#pragma unroll
                for (u32 step = 0; step < pitch / 32; ++step) {
                    add_products(sums, descriptor(a + 32 * step, pitch), descriptor(b + 32 * step, pitch),
                                 panel | step);
                }
                products_commit();
                if (panel > 0) {
                    products_wait<1>();
                    release_panel(panel - 1);
                }
                before = position.stage;
            }
            // Not after the very last tile, as the other warpgroup waits no more.
            if (warpgroup == 0 || tile + 1 < end || item + gridDim.x < span.end) ping_pong_arrive(warpgroup);
            products_wait_for(sums);
            release_panel(PANELS - 1);
            task.template take<0>(sums, tile);
            task.template take<1>(sums, tile);
        }
        task.end(place);
    }
}

// Runs a task over the items of a launch, by a block.
template <typename Items, typename Task>
__device__ __forceinline__ void run_warpgroups(const Fp16Buffers& buffers, const Compared& compared,
                                               const Items& span, Task&& task) {
    if (span.first + blockIdx.x >= span.end) return;
    // Forced into registers: otherwise loops read special registers again.
    u32 memory = shared_address(matrices), thread = threadIdx.x % 128;
    asm volatile("" : "+r"(memory), "+r"(thread));
    if (threadIdx.x == 0) {
        init_ring<WARPGROUP_STAGES>(memory + FULL, memory + EMPTY, WARPGROUPS);
        for (u32 panel = 0; panel < WARPGROUP_BUFFERS * PANELS; ++panel) {
            barrier_init(memory + ROWS_FULL + 8 * panel, 1);
            barrier_init(memory + ROWS_EMPTY + 8 * panel, WARPGROUPS);
        }
        barrier_fence();
    }
    __syncthreads();
    const u32 warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        lower_registers<PRODUCER_REGISTERS>();
        if (thread == 0) stream_centroids(buffers.fp16_centroids, span, memory);
        if (thread / 32 == 1 && compared.listed != nullptr) {
            collect_rows(buffers.fp16_rows, compared, span, memory);
        } else if (thread == 32) {
            stream_rows(buffers.fp16_rows, span, memory);
        }
    } else {
        raise_registers<consumer_registers(WARPGROUPS)>();
        multiply_swizzled(span, task, memory, thread, warpgroup);
    }
}
