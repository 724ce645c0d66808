// Core rows that are joined with those of other tiles.

#include "dbscan/link.cuh"
