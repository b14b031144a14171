// Norm and weighted sum over a token's local routes: z = y · (1 + w[e]); out += g · z · rsqrt(mean(z²) + 1e-8).
//
// One CTA per token, THREADS threads, 8 columns of each route per thread and kAtOnce routes at a time; FP32 arithmetic,
// places in order, so that equal inputs give equal bits. A token without local routes gets zeros. y is read twice, the
// second time from L1. Short code: a cold call fetches every instruction from memory.
//
// Macros    COLUMNS (a multiple of 64), EXPERTS, TOP_K, ID_BYTES as in sm90_moe_product.cu; THREADS.
#include "moe_local.cuh"

namespace wc {
namespace moe {

constexpr u32 kColumns = COLUMNS, kTopK = TOP_K, kThreads = THREADS, kWarps = THREADS / 32;
constexpr u32 kAtOnce = TOP_K < 2 ? 1 : 2;
static_assert(kColumns % 64 == 0 && kThreads % 32 == 0, "whole vectors and warps");

WC_DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
WC_DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// A route whose expert is local.
struct Local {
    u32 place, expert;
    float gate;
};

// Eight columns of y and of the norm.
struct Columns {
    u32x4 y, norm;
};

WC_DEVICE void scaled(float (&z)[8], const Columns& c) {
    const u32 ys[4] = {c.y.x, c.y.y, c.y.z, c.y.w}, ws[4] = {c.norm.x, c.norm.y, c.norm.z, c.norm.w};
    WC_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        z[2 * i] = low(ys[i]) * (1.0f + low(ws[i]));
        z[2 * i + 1] = high(ys[i]) * (1.0f + high(ws[i]));
    }
}

}  // namespace moe
}  // namespace wc

extern "C" __global__ void __launch_bounds__(THREADS)
    sm80_moe_sum(const wc::u16* y, const wc::u16* __restrict__ norms, const float* __restrict__ gates, wc::u16* out,
                 const wc::moe::RouteId* __restrict__ ids, const int* __restrict__ local_experts,
                 wc::u32 first_expert, wc::u32 all_experts) {
    using namespace wc;
    using namespace wc::moe;
    __shared__ __align__(16) float squares[kTopK][kWarps];
    __shared__ Local routes[kTopK];
    __shared__ float factors[kTopK];
    __shared__ u32 local_routes;
    const u32 token = blockIdx.x, tid = threadIdx.x;
    if (tid < 32) {
        u32 n = 0;
        WC_NO_UNROLL
        for (u32 base = 0; base < kTopK; base += 32) {
            const u32 k = base + tid, at = token * kTopK + k;
            int expert = -1;
            if (k < kTopK) expert = local_expert(ids[at], local_experts, first_expert, EXPERTS, all_experts);
            const u32 here = __ballot_sync(~0u, expert >= 0);
            if (expert >= 0) routes[n + __popc(here & ((1u << tid) - 1))] = {k, static_cast<u32>(expert), gates[at]};
            n += __popc(here);
        }
        if (tid == 0) local_routes = n;
    }
    __syncthreads();
    const u32 n = local_routes;
    y += static_cast<u64>(token) * kTopK * kColumns;
    const auto load = [&](Columns (&c)[kAtOnce], u32 first, u32 i) {
        WC_UNROLL
        for (u32 r = 0; r < kAtOnce; ++r) {
            c[r] = {};
            if (first + r >= n) continue;
            const Local route = routes[first + r];
            c[r].y = *reinterpret_cast<const u32x4*>(y + route.place * kColumns + i);
            c[r].norm = *reinterpret_cast<const u32x4*>(norms + static_cast<u64>(route.expert) * kColumns + i);
        }
    };
#if __CUDA_ARCH__ >= 900
    // While the product is still running: the norms come from memory, y from L2.
    WC_NO_UNROLL
    for (u32 r = 0; r < n; ++r) {
        const u16* const norm = norms + static_cast<u64>(routes[r].expert) * kColumns;
        WC_NO_UNROLL
        for (u32 i = tid * 64; i < kColumns; i += kThreads * 64) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(norm + i));
        }
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    WC_NO_UNROLL
    for (u32 first = 0; first < n; first += kAtOnce) {
        float sum[kAtOnce] = {};
        WC_NO_UNROLL
        for (u32 i = tid * 8; i < kColumns; i += kThreads * 8) {
            Columns c[kAtOnce];
            load(c, first, i);
            WC_UNROLL
            for (u32 r = 0; r < kAtOnce; ++r) {
                float z[8];
                scaled(z, c[r]);
                WC_UNROLL
                for (u32 j = 0; j < 8; ++j) sum[r] += z[j] * z[j];
            }
        }
        WC_UNROLL
        for (u32 d = 16; d > 0; d /= 2) {
            WC_UNROLL
            for (u32 r = 0; r < kAtOnce; ++r) sum[r] += __shfl_xor_sync(~0u, sum[r], d);
        }
        WC_UNROLL
        for (u32 r = 0; r < kAtOnce; ++r) {
            if (tid % 32 == 0 && first + r < n) squares[first + r][tid / 32] = sum[r];
        }
    }
    __syncthreads();
    WC_NO_UNROLL
    for (u32 r = tid; r < n; r += kThreads) {
        float sum = 0.0f;
        WC_UNROLL
        for (u32 w = 0; w < kWarps; ++w) sum += squares[r][w];
        factors[r] = routes[r].gate * rsqrtf(sum / kColumns + 1e-8f);
    }
    __syncthreads();
    WC_NO_UNROLL
    for (u32 i = tid * 8; i < kColumns; i += kThreads * 8) {
        float total[8] = {};
        WC_NO_UNROLL
        for (u32 first = 0; first < n; first += kAtOnce) {
            Columns c[kAtOnce];
            load(c, first, i);
            WC_UNROLL
            for (u32 r = 0; r < kAtOnce; ++r) {
                if (first + r >= n) continue;
                float z[8];
                scaled(z, c[r]);
                WC_UNROLL
                for (u32 j = 0; j < 8; ++j) total[j] += factors[first + r] * z[j];
            }
        }
        u32x4 v;
        v.x = bf16_pair(total[0], total[1]);
        v.y = bf16_pair(total[2], total[3]);
        v.z = bf16_pair(total[4], total[5]);
        v.w = bf16_pair(total[6], total[7]);
        *reinterpret_cast<u32x4*>(out + static_cast<u64>(token) * kColumns + i) = v;
    }
}
