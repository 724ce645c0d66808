// Nearest centroids of k-means by warpgroup products (sm_90a).

#include "kmeans/sm90_warpgroup_find.cuh"
