// Core rows that are joined with each other.

#include "dbscan/link.cuh"
