// Half-precision (fp16) numbers as their bits, rounded to nearest.

#include "common/arithmetic.cuh"

// PTX ISA, Data Movement and Conversion Instructions: cvt.
__device__ __forceinline__ unsigned short to_fp16(float x) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}
// PTX ISA, Data Movement and Conversion Instructions: cvt.
__device__ __forceinline__ unsigned short to_fp16(double x) {
    unsigned short half;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(half) : "d"(x));
    return half;
}
// PTX ISA, Data Movement and Conversion Instructions: cvt.
__device__ __forceinline__ float from_fp16(unsigned short half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}
