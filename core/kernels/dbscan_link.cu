// The kernels that connect the core rows of DBSCAN.

#include "dbscan/link.cuh"
