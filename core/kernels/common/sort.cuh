// Sorting in place, in any memory.

#include "common/warp.cuh"

// Sorts `room` entries, a power of two, ascending: Batcher's bitonic network, without recursion or
// divergence.
template <typename Group, typename Entry>
__device__ __forceinline__ void sort_power_of_two(Entry* entries, u32 room) {
    Group::sync();
    for (u32 size = 2; size <= room; size *= 2) {
        for (u32 stride = size / 2; stride > 0; stride /= 2) {
            for (u32 i = Group::rank(); i < room / 2; i += Group::size()) {
                const u32 low = 2 * i - (i & (stride - 1));
                const u32 high = low + stride;
                const Entry a = entries[low], b = entries[high];
                const bool ascending = (low & size) == 0;
                if ((b < a) == ascending) {
                    entries[low] = b;
                    entries[high] = a;
                }
            }
            Group::sync();
        }
    }
}
