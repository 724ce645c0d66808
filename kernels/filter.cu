// What surrounds the filter: rows as halves, thresholds, and the distances of what passes.

#include "filter/thresholds.cuh"
#include "filter/exact.cuh"
