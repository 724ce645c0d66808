// Pairs of rows and centroids that these leave, by such products (sm_90a).

#include "kmeans/candidates_by_groups.cuh"
