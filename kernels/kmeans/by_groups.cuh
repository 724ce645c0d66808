// Warpgroup products of rows and centroids (sm_90a), at twice the rate of single warps. The error analysis is
// that of `assign_tiles.cuh`; the sum is its p minus n, with n > |h(x)|^2 / 2: sums are negative, and the
// larger of two sums has the smaller bits. All terms are fp16 products.
//
// Two warpgroups have 64 rows each, and two more warps stream rows and centroids, in panels of two
// multiplications: centroids through a ring buffer of stages, rows once. If the rows to compare are listed, a
// warp gathers them into swizzled tiles. If the ring buffer holds more than a tile, the warpgroups take
// turns: one multiplies while the other examines its sums.
//
// Blocks are persistent: block b processes items b, b + gridDim.x, … of a launch. An item is a swizzled tile
// of 128 rows and some tiles of centroids.

#include "common/copy.cuh"
#include "common/wgmma.cuh"
#include "kmeans/halves.cuh"

constexpr u32 GROUPS = 2, THREADS = GROUPS * 128 + 128;
static_assert(GROUPS * 64 == IMAGE_ROWS, "a block has an image of rows");
constexpr u32 PANELS = (IMAGE_STEPS + 1) / 2;
static_assert(IMAGE_LOG == 1, "a panel has two steps");
// The pitch of a panel's rows, and the panel's offset in a swizzled tile.
__host__ __device__ constexpr u32 pitch_of(u32 panel) { return panel_pitch(IMAGE_STEPS, 2 * panel, IMAGE_LOG); }
__host__ __device__ constexpr u32 start_of(u32 panel, u32 rows) {
    return panel_start(IMAGE_STEPS, 2 * panel, IMAGE_LOG, rows);
}

constexpr u32 ROWS_IMAGE = IMAGE_ROWS * IMAGE_STEPS * 32, TILE_IMAGE = IMAGE_CENTROIDS * IMAGE_STEPS * 32;
constexpr u32 STAGE = IMAGE_CENTROIDS * 64;
constexpr bool TAKES_TURNS = PANELS + 2 <= GROUP_STAGES;
// Offsets in shared memory: the ring buffer, the rows, and the mbarriers of both.
constexpr u32 ROWS_AT = GROUP_STAGES * STAGE, FULL = ROWS_AT + GROUP_BUFFERS * ROWS_IMAGE;
constexpr u32 EMPTY = FULL + 8 * GROUP_STAGES, ROWS_FULL = EMPTY + 8 * GROUP_STAGES;
constexpr u32 ROWS_EMPTY = ROWS_FULL + 8 * GROUP_BUFFERS * PANELS;

// The number of tiles of `centroids` centroids.
__device__ __forceinline__ u32 tiles_of(u32 centroids) { return (centroids + IMAGE_CENTROIDS - 1) / IMAGE_CENTROIDS; }

// The centroid of a thread's sum at a line and a column of its 8 x 8 square; see `find_by_groups.cuh`.
__device__ __forceinline__ u32 centroid_in(u32 tile, u32 line, u32 column) {
    return tile * IMAGE_CENTROIDS + (line * 4 + column / 2) * 8 + threadIdx.x % 4 * 2 + column % 2;
}

// The bits of that sum, for one of the thread's two rows.
template <u32 HALF> __device__ __forceinline__ int bits_of(const float (&sums)[128], u32 line, u32 column) {
    return __float_as_int(sums[(line * 4 + column / 2) * 4 + HALF * 2 + column % 2]);
}

// The items of a launch: each tile of rows with each part of the tiles of centroids.
struct Span {
    u32 first, end, first_image, images, tiles, parts;

    __device__ __forceinline__ u32 image(u32 item) const { return first_image + item % images; }
    __device__ __forceinline__ u32 first_tile(u32 item) const { return item / images * tiles / parts; }
    __device__ __forceinline__ u32 end_tile(u32 item) const { return (item / images + 1) * tiles / parts; }
};

// The same for whole tiles of rows from the first on, without divisions.
struct WholeSpan {
    u32 first, end, tiles;

    __device__ __forceinline__ u32 image(u32 item) const { return item; }
    __device__ __forceinline__ u32 first_tile(u32) const { return 0; }
    __device__ __forceinline__ u32 end_tile(u32) const { return tiles; }
};

// Position in the ring buffer: stage index and mbarrier phase parity.
struct Turn {
    u32 stage = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == GROUP_STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

template <typename Items>
__device__ __forceinline__ void stream_centroids(const unsigned char* images, const Items& span, u32 memory) {
    Turn turn;
    for (u32 item = span.first + blockIdx.x; item < span.end; item += gridDim.x) {
        for (u32 tile = span.first_tile(item), end = span.end_tile(item); tile < end; ++tile) {
#pragma unroll
            for (u32 panel = 0; panel < PANELS; ++panel, turn.advance()) {
                const u32 full = memory + FULL + 8 * turn.stage, bytes = IMAGE_CENTROIDS * pitch_of(panel);
                barrier_wait(memory + EMPTY + 8 * turn.stage, turn.phase ^ 1);
                barrier_expect(full, bytes);
                bulk_copy(memory + turn.stage * STAGE,
                          images + (u64)tile * TILE_IMAGE + start_of(panel, IMAGE_CENTROIDS), bytes, full);
            }
        }
    }
}

template <typename Items>
__device__ __forceinline__ void stream_rows(const unsigned char* rows, const Items& span, u32 memory) {
    u32 turn = 0;
    for (u32 item = span.first + blockIdx.x; item < span.end; item += gridDim.x, ++turn) {
        const u32 buffer = turn % GROUP_BUFFERS, phase = turn / GROUP_BUFFERS & 1;
#pragma unroll
        for (u32 panel = 0; panel < PANELS; ++panel) {
            const u32 barrier = 8 * (buffer * PANELS + panel), bytes = IMAGE_ROWS * pitch_of(panel);
            const u32 start = start_of(panel, IMAGE_ROWS), full = memory + ROWS_FULL + barrier;
            barrier_wait(memory + ROWS_EMPTY + barrier, phase ^ 1);
            barrier_expect(full, bytes);
            bulk_copy(memory + ROWS_AT + buffer * ROWS_IMAGE + start, rows + (u64)span.image(item) * ROWS_IMAGE + start, bytes,
                      full);
        }
    }
}

// The same for listed rows, gathered by a warp.
template <typename Items>
__device__ __forceinline__ void collect_rows(const unsigned char* rows, const Compared& compared, const Items& span,
                                             u32 memory) {
    const auto number_at = [&](u32 place) { return compared.row(place < compared.count ? place : compared.count - 1); };
    u32 turn = 0;
    for (u32 item = span.first + blockIdx.x; item < span.end; item += gridDim.x, ++turn) {
        const u32 buffer = turn % GROUP_BUFFERS, phase = turn / GROUP_BUFFERS & 1;
        const u32 barriers = 8 * buffer * PANELS, image = span.image(item);
        u32 next = number_at(image * IMAGE_ROWS + Warp::rank());
        for (u32 panel = 0; panel < PANELS; ++panel) barrier_wait(memory + ROWS_EMPTY + barriers + 8 * panel, phase ^ 1);
#pragma unroll 1
        for (u32 place = Warp::rank(); place < IMAGE_ROWS; place += 32) {
            const u32 number = next;
            if (place + 32 < IMAGE_ROWS) next = number_at(image * IMAGE_ROWS + place + 32);
#pragma unroll
            for (u32 chunk = 0; chunk < 2 * IMAGE_STEPS; ++chunk) {
                const u32 to = buffer * ROWS_IMAGE + image_offset(IMAGE_STEPS, IMAGE_LOG, IMAGE_ROWS, place, chunk * 8);
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

// Passes the turn to the other warpgroup (`pass_turn`), or waits for it (`wait_for_turn`).
// PTX ISA, Parallel Synchronization and Communication Instructions: bar, barrier.
__device__ __forceinline__ void pass_turn(u32 group) {
    if (TAKES_TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
}
__device__ __forceinline__ void wait_for_turn(u32 group) {
    if (TAKES_TURNS) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}

// Multiplies, by one of two warpgroups: `task` gets the sums of a tile, for two rows of each thread.
template <typename Items, typename Task>
__device__ __forceinline__ void multiply_images(const Items& span, Task& task, u32 memory, u32 thread, u32 group) {
    float sums[128];
    Turn turn;
    const auto release = [&](u32 barrier) {
        if (thread == 0) barrier_arrive(memory + barrier);
    };
    u32 turns = 0;
    if (group == 1) pass_turn(group);
    for (u32 item = span.first + blockIdx.x; item < span.end; item += gridDim.x, ++turns) {
        const u32 buffer = turns % GROUP_BUFFERS, phase = turns / GROUP_BUFFERS & 1;
        const u32 rows = memory + ROWS_AT + buffer * ROWS_IMAGE, barriers = 8 * buffer * PANELS;
        const u32 begin = span.first_tile(item), end = span.end_tile(item);
        const u32 place = span.image(item) * IMAGE_ROWS + group * 64 + thread / 32 * 16 + thread % 32 / 4;
        task.begin(place);
        for (u32 tile = begin; tile < end; ++tile) {
            wait_for_turn(group);
            u32 before = 0;
            const auto release_panel = [&](u32 panel) {
                release(EMPTY + 8 * before);
                if (tile + 1 == end) release(ROWS_EMPTY + barriers + 8 * panel);
            };
#pragma unroll
            for (u32 panel = 0; panel < PANELS; ++panel, turn.advance()) {
                if (tile == begin) barrier_wait(memory + ROWS_FULL + barriers + 8 * panel, phase);
                barrier_wait(memory + FULL + 8 * turn.stage, turn.phase);
                const u32 pitch = pitch_of(panel);
                const u32 a = rows + start_of(panel, IMAGE_ROWS) + group * 64 * pitch;
                const u32 b = memory + turn.stage * STAGE;
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
                before = turn.stage;
            }
            // Not after the very last tile, as no one waits for the turn.
            if (group == 0 || tile + 1 < end || item + gridDim.x < span.end) pass_turn(group);
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
__device__ __forceinline__ void run_by_groups(const Halves& halves, const Compared& compared, const Items& span,
                                              Task&& task) {
    if (span.first + blockIdx.x >= span.end) return;
    u32 memory = shared_address(matrices), thread = threadIdx.x % 128;
    asm volatile("" : "+r"(memory), "+r"(thread));
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < GROUP_STAGES; ++stage) {
            barrier_init(memory + FULL + 8 * stage, 1);
            barrier_init(memory + EMPTY + 8 * stage, GROUPS);
        }
        for (u32 panel = 0; panel < GROUP_BUFFERS * PANELS; ++panel) {
            barrier_init(memory + ROWS_FULL + 8 * panel, 1);
            barrier_init(memory + ROWS_EMPTY + 8 * panel, GROUPS);
        }
        barrier_fence();
    }
    __syncthreads();
    const u32 group = threadIdx.x / 128;
    if (group == GROUPS) {
        // PTX ISA, Miscellaneous Instructions: setmaxnreg.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread == 0) stream_centroids(halves.half_centroids, span, memory);
        if (thread / 32 == 1 && compared.listed != nullptr) {
            collect_rows(halves.half_rows, compared, span, memory);
        } else if (thread == 32) {
            stream_rows(halves.half_rows, span, memory);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        multiply_images(span, task, memory, thread, group);
    }
}
