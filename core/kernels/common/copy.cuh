// Asynchronous copies from global to shared memory where the architecture has them; elsewhere each thread
// copies synchronously.

#include "common/arithmetic.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
// Starts copying 16 bytes. PTX ISA, Data Movement and Conversion Instructions: cp.async.
__device__ __forceinline__ void copy_16(void* to_shared, const void* from) {
    const u32 to = (u32)__cvta_generic_to_shared(to_shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Commits the copies since the last call as a group.
// PTX ISA, Data Movement and Conversion Instructions: cp.async.commit_group.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `LATE` groups of copies are pending.
// PTX ISA, Data Movement and Conversion Instructions: cp.async.wait_group.
template <u32 LATE> __device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATE) : "memory");
}
// Waits for all copies. PTX ISA, Data Movement and Conversion Instructions: cp.async.wait_all.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
#else
__device__ __forceinline__ void copy_16(void* to, const void* from) {
    *(uint4*)to = *(const uint4*)from;
}
__device__ __forceinline__ void commit_copies() {}
template <u32 LATE> __device__ __forceinline__ void wait_for_groups() {}
__device__ __forceinline__ void wait_for_copies() {}
#endif
