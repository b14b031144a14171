// The pieces of sm80_gemv.cu that know the bricks: one lane's share of a quarter, as loaded, to its 16 A registers.
#pragma once

#include "bf16_w12_patches.cuh"

namespace wc {
namespace gemv {

constexpr u32 kTile = 64;          // rows and columns of a brick
constexpr u32 kQuarterRows = 16;
constexpr u32 kPlaneBytes = 512;   // 32 lanes × 16 bytes
static_assert(kTile == w12::kTileRows && kTile == w12::kTileCols && kQuarterRows == w12::kQuarterRows, "brick shape");
static_assert(kPlaneBytes == w12::kPlaneBytes, "one warp load per plane");

// Bricks of docs/format.md, section 2.
struct Bf16W12 {
    static constexpr u32 kBrickBytes = w12::kBrickBytes;
    static constexpr u32 kPlanes = 3;
    static constexpr u32 kPatchBytes = w12::kPatchBytes;  // per quarter, after the four quarters

    w12::Table table;
    const u32* overflow;

    // `patch` is word lane % 4 of the quarter's patch word. An all-zero word has no patches. `scratch` says where
    // patches may be applied: w12::kHighBytes of shared memory.
    template <class Scratch>
    WC_DEVICE void decode(u32 (&a)[16], const u32x4 (&planes)[kPlanes], u32 patch, Scratch scratch, u32 lane) const {
        u32 high[8];
        w12::decode_high_quarter(high, planes[2], table);
        if (__any_sync(~0u, patch != 0)) w12::patch_high(high, patch, overflow, scratch(), lane);
        w12::merge_quarter(a, planes[0], planes[1], high);
    }
};

// The same weights uncompressed, in the same order: plane j holds the registers of step j. For exact comparisons.
struct Bf16 {
    static constexpr u32 kBrickBytes = kTile * kTile * 2;
    static constexpr u32 kPlanes = 4;
    static constexpr u32 kPatchBytes = 0;

    w12::Table table;
    const u32* overflow;

    template <class Scratch>
    WC_DEVICE void decode(u32 (&a)[16], const u32x4 (&planes)[kPlanes], u32, Scratch, u32) const {
        WC_UNROLL
        for (u32 j = 0; j < kPlanes; ++j) {
            a[4 * j + 0] = planes[j].x;
            a[4 * j + 1] = planes[j].y;
            a[4 * j + 2] = planes[j].z;
            a[4 * j + 3] = planes[j].w;
        }
    }
};

}  // namespace gemv
}  // namespace wc
