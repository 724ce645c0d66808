// Matrix products of single warps (sm_80 and later): 16 rows of 32 bytes by 8 rows of 32 bytes, of fp16
// numbers or of bits.

#include "common/warp.cuh"

// Loads four matrices of 8 rows of 16 bytes from shared memory; each lane has the address of one row.
// PTX ISA, Warp Level Matrix Multiply-Accumulate Instructions: ldmatrix.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// sums += a * b: fp16 products summed in float, or counts of the bits that both rows have.
// PTX ISA, Warp Level Matrix Multiply-Accumulate Instructions: mma.
__device__ __forceinline__ void add_product(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// PTX ISA, Warp Level Matrix Multiply-Accumulate Instructions: mma.
__device__ __forceinline__ void add_product(int (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
