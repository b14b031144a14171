// Pieces of sm90_moe_product.cu: tokens into shared memory, weights through registers, wgmma, results out.
#pragma once

#include "moe_routes.cuh"
#include "nvfp4_operand.cuh"

namespace wc {
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
// Turns of the ring per row tile of an expert with few tokens; slots past the last chunk are zeros that nobody loads.
constexpr u32 kTurnChunks = kGroupsOfWarps * kRing, kTurns = ceil_div(kChunks, kTurnChunks);
constexpr bool kEvenTurns = kChunks == kTurns * kTurnChunks;
// What a row tile is dealt in: whole, or in halves where the turns can be. Halves gain nothing at 8 tokens.
constexpr u32 kGrains = kFew > 8 && kEvenTurns && kTurns % 2 == 0 ? 2 : 1;
constexpr u32 kSorters = !kMany && kRoutes <= 128 ? 128 : kThreads;  // few routes are sorted by one warpgroup
static_assert(K_COLUMNS % 64 == 0 && N_ROWS % 64 == 0, "whole bricks");
static_assert(kFew % 8 == 0 && kFew <= 24, "tokens that stay in shared memory");
// Up to so many tokens are multiplied by mma.sync, which reads tokens in natural column order; wgmma needs the order of
// the bricks' columns.
constexpr u32 kSync = SYNC_TOKENS < kFew ? SYNC_TOKENS : kFew;

// Shared memory: tokens, then partial sums, then the routes.
constexpr u32 kWide = WIDE_TOKENS, kStages = STAGES, kStageBytes = 32768;
using SortScratch = Scratch<kSorters / 32, kExperts, kRoutes, kFew>;
constexpr u32 kScratchBytes = ceil_div(sizeof(SortScratch), 16) * 16;
constexpr u32 kResidentBytes = kFew * K_COLUMNS * 2, kOtherBytes = kMany ? kStages * kStageBytes : kScratchBytes;
constexpr u32 kTokenBytes = kResidentBytes > kOtherBytes ? kResidentBytes : kOtherBytes;
static_assert(kScratchBytes <= kTokenBytes, "the sort has room");
constexpr u32 kSumPitch = 68, kSumTokens = kMany ? 24 : 16;       // floats per token: 64 rows, 4 against bank conflicts
constexpr u32 kSlabBytes = kSumTokens * kSumPitch * 4;
using RouteTable = Routes<kExperts, kRoutes, kFew, kWide>;

struct Context {
    const u8* weights;
    const float* factors;  // per expert: gate's and up's, or one; times nvfp4::kDecodedFactor
    const u16 *natural, *ordered;  // tokens, columns in natural order and in that of the bricks
    u16* out;
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

// Byte offset in x of the token of the route at `place` in the list.
WC_DEVICE u32 row_of(u32 place) {
    const u32 route = route_table().list[place];
    return (kGated ? route / kTopK : route) * (K_COLUMNS * 2);
}

WC_DEVICE void find_rows(u32 place, u32 n) {
    if (threadIdx.x < n) route_table().rows[threadIdx.x] = row_of(place + threadIdx.x);
}

// `kCount` chunks of `n` tokens of x, chunk by chunk, under the 128-byte swizzle of wgmma; `row`: a token's offset.
template <u32 kTokens, u32 kCount, u32 kUnroll, typename Row>
WC_DEVICE void copy_tokens(const u16* x, u32 at, u32 n, u32 chunk, Row row) {
    constexpr u32 kPerToken = kCount * 8;
#pragma unroll kUnroll
    for (u32 i = thread_index(); i < n * kPerToken; i += kThreads) {
        const u32 token = i / kPerToken, piece = i % kPerToken;
        if (kChunks % kCount != 0 && chunk + piece / 8 >= kChunks) continue;
        const u8* from = reinterpret_cast<const u8*>(x) + row(token) + chunk * 128 + piece * 16;
        copy_async(at + (piece / 8) * (kTokens * 128) + token * 128 + ((piece % 8 ^ (token & 7)) << 4), from);
    }
}

// Tokens of a pass, whose offsets `find_rows` has found, to one stage.
template <u32 kTokens, u32 kCount>
WC_DEVICE void copy_stage(const u16* x, u32 at, u32 n, u32 chunk) {
    copy_tokens<kTokens, kCount, 4>(x, at, n, chunk, [](u32 token) { return route_table().rows[token]; });
}

constexpr u32 kAllRows = 2;

// Results of one row tile, or of the half `rows` of it, for `n` tokens from `place` on: sums `kSlabs` partial sums, of
// each half of the columns where it is half a tile; applies the experts' factors (and SwiGLU), stores BF16, columns as
// the next product needs them. `rank` of `kRanks` threads.
template <u32 kSlabs, u32 kSlabPitch, u32 kRanks, bool kNatural>
WC_DEVICE void store_tile(const Context& c, const float* sums, u32 expert, u32 unit, u32 rows, u32 place, u32 n,
                          u32 rank) {
    const bool whole = kGrains == 1 || rows == kAllRows;
    const u32 pairs = whole ? kPairs : kPairs / 2;
    WC_NO_UNROLL
    for (u32 i = rank; i < n * pairs; i += kRanks) {
        const u32 token = i / pairs, from = i % pairs, pair = whole ? from : rows * (kPairs / 2) + from;
        const float* s = sums + token * kSumPitch + (kGated ? (from / 4) * 16 + (from % 4) * 2 : from * 2);
        float a[2] = {}, b[2] = {};
        WC_NO_UNROLL
        for (u32 half = 0; half < (whole ? 1 : 2); ++half, s += 32) {  // of the columns
            WC_UNROLL
            for (u32 w = 0; w < kSlabs; ++w) {
                WC_UNROLL
                for (u32 k = 0; k < 2; ++k) {
                    a[k] += s[w * kSlabPitch + k];
                    if (kGated) b[k] += s[w * kSlabPitch + 8 + k];
                }
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
            const u32 q = (unit & 1) * 16 + pair;
            row[(unit / 2) * 32 + (kNatural ? q : (q & 7) * 4 + (q >> 3))] = bf16_pair(a[0], a[1]);
        } else {
            const float f = c.factors[expert];
            row[unit * 32 + pair] = bf16_pair(a[0] * f, a[1] * f);
        }
    }
}

// Accumulators of `kCount` 8-token blocks, from the `kFirst`th on, to a slab.
template <u32 kFirst, u32 kCount, u32 kAccumulators>
WC_DEVICE void spill_sums(float* slab, const float (&acc)[kAccumulators]) {
    const u32 thread = thread_index(), warp = thread / 32 % 4, g = thread % 32 / 4, t = thread % 4;
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

// Descriptor of tokens under the 128-byte swizzle as two words; steps of 16 columns add 2 to the low one.
constexpr u32 kDescriptorHigh = 1u << 30 | 1024 >> 4;
WC_DEVICE u32 descriptor_low(u32 address) { return 1u << 16 | address >> 4; }

// Results of one warpgroup's row tile, 24 tokens at a time; a tile past the last only takes part in the barriers.
template <u32 kFirst, u32 kAccumulators>
WC_DEVICE void store_blocks(const Context& c, const float (&acc)[kAccumulators], u32 expert, u32 unit, u32 place, u32 n) {
    constexpr u32 kBlocks = kAccumulators / 4, kAtOnce = kSumTokens / 8;
    constexpr u32 kCount = kBlocks - kFirst < kAtOnce ? kBlocks - kFirst : kAtOnce;
    if (8 * kFirst >= n) return;
    const u32 thread = thread_index(), group = thread / 128, left = n - 8 * kFirst;
    float* const sums = slab(group * (kSlabBytes / 4));
    group_barrier(group);
    spill_sums<kFirst, kCount>(sums, acc);
    group_barrier(group);
    if (unit < kUnits) {
        store_tile<1, 0, 128, false>(c, sums, expert, unit, kAllRows, place + 8 * kFirst,
                                     left < 8 * kCount ? left : 8 * kCount, thread % 128);
    }
    if constexpr (kFirst + kCount < kBlocks) store_blocks<kFirst + kCount>(c, acc, expert, unit, place, n);
}

}  // namespace moe
}  // namespace wc
