// out = x · Wᵀ (+ bias) for up to 32 tokens: W in bricks, x and out BF16, sums in FP32. mma.sync, sm_80 and newer.
//
// A CTA computes WC_ROW_WARPS × WC_QUARTERS × 16 rows of W for all tokens; its WC_K_WARPS groups of warps deal the
// 64-column chunks of K among themselves, and one reduction in a fixed order joins their sums at the end, so the same
// input gives the same bits. A warp decodes quarters of bricks into the A operand, patches applied: the product is that
// of the original weights. Tokens are the columns of B, read by ldmatrix from shared memory.
//
// WC_REGISTER_RING 1: each warp keeps a chunk of weights in flight in registers (WC_STAGES is 1), x beside it in two
//   slots of shared memory: the load of the next chunk starts when the weights are decoded, before x is read. Few
//   instructions. Warps fetch x for themselves, but through L1, where the CTAs of an SM find each other's.
// WC_REGISTER_RING 0: weights and x in WC_STAGES slots of shared memory, filled by cp.async; the WC_ROW_WARPS warps of
//   a group share x. More bytes in flight and less traffic for x: best for many tokens or few rows. Two quarters are
//   decoded at a time and share what ldmatrix reads. With WC_EAGER a warp, alone in its group, asks for the next chunk
//   before it waits for the one at hand.
//
// Bytes of a chunk: 1,536 + 16 per quarter, 128 per token of x (once per warp, or per group). Lists of patches are
// applied in 1,024 bytes that the warp has free; its partial sums take 80 per quarter and token where its slots were.
//
// WC_SPLIT above 1 (sm_90 and newer): a cluster of that many CTAs shares the rows and splits K; each sums its own
//   groups, hands every CTA the sums of that CTA's outputs, and finishes its own when all of them are there. Less x
//   per SM.
//
// Other macros: WC_TOKENS (1, 8, 16 or 32: tokens at most), WC_MIN_CTAS (per SM, bounds the registers), WC_DECODER
// (0 bf16-w12, 1 uncompressed bricks), WC_OUT_F32 (1: out is FP32), WC_DUMP (1, for tests: instead of the product, out
// gets the decoded A operands in the order of uncompressed bricks).
// Launch: grid = ceil(rows / rows per CTA) × WC_SPLIT in clusters of WC_SPLIT, block = 32 × WC_K_WARPS × WC_ROW_WARPS,
// dynamic shared memory as GemvConfig.shared_bytes counts it.
// x: rows of ldx elements, ldx a multiple of 8, 16-byte aligned; up to the next multiple of 8, zeros follow `cols`.
#include "sm80_gemv_parts.cuh"
#if WC_SPLIT > 1
#include "ptx_sm90.cuh"  // clusters
#endif

using namespace wc;

namespace {

constexpr u32 kTokens = WC_TOKENS, kKWarps = WC_K_WARPS, kRowWarps = WC_ROW_WARPS, kQuarters = WC_QUARTERS;
constexpr u32 kStages = WC_STAGES, kSplit = WC_SPLIT;
constexpr bool kRegisterRing = WC_REGISTER_RING, kEager = WC_EAGER;

#if WC_DECODER == 0
using Decoder = gemv::Bf16W12;
#else
using Decoder = gemv::Bf16;
#endif
#if WC_REGISTER_RING
using Patch = u32;  // word lane % 4 of a patch word
#else
using Patch = u32x4;  // the patch word
#endif
#if WC_OUT_F32
using Out = float;
#else
using Out = u16;
#endif

constexpr u32 kWarps = kKWarps * kRowWarps;
constexpr u32 kGroups = kKWarps * kSplit;  // that share K
constexpr u32 kThreads = 32 * kWarps;
constexpr u32 kRows = kRowWarps * kQuarters * gemv::kQuarterRows;
constexpr u32 kTokenTiles = (kTokens + 7) / 8;
constexpr u32 kPlanes = Decoder::kPlanes;
// Quarters that a warp decodes before it multiplies: two share what ldmatrix reads of x. A ring in registers leaves no
// registers for that.
constexpr u32 kTogether = kRegisterRing ? 1 : kQuarters < 2 ? kQuarters : 2;
constexpr u32 kQuarterBytes = kPlanes * gemv::kPlaneBytes;
constexpr u32 kPatchOffset = gemv::kTile / gemv::kQuarterRows * kQuarterBytes;

// Who shares x: a warp alone, or the row warps of one K group.
constexpr u32 kXWarps = kRegisterRing ? 1 : kRowWarps;
constexpr u32 kXOwners = kWarps / kXWarps;
constexpr u32 kXSlots = kRegisterRing ? 2 : kStages;
constexpr u32 kXSlotBytes = kTokens * 128;
constexpr u32 kXRowsPerCopy = 4 * kXWarps;
constexpr u32 kXCopies = (kTokens + kXRowsPerCopy - 1) / kXRowsPerCopy;
constexpr u32 kXPointers = kRegisterRing ? 1 : kXCopies;  // kept, beside the first

constexpr u32 kWeightSlotBytes = kRegisterRing ? 0 : kQuarters * (kQuarterBytes + Decoder::kPatchBytes);
constexpr u32 kWeightsOffset = kXOwners * kXSlots * kXSlotBytes;

// A warp applies lists of patches in memory of its own that is free just then: where the quarter was, or with a register
// ring in the slot that x is copied to next, beside the slots where that is too small.
constexpr bool kScratch = kRegisterRing && kXSlotBytes < w12::kHighBytes;
constexpr u32 kScratchBytes = kScratch ? w12::kHighBytes : 0;
constexpr u32 kWarpBytes = kStages * kWeightSlotBytes + kScratchBytes;

// Partial sums overlay what their warp alone has used: [quarter][token][row], rows padded against bank conflicts.
constexpr u32 kSumStride = 20;
constexpr u32 kSumFloats = kQuarters * kTokens * kSumStride;
constexpr u32 kSumOffset = kRegisterRing ? 0 : kWeightsOffset;
constexpr u32 kSumPitch = (kRegisterRing ? kXSlots * kXSlotBytes : kStages * kWeightSlotBytes) / 4;

constexpr u32 kFours = kRows * kTokens / 4;  // outputs: four rows of a token at a time
#if WC_SPLIT > 1
// Sums that the CTAs of the cluster hand to this one, [CTA][four outputs], and the barrier that counts their bytes.
// Nothing overlays them.
constexpr u32 kShare = (kFours + kSplit - 1) / kSplit;
constexpr u32 kExchangeOffset = kWeightsOffset + kWarps * kWarpBytes;
constexpr u32 kBarrierOffset = kExchangeOffset + kSplit * kShare * 16;
#endif

static_assert(kTokens == 1 || (kTokens % 8 == 0 && kTokens <= 32), "WC_TOKENS");
static_assert(gemv::kTile % (kQuarters * gemv::kQuarterRows) == 0, "a warp's quarters lie in one brick");
static_assert(kRows > gemv::kTile || gemv::kTile % kRows == 0, "the last CTA's rows lie in the last row tile");
static_assert(kRegisterRing ? kStages == 1 : kStages >= 2, "WC_STAGES");
static_assert(!kEager || (!kRegisterRing && kRowWarps == 1), "WC_EAGER");
static_assert(kSumFloats <= kSumPitch, "partial sums overlay the ring");
static_assert(kSplit >= 1 && kSplit <= 8, "WC_SPLIT");
static_assert(kXWarps == 1 || kKWarps <= 15, "one named barrier per K group beside the CTA's");

WC_DEVICE void sync_sharers(u32 group) {
    if constexpr (kXWarps == 1) {
        __syncwarp();
    } else {
        barrier_sync<32 * kXWarps>(group + 1);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, WC_MIN_CTAS)
    sm80_gemv(const u8* __restrict__ bricks, const u32* __restrict__ overflow, u32 table_lo, u32 table_hi,
              const u16* __restrict__ x, u32 ldx, const u16* __restrict__ bias, Out* __restrict__ out, u32 ldo,
              u32 rows, u32 cols, u32 tokens, u32 overflow_sectors) {
    WC_SHARED_MEMORY(smem);
    // Taken from one lane, the compiler knows that it is the same in all of them.
    const u32 warp = kRegisterRing ? threadIdx.x / 32 : __shfl_sync(~0u, threadIdx.x / 32, 0);
    u32 lane = threadIdx.x % 32;
    keep(lane);  // the thread's index is slow to read
    const u32 tile = blockIdx.x / kSplit, rank = blockIdx.x % kSplit;
    const u32 own_group = warp / kRowWarps, row_warp = warp % kRowWarps;
    const u32 group = rank * kKWarps + own_group;
    const u32 chunks = ceil_div(cols, gemv::kTile);
    const u32 shared = smem_address(smem);
    const Decoder decoder = {{table_lo, table_hi}, overflow};

    // Weights: this warp's quarters of every kGroups-th brick of its row tile.
    u32 quarter = (tile * kRowWarps + row_warp) * kQuarters;
    if constexpr (kRows > gemv::kTile) quarter = min(quarter, ceil_div(rows, gemv::kTile) * 4 - kQuarters);
    const u8* const brick = bricks + static_cast<u64>(quarter / 4 * chunks) * Decoder::kBrickBytes;
    const u8* plane_load = brick + quarter % 4 * kQuarterBytes + lane * 16;
    // A ring in registers keeps a word of the patch word per lane; for one in shared memory a lane fetches all of it.
    const u8* patch_load = brick + kPatchOffset + quarter % 4 * Decoder::kPatchBytes +
                           (kRegisterRing ? lane % 4 * 4 : lane * 16);
    u32 weight_slots = shared + kWeightsOffset + warp * kStages * kWeightSlotBytes + lane * 16;
    u32 patch_slots = shared + kWeightsOffset + warp * kStages * kWeightSlotBytes + kQuarters * kQuarterBytes;

    // x: 16-byte units of 8 columns, swizzled within a token's 128 bytes so that ldmatrix meets no bank conflict.
    const u32 x_slots = shared + (kRegisterRing ? warp : own_group) * kXSlots * kXSlotBytes;
    const u32 x_thread = kXWarps == 1 ? lane : row_warp * 32 + lane;
    const u32 x_token = x_thread / 8, x_unit = x_thread % 8;
    u32 x_store = x_slots + x_token * 128 + (x_unit ^ x_token % 8) * 16;
    const u16* x_loads[kXPointers];
    WC_UNROLL
    for (u32 i = 0; i < kXPointers; ++i) {
        x_loads[i] = x + static_cast<u64>(x_token + i * kXRowsPerCopy) * ldx + x_unit * 8;
        keep(x_loads[i]);
    }
    const u32 matrix_row = kTokens == 1 ? 0 : lane % 8;
    u32 x_matrix = x_slots + matrix_row * 128 + (lane / 8 ^ matrix_row) * 16;

    keep(plane_load);
    keep(patch_load);
    keep(weight_slots);
    keep(patch_slots);
    keep(x_store);
    keep(x_matrix);

    u32x4 planes[kQuarters][kPlanes];  // of a ring in registers
    u32 patches[kQuarters];

    u32 ahead = group;  // the chunk to ask for next

    const auto fill_x = [&](u32 slot, u32 chunk) {
        const bool valid = chunk * gemv::kTile + x_unit * 8 < cols;
        WC_UNROLL
        for (u32 i = 0; i < kXCopies; ++i) {
            // Four tokens further the swizzle flips bit 2 of the unit.
            const u32 flip = kXRowsPerCopy % 8 == 0 ? 0 : i % 2 * 64;
            const u32 token = x_token + i * kXRowsPerCopy;
            if (kTokens % kXRowsPerCopy == 0 || token < kTokens) {
                const u32 to = (x_store ^ flip) + slot * kXSlotBytes + i * kXRowsPerCopy * 128;
                const u16* const from = x_loads[i % kXPointers] + static_cast<u64>(chunk) * gemv::kTile;
                const bool wanted = valid && (kTokens == 1 || token < tokens);
                if constexpr (kRegisterRing) {
                    copy_async_cached(to, from + static_cast<u64>(i * kXRowsPerCopy) * ldx, wanted);
                } else {
                    copy_async(to, from, wanted);
                }
            }
        }
    };
    const auto fill = [&](u32 to) {
        if (ahead < chunks) {
            u32 chunk = ahead;
            keep(chunk);  // one multiply-add per address instead of pointers that move
            const u8* const planes_at = plane_load + static_cast<u64>(chunk) * Decoder::kBrickBytes;
            const u8* const patches_at = patch_load + static_cast<u64>(chunk) * Decoder::kBrickBytes;
            const u32 slot = weight_slots + to * kWeightSlotBytes;
            WC_UNROLL
            for (u32 q = 0; q < kQuarters; ++q) {
                WC_UNROLL
                for (u32 i = 0; i < kPlanes; ++i) {
                    const u32 p = (i + kPlanes - 1) % kPlanes;  // codes first: decoding starts with them
                    const u32 offset = (q * kPlanes + p) * gemv::kPlaneBytes;
                    if constexpr (kRegisterRing) {
                        planes[q][p] = load_once(planes_at + offset);
                    } else {
                        copy_async(slot + offset, planes_at + offset);
                    }
                }
                if constexpr (kRegisterRing && Decoder::kPatchBytes != 0) {
                    patches[q] = load_once_word(patches_at + q * Decoder::kPatchBytes);
                }
            }
            if constexpr (!kRegisterRing && Decoder::kPatchBytes != 0) {
                if (lane < kQuarters) copy_async(slot + kQuarters * kQuarterBytes, patches_at);
            }
            fill_x(to, chunk);
            ahead += kGroups;
        }
        copy_commit();
    };

#if WC_SPLIT > 1
    if (threadIdx.x == 0) {
        const u32 own = min(kShare, kFours - min(rank * kShare, kFours));
        barrier_init(shared + kBarrierOffset, 1);
        barrier_init_fence();
        barrier_expect(shared + kBarrierOffset, kSplit * own * 16);
    }
    __syncwarp();
    cluster_arrive_relaxed();
#endif
    constexpr u32 kAhead = kRegisterRing ? kStages : kStages - 1;
    WC_UNROLL
    for (u32 i = 0; i < kAhead; ++i) fill(i);
    w12::prefetch_overflow(overflow, overflow_sectors, threadIdx.x * gridDim.x + blockIdx.x);

    float sums[kQuarters][kTokenTiles][4] = {};
    u32 stage = 0;  // the slot of the chunk at hand
    // Register ring: x_matrix and x_store point to the two slots of x, `step` from the one to the other.
    u32 step = kXSlotBytes;
    if constexpr (kRegisterRing) x_store += step;
    WC_NO_UNROLL
    for (u32 chunk = group; chunk < chunks; chunk += kGroups) {
        const u32 next = stage == 0 ? kStages - 1 : stage - 1;
        if constexpr (kEager) {
            __syncwarp();  // the chunk before has been read from its slot
            fill(next);
            copy_wait<kAhead>();
            __syncwarp();
        } else {
            copy_wait<kAhead - 1>();
            sync_sharers(own_group);
            if constexpr (!kRegisterRing) fill(next);
        }
        const u32 x_slot = x_matrix + stage * kXSlotBytes;
        WC_UNROLL
        for (u32 q = 0; q < kQuarters; q += kTogether) {
            const u32 slot = weight_slots + stage * kWeightSlotBytes + q * kQuarterBytes;
            u32x4 loaded[kTogether][kPlanes];
            Patch patch[kTogether] = {};
            WC_UNROLL
            for (u32 i = 0; i < kTogether; ++i) {
                WC_UNROLL
                for (u32 p = 0; p < kPlanes; ++p) {
                    loaded[i][p] = kRegisterRing ? planes[q + i][p]
                                                 : load_smem(slot + (i * kPlanes + p) * gemv::kPlaneBytes);
                }
                if constexpr (Decoder::kPatchBytes != 0) {
#if WC_REGISTER_RING
                    patch[i] = patches[q + i];
#else
                    patch[i] = load_smem(patch_slots + stage * kWeightSlotBytes + (q + i) * Decoder::kPatchBytes);
#endif
                }
            }
            const auto scratch = [&](u32 i) {
                if constexpr (!kRegisterRing) return slot + i * kQuarterBytes - lane * 16;
                return kScratch ? shared + kWeightsOffset + warp * kScratchBytes : __shfl_sync(~0u, x_store, 0);
            };
            u32 a[kTogether][16];
            decoder.decode(a, loaded, patch, scratch, lane);
            if (kRegisterRing && q == kQuarters - 1) fill(0);
#if WC_DUMP
            for (u32 i = 0; i < kTogether; ++i) {
                const u32 index = (quarter / 4 * chunks + chunk) * 4 + quarter % 4 + q + i;
                for (u32 r = 0; r < 16; ++r) {
                    reinterpret_cast<u32*>(out)[index * 512 + r / 4 * 128 + lane * 4 + r % 4] = a[i][r];
                }
            }
#endif
            WC_UNROLL
            for (u32 pair = 0; pair < 2; ++pair) {  // two steps: 32 columns
                WC_UNROLL
                for (u32 t = 0; t < kTokenTiles; ++t) {
                    u32 b[4];
                    ldmatrix_x4(b, (x_slot ^ pair * 64) + t * 1024);
                    WC_UNROLL
                    for (u32 half = 0; half < 2; ++half) {
                        WC_UNROLL
                        for (u32 i = 0; i < kTogether; ++i) {
                            mma_m16n8k16(sums[q + i][t], a[i] + 8 * pair + 4 * half, b[2 * half], b[2 * half + 1]);
                        }
                    }
                }
            }
        }
        if constexpr (kRegisterRing) {
            x_matrix += step;
            x_store -= step;
            step = 0 - step;
        } else {
            stage = stage == kStages - 1 ? 0 : stage + 1;
        }
    }

#if WC_DUMP
    return;
#endif
    copy_wait<0>();
    __syncwarp();
    float* const partial = reinterpret_cast<float*>(smem + kSumOffset);
    float* const mine = partial + warp * kSumPitch + lane / 4;
    WC_UNROLL
    for (u32 q = 0; q < kQuarters; ++q) {
        WC_UNROLL
        for (u32 t = 0; t < kTokenTiles; ++t) {
            const u32 token = t * 8 + lane % 4 * 2;
            float* const d = mine + (q * kTokens + token) * kSumStride;
            if (kTokens > 1 || token == 0) {
                d[0] = sums[q][t][0];
                d[8] = sums[q][t][2];
            }
            if (kTokens > 1) {
                d[kSumStride] = sums[q][t][1];
                d[kSumStride + 8] = sums[q][t][3];
            }
        }
    }
    __syncthreads();
    const auto own_sums = [&](u32 i) {  // of the i-th four outputs
        const u32 r = i % 4 * 4, token = i / 4 % kTokens, q = i / 4 / kTokens;
        const float* const column =
            partial + q / kQuarters * kSumPitch + (q % kQuarters * kTokens + token) * kSumStride + r;
        f32x4 sum = {};
        WC_UNROLL
        for (u32 k = 0; k < kKWarps; ++k) {
            gemv::add(sum, *reinterpret_cast<const f32x4*>(column + k * kRowWarps * kSumPitch));
        }
        return sum;
    };
    const bool aligned = (rows | ldo) % 4 == 0 && reinterpret_cast<u64>(out) % (4 * sizeof(Out)) == 0;
    const auto finish = [&](u32 i, f32x4 sum) {
        const u32 token = i / 4 % kTokens, row = tile * kRows + i / 4 / kTokens * 16 + i % 4 * 4;
        if (row >= rows || token >= tokens) return;
        const u32 count = min(4u, rows - row);
        if (bias != nullptr) gemv::add(sum, gemv::load_four(bias + row, count));
        gemv::store_four(out + static_cast<u64>(token) * ldo + row, sum, count, aligned);
    };
#if WC_SPLIT > 1
    cluster_wait();  // all CTAs have started, their barriers expect what they are handed
    WC_NO_UNROLL
    for (u32 i = threadIdx.x; i < kFours; i += kThreads) {
        const u32 owner = i / kShare;
        const u32 place = shared + kExchangeOffset + (rank * kShare + i - owner * kShare) * 16;
        store_async(cluster_address(place, owner), gemv::words(own_sums(i)),
                    cluster_address(shared + kBarrierOffset, owner));
    }
    barrier_wait(shared + kBarrierOffset, 0);
    const f32x4* const handed = reinterpret_cast<const f32x4*>(smem + kExchangeOffset);
    WC_NO_UNROLL
    for (u32 j = threadIdx.x; j < kShare && rank * kShare + j < kFours; j += kThreads) {
        f32x4 sum = {};
        WC_UNROLL
        for (u32 r = 0; r < kSplit; ++r) gemv::add(sum, handed[r * kShare + j]);
        finish(rank * kShare + j, sum);
    }
#else
    WC_NO_UNROLL
    for (u32 i = threadIdx.x; i < kFours; i += kThreads) finish(i, own_sums(i));
#endif
}
