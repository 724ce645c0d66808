// The kernels that choose the first centroids of k-means.

#include "seeding/draw.cuh"
#include "seeding/pairs.cuh"
#include "seeding/bounds.cuh"
