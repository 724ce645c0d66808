// Hits of the filter: from a warpgroup's sums of a tile to the lists of queries.

#include "filter/unit.cuh"

// The hits of a thread's two rows, r and r + 8, in a scratch list of its own: no atomics, no waiting.
struct ThreadHits {
    u32* list;
    u32 room, count[2];

    // Scratch lists are numbered by multiprocessor, each of which runs one block at a time. A multiprocessor
    // without scratch marks its queries as overflowed: slower, with the same answer.
    // PTX ISA, Special Registers: %smid.
    __device__ __forceinline__ ThreadHits(const Filter& filter, u32 threads, u32 thread) {
        u32 slot;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(slot));
        room = slot < filter.scratch_slots ? filter.scratch_room : 0;
        list = filter.scratch + ((u64)slot * threads + thread) * 2 * filter.scratch_room;
        count[0] = count[1] = 0;
    }

    __device__ __forceinline__ void add(u32 second, u32 position) {
        const u32 at = second ? count[1] : count[0];
        if (at < room) list[second * room + at] = position;
        count[0] += 1 - second;
        count[1] += second;
    }

    // Moves a unit's hits to the lists of queries `first` and `first` + 8. The four lanes of a row share one
    // atomic.
    __device__ __forceinline__ void hand_over(const Filter& filter, u32 first) {
        const u32 lane = Warp::rank();
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 query = first + 8 * i, hit_count = count[i];
            const bool is_lost = __ballot_sync(~0u, hit_count > room) >> (lane & 28) & 15;
            u32 up_to = hit_count, other = __shfl_up_sync(~0u, up_to, 1, 4);
            up_to += lane % 4 >= 1 ? other : 0;
            other = __shfl_up_sync(~0u, up_to, 2, 4);
            up_to += lane % 4 >= 2 ? other : 0;
            const u32 all = __shfl_sync(~0u, up_to, 3, 4);
            u32 at = 0;
            if (lane % 4 == 0 && all && query < filter.query_rows) {
                at = is_lost ? atomicOr(filter.counts + query, LOST)
                             : atomicAdd(filter.counts + query, all);
            }
            at = __shfl_sync(~0u, at, 0, 4) + up_to - hit_count;
            if (query < filter.query_rows && !is_lost) {
                u32* to = filter.hits + query * filter.hits_pitch;
                for (u32 j = 0; j < hit_count && at + j < filter.room; ++j) to[at + j] = list[i * room + j];
            }
            count[i] = 0;
        }
    }
};

__device__ __forceinline__ u32 word(float sum) { return __float_as_uint(sum); }
__device__ __forceinline__ u32 word(u32 sums) { return sums; }
template <typename> struct InOne;  // sums per register
template <> struct InOne<float> { static const int COUNT = 1; };
template <> struct InOne<u32> { static const int COUNT = 2; };

// Tests a thread's sums of a tile. Sum i is in row 8 * (i >> 1 & 1) and column 8 * (i >> 2) + (i & 1); fp16
// sums come two in a register. The sign bits of 32 registers are tested at once, in three groups of at most
// 11; only a group with a hit is searched.
template <typename Sum, int REGISTERS>
__device__ __forceinline__ void examine(const Sum (&sums)[REGISTERS], u32 position, ThreadHits& hits) {
    constexpr int IN_ONE = InOne<Sum>::COUNT;
    constexpr u32 SIGNS = IN_ONE == 2 ? 0x80008000u : 0x80000000u;
#pragma unroll
    for (int start = 0; start < REGISTERS; start += 32) {
        u32 all[3];
#pragma unroll
        for (int group = 0; group < 3; ++group) {
            all[group] = word(sums[start + group * 11]);
#pragma unroll
            for (int i = 1; i < (group < 2 ? 11 : 10); ++i) {
                all[group] &= word(sums[start + group * 11 + i]);
            }
        }
        if (__builtin_expect((all[0] & all[1] & all[2] & SIGNS) == SIGNS, 1)) continue;
#pragma unroll
        for (int group = 0; group < 3; ++group) {
            if ((all[group] & SIGNS) == SIGNS) continue;
            const int size = (group < 2 ? 11 : 10) * IN_ONE;
            u32 mask = 0;  // the group's sign bits, the first at the top
#pragma unroll
            for (int i = 0; i < size; ++i) {
                const u32 bits = word(sums[start + group * 11 + i / IN_ONE]);
                mask = __funnelshift_l(IN_ONE == 2 && i % 2 == 0 ? bits << 16 : bits, mask, 1);
            }
            mask = ~mask << (32 - size);
            while (mask) {
                const int i = __clz(mask);
                mask &= ~(0x80000000u >> i);
                const int sum = (start + group * 11) * IN_ONE + i;
                hits.add(sum >> 1 & 1, position + 8 * (sum >> 2) + (sum & 1));
            }
        }
    }
}

// The same for bit counts: a pair passes if its count is at least its query's `least`.
template <int REGISTERS>
__device__ __forceinline__ void examine(const int (&sums)[REGISTERS], const int (&least)[2],
                                        u32 position, ThreadHits& hits) {
#pragma unroll
    for (int start = 0; start < REGISTERS; start += 32) {
        int most[2] = {sums[start], sums[start + 2]};
#pragma unroll
        for (int i = 1; i < 32; ++i) {
            if (i == 2) continue;
            most[i >> 1 & 1] = max(most[i >> 1 & 1], sums[start + i]);
        }
        if (__builtin_expect(most[0] < least[0] && most[1] < least[1], 1)) continue;
        u32 mask = 0;  // the first sum at the top
#pragma unroll
        for (int i = 0; i < 32; ++i) mask = mask * 2 + (sums[start + i] >= least[i >> 1 & 1] ? 1 : 0);
        while (mask) {
            const int i = __clz(mask), sum = start + i;
            mask &= ~(0x80000000u >> i);
            hits.add(sum >> 1 & 1, position + 8 * (sum >> 2) + (sum & 1));
        }
    }
}
