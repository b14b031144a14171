// Reads a buffer and keeps nothing: the time below which no kernel that needs those bytes can end. Benches also use it
// to push everything else out of L2 (a read, not a write: writing back dirty lines would slow the next kernel).
//
// WC_ONCE 1 marks the bytes as read once, as the kernels mark weights: the floor. WC_ONCE 0 loads with the default
// policy: the flush, since lines marked so may give way before what they are meant to push out.
// Grid: any. Block: any. Every thread streams 16-byte loads, WC_UNROLL_LOADS of them in flight.

#include "ptx.cuh"

static_assert(WC_UNROLL_LOADS >= 1 && WC_UNROLL_LOADS <= 16, "loads in flight per thread");

namespace {

WC_DEVICE wc::u32x4 load(const wc::u32x4* p) {
#if WC_ONCE
    return wc::load_once(p);
#else
    return *p;
#endif
}

}  // namespace

extern "C" __global__ void read_floor(const wc::u32x4* __restrict__ data, wc::u64 count, wc::u32* __restrict__ sink) {
    const wc::u64 stride = static_cast<wc::u64>(gridDim.x) * blockDim.x;
    wc::u64 i = static_cast<wc::u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    wc::u32 folded = 0;
    for (; i + (WC_UNROLL_LOADS - 1) * stride < count; i += WC_UNROLL_LOADS * stride) {
        wc::u32x4 v[WC_UNROLL_LOADS];
        WC_UNROLL
        for (int u = 0; u < WC_UNROLL_LOADS; ++u) v[u] = load(data + i + u * stride);
        WC_UNROLL
        for (int u = 0; u < WC_UNROLL_LOADS; ++u) folded ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    for (; i < count; i += stride) {
        const wc::u32x4 v = load(data + i);
        folded ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    // One value in 2³² stores: enough that the compiler cannot drop the loads.
    if (folded == 0x9e3779b9u) *sink = folded;
}
