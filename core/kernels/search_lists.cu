// The kernels of lists: merged, searched again where they overflowed, and ranked by the definition.

#include "search/merge.cuh"
#include "search/distances_of.cuh"
#include "search/exact.cuh"
