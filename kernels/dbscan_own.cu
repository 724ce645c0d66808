// Core rows by their own tile, and what is known of their sets.

#include "dbscan/count_own.cuh"
#include "dbscan/link_own.cuh"
