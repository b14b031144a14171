// The pieces of sm90_gemm.cu that one warp does alone: post partial sums to another CTA and collect them, and store
// finished blocks. How it decodes is in sm90_gemm_decoder.cuh.
//
// A *block* is 8 tokens of a warp's 16 rows in the accumulator layout of wgmma: lane 4g + t holds row g, tokens 2t and
// 2t + 1, then row g + 8, the same tokens: four floats.
#pragma once

#include "bf16_w12.cuh"
#include "ptx_sm90.cuh"

namespace wc {
namespace gemm {

// ---- exchange of partial sums -------------------------------------------------------------------------------------

constexpr u32 kBlockBytes = 128 * 16;  // one block of a warpgroup: 128 threads × four floats

// Through L2. A partial sum is its own flag: a mailbox word is zero at rest and the complement of a float's bits when
// posted; no float that the tensor cores or an addition produce is all ones (their only NaN is 0x7fffffff), so a
// posted word is never zero. The reader polls the words themselves, then zeroes them: no fence, no counter, one trip
// each way, and the workspace is ready for the next launch.
struct GlobalMail {
    u8* mailbox;  // this thread's place
    u32 lane;

    WC_DEVICE void post(u32 offset, const float* block) const {
        store_relaxed(mailbox + offset, {~__float_as_uint(block[0]), ~__float_as_uint(block[1]),
                                         ~__float_as_uint(block[2]), ~__float_as_uint(block[3])});
    }

    static WC_DEVICE bool posted(u32x4 v) { return v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0; }

    // The letter that the warp watches: its last lane's. Watching all takes bandwidth from peers that still load.
    WC_DEVICE u8* watched(u32 offset) const { return mailbox + offset + (31 - lane) * 16; }

    // Adds kBlocks blocks from each of kPeers boxes, `stride` bytes apart, to `sum`, in that order, and empties them.
    template <u32 kPeers, u32 kBlocks>
    WC_DEVICE void collect(float* sum, u32 offset, u32 stride) const {
        u8* box = mailbox + offset;
        u32x4 letters[kPeers][kBlocks];
        bool complete;
        do {
            do {
                complete = true;
                WC_UNROLL
                for (u32 p = 0; p < kPeers; ++p) {
                    complete &= posted(load_relaxed(watched(offset + p * stride + (kBlocks - 1) * kBlockBytes)));
                }
            } while (!complete);
            WC_UNROLL
            for (u32 p = 0; p < kPeers; ++p) {
                WC_UNROLL
                for (u32 b = 0; b < kBlocks; ++b) letters[p][b] = load_relaxed(box + p * stride + b * kBlockBytes);
            }
            WC_UNROLL
            for (u32 p = 0; p < kPeers; ++p) {
                WC_UNROLL
                for (u32 b = 0; b < kBlocks; ++b) complete &= posted(letters[p][b]);
            }
        } while (!__all_sync(~0u, complete));
        WC_UNROLL
        for (u32 p = 0; p < kPeers; ++p) {
            WC_UNROLL
            for (u32 b = 0; b < kBlocks; ++b) {
                store_relaxed(box + p * stride + b * kBlockBytes, {0, 0, 0, 0});
                sum[4 * b] += __uint_as_float(~letters[p][b].x);
                sum[4 * b + 1] += __uint_as_float(~letters[p][b].y);
                sum[4 * b + 2] += __uint_as_float(~letters[p][b].z);
                sum[4 * b + 3] += __uint_as_float(~letters[p][b].w);
            }
        }
    }
};

WC_DEVICE void add_block(float* sum, u32 address) {
    const u32x4 v = load_smem(address);
    sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y);
    sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
}

// Between the CTAs of a cluster, into each other's shared memory; the letters' bytes complete the reader's barrier.
struct ClusterMail {
    u32 mailbox, barrier;  // this thread's place, ours

    WC_DEVICE void post(u32 rank, u32 offset, const float* block) const {
        store_async(cluster_address(mailbox + offset, rank),
                    {__float_as_uint(block[0]), __float_as_uint(block[1]), __float_as_uint(block[2]),
                     __float_as_uint(block[3])},
                    cluster_address(barrier, rank));
    }

    template <u32 kPeers, u32 kBlocks>
    WC_DEVICE void collect(float* sum, u32 offset, u32 stride) const {
        WC_UNROLL
        for (u32 p = 0; p < kPeers; ++p) {
            WC_UNROLL
            for (u32 b = 0; b < kBlocks; ++b) add_block(sum + 4 * b, mailbox + offset + p * stride + b * kBlockBytes);
        }
    }
};

// ---- epilogue -----------------------------------------------------------------------------------------------------

struct Output {
    u16* data;        // tokens × ldo
    const u16* bias;  // per row, or null
    u64 ldo;          // elements
    u32 rows, tokens;
};

constexpr u32 kPairPitch = 48;                   // 16 rows of one token, padded against bank conflicts
constexpr u32 kPairBytes = 16 * kPairPitch;      // two blocks
constexpr u32 kStagingBytes = 2 * kPairBytes;    // per warp
static_assert(kStagingBytes >= w12::kHighBytes, "where a warp applies patches in the loop");

// `store_blocks` where all 16 rows exist and the output allows 16-byte pieces (kWhole), or not.
template <u32 kBlocks, bool kWhole>
WC_DEVICE void store_rows(const Output& out, const float* sum, u32 row, u32 token, u32 staging, u32 lane) {
    float bias0 = 0, bias1 = 0;
    if (out.bias != nullptr) {
        const u32 r = row + lane / 4;
        if (kWhole || r < out.rows) bias0 = f32_from_bf16(out.bias[r]);
        if (kWhole || r + 8 < out.rows) bias1 = f32_from_bf16(out.bias[r + 8]);
    }
    const u32 write = staging + (lane / 16 * 8 + lane % 8) * kPairPitch + lane / 8 % 2 * 16;
    const u32 read = staging + lane / 2 * kPairPitch + lane % 2 * 16;
    const u32 first_row = row + lane % 2 * 8;
    constexpr u32 kPairs = (kBlocks + 1) / 2;
    WC_UNROLL
    for (u32 pair = 0; pair < kPairs; pair += 2) {
        WC_UNROLL
        for (u32 i = 0; i < 2 && pair + i < kPairs; ++i) {
            u32 m[4];
            WC_UNROLL
            for (u32 j = 0; j < 4; ++j) {
                const u32 b = 2 * (pair + i) + j / 2;
                const float* v = sum + 4 * b + 2 * (j % 2);
                const float bias = j % 2 ? bias1 : bias0;
                m[j] = b < kBlocks ? bf16_pair(v[0] + bias, v[1] + bias) : 0;
            }
            store_matrix_transposed(write + i * kPairBytes, m[0], m[1], m[2], m[3]);
        }
        __syncwarp();
        WC_UNROLL
        for (u32 i = 0; i < 2 && pair + i < kPairs; ++i) {
            const u32 t = 16 * (pair + i) + lane / 2;
            if (t >= 8 * kBlocks || token + t >= out.tokens) continue;
            const u32x4 v = load_smem(read + i * kPairBytes);
            u16* to = out.data + (token + t) * out.ldo + first_row;
            if constexpr (kWhole) {
                *reinterpret_cast<u32x4*>(to) = v;
            } else {
                const u32 words[4] = {v.x, v.y, v.z, v.w};
                WC_UNROLL
                for (u32 j = 0; j < 8; ++j) {
                    if (first_row + j < out.rows) to[j] = static_cast<u16>(words[j / 2] >> (16 * (j % 2)));
                }
            }
        }
        __syncwarp();
    }
}

// Stores kBlocks blocks of the rows row … row + 15, beginning at `token`, as BF16, in 16-byte pieces where the output
// allows it: code of its own, because all that runs after the loop comes from a cold instruction cache. `staging` is
// this warp's shared memory.
template <u32 kBlocks>
WC_DEVICE void store_blocks(const Output& out, const float* sum, u32 row, u32 token, u32 staging, u32 lane) {
    const bool vectors = (out.ldo % 8 | reinterpret_cast<u64>(out.data) % 16) == 0;
    if (vectors && row + 16 <= out.rows) {
        store_rows<kBlocks, true>(out, sum, row, token, staging, lane);
    } else {
        store_rows<kBlocks, false>(out, sum, row, token, staging, lane);
    }
}

}  // namespace gemm
}  // namespace wc
