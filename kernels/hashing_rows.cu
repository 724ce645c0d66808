// Rows of numbers to keys.

#include "hashing/rows.cuh"
