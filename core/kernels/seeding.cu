// The kernels of k-means++ (Arthur & Vassilvitskii 2007), which choose the first centroids of k-means.

#include "seeding/draw.cuh"
#include "seeding/pairs.cuh"
#include "seeding/bounds.cuh"
