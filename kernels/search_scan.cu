// The scan of a search.

#include "search/nearest.cuh"
