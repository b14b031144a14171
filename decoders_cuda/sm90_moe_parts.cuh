// Pieces of sm90_moe_product.cu: tokens into shared memory, weights through registers, wgmma, results out.
#pragma once

#include "moe_routes.cuh"
#include "nvfp4_s5.cuh"
#include "ptx_sm90.cuh"

namespace wc {

// The narrow shapes that only the routed experts use; see ptx_sm90.cuh for the others.
template <>
struct Wgmma<8> {
    static WC_DEVICE void mma(float (&d)[4], const u32* a, u64 b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};
template <>
struct Wgmma<24> {
    static WC_DEVICE void mma(float (&d)[12], const u32* a, u64 b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, %16, 1, 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

namespace moe {

constexpr u32 kThreads = 512, kGroupsOfWarps = 4;
constexpr u32 kChunks = K_COLUMNS / nvfp4::kTileCols;             // 64 columns each
constexpr u32 kUnits = N_ROWS / nvfp4::kTileRows;                 // row tiles per expert
constexpr u32 kGroups = ceil_div(kUnits, kGroupsOfWarps);         // groups of four row tiles per expert
constexpr u32 kFew = FEW_TOKENS, kExperts = EXPERTS, kTopK = TOP_K, kRoutes = ROUTES;
constexpr bool kGated = GATED != 0;
constexpr u32 kOutColumns = kGated ? N_ROWS / 2 : N_ROWS;
constexpr u32 kPairs = kGated ? 16 : 32;                          // pairs of output columns per row tile
constexpr u32 kRing = RING;
static_assert(K_COLUMNS % 64 == 0 && N_ROWS % 64 == 0, "whole bricks");
static_assert(kFew % 8 == 0 && kFew <= 24, "tokens that stay in shared memory");

// Shared memory: tokens, then partial sums, then the routes.
constexpr u32 kWide = WIDE_TOKENS, kStages = STAGES;
constexpr u32 kResidentBytes = kFew * K_COLUMNS * 2, kStreamBytes = kStages * kWide * 128;
constexpr u32 kTokenBytes = kResidentBytes > kStreamBytes ? kResidentBytes : kStreamBytes;
constexpr u32 kSumPitch = 68, kSumTokens = 24;                    // floats per token: 64 rows, 4 against bank conflicts
constexpr u32 kSlabBytes = kSumTokens * kSumPitch * 4;
using RouteTable = Routes<kExperts, kRoutes>;

struct Context {
    const u8* weights;
    const float* factors;  // per expert: gate's and up's, or one; times nvfp4::kDecodedFactor
    const u16* x;
    u16* out;
    bool waited;           // for the kernel before this one
};

extern __shared__ __align__(1024) u8 shared[];

WC_DEVICE RouteTable& route_table() {
    return *reinterpret_cast<RouteTable*>(shared + kTokenBytes + kGroupsOfWarps * kSlabBytes);
}

WC_DEVICE float* slab(u32 index) { return reinterpret_cast<float*>(shared + kTokenBytes) + index; }

struct Slot {
    u32x4 nibbles;
    u32 scales;
};

WC_DEVICE u32 load_scales(const u8* p) {
    u16 v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

// 4 bytes to shared memory, asynchronously.
WC_DEVICE void copy_async_word(u32 smem, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(global) : "memory");
}

// Orders this thread's copies to shared memory before the tensor cores' reads of it.
WC_DEVICE void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

WC_DEVICE void group_barrier(u32 group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

WC_DEVICE const u8* token_row(const Context& c, u32 place) {
    const u32 route = route_table().list[place];
    return reinterpret_cast<const u8*>(c.x) + static_cast<u64>(kGated ? route / kTopK : route) * (K_COLUMNS * 2);
}

// `kPieces` chunks of `n` tokens, chunk by chunk, under the 128-byte swizzle of wgmma. The model's activations come in
// natural order and are put into the order of the bricks' columns word by word; our own are stored in it.
template <u32 kTokens, u32 kPieces>
WC_DEVICE void copy_tokens(const Context& c, u32 at, u32 place, u32 n, u32 chunk) {
    constexpr u32 kPerToken = kPieces * (kGated ? 32 : 8);
    for (u32 i = threadIdx.x; i < n * kPerToken; i += kThreads) {
        const u32 token = i / kPerToken, piece = i % kPerToken;
        const u8* row = token_row(c, place + token) + chunk * 128;
        if (kGated) {
            const u32 q = piece & 31;
            copy_async_word(at + (piece / 32) * (kTokens * 128) + token * 128 + (((q & 7) ^ (token & 7)) << 4) + (q >> 3) * 4,
                            row + piece * 4);
        } else {
            const u32 q = piece & 7;
            copy_async(at + (piece / 8) * (kTokens * 128) + token * 128 + ((q ^ (token & 7)) << 4), row + piece * 16);
        }
    }
}

// Results of one row tile for `n` tokens from `place` on: sums `kSlabs` partial sums, applies the experts' factors (and
// SwiGLU), stores BF16. `rank` of `kRanks` threads.
template <u32 kSlabs, u32 kSlabPitch, u32 kRanks>
WC_DEVICE void store_tile(const Context& c, const float* sums, u32 expert, u32 unit, u32 place, u32 n, u32 rank) {
    WC_NO_UNROLL
    for (u32 i = rank; i < n * kPairs; i += kRanks) {
        const u32 token = i / kPairs, pair = i % kPairs;
        const float* s = sums + token * kSumPitch + (kGated ? (pair / 4) * 16 + (pair % 4) * 2 : pair * 2);
        float a[2] = {}, b[2] = {};
        WC_UNROLL
        for (u32 w = 0; w < kSlabs; ++w) {
            WC_UNROLL
            for (u32 k = 0; k < 2; ++k) {
                a[k] += s[w * kSlabPitch + k];
                if (kGated) b[k] += s[w * kSlabPitch + 8 + k];
            }
        }
        const u32 route = route_table().list[place + token];
        u32* row = reinterpret_cast<u32*>(c.out + static_cast<u64>(route) * kOutColumns);
        if (kGated) {
            const float fg = c.factors[2 * expert], fu = c.factors[2 * expert + 1];
            WC_UNROLL
            for (u32 k = 0; k < 2; ++k) {
                const float gate = a[k] * fg, up = b[k] * fu;
                a[k] = gate / (1.0f + __expf(-gate)) * up;
            }
            // Into the order of the bricks' columns: see copy_tokens.
            const u32 q = (unit & 1) * 16 + pair;
            row[(unit / 2) * 32 + (q & 7) * 4 + (q >> 3)] = bf16_pair(a[0], a[1]);
        } else {
            const float f = c.factors[expert];
            row[unit * 32 + pair] = bf16_pair(a[0] * f, a[1] * f);
        }
    }
}

// Accumulators of `kCount` 8-token blocks, from the `kFirst`th on, to a slab.
template <u32 kFirst, u32 kCount, u32 kAccumulators>
WC_DEVICE void spill_sums(float* slab, const float (&acc)[kAccumulators]) {
    const u32 warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    WC_UNROLL
    for (u32 b = 0; b < kCount; ++b) {
        WC_UNROLL
        for (u32 i = 0; i < 2; ++i) {
            float* s = slab + (8 * b + 2 * t + i) * kSumPitch + 16 * warp + g;
            s[0] = acc[4 * (kFirst + b) + i];
            s[8] = acc[4 * (kFirst + b) + 2 + i];
        }
    }
}

// One chunk: decodes a slot and issues its four products; the slot may be refilled from `refill` on.
template <u32 kTokens, typename Refill>
WC_DEVICE void multiply(float (&acc)[kTokens / 2], u32 (&a)[2][8], const Slot& slot, u64 descriptor, Refill refill) {
    const nvfp4::Scales scales = nvfp4::expand_scales(slot.scales);
    nvfp4::decode_step(slot.nibbles.x, scales, a[0]);
    nvfp4::decode_step(slot.nibbles.y, scales, a[0] + 4);
    wgmma_fence();
    Wgmma<kTokens>::mma(acc, a[0], descriptor);
    Wgmma<kTokens>::mma(acc, a[0] + 4, descriptor + 2);
    wgmma_commit();
    wgmma_wait<1>();
    nvfp4::decode_step(slot.nibbles.z, scales, a[1]);
    nvfp4::decode_step(slot.nibbles.w, scales, a[1] + 4);
    refill();
    wgmma_fence();
    Wgmma<kTokens>::mma(acc, a[1], descriptor + 4);
    Wgmma<kTokens>::mma(acc, a[1] + 4, descriptor + 6);
    wgmma_commit();
    wgmma_wait<1>();
}

// Row tiles [begin, end) of an expert with at most kTokens tokens. All its tokens stay in shared memory; the four
// warpgroups share out the chunks of each row tile and add their sums at its end.
template <u32 kTokens>
WC_DEVICE void few_tokens(Context& c, u32 expert, u32 begin, u32 end) {
    // Chunks per warpgroup, in whole turns of the ring; those past the last chunk are zeros that nobody loads.
    constexpr u32 kSteps = ceil_div(kChunks, kGroupsOfWarps * kRing) * kRing;
    constexpr bool kEven = kChunks == kSteps * kGroupsOfWarps;
    constexpr bool kTwoSets = kTokens * 2 <= kSumTokens;
    const u32 group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 steps = (end - begin) * kSteps, place = route_table().start[expert], n = route_table().count[expert];

    const u8* p = c.weights + (static_cast<u64>(expert * kUnits + begin) * kChunks + group) * nvfp4::kBrickBytes;
    u32 next = group;  // chunk at p, where the chunks do not divide evenly
    const auto fetch = [&](Slot& slot) {
        if (kEven || next < kChunks) {
            slot.nibbles = load_once(p + warp * nvfp4::kQuarterNibbleBytes + lane * 16);
            slot.scales = load_scales(p + nvfp4::kScaleOffset + warp * nvfp4::kQuarterScaleBytes + lane * 2);
        } else {
            slot = {};
        }
        p += kGroupsOfWarps * nvfp4::kBrickBytes;
        if (!kEven) {
            next += kGroupsOfWarps;
            if (next >= kSteps * kGroupsOfWarps) {
                next = group;
                p -= (kSteps * kGroupsOfWarps - kChunks) * nvfp4::kBrickBytes;
            }
        }
    };
    Slot ring[kRing];
    WC_UNROLL
    for (u32 u = 0; u < kRing; ++u) {
        if (u < steps) fetch(ring[u]);
    }

    __syncthreads();  // the expert before has been multiplied and summed
    if (!c.waited) grid_dependency_wait();
    c.waited = true;
    copy_tokens<kTokens, kChunks>(c, smem_address(shared), place, n, 0);
    copy_commit();
    copy_wait<0>();
    fence_for_wgmma();
    __syncthreads();

    u32 a[2][8];
    u32 left = steps;
    WC_NO_UNROLL
    for (u32 unit = begin; unit < end; ++unit) {
        float acc[kTokens / 2] = {};
        u32 at = smem_address(shared) + group * (kTokens * 128);
        WC_NO_UNROLL
        for (u32 q = 0; q < kSteps; q += kRing) {
            WC_UNROLL
            for (u32 u = 0; u < kRing; ++u) {
                // Zero weights need tokens that are no NaN: the first chunk's.
                const u32 from = kEven || (q + u) * kGroupsOfWarps + group < kChunks ? at : smem_address(shared);
                multiply<kTokens>(acc, a, ring[u], wgmma_descriptor(from), [&] {
                    if (left > kRing) fetch(ring[u]);
                    --left;
                });
                at += kGroupsOfWarps * (kTokens * 128);
            }
        }
        wgmma_wait<0>();
        constexpr u32 kSlab = kTokens * kSumPitch;
        float* const sums = slab(kTwoSets ? (unit & 1) * kGroupsOfWarps * kSlab : 0);
        if (!kTwoSets) __syncthreads();  // the sums of the tile before have been read
        spill_sums<0, kTokens / 8>(sums + group * kSlab, acc);
        __syncthreads();
        store_tile<kGroupsOfWarps, kSlab, kThreads>(c, sums, expert, unit, place, n, threadIdx.x);
    }
}

// Results of one warpgroup's row tile, 24 tokens at a time; a tile past the last only takes part in the barriers.
template <u32 kFirst, u32 kAccumulators>
WC_DEVICE void store_blocks(const Context& c, const float (&acc)[kAccumulators], u32 expert, u32 unit, u32 place, u32 n) {
    constexpr u32 kBlocks = kAccumulators / 4, kAtOnce = kSumTokens / 8;
    constexpr u32 kCount = kBlocks - kFirst < kAtOnce ? kBlocks - kFirst : kAtOnce;
    if (8 * kFirst >= n) return;
    const u32 group = threadIdx.x / 128, left = n - 8 * kFirst;
    float* const sums = slab(group * (kSlabBytes / 4));
    group_barrier(group);
    spill_sums<kFirst, kCount>(sums, acc);
    group_barrier(group);
    if (unit < kUnits) {
        store_tile<1, 0, 128>(c, sums, expert, unit, place + 8 * kFirst, left < 8 * kCount ? left : 8 * kCount,
                              threadIdx.x % 128);
    }
    if constexpr (kFirst + kCount < kBlocks) store_blocks<kFirst + kCount>(c, acc, expert, unit, place, n);
}

// Four row tiles, one per warpgroup, for `n` ≤ kTokens of an expert's many tokens, from `place` in the list on. Tokens
// pass through shared memory chunk by chunk.
template <u32 kTokens>
WC_DEVICE void many_tokens(Context& c, u32 expert, u32 tiles, u32 place, u32 n) {
    constexpr u32 kSlotsAhead = kStages - 2;
    const u32 group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 unit = tiles * kGroupsOfWarps + group;
    const bool active = kUnits % kGroupsOfWarps == 0 || unit < kUnits;
    const u8* p = c.weights + static_cast<u64>(expert * kUnits + unit) * kChunks * nvfp4::kBrickBytes +
                  warp * nvfp4::kQuarterNibbleBytes + lane * 16;
    const u32 scales_from = nvfp4::kScaleOffset + warp * nvfp4::kQuarterScaleBytes + lane * 2 -
                            (warp * nvfp4::kQuarterNibbleBytes + lane * 16);
    const auto fetch = [&](Slot& slot) {
        if (active) {
            slot.nibbles = load_once(p);
            slot.scales = load_scales(p + static_cast<int>(scales_from));
        } else {
            slot = {};
        }
        p += nvfp4::kBrickBytes;
    };
    constexpr u32 kDepth = WIDE_RING;
    Slot ring[kDepth];
    WC_UNROLL
    for (u32 u = 0; u < kDepth; ++u) {
        if (u < kChunks) fetch(ring[u]);
    }

    __syncthreads();
    if (!c.waited) grid_dependency_wait();
    c.waited = true;
    WC_UNROLL
    for (u32 s = 0; s < kSlotsAhead; ++s) {
        if (s < kChunks) copy_tokens<kTokens, 1>(c, smem_address(shared) + s * (kTokens * 128), place, n, s);
        copy_commit();
    }

    float acc[kTokens / 2] = {};
    u32 a[2][8];
    u32 stage = 0;
    WC_NO_UNROLL
    for (u32 q = 0; q < kChunks; q += kDepth) {
        WC_UNROLL
        for (u32 u = 0; u < kDepth; ++u) {
            const u32 chunk = q + u;
            if (kChunks % kDepth == 0 || chunk < kChunks) {
                copy_wait<kSlotsAhead - 1>();
                fence_for_wgmma();
                __syncthreads();
                // The stage refilled here was last read two chunks ago, and those products have ended everywhere.
                const u32 ahead = stage + kSlotsAhead < kStages ? stage + kSlotsAhead : stage + kSlotsAhead - kStages;
                if (chunk + kSlotsAhead < kChunks) {
                    copy_tokens<kTokens, 1>(c, smem_address(shared) + ahead * (kTokens * 128), place, n, chunk + kSlotsAhead);
                }
                copy_commit();
                multiply<kTokens>(acc, a, ring[u], wgmma_descriptor(smem_address(shared) + stage * (kTokens * 128)), [&] {
                    if (chunk + kDepth < kChunks) fetch(ring[u]);
                });
                stage = stage + 1 == kStages ? 0 : stage + 1;
            }
        }
    }
    wgmma_wait<0>();
    store_blocks<0>(c, acc, expert, active ? unit : kUnits, place, n);
}

}  // namespace moe
}  // namespace wc
