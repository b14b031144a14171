// The patches of `bf16-w12` bricks in the fused products, applied lane by lane through shared memory.
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

// Applies a quarter's patches: afterwards `high` holds the original high bytes. One lane per entry, whatever lane holds
// the weight, so that 60 of them cost little more than one: the high bytes go to `scratch` (kHighBytes of shared memory
// that this warp alone uses), entries overwrite them there, and they come back. `patch` is word lane % 4 of the patch
// word, `overflow` the tensor's list, whose ranges the caller has validated. The whole warp calls this.
WC_DEVICE void patch_high(u32 (&high)[8], u32 patch, const u32* overflow, u32 scratch, u32 lane) {
    const u32 tag = __shfl_sync(~0u, patch, 3) >> 24;
    const bool listed = tag == kOverflowTag;
    // Start and length of a list, or the two words that this lane's entry lies in.
    const u32 bit = listed ? 0 : lane * kInlineBits;
    const u32 first = __shfl_sync(~0u, patch, bit / 32), second = __shfl_sync(~0u, patch, bit / 32 + 1);
    const u32 own = scratch + lane * 4;
    __syncwarp();  // the warp has read what was there
    WC_UNROLL
    for (u32 r = 0; r < 8; ++r) store_smem_word(own + r * kRegisterBytes, high[r]);
    __syncwarp();
    const auto apply = [&](u32 entry) { store_smem_byte(scratch + high_byte(entry), entry >> 10 & 0xff); };
    if (listed) {
        const u32* const entries = overflow + first;
        WC_NO_UNROLL
        for (u32 i = lane; i < second; i += 64) {  // two loads on their way at once
            const bool more = i + 32 < second;
            const u32 entry = load_word(entries + i), next = more ? load_word(entries + i + 32) : 0;
            apply(entry);
            if (more) apply(next);
        }
    } else if (lane < tag) {
        apply(funnel_right(first, second, bit % 32));
    }
    __syncwarp();
    WC_UNROLL
    for (u32 r = 0; r < 8; ++r) high[r] = load_smem_word(own + r * kRegisterBytes);
    __syncwarp();  // before anything else is written there
}

}  // namespace w12
}  // namespace wc
