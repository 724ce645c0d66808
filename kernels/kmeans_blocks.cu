// Rounds of small problems, a block for each.

#include "kmeans/groups.cuh"
