// The kernels that build and probe LSH tables.

#include "hashing/keys.cuh"
#include "hashing/tables.cuh"
