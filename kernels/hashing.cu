// The kernels of tables of hashes, and of rows of bits to keys.

#include "hashing/tables.cuh"
