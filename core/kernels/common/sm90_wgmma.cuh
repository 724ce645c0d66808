// Warpgroup matrix products (sm_90a): the product instruction in the shapes that the kernels use, whose
// operands come through the ring buffer of `sm90_ring.cuh`.

#include "common/sm90_ring.cuh"

// Dynamic shared memory, aligned for swizzled tiles.
extern __shared__ __align__(1024) unsigned char matrices[];

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// Makes this thread's writes to shared memory visible to products that start after the next mbarrier.
// PTX ISA, Parallel Synchronization and Communication Instructions: membar, fence.
__device__ __forceinline__ void products_see_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.fence.
__device__ __forceinline__ void products_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.commit_group.
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.wait_group.
template <int LATE> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATE) : "memory");
}
// Waits for all products; the empty `asm` keeps the compiler from reading their sums before.
template <u32 COUNT> __device__ __forceinline__ void products_wait_for(float (&sums)[COUNT]) {
    products_wait<0>();
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i]));
}
template <typename Word, u32 COUNT> __device__ __forceinline__ void products_wait_for(Word (&sums)[COUNT]) {
    products_wait<0>();
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) asm volatile("" : "+r"(sums[i]));
}

// The descriptor of a swizzled tile in shared memory, whose rows have `pitch` bytes: 128, 64 or 32.
// PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: Matrix Descriptor Format.
__device__ __forceinline__ u64 descriptor(u32 address, u32 pitch) {
    const u64 form = pitch == 128  ? 1ull << 62 | 64ull << 32
                     : pitch == 64 ? 2ull << 62 | 32ull << 32
                                   : 3ull << 62 | 16ull << 32;
    return form | 1ull << 16 | (address & 0x3ffff) >> 4;
}

// Operand lists of 32, 64 and 128 registers.
#define PLACES_32                                                                                   \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"   \
    "%25,%26,%27,%28,%29,%30,%31}"
#define PLACES_64                                                                                   \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"   \
    "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"  \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define PLACES_128                                                                                  \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"   \
    "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"  \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,"  \
    "%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,"  \
    "%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,"     \
    "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}"
#define FOUR(as, i) as(sums[i]), as(sums[i + 1]), as(sums[i + 2]), as(sums[i + 3])
#define SIXTEEN(as, i) FOUR(as, i), FOUR(as, i + 4), FOUR(as, i + 8), FOUR(as, i + 12)
#define UP_TO_32(as) SIXTEEN(as, 0), SIXTEEN(as, 16)
#define UP_TO_64(as) UP_TO_32(as), SIXTEEN(as, 32), SIXTEEN(as, 48)
#define UP_TO_128(as)                                                                               \
    UP_TO_64(as), SIXTEEN(as, 64), SIXTEEN(as, 80), SIXTEEN(as, 96), SIXTEEN(as, 112)
#define AS_FLOAT(x) "+f"(x)
#define AS_WORD(x) "+r"(x)

// sums (+)= a * b: 64 x 16 fp16 numbers in registers by 128 or 256 rows of 16 fp16 numbers in shared memory.
// Two columns of the fp16 sums share a register.
// PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.mma_async.
__device__ __forceinline__ void add_products(u32 (&sums)[32], const u32 (&a)[4], u64 b, int keeps) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f16.f16.f16 " PLACES_32
                 ", {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : UP_TO_32(AS_WORD)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keeps));
}
// PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.mma_async.
__device__ __forceinline__ void add_products(u32 (&sums)[64], const u32 (&a)[4], u64 b, int keeps) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f16.f16.f16 " PLACES_64
                 ", {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
                 : UP_TO_64(AS_WORD)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keeps));
}
// The same with both operands in shared memory, and sums in float.
// PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.mma_async.
__device__ __forceinline__ void add_products(float (&sums)[128], u64 a, u64 b, int keeps) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " PLACES_128
                 ", %128, %129, p, 1, 1, 0, 0;\n}"
                 : UP_TO_128(AS_FLOAT)
                 : "l"(a), "l"(b), "r"(keeps));
}
// The same for bits, 32 bytes a row: counts of the bits that both rows have; `a` is in registers or in shared
// memory.
// PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.mma_async.
__device__ __forceinline__ void add_products(int (&sums)[64], const u32 (&a)[4], u64 b, int keeps) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k256.row.col.s32.b1.b1.and.popc " PLACES_64
                 ", {%64, %65, %66, %67}, %68, p;\n}"
                 : UP_TO_64(AS_WORD)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keeps));
}
// PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.mma_async.
__device__ __forceinline__ void add_products(int (&sums)[64], u64 a, u64 b, int keeps) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k256.row.col.s32.b1.b1.and.popc " PLACES_64
                 ", %64, %65, p;\n}"
                 : UP_TO_64(AS_WORD)
                 : "l"(a), "l"(b), "r"(keeps));
}
