// Nearest centroids of k-means by products of warps.

#include "kmeans/assign_tiles.cuh"
