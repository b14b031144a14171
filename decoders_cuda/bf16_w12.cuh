// `bf16-w12`, version 1: constants and decode, one source for device and host (docs/format.md, section 2).
//
// A brick is 64 rows × 64 columns in 6,208 bytes: four quarters of 16 rows (1,536 bytes each) and a patch area.
// A warp decodes one quarter into 16 registers, `a[4 * step + i]`: the A operands of four m16n8k16 products.
// Cost: 11 integer instructions per 8 weights and lane; the patch branch is uniform over the warp.
#pragma once

#include "ptx.cuh"

namespace wc {
namespace w12 {

constexpr u32 kTileRows = 64;
constexpr u32 kTileCols = 64;
constexpr u32 kBrickBytes = 6208;
constexpr u32 kQuarters = 4;
constexpr u32 kQuarterRows = 16;
constexpr u32 kSteps = 4;
constexpr u32 kStepCols = 16;
constexpr u32 kPlaneBytes = 512;    // 32 lanes × 16 bytes
constexpr u32 kQuarterBytes = 1536; // planes: low bytes of steps 0-1, of steps 2-3, codes
constexpr u32 kPatchOffset = 6144;
constexpr u32 kPatchBytes = 16;
constexpr u32 kInlineMax = 6;       // patches that fit into a patch word
constexpr u32 kInlineBits = 20;
constexpr u32 kOverflowTag = 255;
constexpr u32 kPositionMask = 0x3ff;

static_assert(kQuarters * kQuarterRows == kTileRows && kSteps * kStepCols == kTileCols, "brick shape");
static_assert(kQuarterRows * kTileCols * 12 / 8 == kQuarterBytes, "12 bits per weight");
static_assert(3 * kPlaneBytes == kQuarterBytes && kQuarters * kQuarterBytes == kPatchOffset, "planes");
static_assert(kPatchOffset + kQuarters * kPatchBytes == kBrickBytes, "patch area");
static_assert(kInlineMax * kInlineBits <= 120, "the tag is byte 15 of a patch word");

// The eight values of the high exponent bits, bytes 0-3 and 4-7; each below 0x80.
struct Table {
    u32 lo, hi;
};

// Byte offset of a quarter's plane (0 low bytes of steps 0-1, 1 of steps 2-3, 2 codes) for one lane, in its brick.
constexpr WC_HOST_DEVICE u32 plane_offset(u32 quarter, u32 plane, u32 lane) {
    return quarter * kQuarterBytes + plane * kPlaneBytes + lane * 16;
}

constexpr WC_HOST_DEVICE u32 patch_offset(u32 quarter) { return kPatchOffset + quarter * kPatchBytes; }

// One lane's eight weights of one step, as the four A registers of m16n8k16: `low0` and `low1` are the low bytes of
// weights 0-3 and 4-7, `codes` the code word.
WC_HOST_DEVICE void decode_step(u32* a, u32 low0, u32 low1, u32 codes, Table table) {
    const u32 selector = codes & 0x77777777u;
    const u32 high0 = prmt(table.lo, table.hi, selector) | (codes & 0x80808080u);
    const u32 high1 = prmt(table.lo, table.hi, selector >> 16) | ((codes << 4) & 0x80808080u);
    a[0] = prmt(low0, high0, 0x5140);
    a[1] = prmt(low0, high0, 0x7362);
    a[2] = prmt(low1, high1, 0x5140);
    a[3] = prmt(low1, high1, 0x7362);
}

// One lane's share of a quarter, patches not yet applied.
WC_HOST_DEVICE void decode_quarter(u32 (&a)[16], u32x4 low01, u32x4 low23, u32x4 codes, Table table) {
    decode_step(a + 0, low01.x, low01.y, codes.x, table);
    decode_step(a + 4, low01.z, low01.w, codes.y, table);
    decode_step(a + 8, low23.x, low23.y, codes.z, table);
    decode_step(a + 12, low23.z, low23.w, codes.w, table);
}

WC_HOST_DEVICE u32 patch_tag(u32x4 word) { return word.w >> 24; }

// Moves entry 1 to entry 0 and so on. The tag is destroyed.
WC_HOST_DEVICE u32x4 next_entry(u32x4 word) {
    return {funnel_right(word.x, word.y, kInlineBits), funnel_right(word.y, word.z, kInlineBits),
            funnel_right(word.z, word.w, kInlineBits), word.w >> kInlineBits};
}

// Overwrites the high byte of one weight if `lane` holds it. An entry is position (l + 32 j + 128 p) in bits 0-9, high
// byte in bits 10-17; it is the same for the whole warp, so register indices stay compile-time constants.
WC_HOST_DEVICE void apply_entry(u32 (&a)[16], u32 entry, u32 lane) {
    constexpr u32 kRegisterBits = 0x360;  // j and p / 2: which of the 16 registers
    const u32 target = (entry & 31) == lane ? entry & kRegisterBits : ~0u;
    const u32 selector = entry & 0x80 ? 0x4210 : 0x3240;  // p odd: byte 3, even: byte 1
    const u32 high = entry >> 10;
    WC_UNROLL
    for (u32 r = 0; r < 16; ++r) {
        if (target == ((r >> 2) << 5 | (r & 3) << 8)) a[r] = prmt(a[r], high, selector);
    }
}

// Applies a quarter's patches to its decoded registers: afterwards they hold the original weights. `overflow` is the
// tensor's overflow list; the caller has validated its ranges.
WC_HOST_DEVICE void apply_patches(u32 (&a)[16], u32x4 word, const u32* overflow, u32 lane) {
    const u32 tag = patch_tag(word);
    if (tag == 0) return;
    if (tag != kOverflowTag) {
        for (u32 i = 0; i < tag; ++i, word = next_entry(word)) apply_entry(a, word.x, lane);
        return;
    }
    const u32* entries = overflow + word.x;
    for (u32 i = 0; i < word.y; ++i) apply_entry(a, entries[i], lane);
}

}  // namespace w12
}  // namespace wc
