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
constexpr u32 kQuarterNibbleBytes = 512, kQuarterScaleBytes = 64;
constexpr u32 kScaleOffset = 4 * kQuarterNibbleBytes;
constexpr u32 kBrickBytes = kScaleOffset + 4 * kQuarterScaleBytes;  // raw scales

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

#if defined(__CUDACC__)

WC_DEVICE u32 bf16_product(u32 a, u32 b) {
    u32 d;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));  // − 0 keeps signs of zeros
#endif
    return d;
}

// Scales of rows g and g + 8, each twice in its word: |scale| · 2¹¹⁸ as BF16, exact and finite for every byte.
struct Scales {
    u32 upper, lower;
};

WC_DEVICE Scales expand_scales(u32 bytes) {
    constexpr u32 kTwo119 = 0x7b007b00u;
    const u32 both = bf16_product(bf16_product(place_scales(bytes), kTwo119), kTwo119);
    Scales s;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\nmov.b32 %0, {lo, lo};\nmov.b32 %1, {hi, hi};\n}"
        : "=r"(s.upper), "=r"(s.lower)
        : "r"(both));
    return s;
}

// Four A registers of one step: E2M1 · E4M3 · 2⁻⁸, exact in BF16.
WC_DEVICE void decode_step(u32 w, Scales s, u32* a) {
    u32 r[4];
    place_step(w, r);
    a[0] = bf16_product(r[0], s.upper);
    a[1] = bf16_product(r[1], s.lower);
    a[2] = bf16_product(r[2], s.upper);
    a[3] = bf16_product(r[3], s.lower);
}

constexpr float kDecodedFactor = 256.0f;  // what a decoded operand lacks

#endif  // __CUDACC__

}  // namespace nvfp4
}  // namespace wc
