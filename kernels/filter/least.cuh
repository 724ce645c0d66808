// The least number of bits that a query shares with the rows of a tile that pass. See filter/bits.cuh.

#include "common/arithmetic.cuh"

struct __align__(8) Least {
    float own, share;  // this, and its share of the fewest bits of a row of the tile

    // What nothing reaches.
    static __device__ __forceinline__ Least unreachable() { return {__int_as_float(0x7f800000), 0}; }
    // Rounded up; cut off at the largest number.
    __device__ __forceinline__ int in_tile(float fewest) const {
        return __float2int_ru(fmaf(share, fewest, own));
    }
};
