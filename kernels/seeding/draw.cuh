// Draws rows by their shares, and takes the best of them.

#include "seeding/shares.cuh"

// A whole number of 128 bits.
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

// The sum over a warp's lanes up to this one.
__device__ __forceinline__ Wide up_to_lane(Wide sum) {
    for (u32 apart = 1; apart < 32; apart *= 2) {
        const Wide before = {__shfl_up_sync(0xffffffff, sum.high, apart),
                             __shfl_up_sync(0xffffffff, sum.low, apart)};
        if (Warp::rank() >= apart) sum = plus(sum, before);
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

// Draws the candidates of the next step, unless steps end. One block of 1,024 threads.
//
// A thread has some neighbouring blocks of rows, a warp draws a candidate.
extern "C" __global__ __launch_bounds__(1024) void draw_candidates(Seeding seeding, u32 drawn) {
    __shared__ Wide up_to[1024], of_warps[32];
    __shared__ bool is_over;
    constexpr u32 PARTS = SHARE_ROWS / 32;
    State& state = *seeding.state;
    if (!is_going_on(seeding)) return;
    const u32 lane = Warp::rank(), warp = threadIdx.x / 32;
    const u32 blocks = (seeding.count + SHARE_ROWS - 1) / SHARE_ROWS;
    const u32 own = (blocks + 1023) / 1024, first = min(threadIdx.x * own, blocks);
    Wide sum = {0, 0};
#pragma unroll 8
    for (u32 i = first; i < min(first + own, blocks); i++) sum = plus(sum, {0, seeding.totals[i]});
    const u32 best = warp == 0 ? best_candidate(seeding) : 0;
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
    if (threadIdx.x == 0) {
        if (state.compared > 0) {
            seeding.chosen[state.chosen] = seeding.candidates[best];
            state.chosen++;
            state.compared = 0;
        }
        // Half of what the largest share has at least.
        const bool is_small = total.high == 0 && total.low >> 50 == 0;
        if (state.chosen == seeding.k) {
            state.stop = ALL_CHOSEN;
        } else if (is_small && state.scaled != state.chosen) {
            state.stop = SMALL_SHARES;
        }
        is_over = state.stop != GOING_ON;
        if (!is_over) state.compared = drawn;
    }
    __syncthreads();
    if (is_over || warp >= drawn) return;
    if (lane == 0) seeding.gains[warp] = {0, 0};
    Wide left = part_of(total, seeding.random[(u64)(state.chosen - 1) * drawn + warp] >> 11);
    // The first thread with which the sum exceeds it, and the first of its blocks.
    u32 low = 0, high = 1023;
    while (low < high) {
        const u32 middle = (low + high) / 2;
        if (is_less(left, up_to[middle])) high = middle;
        else low = middle + 1;
    }
    if (low > 0) left = minus(left, up_to[low - 1]);
    u32 block = low * own;
    for (u32 start = block; start < blocks; start += 32) {
        Wide sum = {0, start + lane < blocks ? seeding.totals[start + lane] : 0};
        sum = up_to_lane(sum);
        const u32 beyond = __ballot_sync(0xffffffff, is_less(left, sum));
        const u32 found = beyond != 0 ? __ffs(beyond) - 1 : 32;
        block = start + found;
        const Wide before = {__shfl_sync(0xffffffff, sum.high, (found + 31) % 32),
                             __shfl_sync(0xffffffff, sum.low, (found + 31) % 32)};
        if (found > 0) left = minus(left, before);
        if (found < 32) break;
    }
    // All shares of the block at once: part after part would wait for memory each time.
    Real costs[PARTS];
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) {
        const u32 row = block * SHARE_ROWS + part * 32 + lane;
        costs[part] = row < seeding.count ? seeding.costs[row] : Real(0);
    }
    u64 rest = left.low;
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) {
        const u32 row = block * SHARE_ROWS + part * 32 + lane;
        u64 share = row < seeding.count ? share_of(seeding, row, costs[part]) : 0;
        for (u32 apart = 1; apart < 32; apart *= 2) {
            const u64 before = __shfl_up_sync(0xffffffff, share, apart);
            if (lane >= apart) share += before;
        }
        const u32 beyond = __ballot_sync(0xffffffff, rest < share);
        if (beyond != 0) {
            if (lane == 0) seeding.candidates[warp] = row + __ffs(beyond) - 1;
            return;
        }
        rest -= __shfl_sync(0xffffffff, share, 31);
    }
}

// Every row costs all there is, as none was chosen. Any grid.
extern "C" __global__ __launch_bounds__(SEED_THREADS) void begin(Seeding seeding) {
    for (u32 row = blockIdx.x * SEED_THREADS + threadIdx.x; row < seeding.count;
         row += gridDim.x * SEED_THREADS) {
        seeding.costs[row] = Limits<Real>::infinity();
    }
}

// Adds the best candidate to the rows that were chosen. A block for SHARES_TAKEN times SHARE_ROWS rows, a
// thread for one of each.
extern "C" __global__ __launch_bounds__(SHARE_ROWS) void take_best(Seeding seeding) {
    __shared__ Parts taken[SHARES_TAKEN];
    if (!is_going_on(seeding)) return;
    const u32 first = blockIdx.x * SHARES_TAKEN * SHARE_ROWS + threadIdx.x;
    u32 lowered[SHARES_TAKEN];
#pragma unroll
    for (u32 i = 0; i < SHARES_TAKEN; i++) {
        const u32 row = first + i * SHARE_ROWS;
        lowered[i] = row < seeding.count ? seeding.lowered[row] : 0;
    }
    const u32 best = best_candidate(seeding);
    if (threadIdx.x < sizeof(taken) / 4) reinterpret_cast<u32*>(taken)[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < SHARES_TAKEN; i++) {
        if ((lowered[i] >> best & 1) == 0) continue;
        const u32 row = first + i * SHARE_ROWS;
        const Real cost = seeding.costs[row];
        const Real distance = seeding.distances[(u64)best * seeding.count + row];
        // Before the first row is chosen there are no shares.
        if (seeding.state->chosen > 0) add_gain(seeding, taken[i], row, cost, distance);
        seeding.costs[row] = distance;
    }
    __syncthreads();
    const u32 block = blockIdx.x * SHARES_TAKEN + threadIdx.x;
    if (threadIdx.x < SHARES_TAKEN && block * SHARE_ROWS < seeding.count) {
        seeding.totals[block] -= sum_of(taken[threadIdx.x]);
    }
}

// The largest weight times cost. Any grid.
extern "C" __global__ __launch_bounds__(SEED_THREADS) void largest_share(Seeding seeding) {
    double most = 0;
    for (u32 row = blockIdx.x * SEED_THREADS + threadIdx.x; row < seeding.count;
         row += gridDim.x * SEED_THREADS) {
        most = fmax(most, exact_share(seeding, row, seeding.costs[row]));
    }
    for (u32 apart = 16; apart > 0; apart /= 2) {
        most = fmax(most, __shfl_xor_sync(0xffffffff, most, apart));
    }
    // Numbers from 0 compare as their bits do.
    if (Warp::rank() == 0) atomicMax(&seeding.state->largest, (u64)__double_as_longlong(most));
}

// The sums of blocks, at a new scale. A block for SHARE_ROWS rows, a thread for each.
extern "C" __global__ __launch_bounds__(SHARE_ROWS) void add_shares(Seeding seeding) {
    __shared__ Parts all;
    if (threadIdx.x < 3) all.part[threadIdx.x] = 0;
    __syncthreads();
    const u32 row = blockIdx.x * SHARE_ROWS + threadIdx.x;
    if (row < seeding.count) add_share(all, share_of(seeding, row, seeding.costs[row]));
    __syncthreads();
    if (threadIdx.x == 0) seeding.totals[blockIdx.x] = sum_of(all);
}
