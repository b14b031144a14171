// Main loops of sm90_moe_product.cu: experts with few tokens, and groups of row tiles of experts with many.
#pragma once

#include "sm90_moe_parts.cuh"

namespace wc {
namespace moe {

// A chunk's four products in two groups with fragments of their own: one is decoded while the other is multiplied.
// `refill` is called once the slot has been read.
template <u32 kTokens, typename Refill>
WC_DEVICE void multiply(float (&acc)[kTokens / 2], u32 (&a)[2][8], const Slot& slot, u32 low, Refill refill) {
    const nvfp4::Scales scales = nvfp4::expand_scales(slot.scales);
    const u32 words[4] = {slot.nibbles.x, slot.nibbles.y, slot.nibbles.z, slot.nibbles.w};
    WC_UNROLL
    for (u32 h = 0; h < 2; ++h) {
        nvfp4::decode_step(words[2 * h], scales, a[h]);
        nvfp4::decode_step(words[2 * h + 1], scales, a[h] + 4);
        if (h == 1) refill();
        wgmma_fence();
        WC_UNROLL
        for (u32 j = 0; j < 2; ++j) {
            Wgmma<kTokens>::mma(acc, a[h] + 4 * j, static_cast<u64>(kDescriptorHigh) << 32 | (low + 4 * h + 2 * j));
        }
        wgmma_commit();
        wgmma_wait<1>();
    }
}

// The same with mma.sync, for so few tokens that reading them once per warp costs less than wgmma's fences. A lane's
// columns 16t … 16t + 15 are 32 consecutive bytes of a token in natural order. Even and odd steps have accumulators of
// their own: a shorter chain.
template <u32 kTokens>
WC_DEVICE void multiply_sync(float (&acc)[2][kTokens / 2], const Slot& slot, u32 tokens) {
    u32 b[kTokens / 8][8];
    WC_UNROLL
    for (u32 n = 0; n < kTokens / 8; ++n) {
        WC_UNROLL
        for (u32 h = 0; h < 2; ++h) {
            const u32x4 v = load_smem_in_order((tokens + n * 1024) ^ (h << 4));
            b[n][4 * h] = v.x;
            b[n][4 * h + 1] = v.y;
            b[n][4 * h + 2] = v.z;
            b[n][4 * h + 3] = v.w;
        }
    }
    const nvfp4::Scales scales = nvfp4::expand_scales(slot.scales);
    const u32 words[4] = {slot.nibbles.x, slot.nibbles.y, slot.nibbles.z, slot.nibbles.w};
    WC_UNROLL
    for (u32 j = 0; j < 4; ++j) {
        u32 a[4];
        nvfp4::decode_step(words[j], scales, a);
        WC_UNROLL
        for (u32 n = 0; n < kTokens / 8; ++n) {
            mma_sync(&acc[j % 2][4 * n], a, b[n][2 * j], b[n][2 * j + 1]);
        }
    }
}

// What is next of this CTA's share of the experts with few tokens: grains [begin, end) of one expert's row tiles.
struct Part {
    Pass pass;
    u32 begin, end;
};
WC_DEVICE Part next_part() {
    constexpr u32 kAll = kUnits * kGrains;
    const u32 begin = route_table().begin, left = route_table().end - begin, from = begin % kAll;
    return {route_table().few[begin / kAll], from, from + left < kAll ? from + left : kAll};
}

// The next part, of at most kTokens tokens. They stay in shared memory; the four warpgroups share out the chunks of
// each row tile and add their sums at its end. Of half a row tile, two warps of a warpgroup have the same 16 rows and
// half of its chunks each. What is only needed between tiles is read anew: registers are short.
template <u32 kTokens>
WC_DEVICE void few_tokens(const Context& c) {
    constexpr bool kEven = kEvenTurns;
    constexpr bool kTwoSets = kTokens * 2 <= kSumTokens;
    constexpr bool kSyncs = kTokens <= kSync;  // mma.sync
    constexpr bool kHalves = kGrains == 2 && kSyncs;
    constexpr u32 kStride = kGroupsOfWarps * nvfp4::kBrickBytes, kTokenChunk = kTokens * 128;
    const u32 thread = thread_index(), warp = thread / 32 % 4, lane = thread % 32;
    const u32 group = __shfl_sync(~0u, thread / 128, 0);
    const Part part = next_part();
    const auto is_half = [](u32 grain, u32 end) { return kHalves && (grain % 2 != 0 || grain + 1 == end); };
    const u8 *nibbles, *scales;
    const auto aim = [&](Part p, u32 grain) {
        const u32 lane = thread_index() % 32, warp = thread_index() / 32 % 4;
        const bool half = is_half(grain, p.end);
        const u32 chunk = half ? warp / 2 * (kChunks / 2) : 0, quarter = half ? grain % 2 * 2 + warp % 2 : warp;
        const u64 bricks = static_cast<u64>(p.pass.expert * kUnits + grain / kGrains) * kChunks + chunk + group;
        const u8* brick = c.weights + bricks * nvfp4::kBrickBytes;
        nibbles = brick + quarter * nvfp4::kQuarterNibbleBytes + lane * 16;
        scales = brick + nvfp4::kScaleOffset + quarter * nvfp4::kQuarterScaleBytes + lane * 2;
    };
    aim(part, part.begin);
    u32 next = group;
    const auto fetch = [&](Slot& slot, u32 u) {
        if (kEven || next + u * kGroupsOfWarps < kChunks) {
            slot.nibbles = kSyncs ? load_in_order(nibbles + u * kStride) : load_once(nibbles + u * kStride);
            slot.scales = kSyncs ? load_pair_in_order(scales + u * kStride) : load_pair_once(scales + u * kStride);
        } else {
            slot = {};
        }
    };
    const auto advance = [&] {
        nibbles += kRing * kStride;
        scales += kRing * kStride;
        next += kTurnChunks;
        if (!kEven && next >= kTurns * kTurnChunks) {
            next = group;
            nibbles -= (kTurns * kTurnChunks - kChunks) * nvfp4::kBrickBytes;
            scales -= (kTurns * kTurnChunks - kChunks) * nvfp4::kBrickBytes;
        }
    };
    const auto copy = [&] {
        copy_tokens<kTokens, kChunks, 1>(kSyncs ? c.natural : c.ordered, smem_address(shared), part.pass.count, 0,
                                         [&](u32 token) { return row_of(part.pass.from + token); });
        copy_commit();
    };
    // What the product before does not write comes first if it is little: the weights then do not delay it.
    constexpr bool kTokensFirst = kGated && kTokens == 8;
    if (kTokensFirst) copy();
    Slot ring[kRing];
    WC_UNROLL
    for (u32 u = 0; u < kRing; ++u) fetch(ring[u], u);
    if (!kGated || !kSyncs) grid_dependency_wait();
    if (!kTokensFirst) copy();
    copy_wait<0>();
    if (!kSyncs) fence_for_wgmma();
    __syncthreads();

    const u32 low = descriptor_low(smem_address(shared));
    const u32 row = smem_address(shared) + lane / 4 * 128 + ((lane % 4 * 2 ^ lane / 4) << 4);
    WC_NO_UNROLL
    for (u32 grain = part.begin; grain < next_part().end;) {
        float acc[kSyncs ? 2 : 1][kTokens / 2] = {};
        u32 a[2][8];
        const u32 end = next_part().end;
        const bool half = is_half(grain, end);
        const u32 after = grain + (half ? 1 : kGrains), turns = half ? kTurns / 2 : kTurns;
        const u32 first = half ? thread_index() / 64 % 2 * (kChunks / 2) + group : group;
        WC_NO_UNROLL
        for (u32 turn = 0; turn < turns; ++turn) {
            const bool more = turn + 1 < turns || after < end;
            if (turn + 1 == turns && after < end && (half || is_half(after, end))) {
                aim(next_part(), after);
            } else {
                advance();
            }
            WC_UNROLL
            for (u32 u = 0; u < kRing; ++u) {
                u32 chunk = turn * kTurnChunks + u * kGroupsOfWarps + first;
                if (!kEven && chunk >= kChunks) chunk = 0;  // zero weights need tokens that are no leftovers: NaN
                if constexpr (kSyncs) {
                    multiply_sync<kTokens>(acc, ring[u], row + chunk * kTokenChunk);
                    if (more) fetch(ring[u], u);
                } else {
                    multiply<kTokens>(acc[0], a, ring[u], low + chunk * (kTokenChunk >> 4), [&] {
                        if (more) fetch(ring[u], u);
                    });
                }
            }
        }
        if constexpr (kSyncs) {
            WC_UNROLL
            for (u32 i = 0; i < kTokens / 2; ++i) acc[0][i] += acc[1][i];
        } else {
            wgmma_wait<0>();
        }
        constexpr u32 kSlab = kTokens * kSumPitch;
        float* const sums = slab(kTwoSets ? (grain / kGrains & 1) * kGroupsOfWarps * kSlab : 0);
        if (!kTwoSets) __syncthreads();  // the sums of the tile before have been read
        spill_sums<0, kTokens / 8>(sums + group * kSlab, acc[0]);
        __syncthreads();
        const Part now = next_part();
        const u32 rows = is_half(grain, now.end) ? grain % 2 : kAllRows;
        store_tile<kGroupsOfWarps, kSlab, kThreads, kSyncs>(c, sums, now.pass.expert, grain / kGrains, rows,
                                                            now.pass.from, now.pass.count, thread_index());
        grain = after;
    }
}

// Group `index`, counted through all passes: four row tiles, one per warpgroup, times at most kTokens of an expert's
// many tokens. Tokens pass through shared memory, kStageChunks chunks at a time.
template <u32 kTokens>
WC_DEVICE void many_tokens(const Context& c, u32 index) {
    constexpr u32 kTokenChunk = kTokens * 128, kStageChunks = kTokens <= 64 ? 4 : 2, kAhead = kStages - 2;
    constexpr u32 kTotal = ceil_div(kChunks, kStageChunks);
    constexpr bool kEven = kChunks % kStageChunks == 0;
    const Pass pass = route_table().passes[index / kGroups];
    const u32 n = pass.count;
    static_assert(kStageChunks * kTokenChunk <= kStageBytes, "a stage holds its tokens");
    const u32 thread = thread_index(), group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    const u32 unit = index % kGroups * kGroupsOfWarps + group;
    const bool active = kUnits % kGroupsOfWarps == 0 || unit < kUnits;
    const u8* brick = c.weights + static_cast<u64>(pass.expert * kUnits + unit) * kChunks * nvfp4::kBrickBytes;
    const u8* nibbles = brick + warp * nvfp4::kQuarterNibbleBytes + lane * 16;
    const u8* scales = brick + nvfp4::kScaleOffset + warp * nvfp4::kQuarterScaleBytes + lane * 2;
    u32 next = 0;  // first chunk at the pointers
    const auto fetch = [&](Slot& slot, u32 u) {
        if (active && (kEven || next + u < kChunks)) {
            slot.nibbles = load_once(nibbles + u * nvfp4::kBrickBytes);
            slot.scales = load_pair_once(scales + u * nvfp4::kBrickBytes);
        } else {
            slot = {};
        }
    };
    Slot ring[kStageChunks];
    WC_UNROLL
    for (u32 u = 0; u < kStageChunks; ++u) fetch(ring[u], u);

    __syncthreads();
    find_rows(pass.from, pass.count);
    __syncthreads();
    grid_dependency_wait();
    WC_NO_UNROLL
    for (u32 s = 0; s < kAhead; ++s) {
        if (s < kTotal) {
            copy_stage<kTokens, kStageChunks>(c.ordered, smem_address(shared) + s * kStageBytes, n, s * kStageChunks);
        }
        copy_commit();
    }

    float acc[kTokens / 2] = {};
    u32 a[2][8];
    u32 stage = 0;
    WC_NO_UNROLL
    for (u32 s = 0; s < kTotal; ++s) {
        copy_wait<kAhead - 1>();
        fence_for_wgmma();
        __syncthreads();
        // The stage refilled here was last read two turns ago, and those products have ended everywhere.
        const u32 ahead = stage + kAhead < kStages ? stage + kAhead : stage + kAhead - kStages;
        if (s + kAhead < kTotal) {
            copy_stage<kTokens, kStageChunks>(c.ordered, smem_address(shared) + ahead * kStageBytes, n,
                                               (s + kAhead) * kStageChunks);
        }
        copy_commit();
        nibbles += kStageChunks * nvfp4::kBrickBytes;
        scales += kStageChunks * nvfp4::kBrickBytes;
        next += kStageChunks;
        const bool more = s + 1 < kTotal;
        const u32 low = descriptor_low(smem_address(shared) + stage * kStageBytes);
        WC_UNROLL
        for (u32 u = 0; u < kStageChunks; ++u) {
            // Zero weights need tokens that are no NaN: the stage's first chunk's.
            const u32 at = low + (kEven || s * kStageChunks + u < kChunks ? u * (kTokenChunk >> 4) : 0);
            multiply<kTokens>(acc, a, ring[u], at, [&] {
                if (more) fetch(ring[u], u);
            });
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    wgmma_wait<0>();
    const Pass done = route_table().passes[index / kGroups];
    const u32 row_tile = index % kGroups * kGroupsOfWarps + thread_index() / 128;
    store_blocks<0>(c, acc, done.expert, row_tile, done.from, done.count);
}

}  // namespace moe
}  // namespace wc
