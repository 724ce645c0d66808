// How far products of rows and centroids in half precision may be off: see `assign_tiles.cuh`, and for products of groups
// of warps `find_by_groups.cuh`.
//
// The longest row and the longest centroid set the scale of many errors, and one outlier is both. So a few rows are far
// away, and those centroids that are longer than twice the other rows: such rows, and those whose best product is with such
// a centroid, are compared with all centroids, and errors are those of the others. See `round_centroids` for what products
// with a centroid that is far away say of a row that is not.

#include "kmeans/tiles.cuh"

// The relative error of squared distances in exact sums, on both sides of a comparison. That of directions is absolute.
constexpr float RELATIVE = SUM == SQUARES ? 1.1f * (DIM + 4) * UNIT : 0;

// A limit that every product exceeds, as bits: the least integer.
constexpr float ALL = -0.0f;

// Error bounds of products, and the bias that makes them positive.
struct Errors {
    float bias, adding_up, largest_centroid, largest_error, absolute;

    explicit __device__ __forceinline__ Errors(const Rounds& rounds, const Halves& halves) {
        const Status* status = rounds.status;
        absolute = __double2float_ru(halves.absolute);
        largest_centroid = __uint_as_float(status->largest_centroid);
        largest_error = __uint_as_float(status->largest_error);
        const float row = fminf(__uint_as_float(status->largest_row), __uint_as_float(status->typical_row));
        const float longest = largest_centroid + largest_error;
        bias = 1.01f * (row + longest) * longest + 1e-30f;
        adding_up = (64 * STEPS + 8) * UNIT * bias;
    }

    // Bounds on how far a row is from its nearest centroid, or one that exact sums may take for it, given the best product
    // without what was added to it and how much adding up may be off; and on what rounding changes a product with such a
    // centroid by.
    __device__ __forceinline__ float distance(const Rounded& row, float best, float adding_up) const {
        const float error = row.error + largest_error;
        const float square = fmaxf(row.length * row.length - 2 * best, 0.0f);
        return 1.001f * (error + __fsqrt_ru(square + 5 * error * error + 2 * adding_up + 4 * absolute));
    }
    __device__ __forceinline__ float rounding(const Rounded& row, float distance) const {
        const float error = row.error + largest_error;
        return error * (distance + 2 * error);
    }
    // By how much products of two centroids may differ that are equally near in exact sums.
    __device__ __forceinline__ float exact(float distance) const {
        return RELATIVE * distance * distance + absolute;
    }

    // The least product of a candidate. Where it is not positive, centroids that are far away may have less than 0.
    static __device__ __forceinline__ float limit(float product) { return product >= 0 ? product : ALL; }

    // What storing the place costs two products: each up to `places` units of 2^-23 of 2 BIAS.
    __device__ __forceinline__ float stored(u32 places) const { return 8 * (places + 1) * UNIT * bias; }

    // The lead over all others that the best product needs for its centroid to be the nearest in exact sums.
    __device__ __forceinline__ float margin(const Rounded& row, float best, u32 places) const {
        const float stored = this->stored(places);
        const float away = distance(row, best - bias, adding_up + stored);
        return 1.001f * (2 * (rounding(row, away) + adding_up) + stored + exact(away)) + 1e-30f;
    }
};

// What the best sum of `find_by_groups.cuh` needs to be certain, the least sum of a candidate otherwise, and by how much
// adding up may be off.
struct GroupMargins {
    float lead, least, own;

    __device__ __forceinline__ GroupMargins(const Errors& errors, const Rounded& row, float best) {
        const float length = row.length + row.error, both = length + errors.largest_centroid;
        // No sum, and no number that is added, is larger: |x||c| + |c|^2 / 2 + n, and a bit. 32 units are lost for each
        // multiplication.
        const float largest = __fmaf_rn(both * both, 0.56f, 0.01f);
        own = (32 * IMAGE_STEPS + 16) * UNIT * largest;
        const float product = add(best, norm_of(row)), away = errors.distance(row, product, own);
        lead = 1.001f * (2 * (errors.rounding(row, away) + own) + errors.exact(away)) + 1e-30f;
        least = __fadd_rd(best, -lead);
    }
};
