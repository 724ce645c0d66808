// The kernels of a search.

#include "search/pack.cuh"
#include "search/prebound.cuh"
#include "search/merge.cuh"
#include "search/among.cuh"
#include "search/exact.cuh"
#include "search/bucket_self_join_small.cuh"
