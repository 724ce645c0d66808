// The threshold on a query's sums of products: only pairs at or above it are computed exactly.
//
// With q' and x' centred and scaled by s, h their fp16 values, and e the rounding errors,
//   <h_q, h_x> >= <q', x'> - |e_q| |x'| - |h_q| |e_x|.
// The error of the computed sum has two parts, with K the number of columns:
//   - Products and sums inside a step. By warpgroups (sm_90): the 16 products of a step and the sum so far are
//     added, each truncated to 25 bits below the largest, which loses at most 0.625 K 2^-24 of the sum of
//     magnitudes; the bound is K 2^-24. By single warps: at least 4 columns are added at a time, each truncated to
//     23 bits or more below the largest, which loses at most 3 K 2^-24; the bound is 4 K 2^-24.
//   - Where sums are fp16: 2^-10 of each sum before the last step, and 2^-24, in any rounding mode.
// The last step adds the test values and rounds once, which keeps the sign.

#include "filter/pack.cuh"
#include "filter/state.cuh"

// Thresholds beyond this do not fit into fp16 together with the products.
constexpr double FARTHEST = 60000;

// The parameters of `set_thresholds`. The same struct as in src/device/cuda/search/filter/launch_numbers.rs.
struct Test {
    u32 queries, dim, steps, has_fp16_sums;
    u32 stored, log, tile;  // as in `Pack`
    u32 lost;               // loss of a column and its sum, in units of 2^-24; see above
};

// Error bounds on a pair's computed total: relative to the sum of magnitudes, and absolute.
__device__ __forceinline__ double rounding(u32 dim) {
    return (dim + 8.0) * (double)Limits<Real>::epsilon();
}
__device__ __forceinline__ double underflow(u32 dim) {
    return dim * (sizeof(Real) == 4 ? 1.5e-45 : 5e-324);
}

// The least sum of products of a pair within the threshold of a list.
__device__ __forceinline__ double least_sum(double threshold, const QueryNorms& query, const Packing& packing,
                                            const Test& test) {
    const double norm = __longlong_as_double((long long)packing.norm);
    const double lost = __longlong_as_double((long long)packing.lost);
    const double test_value = __longlong_as_double((long long)packing.test);
    const double raw_norm = __longlong_as_double((long long)packing.raw_norm);
    const double scale = packing.scale * packing.scale, tiny = underflow(test.dim);
    double least;
    if (SUM == PRODUCTS) {
        const double off = rounding(test.dim) * query.raw_norm * raw_norm + tiny;
        least = scale * (-threshold - off - query.base);
    } else {
        least = 0.5 * (query.base - scale * (threshold * (1 + rounding(test.dim)) + tiny));
    }
    const double of_products = query.norm * (norm + lost);
    const double magnitudes = of_products + test_value + fabs(least);
    const double columns = test.steps * 16.0, inner = test.steps - 1.0;
    const double summed = test.lost * columns / (1 << 24) * magnitudes;
    const double rounded = inner * (1.01 / 1024 * of_products + 1.0 / (1 << 24));
    const double unseen = query.lost * norm + query.norm * lost;
    return least - 1.001 * (unseen + summed + (test.has_fp16_sums ? rounded : 0)) - 1e-5;
}

// The filter thresholds of queries, from the distance thresholds of their lists. A thread per query.
extern "C" __global__ __launch_bounds__(256) void set_thresholds(
    const Threshold* __restrict__ list_thresholds, const QueryNorms* __restrict__ query_norms,
    const Packing* __restrict__ packing, u32* __restrict__ thresholds, u32* __restrict__ counts,
    u32* state, unsigned char* tiles, Test test) {
    const u32 query = blockIdx.x * blockDim.x + threadIdx.x;
    if (query == 0) state[OVERFLOWED] = state[COUNTED] = 0;
    if (query >= test.queries) return;
    const double least = least_sum((double)list_thresholds[query], query_norms[query], *packing, test);
    const bool is_known = fabs(least) < FARTHEST;
    const u32 fp16 = is_known ? to_two_fp16(-least) : NEVER;
    counts[query] = is_known ? 0 : LOST;
    if (test.tile) {
        tiles += (u64)(query / test.tile) * test.tile * test.stored * 32;
        *(u32*)(tiles + swizzled_offset(test.stored, test.log, test.tile, query % test.tile,
                                        test.steps * 16 - 2)) = fp16;
    } else {
        thresholds[query] = fp16;
    }
}
