// The kernels around the filter of bit rows: packing, thresholds, and the distances of the pairs that pass.

#include "filter/bits.cuh"
#include "filter/exact.cuh"
