// Finding the nearest centroids by products of groups of four warps (sm_90a), which have twice the rate of those of single
// warps. What `assign_tiles.cuh` says of errors holds; what is summed is its p less n, where n is more than
// |h(x)|^2 / 2: so that sums are negative, and the larger one has the smaller bits. All terms are products of halves.
//
// Two groups have 64 rows each, and two more warps bring rows and centroids, in panels of two multiplications: centroids
// through a ring of stages, rows once. Blocks stay: block b does images b, b + gridDim.x, … of 128 rows. Where the rows to
// compare are listed, a warp collects them into images. Where the ring
// holds a tile and more, the groups take turns: one multiplies while the other looks at its sums.
//
// A thread's 64 sums of a row and a tile are an 8 x 8 square. Of all tiles, it keeps the least bits of each line of the
// square, of each column, and of the best two tiles. Whatever is not the best sum is in another line, column or tile: so
// they tell which it is, and what the second best is. Where two are equal they may not, but then it is not certain.

#include "common/copy.cuh"
#include "common/wgmma.cuh"
#include "kmeans/halves.cuh"

constexpr u32 GROUPS = 2, THREADS = GROUPS * 128 + 128;
static_assert(GROUPS * 64 == IMAGE_ROWS, "a block has an image of rows");
constexpr u32 PANELS = (IMAGE_STEPS + 1) / 2;
static_assert(IMAGE_LOG == 1, "a panel has two steps");
// The pitch of a panel's rows, and where it starts in an image.
__host__ __device__ constexpr u32 pitch_of(u32 panel) { return panel_pitch(IMAGE_STEPS, 2 * panel, IMAGE_LOG); }
__host__ __device__ constexpr u32 start_of(u32 panel, u32 rows) {
    return panel_start(IMAGE_STEPS, 2 * panel, IMAGE_LOG, rows);
}

constexpr u32 ROWS_IMAGE = IMAGE_ROWS * IMAGE_STEPS * 32, TILE_IMAGE = IMAGE_CENTROIDS * IMAGE_STEPS * 32;
constexpr u32 STAGE = IMAGE_CENTROIDS * 64;
constexpr bool TAKES_TURNS = PANELS + 2 <= GROUP_STAGES;
// In shared memory: the ring, the rows, and the barriers of both.
constexpr u32 ROWS_AT = GROUP_STAGES * STAGE, FULL = ROWS_AT + GROUP_BUFFERS * ROWS_IMAGE;
constexpr u32 EMPTY = FULL + 8 * GROUP_STAGES, ROWS_FULL = EMPTY + 8 * GROUP_STAGES;
constexpr u32 ROWS_EMPTY = ROWS_FULL + 8 * GROUP_BUFFERS * PANELS;

// More than the bits of any sum.
constexpr int WORST = 0x7fffffff;

// The images of rows to compare of a launch, and the tiles of centroids.
struct Span {
    u32 first, end, tiles;
};

// The stage of the ring that is next, and whether it was used an odd number of times.
struct Turn {
    u32 stage = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == GROUP_STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

__device__ __forceinline__ void stream_centroids(const unsigned char* images, const Span& span, u32 memory) {
    Turn turn;
    for (u32 image = span.first + blockIdx.x; image < span.end; image += gridDim.x) {
        for (u32 tile = 0; tile < span.tiles; ++tile) {
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

__device__ __forceinline__ void stream_rows(const unsigned char* rows, const Span& span, u32 memory) {
    u32 turn = 0;
    for (u32 image = span.first + blockIdx.x; image < span.end; image += gridDim.x, ++turn) {
        const u32 buffer = turn % GROUP_BUFFERS, phase = turn / GROUP_BUFFERS & 1;
#pragma unroll
        for (u32 panel = 0; panel < PANELS; ++panel) {
            const u32 barrier = 8 * (buffer * PANELS + panel), bytes = IMAGE_ROWS * pitch_of(panel);
            const u32 start = start_of(panel, IMAGE_ROWS), full = memory + ROWS_FULL + barrier;
            barrier_wait(memory + ROWS_EMPTY + barrier, phase ^ 1);
            barrier_expect(full, bytes);
            bulk_copy(memory + ROWS_AT + buffer * ROWS_IMAGE + start, rows + (u64)image * ROWS_IMAGE + start, bytes,
                      full);
        }
    }
}

// The same for listed rows, by a warp.
__device__ __forceinline__ void collect_rows(const unsigned char* rows, const Compared& compared, const Span& span,
                                             u32 memory) {
    const auto number_at = [&](u32 place) { return compared.row(place < compared.count ? place : compared.count - 1); };
    u32 turn = 0;
    for (u32 image = span.first + blockIdx.x; image < span.end; image += gridDim.x, ++turn) {
        const u32 buffer = turn % GROUP_BUFFERS, phase = turn / GROUP_BUFFERS & 1;
        const u32 barriers = 8 * buffer * PANELS;
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
        // Seen by products before the barriers are.
        wait_for_copies();
        products_see_shared();
        __syncwarp();
        if (Warp::rank() > 0) continue;
        for (u32 panel = 0; panel < PANELS; ++panel) barrier_arrive(memory + ROWS_FULL + barriers + 8 * panel);
    }
}

// What a thread keeps of one of its two rows.
struct Kept {
    int lines[8], columns[8];
    int first, second;  // the best two tiles, …
    u32 tile;           // … and the number of the best

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) lines[i] = columns[i] = WORST;
        first = second = WORST;
        tile = 0;
    }

    // Takes the sums of row HALF of a tile.
    template <u32 HALF> __device__ __forceinline__ void take(const float (&sums)[128], u32 number) {
        const auto bits = [&](u32 line, u32 column) {
            return __float_as_int(sums[(line * 4 + column / 2) * 4 + HALF * 2 + column % 2]);
        };
        int least = WORST;
#pragma unroll
        for (u32 line = 0; line < 8; ++line) {
            int of_line = bits(line, 0);
#pragma unroll
            for (u32 column = 1; column < 8; ++column) of_line = smaller(of_line, bits(line, column));
            lines[line] = smaller(lines[line], of_line);
            least = smaller(least, of_line);
        }
#pragma unroll
        for (u32 column = 0; column < 8; ++column) {
#pragma unroll
            for (u32 line = 0; line < 8; ++line) columns[column] = smaller(columns[column], bits(line, column));
        }
        second = smaller(second, larger(first, least));
        if (least < first) {
            first = least;
            tile = number;
        }
    }
};

// The least of eight numbers, the second, and where the least is.
struct LeastTwo {
    int first = WORST, second = WORST;
    u32 place = 0;

    explicit __device__ __forceinline__ LeastTwo(const int (&of)[8]) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            second = smaller(second, larger(first, of[i]));
            if (of[i] < first) {
                first = of[i];
                place = i;
            }
        }
    }
};

// Notes what was found for the row at a place, by a quad of threads that keep parts of it. Nothing waits for memory here.
__device__ __forceinline__ void note_row(const Halves& halves, const Kept& kept, u32 place, u32 count) {
    const u32 lane = threadIdx.x % 32;
    const LeastTwo line(kept.lines), column(kept.columns);
    int one = kept.first, two = smaller(kept.second, smaller(line.second, column.second));
    u32 cluster = kept.tile * IMAGE_CENTROIDS + (line.place * 4 + column.place / 2) * 8 + lane % 4 * 2 +
                  column.place % 2;
#pragma unroll
    for (u32 apart = 1; apart < 4; apart *= 2) {
        const int other_one = __shfl_xor_sync(0xffffffffu, one, apart);
        const int other_two = __shfl_xor_sync(0xffffffffu, two, apart);
        const u32 other = __shfl_xor_sync(0xffffffffu, cluster, apart);
        two = smaller(larger(one, other_one), smaller(two, other_two));
        if (other_one < one) one = other_one, cluster = other;
    }
    if (lane % 4 > 0 || place >= count) return;
    *reinterpret_cast<uint4*>(&halves.found[place]) = {(u32)one, (u32)two, cluster, 0};
}

// Lets the other group multiply, or waits until it is this group's turn.
__device__ __forceinline__ void pass_turn(u32 group) {
    if (TAKES_TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
}
__device__ __forceinline__ void wait_for_turn(u32 group) {
    if (TAKES_TURNS) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}

__device__ __forceinline__ void find_images(const Halves& halves, u32 count, const Span& span, u32 memory, u32 thread,
                                            u32 group) {
    float sums[128];
    Kept kept[2];
    Turn turn;
    const auto release = [&](u32 barrier) {
        if (thread == 0) barrier_arrive(memory + barrier);
    };
    u32 turns = 0;
    if (group == 1) pass_turn(group);
    for (u32 image = span.first + blockIdx.x; image < span.end; image += gridDim.x, ++turns) {
        const u32 buffer = turns % GROUP_BUFFERS, phase = turns / GROUP_BUFFERS & 1;
        const u32 rows = memory + ROWS_AT + buffer * ROWS_IMAGE, barriers = 8 * buffer * PANELS;
        kept[0].clear();
        kept[1].clear();
        for (u32 tile = 0; tile < span.tiles; ++tile) {
            wait_for_turn(group);
            u32 before = 0;
            const auto release_panel = [&](u32 panel) {
                release(EMPTY + 8 * before);
                if (tile + 1 == span.tiles) release(ROWS_EMPTY + barriers + 8 * panel);
            };
#pragma unroll
            for (u32 panel = 0; panel < PANELS; ++panel, turn.advance()) {
                if (tile == 0) barrier_wait(memory + ROWS_FULL + barriers + 8 * panel, phase);
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
            // Not after the last tile of all, which nobody waits for.
            if (group == 0 || tile + 1 < span.tiles || image + gridDim.x < span.end) pass_turn(group);
            products_wait<0>();
            release_panel(PANELS - 1);
            kept[0].take<0>(sums, tile);
            kept[1].take<1>(sums, tile);
        }
        const u32 place = image * IMAGE_ROWS + group * 64 + thread / 32 * 16 + thread % 32 / 4;
        note_row(halves, kept[0], place, count);
        note_row(halves, kept[1], place + 8, count);
    }
}

// Finds the nearest centroids of the rows of some images of those to compare. At most as many blocks as images.
extern "C" __global__ __launch_bounds__(THREADS, 1) void find_by_groups(Rounds rounds, Halves halves, u32 first, u32 end,
                                                                       u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    const Compared compared(rounds);
    const u32 images = (compared.count + IMAGE_ROWS - 1) / IMAGE_ROWS;
    if (images < end) end = images;
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
    const Span span = {first, end, (rounds.k + IMAGE_CENTROIDS - 1) / IMAGE_CENTROIDS};
    const u32 group = threadIdx.x / 128;
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread == 0) stream_centroids(halves.images, span, memory);
        if (thread / 32 == 1 && compared.listed != nullptr) {
            collect_rows(halves.half_rows, compared, span, memory);
        } else if (thread == 32) {
            stream_rows(halves.half_rows, span, memory);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        find_images(halves, compared.count, span, memory, thread, group);
    }
}
