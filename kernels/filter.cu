// What surrounds the filter: rows as halves, thresholds, and the distances of what passes.

#include "filter/exact.cuh"
