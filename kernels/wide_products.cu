// The filter of a search, on tensor cores (sm_90a), for longer rows.

#include "filter/wide.cuh"
