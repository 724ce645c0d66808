// The kernels that hash bit rows, and those that build and probe LSH tables.

#include "hashing/bits.cuh"
#include "hashing/tables.cuh"
