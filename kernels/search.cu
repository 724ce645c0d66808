// The kernels of a search that neither scan nor join rows in buckets.

#include "search/pack.cuh"
#include "search/merge.cuh"
#include "search/among.cuh"
#include "search/exact.cuh"
