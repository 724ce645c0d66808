// The kernels of k-means.

#include "kmeans/sums.cuh"
#include "kmeans/sort_means.cuh"
#include "kmeans/assign_tiles.cuh"
