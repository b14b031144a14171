// What the fused products share about the patches of `bf16-w12`: lists in L2, high bytes in shared memory.
#pragma once

#include "bf16_w12.cuh"

namespace wc {
namespace w12 {

constexpr u32 kSectorWords = 8;  // the smallest piece that L2 fetches

// Asks for sector `index` of the overflow list, of which the host wants `sectors`: a quarter of more than six exceptions
// is rare, and the whole product waits for its warp, so that its entries should be in L2 when the patch word is read.
WC_DEVICE void prefetch_overflow(const u32* overflow, u32 sectors, u32 index) {
    if (index < sectors) prefetch_l2(overflow + static_cast<u64>(index) * kSectorWords);
}

// A quarter's high bytes to `scratch` and back, where `patched_byte` says; each lane moves its own 8 registers.
WC_DEVICE void store_high(u32 scratch, const u32 (&high)[8], u32 lane) {
    const u32 own = scratch + lane * 16;
    store_smem(own, {high[0], high[1], high[4], high[5]});
    store_smem(own + kHighBytes / 2, {high[2], high[3], high[6], high[7]});
}

WC_DEVICE void load_high(u32 (&high)[8], u32 scratch, u32 lane) {
    const u32 own = scratch + lane * 16;
    const u32x4 even = load_smem(own), odd = load_smem(own + kHighBytes / 2);
    high[0] = even.x, high[1] = even.y, high[4] = even.z, high[5] = even.w;
    high[2] = odd.x, high[3] = odd.y, high[6] = odd.z, high[7] = odd.w;
}

}  // namespace w12
}  // namespace wc
