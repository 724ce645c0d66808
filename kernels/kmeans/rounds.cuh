// Lloyd's rounds on rows that stay on the device: definitions that the kernels share.
//
// A round is a sequence of launches without synchronising with the host: assign (`near.cuh` or
// `assign_tiles.cuh`), `add_moved`, `means`, `finish_round`. The outcome is in a Status; once it says
// that rounds have ended, later launches do nothing. DIM is the number of elements in a row. Sums are
// exact, like those of `ClusterSums` in src/device/cluster_sums.rs, and means have the same bits.

#include "common/warp.cuh"

constexpr u32 NO_CLUSTER = 0xffffffffu;

// Why rounds ended. The same numbers as in src/device/cuda/kmeans/structs.rs.
enum End : u32 { GOING_ON, STABLE, CONVERGED, EMPTY_CLUSTER, CROWDED };

struct Status {
    u32 end;
    u32 iterations;
    u32 current;           // which of the two sets of centroids is valid
    u32 moved_last;        // rows that changed their cluster in the last whole round
    u32 moved;             // … and in this one so far: the length of the list
    u32 uncertain;         // rows whose cluster the products left open: the length of the list
    u32 pairs;             // of uncertain rows and centroids to look at
    u32 empty;             // clusters without rows
    u32 arrived;           // blocks that are done with `finish_round`
    u32 largest_row;       // lengths, as the bits of floats: of a rounded row, …
    u32 largest_centroid;  // … of a centroid, …
    u32 largest_error;     // … and of what rounding takes from a centroid
    u64 rechecked;
};
static_assert(sizeof(Status) == 56, "the host has the same struct");

// A row that changed its cluster: its position, and its old cluster.
struct Moved {
    u32 row, before;
};

// The structs of src/device/cuda/kmeans/structs.rs, which documents sizes.

// The rows and the state of rounds.
struct Rounds {
    Status* status;
    const float* rows;
    const u32* numbers;  // of the rows, where they have been sorted
    float* centroids;    // two sets
    u32* labels;
    Moved* moved;
    u32 count, k;
};
static_assert(sizeof(Rounds) == 56, "the host has the same struct");

// Sums of clusters, and the convergence test.
struct Sums {
    long long* sums;        // of the elements of each cluster, in steps …
    long long* counts;      // … and how many rows it has
    long long* wide;        // BINS for each sum: of the elements that are no whole number of steps
    u32* is_wide;           // whether a cluster ever had such an element
    const double* inverse;  // of the step of each element, a power of two
    double* shifts;         // squared distance that each centroid moved
    double limit;           // the largest element, in steps
    double tolerance;       // the summed squared movement of centroids at which rounds end
};
static_assert(sizeof(Sums) == 64, "the host has the same struct");

__device__ __forceinline__ float* current_centroids(const Rounds& rounds) {
    return rounds.centroids + (u64)rounds.status->current * rounds.k * DIM;
}

// Loads a row into registers.
__device__ __forceinline__ void load_row(float (&to)[DIM], const float* from) {
    if constexpr (DIM % 4 == 0) {
#pragma unroll
        for (u32 j = 0; j < DIM; j += 4) {
            const float4 part = *reinterpret_cast<const float4*>(from + j);
            to[j] = part.x, to[j + 1] = part.y, to[j + 2] = part.z, to[j + 3] = part.w;
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < DIM; j++) to[j] = from[j];
    }
}

__device__ __forceinline__ void store_row(float* to, const float (&from)[DIM]) {
    if constexpr (DIM % 4 == 0) {
#pragma unroll
        for (u32 j = 0; j < DIM; j += 4) {
            *reinterpret_cast<float4*>(to + j) = {from[j], from[j + 1], from[j + 2], from[j + 3]};
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < DIM; j++) to[j] = from[j];
    }
}

__device__ __forceinline__ float square_distance(const float (&row)[DIM], const float* centroid) {
    float other[DIM];
    load_row(other, centroid);
    float total = 0;
#pragma unroll
    for (u32 j = 0; j < DIM; j++) total = Step<SQUARES>::of(row[j], other[j], total);
    return total;
}

// Records that a row is now in a cluster. All threads of a warp call it; `is_new` says which of them
// have a row to record.
__device__ __forceinline__ void move_row(const Rounds& rounds, bool is_new, u32 row, u32 before,
                                         u32 cluster) {
    const u32 lanes = __ballot_sync(0xffffffffu, is_new);
    if (lanes == 0) return;
    const u32 lane = threadIdx.x % 32, leader = __ffs(lanes) - 1;
    u32 start = 0;
    if (lane == leader) start = atomicAdd(&rounds.status->moved, __popc(lanes));
    start = __shfl_sync(0xffffffffu, start, leader);
    if (!is_new) return;
    rounds.moved[start + __popc(lanes & ((1u << lane) - 1))] = {row, before};
    rounds.labels[row] = cluster;
}
