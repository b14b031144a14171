// out = x · Wᵀ (+ bias) for 16 … 256 tokens per tile, W in bricks, decoded into the register operand of wgmma.
//
// Tile      64 · WC_ROW_GROUPS rows × WC_TOKENS tokens; wgmma m64 nTOKENS k16, weights as A (registers), tokens as B.
// Roles     WC_ROW_GROUPS · WC_COLUMN_GROUPS consumer warpgroups; behind them the producer's, one lane of which
//           drives the copy engine. A row group is one row tile; with two column groups (WC_STAGE_BRICKS 2) each takes
//           every second brick, which halves the latency of decoding, and they add up in shared memory. Four row
//           groups hide each other's decoding. A warp of the producer's asks for the overflow list.
// Stage     WC_STAGE_BRICKS · 64 columns: WC_TOKENS × 128 bytes of tokens per brick under the 128-byte swizzle (TMA,
//           zeros outside x), WC_ROW_GROUPS contiguous runs of bricks of 6,208 bytes (bulk copies). Shared memory:
//           WC_STAGES stages, where after the loop column groups and clusters exchange (column groups of WC_SPLIT 0
//           have WC_TOKENS × 256 bytes beside them); 1,536 bytes per consumer warp for patches and epilogue; barriers.
// Work      a *unit* is one stage of one tile. WC_SPLIT ≥ 1: each tile's units go to WC_SPLIT CTAs, each of which sums
//           and stores its share of the tokens. WC_SPLIT = 0: the units of all tiles, in order, are dealt evenly to
//           the CTAs; the CTA that holds a tile's first unit sums and stores it.
// Sums      in FP32, in a fixed order: equal inputs give equal bits. Clusters of WC_CLUSTER of a tile's CTAs exchange
//           through shared memory, then the tile's clusters through L2.
// Pairs     WC_PAIR 2: two CTAs, neighbours in rows, are a cluster, bring half of the tokens each and get all of them.
//
// Macros    as above; WC_CTAS_PER_SM resident CTAs per SM; WC_SHARED_BYTES as the host computes it; WC_DECODER 0
//           `bf16-w12`, 1 uncompressed bricks; WC_EARLY_PATCHES as sm90_gemm_decoder.cuh says. For tools: WC_ARRIVALS as
//           sm90_gemm_layout.cuh says. For experiments: WC_ABLATE, bits 1 no decode, 2 no MMA, 4 no token copies, 8 no
//           weight copies (results are wrong); WC_TIMELINE 1 stamps %globaltimer; WC_DUMP 1 (WC_SPLIT 1) writes the
//           decoded A registers, as the N × K matrix they stand for.
// Grid      WC_SPLIT ≥ 1: tiles · WC_SPLIT, the CTAs of one tile resident at once. WC_SPLIT = 0: any number of CTAs
//           that are all resident, at most the units. Twice that for pairs, of which tiles count the pairs.
// Partials  zero before the first launch, zero after every launch; never shared by launches that can overlap.
// Code      is read with cold caches: a kilobyte of it costs more than a brick. So each piece is there once, the loop
//           too (twice above 128 tokens), and what warps branch on or index by is uniform in the compiler's eyes.
// Files     sm90_gemm_layout.cuh: constants, work and shared memory; sm90_gemm_roles.cuh: producer and consumer;
//           sm90_gemm_finish.cuh: sums of several CTAs; sm90_gemm_parts.cuh: what one warp does alone;
//           sm90_gemm_decoder.cuh: weights to A registers; sm90_gemm_patches.cuh: exceptions of a quarter.
#include "sm90_gemm_finish.cuh"

namespace wc {
namespace gemm {

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
    Consumer c{args, smem, warp / 4, warp, lane, {}, 0};
    static_assert(kPair == 1 && kSplit == 1, "a dump is for single CTAs");
    const u32 row = (blockIdx.x / args.token_tiles * kRowGroups + c.row_group()) * 64 + warp % 4 * 16;
    for (u32 i = 0; i < args.k_bricks; ++i) {
        if (i % kStageBricks == 0) barrier_wait(full_barrier(smem, c.slot.stage), c.slot.parity);
        const u32 bricks = smem + kBrickArea + (c.slot.stage * kRowGroups + c.row_group()) * kBricksBytes;
        u32 a[16];
        Decoder::Share share;
        args.decoder.load(share, bricks + i % kStageBricks * Decoder::kBrickBytes, c.staging(), warp % 4, lane);
        Decoder::operands(a, share);
        dump(c, a, row, i * 64);
        __syncwarp();
        if (i % kStageBricks == kStageBricks - 1 || i + 1 == args.k_bricks) {
            c.release(c.slot.stage);
            c.slot.advance();
        }
    }
}
#else
WC_DEVICE void consume(const Arguments& args, u32 smem, Range range, u32 warp, u32 lane) {
    const u32 count = range.end - range.begin;
    Consumer c{args, smem, warp / 4, warp, lane, {}, count > kStages ? count - kStages : 0};
    const u32 units = args.tile_units();
    expect_mail(c);
    for (u32 u = range.begin; u < range.end;) {
        const u32 tile = u / units, begin = u - tile * units;
        const u32 end = begin + range.end - u < units ? begin + range.end - u : units;
        const u32 last = args.k_bricks < end * kStageBricks ? args.k_bricks : end * kStageBricks;
        const u32 bricks = last - begin * kStageBricks;
        float acc[kTokens / 2] = {};  // ptxas serialises products into undefined accumulators
        c.products(acc, bricks);
        if (threadIdx.x == 0) stamp(args, kLoopEnd);
        const u32 row_tile = (tile / args.token_tiles * kPair + pair_rank()) * kRowGroups + c.row_group();
        const u32 row = row_tile * 64 + warp % 4 * 16;
        const u32 token = tile % args.token_tiles * kTokens + c.column_group() * kOwn * 8;
        const Place place{tile, row, token};
        if constexpr (kSplit == 0) {
            finish_stream(c, acc, place, {begin, end});
        } else {
            finish_near<0>(c, acc, place);
        }
        if constexpr (kSplit != 0) break;  // one tile
        u += end - begin;
    }
}
#endif

}  // namespace gemm
}  // namespace wc

extern "C" __global__ void __launch_bounds__(wc::gemm::kThreads, WC_CTAS_PER_SM)
    sm90_gemm(const __grid_constant__ wc::TensorMap x, const wc::u8* bricks, const wc::u32* overflow, wc::u32 table_lo,
              wc::u32 table_hi, wc::u16* out, const wc::u16* bias, wc::u8* partials, wc::u64 ldo, wc::u32 rows,
              wc::u32 tokens, wc::u32 k_bricks, wc::u32 token_tiles, wc::u64* stamps, wc::u32 overflow_sectors) {
    using namespace wc;
    using namespace wc::gemm;
    extern __shared__ __align__(1024) u8 shared[];
    const u32 smem = smem_address(shared), lane = threadIdx.x % 32;
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform: addresses and branches cost less
    keep(table_lo), keep(table_hi);  // else the loop reads them from the constant bank for every brick
    const Arguments args{&x,       bricks,   {{table_lo, table_hi}, overflow}, {out, bias, ldo, rows, tokens},
                         partials, k_bricks, token_tiles,                      stamps};
    const Range range = range_of(args, worker());
    const bool producing = warp == kConsumerWarps && lane == 0;
    u32 filled = 0;
    if (warp == kConsumerWarps + 1) w12::prefetch_overflow(overflow, overflow_sectors, lane * gridDim.x + blockIdx.x);
    if (producing) {
        stamp(args, kStart);
        stamp(args, kSm);
        prefetch_map(&x);
        for (u32 s = 0; s < kStages; ++s) {
            barrier_init(full_barrier(smem, s), 1);
            barrier_init(empty_barrier(smem, s), kPair * kConsumerWarps * kArrivals);
        }
        if (kCluster > 1) {
            const u32 bytes = (kCluster - 1) * share_count(kOwn, kCluster, split_rank() % kCluster) * kBlockBytes;
            for (u32 g = 0; g < kGroups; ++g) {
                barrier_init(mail_barrier(smem, g), 1);
                barrier_expect(mail_barrier(smem, g), bytes);
            }
        }
        barrier_init_fence();
    }
    __syncwarp();
    if (kPair == 2) cluster_arrive_relaxed();
    if (producing) filled = fill_ring(args, smem, range);
    __syncwarp();
    if (kPair == 2) {
        cluster_wait();  // both CTAs' barriers are set up
    } else {
        __syncthreads();
    }
    if (warp >= kConsumerWarps) {
        if constexpr (kMoveRegisters) set_registers<kProducerRegisters, false>();
        if (kCluster > 1) cluster_arrive_relaxed();
        if (producing) produce(args, smem, range, filled);
        if (kCluster > 1) {
            __syncwarp();
            cluster_wait();
        }
    } else {
        if constexpr (kMoveRegisters) set_registers<kConsumerRegisters, true>();
        consume(args, smem, range, warp, lane);
        if (threadIdx.x == 0) stamp(args, kEnd);
    }
}
