// Norm and weighted sum over a token's local routes: z = y · (1 + w[e]); out += g · z · rsqrt(mean(z²) + 1e-8).
//
// One CTA per token, THREADS threads, 8 columns of each route per thread at a time; FP32 arithmetic, places in order, so
// that equal inputs give equal bits. A token without local routes gets zeros. y is read twice, the second time from L1.
//
// Macros    COLUMNS (a multiple of 64), EXPERTS, TOP_K, ID_BYTES as in sm90_moe_product.cu; THREADS.
#include "moe_local.cuh"

namespace wc {
namespace moe {

constexpr u32 kColumns = COLUMNS, kTopK = TOP_K, kThreads = THREADS, kWarps = THREADS / 32;
static_assert(kColumns % 64 == 0 && kThreads % 32 == 0, "whole vectors and warps");

WC_DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
WC_DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

WC_DEVICE void scaled(float (&z)[8], const u16* y, const u16* norm) {
    const u32x4 a = *reinterpret_cast<const u32x4*>(y), b = *reinterpret_cast<const u32x4*>(norm);
    const u32 ys[4] = {a.x, a.y, a.z, a.w}, ws[4] = {b.x, b.y, b.z, b.w};
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
    __shared__ float squares[kTopK][kWarps];
    const u32 token = blockIdx.x, tid = threadIdx.x;
    int expert[kTopK];
    WC_UNROLL
    for (u32 k = 0; k < kTopK; ++k) {
        expert[k] = local_expert(ids[token * kTopK + k], local_experts, first_expert, EXPERTS, all_experts);
    }
    y += static_cast<u64>(token) * kTopK * kColumns;
#if __CUDA_ARCH__ >= 900
    // While the product is still running: the norms come from memory, y from L2.
    WC_UNROLL
    for (u32 k = 0; k < kTopK; ++k) {
        for (u32 i = tid * 64; expert[k] >= 0 && i < kColumns; i += kThreads * 64) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(norms + static_cast<u64>(expert[k]) * kColumns + i));
        }
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    WC_UNROLL
    for (u32 k = 0; k < kTopK; ++k) {
        if (expert[k] < 0) continue;
        float sum = 0.0f;
        for (u32 i = tid * 8; i < kColumns; i += kThreads * 8) {
            float z[8];
            scaled(z, y + k * kColumns + i, norms + static_cast<u64>(expert[k]) * kColumns + i);
            WC_UNROLL
            for (u32 j = 0; j < 8; ++j) sum += z[j] * z[j];
        }
        WC_UNROLL
        for (u32 d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (tid % 32 == 0) squares[k][tid / 32] = sum;
    }
    __syncthreads();
    float factor[kTopK];
    WC_UNROLL
    for (u32 k = 0; k < kTopK; ++k) {
        if (expert[k] < 0) continue;
        float sum = 0.0f;
        WC_UNROLL
        for (u32 w = 0; w < kWarps; ++w) sum += squares[k][w];
        factor[k] = gates[token * kTopK + k] * rsqrtf(sum / kColumns + 1e-8f);
    }
    for (u32 i = tid * 8; i < kColumns; i += kThreads * 8) {
        float total[8] = {};
        WC_UNROLL
        for (u32 k = 0; k < kTopK; ++k) {
            if (expert[k] < 0) continue;
            float z[8];
            scaled(z, y + k * kColumns + i, norms + static_cast<u64>(expert[k]) * kColumns + i);
            WC_UNROLL
            for (u32 j = 0; j < 8; ++j) total[j] += factor[k] * z[j];
        }
        u32x4 v;
        v.x = bf16_pair(total[0], total[1]);
        v.y = bf16_pair(total[2], total[3]);
        v.z = bf16_pair(total[4], total[5]);
        v.w = bf16_pair(total[6], total[7]);
        *reinterpret_cast<u32x4*>(out + static_cast<u64>(token) * kColumns + i) = v;
    }
}
