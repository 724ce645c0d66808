// The kernel that hashes rows of numbers, in batches of BATCH functions.

#include "hashing/rows.cuh"
