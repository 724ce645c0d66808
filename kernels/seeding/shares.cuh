// Greedy k-means++: definitions that its kernels share. `KMeansSession::seed` in
// src/device/contract/kmeans.rs says what they compute.
//
// A step is a sequence of launches without synchronising with the host: `draw_candidates`, which takes the
// best candidate of the step before, then `compare_pairs` or `compare_bounds`, which lower rows' costs to
// their distances from it. DIM is the number of elements in a row. Shares
// are whole numbers, so their sums are the same in any order.

#include "common/warp.cuh"

// Why steps ended. The same numbers as in src/device/cuda/kmeans/seeding/launch.rs.
enum Stop : u32 { GOING_ON, SMALL_SHARES, ALL_CHOSEN };

// How steps stand. The same struct as in src/device/cuda/kmeans/seeding/launch.rs.
struct State {
    double scale[2];  // shares are multiplied by one, and then by the other
    u64 largest;      // the largest weight times cost, as the bits of a double
    u32 stop;
    u32 chosen;       // rows that were chosen
    u32 scaled;       // the same when the scale was
    u32 compared;     // candidates of the last step
    u32 longest;      // longest row, as the bits of a float
    u32 best;         // which of the candidates of the step before was chosen
    u32 is_owed;      // whether sums of shares do not know of it yet
    u32 padding;
};

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
    u64* block_totals;      // of each block's rows
    u32* candidates;        // rows
    u32* chosen;            // rows
    Gain* gains;            // of each candidate
    u64* taken;             // for each candidate, what it takes from each of `totals`
    u64* block_taken;       // and of `block_totals`
    Real* distances;        // for each candidate, of each row that it is nearer to
    u32* lowered;           // for each row, a bit for each of those candidates
    const u64* random;      // for each step, a number for each candidate
    u32 count, k;
    u32 together;           // rows of a block that compares them, a multiple of SHARE_ROWS, at most BLOCK_ROWS
    u32 blocks;
};

// Rows in whole numbers. The same struct as in src/device/cuda/kmeans/seeding/launch.rs.
struct Bounds {
    uint4* words;         // for 16 rows and 32 elements, 4 words of each lane, as `multiply_words` takes them
    int* squares;         // of each row, in steps
    float* residuals;     // of each row: the length of what rounding left, in steps
    const double* centre; // what is subtracted from rows
    double inverse;       // steps in 1
};

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

// What a block finds of its rows: for each SHARE_ROWS of them, at most as many as a warp has lanes, what candidates take.
struct Found {
    Parts gains[BLOCK_ROWS / SHARE_ROWS][MOST_CANDIDATES];
};
static_assert(BLOCK_ROWS / SHARE_ROWS <= 32, "a lane for each");

__device__ __forceinline__ void clear(Found& found) {
    u32* words = reinterpret_cast<u32*>(&found);
    for (u32 i = threadIdx.x; i < sizeof(found) / 4; i += blockDim.x) words[i] = 0;
}

// The rows of a block.
struct Own {
    u32 first, end;   // rows
    u32 part, parts;  // the first SHARE_ROWS of them, and how many of these there are
    u32 all_parts;    // of all rows
};

__device__ __forceinline__ u32 parts_of(u32 rows) { return (rows + SHARE_ROWS - 1) / SHARE_ROWS; }

__device__ __forceinline__ Own own_rows(const Seeding& seeding) {
    const u32 first = blockIdx.x * seeding.together, end = min(seeding.count, first + seeding.together);
    return {first, end, first / SHARE_ROWS, parts_of(end - first), parts_of(seeding.count)};
}

// Subtracts from the sums of a block's shares what the candidate that was chosen last took from them, if they owe it.
__device__ __forceinline__ void pay(const Seeding& seeding, const Own& own) {
    if (!seeding.state->is_owed) return;
    const u32 best = seeding.state->best, i = own.part + threadIdx.x;
    if (threadIdx.x < own.parts) seeding.totals[i] -= seeding.taken[(u64)best * own.all_parts + i];
    if (threadIdx.x == 32) {
        seeding.block_totals[blockIdx.x] -= seeding.block_taken[(u64)best * seeding.blocks + blockIdx.x];
    }
}

// Adds up what a block found for a candidate, by a warp: of SHARE_ROWS rows for each lane, which is written, and of all.
__device__ __forceinline__ u64 add_up(const Found& found, const Own& own, u32 candidate, u64* parts) {
    const u32 lane = Warp::rank();
    u64 sum = 0;
    if (lane < own.parts) parts[own.part + lane] = sum = sum_of(found.gains[lane][candidate]);
    for (u32 apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
    return sum;
}

// Passes on what a block found of its rows.
__device__ __forceinline__ void finish(const Seeding& seeding, const Found& found, const Own& own, u32 compared) {
    __syncthreads();
    for (u32 candidate = threadIdx.x / 32; candidate < compared; candidate += blockDim.x / 32) {
        const u64 sum = add_up(found, own, candidate, seeding.taken + (u64)candidate * own.all_parts);
        if (Warp::rank() != 0) continue;
        seeding.block_taken[(u64)candidate * seeding.blocks + blockIdx.x] = sum;
        if (sum == 0) continue;
        atomicAdd(&seeding.gains[candidate].low, sum & 0xffffffff);
        atomicAdd(&seeding.gains[candidate].high, sum >> 32);
    }
}

// What is known of the candidate that was chosen last.
struct Chosen {
    u32 best;
    bool is_first;  // whether none was
};

__device__ __forceinline__ Chosen chosen_last(const Seeding& seeding) {
    return {seeding.state->best, seeding.state->chosen == 0};
}

// A row's cost when it was last written, and the candidates that were nearer to it then.
struct Cost {
    Real cost;
    u32 lowered;
};

__device__ __forceinline__ Cost cost_before(const Seeding& seeding, const Chosen& chosen, u32 row) {
    return {seeding.costs[row], chosen.is_first ? 0 : seeding.lowered[row]};
}

// The cost of a row after the candidate that was chosen last.
__device__ __forceinline__ Real cost_now(const Seeding& seeding, const Chosen& chosen, u32 row, const Cost& before) {
    const bool is_lowered = before.lowered >> chosen.best & 1;
    return is_lowered ? seeding.distances[(u64)chosen.best * seeding.count + row] : before.cost;
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

// Loads some neighbouring elements of a row, as many at a time as its dimension allows; with IS_LAST, they leave caches
// before others do.
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

// Adds some elements of two rows to their sum.
template <u32 COUNT>
__device__ __forceinline__ Total add_pair(const Scalar (&a)[COUNT], const Scalar (&b)[COUNT], Total total) {
#pragma unroll
    for (u32 j = 0; j < COUNT; j++) {
        total = Step<SUM>::of(SUM == PRODUCTS ? -a[j] : a[j], b[j], total);
    }
    return total;
}
