// The kernels of k-means that assign rows by products of tiles.

#include "kmeans/assign_tiles.cuh"
