// The kernels that put the rows of DBSCAN (Ester et al. 1996) into tiles.

#include "dbscan/order.cuh"
#include "dbscan/tiles.cuh"
#include "dbscan/fp16.cuh"
