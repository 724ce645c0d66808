// The filter of a search, on tensor cores (sm_90a), for rows of up to 140 elements.

#include "filter/sm90_narrow.cuh"
