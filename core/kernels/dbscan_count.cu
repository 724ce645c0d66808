// The kernels that count the neighbours of the rows of DBSCAN.

#include "dbscan/count.cuh"
