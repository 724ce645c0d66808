// Rows that need not be compared: those whose cluster cannot have changed since they were compared last.
//
// Whoever compares a row with all centroids notes its gap: by how much every other centroid is farther than its own. From
// then on its own comes away by as much as it moves, and any other comes nearer by as much as that one moves: all in all by
// no more than the drift of its cluster. As long as the gap is larger than the drift since, the row stays in its cluster
// (G. Hamerly, Making k-means even faster, SDM 2010, with one number a row instead of two).
//
// What is kept is the gap plus the drift of that time, rounded down; drifts are rounded up.

#include "kmeans/rounds.cuh"

// The drift of a cluster in all rounds.
__device__ __forceinline__ float drift_of(const Rounds& rounds, u32 cluster) {
    return __fadd_ru(rounds.drifts[cluster], rounds.status->drift);
}

// By how much another centroid is farther than a row's own, given at least the distance of one and at most that of the
// other. `error`: the largest relative error of squares in exact sums. These tell two distances apart that differ by so much
// of their sum: also after both have changed by less than they differ, for which four times that is taken off.
__device__ __forceinline__ float gap_between(float own, float other, float error) {
    return __fmaf_rd(-4 * error, __fadd_ru(own, other), __fadd_rd(other, -own));
}

// The gap of a row that is to be compared again, whatever the drift of the cluster that it comes to.
__device__ __forceinline__ float not_known() { return -Limits<float>::infinity(); }

// Notes the gap of a row in a cluster.
__device__ __forceinline__ void note_gap(const Rounds& rounds, u32 row, u32 cluster, float gap) {
    // Of a gap that is not known, the cluster may be one that pads the last tile.
    const float drift = gap == not_known() ? 0 : __fadd_rd(rounds.drifts[cluster], rounds.status->drift);
    rounds.gaps[row] = __fadd_rd(gap, drift);
}

// Lists the rows that are to be compared. A thread per row.
extern "C" __global__ __launch_bounds__(1024) void list_rows(Rounds rounds, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    bool is_kept = false;
    if (row < rounds.count) {
        // A row that is in no cluster has no gap.
        const float gap = rounds.gaps[row];
        is_kept = gap > rounds.status->drift && gap > drift_of(rounds, rounds.labels[row]);
    }
    const bool is_listed = row < rounds.count && !is_kept;
    const u32 at = place_in(&rounds.status->kept, &rounds.status->listed, is_kept, is_listed);
    if (is_listed) rounds.listed[at] = row;
}
