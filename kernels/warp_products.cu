// The filter of a search, on tensor cores, where groups of warps have no products (sm_80 and later).

#include "filter/warps.cuh"
