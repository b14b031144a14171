// The roles of sm90_gemm.cu: the lane that fills the ring, the warps that decode and multiply.
#pragma once

#include "sm90_gemm_layout.cuh"

namespace wc {
namespace gemm {

// One lane that fills stages. Its latency is everybody's: nothing here divides except at the start of a tile.
struct Producer {
    const Arguments& args;
    u32 smem, units;
    u32 tile, unit;                // of the next stage
    const u8* source[kRowGroups];  // its bricks
    u32 token;                     // its first token

    WC_DEVICE Producer(const Arguments& a, u32 smem_base, u32 first)
        : args(a), smem(smem_base), units(a.tile_units()), tile(kSplit ? worker() / kRanks : first / units),
          unit(first - tile * units) {
        seek();
    }

    WC_DEVICE void seek() {
        const u32 row_group = args.token_tiles == 1 ? tile : tile / args.token_tiles;
        token = (tile - row_group * args.token_tiles) * kTokens;
        const u32 last = args.row_tiles() - 1;
        WC_UNROLL
        for (u32 g = 0; g < kRowGroups; ++g) {
            u32 row_tile = (row_group * kPair + pair_rank()) * kRowGroups + g;
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
            const u32 column = (unit * kStageBricks + b) * 64, barrier = full_barrier(smem, stage);
            if constexpr (kPair == 1) {
                tensor_copy(to, args.x, column, token, barrier, kEvictLast);
            } else {
                const u32 half = pair_rank();
                tensor_multicast(to + half * (kBoxBytes / 2), args.x, column, token + half * (kTokens / 2), barrier, 3,
                                 kEvictLast);
            }
        }
    }
};

// Fills the ring, each stage's tokens behind its weights, so that the first stage is there sooner. A pair stops at the
// first tokens, which must wait until the other CTA's barriers are set up; `produce` goes on.
WC_DEVICE u32 fill_ring(const Arguments& args, u32 smem, Range range) {
    const u32 count = range.end - range.begin, first = count < kStages ? count : kStages;
    Producer ahead(args, smem, range.begin);
    for (u32 i = 0; i < first; ++i, ahead.next()) {
        ahead.weights(i);
        if (kPair == 2) break;
        ahead.tokens(i);
    }
    return first;
}

WC_DEVICE void produce(const Arguments& args, u32 smem, Range range, u32 filled) {
    Producer producer(args, smem, range.begin);
    for (u32 i = 0; i < filled; ++i, producer.next()) {
        if (kPair == 2 && i != 0) producer.weights(i);
        if (kPair == 2) producer.tokens(i);
    }
    stamp(args, kIssued);
    Slot slot;
    for (u32 u = range.begin + filled; u < range.end; ++u, producer.next(), slot.advance()) {
        barrier_wait(empty_barrier(smem, slot.stage), slot.parity);
        producer.weights(slot.stage);
        producer.tokens(slot.stage);
    }
}

// One warp of a consumer warpgroup.
struct Consumer {
    const Arguments& args;
    u32 smem, group, warp, lane;
    Slot slot;
    u32 refills;           // stages that will be filled again
    u32 sub = 0;           // the next brick's place in its stage
    u32 previous = 0;      // stage to release once the running products are done
    bool holding = false;

    WC_DEVICE u32 row_group() const { return kColumnGroups == 1 ? group : 0; }
    WC_DEVICE u32 column_group() const { return kColumnGroups == 1 ? 0 : group; }
    WC_DEVICE u32 staging() const { return smem + kStagingArea + warp * kStagingBytes; }

    // We have read a stage. A pair's are refilled together; what nobody refills is not reported there, because the other
    // CTA may have exited.
    WC_DEVICE void release(u32 stage) {
        if (kPair == 2) {
            if (refills == 0) return;
            --refills;
        }
        const u32 barrier = empty_barrier(smem, stage);
        if constexpr (kPair == 1) {
            if (lane < kArrivals) barrier_arrive(barrier);
        } else {
            WC_UNROLL
            for (u32 i = 0; i < ceil_div(kPair * kArrivals, 32); ++i) {
                const u32 place = lane + 32 * i;
                if (place < kPair * kArrivals) cluster_barrier_arrive(cluster_address(barrier, place / kArrivals));
            }
        }
    }

    // Waits until at most `kPending` bricks' products run. `first` says that our next or last brick began a stage: then
    // all of the stage before is read.
    template <int kPending>
    WC_DEVICE void finish_previous(bool first) {
        wgmma_wait<kPending>();
        if (first && holding) release(previous);
    }

    // Decodes one brick, while those of the brick before run, and starts its products.
    WC_DEVICE void step(float (&acc)[kTokens / 2], u32 (&a)[16]) {
        const bool first = kLastSub == 0 || sub == 0;
        if (first) barrier_wait(full_barrier(smem, slot.stage), slot.parity);
        if (WC_TIMELINE && !holding && threadIdx.x == 0) stamp(args, kFirstStage);
        const u32 stage = slot.stage;
        const u32 bricks = smem + kBrickArea + (stage * kRowGroups + row_group()) * kBricksBytes;
        const u64 b = wgmma_descriptor(smem + kTokenArea + (stage * kStageBricks + sub) * kBoxBytes);
        Decoder::Share share;
        if (!(WC_ABLATE & 1)) {
            args.decoder.load(share, bricks + sub * Decoder::kBrickBytes, staging(), warp % 4, lane);
        }
        if constexpr (kOperandSets == 1) finish_previous<0>(first);
        Decoder::operands(a, share);
        if (!(WC_ABLATE & 2)) {
            wgmma_fence();
            WC_UNROLL
            for (u32 j = 0; j < w12::kSteps; ++j) Wgmma<kTokens>::mma(acc, a + 4 * j, b + 2 * j);
            wgmma_commit();
        } else {
            acc[0] += __uint_as_float(a[0] ^ a[5] ^ a[10] ^ a[15]);
            __syncwarp();
        }
        if constexpr (kOperandSets == 2) finish_previous<1>(first);
        previous = stage;
        holding = true;
        if (kLastSub == 0 || sub == 1) slot.advance();
        if constexpr (kLastSub == 1) sub ^= 1;
    }

    // Products of `bricks` bricks, beginning with a new stage.
    WC_DEVICE void products(float (&acc)[kTokens / 2], u32 bricks) {
        u32 a[kOperandSets][16] = {};
        sub = column_group();
        WC_NO_UNROLL
        for (u32 left = kColumnGroups == 1 ? bricks : (bricks + 1 - sub) / 2; left != 0; --left) {
            step(acc, a[0]);
            if constexpr (kOperandSets == 2) {
                if (--left == 0) break;
                step(acc, a[1]);
            }
        }
        wgmma_wait<0>();
        WC_UNROLL
        for (u32 j = 0; j < kTokens / 2; ++j) asm volatile("" : "+f"(acc[j])::"memory");
        if (holding) release(previous);
        holding = false;
        if (kLastSub == 1 && sub == 1) slot.advance();
        if constexpr (kColumnGroups == 2) {
            if (bricks % 2 == 1 && sub == 1) {  // the last stage has no brick for us
                barrier_wait(full_barrier(smem, slot.stage), slot.parity);
                release(slot.stage);
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
        named_barrier(1, 256);  // both have left the ring, or read the sums of the tile before
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

}  // namespace gemm
}  // namespace wc
