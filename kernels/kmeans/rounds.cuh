// Lloyd's rounds on rows that stay on the device: definitions that the kernels share.
//
// A round is a sequence of launches without synchronising with the host: assign (`near.cuh`, or of the rows that `gaps.cuh`
// lists `assign_tiles.cuh`, with `by_groups.cuh` where groups of warps multiply), `add_moved`, `finish_round`. The outcome
// is in a Status; once it says that rounds have ended, later launches change no label, sum or centroid. DIM is the number of
// elements in a row. Sums are exact, like those of `ClusterSums` in src/device/cluster_sums.rs, and means have the same bits.
//
// Rows are float32 or float64, and compared by squared distance or by cosine. Products in half precision tell squared
// distances for all of these: directions that are nearer have the smaller cosine distance, but for rounding, for which
// bounds allow. Bounds are float32.

#include "common/scan.cuh"

enum : u32 { NO_CLUSTER = 0xffffffffu, NO_ROW = NO_CLUSTER };

// The bit of a label, after the last rounds, of a row of which another centroid may be the nearest by the definition of a
// distance. The same number as in src/device/cuda/kmeans/structs.rs.
enum : u32 { UNDECIDED = 0x80000000u };

// Why rounds ended. The same numbers as in src/device/cuda/kmeans/structs.rs. They are given up where too many centroids are
// equally near to rows, or where weights make numbers that float64 does not hold.
enum End : u32 { GOING_ON, STABLE, CONVERGED, EMPTY_CLUSTER, GIVEN_UP };

// How rounds stand. The same struct as in src/device/cuda/kmeans/structs.rs.
struct Status {
    u32 end;
    u32 iterations;
    u32 current;           // which of the two sets of centroids is valid
    u32 moved_last;        // rows that changed their cluster in the last complete round
    u32 moved;             // the same in this round so far (length of the list)
    u32 uncertain;         // rows whose nearest centroid is not certain (length of the list)
    u32 pairs;             // pairs of an uncertain row and a candidate (length of the list)
    u32 empty;             // clusters without rows that have a weight
    u32 arrived;           // blocks that have finished `finish_round`
    u32 largest_row;       // longest rounded row, as the bits of a float
    u32 typical_row;       // a length that few rows exceed, as the bits of a float
    u32 largest_centroid;  // longest centroid that is not far away, as the bits of a float
    u32 largest_error;     // largest rounding error of one of these, as the bits of a float
    u32 has_far;           // whether a centroid is far away
    u32 kept;              // rows whose cluster cannot have changed
    u32 listed;            // all others (length of the list), if they are listed
    float drift;           // by how much any centroid may have come nearer to rows, in all rounds
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
    float* gaps;    // see `gaps.cuh`: of each row, …
    float* drifts;  // … by how much each centroid moved, in all rounds, …
    u32* listed;    // … and the rows to compare
    u32 count, k;
};

// Sums of clusters, and the convergence test.
struct Sums {
    const double* weights;  // by the rows' original numbers, if WEIGHTED
    long long* sums;        // per cluster and dimension: sum of the elements times weights, in steps, …
    long long* parts;       // … and in parts of a step, if HAS_PARTS; behind the dimensions those of weights, if WEIGHTED
    long long* counts;      // per cluster: rows that have a weight
    long long* wide;        // per sum, BINS: the numbers that are no whole number of steps or parts
    u32* is_wide;           // per cluster: whether it ever had such a number
    u32* first_rows;        // per cluster, if HAS_SINGLES: its first row, where it is looked for, …
    u64* differing;         // … and two of its rows that differ, in 32 bits each, as far as they are known
    const double* inverse;  // per sum of a cluster: 1 / step, a power of two
    double* shifts;         // per centroid: squared distance it moved
    double limit;           // the largest number in steps, and how many parts a step has
    double tolerance;       // rounds end at this sum of squared movements
};

__device__ __forceinline__ Scalar* current_centroids(const Rounds& rounds) {
    return rounds.centroids + (u64)rounds.status->current * rounds.k * DIM;
}

// The original number of a row.
__device__ __forceinline__ u32 number_of(const Rounds& rounds, u32 row) {
    return rounds.numbers == nullptr ? row : rounds.numbers[row];
}

// The rows to compare in this round: those that are listed, or all.
struct Compared {
    const u32* listed;
    u32 count;

    __device__ __forceinline__ Compared(const u32* listed, u32 count) : listed(listed), count(count) {}

    explicit __device__ __forceinline__ Compared(const Rounds& rounds) {
        const Status* status = rounds.status;
        // A list costs more than a few rows.
        const bool is_listed = status->kept > rounds.count / 8;
        listed = is_listed ? rounds.listed : nullptr;
        count = is_listed ? status->listed : rounds.count;
    }

    // The row at a place, which is below `count`.
    __device__ __forceinline__ u32 row(u32 at) const { return listed == nullptr ? at : listed[at]; }
};

// Elements that are read and written at a time, where rows have whole numbers of them.
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

// One more element of a row and a centroid, …
__device__ __forceinline__ Total add_pair(Scalar x, Scalar c, Total total) {
    return Step<SUM>::of(SUM == PRODUCTS ? -x : x, c, total);
}
// … and the distance of all of them; a sum of squares is one.
__device__ __forceinline__ Real finish_pair(Total total) {
    if constexpr (SUM == SQUARES) return total;
    return distance_of(total, Bits{0, 0});
}

// Whether rounding may hide which of two distances is less by the definition: `least` is not greater. Each errs by less than
// DIM + 8 halves of a unit in the last place; by cosine of 2, and unit vectors by another one.
__device__ __forceinline__ bool is_undecided(Real least, Real second) {
    const Real share = Real(1.05) * (DIM + 8) * Limits<Real>::epsilon();
    const Real apart = SUM == SQUARES ? least * share + 1024 * Limits<Real>::smallest() : 2 * share + 8 * Limits<Real>::epsilon();
    // Written so that NaN is undecided.
    return !(second > least + apart);
}

__device__ __forceinline__ Real distance_between(const Scalar (&row)[DIM], const Scalar* centroid) {
    Scalar other[DIM];
    load_row(other, centroid);
    Total total = 0;
#pragma unroll
    for (u32 j = 0; j < DIM; j++) total = add_pair(row[j], other[j], total);
    return finish_pair(total);
}

// Puts a row into a cluster, at its place in the list of those that moved.
__device__ __forceinline__ void record(const Rounds& rounds, u32 place, u32 row, u32 before, u32 cluster) {
    rounds.moved[place] = {row, before};
    rounds.labels[row] = cluster;
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
    if (is_new) record(rounds, start + __popc(lanes & ((1u << lane) - 1)), row, before, cluster);
}

// The place of a thread's entry in one of two lists, if it has one. Their lengths are raised once for all threads of the
// block, which all call it: a device does operations on one place one after the other.
__device__ __forceinline__ u32 place_in(u32* one, u32* other, bool in_one, bool in_other) {
    __shared__ u32 starts[2];
    u32 all;
    const u32 before = sum_before(in_one | in_other << 16, all);
    const u32 own = threadIdx.x == 0 ? all & 0xffff : all >> 16;
    if (threadIdx.x < 2 && own > 0) starts[threadIdx.x] = atomicAdd(threadIdx.x == 0 ? one : other, own);
    __syncthreads();
    return in_other ? starts[1] + (before >> 16) : starts[0] + (before & 0xffff);
}
