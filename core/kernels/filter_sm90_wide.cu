// The filter of a search, on tensor cores (sm_90a), for longer rows, and for rows of bits.

#include "filter/sm90_wide.cuh"
