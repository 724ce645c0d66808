// The kernels of DBSCAN (Ester et al. 1996).

#include "dbscan/order.cuh"
#include "dbscan/tiles.cuh"
#include "dbscan/fp16.cuh"
#include "dbscan/count.cuh"
#include "dbscan/link.cuh"
#include "dbscan/attach.cuh"
