// The patches of a `bf16-w12` quarter whose brick lies in shared memory, for the wgmma product.
#pragma once

#include "bf16_w12_patches.cuh"

namespace wc {
namespace w12 {

// Afterwards `high` holds the original high bytes. One lane per entry, whatever lane holds the weight, so that 60 of
// them cost little more than one: the high bytes go to `scratch` (kHighBytes of shared memory that this warp alone
// uses), entries overwrite them there, and they come back. `tag` is the patch word's, `patches` its shared-memory
// address, `overflow` the tensor's list, whose ranges the caller has validated. The whole warp calls this. It is short
// because the first warp that comes here waits for the code.
WC_DEVICE void patch_from_brick(u32 (&high)[8], u32 tag, u32 patches, const u32* overflow, u32 scratch, u32 lane) {
    // The two words that this lane's entry lies in; for lane 0 also start and length of a list.
    const u32 bit = lane < kInlineMax ? lane * kInlineBits : 0;
    const u32 first = load_smem_word(patches + bit / 32 * 4), second = load_smem_word(patches + bit / 32 * 4 + 4);
    const u32 own = scratch + lane * 16;
    store_smem(own, {high[0], high[1], high[4], high[5]});
    store_smem(own + kHighBytes / 2, {high[2], high[3], high[6], high[7]});
    __syncwarp();
    const auto apply = [&](u32 entry) { store_smem_byte(scratch + patched_byte(entry), entry >> 10); };
    if (__builtin_expect(__all_sync(~0u, tag != kOverflowTag), 1)) {
        if (lane < tag) apply(funnel_right(first, second, bit % 32));
    } else {
        const u32 begin = __shfl_sync(~0u, first, 0), count = __shfl_sync(~0u, second, 0);
        const u32* at = overflow + begin + lane;
        WC_NO_UNROLL
        for (u32 i = lane; i - lane < count; i += 64, at += 64) {  // two loads on their way at once
            u32 entry = 0, next = 0;
            if (i < count) entry = load_word(at);
            if (i + 32 < count) next = load_word(at + 32);
            if (i < count) apply(entry);
            if (i + 32 < count) apply(next);
        }
    }
    __syncwarp();
    const u32x4 even = load_smem(own), odd = load_smem(own + kHighBytes / 2);
    high[0] = even.x, high[1] = even.y, high[4] = even.z, high[5] = even.w;
    high[2] = odd.x, high[3] = odd.y, high[6] = odd.z, high[7] = odd.w;
    __syncwarp();  // before anything else is written there
}

}  // namespace w12
}  // namespace wc
