// What surrounds the filter of rows of bits, and the distances of what passes.

#include "filter/bits.cuh"
#include "filter/exact.cuh"
