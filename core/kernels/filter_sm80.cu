// The filter of a search on the tensor cores of single warps (sm_80 and later), for GPUs without warpgroup
// products.

#include "filter/sm80.cuh"
