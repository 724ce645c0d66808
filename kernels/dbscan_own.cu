// Core rows by their own tile.

#include "dbscan/count_own.cuh"
