// Shared by the kernels of a search: list entries and their order, and where a row lies in its panel.
//
// Panels: PANEL rows, elements of one dimension side by side, [panel][dim][PANEL]. Query rows fill
// panels in order. Base rows are dealt to the panels round-robin in runs of RUN, so that any few
// panels are a fair sample even of a sorted base, and a run still fills a 32-byte sector. The host
// defines PANEL and RUN (-D).

#include "common/sort.cuh"

// The base row at a lane of a panel; may be past the last row (padding).
__device__ __forceinline__ u32 base_row(u32 panel, u32 lane, u32 panels) {
    return ((lane / RUN) * panels + panel) * RUN + lane % RUN;
}

// Distances as unsigned integers of the same order. There are no NaNs and no -0.
__device__ __forceinline__ u32 ordered(float distance) {
    const u32 bits = __float_as_uint(distance);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ u64 ordered(double distance) {
    const u64 bits = (u64)__double_as_longlong(distance);
    return bits >> 63 ? ~bits : bits | (1ull << 63);
}
__device__ __forceinline__ double unordered(u64 key) {
    return __longlong_as_double((long long)(key >> 63 ? key & ~(1ull << 63) : ~key));
}

// A neighbour, ordered by (distance, row).
template <typename> struct EntryOf;
template <> struct EntryOf<float> {
    u64 bits;
    static __device__ __forceinline__ EntryOf of(float distance, u32 row) {
        return {(u64)ordered(distance) << 32 | row};
    }
    static __device__ __forceinline__ EntryOf none() { return {~0ull}; }
    // An entry below every neighbour.
    static __device__ __forceinline__ EntryOf least() { return {0}; }
    __device__ __forceinline__ bool is_none() const { return bits == ~0ull; }
    __device__ __forceinline__ u32 number() const { return (u32)bits; }
    __device__ __forceinline__ float distance() const { return unordered((u32)(bits >> 32)); }
    __device__ __forceinline__ bool operator<(EntryOf other) const { return bits < other.bits; }
    __device__ __forceinline__ bool operator==(EntryOf other) const { return bits == other.bits; }
};
template <> struct __align__(16) EntryOf<double> {
    u64 key;
    u64 row;
    static __device__ __forceinline__ EntryOf of(double distance, u32 row) {
        return {ordered(distance), row};
    }
    static __device__ __forceinline__ EntryOf none() { return {~0ull, ~0ull}; }
    static __device__ __forceinline__ EntryOf least() { return {0, 0}; }
    __device__ __forceinline__ bool is_none() const { return key == ~0ull; }
    __device__ __forceinline__ u32 number() const { return (u32)row; }
    __device__ __forceinline__ double distance() const { return unordered(key); }
    __device__ __forceinline__ bool operator<(EntryOf other) const {
        return key < other.key || (key == other.key && row < other.row);
    }
    __device__ __forceinline__ bool operator==(EntryOf other) const {
        return key == other.key && row == other.row;
    }
};
typedef EntryOf<Real> Entry;

// One pass of a search: some panels of the base, against all queries. The same struct as in
// src/device/cuda/search/launch_lists.rs.
struct Pass {
    u64 first_query;  // self-join: number of the first query; otherwise 2^32, which no row has
    u32 first_base;   // number of the first base row
    u32 queries;      // query rows, without padding
    u32 rows;         // base rows, without padding
    u32 dim;          // elements in a row
    u32 panels;       // base panels; visit i compares panel i * stride % panels
    u32 stride;       // coprime to panels
    u32 start;        // the pass's first visit
    u32 begin;        // this launch's first visit
    u32 end;
    u32 k;            // neighbours per list
    u32 slots;        // entries per query, a power of two: k neighbours, then candidates
    u32 dense;        // candidates per query, if every pair of the pass is a candidate; otherwise 0
    u32 enough;       // of a list's neighbours, those that matter at any distance; 0: all
    float root;       // how much farther other neighbours may be: see `last_that_matters`
    float factor;
    float absolute;
};

// Whether only some neighbours of a full list matter at any distance.
__device__ __forceinline__ bool is_limited(const Pass& pass) {
    return sizeof(Real) == 4 && 0 < pass.enough && pass.enough < pass.k;
}

// The last entry that matters, given the last entry of a list and the last of its `enough` nearest:
// `EnoughLimits` in src/device/cpu/search/sink.rs, rounded up.
__device__ __forceinline__ Entry last_that_matters(const Pass& pass, Entry last, Entry last_of_enough) {
    if constexpr (sizeof(Real) == 4) {
        if (!is_limited(pass) || last_of_enough.is_none()) return last;
        float sum = last_of_enough.distance();
        if (pass.root > 0) {
            const float root = __fadd_ru(__fsqrt_ru(sum), pass.root);
            sum = __fmul_ru(root, root);
        }
        const Entry bound = Entry::of(__fadd_ru(__fmul_ru(sum, pass.factor), pass.absolute), ~0u);
        return bound < last ? bound : last;
    }
    return last;
}
__device__ __forceinline__ Entry last_that_matters(const Pass& pass, const Entry* list) {
    return last_that_matters(pass, list[pass.k - 1], list[is_limited(pass) ? pass.enough - 1 : 0]);
}

__device__ __forceinline__ u32 panel_of_visit(const Pass& pass, u32 visit) {
    return (u32)((u64)visit * pass.stride % pass.panels);
}

__device__ __forceinline__ bool is_eligible(const Pass& pass, u32 query, u32 row) {
    return row < pass.rows && (u64)pass.first_base + row != pass.first_query + query;
}

// Whether a launch has work: if `flag` is null or points to a nonzero word.
__device__ __forceinline__ bool has_work(const u32* flag) { return !flag || *flag; }

// Sorts `count` entries ascending; `entries` has room for the next power of two.
template <typename Group, typename Real>
__device__ void sort(EntryOf<Real>* entries, u32 count) {
    u32 room = 2;
    while (room < count) room *= 2;
    for (u32 i = count + Group::rank(); i < room; i += Group::size()) {
        entries[i] = EntryOf<Real>::none();
    }
    sort_power_of_two<Group>(entries, room);
}
