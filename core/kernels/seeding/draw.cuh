// Draws candidate rows in proportion to their shares, after the best candidate of the step before was taken.

#include "seeding/shares.cuh"

// A 128-bit integer.
struct Wide {
    u64 high, low;
};

__device__ __forceinline__ Wide plus(Wide a, Wide b) {
    const u64 low = a.low + b.low;
    return {a.high + b.high + (low < a.low), low};
}

__device__ __forceinline__ Wide minus(Wide a, Wide b) {
    return {a.high - b.high - (a.low < b.low), a.low - b.low};
}

__device__ __forceinline__ bool is_less(Wide a, Wide b) {
    return a.high < b.high || (a.high == b.high && a.low < b.low);
}

// The inclusive prefix sum over the lanes of a warp.
__device__ __forceinline__ Wide up_to_lane(Wide sum) {
    for (u32 stride = 1; stride < 32; stride *= 2) {
        const Wide before = {__shfl_up_sync(0xffffffff, sum.high, stride),
                             __shfl_up_sync(0xffffffff, sum.low, stride)};
        if (Warp::rank() >= stride) sum = plus(sum, before);
    }
    return sum;
}

// total * drawn / 2^53, rounded down, for a total below 2^96 and 53 random bits.
__device__ __forceinline__ Wide part_of(Wide total, u64 drawn) {
    constexpr u32 DRAWN = 53;
    const u64 upper = total.high << (64 - DRAWN) | total.low >> DRAWN;
    const u64 lower = total.low & ((1ull << DRAWN) - 1);
    const u64 rest = __umul64hi(lower, drawn) << (64 - DRAWN) | lower * drawn >> DRAWN;
    return plus({__umul64hi(upper, drawn), upper * drawn}, {0, rest});
}

// Takes the best candidate of the last step, and draws the candidates of the next, unless steps end. One
// block of 1,024 threads: a thread sums some adjacent blocks of rows, a warp draws a candidate.
extern "C" __global__ __launch_bounds__(1024) void draw_candidates(Seeding seeding, u32 drawn) {
    __shared__ Wide up_to[1024], of_warps[32];
    constexpr u32 PARTS = SHARE_ROWS / 32;
    // The state is loaded first, so that its latency overlaps the computation.
    const State state = *seeding.state;
    if (state.stop != GOING_ON) return;
    const u32 lane = Warp::rank(), warp = threadIdx.x / 32;
    const u32 blocks = seeding.blocks, all_parts = parts_of(seeding.count);
    const u32 per_thread = (blocks + 1023) / 1024, first = min(threadIdx.x * per_thread, blocks);
    const u32 chosen = state.chosen + (state.compared > 0);
    const u64 random = warp < drawn && chosen < seeding.k ? seeding.random[(u64)(chosen - 1) * drawn + warp] : 0;
    const u32 best = state.compared > 0 ? best_candidate(seeding) : state.best;
    const u32 row_of_best = seeding.candidates[best];
    // No shares exist before the first row is chosen.
    const bool is_owed = state.compared > 0 && state.chosen > 0;
    const auto total_of = [&](u32 block) {
        return seeding.block_totals[block] - (is_owed ? seeding.block_taken[(u64)best * blocks + block] : 0);
    };
    Wide sum = {0, 0};
    for (u32 i = first; i < min(first + per_thread, blocks); i++) sum = plus(sum, {0, total_of(i)});
    sum = up_to_lane(sum);
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    const Wide of_warp = up_to_lane(of_warps[lane]);
    const u32 before_warp = (warp + 31) % 32;
    const Wide before = {__shfl_sync(0xffffffff, of_warp.high, before_warp),
                         __shfl_sync(0xffffffff, of_warp.low, before_warp)};
    if (warp > 0) sum = plus(sum, before);
    up_to[threadIdx.x] = sum;
    __syncthreads();
    const Wide total = up_to[1023];
    // A total below 2^50, half of the least value of the largest share after scaling.
    const bool is_small = total.high == 0 && total.low >> 50 == 0 && state.scaled != chosen;
    const u32 stop = chosen == seeding.k ? ALL_CHOSEN : is_small ? SMALL_SHARES : GOING_ON;
    if (threadIdx.x == 0) {
        if (state.compared > 0) {
            seeding.chosen[state.chosen] = row_of_best;
            seeding.state->chosen = chosen;
            seeding.state->best = best;
            seeding.state->is_owed = is_owed;
        }
        seeding.state->compared = stop == GOING_ON ? drawn : 0;
        seeding.state->stop = stop;
    }
    if (stop != GOING_ON || warp >= drawn) return;
    if (lane == 0) seeding.gains[warp] = {0, 0};
    Wide left = part_of(total, random >> 11);
    // The first thread at which the prefix sum exceeds the drawn value, and the first such block of that
    // thread.
    u32 low = 0, high = 1023;
    while (low < high) {
        const u32 middle = (low + high) / 2;
        if (is_less(left, up_to[middle])) high = middle;
        else low = middle + 1;
    }
    if (low > 0) left = minus(left, up_to[low - 1]);
    u32 block = low * per_thread;
    for (; block + 1 < min(low * per_thread + per_thread, blocks); block++) {
        const Wide total_of_block = {0, total_of(block)};
        if (is_less(left, total_of_block)) break;
        left = minus(left, total_of_block);
    }
    // The block's first part of SHARE_ROWS rows.
    const u32 first_part = block * (seeding.together / SHARE_ROWS);
    const bool is_there = lane < seeding.together / SHARE_ROWS && first_part + lane < all_parts;
    u64 total_of_part = is_there ? seeding.totals[first_part + lane] : 0;
    if (is_there && is_owed) total_of_part -= seeding.taken[(u64)best * all_parts + first_part + lane];
    const Wide of_parts = up_to_lane({0, total_of_part});
    const u32 beyond_left = __ballot_sync(0xffffffff, is_less(left, of_parts));
    const u32 drawn_part = beyond_left != 0 ? __ffs(beyond_left) - 1 : 31;
    const Wide before_part = {__shfl_sync(0xffffffff, of_parts.high, (drawn_part + 31) % 32),
                              __shfl_sync(0xffffffff, of_parts.low, (drawn_part + 31) % 32)};
    if (drawn_part > 0) left = minus(left, before_part);
    const u32 first_row = (first_part + drawn_part) * SHARE_ROWS;
    // Loads all costs of these rows at once, rather than 32 at a time with a wait each.
    Cost costs[PARTS];
    Real distances[PARTS];
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) {
        const u32 row = min(first_row + part * 32 + lane, seeding.count - 1);
        costs[part] = cost_before(seeding, {best, false}, row);
        distances[part] = seeding.distances[(u64)best * seeding.count + row];
    }
    u64 rest = left.low;
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) {
        const u32 row = first_row + part * 32 + lane;
        const Real cost = costs[part].lowered >> best & 1 ? distances[part] : costs[part].cost;
        u64 share = row < seeding.count ? share_of(seeding, row, cost) : 0;
        for (u32 stride = 1; stride < 32; stride *= 2) {
            const u64 before = __shfl_up_sync(0xffffffff, share, stride);
            if (lane >= stride) share += before;
        }
        const u32 beyond = __ballot_sync(0xffffffff, rest < share);
        if (beyond != 0) {
            if (lane == 0) seeding.candidates[warp] = row + __ffs(beyond) - 1;
            return;
        }
        rest -= __shfl_sync(0xffffffff, share, 31);
    }
}

// Sets the cost of every row to infinity, as no row is chosen yet. Any grid.
extern "C" __global__ __launch_bounds__(SEED_THREADS) void begin(Seeding seeding) {
    for (u32 row = blockIdx.x * SEED_THREADS + threadIdx.x; row < seeding.count;
         row += gridDim.x * SEED_THREADS) {
        seeding.costs[row] = Limits<Real>::infinity();
    }
}

// Lowers costs as the next comparison would. Any grid.
extern "C" __global__ __launch_bounds__(SEED_THREADS) void take_best(Seeding seeding) {
    const LastChoice chosen = chosen_last(seeding);
    for (u32 row = blockIdx.x * SEED_THREADS + threadIdx.x; row < seeding.count;
         row += gridDim.x * SEED_THREADS) {
        seeding.costs[row] = cost_now(seeding, chosen, row, cost_before(seeding, chosen, row));
    }
}

// The largest weight times cost. Any grid.
extern "C" __global__ __launch_bounds__(SEED_THREADS) void largest_share(Seeding seeding) {
    double most = 0;
    for (u32 row = blockIdx.x * SEED_THREADS + threadIdx.x; row < seeding.count;
         row += gridDim.x * SEED_THREADS) {
        most = fmax(most, exact_share(seeding, row, seeding.costs[row]));
    }
    for (u32 stride = 16; stride > 0; stride /= 2) {
        most = fmax(most, __shfl_xor_sync(0xffffffff, most, stride));
    }
    // Non-negative doubles are ordered as their bits.
    if (Warp::rank() == 0) atomicMax(&seeding.state->largest, (u64)__double_as_longlong(most));
}

// Sums all shares at a new scale. As many blocks as compare rows.
extern "C" __global__ __launch_bounds__(SEED_THREADS) void add_shares(Seeding seeding) {
    __shared__ PartialGains partial;
    const BlockRows block = rows_of_block(seeding);
    clear(partial);
    __syncthreads();
    for (u32 row = block.first + threadIdx.x; row < block.end; row += SEED_THREADS) {
        add_share(partial.gains[(row - block.first) / SHARE_ROWS][0], share_of(seeding, row, seeding.costs[row]));
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const u64 sum = add_up(partial, block, 0, seeding.totals);
    if (threadIdx.x == 0) seeding.block_totals[blockIdx.x] = sum;
}
