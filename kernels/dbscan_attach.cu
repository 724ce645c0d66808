// The clusters of rows that are not core.

#include "dbscan/attach.cuh"
