// The kernels that attach the border rows of DBSCAN.

#include "dbscan/attach.cuh"
