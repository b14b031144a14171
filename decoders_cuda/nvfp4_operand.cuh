// NVFP4 bricks as register operands of mma.sync and wgmma.
#pragma once

#include "nvfp4_s5.cuh"
#include "ptx_moe.cuh"

namespace wc {
namespace nvfp4 {

// Scales of rows g and g + 8, each twice in its word: |scale| · 2¹¹⁸ as BF16, exact and finite for every byte.
struct Scales {
    u32 upper, lower;
};

WC_DEVICE Scales expand_scales(u32 bytes) {
    constexpr u32 kTwo119 = 0x7b007b00u;
    const u32 both = bf16_product(bf16_product(place_scales(bytes), kTwo119), kTwo119);
    Scales s;
    broadcast_halves(both, s.upper, s.lower);
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

}  // namespace nvfp4
}  // namespace wc
