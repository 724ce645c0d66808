// Lower bounds on the distances of rows to candidates, from 8-bit quantised codes on tensor cores; pairs that
// the bounds do not decide are computed exactly.
//
// With c the centre, `inverse` the number of steps in 1 and q the codes of row x, x is within its residual
// r(x) of c + q / inverse, in steps. For two rows with codes q and p, in steps:
//   |x - y| >= |q - p| - r(x) - r(y), and |q - p|^2 = |q|^2 + |p|^2 - 2 q.p is exact in integers.
// Every bound is rounded in favour of computing a pair.

#include "seeding/shares.cuh"

constexpr u32 MULTIPLIED = (DIM + 31) / 32;       // multiplications of 32 elements each
constexpr u32 ROW_WORDS = MULTIPLIED * 8;
constexpr u32 CANDIDATE_STRIDE = ROW_WORDS + 4;   // odd in units of 16 bytes
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
constexpr bool HAS_BOUNDS = DIM > MOST_PAIRED;
#else
constexpr bool HAS_BOUNDS = false;
#endif

// 16 rows x 32 elements times 32 elements x 8 candidates, in int8.
// PTX ISA, Warp Level Matrix Multiply-Accumulate Instructions: mma.
__device__ __forceinline__ void multiply_words(int (&sum)[4], uint4 a, u32 b0, u32 b1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#endif
}

// The address of a word of a row, 4 codes, in `words`: of every 16 rows, rows 0 to 7 have the first and third
// of a lane's words, rows 8 to 15 the second and fourth.
__device__ __forceinline__ u32* word_of(const Bounds& bounds, u32 row, u32 word) {
    const u32 lane = row % 8 * 4 + word % 4, of_lane = row / 8 % 2 + word / 4 % 2 * 2;
    u32* words = reinterpret_cast<u32*>(bounds.words);
    return words + (((u64)(row / 16) * MULTIPLIED + word / 8) * 32 + lane) * 4 + of_lane;
}

// Quantises rows, and pads them to a multiple of 32 rows. A warp per row.
extern "C" __global__ __launch_bounds__(SEED_THREADS) void round_to_words(Seeding seeding, Bounds bounds) {
    const u32 row = blockIdx.x * (SEED_THREADS / 32) + threadIdx.x / 32, lane = Warp::rank();
    if (!HAS_BOUNDS || row >= (seeding.count + 31) / 32 * 32) return;
    const bool is_row = row < seeding.count;
    double left = 0, length = 0, from_origin = 0;
    int square = 0;
    for (u32 word = lane; word < ROW_WORDS; word += 32) {
        u32 bytes = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 j = word * 4 + i;
            if (!is_row || j >= DIM) continue;
            const double x = seeding.rows[(u64)row * DIM + j];
            const double steps = multiply(add(x, -bounds.centre[j]), bounds.inverse);
            const double whole = fmin(fmax(rint(steps), -127.0), 127.0);
            const int number = (int)whole;
            const double difference = add(steps, -whole);
            left = fused(difference, difference, left);
            length = fused(steps, steps, length);
            from_origin = fused(x, x, from_origin);
            square += number * number;
            bytes |= ((u32)number & 0xff) << (8 * i);
        }
        *word_of(bounds, row, word) = bytes;
    }
    left = add_lanes(left), length = add_lanes(length), from_origin = add_lanes(from_origin);
    square = (int)add_lanes((double)square);
    if (lane != 0 || !is_row) return;
    bounds.squares[row] = square;
    // These factors exceed the rounding errors of this function by far.
    const double residual = add(multiply(root(left), 1.0 + 1e-9), multiply(root(length), 1e-12));
    bounds.residuals[row] = __double2float_ru(residual);
    const float norm = __double2float_ru(multiply(root(from_origin), 1.0 + 1e-9));
    atomicMax(&seeding.state->longest, __float_as_uint(norm));
}

// The factors turning a cost into an upper bound, in steps, on the distances of all rows at most that far away.
struct Slack {
    float factor, absolute, squares, inverse;
};

// The error of the contract's own sum: see `Rounding` in src/device/cpu/quantize/base.rs.
__device__ __forceinline__ Slack slack_of(const Seeding& seeding, const Bounds& bounds) {
    const double terms = DIM + 8;
    const double relative = terms * Limits<Scalar>::epsilon();
    const double absolute = 4 * terms * Limits<Scalar>::smallest() * Limits<Scalar>::epsilon();
    Slack slack;
    slack.factor = __double2float_ru(1.0 + 2.0 * relative);
    slack.absolute = __double2float_ru(2.0 * absolute);
    const float norm = __uint_as_float(seeding.state->longest);
    // For products: |q - x|^2 is at most this plus twice (distance - 1).
    const double squares = 2.0 * norm * (double)norm * (1.0 + 2.0 * relative) + 4.0 * absolute;
    slack.squares = __double2float_ru(squares * (1.0 + 1e-9));
    slack.inverse = __double2float_ru(bounds.inverse);
    return slack;
}

__device__ __forceinline__ float rounded_up(float x) { return x; }
__device__ __forceinline__ float rounded_up(double x) { return __double2float_ru(x); }

__device__ __forceinline__ float steps_of(const Slack& slack, Real cost, float residual) {
    float square;
    if constexpr (SUM == PRODUCTS) {
        square = fmaxf(__fmaf_ru(2.0f, rounded_up(threshold_of(cost)), slack.squares), 0.0f);
    } else {
        square = __fmaf_ru(rounded_up(cost), slack.factor, slack.absolute);
    }
    return __fmaf_ru(__fsqrt_ru(square), slack.inverse, residual);
}

// The distance of two rows, summed as in the contract.
__device__ __forceinline__ Real distance_between(const Scalar* a, const Scalar* b) {
    constexpr u32 TOGETHER = 32, LEFT = DIM % TOGETHER;
    // Prefetches the rest of a row while its first elements are summed.
    for (u32 j = TOGETHER; j < DIM; j += LINE / sizeof(Scalar)) prefetch(b + j);
    Total total = 0;
    for (u32 j = 0; j + TOGETHER <= DIM; j += TOGETHER) {
        Scalar x[TOGETHER], y[TOGETHER];
        load(x, a + j);
        load(y, b + j);
        total = add_pair(x, y, total);
    }
    for (u32 j = DIM - LEFT; j < DIM; j++) {
        const Scalar x[1] = {a[j]}, y[1] = {b[j]};
        total = add_pair(x, y, total);
    }
    return distance_of(total, Bits{0, 0});
}

// Lists the pairs of 32 rows from `start` on and 8 candidates from `first` on that the bounds do not decide.
// `radius` and `square` belong to a lane's row.
__device__ __forceinline__ void list_pairs(const Seeding& seeding, const Bounds& bounds, const u32* candidates,
                                           const int* squares, const float* residuals, u32 first, u32 drawn,
                                           u32 start, u32 block_start, float radius, int square, u32* count,
                                           u32* pairs) {
    const u32 lane = Warp::rank();
    __syncwarp();
    int sums[2][4] = {};
    const uint4* words = bounds.words + (u64)(start / 16) * MULTIPLIED * 32 + lane;
    const u32* b = candidates + (first + lane / 4) * CANDIDATE_STRIDE + lane % 4;
#pragma unroll 4
    for (u32 i = 0; i < MULTIPLIED; i++) {
        multiply_words(sums[0], __ldg(words + i * 32), b[i * 8], b[i * 8 + 4]);
        multiply_words(sums[1], __ldg(words + (MULTIPLIED + i) * 32), b[i * 8], b[i * 8 + 4]);
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 candidate = first + lane % 4 * 2 + i;
        const int square_of_candidate = squares[candidate];
        const float residual = residuals[candidate];
#pragma unroll
        for (u32 part = 0; part < 4; part++) {
            const u32 row = part * 8 + lane / 4;
            const float most = __fadd_ru(__shfl_sync(0xffffffff, radius, row), residual);
            const int squared_distance = __shfl_sync(0xffffffff, square, row) + square_of_candidate -
                                         2 * sums[part / 2][part % 2 * 2 + i];
            const bool is_decided = __fmul_ru(most, most) < __int2float_rd(squared_distance);
            if (is_decided || start + row >= seeding.count || candidate >= drawn) continue;
            pairs[atomicAdd(count, 1)] = (start - block_start + row) * 32 + candidate;
        }
    }
}

// Dynamic shared memory: CANDIDATE_STRIDE words per candidate, in whole groups of 8, and per warp 32 words
// for each candidate and 32 more. A warp takes 32 of a block's rows at a time.
extern "C" __global__ __launch_bounds__(SEED_THREADS, RESIDENT) void compare_bounds(
    Seeding seeding, Bounds bounds, u32 drawn) {
    __shared__ PartialGains partial;
    __shared__ u32 listed[SEED_THREADS / 32], rows[MOST_CANDIDATES];
    __shared__ int squares[MOST_CANDIDATES];
    __shared__ float residuals[MOST_CANDIDATES];
    if (!HAS_BOUNDS || !is_going_on(seeding)) return;
    const u32 padded = (drawn + 7) / 8 * 8, lane = Warp::rank(), warp = threadIdx.x / 32;
    u32* candidates = reinterpret_cast<u32*>(shared);
    u32* pairs = candidates + padded * CANDIDATE_STRIDE + warp * 32 * (drawn + 1);
    clear(partial);
    if (lane == 0) listed[warp] = 0;
    for (u32 i = threadIdx.x; i < padded * ROW_WORDS; i += SEED_THREADS) {
        const u32 candidate = i / ROW_WORDS, word = i % ROW_WORDS;
        const u32 row = candidate < drawn ? seeding.candidates[candidate] : 0;
        candidates[candidate * CANDIDATE_STRIDE + word] = *word_of(bounds, row, word);
        if (word == 0) {
            rows[candidate] = row;
            squares[candidate] = bounds.squares[row];
            residuals[candidate] = bounds.residuals[row];
        }
    }
    __syncthreads();
    const Slack slack = slack_of(seeding, bounds);
    const BlockRows block = rows_of_block(seeding);
    pay(seeding, block);
    const u32 first_row = block.first, end = block.end;
    const LastChoice chosen = chosen_last(seeding);
    for (u32 start = first_row + warp * 32; start < end; start += SEED_THREADS) {
        const u32 row = min(start + lane, end - 1);
        const Cost before = cost_before(seeding, chosen, row);
        const Real cost = cost_now(seeding, chosen, row, before);
        // All lanes have read costs and `lowered` before these are written: lanes past the end read the last
        // row's.
        __syncwarp();
        if (start + lane < end) {
            if (before.lowered >> chosen.best & 1) seeding.costs[row] = cost;
            if (chosen.is_first || before.lowered != 0) seeding.lowered[row] = 0;
        }
        const float radius = steps_of(slack, cost, bounds.residuals[row]);
        for (u32 first = 0; first < drawn; first += 8) {
            list_pairs(seeding, bounds, candidates, squares, residuals, first, drawn, start, first_row,
                       radius, bounds.squares[row], &listed[warp], pairs);
        }
        __syncwarp();
        u32 count = listed[warp];
        __syncwarp();
        // Computes one listed pair per lane until no rows are left.
        while (count >= 32 || (start + SEED_THREADS >= end && count > 0)) {
            const u32 left = count < 32 ? 0 : count - 32;
            if (left + lane < count) {
                const u32 pair = pairs[left + lane], candidate = pair % 32, row = first_row + pair / 32;
                const Real distance = distance_between(seeding.rows + (u64)rows[candidate] * DIM,
                                                       seeding.rows + (u64)row * DIM);
                const Real cost = seeding.costs[row];
                if (distance < cost) {
                    add_gain(seeding, partial.gains[pair / 32 / SHARE_ROWS][candidate], row, cost, distance);
                    seeding.distances[(u64)candidate * seeding.count + row] = distance;
                    atomicOr(&seeding.lowered[row], 1u << candidate);
                }
            }
            count = left;
            __syncwarp();
        }
        if (lane == 0) listed[warp] = count;
        __syncwarp();
    }
    finish(seeding, partial, block, drawn);
}
