// Skips rows whose cluster cannot have changed since they were last compared: one lower bound per row (G.
// Hamerly, Making k-means even faster, SDM 2010), on the gap between its two nearest centroids.
//
// Comparing a row with all centroids yields its gap: the distance of the second nearest centroid minus that
// of the nearest. In a round, the nearest centroid moves away by at most its own shift, and every other
// centroid comes nearer by at most the longest shift of all. The drift of a cluster is the sum of both over
// all rounds: while the gap exceeds the drift since the comparison, the row stays in its cluster.
//
// `gaps` has the gap plus the drift at the time of the comparison, rounded down; drifts are rounded up.

#include "kmeans/rounds.cuh"

// The drift of a cluster over all rounds.
__device__ __forceinline__ float drift_of(const Rounds& rounds, u32 cluster) {
    return __fadd_ru(rounds.drifts[cluster], rounds.status->drift);
}

// A lower bound on the gap, from an upper bound `nearest` on the distance of the row's centroid and a lower bound
// `other` on that of every other centroid. `error` is the largest relative error of squares in exact sums. It can
// exchange two distances whose difference is at most `error` times their sum; four times that is subtracted, as
// both may change by less than they differ.
__device__ __forceinline__ float gap_between(float nearest, float other, float error) {
    return __fmaf_rd(-4 * error, __fadd_ru(nearest, other), __fadd_rd(other, -nearest));
}

// The gap of a row that must be compared again, for every drift.
__device__ __forceinline__ float not_known() { return -Limits<float>::infinity(); }

// Records the gap of a row and its cluster.
__device__ __forceinline__ void note_gap(const Rounds& rounds, u32 row, u32 cluster, float gap) {
    // With an unknown gap, the cluster may be one that pads the last tile.
    const float drift = gap == not_known() ? 0 : __fadd_rd(rounds.drifts[cluster], rounds.status->drift);
    rounds.gaps[row] = __fadd_rd(gap, drift);
}

// Lists the rows to compare. A thread per row.
extern "C" __global__ __launch_bounds__(1024) void list_rows(Rounds rounds, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    bool is_unchanged = false;
    if (row < rounds.count) {
        // A row without a cluster has an unknown gap.
        const float gap = rounds.gaps[row];
        is_unchanged = gap > rounds.status->drift && gap > drift_of(rounds, rounds.labels[row]);
    }
    const bool is_listed = row < rounds.count && !is_unchanged;
    const u32 at = place_in(&rounds.status->unchanged, &rounds.status->listed, is_unchanged, is_listed);
    if (is_listed) rounds.listed[at] = row;
}
