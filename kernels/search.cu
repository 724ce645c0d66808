// The kernels of a search.

#include "search/pack.cuh"
#include "search/least.cuh"
#include "search/merge.cuh"
#include "search/among.cuh"
#include "search/exact.cuh"
#include "search/join_small.cuh"
