// How far products of rows and centroids in half precision may be off: see `assign_tiles.cuh`, and for products of groups
// of warps `find_by_groups.cuh`.

#include "kmeans/tiles.cuh"

// Error bounds of products, and the bias that makes them positive.
struct Errors {
    float bias, adding_up, largest_centroid, largest_error, underflow;

    explicit __device__ __forceinline__ Errors(const Rounds& rounds, const Halves& halves) {
        const Status* status = rounds.status;
        underflow = (float)halves.underflow;
        largest_centroid = __uint_as_float(status->largest_centroid);
        largest_error = __uint_as_float(status->largest_error);
        const float row = __uint_as_float(status->largest_row);
        bias = 1.01f * (row + largest_centroid) * largest_centroid + 1.0f;
        adding_up = (64 * STEPS + 8) * UNIT * bias;
    }

    // The lead over all others that the best product needs for its centroid to be the nearest in
    // exact sums, whose own relative error is at most DIM + 4 units, except for underflow.
    __device__ __forceinline__ float margin(const Rounded& row, float best, u32 places) const {
        const float product = row.error * largest_centroid + row.length * largest_error + adding_up;
        const float length = row.length + row.error;
        const float square = fmaxf(length * length - 2 * (best - bias) + 2 * product, 0.0f);
        // Storing the place costs each of two products up to `places` units of 2^-23 of 2 BIAS.
        const float stored = 8 * (places + 1) * UNIT * bias;
        return 1.001f * (2 * product + stored + 1.1f * (DIM + 4) * UNIT * square + underflow) +
               1e-30f;
    }
};

// What the best sum of `find_by_groups.cuh` needs to be certain, and the least product of a candidate otherwise.
struct GroupMargins {
    float lead, least;

    __device__ __forceinline__ GroupMargins(const Errors& errors, const Rounded& row, float best) {
        const float length = row.length + row.error, both = length + errors.largest_centroid;
        // No sum, and no number that is added, is larger: |x||c| + |c|^2 / 2 + n, and a bit. 32 units are lost for each
        // multiplication.
        const float largest = __fmaf_rn(both * both, 0.56f, 0.01f);
        const float rounding = row.error * errors.largest_centroid + row.length * errors.largest_error;
        const float own = rounding + (32 * IMAGE_STEPS + 16) * UNIT * largest;
        const float product = add(best, norm_of(row));
        const float square = fmaxf(length * length - 2 * product + 2 * own, 0.0f);
        const float exact = 1.1f * (DIM + 4) * UNIT * square + errors.underflow;
        lead = 1.001f * (2 * own + exact) + 1e-30f;
        const float others = rounding + errors.adding_up + 16 * UNIT * errors.bias;
        least = fmaxf(add(errors.bias, product) - 1.001f * (own + others + exact) - 1e-30f, 0.0f);
    }
};
