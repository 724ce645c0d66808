// What every round of Lloyd's does after rows were assigned: sums, means, and whether it was the
// last one.

// Add the rows that moved to their clusters, and take them from the ones they were in. Neighbouring
// threads, of which there are `step`, add neighbouring elements.
__device__ __forceinline__ void add_moved_rows(const Job& job, u64 first, u64 step) {
    const u64 elements = (u64)job.status->moved * DIM;
    for (u64 i = first; i < elements; i += step) {
        const u32 j = i % DIM;
        const Moved moved = job.moved[i / DIM];
        const u32 to = job.labels[moved.row];
        const double far = __dadd_rn(job.rows[(u64)moved.row * DIM + j], -job.origin[j]);
        const u64 whole = __double2ll_rn(__dmul_rn(far, job.per_unit));
        atomicAdd(reinterpret_cast<u64*>(job.sums + (u64)to * DIM + j), whole);
        if (j == 0) atomicAdd(reinterpret_cast<u64*>(job.weights + to), (u64)job.weight);
        if (moved.before == NO_CLUSTER) continue;
        atomicAdd(reinterpret_cast<u64*>(job.sums + (u64)moved.before * DIM + j), 0 - whole);
        if (j == 0) {
            atomicAdd(reinterpret_cast<u64*>(job.weights + moved.before), 0 - (u64)job.weight);
        }
    }
}

// Any grid.
extern "C" __global__ __launch_bounds__(256) void add_moved(Job job) {
    if (job.status->end != GOING_ON) return;
    add_moved_rows(job, (u64)blockIdx.x * blockDim.x + threadIdx.x, (u64)gridDim.x * blockDim.x);
}

// Add all rows to their clusters, which have no others; rows of a cluster are next to each other. A
// thread adds up an element of 64 rows, and passes the sum on where the cluster changes.
extern "C" __global__ __launch_bounds__(256) void add_sorted(Job job) {
    if (job.status->end != GOING_ON) return;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 j = thread % DIM;
    const u64 first = thread / DIM * 64, last = first + 64 < job.count ? first + 64 : job.count;
    if (first >= job.count) return;
    const double origin = job.origin[j];
    u32 cluster = job.labels[first];
    u64 sum = 0, weight = 0;
    const auto pass_on = [&] {
        atomicAdd(reinterpret_cast<u64*>(job.sums + (u64)cluster * DIM + j), sum);
        if (j == 0) atomicAdd(reinterpret_cast<u64*>(job.weights + cluster), weight);
        sum = weight = 0;
    };
    for (u64 row = first; row < last; row++) {
        const u32 next = job.labels[row];
        if (next != cluster) pass_on();
        cluster = next;
        const double far = __dadd_rn(job.rows[row * DIM + j], -origin);
        sum += (u64)__double2ll_rn(__dmul_rn(far, job.per_unit));
        weight += (u64)job.weight;
    }
    pass_on();
}

// The mean of a cluster, into the set of centroids that is not valid, by a warp. A cluster of equal
// rows has sums that are multiples of its count, and few others have: they are suspects.
__device__ __forceinline__ void take_mean(const Job& job, u32 cluster) {
    const u32 lane = threadIdx.x % 32;
    const long long weight = job.weights[cluster];
    if (weight == 0) {
        if (lane == 0) atomicAdd(&job.status->empty, 1u);
        return;
    }
    const long long count = weight / job.weight;
    const double total =
        __dmul_rn(__ddiv_rn(__ll2double_rn(weight), job.per_weight), job.per_unit);
    float* next = job.centroids + ((u64)(1 - job.status->current) * job.k + cluster) * DIM;
    bool is_multiple = true;
    for (u32 j = lane; j < DIM; j += 32) {
        const long long sum = job.sums[(u64)cluster * DIM + j];
        is_multiple &= sum % count == 0;
        const double offset = __ddiv_rn(__ll2double_rn(sum), total);
        next[j] = __double2float_rn(__dadd_rn(job.origin[j], offset));
    }
    is_multiple = all_lanes(is_multiple);
    if (lane > 0) return;
    job.alike[cluster] = is_multiple;
    job.first_alike[cluster] = ~0ull;
    if (is_multiple) atomicAdd(&job.status->suspects, 1u);
}

// A warp per cluster.
extern "C" __global__ __launch_bounds__(256) void means(Job job) {
    if (job.status->end != GOING_ON) return;
    const u32 cluster = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (cluster < job.k) take_mean(job, cluster);
}

// The first row of every suspect.
__device__ __forceinline__ void find_alike_rows(const Job& job, u32 first, u32 step) {
    for (u32 row = first; row < job.count; row += step) {
        const u32 cluster = job.labels[row];
        if (!job.alike[cluster]) continue;
        const u64 number = job.numbers == nullptr ? row : job.numbers[row];
        atomicMin(&job.first_alike[cluster], number << 32 | row);
    }
}

// Suspects that hold two different rows are none.
__device__ __forceinline__ void compare_alike_rows(const Job& job, u32 start, u32 step) {
    for (u32 row = start; row < job.count; row += step) {
        const u32 cluster = job.labels[row];
        if (!job.alike[cluster]) continue;
        const float* one = job.rows + (u64)row * DIM;
        const float* first = job.rows + (u64)(u32)job.first_alike[cluster] * DIM;
        for (u32 j = 0; j < DIM; j++) {
            if (one[j] != first[j]) {
                job.alike[cluster] = 0;
                break;
            }
        }
    }
}

// Any grid, both.
extern "C" __global__ __launch_bounds__(256) void find_alike(Job job) {
    if (job.status->end != GOING_ON || job.status->suspects == 0) return;
    find_alike_rows(job, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}
extern "C" __global__ __launch_bounds__(256) void compare_alike(Job job) {
    if (job.status->end != GOING_ON || job.status->suspects == 0) return;
    compare_alike_rows(job, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

// Whether all clusters have means, and they are new.
__device__ __forceinline__ bool is_whole(const Job& job) {
    return job.status->empty == 0 && job.status->moved != 0;
}

// The mean of equal rows is the row. How far the centroid moved, by a warp.
__device__ __forceinline__ void take_shift(const Job& job, u32 cluster) {
    const u32 current = job.status->current, lane = threadIdx.x % 32;
    const float* old = job.centroids + ((u64)current * job.k + cluster) * DIM;
    float* next = job.centroids + ((u64)(1 - current) * job.k + cluster) * DIM;
    const bool is_alike = job.alike[cluster];
    const float* row = is_alike ? job.rows + (u64)(u32)job.first_alike[cluster] * DIM : next;
    double shift = 0;
    for (u32 j = lane; j < DIM; j += 32) {
        const float to = row[j];
        if (is_alike) next[j] = to;
        const double way = __dadd_rn((double)to, -(double)old[j]);
        shift = __dadd_rn(shift, __dmul_rn(way, way));
    }
    shift = add_lanes(shift);
    if (lane == 0) job.shifts[cluster] = shift;
}

// How far all centroids moved, and what that means; by a warp.
__device__ __forceinline__ void end_round(const Job& job) {
    const u32 lane = threadIdx.x % 32;
    double shift = 0;
    if (is_whole(job)) {
        for (u32 i = lane; i < job.k; i += 32) shift = __dadd_rn(shift, __ldcg(&job.shifts[i]));
    }
    shift = add_lanes(shift);
    if (lane > 0) return;
    Status* status = job.status;
    status->iterations++;
    if (status->moved == 0) {
        status->end = STABLE;
    } else if (status->empty > 0) {
        status->end = EMPTY_CLUSTER;
    } else {
        status->current = 1 - status->current;
        if (shift <= job.tolerance) status->end = CONVERGED;
    }
    status->moved_last = status->moved;
    status->rechecked += status->uncertain;
    status->moved = status->uncertain = status->pairs = 0;
    status->suspects = status->empty = status->arrived = 0;
    status->largest_centroid = status->largest_error = 0;
}

// A warp per cluster; the last block to get there ends the round.
extern "C" __global__ __launch_bounds__(256) void finish_round(Job job) {
    if (job.status->end != GOING_ON) return;
    const u32 cluster = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (cluster < job.k && is_whole(job)) take_shift(job, cluster);
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&job.status->arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (is_last && threadIdx.x < 32) end_round(job);
}

// For each row, by its number: its cluster, and the squared distance to that centroid. A thread per
// row; 128 threads.
extern "C" __global__ __launch_bounds__(128) void costs(Job job, u32* labels, float* costs) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    const float* centroids = current_centroids(job);
    const bool is_row = row < job.count;
    const u32 cluster = is_row ? job.labels[row] : 0;
    float total = 0;
    if constexpr (DIM <= 32) {
        if (is_row) {
            float values[DIM];
            load_row(values, job.rows + (u64)row * DIM);
            total = square_distance(values, centroids + (u64)cluster * DIM);
        }
    } else {
        // A warp brings 32 elements of 32 rows, and of their centroids, at a time.
        __shared__ float tiles[4][2][32][33];
        const u32 lane = threadIdx.x % 32, first = row - lane;
        auto& tile = tiles[threadIdx.x / 32];
        for (u32 start = 0; start < DIM; start += 32) {
            const u32 j = start + lane;
            for (u32 r = 0; r < 32; r++) {
                const u32 other = __shfl_sync(0xffffffffu, cluster, r);
                if (first + r >= job.count || j >= DIM) continue;
                tile[0][r][lane] = job.rows[(u64)(first + r) * DIM + j];
                tile[1][r][lane] = centroids[(u64)other * DIM + j];
            }
            __syncwarp();
            const u32 width = DIM - start < 32 ? DIM - start : 32;
            for (u32 i = 0; i < width; i++) {
                total = Step<SQUARES>::of(tile[0][lane][i], tile[1][lane][i], total);
            }
            __syncwarp();
        }
    }
    if (!is_row) return;
    const u32 number = job.numbers == nullptr ? row : job.numbers[row];
    labels[number] = cluster;
    costs[number] = total;
}
