// Lloyd's rounds on device-resident rows: definitions that the kernels share.
//
// A round is a sequence of launches without synchronising with the host: assign (`sort_means.cuh`; or, for
// the rows listed by `hamerly.cuh`, `assign_tiles.cuh`, which warpgroups do by `sm90_warpgroup_assign.cuh`),
// `add_moved`, `finish_round`. The outcome is in a Status; once it says that rounds have ended, later
// launches change no label, sum or centroid. DIM is the number of elements in a row. Sums are exact, like
// those of `Sums` in src/device/cluster_sums.rs, and means have the same bits.
//
// Rows are float32 or float64, and compared by squared distance or by cosine. fp16 products approximate
// squared distances in all of these cases: the nearer of two directions has the smaller cosine distance, up
// to rounding errors that the bounds include. Bounds are float32.

#include "common/scan.cuh"

enum : u32 { NO_CLUSTER = 0xffffffffu, NO_ROW = NO_CLUSTER };

// Set in the label of a row, after the last round, if another centroid may be the nearest by the definition
// of a distance. The same number as in src/device/cuda/kmeans/structs.rs.
enum : u32 { UNDECIDED = 0x80000000u };

// The reasons why rounds end. The same numbers as in src/device/cuda/kmeans/structs.rs. GIVEN_UP: too many
// centroids are equally near to rows, or weighted elements exceed the range of float64.
enum End : u32 { GOING_ON, STABLE, CONVERGED, EMPTY_CLUSTER, GIVEN_UP };

// The state of the rounds. The same struct as in src/device/cuda/kmeans/structs.rs.
struct Status {
    u32 end;
    u32 iterations;
    u32 current;           // which of the two sets of centroids is valid
    u32 moved_last;        // rows that changed their cluster in the last complete round
    u32 moved;             // rows that changed their cluster in this round so far (length of the list)
    u32 uncertain;         // rows whose nearest centroid is not certain (length of the list)
    u32 pairs;             // pairs of an uncertain row and a candidate (length of the list)
    u32 empty;             // clusters without rows that have a weight
    u32 arrived;           // blocks that have finished `finish_round`
    u32 largest_row;       // longest rounded row, as the bits of a float
    u32 typical_row;       // a norm that few rows exceed, as the bits of a float
    u32 largest_centroid;  // norm of the longest centroid that is no outlier, as the bits of a float
    u32 largest_error;     // largest rounding error of such a centroid, as the bits of a float
    u32 has_far;           // whether a centroid is an outlier
    u32 unchanged;         // rows whose cluster cannot have changed; see `hamerly.cuh`
    u32 listed;            // all other rows (length of the list), if they are listed
    float drift;           // sum over all rounds of the longest shift of a centroid
    u32 padding;
    u64 rechecked;
};

// A row that changed its cluster: its position, and its old cluster.
struct Moved {
    u32 row, before;
};

// The structs of src/device/cuda/kmeans/structs.rs, which documents sizes.

// The rows and the state of rounds.
struct Rounds {
    Status* status;
    const Scalar* rows;
    const u32* numbers;  // original numbers of the rows, if they were sorted
    Scalar* centroids;   // two sets
    u32* labels;
    Moved* moved;
    float* gaps;    // see `hamerly.cuh`: by row, …
    float* drifts;  // … by centroid, the sum of its shifts over all rounds, …
    u32* listed;    // … and the rows to compare
    u32 count, k;
};

// Sums of clusters, and the convergence test.
struct Sums {
    const double* weights;  // per cluster and dimension: sum of the weighted elements, in steps, …
    long long* sums;        // … and in parts of a step, if HAS_PARTS; after the dimensions that of weights, if WEIGHTED
    long long* parts;       // per cluster: number of rows with a weight
    long long* counts;      // per sum, BINS: the terms that are no multiple of a step or part
    long long* wide;        // per cluster: whether it ever had such a term
    u32* is_wide;           // per cluster: whether it ever had such a number
    u32* first_rows;        // per cluster, if HAS_SINGLES: its first row, while it is determined, …
    u64* differing;         // … and two of its rows that differ, in 32 bits each, if they are known
    const double* inverse;  // per sum of a cluster: 1 / step, a power of two
    double* shifts;         // per centroid: squared distance that it moved
    double limit;           // maximum magnitude of a term in steps, and parts per step
    double tolerance;       // rounds end at this sum of squared movements
};

__device__ __forceinline__ Scalar* current_centroids(const Rounds& rounds) {
    return rounds.centroids + (u64)rounds.status->current * rounds.k * DIM;
}

// The original number of a row.
__device__ __forceinline__ u32 number_of(const Rounds& rounds, u32 row) {
    return rounds.numbers == nullptr ? row : rounds.numbers[row];
}

// The rows to compare in this round: the listed ones, or all.
struct Compared {
    const u32* listed;
    u32 count;

    __device__ __forceinline__ Compared(const u32* listed, u32 count) : listed(listed), count(count) {}

    explicit __device__ __forceinline__ Compared(const Rounds& rounds) {
        const Status* status = rounds.status;
        // Reading a list costs more than comparing a few rows.
        const bool is_listed = status->unchanged > rounds.count / 8;
        listed = is_listed ? rounds.listed : nullptr;
        count = is_listed ? status->listed : rounds.count;
    }

    // The row at a position below `count`.
    __device__ __forceinline__ u32 row(u32 at) const { return listed == nullptr ? at : listed[at]; }
};

// Elements that are read and written at a time, if a row is a multiple of them.
constexpr u32 VECTOR = 16 / sizeof(Scalar);
constexpr bool HAS_VECTORS = DIM % VECTOR == 0;
struct alignas(16) Vector {
    Scalar parts[VECTOR];
};

// Loads a row into registers.
__device__ __forceinline__ void load_row(Scalar (&to)[DIM], const Scalar* from) {
    if constexpr (HAS_VECTORS) {
#pragma unroll
        for (u32 j = 0; j < DIM; j += VECTOR) {
            const Vector vector = *reinterpret_cast<const Vector*>(from + j);
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) to[j + i] = vector.parts[i];
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < DIM; j++) to[j] = from[j];
    }
}

__device__ __forceinline__ void store_row(Scalar* to, const Scalar (&from)[DIM]) {
    if constexpr (HAS_VECTORS) {
#pragma unroll
        for (u32 j = 0; j < DIM; j += VECTOR) {
            Vector vector;
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) vector.parts[i] = from[j + i];
            *reinterpret_cast<Vector*>(to + j) = vector;
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < DIM; j++) to[j] = from[j];
    }
}

// Adds one element of a row and a centroid to their total, …
__device__ __forceinline__ Total add_pair(Scalar x, Scalar c, Total total) {
    return Step<SUM>::of(SUM == PRODUCTS ? -x : x, c, total);
}
// … and finishes the distance; a sum of squares is one.
__device__ __forceinline__ Real finish_pair(Total total) {
    if constexpr (SUM == SQUARES) return total;
    return distance_of(total, Bits{0, 0});
}

// Whether the smaller of two distances by the definition is uncertain due to rounding; `least` <= `second`.
// Each errs by less than DIM + 8 halves of a unit in the last place, by cosine of 2, and one more for unit
// vectors.
__device__ __forceinline__ bool is_undecided(Real least, Real second) {
    const Real share = Real(1.05) * (DIM + 8) * Limits<Real>::epsilon();
    const Real margin = SUM == SQUARES ? least * share + 1024 * Limits<Real>::smallest()
                                       : 2 * share + 8 * Limits<Real>::epsilon();
    // Written so that NaN is undecided.
    return !(second > least + margin);
}

__device__ __forceinline__ Real distance_between(const Scalar (&row)[DIM], const Scalar* centroid) {
    Scalar other[DIM];
    load_row(other, centroid);
    Total total = 0;
#pragma unroll
    for (u32 j = 0; j < DIM; j++) total = add_pair(row[j], other[j], total);
    return finish_pair(total);
}

// Assigns a row to a cluster, and records it at a position of the list of moved rows.
__device__ __forceinline__ void record(const Rounds& rounds, u32 place, u32 row, u32 before, u32 cluster) {
    rounds.moved[place] = {row, before};
    rounds.labels[row] = cluster;
}

// Records the rows that changed their cluster. All threads of a warp call it; those with `is_new` have such a
// row.
__device__ __forceinline__ void move_row(const Rounds& rounds, bool is_new, u32 row, u32 before,
                                         u32 cluster) {
    const u32 lanes = __ballot_sync(0xffffffffu, is_new);
    if (lanes == 0) return;
    const u32 lane = threadIdx.x % 32, leader = __ffs(lanes) - 1;
    u32 start = 0;
    if (lane == leader) start = atomicAdd(&rounds.status->moved, __popc(lanes));
    start = __shfl_sync(0xffffffffu, start, leader);
    if (is_new) record(rounds, start + __popc(lanes & ((1u << lane) - 1)), row, before, cluster);
}

// The position of a thread's entry in one of two lists, if it has one. All threads of a block call it, and
// the lengths are raised once per block: a device serialises atomics on one address.
__device__ __forceinline__ u32 place_in(u32* one, u32* other, bool in_one, bool in_other) {
    __shared__ u32 starts[2];
    u32 all;
    const u32 before = sum_before(in_one | in_other << 16, all);
    const u32 count = threadIdx.x == 0 ? all & 0xffff : all >> 16;
    if (threadIdx.x < 2 && count > 0) starts[threadIdx.x] = atomicAdd(threadIdx.x == 0 ? one : other, count);
    __syncthreads();
    return in_other ? starts[1] + (before >> 16) : starts[0] + (before & 0xffff);
}
