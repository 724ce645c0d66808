// Greedy k-means++ (Arthur & Vassilvitskii 2007; several candidates per step, of which the best is chosen):
// definitions that its kernels share. The contract is `KMeansSession::seed` in src/device/contract/kmeans.rs.
//
// A step is a sequence of launches without synchronising with the host: `draw_candidates`, which takes the
// best candidate of the step before, then `compare_pairs` or `compare_bounds`, which lower rows' costs to
// their distances from that candidate. DIM is the number of elements in a row. Shares are integers, so their
// sums are the same in any order.

#include "common/warp.cuh"

// The reasons why steps end. The same numbers as in src/device/cuda/kmeans/seeding/launch.rs.
enum Stop : u32 { GOING_ON, SMALL_SHARES, ALL_CHOSEN };

// The state of the steps. The same struct as in src/device/cuda/kmeans/seeding/launch.rs.
struct State {
    double scale[2];  // shares are multiplied by both, one after the other
    u64 largest;      // the largest weight times cost, as the bits of a double
    u32 stop;
    u32 chosen;       // number of chosen rows
    u32 scaled;       // number of chosen rows at the last rescaling
    u32 compared;     // candidates of the last step
    u32 longest;      // longest row, as the bits of a float
    u32 best;         // number of the best candidate of the step before
    u32 is_owed;      // whether that candidate's gain is still to be subtracted from the sums of shares
    u32 padding;
};

// The total share that a candidate takes from all rows: sums of the lower and upper 32 bits.
struct Gain {
    u64 low, high;
};

// The struct of src/device/cuda/kmeans/seeding/launch.rs, which documents sizes.
struct Seeding {
    State* state;
    const Scalar* rows;
    const double* weights;  // or null
    Real* costs;            // by row: the distance from the nearest chosen row
    u64* totals;            // by SHARE_ROWS rows: the sum of their shares
    u64* block_totals;      // the same by block
    u32* candidates;        // rows
    u32* chosen;            // rows
    Gain* gains;            // by candidate
    u64* taken;             // by candidate: its gain in each element of `totals`
    u64* block_taken;       // by candidate: its gain in each element of `block_totals`
    Real* distances;        // by candidate and row: the distance, if it is below the row's cost
    u32* lowered;           // by row: a bit for each of those candidates
    const u64* random;      // by step and candidate
    u32 count, k;
    u32 together;           // rows per block of a comparison: a multiple of SHARE_ROWS, at most BLOCK_ROWS
    u32 blocks;
};

// Quantised rows. The same struct as in src/device/cuda/kmeans/seeding/launch.rs.
struct Bounds {
    uint4* words;         // by 16 rows and 32 elements: 4 words per lane, as `multiply_words` takes them
    int* squares;         // by row, in steps
    float* residuals;     // by row: the length of the rounding error, in steps
    const double* centre; // subtracted from rows
    double inverse;       // steps in 1
};

__device__ __forceinline__ bool is_going_on(const Seeding& seeding) {
    return seeding.state->stop == GOING_ON;
}

// Weight times cost; a row of weight 0 has no share, even at an infinite distance.
__device__ __forceinline__ double exact_share(const Seeding& seeding, u32 row, Real cost) {
    const double weight = seeding.weights == nullptr ? 1.0 : seeding.weights[row];
    const double share = multiply(weight, (double)cost);
    constexpr double MOST = 1.7976931348623157e308;
    return weight == 0.0 ? 0.0 : share < MOST ? share : MOST;
}

// The share of a row, rounded down.
__device__ __forceinline__ u64 share_of(const Seeding& seeding, u32 row, Real cost) {
    const double* scale = seeding.state->scale;
    return __double2ull_rz(multiply(multiply(exact_share(seeding, row, cost), scale[0]), scale[1]));
}

// A sum of shares in shared memory, in three parts, as 64-bit atomics are slow there. Sums over BLOCK_ROWS
// rows do not overflow.
struct Parts {
    u32 part[3];
};
constexpr u32 PART_BITS = 18;
static_assert(BLOCK_ROWS <= 1 << 12, "shares of 52 bits would not add up in 64, nor their parts in 32");

__device__ __forceinline__ void add_share(Parts& parts, u64 share) {
#pragma unroll
    for (u32 i = 0; i < 3; i++) {
        atomicAdd(&parts.part[i], (u32)(share >> (PART_BITS * i)) & ((1u << PART_BITS) - 1));
    }
}

__device__ __forceinline__ u64 sum_of(const Parts& parts) {
    return parts.part[0] + ((u64)parts.part[1] << PART_BITS) + ((u64)parts.part[2] << 2 * PART_BITS);
}

// The candidate with the largest gain, the first in case of a tie: by a warp.
__device__ __forceinline__ u32 best_candidate(const Seeding& seeding) {
    u32 best = Warp::rank();
    u64 high = 0, low = 0;
    if (best < seeding.state->compared) {
        const Gain gain = seeding.gains[best];
        high = gain.high + (gain.low >> 32), low = gain.low & 0xffffffff;
    }
    for (u32 stride = 16; stride > 0; stride /= 2) {
        const u32 other = __shfl_down_sync(0xffffffff, best, stride);
        const u64 other_high = __shfl_down_sync(0xffffffff, high, stride);
        const u64 other_low = __shfl_down_sync(0xffffffff, low, stride);
        const bool is_equal = other_high == high && other_low == low;
        if (other_high > high || (other_high == high && other_low > low) || (is_equal && other < best)) {
            best = other, high = other_high, low = other_low;
        }
    }
    return __shfl_sync(0xffffffff, best, 0);
}

// Partial results of a block: the gain of every candidate for every SHARE_ROWS rows. There are at most as
// many such parts as lanes in a warp.
struct PartialGains {
    Parts gains[BLOCK_ROWS / SHARE_ROWS][MOST_CANDIDATES];
};
static_assert(BLOCK_ROWS / SHARE_ROWS <= 32, "a lane for each");

__device__ __forceinline__ void clear(PartialGains& partial) {
    u32* words = reinterpret_cast<u32*>(&partial);
    for (u32 i = threadIdx.x; i < sizeof(partial) / 4; i += blockDim.x) words[i] = 0;
}

// The rows of a block.
struct BlockRows {
    u32 first, end;   // rows
    u32 part, parts;  // the number of its first part of SHARE_ROWS rows, and its number of parts
    u32 all_parts;    // parts of all rows
};

__device__ __forceinline__ u32 parts_of(u32 rows) { return (rows + SHARE_ROWS - 1) / SHARE_ROWS; }

__device__ __forceinline__ BlockRows rows_of_block(const Seeding& seeding) {
    const u32 first = blockIdx.x * seeding.together, end = min(seeding.count, first + seeding.together);
    return {first, end, first / SHARE_ROWS, parts_of(end - first), parts_of(seeding.count)};
}

// Subtracts the gain of the last chosen candidate from the sums of a block's shares, if that is still to be
// done.
__device__ __forceinline__ void pay(const Seeding& seeding, const BlockRows& block) {
    if (!seeding.state->is_owed) return;
    const u32 best = seeding.state->best, i = block.part + threadIdx.x;
    if (threadIdx.x < block.parts) seeding.totals[i] -= seeding.taken[(u64)best * block.all_parts + i];
    if (threadIdx.x == 32) {
        seeding.block_totals[blockIdx.x] -= seeding.block_taken[(u64)best * seeding.blocks + blockIdx.x];
    }
}

// Sums what a block found for a candidate, by a warp: `parts` gets the sum of each SHARE_ROWS rows; returns
// the total.
__device__ __forceinline__ u64 add_up(const PartialGains& partial, const BlockRows& block, u32 candidate, u64* parts) {
    const u32 lane = Warp::rank();
    u64 sum = 0;
    if (lane < block.parts) parts[block.part + lane] = sum = sum_of(partial.gains[lane][candidate]);
    for (u32 stride = 16; stride > 0; stride /= 2) sum += __shfl_xor_sync(0xffffffff, sum, stride);
    return sum;
}

// Writes the gains that a block found.
__device__ __forceinline__ void finish(const Seeding& seeding, const PartialGains& partial, const BlockRows& block,
                                       u32 compared) {
    __syncthreads();
    for (u32 candidate = threadIdx.x / 32; candidate < compared; candidate += blockDim.x / 32) {
        const u64 sum = add_up(partial, block, candidate, seeding.taken + (u64)candidate * block.all_parts);
        if (Warp::rank() != 0) continue;
        seeding.block_taken[(u64)candidate * seeding.blocks + blockIdx.x] = sum;
        if (sum == 0) continue;
        atomicAdd(&seeding.gains[candidate].low, sum & 0xffffffff);
        atomicAdd(&seeding.gains[candidate].high, sum >> 32);
    }
}

// The candidate that was chosen last.
struct LastChoice {
    u32 best;
    bool is_first;  // whether there is none yet
};

__device__ __forceinline__ LastChoice chosen_last(const Seeding& seeding) {
    return {seeding.state->best, seeding.state->chosen == 0};
}

// The cost of a row before the last choice, and a bit for each candidate that was nearer.
struct Cost {
    Real cost;
    u32 lowered;
};

__device__ __forceinline__ Cost cost_before(const Seeding& seeding, const LastChoice& chosen, u32 row) {
    return {seeding.costs[row], chosen.is_first ? 0 : seeding.lowered[row]};
}

// The cost of a row after the last choice.
__device__ __forceinline__ Real cost_now(const Seeding& seeding, const LastChoice& chosen, u32 row, const Cost& before) {
    const bool is_lowered = before.lowered >> chosen.best & 1;
    return is_lowered ? seeding.distances[(u64)chosen.best * seeding.count + row] : before.cost;
}

// Adds the reduction of a row's share from its cost to this distance.
__device__ __forceinline__ void add_gain(const Seeding& seeding, Parts& gain, u32 row, Real cost,
                                         Real distance) {
    const u64 share = share_of(seeding, row, cost) - share_of(seeding, row, distance);
    if (share > 0) add_share(gain, share);
}

// Prefetches memory into L2.
// PTX ISA, Data Movement and Conversion Instructions: prefetch, prefetchu.
__device__ __forceinline__ void prefetch(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
constexpr u32 LINE = 128;  // bytes per prefetch

// Loads some adjacent elements of a row, in vectors if its dimension allows; IS_LAST marks them for early
// eviction.
template <bool IS_LAST = false, u32 COUNT>
__device__ __forceinline__ void load(Scalar (&to)[COUNT], const Scalar* from) {
    constexpr u32 TOGETHER = 16 / sizeof(Scalar);
    if constexpr (DIM % TOGETHER == 0 && COUNT % TOGETHER == 0) {
#pragma unroll
        for (u32 j = 0; j < COUNT; j += TOGETHER) {
            const uint4* next = reinterpret_cast<const uint4*>(from + j);
            const uint4 words = IS_LAST ? __ldcs(next) : *next;
            const Scalar* some = reinterpret_cast<const Scalar*>(&words);
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) to[j + i] = some[i];
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < COUNT; j++) to[j] = from[j];
    }
}

// Adds some elements of two rows to their total.
template <u32 COUNT>
__device__ __forceinline__ Total add_pair(const Scalar (&a)[COUNT], const Scalar (&b)[COUNT], Total total) {
#pragma unroll
    for (u32 j = 0; j < COUNT; j++) {
        total = Step<SUM>::of(SUM == PRODUCTS ? -a[j] : a[j], b[j], total);
    }
    return total;
}
