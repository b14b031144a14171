// Hopper's own instructions, thin wrappers: mbarrier, bulk and tensor copies, wgmma, programmatic dependent launch.
//
// Shared-memory addresses are the 32-bit ones of `smem_address`. Needs sm_90a.
#pragma once

#include "ptx.cuh"

namespace wc {

// A CUtensorMap, passed by value as a `__grid_constant__` parameter.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// ---- mbarrier -----------------------------------------------------------------------------------------------------

WC_DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
WC_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

WC_DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives and announces `bytes` of copies that complete on this barrier.
WC_DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase with this parity.
WC_DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- copy engine --------------------------------------------------------------------------------------------------

constexpr u64 kEvictFirst = 0x12F0000000000000ull;  // read once: weights
constexpr u64 kEvictLast = 0x14F0000000000000ull;   // read by every SM: tokens

// Contiguous bytes from global to shared memory; addresses and `bytes` are multiples of 16.
WC_DEVICE void bulk_copy(u32 smem, const void* global, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(smem),
        "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// One box of a two-dimensional tensor; elements outside it arrive as zeros and count towards the bytes.
WC_DEVICE void tensor_copy(u32 smem, const TensorMap* map, u32 x, u32 y, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(smem),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
        : "memory");
}

// The same into the same place of every CTA of the cluster that `mask` names; completes on each one's own barrier.
WC_DEVICE void tensor_multicast(u32 smem, const TensorMap* map, u32 x, u32 y, u32 barrier, u16 mask, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(smem),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(mask), "l"(policy)
        : "memory");
}

WC_DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- programmatic dependent launch --------------------------------------------------------------------------------

// Waits until the kernels before this one in the stream have finished; returns at once without a PDL launch.
WC_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

WC_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- exchange between CTAs ----------------------------------------------------------------------------------------

// Device-coherent 16 bytes (L1 is bypassed); each 4-byte word is single-copy atomic.
WC_DEVICE u32x4 load_relaxed(const void* p) {
    u32x4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

WC_DEVICE void store_relaxed(void* p, u32x4 v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// The address in CTA `rank` of this cluster that corresponds to one of ours.
WC_DEVICE u32 cluster_address(u32 address, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Arrives at a barrier of any CTA of the cluster; orders nothing (a release at cluster scope would cost a fence).
WC_DEVICE void cluster_barrier_arrive(u32 remote) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

// 16 bytes to another CTA's shared memory; completes 16 bytes on that CTA's barrier.
WC_DEVICE void store_async(u32 remote, u32x4 v, u32 remote_barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote_barrier)
        : "memory");
}

// Every thread of the cluster arrives once and may then wait for all the others. This arrival orders nothing but
// barriers that `barrier_init_fence` has published: a release would wait for this thread's copies.
WC_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// The same, and what this thread stored before is seen by every thread of the cluster that has waited.
WC_DEVICE void cluster_arrive_release() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

WC_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Waits for `threads` threads at the CTA's barrier `id` (1 … 15).
WC_DEVICE void named_barrier(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- shared memory and time ---------------------------------------------------------------------------------------

// Four 8 × 8 matrices of 16-bit elements, transposed on the way; lane l names row l % 8 of matrix l / 8.
WC_DEVICE void store_matrix_transposed(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

// The same pointer, but the compiler cannot move address arithmetic across.
WC_DEVICE u8* opaque(u8* p) {
    asm volatile("" : "+l"(p));
    return p;
}

WC_DEVICE u64 global_nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}

WC_DEVICE u32 sm_index() {
    u32 i;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(i));
    return i;
}

// ---- wgmma --------------------------------------------------------------------------------------------------------

WC_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

WC_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `kPending` of the youngest groups are still running.
template <int kPending>
WC_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Descriptor of B: rows of 64 BF16 along K under the 128-byte swizzle, groups of 8 rows 1,024 bytes apart. `address` is
// a multiple of 1,024; the next 16 columns are 32 bytes on, that is, the descriptor plus 2.
WC_DEVICE u64 wgmma_descriptor(u32 address) {
    constexpr u64 kSwizzle128 = 1ull << 62, kGroupStride = static_cast<u64>(1024 >> 4) << 32, kUnused = 1ull << 16;
    return kSwizzle128 | kGroupStride | kUnused | (address & 0x3ffff) >> 4;
}

// Registers per thread for the rest of a warpgroup's role; `kMore` says whether that is more than at launch.
template <u32 kCount, bool kMore>
WC_DEVICE void set_registers() {
    if constexpr (kMore) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
    }
}

// D (64 × kTokens, FP32, registers) += A (64 × 16, registers) · B (16 × kTokens, shared memory).
template <u32 kTokens>
struct Wgmma;

// Eight accumulators each: their places in the instruction and their operands.
#define WC_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WC_D1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define WC_D2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define WC_D3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define WC_D4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define WC_D5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define WC_D6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define WC_D7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define WC_D8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define WC_D9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define WC_D10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define WC_D11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define WC_D12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define WC_D13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define WC_D14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define WC_D15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define WC_ACC(i) \
    "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), \
        "+f"(d[8 * i + 5]), "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])

// `A0` … `B` are the places of the operands after the accumulators.
#define WC_WGMMA(TOKENS, D, A0, A1, A2, A3, B, ...)                                                          \
    template <>                                                                                              \
    struct Wgmma<TOKENS> {                                                                                   \
        static WC_DEVICE void mma(float (&d)[TOKENS / 2], const u32* a, u64 b) {                             \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32.bf16.bf16 {" D "}, {%" #A0     \
                         ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                             \
                         : __VA_ARGS__                                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                              \
        }                                                                                                    \
    }

WC_WGMMA(16, WC_D0, 8, 9, 10, 11, 12, WC_ACC(0));
WC_WGMMA(32, WC_D0 ", " WC_D1, 16, 17, 18, 19, 20, WC_ACC(0), WC_ACC(1));
WC_WGMMA(48, WC_D0 ", " WC_D1 ", " WC_D2, 24, 25, 26, 27, 28, WC_ACC(0), WC_ACC(1), WC_ACC(2));
WC_WGMMA(64, WC_D0 ", " WC_D1 ", " WC_D2 ", " WC_D3, 32, 33, 34, 35, 36, WC_ACC(0), WC_ACC(1), WC_ACC(2),
         WC_ACC(3));
WC_WGMMA(96, WC_D0 ", " WC_D1 ", " WC_D2 ", " WC_D3 ", " WC_D4 ", " WC_D5, 48, 49, 50, 51, 52, WC_ACC(0),
         WC_ACC(1), WC_ACC(2), WC_ACC(3), WC_ACC(4), WC_ACC(5));
WC_WGMMA(128, WC_D0 ", " WC_D1 ", " WC_D2 ", " WC_D3 ", " WC_D4 ", " WC_D5 ", " WC_D6 ", " WC_D7, 64, 65,
         66, 67, 68, WC_ACC(0), WC_ACC(1), WC_ACC(2), WC_ACC(3), WC_ACC(4), WC_ACC(5), WC_ACC(6), WC_ACC(7));
WC_WGMMA(160, WC_D0 ", " WC_D1 ", " WC_D2 ", " WC_D3 ", " WC_D4 ", " WC_D5 ", " WC_D6 ", " WC_D7 ", "
         WC_D8 ", " WC_D9, 80, 81, 82, 83, 84, WC_ACC(0), WC_ACC(1), WC_ACC(2), WC_ACC(3), WC_ACC(4), WC_ACC(5),
         WC_ACC(6), WC_ACC(7), WC_ACC(8), WC_ACC(9));
WC_WGMMA(192, WC_D0 ", " WC_D1 ", " WC_D2 ", " WC_D3 ", " WC_D4 ", " WC_D5 ", " WC_D6 ", " WC_D7 ", "
         WC_D8 ", " WC_D9 ", " WC_D10 ", " WC_D11, 96, 97, 98, 99, 100, WC_ACC(0), WC_ACC(1), WC_ACC(2), WC_ACC(3),
         WC_ACC(4), WC_ACC(5), WC_ACC(6), WC_ACC(7), WC_ACC(8), WC_ACC(9), WC_ACC(10), WC_ACC(11));
WC_WGMMA(224, WC_D0 ", " WC_D1 ", " WC_D2 ", " WC_D3 ", " WC_D4 ", " WC_D5 ", " WC_D6 ", " WC_D7 ", "
         WC_D8 ", " WC_D9 ", " WC_D10 ", " WC_D11 ", " WC_D12 ", " WC_D13, 112, 113, 114, 115, 116, WC_ACC(0),
         WC_ACC(1), WC_ACC(2), WC_ACC(3), WC_ACC(4), WC_ACC(5), WC_ACC(6), WC_ACC(7), WC_ACC(8), WC_ACC(9),
         WC_ACC(10), WC_ACC(11), WC_ACC(12), WC_ACC(13));
WC_WGMMA(256, WC_D0 ", " WC_D1 ", " WC_D2 ", " WC_D3 ", " WC_D4 ", " WC_D5 ", " WC_D6 ", " WC_D7 ", "
         WC_D8 ", " WC_D9 ", " WC_D10 ", " WC_D11 ", " WC_D12 ", " WC_D13 ", " WC_D14 ", " WC_D15, 128, 129, 130,
         131, 132, WC_ACC(0), WC_ACC(1), WC_ACC(2), WC_ACC(3), WC_ACC(4), WC_ACC(5), WC_ACC(6), WC_ACC(7),
         WC_ACC(8), WC_ACC(9), WC_ACC(10), WC_ACC(11), WC_ACC(12), WC_ACC(13), WC_ACC(14), WC_ACC(15));
#undef WC_D0
#undef WC_D1
#undef WC_D2
#undef WC_D3
#undef WC_D4
#undef WC_D5
#undef WC_D6
#undef WC_D7
#undef WC_D8
#undef WC_D9
#undef WC_D10
#undef WC_D11
#undef WC_D12
#undef WC_D13
#undef WC_D14
#undef WC_D15
#undef WC_ACC
#undef WC_WGMMA

}  // namespace wc
