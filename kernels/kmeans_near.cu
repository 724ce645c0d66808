// Rows that are compared with near centroids first, and sorting them.

#include "kmeans/near.cuh"
