// The kernels of searches in LSH buckets.

#include "search/bucket_self_join_small.cuh"
