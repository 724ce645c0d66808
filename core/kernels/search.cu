// The kernels of a scan: base rows in panels, compared with all queries.

#include "search/pack.cuh"
#include "search/prebound.cuh"
