// The ring buffer of warp-specialised kernels (sm_90a): a producer streams panels of operands from global into
// shared memory, and warpgroups, the consumers, multiply them.
//
//            stage 0    stage 1    stage 2        stage COUNT - 1
//          +----------+----------+----------+     +----------+
//          |  panel   |  panel   |  panel   | ... |  panel   |     in shared memory
//          +----------+----------+----------+     +----------+
//   full   | mbarrier | mbarrier | mbarrier | ... | mbarrier |     1 arrival of the producer, and the bytes
//   empty  | mbarrier | mbarrier | mbarrier | ... | mbarrier |     1 arrival of each consumer
//          +----------+----------+----------+     +----------+
//
//   producer, for each panel                      consumer, for each panel
//     wait(empty[stage], parity ^ 1)                wait(full[stage], parity)
//     expect(full[stage], bytes), copy              multiply
//     advance                                       arrive(empty[stage]), advance
//
// Both sides begin at stage 0 with parity 0, and the parity changes with every pass over the ring. An mbarrier
// completes one phase per pass, with parities 0, 1, 0, ...; a wait ends once the phase of its parity is
// complete. The phase before the first counts as complete: the producer's first pass finds all stages empty.

#include "common/warp.cuh"

// A position in a ring buffer of COUNT stages: the stage, and the phase parity of its mbarriers.
template <u32 COUNT> struct RingPosition {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// mbarriers in shared memory, which count arrivals and bytes.
// PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier.init.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// PTX ISA, Parallel Synchronization and Communication Instructions: membar, fence.
__device__ __forceinline__ void barrier_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier.arrive.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Releases to the block only: a release to the cluster compiles to a full memory fence, and halves the speed
// of the loop.
// PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier.arrive.
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the same mbarrier of another block of the cluster.
// PTX ISA, Data Movement and Conversion Instructions: mapa; Parallel Synchronization and Communication Instructions:
// mbarrier.arrive.
__device__ __forceinline__ void barrier_arrive_in(u32 barrier, u32 block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(block)
        : "memory");
}
// PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier.test_wait, mbarrier.try_wait.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra PASSED;\nbra AGAIN;\nPASSED:\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}
// PTX ISA, Parallel Synchronization and Communication Instructions: barrier.cluster.
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
// PTX ISA, Data Movement and Conversion Instructions: cp.async.bulk.
__device__ __forceinline__ void bulk_copy_to_both(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"((unsigned short)3)
        : "memory");
}

// Initialises the mbarriers of COUNT stages, by one thread. `barrier_fence` makes them visible.
template <u32 COUNT> __device__ __forceinline__ void init_ring(u32 full, u32 empty, u32 consumers) {
    for (u32 stage = 0; stage < COUNT; ++stage) {
        barrier_init(full + 8 * stage, 1);
        barrier_init(empty + 8 * stage, consumers);
    }
}

// Registers per thread: of the producer's warpgroup, and of a consumer, which shares the rest with the others.
enum : u32 { PRODUCER_REGISTERS = 24 };
__host__ __device__ constexpr u32 consumer_registers(u32 warpgroups) {
    const u32 threads = warpgroups * 128 + 128;
    const u32 all = 65536 / threads / 8 * 8 * threads;
    const u32 left = (all - PRODUCER_REGISTERS * 128) / (warpgroups * 128) / 8 * 8;
    return left > 240 ? 240 : left;
}

// Lowers, or raises, the number of registers of each thread of a warpgroup.
// PTX ISA, Miscellaneous Instructions: setmaxnreg.
template <u32 REGISTERS> __device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
// PTX ISA, Miscellaneous Instructions: setmaxnreg.
template <u32 REGISTERS> __device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
