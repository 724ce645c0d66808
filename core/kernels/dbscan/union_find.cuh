// A union-find structure of core rows, with path halving.
//
// Every set of connected rows is a tree whose root is its first row; a root only ever gets a smaller parent.
// Parents are read from the L2 cache, which all multiprocessors share, so that rows connected by another
// block need not be compared.

#include "dbscan/walk.cuh"

// In `known`: a node has no core rows.
constexpr u32 EMPTY = 0xfffffffe;

// The root of a row's set, which a concurrent join may change at any time.
__device__ __forceinline__ u32 first_of(const Dbscan& all, u32 row) {
    for (;;) {
        const u32 parent = __ldcg(&all.parents[row]);
        if (parent == row) return row;
        row = parent;
    }
}

// The same, with path halving. A row that has a parent never becomes a root again, and a parent written
// concurrently by another thread is equally valid.
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
        const u32 parent = atomicCAS(&all.parents[high], high, low);
        if (parent == high) return;
        a = low;
        b = parent;
    }
}
