// What a query's sum of products must reach for a pair to be looked at again, and when the filter gives
// up.
//
// With q' and x' centred and scaled by s, h their halves, and e what rounding lost of them,
//   <h_q, h_x> >= <q', x'> - |e_q| |x'| - |h_q| |e_x|,
// and the sum that the filter sees is off by no more than
//   K 2^-24 of the sum of magnitudes, for products and sums inside a step (sm_90 adds the 16 products of
//     a step and what came before, each cut to 25 bits below the largest: 0.625 K 2^-24), and
//   2^-10 of each sum before the last step, and 2^-24, where sums are halves, however they are rounded.
// The last step adds the test's halves and rounds once, which keeps the sign.

#include "filter/pack.cuh"

// In `state`: whether the filter has been given up, queries with more hits than there is room for, and
// blocks that have counted theirs.
constexpr u32 GIVEN_UP = 0, CROWDED = 1, COUNTED = 2;
// The same as in filter/found.cuh.
constexpr u32 ALL_LOST = 1u << 24;
// Thresholds beyond this do not fit into a half beside the products.
constexpr double FARTHEST = 60000;

struct Test {
    u32 queries, dim, steps, has_half_sums;
};

// How far a pair's total, as it is computed, may be below or above the true one, relative to the magnitudes
// and beside that.
__device__ __forceinline__ double rounding(u32 dim) {
    return (dim + 8.0) * (double)Limits<Real>::epsilon();
}
__device__ __forceinline__ double underflow(u32 dim) {
    return dim * (sizeof(Real) == 4 ? 1.5e-45 : 5e-324);
}

// The least sum of products of a pair within reach.
__device__ __forceinline__ double least_sum(double reach, const Asked& asked, const Packing& packing,
                                            const Test& test) {
    const double norm = __longlong_as_double((long long)packing.norm);
    const double lost = __longlong_as_double((long long)packing.lost);
    const double halves = __longlong_as_double((long long)packing.test);
    const double raw_norm = __longlong_as_double((long long)packing.raw_norm);
    const double scale = packing.scale * packing.scale, tiny = underflow(test.dim);
    double least;
    if (SUM == PRODUCTS) {
        const double off = rounding(test.dim) * asked.raw_norm * raw_norm + tiny;
        least = scale * (-reach - off - asked.base);
    } else {
        least = 0.5 * (asked.base - scale * (reach * (1 + rounding(test.dim)) + tiny));
    }
    const double of_products = asked.norm * (norm + lost);
    const double magnitudes = of_products + halves + fabs(least);
    const double columns = test.steps * 16.0, inner = test.steps - 1.0;
    const double summed = columns / (1 << 24) * magnitudes;
    const double rounded = inner * (1.01 / 1024 * of_products + 1.0 / (1 << 24));
    const double unseen = asked.lost * norm + asked.norm * lost;
    return least - 1.001 * (unseen + summed + (test.has_half_sums ? rounded : 0)) - 1e-5;
}

// The thresholds of queries from the reaches of their lists. A thread per query.
extern "C" __global__ __launch_bounds__(256) void set_thresholds(
    const Reach* __restrict__ reaches, const Asked* __restrict__ asked,
    const Packing* __restrict__ packing, u32* __restrict__ thresholds, u32* __restrict__ counts,
    u32* state, unsigned char* images, u32 log, Test test) {
    const u32 query = blockIdx.x * blockDim.x + threadIdx.x;
    if (query == 0) state[CROWDED] = state[COUNTED] = 0;
    if (query >= test.queries) return;
    const double least = least_sum((double)reaches[query], asked[query], *packing, test);
    const bool is_known = fabs(least) < FARTHEST;
    const u32 halves = is_known ? two_halves(-least) : NEVER;
    counts[query] = is_known ? 0 : ALL_LOST;
    if (images) {
        const u32 columns = test.steps * 16;
        images += (u64)(query / PANEL) * PANEL * columns * 2;
        *(u32*)(images + image_offset(test.steps, log, PANEL, query % PANEL, columns - 2)) = halves;
    } else {
        thresholds[query] = halves;
    }
}

// Counts the queries with too many hits. If that is one in `most`, the filter is given up, now and in later
// passes: other kernels then look at `state`. A thread per query.
extern "C" __global__ __launch_bounds__(256) void judge(u32* __restrict__ counts, u32* state,
                                                        u32 queries, u32 room, u32 most) {
    __shared__ bool is_last;
    const u32 query = blockIdx.x * blockDim.x + threadIdx.x;
    const bool is_crowded = query < queries && counts[query] > room;
    const u32 crowded = __syncthreads_count(is_crowded);
    if (threadIdx.x == 0) {
        if (crowded) atomicAdd(state + CROWDED, crowded);
        __threadfence();
        is_last = atomicAdd(state + COUNTED, 1u) == gridDim.x - 1;
        if (is_last) {
            __threadfence();
            const u32 all = atomicAdd(state + CROWDED, 0u);
            if ((u64)all * most > queries) state[GIVEN_UP] = 1;
        }
    }
}
