// Integer types and thin wrappers of single instructions, for device and host.
//
// No toolkit or standard header is included: NVRTC needs no include path but this folder, and a plain C++
// compiler can build the integer part (every `WC_HOST_DEVICE` function) as its own reference.
#pragma once

#if defined(__CUDACC__)
#define WC_DEVICE __device__ __forceinline__
#define WC_HOST_DEVICE __host__ __device__ __forceinline__
#define WC_UNROLL _Pragma("unroll")
#define WC_NO_UNROLL _Pragma("unroll 1")
#else
#define WC_HOST_DEVICE inline
#define WC_UNROLL
#define WC_NO_UNROLL
#endif

namespace wc {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "unexpected integer sizes");

struct alignas(8) u32x2 {
    u32 x, y;
};
struct alignas(16) u32x4 {
    u32 x, y, z, w;
};
struct alignas(16) f32x4 {
    float x, y, z, w;
};

constexpr WC_HOST_DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

// PRMT, default mode: byte i of the result is byte `selector >> 4i & 7` of the eight bytes b:a. Bit 3 of a selector
// nibble would copy that byte's sign over the whole byte.
WC_HOST_DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
#if defined(__CUDA_ARCH__)
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
#else
    const u64 bytes = static_cast<u64>(b) << 32 | a;
    u32 d = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 nibble = selector >> (4 * i);
        u32 byte = static_cast<u32>(bytes >> (8 * (nibble & 7))) & 0xff;
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        d |= byte << (8 * i);
    }
    return d;
#endif
}

// Low word of (hi:lo) >> shift, shift < 32.
WC_HOST_DEVICE u32 funnel_right(u32 lo, u32 hi, u32 shift) {
#if defined(__CUDA_ARCH__)
    u32 d;
    asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(lo), "r"(hi), "r"(shift));
    return d;
#else
    return static_cast<u32>((static_cast<u64>(hi) << 32 | lo) >> shift);
#endif
}

#if defined(__CUDACC__)

// The CTA's dynamic shared memory, as bytes.
#define WC_SHARED_MEMORY(name) extern __shared__ __align__(128) wc::u8 name[]

// 16 bytes that are read once: they bypass L1. `p` is 16-byte aligned.
WC_DEVICE u32x4 load_once(const void* p) {
    u32x4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

WC_DEVICE u32 load_once_word(const void* p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// A read-only word, cached in L1.
WC_DEVICE u32 load_word(const u32* p) {
    u32 v;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

WC_DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Hides how a value came about, so that it stays in a register instead of being computed again in a loop.
template <typename T>
WC_DEVICE void keep(T*& v) {
    asm volatile("" : "+l"(v));
}
WC_DEVICE void keep(u32& v) { asm volatile("" : "+r"(v)); }

// Shared-memory address of a pointer into shared memory.
WC_DEVICE u32 smem_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

WC_DEVICE u32x4 load_smem(u32 address) {
    u32x4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

WC_DEVICE u32 load_smem_word(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

WC_DEVICE void store_smem(u32 address, u32x4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

WC_DEVICE void store_smem_byte(u32 address, u32 v) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// Asynchronous 16-byte copy to shared memory past L1; zeros where not `valid`.
WC_DEVICE void copy_async(u32 smem, const void* global, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

// The same through L1, where other warps of the SM that copy these bytes find them.
WC_DEVICE void copy_async_cached(u32 smem, const void* global, bool valid = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

// Named barrier `id` (1 … 15) for kThreads threads of the CTA.
template <u32 kThreads>
WC_DEVICE void barrier_sync(u32 id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

WC_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of this thread's youngest copy groups are still in flight.
template <int kPending>
WC_DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 × 8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8.
WC_DEVICE void ldmatrix_x4(u32 (&d)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

// D += A · B, A 16 × 16 row-major, B 16 × 8 column-major, both BF16; D 16 × 8 FP32.
WC_DEVICE void mma_m16n8k16(float (&d)[4], const u32* a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two FP32 to BF16, round to nearest even; `lo` lands in the low half.
WC_DEVICE u32 bf16_pair(float lo, float hi) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}

WC_DEVICE u16 bf16(float v) { return static_cast<u16>(bf16_pair(v, 0.0f)); }

WC_DEVICE float f32_from_bf16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

#endif  // __CUDACC__

}  // namespace wc
