// Lloyd's rounds of small problems, one block per problem.

#include "kmeans/groups.cuh"
