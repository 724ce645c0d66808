// The kernels around the filter of numeric rows: packing as fp16, thresholds, and the distances of the pairs
// that pass.

#include "filter/thresholds.cuh"
#include "filter/exact.cuh"
