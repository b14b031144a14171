// out = x · Wᵀ (+ bias) for 16 … 256 tokens per tile, W in bricks, decoded into the register operand of wgmma.
//
// Tile      64 · WC_ROW_GROUPS rows × WC_TOKENS tokens; wgmma m64 nTOKENS k16, weights as A (registers), tokens as B.
// Roles     WC_ROW_GROUPS · WC_COLUMN_GROUPS consumer warpgroups; behind them the producer's, one lane of which
//           drives the copy engine. A row group is one row tile; with two column groups (WC_STAGE_BRICKS 2) each takes
//           every second brick, which halves the latency of decoding, and they add up in shared memory.
// Stage     WC_STAGE_BRICKS · 64 columns: WC_TOKENS × 128 bytes of tokens per brick under the 128-byte swizzle (TMA,
//           zeros outside x), WC_ROW_GROUPS contiguous runs of bricks (bulk copies). Shared memory: WC_STAGES stages,
//           1,536 bytes per consumer warp for overflow and epilogue, mail of column groups and cluster, barriers.
// Work      a *unit* is one stage of one tile. WC_SPLIT ≥ 1: each tile's units go to WC_SPLIT CTAs, each of which sums
//           and stores its share of the tokens. WC_SPLIT = 0: the units of all tiles, in order, are dealt evenly to
//           the CTAs; the CTA that holds a tile's first unit sums and stores it.
// Sums      in FP32, in a fixed order: equal inputs give equal bits. WC_CLUSTER 0: exchanged through L2, 1: the CTAs
//           of a tile are a cluster and exchange through shared memory.
//
// Macros    as above; WC_CTAS_PER_SM resident CTAs per SM; WC_SHARED_BYTES as the host computes it; WC_DECODER 0
//           `bf16-w12`, 1 uncompressed bricks; WC_PDL 1 for a programmatic dependent launch. For experiments:
//           WC_ABLATE, bits 1 no decode, 2 no MMA, 4 no token copies, 8 no weight copies (results are wrong);
//           WC_TIMELINE 1 stamps %globaltimer; WC_DUMP 1 (WC_SPLIT 1) writes the decoded A registers, as the N × K
//           matrix they stand for.
// Grid      WC_SPLIT ≥ 1: tiles · WC_SPLIT, the CTAs of one tile resident at once. WC_SPLIT = 0: any number of CTAs
//           that are all resident, at most the units.
// Partials  zero before the first launch, zero after every launch; never shared by launches that can overlap.
#include "sm90_gemm_parts.cuh"

#ifndef WC_CTAS_PER_SM
#define WC_CTAS_PER_SM 1
#endif
#ifndef WC_COLUMN_GROUPS
#define WC_COLUMN_GROUPS 1
#endif
#ifndef WC_CLUSTER
#define WC_CLUSTER 0
#endif
#ifndef WC_PDL
#define WC_PDL 0
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
constexpr u32 kSplit = WC_SPLIT, kRanks = kSplit ? kSplit : 1, kPeers = kRanks > 1 ? kRanks - 1 : 1;
static_assert(kRowGroups >= 1 && kRowGroups <= 3, "one to three consumer warpgroups");
static_assert(kTokens % 16 == 0 && kTokens >= 16 && kTokens <= 256, "wgmma and TMA take up to 256 tokens");
static_assert(kStageBricks == 1 || kStageBricks == 2, "a stage is one or two bricks deep");
constexpr u32 kColumnGroups = WC_COLUMN_GROUPS, kGroups = kRowGroups * kColumnGroups;
static_assert(kColumnGroups == 1 || (kColumnGroups == 2 && kStageBricks == 2 && kRowGroups == 1), "column groups");
static_assert(kStages >= 2, "copies overlap with products");
static_assert(kSplit <= 8, "CTAs per tile");
static_assert(!WC_CLUSTER || kSplit >= 2, "a cluster is the CTAs of one tile");
static_assert(WC_CTAS_PER_SM == 1 || kGroups == 1, "setmaxnreg leaves no registers for a second CTA");

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

constexpr u32 kConsumerWarps = 4 * kGroups;
constexpr u32 kThreads = 32 * (kConsumerWarps + 4);
// setmaxnreg moves registers from the producer's warpgroup to the consumers'; one CTA of one consumer has enough.
constexpr bool kMoveRegisters = kGroups > 1;
constexpr u32 kConsumerRegisters = kGroups == 2 ? 232 : kGroups == 3 ? 152 : WC_CTAS_PER_SM == 2 ? 128 : 255;
constexpr u32 kProducerRegisters = kGroups == 2 ? 40 : 56;
constexpr u32 kBlocks = kTokens / 8;
constexpr u32 kBoxBytes = kTokens * 128;  // tokens × 64 columns
constexpr u32 kBricksBytes = kStageBricks * Decoder::kBrickBytes;
constexpr u32 kTokenArea = 0;
constexpr u32 kBrickArea = kTokenArea + kStages * kStageBricks * kBoxBytes;
constexpr u32 kStagingArea = kBrickArea + kStages * kRowGroups * kBricksBytes;
// After the loop a warpgroup holds kOwn blocks; with column groups, its half of the tokens.
constexpr u32 kOwn = kBlocks / kColumnGroups;
// First block of a rank's share of them, and the largest share.
constexpr WC_HOST_DEVICE u32 share_begin(u32 rank) { return (rank * kOwn + kRanks - 1) / kRanks; }
constexpr u32 kShare = (kOwn + kRanks - 1) / kRanks;
// Partial sums that one CTA sends another: kShare blocks of every warpgroup.
constexpr u32 kGroupBytes = kShare * kBlockBytes, kLetterBytes = kGroups * kGroupBytes;
constexpr u32 kMergeArea = kStagingArea + kConsumerWarps * kStagingBytes;
constexpr u32 kMailArea = kMergeArea + (kColumnGroups == 2 ? kBlocks * kBlockBytes : 0);
constexpr u32 kBarrierArea = kMailArea + (WC_CLUSTER ? (kSplit - 1) * kLetterBytes : 0);
constexpr u32 kSharedBytes = kBarrierArea + kStages * 16 + kGroups * 8;
static_assert(kBlocks % kColumnGroups == 0 && kOwn >= kSplit, "every warpgroup of a tile sums at least one block");
static_assert(kBoxBytes % 1024 == 0, "swizzle atoms are 1,024 bytes");
static_assert(kSharedBytes <= 227 * 1024, "shared memory of one SM");
static_assert(kSharedBytes == WC_SHARED_BYTES, "the host lays out shared memory differently");

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
        const u32 tile = cta / kRanks * units, rank = cta % kRanks;
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

// One lane that fills stages. Its latency is everybody's: nothing here divides except at the start of a tile.
struct Producer {
    const Arguments& args;
    u32 smem, units;
    u32 tile, unit;                // of the next stage
    const u8* source[kRowGroups];  // its bricks
    u32 token;                     // its first token

    WC_DEVICE Producer(const Arguments& a, u32 smem_base, u32 first)
        : args(a), smem(smem_base), units(a.tile_units()), tile(kSplit ? blockIdx.x / kRanks : first / units),
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
            const u32 to = smem + kBrickArea + (stage * kRowGroups + g) * kBricksBytes;
            bulk_copy(to, source[g], bytes, barrier, kEvictFirst);
        }
    }

    WC_DEVICE void tokens(u32 stage) const {
        if (WC_ABLATE & 4) return;
        const u32 bricks = bricks_here();
        WC_UNROLL
        for (u32 b = 0; b < kStageBricks; ++b) {
            if (b >= bricks) break;
            const u32 to = smem + kTokenArea + (stage * kStageBricks + b) * kBoxBytes;
            const u32 column = (unit * kStageBricks + b) * 64;
            tensor_copy(to, args.x, column, token, full_barrier(smem, stage), kEvictLast);
        }
    }
};

// Fills the ring. With WC_PDL the weights, which do not depend on the kernel before this one, go first and the tokens
// follow when that has finished; else each stage's tokens follow its weights, so that the first stage is there sooner.
WC_DEVICE u32 fill_ring(const Arguments& args, u32 smem, Range range) {
    const u32 count = range.end - range.begin, first = count < kStages ? count : kStages;
    Producer ahead(args, smem, range.begin);
    for (u32 i = 0; i < first; ++i, ahead.next()) {
        ahead.weights(i);
        if (!WC_PDL) ahead.tokens(i);
    }
    return first;
}

WC_DEVICE void produce(const Arguments& args, u32 smem, Range range, u32 filled) {
    Producer producer(args, smem, range.begin);
    if (WC_PDL) grid_dependency_wait();
    for (u32 i = 0; i < filled; ++i, producer.next()) {
        if (WC_PDL) producer.tokens(i);
    }
    stamp(args, kIssued);
    Slot slot;
    for (u32 u = range.begin + filled; u < range.end; ++u, producer.next(), slot.advance()) {
        barrier_wait(empty_barrier(smem, slot.stage), slot.parity);
        producer.weights(slot.stage);
        producer.tokens(slot.stage);
    }
    if (WC_PDL) launch_dependents();
}

// One warp of a consumer warpgroup.
struct Consumer {
    const Arguments& args;
    u32 smem, group, warp, lane;
    Slot slot;
    u32 previous = 0;      // stage to release once the running products are done
    bool holding = false;

    WC_DEVICE u32 row_group() const { return kColumnGroups == 1 ? group : 0; }
    WC_DEVICE u32 column_group() const { return kColumnGroups == 1 ? 0 : group; }
    WC_DEVICE u32 staging() const { return smem + kStagingArea + warp * kStagingBytes; }

    // Decodes one brick and starts its products; returns when the products before them are done.
    template <bool kNewStage>
    WC_DEVICE void step(float (&acc)[kTokens / 2], u32 (&a)[16], u32 sub) {
        if constexpr (kNewStage) barrier_wait(full_barrier(smem, slot.stage), slot.parity);
        if (WC_TIMELINE && !holding && threadIdx.x == 0) stamp(args, kFirstStage);
        const u32 bricks = smem + kBrickArea + (slot.stage * kRowGroups + row_group()) * kBricksBytes;
        const u32 brick = bricks + sub * Decoder::kBrickBytes;
        if (!(WC_ABLATE & 1)) args.decoder.load(a, brick, staging(), warp % 4, lane);
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
        constexpr bool kOnePerStage = kStageBricks == 1 || kColumnGroups == 2;
        u32 a0[16] = {}, a1[16] = {};
        u32 i = 0;
        const u32 mine = kColumnGroups == 1 ? bricks : (bricks + 1 - group) / 2, sub = column_group();
        for (; i + 1 < mine; i += 2) {
            step<true>(acc, a0, sub);
            if constexpr (kOnePerStage) slot.advance();
            step<kOnePerStage>(acc, a1, kOnePerStage ? sub : 1);
            slot.advance();
        }
        if (i < mine) {
            step<true>(acc, a0, sub);
            slot.advance();
        }
        wgmma_wait<0>();
        WC_UNROLL
        for (u32 j = 0; j < kTokens / 2; ++j) asm volatile("" : "+f"(acc[j])::"memory");
        if (holding && lane == 0) barrier_arrive(empty_barrier(smem, previous));
        holding = false;
        if constexpr (kColumnGroups == 2) {
            if (bricks % 2 == 1 && group == 1) {  // the last stage has no brick for us
                barrier_wait(full_barrier(smem, slot.stage), slot.parity);
                if (lane == 0) barrier_arrive(empty_barrier(smem, slot.stage));
                slot.advance();
            }
            merge(acc);
        }
    }

    // Adds the two column groups; each keeps its half of the tokens in acc[0] ….
    WC_DEVICE void merge(float (&acc)[kTokens / 2]) const {
        constexpr u32 kHalf = kTokens / 4;
        const u32 place = smem + kMergeArea + threadIdx.x % 128 * 16;
        const u32 mine = place + group * kOwn * kBlockBytes, other = place + (group ^ 1) * kOwn * kBlockBytes;
        if constexpr (kSplit == 0) named_barrier(1, 256);  // the other group has read the tile before
        if (group == 0) {
            send_half<kHalf>(acc, other);
        } else {
            send_half<0>(acc, other);
            WC_UNROLL
            for (u32 i = 0; i < kHalf; ++i) acc[i] = acc[kHalf + i];
        }
        named_barrier(1, 256);
        WC_UNROLL
        for (u32 b = 0; b < kOwn; ++b) add_block(acc + 4 * b, mine + b * kBlockBytes);
    }

    template <u32 kFrom>
    static WC_DEVICE void send_half(const float (&acc)[kTokens / 2], u32 to) {
        WC_UNROLL
        for (u32 b = 0; b < kOwn; ++b) {
            const float* v = acc + kFrom + 4 * b;
            store_smem(to + b * kBlockBytes, {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                                              __float_as_uint(v[3])});
        }
    }
};

// Sums a warp's blocks kFirst … kFirst + kCount − 1 over kBoxes boxes into the accumulators, some at a time.
template <u32 kBoxes, u32 kFirst, u32 kCount, class Mail>
WC_DEVICE void collect_all(float (&acc)[kTokens / 2], const Mail& mail, u32 offset, u32 stride) {
    constexpr u32 kFit = kLettersInFlight / kBoxes ? kLettersInFlight / kBoxes : 1;
    constexpr u32 kFull = kCount / kFit, kRest = kCount % kFit;
    if constexpr (kFull != 0) {
        WC_UNROLL
        for (u32 i = 0; i < kFull; ++i) {
            mail.template collect<kBoxes, kFit>(acc + 4 * (kFirst + i * kFit), offset + i * kFit * kBlockBytes, stride);
        }
    }
    if constexpr (kRest != 0) {
        constexpr u32 kDone = kFull * kFit;
        mail.template collect<kBoxes, kRest>(acc + 4 * (kFirst + kDone), offset + kDone * kBlockBytes, stride);
    }
}

// Where a finished warpgroup's blocks go.
struct Place {
    u32 tile, row, token;
};

#if !WC_CLUSTER
WC_DEVICE GlobalMail mail_of(const Consumer& c, u64 boxes) {
    // One register pair for all the letters' addresses, which the compiler would else keep each on its own.
    return {opaque(c.args.partials + boxes * kLetterBytes + c.group * kGroupBytes + threadIdx.x % 128 * 16), c.lane};
}

// Brings the letters that `collect` will watch first into L2: a miss there would cost a trip to DRAM at the end.
WC_DEVICE void expect_mail(const Consumer& c) {
    if constexpr (kSplit >= 2) {
        const u32 rank = blockIdx.x % kRanks, count = share_begin(rank + 1) - share_begin(rank);
        constexpr u32 kFit = kLettersInFlight / kPeers ? kLettersInFlight / kPeers : 1;
        const u32 last = (count < kFit ? count : kFit) - 1;
        const GlobalMail mail = mail_of(c, static_cast<u64>(blockIdx.x) * kPeers);
        if (c.lane < kPeers) {
            prefetch_l2(mail.mailbox + c.lane * kLetterBytes + last * kBlockBytes + (31 - c.lane) * 16);
        }
    }
}
#endif

// WC_SPLIT ≥ 2: sends the other ranks their shares, sums and stores our own. The rank is a template argument because
// accumulators have no run-time index.
template <u32 kRank>
WC_DEVICE void finish_share(const Consumer& c, float (&acc)[kTokens / 2], Place place) {
    if constexpr (kRank < kSplit) {
        if (blockIdx.x % kSplit != kRank) {
            finish_share<kRank + 1>(c, acc, place);
            return;
        }
        constexpr u32 kFirst = share_begin(kRank), kCount = share_begin(kRank + 1) - kFirst;
#if WC_CLUSTER
        constexpr u32 kOwnBoxes = 0;
        const u32 mailbox = c.smem + kMailArea + c.group * kGroupBytes + threadIdx.x % 128 * 16;
        const ClusterMail mail{mailbox, mail_barrier(c.smem, c.group)};
        cluster_wait();  // every CTA of the cluster has set up its barriers
#else
        constexpr u32 kOwnBoxes = kRank * (kSplit - 1);
        const GlobalMail mail = mail_of(c, static_cast<u64>(place.tile) * (kSplit * (kSplit - 1)));
#endif
        WC_UNROLL
        for (u32 peer = 1; peer < kSplit; ++peer) {  // not everybody to rank 0 first
            const u32 owner = (kRank + peer) % kSplit, box = kRank < owner ? kRank : kRank - 1;
            WC_UNROLL
            for (u32 b = share_begin(owner); b < share_begin(owner + 1); ++b) {
                const u32 letter = (b - share_begin(owner)) * kBlockBytes;
#if WC_CLUSTER
                mail.post(owner, box * kLetterBytes + letter, acc + 4 * b);
#else
                mail.post((owner * (kSplit - 1) + box) * kLetterBytes + letter, acc + 4 * b);
#endif
            }
        }
        if (threadIdx.x == 0) stamp(c.args, kPosted);
#if WC_CLUSTER
        barrier_wait(mail.barrier, 0);
#endif
        collect_all<kSplit - 1, kFirst, kCount>(acc, mail, kOwnBoxes * kLetterBytes, kLetterBytes);
        if (threadIdx.x == 0) stamp(c.args, kCollected);
        store_blocks<kCount>(c.args.out, acc + 4 * kFirst, place.row, place.token + 8 * kFirst, c.staging(), c.lane);
    }
}

#if !WC_CLUSTER
// WC_SPLIT = 0: a tile that begins in another CTA is posted whole; one that begins here and ends in later CTAs is
// summed.
WC_DEVICE void finish_stream(const Consumer& c, float (&acc)[kTokens / 2], Place place, Range k) {
    const GlobalMail mail = mail_of(c, 0);
    if (k.begin != 0) {
        WC_UNROLL
        for (u32 b = 0; b < kOwn; ++b) mail.post(blockIdx.x * kLetterBytes + b * kBlockBytes, acc + 4 * b);
        return;
    }
    const u32 units = c.args.tile_units(), end = (place.tile + 1) * units;
    if (k.end != units) {
        for (u32 peer = blockIdx.x + 1; peer < gridDim.x && range_of(c.args, peer).begin < end; ++peer) {
            collect_all<1, 0, kOwn>(acc, mail, peer * kLetterBytes, 0);
        }
    }
    store_blocks<kOwn>(c.args.out, acc, place.row, place.token, c.staging(), c.lane);
}
#endif

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

#if WC_DUMP
WC_DEVICE void consume(const Arguments& args, u32 smem, Range, u32 warp, u32 lane) {
    Consumer c{args, smem, warp / 4, warp, lane, {}};
    const u32 row = (blockIdx.x / args.token_tiles * kRowGroups + c.row_group()) * 64 + warp % 4 * 16;
    for (u32 i = 0; i < args.k_bricks; ++i) {
        if (i % kStageBricks == 0) barrier_wait(full_barrier(smem, c.slot.stage), c.slot.parity);
        const u32 bricks = smem + kBrickArea + (c.slot.stage * kRowGroups + c.row_group()) * kBricksBytes;
        u32 a[16];
        args.decoder.load(a, bricks + i % kStageBricks * Decoder::kBrickBytes, c.staging(), warp % 4, lane);
        dump(c, a, row, i * 64);
        __syncwarp();
        if (i % kStageBricks == kStageBricks - 1 || i + 1 == args.k_bricks) {
            if (lane == 0) barrier_arrive(empty_barrier(smem, c.slot.stage));
            c.slot.advance();
        }
    }
}
#else
WC_DEVICE void consume(const Arguments& args, u32 smem, Range range, u32 warp, u32 lane) {
    Consumer c{args, smem, warp / 4, warp, lane, {}};
    const u32 units = args.tile_units();
#if !WC_CLUSTER
    expect_mail(c);
#endif
    for (u32 u = range.begin; u < range.end;) {
        const u32 tile = u / units, begin = u - tile * units;
        const u32 end = begin + range.end - u < units ? begin + range.end - u : units;
        const u32 last = args.k_bricks < end * kStageBricks ? args.k_bricks : end * kStageBricks;
        const u32 bricks = last - begin * kStageBricks;
        const u32 row = (tile / args.token_tiles * kRowGroups + c.row_group()) * 64 + warp % 4 * 16;
        const u32 token = tile % args.token_tiles * kTokens + c.column_group() * kOwn * 8;
        const Place place{tile, row, token};
        float acc[kTokens / 2] = {};  // ptxas serialises products into undefined accumulators
        c.products(acc, bricks);
        if (threadIdx.x == 0) stamp(args, kLoopEnd);
        if constexpr (kSplit == 1) {
            store_blocks<kOwn>(args.out, acc, row, token, c.staging(), lane);
        } else if constexpr (kSplit == 0) {
#if !WC_CLUSTER
            finish_stream(c, acc, place, {begin, end});
#endif
        } else {
            finish_share<0>(c, acc, place);
        }
        u += end - begin;
    }
}
#endif

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
        if (WC_CLUSTER) {
            for (u32 g = 0; g < kGroups; ++g) {
                const u32 rank = blockIdx.x % kRanks, share = share_begin(rank + 1) - share_begin(rank);
                barrier_init(mail_barrier(smem, g), 1);
                barrier_expect(mail_barrier(smem, g), (kSplit - 1) * share * kBlockBytes);
            }
        }
        barrier_init_fence();
        filled = fill_ring(args, smem, range);
    }
    __syncwarp();
    __syncthreads();
    if (WC_CLUSTER) cluster_arrive_relaxed();
    if (warp >= kConsumerWarps) {
        if constexpr (kMoveRegisters) set_registers<kProducerRegisters, false>();
        if (producing) produce(args, smem, range, filled);
        if (WC_CLUSTER) {
            __syncwarp();
            cluster_wait();
        }
    } else {
        if constexpr (kMoveRegisters) set_registers<kConsumerRegisters, true>();
        consume(args, smem, range, warp, lane);
        if (threadIdx.x == 0) stamp(args, kEnd);
    }
}
