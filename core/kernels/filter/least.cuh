// The least number of bits that a query shares with a passing row of a tile. See filter/bits.cuh.

#include "common/arithmetic.cuh"

struct __align__(8) Least {
    float offset, share;  // at least offset + share * (least set bits of a row of the tile)

    // A threshold that no pair reaches.
    static __device__ __forceinline__ Least unreachable() { return {__int_as_float(0x7f800000), 0}; }
    // The threshold for a tile, rounded up; saturates at the largest int.
    __device__ __forceinline__ int in_tile(float fewest) const {
        return __float2int_ru(fmaf(share, fewest, offset));
    }
};
