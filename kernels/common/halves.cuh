// Half-precision (fp16) numbers as their bits, rounded to nearest.
// PTX ISA, Data Movement and Conversion Instructions: cvt.

#include "common/arithmetic.cuh"

__device__ __forceinline__ unsigned short to_half(float x) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}
__device__ __forceinline__ unsigned short to_half(double x) {
    unsigned short half;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(half) : "d"(x));
    return half;
}
__device__ __forceinline__ float from_half(unsigned short half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}
