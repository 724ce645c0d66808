// Candidates of the rows of k-means whose nearest centroid is uncertain, by warpgroup products (sm_90a).

#include "kmeans/sm90_warpgroup_candidates.cuh"
