// The patches of `bf16-w12` quarters in the small-m product: a patch word's in registers, a list through shared memory.
#pragma once

#include "bf16_w12_patches.cuh"

namespace wc {
namespace w12 {

// One entry of a patch word. Every lane compares where the byte belongs with what it holds: 30 instructions with
// the loop, but no latency of shared memory, for which the warp would wait several times.
WC_DEVICE void patch_entry(u32 (&high)[8], u32 entry, u32 lane) {
    // Position l + 32 j + 128 p is byte p % 4 of register 2 j + p / 4 in lane l. There this is 32 j + 512 (p / 4).
    const u32 place = (entry ^ lane) & 0x27f;
    u32 selector = static_cast<u32>(0x4210341032403214ull >> (entry >> 3 & 0x30)), byte = entry >> 10;
    keep(selector);  // computed once, not for each register
    keep(byte);
    WC_UNROLL
    for (u32 r = 0; r < 8; ++r) {
        if (place == (r / 2 << 5 | r % 2 << 9)) high[r] = prmt(high[r], byte, selector);
    }
}

// The entries of a patch word, which every lane has.
WC_DEVICE void patch_inline(u32 (&high)[8], u32x4 word, u32 lane) {
    u32 left = patch_tag(word);
    if (left - 1 >= kInlineMax) return;  // none, or a list
    WC_NO_UNROLL
    do {
        patch_entry(high, word.x, lane);
        word = next_entry(word);
    } while (--left != 0);
}

// The lists among some quarters' patch words, all at once: the high bytes go to shared memory, one lane per entry
// overwrites them there, whatever lane holds the weight, and they come back. 60 cost little more than one.
template <u32 kCount, class Scratch>
WC_DEVICE void patch_lists(u32 (&high)[kCount][8], const u32x4 (&word)[kCount], const u32* overflow, Scratch scratch,
                           u32 lane) {
    u32 base[kCount], count[kCount], most = 0;
    WC_UNROLL
    for (u32 i = 0; i < kCount; ++i) {
        base[i] = scratch(i);
        count[i] = patch_tag(word[i]) == kOverflowTag ? word[i].y : 0;
        most = count[i] > most ? count[i] : most;
    }
    __syncwarp();  // the warp has read what was there
    WC_UNROLL
    for (u32 i = 0; i < kCount; ++i) store_high(base[i], high[i], lane);
    __syncwarp();
    WC_NO_UNROLL
    for (u32 k = lane; k < most; k += 64) {
        u32 entry[kCount][2];  // all on their way at once
        WC_UNROLL
        for (u32 i = 0; i < kCount; ++i) {
            const u32* const at = overflow + word[i].x + k;
            WC_UNROLL
            for (u32 j = 0; j < 2; ++j) entry[i][j] = k + 32 * j < count[i] ? load_word(at + 32 * j) : 0;
        }
        WC_UNROLL
        for (u32 i = 0; i < kCount; ++i) {
            WC_UNROLL
            for (u32 j = 0; j < 2; ++j) {
                const u32 e = entry[i][j];
                if (k + 32 * j < count[i]) store_smem_byte(base[i] + patched_byte(e), e >> 10);
            }
        }
    }
    __syncwarp();
    WC_UNROLL
    for (u32 i = 0; i < kCount; ++i) load_high(high[i], base[i], lane);
    __syncwarp();  // before anything else is written there
}

// Applies the patches of some quarters: afterwards `high` holds the original high bytes. `word` is the quarters' patch
// words, in every lane, `overflow` the tensor's list, whose ranges the caller has validated; `scratch(i)` says where a
// list of quarter i may be applied: kHighBytes of shared memory that this warp alone uses. The whole warp calls this.
template <u32 kCount, class Scratch>
WC_DEVICE void patch_high(u32 (&high)[kCount][8], const u32x4 (&word)[kCount], const u32* overflow, Scratch scratch,
                          u32 lane) {
    bool list = false;
    WC_UNROLL
    for (u32 i = 0; i < kCount; ++i) list |= patch_tag(word[i]) == kOverflowTag;
    const bool lists = __any_sync(~0u, list);
    WC_UNROLL
    for (u32 i = 0; i < kCount; ++i) patch_inline(high[i], word[i], lane);
    if (lists) patch_lists(high, word, overflow, scratch, lane);
}

}  // namespace w12
}  // namespace wc
