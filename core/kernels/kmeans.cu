// The kernels of the rounds of k-means: sums, moves, and rows assigned by sorted centroids.

#include "kmeans/sums.cuh"
#include "kmeans/sort_means.cuh"
