// Assignment of f32 rows with few elements by squared distance, with sorted centroids (S. Phillips,
// Acceleration of k-means and related clustering algorithms, ALENEX 2002: "sort-means"). A row is compared
// with centroids in the order of their distance from the row's previous centroid, until the triangle
// inequality rules out the rest. Rows are sorted by cluster now and then, so that the lanes of a warp read
// the same centroids.

#include "common/sort.cuh"
#include "kmeans/rounds.cuh"

constexpr bool IS_LOW = DIM <= 32;
constexpr bool HAS_SORT_MEANS = IS_LOW && ELEMENT == F32 && SUM == SQUARES;

// The struct of src/device/cuda/kmeans/structs.rs, which documents sizes.
struct SortedCentroids {
    u64* lists;  // per centroid: (distance, number) of all others, ascending, then an entry with distance NaN
    u32* sorted_counts;
};

// The triangle inequality holds for exact distances. Rounded ones have a relative error below (DIM + 4) 2^-24 plus
// an underflow error below 1e-20. Three times these bounds are allowed for, so a centroid that is not compared is
// also farther by the definition of a distance.
constexpr float WIDER = 1.00001f, UNDERFLOW = 1e-18f;

// A row, and its nearest centroid so far.
struct Nearest {
    Scalar values[DIM];
    Scalar least = Limits<Scalar>::infinity();
    u32 cluster = 0;
    Scalar second = Limits<Scalar>::infinity();  // distance of the second nearest, if it is needed

    __device__ __forceinline__ Scalar distance_to(const Scalar (&centroid)[DIM]) const {
        Total total = 0;
#pragma unroll
        for (u32 j = 0; j < DIM; j++) total = add_pair(values[j], centroid[j], total);
        return finish_pair(total);
    }

    // Updates the second nearest distance with that of another centroid, before `take`.
    __device__ __forceinline__ void note_second(Scalar distance) {
        const Scalar farther = distance > least ? distance : least;
        if (farther < second) second = farther;
    }

    // Takes a centroid at this distance if it is nearer; ties go to the first.
    __device__ __forceinline__ void take(Scalar distance, u32 number) {
        if (distance < least || (distance == least && number < cluster)) least = distance, cluster = number;
    }
};

// For each centroid, the list of all others by ascending distance, as (bits of a lower bound on the distance)
// << 32 | number, and an entry of all ones at the end. A block per centroid; shared memory for `size`
// entries, a power of two of at least k.
extern "C" __global__ __launch_bounds__(256) void sort_centroids(
    Rounds rounds, SortedCentroids sorted, u32 size, u32 is_last) {
    if (rounds.status->end != GOING_ON && !is_last) return;
    u64* entries = reinterpret_cast<u64*>(shared);
    const Scalar* centroids = current_centroids(rounds);
    const u32 cluster = blockIdx.x;
    if constexpr (HAS_SORT_MEANS) {
        Scalar values[DIM];
        load_row(values, centroids + (u64)cluster * DIM);
        for (u32 i = threadIdx.x; i < size; i += blockDim.x) {
            u64 entry = ~0ull;
            if (i < rounds.k && i != cluster) {
                const float distance =
                    __fsqrt_rn(distance_between(values, centroids + (u64)i * DIM));
                entry = (u64)__float_as_uint(__fdiv_rn(distance, WIDER)) << 32 | i;
            }
            entries[i] = entry;
        }
    }
    sort_power_of_two<Block>(entries, size);
    for (u32 i = threadIdx.x; i < rounds.k; i += blockDim.x) {
        sorted.lists[(u64)cluster * rounds.k + i] = entries[i];
    }
}

// Compares rows with all centroids, in ascending order of numbers.
template <u32 ROWS, bool WITH_SECOND = false>
__device__ __forceinline__ void compare_all(const Rounds& rounds, const Scalar* centroids, Nearest (&nearest)[ROWS]) {
    for (u32 i = 0; i < rounds.k; i++) {
        Scalar centroid[DIM];
        load_row(centroid, centroids + (u64)i * DIM);
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            const Scalar distance = nearest[r].distance_to(centroid);
            if (WITH_SECOND) nearest[r].note_second(distance);
            if (distance < nearest[r].least) nearest[r].least = distance, nearest[r].cluster = i;
        }
    }
}

// Finds the nearest centroid of every row from `first` on; no row has a cluster yet. LANE_ROWS rows per
// thread. `is_last`: rounds have ended before they began; as second nearest distances are unknown, all rows
// are undecided.
extern "C" __global__ __launch_bounds__(256) void assign_first(
    Rounds rounds, SortedCentroids, u32 first, u32 is_last) {
    if constexpr (HAS_SORT_MEANS) {
        const Scalar* centroids = current_centroids(rounds);
        const u32 start = first + blockIdx.x * (256 * LANE_ROWS) + threadIdx.x;
        Nearest nearest[LANE_ROWS];
#pragma unroll
        for (u32 r = 0; r < LANE_ROWS; r++) {
            const u32 row = start + 256 * r < rounds.count ? start + 256 * r : rounds.count - 1;
            load_row(nearest[r].values, rounds.rows + (u64)row * DIM);
        }
        compare_all(rounds, centroids, nearest);
#pragma unroll
        for (u32 r = 0; r < LANE_ROWS; r++) {
            const u32 label = nearest[r].cluster | (is_last ? UNDECIDED : 0);
            if (start + 256 * r < rounds.count) rounds.labels[start + 256 * r] = label;
        }
        // All rows moved, so no list is needed.
        if (start == 0) rounds.status->moved = rounds.count;
    }
}

// Finds the nearest centroid of a row, given that of the round before. `IS_LAST`: rounds have ended, and
// labels must match the centroids.
template <bool IS_LAST>
__device__ __forceinline__ void assign_sort_means_one(const Rounds& rounds, const SortedCentroids& sorted,
                                                      u32 first) {
    if (rounds.status->end != GOING_ON && !IS_LAST) return;
    const u32 row = first + blockIdx.x * blockDim.x + threadIdx.x;
    u32 before = NO_CLUSTER, cluster = NO_CLUSTER;
    bool is_open = false;
    if constexpr (HAS_SORT_MEANS) {
        if (row < rounds.count) {
            const Scalar* centroids = current_centroids(rounds);
            Nearest nearest;
            load_row(nearest.values, rounds.rows + (u64)row * DIM);
            before = rounds.labels[row];
            Scalar centroid[DIM];
            load_row(centroid, centroids + (u64)before * DIM);
            nearest.take(nearest.distance_to(centroid), before);
            const float distance_before = __fsqrt_rn(nearest.least);
            // Only centroids within this distance of the row's own may be as near to the row (triangle
            // inequality).
            float radius = __fmaf_rn(add(distance_before, distance_before), WIDER, UNDERFLOW);
            const uint2* list = reinterpret_cast<const uint2*>(sorted.lists + (u64)before * rounds.k);
            for (uint2 entry = *list; __uint_as_float(entry.y) <= radius;) {
                const u32 other = entry.x;
                load_row(centroid, centroids + (u64)other * DIM);
                entry = *++list;
                const Scalar distance = nearest.distance_to(centroid);
                if (IS_LAST) nearest.note_second(distance);
                if (distance > nearest.least) continue;
                nearest.take(distance, other);
                radius = __fmaf_rn(add(distance_before, __fsqrt_rn(nearest.least)), WIDER, UNDERFLOW);
            }
            cluster = nearest.cluster;
            is_open = IS_LAST && is_undecided(nearest.least, nearest.second);
        }
    }
    move_row(rounds, cluster != before, row, before, cluster);
    if (is_open) rounds.labels[row] |= UNDECIDED;
}

// The same for every row from `first` on, a thread for each.
extern "C" __global__ __launch_bounds__(256) void assign_sort_means(
    Rounds rounds, SortedCentroids sorted, u32 first, u32) {
    assign_sort_means_one<false>(rounds, sorted, first);
}
extern "C" __global__ __launch_bounds__(256) void assign_last(
    Rounds rounds, SortedCentroids sorted, u32 first, u32) {
    assign_sort_means_one<true>(rounds, sorted, first);
}

// Counting sort of rows by cluster and, for rows of few elements, within a cluster by the number of centroids
// to compare: counts, prefix sums (`add_up`), moves. A block has SORTED_ROWS rows, all of which have a
// cluster.

// The sort keys of rows, in the memory of the list of moved rows, which is not needed during a sort.
__device__ __forceinline__ u32* places_of(const Rounds& rounds) { return reinterpret_cast<u32*>(rounds.moved); }

// The sort key of a row: `ranks` keys per cluster, by the logarithm of the number of centroids to compare.
__device__ __forceinline__ u32 place_of(const Rounds& rounds, const SortedCentroids& sorted, u32 row, u32 ranks) {
    const u32 cluster = rounds.labels[row];
    u32 rank = 0;
    if constexpr (HAS_SORT_MEANS) {
        // Once rounds have ended, there are no lists of centroids.
        if (ranks > 1 && rounds.status->end == GOING_ON) {
            Scalar values[DIM];
            load_row(values, rounds.rows + (u64)row * DIM);
            const Scalar* centroid = current_centroids(rounds) + (u64)cluster * DIM;
            const float radius = 2 * __fsqrt_rn(distance_between(values, centroid));
            const u64* list = sorted.lists + (u64)cluster * rounds.k;
            u32 low = 0, high = rounds.k - 1;
            while (low < high) {
                const u32 middle = (low + high) / 2;
                if (__uint_as_float(list[middle] >> 32) > radius) {
                    high = middle;
                } else {
                    low = middle + 1;
                }
            }
            // Two ranks per octave: the bits of a float, read as an integer, are a logarithm.
            rank = min((__float_as_uint(low + 1.0f) - __float_as_uint(1.0f)) >> 22, ranks - 1);
        }
    }
    return cluster * ranks + rank;
}

// Writes the sort key of each row, and counts rows by key. Shared memory for k * ranks counts.
// `sorted_counts` is zero before.
extern "C" __global__ __launch_bounds__(1024) void sort_count(Rounds rounds, SortedCentroids sorted, u32 ranks) {
    if (rounds.status->end == GIVEN_UP) return;
    u32* counts = reinterpret_cast<u32*>(shared);
    const u32 places = rounds.k * ranks;
    for (u32 i = threadIdx.x; i < places; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    const u32 first = blockIdx.x * SORTED_ROWS;
    for (u32 i = threadIdx.x; i < SORTED_ROWS && first + i < rounds.count; i += blockDim.x) {
        const u32 place = place_of(rounds, sorted, first + i, ranks);
        places_of(rounds)[first + i] = place;
        atomicAdd(&counts[place], 1u);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < places; i += blockDim.x) {
        if (counts[i] > 0) atomicAdd(&sorted.sorted_counts[i], counts[i]);
    }
}

// Moves numbers and labels of all rows to their new positions, and the rows themselves unless `rows` is null.
// Blocks and shared memory as for `sort_count`.
extern "C" __global__ __launch_bounds__(1024) void sort_move(
    Rounds rounds, SortedCentroids sorted, u32 ranks, Scalar* rows, u32* numbers, u32* labels) {
    if (rounds.status->end == GIVEN_UP) return;
    u32* positions = reinterpret_cast<u32*>(shared);
    const u32 all = rounds.k * ranks;
    for (u32 i = threadIdx.x; i < all; i += blockDim.x) positions[i] = 0;
    __syncthreads();
    const u32 first = blockIdx.x * SORTED_ROWS;
    u32 places[SORTED_ROWS / 1024];
#pragma unroll
    for (u32 i = 0; i < SORTED_ROWS / 1024; i++) {
        const u32 row = first + i * 1024 + threadIdx.x;
        if (row >= rounds.count) continue;
        places[i] = places_of(rounds)[row];
        atomicAdd(&positions[places[i]], 1u);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
        if (positions[i] > 0) positions[i] = atomicAdd(&sorted.sorted_counts[i], positions[i]);
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < SORTED_ROWS / 1024; i++) {
        const u32 row = first + i * 1024 + threadIdx.x;
        if (row >= rounds.count) continue;
        const u32 to = atomicAdd(&positions[places[i]], 1u);
        if (HAS_SORT_MEANS && rows != nullptr) {
            Scalar values[DIM];
            load_row(values, rounds.rows + (u64)row * DIM);
            store_row(rows + (u64)to * DIM, values);
        }
        numbers[to] = number_of(rounds, row);
        labels[to] = rounds.labels[row];
    }
}
