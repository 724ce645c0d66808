// The kernels for hashing bit rows, and for building and probing LSH tables.

#include "hashing/bits.cuh"
#include "hashing/tables.cuh"
