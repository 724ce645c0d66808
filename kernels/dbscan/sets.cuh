// Sets of rows that are joined with each other.
//
// They are trees whose root is their first row; roots only ever get smaller. Parents are read
// from the cache of all multiprocessors: what others have joined need not be looked at.

#include "dbscan/rows.cuh"

// The first row of a row's set. While others join sets, it may be outdated at once.
__device__ __forceinline__ u32 first_of(const Dbscan& all, u32 row) {
    for (;;) {
        const u32 parent = __ldcg(&all.parents[row]);
        if (parent == row) return row;
        row = parent;
    }
}

// The same; halves the path on the way. A row that has a parent never loses it, and what another thread
// has written there is as good.
__device__ __forceinline__ u32 first_after_halving(const Dbscan& all, u32 row) {
    for (;;) {
        const u32 parent = __ldcg(&all.parents[row]);
        if (parent == row) return row;
        const u32 next = __ldcg(&all.parents[parent]);
        if (next == parent) return next;
        __stcg(&all.parents[row], next);
        row = next;
    }
}

// Joins the sets of two rows.
__device__ __forceinline__ void join(const Dbscan& all, u32 a, u32 b) {
    for (;;) {
        a = first_after_halving(all, a);
        b = first_after_halving(all, b);
        if (a == b) return;
        const u32 low = min(a, b), high = max(a, b);
        const u32 found = atomicCAS(&all.parents[high], high, low);
        if (found == high) return;
        a = low;
        b = found;
    }
}
