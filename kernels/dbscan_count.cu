// The other core rows.

#include "dbscan/count.cuh"
