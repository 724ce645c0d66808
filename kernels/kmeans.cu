// The kernels of k-means.

#include "kmeans/sums.cuh"
#include "kmeans/near.cuh"
#include "kmeans/assign_tiles.cuh"
