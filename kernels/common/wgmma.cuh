// Warpgroup matrix products (sm_90a): the mbarriers and bulk copies that feed them, and the product
// instruction in the shapes that the kernels use.
//
// PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.mma_async,
// wgmma.fence, wgmma.commit_group and wgmma.wait_group.

#include "common/warp.cuh"

// Dynamic shared memory, aligned for swizzled tiles.
extern __shared__ __align__(1024) unsigned char matrices[];

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// mbarriers in shared memory, which count arrivals and bytes.
// PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier.init, mbarrier.arrive,
// mbarrier.try_wait, fence.mbarrier_init and barrier.cluster.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Releases to the block only: a release to the cluster compiles to a full memory fence, and halves the speed
// of the loop.
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the same mbarrier of another block of the cluster.
// PTX ISA, Data Movement and Conversion Instructions: mapa.
__device__ __forceinline__ void barrier_arrive_in(u32 barrier, u32 block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(block)
        : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra PASSED;\nbra AGAIN;\nPASSED:\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Bulk copies from global to shared memory, whose bytes an mbarrier counts; the second function copies into
// both blocks of a cluster of two, at the same offset.
// PTX ISA, Data Movement and Conversion Instructions: cp.async.bulk.
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void bulk_copy_to_both(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"((unsigned short)3)
        : "memory");
}

// Makes this thread's writes to shared memory visible to products that start after the next mbarrier.
// PTX ISA, Parallel Synchronization and Communication Instructions: fence.proxy.
__device__ __forceinline__ void products_see_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void products_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
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
__device__ __forceinline__ void add_products(u32 (&sums)[32], const u32 (&a)[4], u64 b, int keeps) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f16.f16.f16 " PLACES_32
                 ", {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : UP_TO_32(AS_WORD)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keeps));
}
__device__ __forceinline__ void add_products(u32 (&sums)[64], const u32 (&a)[4], u64 b, int keeps) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f16.f16.f16 " PLACES_64
                 ", {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
                 : UP_TO_64(AS_WORD)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keeps));
}
// The same with both operands in shared memory, and sums in float.
__device__ __forceinline__ void add_products(float (&sums)[128], u64 a, u64 b, int keeps) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " PLACES_128
                 ", %128, %129, p, 1, 1, 0, 0;\n}"
                 : UP_TO_128(AS_FLOAT)
                 : "l"(a), "l"(b), "r"(keeps));
}
// The same for bits, 32 bytes a row: counts of the bits that both rows have; `a` is in registers or in shared
// memory.
__device__ __forceinline__ void add_products(int (&sums)[64], const u32 (&a)[4], u64 b, int keeps) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k256.row.col.s32.b1.b1.and.popc " PLACES_64
                 ", {%64, %65, %66, %67}, %68, p;\n}"
                 : UP_TO_64(AS_WORD)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keeps));
}
__device__ __forceinline__ void add_products(int (&sums)[64], u64 a, u64 b, int keeps) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k256.row.col.s32.b1.b1.and.popc " PLACES_64
                 ", %64, %65, p;\n}"
                 : UP_TO_64(AS_WORD)
                 : "l"(a), "l"(b), "r"(keeps));
}
