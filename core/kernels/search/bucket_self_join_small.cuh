// The same as bucket_self_join.cuh for rows of few elements and few neighbours: one lane per row.
//
// A warp has 32 adjacent rows of a table, whose buckets cover one contiguous range. It walks that range 32
// positions at a time, and stages their rows in shared memory for all lanes; each lane compares its row with
// those of its own bucket. The list of a lane is in registers. If only later parts of buckets are compared,
// the gaps between them are skipped.

#include "search/bucket_self_join.cuh"

// Bytes of a row, and its stride in shared memory: an odd multiple of 16 bytes, so that lanes which read
// different rows read from different banks.
constexpr u32 SMALL_DIM = DIM > 0 ? DIM : 1;
constexpr u32 ROW_BYTES = SMALL_DIM * sizeof(Scalar);
constexpr u32 STAGED_BYTES = ((ROW_BYTES + 15) / 16 | 1) * 16;
constexpr u32 SCALARS = 16 / sizeof(Scalar);

// Elements of a staged row, 16 bytes at a time.
union Vector16 {
    uint4 all;
    Scalar one[SCALARS];
};

// The k nearest rows of a lane's row, ascending, in the last k of K places; the places before hold the least
// entry.
template <u32 K> struct RegisterList {
    Entry entries[K];

    __device__ __forceinline__ void load(const Entry* list, u32 k) {
#pragma unroll
        for (u32 i = 0; i < K; i++) entries[i] = i + k < K ? Entry::least() : list[i + k - K];
    }
    __device__ __forceinline__ void store(Entry* list, u32 k) const {
#pragma unroll
        for (u32 i = 0; i < K; i++) {
            if (i + k >= K) list[i + k - K] = entries[i];
        }
    }
    __device__ __forceinline__ const Entry& worst() const { return entries[K - 1]; }

    // Inserts an entry, unless it is there; returns whether it was inserted.
    __device__ __forceinline__ bool insert(Entry entry) {
        bool is_there = false;
#pragma unroll
        for (u32 i = 0; i < K; i++) is_there |= entries[i] == entry;
        if (is_there) return false;
        entries[K - 1] = entry;
#pragma unroll
        for (u32 i = K - 1; i > 0; i--) {
            const Entry low = entries[i] < entries[i - 1] ? entries[i] : entries[i - 1];
            const Entry high = entries[i] < entries[i - 1] ? entries[i - 1] : entries[i];
            entries[i - 1] = low;
            entries[i] = high;
        }
        return true;
    }
};

// Copies a base row. Rows are aligned to the largest of 16, 8 and 4 that divides ROW_BYTES.
__device__ __forceinline__ void copy_row(const Scalar* __restrict__ from, char* to) {
    if constexpr (ROW_BYTES % 16 == 0) {
#pragma unroll
        for (u32 i = 0; i < ROW_BYTES; i += 16) {
            *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>((const char*)from + i);
        }
    } else if constexpr (ROW_BYTES % 8 == 0) {
#pragma unroll
        for (u32 i = 0; i < ROW_BYTES; i += 8) {
            *reinterpret_cast<uint2*>(to + i) = *reinterpret_cast<const uint2*>((const char*)from + i);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < ROW_BYTES; i += 4) {
            *reinterpret_cast<u32*>(to + i) = *reinterpret_cast<const u32*>((const char*)from + i);
        }
    }
}

// The distance to a row in shared memory, summed in the order of elements.
__device__ __forceinline__ Real distance_to(const Vector16 (&of_row)[STAGED_BYTES / 16], const char* staged) {
    Total total = 0;
    Bits bits = {0, 0};
#pragma unroll
    for (u32 vector = 0; vector < (ROW_BYTES + 15) / 16; vector++) {
        Vector16 other;
        other.all = *reinterpret_cast<const uint4*>(staged + vector * 16);
#pragma unroll
        for (u32 i = 0; i < SCALARS; i++) {
            if (vector * SCALARS + i >= SMALL_DIM) continue;
            Scalar q = of_row[vector].one[i];
            if constexpr (SUM == PRODUCTS) q = -q;
            total = Step<SUM>::of(q, other.one[i], total);
            if constexpr (SUM == SHARED_BITS) {
                bits.query += __popc(q);
                bits.row += __popc(other.one[i]);
            }
        }
    }
    return distance_of(total, bits);
}

template <u32 K>
__device__ __forceinline__ void join_small(
    const Scalar* __restrict__ base, const u32* __restrict__ rows, const uint2* __restrict__ home_buckets,
    const u32* __restrict__ left_out, Entry* lists, u64* __restrict__ compared, const JoinRange& join) {
    constexpr u32 ALL = 0xffffffffu;
    __shared__ __align__(16) char all_staged[JOINING * STAGED_BYTES];
    __shared__ u32 all_numbers[JOINING];
    const u32 lane = Warp::rank(), of_warp = threadIdx.x - lane;
    char* staged = all_staged + of_warp * STAGED_BYTES;
    u32* numbers = all_numbers + of_warp;
    const u32 first_place = join.first + blockIdx.x * blockDim.x + of_warp, place = first_place + lane;
    u32 row = NOBODY;
    if (place < join.end) {
        row = rows[place];
        if (left_out && left_out[row / 32] >> (row % 32) & 1) row = NOBODY;
    }
    const uint2 bucket = row == NOBODY ? make_uint2(0, 0) : home_buckets[row];
    const u32 size = bucket.y - bucket.x;
    const bool is_there = size > join.from;
    const u32 begin = bucket.x + join.from;
    const u32 end = is_there ? bucket.x + min(size, join.from + join.count) : begin;
    u32 low = is_there ? begin : NOBODY, high = is_there ? end : 0;
#pragma unroll
    for (u32 stride = 16; stride > 0; stride /= 2) {
        low = min(low, __shfl_xor_sync(ALL, low, stride));
        high = max(high, __shfl_xor_sync(ALL, high, stride));
    }
    if (low >= high) return;
    Entry* list = lists + (u64)row * join.k;
    RegisterList<K> nearest;
    Vector16 of_row[STAGED_BYTES / 16];
    if (is_there) {
        nearest.load(list, join.k);
        // Through shared memory, which lets the compiler keep the lane's elements in registers.
        copy_row(base + (u64)row * SMALL_DIM, staged + lane * STAGED_BYTES);
#pragma unroll
        for (u32 i = 0; i < STAGED_BYTES / 16; i++) {
            of_row[i].all = *reinterpret_cast<const uint4*>(staged + lane * STAGED_BYTES + i * 16);
        }
    }
    numbers[lane] = is_there ? row : NOBODY;
    bool is_changed = false;
    u32 count = 0;
    const auto compare = [&](u32 first) {
        __syncwarp();
        const u32 last = min(end, first + 32);
        for (u32 at = max(begin, first); at < last; at++) {
            const u32 other = numbers[at - first];
            if (other == row || other == NOBODY) continue;
            count++;
            const Real distance = distance_to(of_row, staged + (at - first) * STAGED_BYTES);
            const Entry entry = Entry::of(distance, other);
            if (entry < nearest.worst()) is_changed |= nearest.insert(entry);
        }
        __syncwarp();
    };
    // The lanes' own rows are staged already, unless some of them are not compared in this launch.
    const bool is_first = join.from == 0 && first_place + 32 <= join.end;
    if (is_first) compare(first_place);
    for (u32 first = low / 32 * 32; first < high; first += 32) {
        if (is_first && first == first_place) continue;
        if (join.from > 0 && !__any_sync(ALL, is_there && begin < first + 32 && first < end)) continue;
        const u32 at = first + lane;
        u32 other = NOBODY;
        if (at >= low && at < high) {
            other = rows[at];
            if (left_out && left_out[other / 32] >> (other % 32) & 1) other = NOBODY;
        }
        if (other != NOBODY) copy_row(base + (u64)other * SMALL_DIM, staged + lane * STAGED_BYTES);
        numbers[lane] = other;
        compare(first);
    }
    if (!is_there) return;
    if (is_changed) nearest.store(list, join.k);
    if (compared) compared[row] += count;
}

// The same as `join_buckets` for up to 8 neighbours, and up to 16.
extern "C" __global__ __launch_bounds__(JOINING) void join_for_8(
    const Scalar* __restrict__ base, const u32* __restrict__ rows, const uint2* __restrict__ home_buckets,
    const u32* __restrict__ left_out, Entry* lists, u64* __restrict__ compared, JoinRange join) {
    if constexpr (DIM > 0) join_small<8>(base, rows, home_buckets, left_out, lists, compared, join);
}
extern "C" __global__ __launch_bounds__(JOINING) void join_for_16(
    const Scalar* __restrict__ base, const u32* __restrict__ rows, const uint2* __restrict__ home_buckets,
    const u32* __restrict__ left_out, Entry* lists, u64* __restrict__ compared, JoinRange join) {
    if constexpr (DIM > 0) join_small<16>(base, rows, home_buckets, left_out, lists, compared, join);
}
