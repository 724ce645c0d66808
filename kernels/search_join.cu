// Searches in buckets.

#include "search/join_small.cuh"
