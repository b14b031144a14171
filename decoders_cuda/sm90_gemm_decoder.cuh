// Decoders of sm90_gemm.cu: a quarter in shared memory to the A registers of its four k16 steps.
//
// A *share* is a lane's part of a quarter, decoded but not yet in the order of the A registers: running products read
// those, so that they change in `operands` only. `brick` and `scratch` are shared-memory addresses.
#pragma once

#include "sm90_gemm_patches.cuh"

namespace wc {
namespace gemm {

// Bricks of docs/format.md, section 2. With kEarlyPatches each lane gets the entry ready that it would have to apply,
// before it is known whether there are any: 15 more instructions for every quarter, and two fifths less delay for those with
// patches.
template <bool kEarlyPatches>
struct Bf16W12 {
    static constexpr u32 kBrickBytes = w12::kBrickBytes;

    w12::Table table;
    const u32* overflow;

    struct Share {
        u32x4 low01, low23;
        u32 high[8];
    };

    // Leaves exactly the original bytes. `scratch` is w12::kHighBytes of this warp's.
    WC_DEVICE void load(Share& s, u32 brick, u32 scratch, u32 quarter, u32 lane) const {
        const u32 planes = brick + w12::plane_offset(quarter, 0, lane), patches = brick + w12::patch_offset(quarter);
        const u32x4 codes = load_smem(planes + 2 * w12::kPlaneBytes);
        const u32 tag = load_smem_word(patches + w12::kPatchBytes - 4) >> 24;
        w12::LaneEntry entry;
        if constexpr (kEarlyPatches) entry.load(patches, lane);
        s.low01 = load_smem(planes), s.low23 = load_smem(planes + w12::kPlaneBytes);
        w12::decode_high_quarter(s.high, codes, table);
        if constexpr (kEarlyPatches) {
            entry.locate(scratch, lane);
            keep(entry.address), keep(entry.value);  // else the compiler moves them behind the branch
        }
        if (__any_sync(~0u, tag != 0)) {
            if constexpr (!kEarlyPatches) {
                entry.load(patches, lane);
                entry.locate(scratch, lane);
            }
            w12::patch_quarter(s.high, tag, entry, overflow, scratch, lane);
        }
    }

    static WC_DEVICE void operands(u32 (&a)[16], Share& s) {
        WC_UNROLL
        for (u32 i = 0; i < 8; ++i) keep(s.high[i]);  // nothing of this moves ahead of the wait before
        w12::merge_quarter(a, s.low01, s.low23, s.high);
    }
};

// Uncompressed weights in the same order, for an exact comparison: a quarter is four planes, one per step, of
// 32 lanes × 16 bytes, which are that lane's A registers.
struct Bf16Bricks {
    static constexpr u32 kBrickBytes = w12::kTileRows * w12::kTileCols * 2;

    w12::Table table;
    const u32* overflow;

    struct Share {
        u32 planes;
    };

    WC_DEVICE void load(Share& s, u32 brick, u32, u32 quarter, u32 lane) const {
        s.planes = brick + quarter * (kBrickBytes / w12::kQuarters) + lane * 16;
    }

    static WC_DEVICE void operands(u32 (&a)[16], const Share& s) {
        WC_UNROLL
        for (u32 j = 0; j < w12::kSteps; ++j) {
            const u32x4 v = load_smem(s.planes + j * w12::kPlaneBytes);
            a[4 * j] = v.x, a[4 * j + 1] = v.y, a[4 * j + 2] = v.z, a[4 * j + 3] = v.w;
        }
    }
};

}  // namespace gemm
}  // namespace wc
