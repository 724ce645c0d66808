// Lloyd's rounds of batches of small problems, one block per problem.

#include "kmeans/batched.cuh"
