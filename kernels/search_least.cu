// Bounds of the lists of a search, by a scan.

#include "search/least.cuh"
