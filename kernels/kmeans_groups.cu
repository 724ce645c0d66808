// Nearest centroids of k-means by warpgroup products (sm_90a).

#include "kmeans/candidates_by_groups.cuh"
#include "kmeans/find_by_groups.cuh"
