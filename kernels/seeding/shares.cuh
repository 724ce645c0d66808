// Greedy k-means++: definitions that its kernels share. `KMeansSession::seed` in
// src/device/contract/kmeans.rs says what they compute.
//
// A step is a sequence of launches without synchronising with the host: `draw_candidates`, then
// `compare_pairs` or `compare_bounds`, then `take_best`. DIM is the number of elements in a row. Shares
// are whole numbers, so their sums are the same in any order.

#include "common/warp.cuh"

// Why steps ended. The same numbers as in src/device/cuda/kmeans/seeding/launch.rs.
enum Stop : u32 { GOING_ON, SMALL_SHARES, ALL_CHOSEN };

struct State {
    double scale[2];  // shares are multiplied by one, and then by the other
    u64 largest;      // the largest weight times cost, as the bits of a double
    u32 stop;
    u32 chosen;       // rows that were chosen
    u32 scaled;       // the same when the scale was
    u32 compared;     // candidates of the last step
    u32 longest;      // longest row, as the bits of a float
    u32 padding;
};
static_assert(sizeof(State) == 48, "the host has the same struct");

// The sum of the shares that a candidate takes from all rows: of their lower and upper 32 bits.
struct Gain {
    u64 low, high;
};

// The struct of src/device/cuda/kmeans/seeding/launch.rs, which documents sizes.
struct Seeding {
    State* state;
    const Scalar* rows;
    const double* weights;  // or null
    Real* costs;            // of each row: the distance from the nearest row chosen so far
    u64* totals;            // of each SHARE_ROWS rows: the sum of their shares
    u32* candidates;        // rows
    u32* chosen;            // rows
    Gain* gains;            // of each candidate
    Real* distances;        // for each candidate, of each row that it is nearer to
    u32* lowered;           // for each row, a bit for each of those candidates
    const u64* random;      // for each step, a number for each candidate
    u32 count, k;
};
static_assert(sizeof(Seeding) == 96, "the host has the same struct");

// Rows in whole numbers.
struct Bounds {
    uint4* words;         // for 16 rows and 32 elements, 4 words of each lane, as `multiply_words` takes them
    int* squares;         // of each row, in steps
    float* residuals;     // of each row: the length of what rounding left, in steps
    const double* centre; // what is subtracted from rows
    double inverse;       // steps in 1
};
static_assert(sizeof(Bounds) == 40, "the host has the same struct");

__device__ __forceinline__ bool is_going_on(const Seeding& seeding) {
    return seeding.state->stop == GOING_ON;
}

// Weight times cost; a row without weight has no share, however far it is.
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

// Shares that are summed in shared memory, where atomics of 64 bits are slow. Those of BLOCK_ROWS rows do
// not overflow.
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

// The candidate that takes the largest share, the first in case of a tie: by a warp.
__device__ __forceinline__ u32 best_candidate(const Seeding& seeding) {
    u32 best = Warp::rank();
    u64 high = 0, low = 0;
    if (best < seeding.state->compared) {
        const Gain gain = seeding.gains[best];
        high = gain.high + (gain.low >> 32), low = gain.low & 0xffffffff;
    }
    for (u32 apart = 16; apart > 0; apart /= 2) {
        const u32 other = __shfl_down_sync(0xffffffff, best, apart);
        const u64 other_high = __shfl_down_sync(0xffffffff, high, apart);
        const u64 other_low = __shfl_down_sync(0xffffffff, low, apart);
        const bool is_equal = other_high == high && other_low == low;
        if (other_high > high || (other_high == high && other_low > low) || (is_equal && other < best)) {
            best = other, high = other_high, low = other_low;
        }
    }
    return __shfl_sync(0xffffffff, best, 0);
}

// Passes on what a block found of its rows.
__device__ __forceinline__ void finish(const Seeding& seeding, const Parts (&gains)[MOST_CANDIDATES],
                                       u32 compared) {
    __syncthreads();
    if (threadIdx.x >= compared) return;
    const u64 sum = sum_of(gains[threadIdx.x]);
    if (sum == 0) return;
    atomicAdd(&seeding.gains[threadIdx.x].low, sum & 0xffffffff);
    atomicAdd(&seeding.gains[threadIdx.x].high, sum >> 32);
}

__device__ __forceinline__ void clear(Parts (&gains)[MOST_CANDIDATES]) {
    u32* words = reinterpret_cast<u32*>(gains);
    for (u32 i = threadIdx.x; i < sizeof(gains) / 4; i += blockDim.x) words[i] = 0;
}

// Adds what a row's share is less at this distance than at its cost.
__device__ __forceinline__ void add_gain(const Seeding& seeding, Parts& gain, u32 row, Real cost,
                                         Real distance) {
    const u64 share = share_of(seeding, row, cost) - share_of(seeding, row, distance);
    if (share > 0) add_share(gain, share);
}

// Brings memory nearer that is read soon.
__device__ __forceinline__ void prefetch(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
constexpr u32 LINE = 128;  // bytes that it brings

// Loads some neighbouring elements of a row: as many at a time as its dimension allows.
template <u32 COUNT>
__device__ __forceinline__ void load(Scalar (&to)[COUNT], const Scalar* from) {
    constexpr u32 TOGETHER = 16 / sizeof(Scalar);
    if constexpr (DIM % TOGETHER == 0 && COUNT % TOGETHER == 0) {
#pragma unroll
        for (u32 j = 0; j < COUNT; j += TOGETHER) {
            const uint4 words = *reinterpret_cast<const uint4*>(from + j);
            const Scalar* some = reinterpret_cast<const Scalar*>(&words);
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) to[j + i] = some[i];
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < COUNT; j++) to[j] = from[j];
    }
}

// Adds some elements of two rows to their sum.
template <u32 COUNT>
__device__ __forceinline__ Total add_pair(const Scalar (&a)[COUNT], const Scalar (&b)[COUNT], Total total) {
#pragma unroll
    for (u32 j = 0; j < COUNT; j++) {
        total = Step<SUM>::of(SUM == PRODUCTS ? -a[j] : a[j], b[j], total);
    }
    return total;
}
