// Nearest centroids of k-means by products of groups of warps (sm_90a).

#include "kmeans/candidates_by_groups.cuh"
#include "kmeans/find_by_groups.cuh"
