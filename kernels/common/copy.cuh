// Asynchronous copies from global to shared memory, where the architecture has them; elsewhere the
// thread copies synchronously.

#include "common/arithmetic.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
// Starts copying 16 bytes.
__device__ __forceinline__ void copy_16(void* to_shared, const void* from) {
    const u32 to = (u32)__cvta_generic_to_shared(to_shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Commits the copies started since the last call as a group.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `LATE` groups of copies are pending.
template <u32 LATE> __device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATE) : "memory");
}
// Waits for all copies.
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
