// `bf16-w12`, version 1: constants and decode, one source for device and host (docs/format.md, section 2).
//
// A brick is 64 rows × 64 columns in 6,208 bytes: four quarters of 16 rows (1,536 bytes each) and a patch area.
// A warp decodes one quarter into 16 registers, `a[4 * step + i]`: the A operands of four m16n8k16 products. Patches go
// into the high bytes, 8 registers, before these meet the low bytes.
// Cost: 11 integer instructions per 8 weights and lane.
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
constexpr u32 kHighBytes = 1024;    // the high bytes of a quarter, 8 registers
constexpr u32 kPatchOffset = 6144;
constexpr u32 kPatchBytes = 16;
constexpr u32 kInlineMax = 6;       // patches that fit into a patch word
constexpr u32 kInlineBits = 20;
constexpr u32 kOverflowTag = 255;

static_assert(kQuarters * kQuarterRows == kTileRows && kSteps * kStepCols == kTileCols, "brick shape");
static_assert(kQuarterRows * kTileCols * 12 / 8 == kQuarterBytes, "12 bits per weight");
static_assert(3 * kPlaneBytes == kQuarterBytes && kQuarters * kQuarterBytes == kPatchOffset, "planes");
static_assert(kPatchOffset + kQuarters * kPatchBytes == kBrickBytes, "patch area");
static_assert(kHighBytes == kQuarterRows * kTileCols && kHighBytes == 8 * 32 * 4, "one high byte per weight");
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

// High bytes of one lane's eight weights of one step: weights 0-3, then 4-7. `codes` is the code word.
WC_HOST_DEVICE void decode_high(u32* high, u32 codes, Table table) {
    const u32 selector = codes & 0x77777777u;
    high[0] = prmt(table.lo, table.hi, selector) | (codes & 0x80808080u);
    high[1] = prmt(table.lo, table.hi, selector >> 16) | ((codes << 4) & 0x80808080u);
}

// Four weights as two registers: their low bytes and their high bytes.
WC_HOST_DEVICE void merge_bytes(u32* a, u32 low, u32 high) {
    a[0] = prmt(low, high, 0x5140);
    a[1] = prmt(low, high, 0x7362);
}

// High bytes of one lane's share of a quarter, patches not yet applied.
WC_HOST_DEVICE void decode_high_quarter(u32 (&high)[8], u32x4 codes, Table table) {
    decode_high(high + 0, codes.x, table);
    decode_high(high + 2, codes.y, table);
    decode_high(high + 4, codes.z, table);
    decode_high(high + 6, codes.w, table);
}

WC_HOST_DEVICE void merge_quarter(u32 (&a)[16], u32x4 low01, u32x4 low23, const u32 (&high)[8]) {
    const u32 low[8] = {low01.x, low01.y, low01.z, low01.w, low23.x, low23.y, low23.z, low23.w};
    WC_UNROLL
    for (u32 i = 0; i < 8; ++i) merge_bytes(a + 2 * i, low[i], high[i]);
}

// One lane's share of a quarter without its patches.
WC_HOST_DEVICE void decode_quarter(u32 (&a)[16], u32x4 low01, u32x4 low23, u32x4 codes, Table table) {
    u32 high[8];
    decode_high_quarter(high, codes, table);
    merge_quarter(a, low01, low23, high);
}

WC_HOST_DEVICE u32 patch_tag(u32x4 word) { return word.w >> 24; }

// Moves entry 1 to entry 0 and so on. The tag is destroyed.
WC_HOST_DEVICE u32x4 next_entry(u32x4 word) {
    return {funnel_right(word.x, word.y, kInlineBits), funnel_right(word.y, word.z, kInlineBits),
            funnel_right(word.z, word.w, kInlineBits), word.w >> kInlineBits};
}

// Where kernels keep a quarter's high bytes while patches overwrite them: lane l's registers 0, 1, 4, 5 at 16 l, its
// registers 2, 3, 6, 7 half of kHighBytes on. This is the place of an entry's byte (bits 10-17), which is byte p % 4 of
// register 2 j + p / 4 in lane l for the position l + 32 j + 128 p (bits 0-9).
constexpr WC_HOST_DEVICE u32 patched_byte(u32 entry) {
    return (entry << 4 & 0x3f0) | (entry >> 3 & 8) | (entry >> 7 & 7);
}
static_assert(patched_byte(1) == 16 && patched_byte(1 << 5) == kHighBytes / 2 && patched_byte(2 << 5) == 8, "lane, j");
static_assert(patched_byte(1 << 7) == 1 && patched_byte(4 << 7) == 4 && patched_byte(0x3ff) == kHighBytes - 1, "p");

}  // namespace w12
}  // namespace wc
