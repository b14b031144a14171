// Router logits on wgmma: out (tokens × rows, FP32) = x (tokens × cols, BF16) · weightsᵀ (rows × cols, FP32), exact.
//
// Each FP32 weight is split in registers into WC_PARTS BF16 values (high first, each the rounded rest of the ones before),
// which the caller knows to add up to the weight exactly; every part is multiplied as the A operand and all products
// accumulate in FP32. The checkpoint's own 4 bytes per weight are what is read.
//
// Grid: (splits, ceil(rows / 64), ceil(tokens / WC_TOKENS)), at most one CTA per SM and all resident; splits is a power of
// two up to 64, K is cut into steps of 64 columns and the steps into `splits` even ranges.
// Roles: the last warp copies (TMA) weights and tokens into a ring of WC_STAGES stages; WC_CONSUMERS warpgroups take the
// stages in turn, each with sums of its own.
// Bytes per stage: 16,384 of weights (two boxes of 32 columns × 64 rows), 128 WC_TOKENS of tokens.
// Exchange: the warpgroups' sums meet in shared memory; then CTA r of a tile owns slice r, and the others send it theirs
// through L2. A word is sent inverted, and a word that is still zero has not come: the sums are their own flags (no sum
// has the inverse of zero, a NaN that no instruction makes). Read words are set back to zero for the next launch.

#include "ptx_sm90.cuh"

static_assert(WC_PARTS == 2 || WC_PARTS == 3, "BF16 values per weight");
static_assert(WC_TOKENS == 16 || WC_TOKENS == 32 || WC_TOKENS == 64, "tokens per CTA");
static_assert(WC_STAGES >= 2 && WC_STAGES <= 8, "stages of the ring");
static_assert(WC_CONSUMERS == 1 || WC_CONSUMERS == 2 || WC_CONSUMERS == 4, "consumer warpgroups");
// Every stage has one consumer for good: a second one could look at a phase that the first has not seen the end of.
static_assert(WC_STAGES % WC_CONSUMERS == 0, "stages are dealt out evenly");

namespace {

using namespace wc;

constexpr u32 kRows = 64;
constexpr u32 kStepCols = 64;
constexpr u32 kBoxCols = 32;  // of weights: 128 bytes, the width of the swizzle
constexpr u32 kBoxBytes = kRows * kBoxCols * 4;
constexpr u32 kTokenBytes = WC_TOKENS * kStepCols * 2;
constexpr u32 kStageBytes = 2 * kBoxBytes + kTokenBytes;
constexpr u32 kConsumerThreads = WC_CONSUMERS * 128;
constexpr u32 kThreads = kConsumerThreads + 32;
constexpr u32 kSlots = WC_TOKENS / 8 * 128;  // 16-byte pieces of a tile's sums: one per n8 tile and thread
constexpr u32 kSlotsPerThread = (kSlots + kConsumerThreads - 1) / kConsumerThreads;

struct Shared {
    u8 stages[WC_STAGES][kStageBytes];
    f32x4 sums[WC_CONSUMERS][kSlots];
    u64 full[WC_STAGES], empty[WC_STAGES];
};
static_assert(sizeof(Shared) + 1024 <= 227 * 1024, "shared memory of an SM");

// Fragment row g holds this row of its group of eight, so that the lanes of a half-warp read from different banks.
WC_DEVICE u32 spread_row(u32 g) { return 2 * (g % 4) + g / 4; }

struct Pair {
    float lo, hi;
};

WC_DEVICE Pair load_pair(u32 address) {
    Pair v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.lo), "=f"(v.hi) : "r"(address));
    return v;
}

// Rounds two weights to a BF16 pair and leaves their rests.
WC_DEVICE u32 take_part(Pair& v) {
    const u32 pair = bf16_pair(v.lo, v.hi);
    v.lo -= __uint_as_float(pair << 16);
    v.hi -= __uint_as_float(pair & 0xffff0000u);
    return pair;
}

struct Producer {
    const TensorMap* weights;
    const TensorMap* tokens;
    u32 row, token;
    u64 weight_policy;

    // Fills the stage of step `k` of this CTA; `col` is where it begins.
    WC_DEVICE void load(Shared& shared, u32 k, u32 col) const {
        const u32 stage = k % WC_STAGES, full = smem_address(&shared.full[stage]);
        const u32 to = smem_address(shared.stages[stage]);
        barrier_expect(full, kStageBytes);
        tensor_copy(to, weights, col, row, full, weight_policy);
        tensor_copy(to + kBoxBytes, weights, col + kBoxCols, row, full, weight_policy);
        tensor_copy(to + 2 * kBoxBytes, tokens, col, token, full, kEvictLast);
    }
};

struct Consumer {
    float sums[WC_TOKENS / 2] = {};

    // Multiplies one stage. `lane_row` is the byte offset of this lane's upper row, `spread` its place under the swizzle.
    WC_DEVICE void multiply(u32 stage, u32 lane_row, u32 spread, u32 t) {
        u32 a[kStepCols / 16][WC_PARTS][4];
        const u64 b = wgmma_descriptor(stage + 2 * kBoxBytes);
        WC_UNROLL
        for (u32 j = 0; j < kStepCols / 16; ++j) {
            const u32 row = stage + j / 2 * kBoxBytes + lane_row + t % 2 * 8;
            const u32 chunk = j % 2 * 4 + t / 2;
            const u32 left = row + ((chunk ^ spread) << 4), right = row + (((chunk + 2) ^ spread) << 4);
            Pair v[4] = {load_pair(left), load_pair(left + 1024), load_pair(right), load_pair(right + 1024)};
            WC_UNROLL
            for (u32 part = 0; part < WC_PARTS; ++part) {
                WC_UNROLL
                for (u32 i = 0; i < 4; ++i) a[j][part][i] = take_part(v[i]);
            }
            wgmma_fence();
            WC_UNROLL
            for (u32 part = 0; part < WC_PARTS; ++part) Wgmma<WC_TOKENS>::mma(sums, a[j][part], b + 2 * j);
            wgmma_commit();
        }
        wgmma_wait<0>();
    }
};

WC_DEVICE u32x4 inverted(f32x4 v) {
    return {~__float_as_uint(v.x), ~__float_as_uint(v.y), ~__float_as_uint(v.z), ~__float_as_uint(v.w)};
}

WC_DEVICE f32x4 restored(u32x4 v) {
    return {__uint_as_float(~v.x), __uint_as_float(~v.y), __uint_as_float(~v.z), __uint_as_float(~v.w)};
}

WC_DEVICE f32x4 add(f32x4 a, f32x4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

}  // namespace

// `inboxes` holds 16 bytes per CTA of the grid and slot, zero before the first launch and again after each.
// `slice_shift` is log2(slots / splits).
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_router(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens_map,
                float* __restrict__ out, u32x4* __restrict__ inboxes, u32 rows, u32 cols, u32 tokens,
                u32 slice_shift) {
    extern __shared__ u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw + (-smem_address(raw) & 1023));
    const u32 rank = blockIdx.x, splits = gridDim.x;
    const u32 first_row = blockIdx.y * kRows, first_token = blockIdx.z * WC_TOKENS;
    const u32 steps = ceil_div(cols, kStepCols);
    const u32 begin = steps * rank / splits, count = steps * (rank + 1) / splits - begin;
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

    // Weights that no other CTA reads need not stay in L2.
    const Producer producer = {&weights, &tokens_map, first_row, first_token,
                               gridDim.z == 1 ? kEvictFirst : kEvictLast};
    const bool copies = thread == kConsumerThreads;
    if (copies) {
        WC_UNROLL
        for (u32 i = 0; i < WC_STAGES; ++i) {
            barrier_init(smem_address(&shared.full[i]), 1);
            barrier_init(smem_address(&shared.empty[i]), 4);
        }
        barrier_init_fence();
        for (u32 k = 0; k < count && k < WC_STAGES; ++k) producer.load(shared, k, (begin + k) * kStepCols);
    }
    __syncthreads();

    if (copies) {
        for (u32 k = WC_STAGES; k < count; ++k) {
            barrier_wait(smem_address(&shared.empty[k % WC_STAGES]), k / WC_STAGES % 2 ^ 1);
            producer.load(shared, k, (begin + k) * kStepCols);
        }
    } else if (thread < kConsumerThreads) {
        Consumer consumer;
        const u32 g = lane / 4, t = lane % 4, group = thread / 128;
        const u32 spread = spread_row(g), lane_row = (warp % 4 * 16 + spread) * (kBoxCols * 4);
        for (u32 k = group; k < count; k += WC_CONSUMERS) {
            const u32 stage = k % WC_STAGES;
            barrier_wait(smem_address(&shared.full[stage]), k / WC_STAGES % 2);
            consumer.multiply(smem_address(shared.stages[stage]), lane_row, spread, t);
            if (lane == 0) barrier_arrive(smem_address(&shared.empty[stage]));
        }
        WC_UNROLL
        for (u32 i = 0; i < WC_TOKENS / 8; ++i) {
            const float* s = consumer.sums + 4 * i;
            shared.sums[group][i * 128 + thread % 128] = {s[0], s[1], s[2], s[3]};
        }
    }
    __syncthreads();
    if (thread >= kConsumerThreads) return;

    // Send: slot q belongs to the CTA whose slice it lies in.
    const u32 slice = 1u << slice_shift;
    const u64 tile = (static_cast<u64>(blockIdx.z) * gridDim.y + blockIdx.y) * splits;
    WC_UNROLL
    for (u32 i = 0; i < kSlotsPerThread; ++i) {
        const u32 q = thread + i * kConsumerThreads;
        if (q >= kSlots) break;
        f32x4 sum = shared.sums[0][q];
        WC_UNROLL
        for (u32 c = 1; c < WC_CONSUMERS; ++c) sum = add(sum, shared.sums[c][q]);
        const u64 inbox = (tile + (q >> slice_shift)) * kSlots;
        store_relaxed(inboxes + inbox + rank * slice + (q & (slice - 1)), inverted(sum));
    }

    // Receive: `splits` pieces of every slot of this CTA's slice, which lie one after the other.
    u32x4* inbox = inboxes + (tile + rank) * kSlots;
    u32x4 piece[kSlotsPerThread];
    bool complete;
    do {
        complete = true;
        WC_UNROLL
        for (u32 i = 0; i < kSlotsPerThread; ++i) {
            const u32 e = thread + i * kConsumerThreads;
            if (e < kSlots) piece[i] = load_relaxed(inbox + e);
        }
        WC_UNROLL
        for (u32 i = 0; i < kSlotsPerThread; ++i) {
            const u32x4 v = piece[i];
            if (thread + i * kConsumerThreads < kSlots) complete = complete && v.x && v.y && v.z && v.w;
        }
    } while (!complete);
    f32x4 sum = {0, 0, 0, 0};
    WC_UNROLL
    for (u32 i = 0; i < kSlotsPerThread; ++i) {
        const u32 e = thread + i * kConsumerThreads;
        if (e < kSlots) {
            sum = add(sum, restored(piece[i]));
            store_relaxed(inbox + e, {0, 0, 0, 0});
        }
    }
    // Threads a multiple of the slice apart hold pieces of the same slot.
    f32x4* meet = shared.sums[0];
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory");
    meet[thread] = sum;
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory");
    if (thread >= slice) return;
    for (u32 other = thread + slice; other < kConsumerThreads; other += slice) sum = add(sum, meet[other]);

    const u32 q = rank * slice + thread, g = q % 32 / 4, t = q % 4;
    const u32 row = first_row + q % 128 / 32 * 16 + spread_row(g), token = first_token + q / 128 * 8 + 2 * t;
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    WC_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        const u32 r = row + i / 2 * 8, m = token + i % 2;
        if (r < rows && m < tokens) out[static_cast<u64>(m) * rows + r] = values[i];
    }
}
