// The kernels of DBSCAN that put rows in order, and into tiles.

#include "dbscan/order.cuh"
#include "dbscan/tiles.cuh"
#include "dbscan/halves.cuh"
