// Router logits for a few tokens: out (tokens × rows, FP32) = x (tokens × cols, BF16) · weightsᵀ (rows × cols, FP32).
//
// Plain FP32 fused multiply-adds on the checkpoint's own weights: exact operands, whatever their values. A CTA owns
// WC_ROWS rows and all of K, so nothing is exchanged between CTAs; 256 rows of 8,192 columns are one wave of 128 CTAs.
// Grid: ceil(rows / WC_ROWS). Block: 256. Every thread has WC_DEPTH runs of 4 columns of every row in flight.
// Sums are added in a fixed order: the same bits every time.
// WC_TOKENS: 1, 2, 4 or 8, at least the number of tokens.

#include "ptx.cuh"

static_assert(WC_TOKENS == 1 || WC_TOKENS == 2 || WC_TOKENS == 4 || WC_TOKENS == 8, "tokens per launch");
static_assert(WC_ROWS == 1 || WC_ROWS == 2 || WC_ROWS == 4, "rows per CTA");
static_assert(WC_DEPTH >= 1 && WC_DEPTH <= 8, "weight loads in flight per row");

namespace {

using namespace wc;

constexpr u32 kWarps = 8;
constexpr u32 kThreads = kWarps * 32;
constexpr u32 kRunCols = 4;
constexpr u32 kStep = kThreads * kRunCols;
constexpr u32 kSums = WC_ROWS * WC_TOKENS;

WC_DEVICE f32x4 load_weights(const float* p, bool inside) {
    f32x4 v = {0, 0, 0, 0};
    if (inside) {
        asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "l"(p));
    }
    return v;
}

WC_DEVICE u32x2 load_tokens(const u16* p, bool inside) {
    u32x2 v = {0, 0};
    if (inside) asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

WC_DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
WC_DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Adds up `kCount` values over the warp. Every lane ends with one of the sums: the one it returns the index of.
template <u32 kCount>
WC_DEVICE u32 sum_over_warp(float (&v)[kCount], u32 lane) {
    u32 index = 0, count = kCount;
    WC_UNROLL
    for (u32 mask = 16; mask; mask /= 2) {
        if (count > 1) {
            // Halve the list: a lane keeps one half and gives the other to its partner.
            count /= 2;
            const bool upper = lane & mask;
            WC_UNROLL
            for (u32 i = 0; i < kCount / 2; ++i) {
                if (i >= count) break;
                const float given = upper ? v[i] : v[i + count], kept = upper ? v[i + count] : v[i];
                v[i] = kept + __shfl_xor_sync(~0u, given, mask);
            }
            index += upper ? count : 0;
        } else {
            v[0] += __shfl_xor_sync(~0u, v[0], mask);
        }
    }
    return index;
}

}  // namespace

// Strides are in elements, multiples of 4; both bases lie on 16 bytes and `cols` is a multiple of 4.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    router_fma(const float* __restrict__ weights, u64 weight_stride, const u16* __restrict__ x, u64 x_stride,
               float* __restrict__ out, u32 rows, u32 cols, u32 tokens) {
    __shared__ float partial[kWarps][kSums];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 first_row = blockIdx.x * WC_ROWS;

    float sums[kSums] = {};
    for (u32 begin = threadIdx.x * kRunCols; begin < cols; begin += WC_DEPTH * kStep) {
        f32x4 w[WC_DEPTH][WC_ROWS];
        WC_UNROLL
        for (u32 d = 0; d < WC_DEPTH; ++d) {
            const u32 col = begin + d * kStep;
            WC_UNROLL
            for (u32 r = 0; r < WC_ROWS; ++r) {
                const u32 row = first_row + r;
                w[d][r] = load_weights(weights + row * weight_stride + col, col < cols && row < rows);
            }
        }
        WC_UNROLL
        for (u32 d = 0; d < WC_DEPTH; ++d) {
            const u32 col = begin + d * kStep;
            WC_UNROLL
            for (u32 m = 0; m < WC_TOKENS; ++m) {
                const u32x2 v = load_tokens(x + m * x_stride + col, col < cols && m < tokens);
                WC_UNROLL
                for (u32 r = 0; r < WC_ROWS; ++r) {
                    float& sum = sums[r * WC_TOKENS + m];
                    sum = fmaf(w[d][r].x, low(v.x), sum);
                    sum = fmaf(w[d][r].y, high(v.x), sum);
                    sum = fmaf(w[d][r].z, low(v.y), sum);
                    sum = fmaf(w[d][r].w, high(v.y), sum);
                }
            }
        }
    }

    const u32 index = sum_over_warp(sums, lane);
    partial[warp][index] = sums[0];  // lanes with the same index hold the same sum
    __syncthreads();
    if (threadIdx.x < kSums) {
        float sum = 0;
        WC_UNROLL
        for (u32 i = 0; i < kWarps; ++i) sum += partial[i][threadIdx.x];
        const u32 row = first_row + threadIdx.x / WC_TOKENS, token = threadIdx.x % WC_TOKENS;
        if (row < rows && token < tokens) out[static_cast<u64>(token) * rows + row] = sum;
    }
}
