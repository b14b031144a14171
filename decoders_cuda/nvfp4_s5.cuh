// NVFP4 bricks: 64 rows × 64 columns of E2M1 nibbles and one E4M3 scale per row and 16 columns.
//
// `docs/format_nvfp4.md` is the specification. A lane of a quarter (16 rows × 64 columns) owns two whole blocks, rows g
// and g + 8 of columns 16t … 16t + 15, so that it needs two scales per quarter. Step j (0 … 3) takes columns
// 16t + 4j … 16t + 4j + 3 of both blocks, which is one u32 and four A registers of an m16n8k16 or m64nNk16 product;
// the bits of that u32 are placed such that 9 integer instructions bring 8 weights to their places in BF16.
#pragma once

#include "ptx.cuh"

namespace wc {
namespace nvfp4 {

constexpr u32 kTileRows = 64, kTileCols = 64;
constexpr u32 kQuarterNibbleBytes = 512, kQuarterScaleBytes = 64, kQuarterCodeBytes = 40;
constexpr u32 kScaleOffset = 4 * kQuarterNibbleBytes;
constexpr u32 kBrickBytes = kScaleOffset + 4 * kQuarterScaleBytes;          // raw scales
constexpr u32 kWindowedBrickBytes = kScaleOffset + 4 * kQuarterCodeBytes;

// Sign and magnitude bits of two weights at bits 15, 8 … 6 of each half: BF16 numbers of E2M1 value · 2⁻¹²⁶.
// `r` is in the order of the A registers: row g, row g + 8, row g (columns + 2), row g + 8 (columns + 2).
WC_HOST_DEVICE void place_step(u32 w, u32 (&r)[4]) {
    constexpr u32 kWeights = 0x81c081c0u, kLast = 0x00400040u;
    r[0] = w & kWeights;
    r[1] = w << 6 & kWeights;
    r[2] = funnel_right(w, w, 4) & kWeights;
    r[3] = (funnel_right(w, w, 6) & (kWeights ^ kLast)) | (w << 2 & kLast);
}

// The scale bytes of rows g (low byte) and g + 8 as two BF16 numbers of |scale| · 2⁻¹²⁰. Signs are in the nibbles.
WC_HOST_DEVICE u32 place_scales(u32 bytes) { return prmt(bytes, 0, 0x4140) << 4 & 0x07f007f0u; }

// Scale bytes of rows g (low byte) and g + 8 from their codes: `low` is the lane's byte of low bits, `high` its two bits
// of the quarter's last eight bytes, `base` the window's first value.
WC_HOST_DEVICE u32 scales_in_window(u32 low, u32 high, u32 base) {
    return ((low & 15) | (low & 0xf0) << 4 | (high & 1) << 4 | (high & 2) << 11) + base * 0x0101u;
}

}  // namespace nvfp4
}  // namespace wc
