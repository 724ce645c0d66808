// Error bounds of fp16 products of rows and centroids: see `assign_tiles.cuh`, and for warpgroup products
// `sm90_warpgroup_assign.cuh`.
//
// The norms of the longest row and centroid enter many bounds, and one outlier dominates both. Hence a few
// rows count as outliers, and so do centroids longer than twice the remaining rows: such rows, and rows whose
// best product is with such a centroid, are compared with all centroids, and the bounds hold for the rest.
// See `round_centroids` for products of an outlier centroid with a row that is none.

#include "kmeans/tiles.cuh"

// The relative error of squared distances in exact sums, for both sides of a comparison. For directions it is
// absolute.
constexpr float RELATIVE = SUM == SQUARES ? 1.1f * (DIM + 4) * UNIT : 0;

// A limit that every product exceeds: its bits are the least integer.
constexpr float ALL = -0.0f;

// Error bounds of products, and the bias that makes them positive.
struct Errors {
    float bias, adding_up, largest_centroid, largest_error, absolute;

    explicit __device__ __forceinline__ Errors(const Rounds& rounds, const Fp16Buffers& buffers) {
        const Status* status = rounds.status;
        absolute = __double2float_ru(buffers.absolute);
        largest_centroid = __uint_as_float(status->largest_centroid);
        largest_error = __uint_as_float(status->largest_error);
        const float row = fminf(__uint_as_float(status->largest_row), __uint_as_float(status->typical_row));
        const float longest = largest_centroid + largest_error;
        bias = 1.01f * (row + longest) * longest + 1e-30f;
        adding_up = (64 * STEPS + 8) * UNIT * bias;
    }

    // Upper bounds on the distance of a row from its nearest centroid, or from one that exact sums may take
    // for it, given the best product without its bias and the summation error (`distance`); and on the effect
    // of rounding on a product with such a centroid (`rounding`).
    __device__ __forceinline__ float distance(const RoundedNorms& row, float best, float adding_up) const {
        const float error = row.error + largest_error;
        const float square = fmaxf(row.length * row.length - 2 * best, 0.0f);
        return 1.001f * (error + __fsqrt_ru(square + 5 * error * error + 2 * adding_up + 4 * absolute));
    }
    __device__ __forceinline__ float rounding(const RoundedNorms& row, float distance) const {
        const float error = row.error + largest_error;
        return error * (distance + 2 * error);
    }
    // The maximum difference between the products of two centroids that are equally near in exact sums.
    __device__ __forceinline__ float exact(float distance) const {
        return RELATIVE * distance * distance + absolute;
    }

    // The least product of a candidate. If it is not positive, products with outlier centroids may be below
    // 0.
    static __device__ __forceinline__ float limit(float product) { return product >= 0 ? product : ALL; }

    // The effect of storing the place in two products: each changes by up to `places` units of 2^-23 of 2
    // BIAS.
    __device__ __forceinline__ float stored(u32 places) const { return 8 * (places + 1) * UNIT * bias; }

    // The lead over all others that makes the best product's centroid certain to be the nearest in exact
    // sums.
    __device__ __forceinline__ float margin(const RoundedNorms& row, float best, u32 places) const {
        const float stored = this->stored(places);
        const float away = distance(row, best - bias, adding_up + stored);
        return 1.001f * (2 * (rounding(row, away) + adding_up) + stored + exact(away)) + 1e-30f;
    }
};

// `lead`: margin that makes the best centroid certain. `least`: smallest sum of a candidate. `adding_up`:
// accumulation error. For the sums of `sm90_warpgroup_assign.cuh`.
struct WarpgroupMargins {
    float lead, least, adding_up;

    __device__ __forceinline__ WarpgroupMargins(const Errors& errors, const RoundedNorms& row, float best) {
        const float length = row.length + row.error, both = length + errors.largest_centroid;
        // An upper bound on the magnitude of all sums and terms: |x||c| + |c|^2 / 2 + n. Each multiplication
        // loses up to 32 units.
        const float largest = __fmaf_rn(both * both, 0.56f, 0.01f);
        adding_up = (32 * SWIZZLED_STEPS + 16) * UNIT * largest;
        const float product = add(best, norm_of(row)), away = errors.distance(row, product, adding_up);
        lead = 1.001f * (2 * (errors.rounding(row, away) + adding_up) + errors.exact(away)) + 1e-30f;
        least = __fadd_rd(best, -lead);
    }
};
