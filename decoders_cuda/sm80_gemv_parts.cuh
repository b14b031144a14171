// The pieces of sm80_gemv.cu that know the bricks: one lane's share of quarters, as loaded, to 16 A registers each.
#pragma once

#include "sm80_gemv_patches.cuh"

namespace wc {
namespace gemv {

constexpr u32 kTile = 64;          // rows and columns of a brick
constexpr u32 kQuarterRows = 16;
constexpr u32 kPlaneBytes = 512;   // 32 lanes × 16 bytes
static_assert(kTile == w12::kTileRows && kTile == w12::kTileCols && kQuarterRows == w12::kQuarterRows, "brick shape");
static_assert(kPlaneBytes == w12::kPlaneBytes, "one warp load per plane");

// A patch word as a warp has it: all of it in every lane, or word lane % 4, where registers are short. Without patches
// it is zero, with patches its last word is not.
WC_DEVICE bool has_patches(u32x4 patch) { return patch.w != 0; }
WC_DEVICE bool has_patches(u32 patch) { return patch != 0; }  // in some lane
WC_DEVICE u32x4 whole(u32x4 patch) { return patch; }
WC_DEVICE u32x4 whole(u32 patch) {
    return {__shfl_sync(~0u, patch, 0), __shfl_sync(~0u, patch, 1), __shfl_sync(~0u, patch, 2),
            __shfl_sync(~0u, patch, 3)};
}

// Bricks of docs/format.md, section 2.
struct Bf16W12 {
    static constexpr u32 kBrickBytes = w12::kBrickBytes;
    static constexpr u32 kPlanes = 3;
    static constexpr u32 kPatchBytes = w12::kPatchBytes;  // per quarter, after the four quarters

    w12::Table table;
    const u32* overflow;

    // Some quarters, one branch around the patches of all. `patch` is each quarter's patch word, in one of the forms of
    // `has_patches`; `scratch(i)` says where quarter i may be patched: w12::kHighBytes of shared memory.
    template <u32 kCount, class Patch, class Scratch>
    WC_DEVICE void decode(u32 (&a)[kCount][16], const u32x4 (&planes)[kCount][kPlanes], const Patch (&patch)[kCount],
                          Scratch scratch, u32 lane) const {
        u32 high[kCount][8];
        bool any = false;
        WC_UNROLL
        for (u32 i = 0; i < kCount; ++i) {
            w12::decode_high_quarter(high[i], planes[i][2], table);
            any |= has_patches(patch[i]);
        }
        if (__any_sync(~0u, any)) {
            u32x4 word[kCount];
            WC_UNROLL
            for (u32 i = 0; i < kCount; ++i) word[i] = whole(patch[i]);
            w12::patch_high(high, word, overflow, scratch, lane);
        }
        WC_UNROLL
        for (u32 i = 0; i < kCount; ++i) w12::merge_quarter(a[i], planes[i][0], planes[i][1], high[i]);
    }
};

// The same weights uncompressed, in the same order: plane j holds the registers of step j. For exact comparisons.
struct Bf16 {
    static constexpr u32 kBrickBytes = kTile * kTile * 2;
    static constexpr u32 kPlanes = 4;
    static constexpr u32 kPatchBytes = 0;

    w12::Table table;
    const u32* overflow;

    template <u32 kCount, class Patch, class Scratch>
    WC_DEVICE void decode(u32 (&a)[kCount][16], const u32x4 (&planes)[kCount][kPlanes], const Patch (&)[kCount],
                          Scratch, u32) const {
        WC_UNROLL
        for (u32 i = 0; i < kCount; ++i) {
            WC_UNROLL
            for (u32 j = 0; j < kPlanes; ++j) {
                a[i][4 * j + 0] = planes[i][j].x;
                a[i][4 * j + 1] = planes[i][j].y;
                a[i][4 * j + 2] = planes[i][j].z;
                a[i][4 * j + 3] = planes[i][j].w;
            }
        }
    }
};

// ---- four rows of one token ---------------------------------------------------------------------------------------

WC_DEVICE void add(f32x4& sum, f32x4 v) {
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
}

WC_DEVICE u32x4 words(f32x4 v) {
    return {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)};
}

// The first `count` of four BF16 values.
WC_DEVICE f32x4 load_four(const u16* from, u32 count) {
    const auto value = [&](u32 i) { return i < count ? f32_from_bf16(from[i]) : 0.0f; };
    return {value(0), value(1), value(2), value(3)};
}

// The first `count` of four outputs; all four at once where the caller knows that there are four, and aligned.
WC_DEVICE void store_four(u16* to, f32x4 v, u32 count, bool aligned) {
    const u32x2 pairs = {bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
    if (aligned) {
        *reinterpret_cast<u32x2*>(to) = pairs;
        return;
    }
    to[0] = static_cast<u16>(pairs.x);
    if (count > 1) to[1] = static_cast<u16>(pairs.x >> 16);
    if (count > 2) to[2] = static_cast<u16>(pairs.y);
    if (count > 3) to[3] = static_cast<u16>(pairs.y >> 16);
}

WC_DEVICE void store_four(float* to, f32x4 v, u32 count, bool aligned) {
    if (aligned) {
        *reinterpret_cast<f32x4*>(to) = v;
        return;
    }
    to[0] = v.x;
    if (count > 1) to[1] = v.y;
    if (count > 2) to[2] = v.z;
    if (count > 3) to[3] = v.w;
}

}  // namespace gemv
}  // namespace wc
