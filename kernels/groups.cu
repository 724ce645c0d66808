// Many small groups of rows, each with clusters of its own: a block does all rounds of one.

// Put every row into the cluster of its nearest centroid.
__device__ __forceinline__ void assign_group(const Job& job) {
    const float* centroids = current_centroids(job);
    for (u32 start = 0; start < job.count; start += blockDim.x) {
        const u32 row = start + threadIdx.x;
        u32 before = NO_CLUSTER, cluster = NO_CLUSTER;
        if constexpr (IS_LOW) {
            if (row < job.count) {
                float values[DIM], least;
                load_row(values, job.rows + (u64)row * DIM);
                before = job.labels[row];
                cluster = nearest_of_all(job, values, centroids, least);
            }
        }
        move_row(job, cluster != before, row, before, cluster);
    }
}

// All rounds of all groups, at most so many each. A block per job. Rows are where all groups' are, one
// after the other, and so are `costs`: the squared distance of every row to its centroid.
extern "C" __global__ __launch_bounds__(128) void cluster_groups(const Job* jobs, u32 rounds,
                                                                 const float* rows,
                                                                 float* costs) {
    __shared__ Job job;
    if (threadIdx.x == 0) job = jobs[blockIdx.x];
    __syncthreads();
    const Status* status = job.status;
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (u32 round = 0; round < rounds && status->end == GOING_ON; round++) {
        assign_group(job);
        __syncthreads();
        add_moved_rows(job, threadIdx.x, blockDim.x);
        __syncthreads();
        for (u32 i = warp; i < job.k; i += warps) take_mean(job, i);
        __syncthreads();
        if (is_whole(job)) {
            for (u32 i = warp; i < job.k; i += warps) take_shift(job, i);
        }
        __syncthreads();
        if (warp == 0) end_round(job);
        __syncthreads();
    }
    if (status->end == EMPTY_CLUSTER) return;
    assign_group(job);
    __syncthreads();
    const float* centroids = current_centroids(job);
    costs += (job.rows - rows) / DIM;
    for (u32 row = threadIdx.x; row < job.count; row += blockDim.x) {
        if constexpr (IS_LOW) {
            float values[DIM];
            load_row(values, job.rows + (u64)row * DIM);
            costs[row] = square_distance(values, centroids + (u64)job.labels[row] * DIM);
        }
    }
}
