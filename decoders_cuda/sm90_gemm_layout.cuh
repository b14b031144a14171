// One instance of sm90_gemm.cu, which explains the macros: constants, the work of a CTA, its shared memory.
#pragma once

#include "sm90_gemm_decoder.cuh"
#include "sm90_gemm_parts.cuh"

#ifndef WC_CTAS_PER_SM
#define WC_CTAS_PER_SM 1
#endif
#ifndef WC_COLUMN_GROUPS
#define WC_COLUMN_GROUPS 1
#endif
#ifndef WC_CLUSTER
#define WC_CLUSTER 1
#endif
#ifndef WC_EARLY_PATCHES
#define WC_EARLY_PATCHES 0
#endif
#ifndef WC_PAIR
#define WC_PAIR 1
#endif
#ifndef WC_DECODER
#define WC_DECODER 0
#endif
#ifndef WC_ABLATE
#define WC_ABLATE 0
#endif
#ifndef WC_TIMELINE
#define WC_TIMELINE 0
#endif
#ifndef WC_DUMP
#define WC_DUMP 0
#endif
#ifndef WC_ARRIVALS  // 32 for racecheck, which asks each lane that reads for an arrival
#define WC_ARRIVALS 1
#endif

namespace wc {
namespace gemm {

constexpr u32 kRowGroups = WC_ROW_GROUPS, kTokens = WC_TOKENS, kStages = WC_STAGES, kStageBricks = WC_STAGE_BRICKS;
constexpr u32 kColumnGroups = WC_COLUMN_GROUPS, kGroups = kRowGroups * kColumnGroups;
constexpr u32 kSplit = WC_SPLIT, kRanks = kSplit ? kSplit : 1;
constexpr u32 kCluster = WC_CLUSTER, kClusters = kRanks / kCluster;  // of a tile
constexpr u32 kPair = WC_PAIR;
constexpr u32 kArrivals = WC_ARRIVALS;  // lanes of a warp that give a stage back: one for all, or each of them
constexpr bool kMany = kGroups == 4;  // and few registers each
// Sets of A registers. With one, a decoded brick waits until the products of the one before are done. The products of 256
// tokens are long enough for a second set to pay for a second copy of the loop, whose code is read with cold caches.
constexpr u32 kOperandSets = kTokens > 128 ? 2 : 1;
constexpr u32 kLastSub = kStageBricks / kColumnGroups - 1;  // of a stage's bricks for one warp: 0 or 1
static_assert(kRowGroups == 1 || kRowGroups == 2 || kRowGroups == 4, "row tiles per CTA");
static_assert(kColumnGroups == 1 || (kColumnGroups == 2 && kStageBricks == 2 && kRowGroups == 1), "column groups");
static_assert(kTokens % 16 == 0 && kTokens >= 16 && kTokens <= 256, "wgmma and TMA take up to 256 tokens");
static_assert(kStageBricks == 1 || kStageBricks == 2, "a stage is one or two bricks deep");
static_assert(kStages >= 2, "copies overlap with products");
static_assert(kSplit <= 8, "CTAs per tile");
static_assert(kRanks % kCluster == 0, "a tile is whole clusters");
static_assert(kPair == 1 || (kPair == 2 && kCluster == 1), "a cluster is a pair or CTAs of one tile");
static_assert(WC_CTAS_PER_SM == 1 || kGroups == 1, "setmaxnreg leaves no registers for a second CTA");

template <u32 kIndex>
struct DecoderOf;
template <>
struct DecoderOf<0> {
    using type = Bf16W12<WC_EARLY_PATCHES>;
};
template <>
struct DecoderOf<1> {
    using type = Bf16Bricks;
};
using Decoder = DecoderOf<WC_DECODER>::type;

constexpr u32 kConsumerWarps = 4 * kGroups;
constexpr u32 kThreads = 32 * (kConsumerWarps + 4);
// setmaxnreg moves registers from the producer's warpgroup to the consumers'; one CTA of one consumer has enough.
constexpr bool kMoveRegisters = kGroups > 1;
constexpr u32 kConsumerRegisters = kGroups == 2 ? 232 : kMany ? 112 : WC_CTAS_PER_SM == 2 ? 128 : 255;
constexpr u32 kProducerRegisters = kMany ? 32 : 40;
constexpr u32 kBlocks = kTokens / 8;
constexpr u32 kBoxBytes = kTokens * 128;  // tokens × 64 columns
constexpr u32 kBricksBytes = kStageBricks * Decoder::kBrickBytes;
constexpr u32 kTokenArea = 0;
constexpr u32 kBrickArea = kTokenArea + kStages * kStageBricks * kBoxBytes;
constexpr u32 kStagingArea = kBrickArea + kStages * kRowGroups * kBricksBytes;
// After the loop a warpgroup holds kOwn blocks; with column groups, its half of the tokens.
constexpr u32 kOwn = kBlocks / kColumnGroups;
// First of the blocks that a rank sums.
constexpr WC_HOST_DEVICE u32 share_begin(u32 blocks, u32 ranks, u32 rank) {
    return (rank * blocks + ranks - 1) / ranks;
}
constexpr WC_HOST_DEVICE u32 share_count(u32 blocks, u32 ranks, u32 rank) {
    return share_begin(blocks, ranks, rank + 1) - share_begin(blocks, ranks, rank);
}
// Letters, the partial sums that one CTA sends another: the largest share of every warpgroup, first in its cluster, then
// in another cluster.
constexpr u32 kNearShare = ceil_div(kOwn, kCluster), kFarShare = ceil_div(kNearShare, kClusters);
constexpr u32 kNearGroup = kNearShare * kBlockBytes, kNearLetter = kGroups * kNearGroup;
constexpr u32 kFarGroup = kFarShare * kBlockBytes, kFarLetter = kGroups * kFarGroup;
// After the loop column groups add up, and then clusters exchange, where the ring was; a CTA of several tiles needs the
// ring for the next one.
constexpr u32 kMergeBytes = kColumnGroups == 2 ? kBlocks * kBlockBytes : 0;
constexpr u32 kMergeArea = kSplit == 0 ? kStagingArea + kConsumerWarps * kStagingBytes : kTokenArea;
constexpr u32 kMailArea = kTokenArea;
constexpr u32 kBarrierArea = kStagingArea + kConsumerWarps * kStagingBytes + (kSplit == 0 ? kMergeBytes : 0);
constexpr u32 kSharedBytes = kBarrierArea + kStages * 16 + kGroups * 8;
static_assert(kMergeBytes <= kStagingArea && (kCluster - 1) * kNearLetter <= kStagingArea, "it fits into the ring");
static_assert(kBlocks % kColumnGroups == 0 && kOwn / kCluster >= kClusters, "every warpgroup sums at least one block");
static_assert(kBoxBytes % 1024 == 0, "swizzle atoms are 1,024 bytes");
static_assert(kSharedBytes <= 227 * 1024, "shared memory of one SM");
static_assert(kSharedBytes == WC_SHARED_BYTES, "the host lays out shared memory differently");

// Letters of 16 bytes that a thread reads at once: as many as fit beside the accumulators that it still needs.
constexpr int kSpareLetters = (static_cast<int>(kConsumerRegisters - 4 * kNearShare) - (kMany ? 68 : 48)) / 4;
constexpr int kLetterLimit = kSplit == 0 || kMany ? 8 : 24;
constexpr u32 kLettersInFlight = kSpareLetters < 2 ? 2 : kSpareLetters < kLetterLimit ? kSpareLetters : kLetterLimit;
constexpr WC_HOST_DEVICE u32 letters_per_box(u32 boxes) {
    return boxes < kLettersInFlight ? kLettersInFlight / (boxes ? boxes : 1) : 1;
}

struct Arguments {
    const TensorMap* x;
    const u8* bricks;
    Decoder decoder;
    Output out;
    u8* partials;
    u32 k_bricks;     // along K
    u32 token_tiles;
    u64* stamps;      // WC_TIMELINE: 8 per CTA

    WC_DEVICE u32 tile_units() const { return (k_bricks + kStageBricks - 1) / kStageBricks; }
    WC_DEVICE u32 row_tiles() const { return (out.rows + 63) / 64; }
    // Of workers.
    WC_DEVICE u32 tiles() const { return ceil_div(row_tiles(), kRowGroups * kPair) * token_tiles; }
};

enum Stamp { kStart, kIssued, kFirstStage, kLoopEnd, kPosted, kCollected, kEnd, kSm };

WC_DEVICE void stamp(const Arguments& args, Stamp which) {
#if WC_TIMELINE
    args.stamps[8 * blockIdx.x + which] = which == kSm ? sm_index() : global_nanoseconds();
#endif
}

// A *worker* is a CTA, or a pair, which does the same to two tiles that differ in their rows.
WC_DEVICE u32 worker() { return blockIdx.x / kPair; }
WC_DEVICE u32 pair_rank() { return blockIdx.x % kPair; }
WC_DEVICE u32 split_rank() { return worker() % kRanks; }

// The units of one worker, half open.
struct Range {
    u32 begin, end;
};

WC_DEVICE Range range_of(const Arguments& args, u32 of) {
    const u32 units = args.tile_units();
    if constexpr (kSplit == 0) {
        const u32 all = args.tiles() * units, workers = gridDim.x / kPair;
        return {all * of / workers, all * (of + 1) / workers};
    } else {
        const u32 tile = of / kRanks * units, rank = of % kRanks;
        return {tile + units * rank / kRanks, tile + units * (rank + 1) / kRanks};
    }
}

// A place in the ring of stages.
struct Slot {
    u32 stage = 0, parity = 0;

    WC_DEVICE void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

WC_DEVICE u32 full_barrier(u32 smem, u32 stage) { return smem + kBarrierArea + 8 * stage; }
WC_DEVICE u32 empty_barrier(u32 smem, u32 stage) { return smem + kBarrierArea + 8 * (kStages + stage); }
WC_DEVICE u32 mail_barrier(u32 smem, u32 group) { return smem + kBarrierArea + 8 * (2 * kStages + group); }

}  // namespace gemm
}  // namespace wc
