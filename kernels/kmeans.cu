// The kernels of k-means that all ways of comparing rows share.

#include "kmeans/sums.cuh"
