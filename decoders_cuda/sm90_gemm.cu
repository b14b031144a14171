// out = x · Wᵀ (+ bias) for 17 … 256 tokens per tile, W in bricks, decoded into the register operand of wgmma.
//
// Tile      64 · WC_ROW_GROUPS rows × WC_TOKENS tokens; wgmma m64 nTOKENS k16, weights as A (registers), tokens as B.
// Roles     WC_ROW_GROUPS consumer warpgroups, one row tile each; behind them the producer's, one lane of which drives the
//           copy engine.
// Stage     WC_STAGE_BRICKS · 64 columns: WC_TOKENS × 128 bytes of tokens per brick under the 128-byte swizzle (TMA, zeros
//           outside x), WC_ROW_GROUPS contiguous runs of bricks (bulk copies). WC_STAGES of them, then 1,536 bytes per
//           consumer warp for patches and the epilogue, then two barriers per stage.
// Work      a *unit* is one stage of one tile. WC_SPLIT ≥ 1: each tile's units go to WC_SPLIT CTAs, each of which sums and
//           stores its share of the tokens. WC_SPLIT = 0: the units of all tiles, in order, are dealt evenly to the CTAs;
//           the CTA that holds a tile's first unit sums and stores it.
// Sums      in FP32, in a fixed order: equal inputs give equal bits.
//
// Macros    WC_ROW_GROUPS, WC_TOKENS, WC_STAGES, WC_STAGE_BRICKS (1, 2), WC_SPLIT as above; WC_CTAS_PER_SM resident CTAs per SM;
//           WC_DECODER 0 `bf16-w12`, 1 uncompressed bricks. For experiments: WC_ABLATE, bits 1 no decode, 2 no MMA,
//           4 no token copies, 8 no weight copies (results are wrong); WC_TIMELINE 1 stamps %globaltimer; WC_DUMP 1 writes
//           the decoded A registers, as the N × K matrix they stand for, instead of a product.
// Grid      WC_SPLIT ≥ 1: tiles · WC_SPLIT. WC_SPLIT = 0: any number of CTAs that are all resident, at most the units.
// Partials  zero before the first launch, zero after every launch; never shared by launches that can overlap.
#include "sm90_gemm_parts.cuh"

#ifndef WC_CTAS_PER_SM
#define WC_CTAS_PER_SM 1
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

namespace wc {
namespace gemm {

constexpr u32 kRowGroups = WC_ROW_GROUPS, kTokens = WC_TOKENS, kStages = WC_STAGES, kStageBricks = WC_STAGE_BRICKS;
constexpr u32 kSplit = WC_SPLIT;
static_assert(kRowGroups >= 1 && kRowGroups <= 3, "one to three consumer warpgroups");
static_assert(kTokens % 16 == 0 && kTokens >= 16 && kTokens <= 256, "wgmma and TMA take up to 256 tokens");
static_assert(kStageBricks == 1 || kStageBricks == 2, "a stage is one or two bricks deep");
static_assert(kStages >= 2, "copies overlap with products");
static_assert(kSplit <= 8 && kSplit <= kTokens / 8, "every CTA of a tile sums at least one block");
static_assert(WC_CTAS_PER_SM == 1 || kRowGroups == 1, "setmaxnreg leaves no registers for a second CTA");

template <u32 kIndex>
struct DecoderOf;
template <>
struct DecoderOf<0> {
    using type = Bf16W12;
};
template <>
struct DecoderOf<1> {
    using type = Bf16Bricks;
};
using Decoder = DecoderOf<WC_DECODER>::type;

constexpr u32 kConsumerWarps = 4 * kRowGroups;
constexpr u32 kThreads = 32 * (kConsumerWarps + 4);
// setmaxnreg moves registers from the producer's warpgroup to the consumers'; one CTA of one consumer has enough.
constexpr bool kMoveRegisters = kRowGroups > 1;
constexpr u32 kConsumerRegisters = kRowGroups == 2 ? 232 : kRowGroups == 3 ? 152 : WC_CTAS_PER_SM == 2 ? 128 : 255;
constexpr u32 kProducerRegisters = kRowGroups == 2 ? 40 : 56;
constexpr u32 kBlocks = kTokens / 8;
constexpr u32 kBoxBytes = kTokens * 128;  // tokens × 64 columns
constexpr u32 kBricksBytes = kStageBricks * Decoder::kBrickBytes;
constexpr u32 kTokenArea = 0;
constexpr u32 kBrickArea = kTokenArea + kStages * kStageBricks * kBoxBytes;
constexpr u32 kStagingArea = kBrickArea + kStages * kRowGroups * kBricksBytes;
constexpr u32 kBarrierArea = kStagingArea + kConsumerWarps * kStagingBytes;
constexpr u32 kSharedBytes = kBarrierArea + kStages * 16;
static_assert(kBoxBytes % 1024 == 0, "swizzle atoms are 1,024 bytes");
static_assert(kSharedBytes <= 227 * 1024, "shared memory of one SM");

// Letters of 16 bytes that a thread reads at once: as many as fit beside the accumulators.
constexpr u32 kSpareLetters = (kConsumerRegisters - kTokens / 2 - 40) / 4, kLetterLimit = kSplit == 0 ? 8 : 16;
constexpr u32 kLettersInFlight = kSpareLetters < kLetterLimit ? kSpareLetters : kLetterLimit;

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
    WC_DEVICE u32 tiles() const { return (row_tiles() + kRowGroups - 1) / kRowGroups * token_tiles; }
};

enum Stamp { kStart, kIssued, kFirstStage, kLoopEnd, kPosted, kCollected, kEnd, kSm };

WC_DEVICE void stamp(const Arguments& args, Stamp which) {
#if WC_TIMELINE
    args.stamps[8 * blockIdx.x + which] = which == kSm ? sm_index() : global_nanoseconds();
#endif
}

// The units of one CTA, half open.
struct Range {
    u32 begin, end;
};

WC_DEVICE Range range_of(const Arguments& args, u32 cta) {
    const u32 units = args.tile_units();
    if constexpr (kSplit == 0) {
        const u32 all = args.tiles() * units;
        return {all * cta / gridDim.x, all * (cta + 1) / gridDim.x};
    } else {
        const u32 tile = cta / kSplit * units, rank = cta % kSplit;
        return {tile + units * rank / kSplit, tile + units * (rank + 1) / kSplit};
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

// One lane that fills stages. Its latency is everybody's: nothing here divides except at the start of a tile.
struct Producer {
    const Arguments& args;
    u32 smem, units;
    u32 tile, unit;                // of the next stage
    const u8* source[kRowGroups];  // its bricks
    u32 token;                     // its first token

    WC_DEVICE Producer(const Arguments& a, u32 smem_base, u32 first)
        : args(a), smem(smem_base), units(a.tile_units()), tile(kSplit ? blockIdx.x / (kSplit ? kSplit : 1) : first / units),
          unit(first - tile * units) {
        seek();
    }

    WC_DEVICE void seek() {
        const u32 row_group = args.token_tiles == 1 ? tile : tile / args.token_tiles;
        token = (tile - row_group * args.token_tiles) * kTokens;
        const u32 last = args.row_tiles() - 1;
        WC_UNROLL
        for (u32 g = 0; g < kRowGroups; ++g) {
            u32 row_tile = row_group * kRowGroups + g;
            row_tile = row_tile < last ? row_tile : last;  // computed twice, stored once
            const u64 brick = static_cast<u64>(row_tile) * args.k_bricks + unit * kStageBricks;
            source[g] = args.bricks + brick * Decoder::kBrickBytes;
        }
    }

    WC_DEVICE u32 bricks_here() const {
        const u32 left = args.k_bricks - unit * kStageBricks;
        return left < kStageBricks ? left : kStageBricks;
    }

    WC_DEVICE void next() {
        WC_UNROLL
        for (u32 g = 0; g < kRowGroups; ++g) source[g] += kBricksBytes;
        if (++unit == units && kSplit == 0) {
            unit = 0, ++tile;
            seek();
        }
    }

    WC_DEVICE void weights(u32 stage) const {
        const u32 bricks = bricks_here(), barrier = full_barrier(smem, stage);
        const u32 bytes = bricks * Decoder::kBrickBytes;
        barrier_expect(barrier, (WC_ABLATE & 8 ? 0 : kRowGroups * bytes) + (WC_ABLATE & 4 ? 0 : bricks * kBoxBytes));
        if (WC_ABLATE & 8) return;
        WC_UNROLL
        for (u32 g = 0; g < kRowGroups; ++g) {
            bulk_copy(smem + kBrickArea + (stage * kRowGroups + g) * kBricksBytes, source[g], bytes, barrier, kEvictFirst);
        }
    }

    WC_DEVICE void tokens(u32 stage) const {
        if (WC_ABLATE & 4) return;
        const u32 bricks = bricks_here();
        WC_UNROLL
        for (u32 b = 0; b < kStageBricks; ++b) {
            if (b >= bricks) break;
            tensor_copy(smem + kTokenArea + (stage * kStageBricks + b) * kBoxBytes, args.x, (unit * kStageBricks + b) * 64,
                        token, full_barrier(smem, stage), kEvictLast);
        }
    }
};

// Weights do not depend on the kernel before this one, tokens do.
WC_DEVICE u32 fill_ring(const Arguments& args, u32 smem, Range range) {
    const u32 count = range.end - range.begin, first = count < kStages ? count : kStages;
    Producer ahead(args, smem, range.begin);
    for (u32 i = 0; i < first; ++i, ahead.next()) ahead.weights(i);
    return first;
}

WC_DEVICE void produce(const Arguments& args, u32 smem, Range range, u32 filled) {
    Producer producer(args, smem, range.begin);
    grid_dependency_wait();
    for (u32 i = 0; i < filled; ++i, producer.next()) producer.tokens(i);
    stamp(args, kIssued);
    Slot slot;
    for (u32 u = range.begin + filled; u < range.end; ++u, producer.next(), slot.advance()) {
        barrier_wait(empty_barrier(smem, slot.stage), slot.parity);
        producer.weights(slot.stage);
        producer.tokens(slot.stage);
    }
    launch_dependents();
}

// One warp of a consumer warpgroup.
struct Consumer {
    const Arguments& args;
    u32 smem, group, warp, lane;
    Slot slot;
    u32 previous;  // stage to release once the running products are done
    bool holding;

    // Decodes one brick and starts its products; returns when the products before them are done.
    template <bool kNewStage>
    WC_DEVICE void step(float (&acc)[kTokens / 2], u32 (&a)[16], u32 sub) {
        if constexpr (kNewStage) barrier_wait(full_barrier(smem, slot.stage), slot.parity);
        if (WC_TIMELINE && !holding && threadIdx.x == 0) stamp(args, kFirstStage);
        const u32 brick = smem + kBrickArea + (slot.stage * kRowGroups + group) * kBricksBytes + sub * Decoder::kBrickBytes;
        if (!(WC_ABLATE & 1)) args.decoder.load(a, brick, smem + kStagingArea + warp * kStagingBytes, warp % 4, lane);
        const u64 b = wgmma_descriptor(smem + kTokenArea + (slot.stage * kStageBricks + sub) * kBoxBytes);
        if (!(WC_ABLATE & 2)) {
            wgmma_fence();
            WC_UNROLL
            for (u32 j = 0; j < w12::kSteps; ++j) Wgmma<kTokens>::mma(acc, a + 4 * j, b + 2 * j);
            wgmma_commit();
            wgmma_wait<1>();
        } else {
            acc[0] += __uint_as_float(a[0] ^ a[5] ^ a[10] ^ a[15]);
            __syncwarp();
        }
        if constexpr (kNewStage) {
            if (holding && lane == 0) barrier_arrive(empty_barrier(smem, previous));
            holding = true;
            previous = slot.stage;
        }
    }

    // Products of `bricks` bricks, beginning with a new stage.
    WC_DEVICE void products(float (&acc)[kTokens / 2], u32 bricks) {
        u32 a0[16] = {}, a1[16] = {};
        u32 i = 0;
        for (; i + 1 < bricks; i += 2) {
            step<true>(acc, a0, 0);
            if constexpr (kStageBricks == 1) slot.advance();
            step<kStageBricks == 1>(acc, a1, kStageBricks - 1);
            slot.advance();
        }
        if (i < bricks) {
            step<true>(acc, a0, 0);
            slot.advance();
        }
        wgmma_wait<0>();
        WC_UNROLL
        for (u32 j = 0; j < kTokens / 2; ++j) asm volatile("" : "+f"(acc[j])::"memory");
        if (lane == 0) barrier_arrive(empty_barrier(smem, previous));
        holding = false;
    }
};

// First block of a rank's share of the tokens.
constexpr WC_HOST_DEVICE u32 share_begin(u32 rank) { return kSplit ? (rank * kBlocks + kSplit - 1) / kSplit : 0; }
constexpr WC_HOST_DEVICE u32 owner_of(u32 block) { return block * kSplit / kBlocks; }

// Sums a warp's blocks kFirst … kFirst + kCount − 1 over kPeers mailboxes into the accumulators, some at a time.
template <u32 kPeers, u32 kFirst, u32 kCount>
WC_DEVICE void collect_all(float (&acc)[kTokens / 2], u8* mailbox, u32 stride) {
    constexpr u32 kFit = kLettersInFlight / kPeers ? kLettersInFlight / kPeers : 1;
    constexpr u32 kFull = kCount / kFit, kRest = kCount % kFit;
    if constexpr (kFull != 0) {
        WC_UNROLL
        for (u32 i = 0; i < kFull; ++i) {
            collect<kPeers, kFit>(acc + 4 * (kFirst + i * kFit), mailbox + i * kFit * kBlockBytes, stride);
        }
    }
    if constexpr (kRest != 0) {
        collect<kPeers, kRest>(acc + 4 * (kFirst + kFull * kFit), mailbox + kFull * kFit * kBlockBytes, stride);
    }
}

// WC_SPLIT ≥ 2: posts the other ranks' shares, sums and stores our own. The rank is a template argument because
// accumulators have no run-time index.
template <u32 kRank>
WC_DEVICE void finish_share(const Consumer& c, float (&acc)[kTokens / 2], u32 tile, u32 row, u32 token, u32 staging) {
    if constexpr (kRank < kSplit) {
        if (blockIdx.x % kSplit != kRank) {
            finish_share<kRank + 1>(c, acc, tile, row, token, staging);
            return;
        }
        constexpr u32 kFirst = share_begin(kRank), kCount = share_begin(kRank + 1) - kFirst;
        constexpr u32 kShare = (kBlocks + kSplit - 1) / kSplit;
        constexpr u32 kGroupBytes = kShare * kBlockBytes, kLetterBytes = kRowGroups * kGroupBytes;
        u8* boxes = c.args.partials + static_cast<u64>(tile) * (kSplit * (kSplit - 1) * kLetterBytes) +
                    c.group * kGroupBytes + threadIdx.x % 128 * 16;
        WC_UNROLL
        for (u32 peer = 1; peer < kSplit; ++peer) {  // not everybody to rank 0 first
            const u32 owner = (kRank + peer) % kSplit, box = owner * (kSplit - 1) + kRank - (kRank > owner);
            WC_UNROLL
            for (u32 b = share_begin(owner); b < share_begin(owner + 1); ++b) {
                post(boxes + box * kLetterBytes + (b - share_begin(owner)) * kBlockBytes, acc + 4 * b);
            }
        }
        if (threadIdx.x == 0) stamp(c.args, kPosted);
        collect_all<kSplit - 1, kFirst, kCount>(acc, boxes + kRank * (kSplit - 1) * kLetterBytes, kLetterBytes);
        if (threadIdx.x == 0) stamp(c.args, kCollected);
        store_blocks<kCount>(c.args.out, acc + 4 * kFirst, row, token + 8 * kFirst, staging, c.lane);
    }
}

// WC_SPLIT = 0: a tile that begins in another CTA is posted whole; one that begins here and ends in later CTAs is summed.
WC_DEVICE void finish_stream(const Consumer& c, float (&acc)[kTokens / 2], u32 tile, Range k, u32 row, u32 token,
                             u32 staging) {
    constexpr u32 kGroupBytes = kBlocks * kBlockBytes;
    u8* box = c.args.partials + c.group * kGroupBytes + threadIdx.x % 128 * 16;
    if (k.begin != 0) {
        box += static_cast<u64>(blockIdx.x) * kRowGroups * kGroupBytes;
        WC_UNROLL
        for (u32 b = 0; b < kBlocks; ++b) post(box + b * kBlockBytes, acc + 4 * b);
        return;
    }
    const u32 end = (tile + 1) * c.args.tile_units();
    if (k.end != c.args.tile_units()) {
        for (u32 peer = blockIdx.x + 1; peer < gridDim.x && range_of(c.args, peer).begin < end; ++peer) {
            collect_all<1, 0, kBlocks>(acc, box + static_cast<u64>(peer) * kRowGroups * kGroupBytes, 0);
        }
    }
    store_blocks<kBlocks>(c.args.out, acc, row, token, staging, c.lane);
}

// WC_DUMP: the decoded weights of one quarter, row by row.
WC_DEVICE void dump(const Consumer& c, const u32 (&a)[16], u32 row, u32 column) {
    WC_UNROLL
    for (u32 i = 0; i < 32; ++i) {
        const u32 p = i % 8, r = row + c.lane / 4 + p / 2 % 2 * 8;
        const u32 k = column + i / 8 * 16 + c.lane % 4 * 2 + p % 2 + p / 4 * 8;
        if (r < c.args.out.rows && k < c.args.out.ldo) {
            c.args.out.data[r * c.args.out.ldo + k] = static_cast<u16>(a[i / 2] >> (16 * (p % 2)));
        }
    }
}

WC_DEVICE void consume(const Arguments& args, u32 smem, Range range, u32 warp, u32 lane) {
    Consumer c{args, smem, warp / 4, warp, lane, {}, 0, false};
    const u32 units = args.tile_units(), staging = smem + kStagingArea + warp * kStagingBytes;
    for (u32 u = range.begin; u < range.end;) {
        const u32 tile = u / units, begin = u - tile * units;
        const u32 end = begin + range.end - u < units ? begin + range.end - u : units;
        const u32 row = (tile / args.token_tiles * kRowGroups + c.group) * 64 + warp % 4 * 16;
        const u32 token = tile % args.token_tiles * kTokens;
        u32 bricks = args.k_bricks < end * kStageBricks ? args.k_bricks : end * kStageBricks;
        bricks -= begin * kStageBricks;
        u += end - begin;
        if constexpr (WC_DUMP) {
            for (u32 i = 0; i < bricks; ++i) {
                if (i % kStageBricks == 0) barrier_wait(full_barrier(smem, c.slot.stage), c.slot.parity);
                u32 a[16];
                args.decoder.load(a, smem + kBrickArea + (c.slot.stage * kRowGroups + c.group) * kBricksBytes +
                                         i % kStageBricks * Decoder::kBrickBytes, staging, warp % 4, lane);
                dump(c, a, row, (begin * kStageBricks + i) * 64);
                __syncwarp();
                if (i % kStageBricks == kStageBricks - 1 || i + 1 == bricks) {
                    if (lane == 0) barrier_arrive(empty_barrier(smem, c.slot.stage));
                    c.slot.advance();
                }
            }
            continue;
        }
        float acc[kTokens / 2] = {};  // ptxas serialises products into undefined accumulators
        c.products(acc, bricks);
        if (threadIdx.x == 0) stamp(args, kLoopEnd);
        if constexpr (kSplit == 0) {
            finish_stream(c, acc, tile, {begin, end}, row, token, staging);
        } else if constexpr (kSplit == 1) {
            store_blocks<kBlocks>(args.out, acc, row, token, staging, lane);
        } else {
            finish_share<0>(c, acc, tile, row, token, staging);
        }
    }
}

}  // namespace gemm
}  // namespace wc

extern "C" __global__ void __launch_bounds__(wc::gemm::kThreads, WC_CTAS_PER_SM)
    sm90_gemm(const __grid_constant__ wc::TensorMap x, const wc::u8* bricks, const wc::u32* overflow, wc::u32 table_lo,
              wc::u32 table_hi, wc::u16* out, const wc::u16* bias, wc::u8* partials, wc::u64 ldo, wc::u32 rows,
              wc::u32 tokens, wc::u32 k_bricks, wc::u32 token_tiles, wc::u64* stamps) {
    using namespace wc;
    using namespace wc::gemm;
    extern __shared__ __align__(1024) u8 shared[];
    const u32 smem = smem_address(shared), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Arguments args{&x,       bricks,   {{table_lo, table_hi}, overflow}, {out, bias, ldo, rows, tokens},
                         partials, k_bricks, token_tiles,                      stamps};
    const Range range = range_of(args, blockIdx.x);
    const bool producing = warp == kConsumerWarps && lane == 0;
    u32 filled = 0;
    if (producing) {
        stamp(args, kStart);
        stamp(args, kSm);
        prefetch_map(&x);
        for (u32 s = 0; s < kStages; ++s) {
            barrier_init(full_barrier(smem, s), 1);
            barrier_init(empty_barrier(smem, s), kConsumerWarps);
        }
        barrier_init_fence();
        filled = fill_ring(args, smem, range);
    }
    __syncwarp();
    __syncthreads();
    if (warp >= kConsumerWarps) {
        if constexpr (kMoveRegisters) set_registers<kProducerRegisters, false>();
        if (producing) produce(args, smem, range, filled);
    } else {
        if constexpr (kMoveRegisters) set_registers<kConsumerRegisters, true>();
        consume(args, smem, range, warp, lane);
        if (threadIdx.x == 0) stamp(args, kEnd);
    }
}
