// The kernels of tables of hashes.

#include "hashing/keys.cuh"
#include "hashing/tables.cuh"
