// Instructions that only the NVFP4 kernels use, thin wrappers; the tests swap this file for one that runs on a CPU.
#pragma once

#include "ptx_sm90.cuh"

namespace wc {

// Narrow shapes; see ptx_sm90.cuh for the others.
template <>
struct Wgmma<8> {
    static WC_DEVICE void mma(float (&d)[4], const u32* a, u64 b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};
template <>
struct Wgmma<24> {
    static WC_DEVICE void mma(float (&d)[12], const u32* a, u64 b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, %16, 1, 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

// mma.sync without a memory clobber: the compiler may move it among ordinary accesses.
WC_DEVICE void mma_sync(float* d, const u32* a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two BF16 products; subnormals and the signs of zeros are kept.
WC_DEVICE u32 bf16_product(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// The low and the high half, each twice: operand modifiers, no instructions.
WC_DEVICE void broadcast_halves(u32 both, u32& low, u32& high) {
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\nmov.b32 %0, {lo, lo};\nmov.b32 %1, {hi, hi};\n}"
        : "=r"(low), "=r"(high)
        : "r"(both));
}

// 2 bytes that are read once.
WC_DEVICE u32 load_pair_once(const void* p) {
    u16 v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

// Strong loads, which ptxas leaves in program order. It moves weak ones whose values only the next turn of a loop needs
// to the turn's end, where their latency shows.
WC_DEVICE u32x4 load_in_order(const void* p) {
    u32x4 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

WC_DEVICE u32 load_pair_in_order(const void* p) {
    u16 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

WC_DEVICE u32x4 load_smem_in_order(u32 address) {
    u32x4 v;
    asm volatile("ld.relaxed.cta.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

// Orders this thread's copies to shared memory before the tensor cores' reads of it.
WC_DEVICE void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier among the 128 threads of one of the four warpgroups.
WC_DEVICE void group_barrier(u32 group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// threadIdx.x, anew: what is computed from it is not kept in registers across the widest loops.
WC_DEVICE u32 thread_index() {
    u32 i = threadIdx.x;
    asm volatile("" : "+r"(i));
    return i;
}

}  // namespace wc
