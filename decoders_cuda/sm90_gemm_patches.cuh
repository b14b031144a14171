// The patches of a `bf16-w12` quarter whose brick lies in shared memory, for the wgmma product.
#pragma once

#include "bf16_w12_patches.cuh"

namespace wc {
namespace w12 {

// One lane's entry of a patch word, as if every word had kInlineMax of them.
struct LaneEntry {
    u32 first, second;    // the two words that it lies in; for lane 0 also start and length of a list
    u32 address, value;   // where its byte goes, and the byte

    // `patches` is the patch word's address in shared memory.
    WC_DEVICE void load(u32 patches, u32 lane) {
        const u32 word = bit(lane) / 32, next = word < 3 ? word + 1 : 3;  // the last entry lies in the last word alone
        first = load_smem_word(patches + word * 4), second = load_smem_word(patches + next * 4);
    }

    // `scratch` is where `patch_quarter` will hold the high bytes.
    WC_DEVICE void locate(u32 scratch, u32 lane) {
        const u32 entry = funnel_right(first, second, bit(lane) % 32);
        address = scratch + patched_byte(entry), value = entry >> 10;
    }

private:
    static WC_DEVICE u32 bit(u32 lane) { return lane < kInlineMax ? lane * kInlineBits : 0; }
};

// Afterwards `high` holds the original high bytes. One lane per entry, whatever lane holds the weight, so that 60 of
// them cost little more than one: the high bytes go to `scratch` (kHighBytes of shared memory that this warp alone
// uses), entries overwrite them there, and they come back. `tag` is the patch word's, `overflow` the tensor's list,
// whose ranges the caller has validated. The whole warp calls this. It is short because the first warp that comes here
// waits for the code.
WC_DEVICE void patch_quarter(u32 (&high)[8], u32 tag, const LaneEntry& own, const u32* overflow, u32 scratch,
                             u32 lane) {
    store_high(scratch, high, lane);
    __syncwarp();
    if (__builtin_expect(__all_sync(~0u, tag != kOverflowTag), 1)) {
        if (lane < tag) store_smem_byte(own.address, own.value);
    } else {
        const auto apply = [&](u32 entry) { store_smem_byte(scratch + patched_byte(entry), entry >> 10); };
        const u32 begin = __shfl_sync(~0u, own.first, 0), count = __shfl_sync(~0u, own.second, 0);
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
    load_high(high, scratch, lane);
    __syncwarp();  // before anything else is written there
}

}  // namespace w12
}  // namespace wc
