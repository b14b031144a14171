// Router logits: out (tokens × rows, FP32) = x (tokens × cols, BF16) · weightsᵀ (rows × cols, FP32), exact weights.
//
// Each FP32 weight is split in registers into WC_PARTS BF16 values (high first, each the rounded rest of the one before),
// which the caller knows to add up to the weight exactly; every part is multiplied on the tensor cores and all products
// accumulate in FP32. So the kernel reads the checkpoint's own 4 bytes per weight, as a pair of BF16 would.
//
// Grid: (8, ceil(rows / kTileRows), ceil(tokens / kTileTokens)), clusters of (8, 1, 1). Block: 256.
// Roles: none. Warps are laid out WC_WARP_ROWS × WC_WARP_TOKENS, and what is left of the 8 shares K with the cluster's
// other CTAs, a chunk of 32 columns at a time, WC_DEPTH chunks in flight per warp. A warp owns WC_ROW_TILES × 16 rows and
// WC_TOKEN_TILES × 8 tokens.
// In the end lane 4 g + t sends its partial sums straight into the inbox of CTA g, which adds them up in a fixed order:
// one way through distributed shared memory, no second pass, no atomics, the same bits every time.
// Dynamic shared memory: the inbox, 64 bytes per tile of 16 rows × 8 tokens and per warp that shares K.
// Inside a chunk, lane 4 g + t holds columns 8 t … 8 t + 7 of its rows and tokens: 16-byte loads of both, and the same
// permutation of K in both operands.

#include "ptx_sm90.cuh"

static_assert(WC_PARTS == 2 || WC_PARTS == 3, "BF16 values per weight");
static_assert(WC_ROW_TILES >= 1 && WC_ROW_TILES <= 4, "tiles of 16 rows per warp");
static_assert(WC_TOKEN_TILES >= 1 && WC_TOKEN_TILES <= 8, "tiles of 8 tokens per warp");
static_assert(8 % (WC_WARP_ROWS * WC_WARP_TOKENS) == 0, "eight warps");
static_assert(WC_DEPTH >= 1 && WC_DEPTH <= 8, "chunks in flight per warp");

namespace {

using namespace wc;

constexpr u32 kCluster = 8;
constexpr u32 kWarps = 8;
constexpr u32 kThreads = kWarps * 32;
constexpr u32 kWarpsAlongK = kWarps / (WC_WARP_ROWS * WC_WARP_TOKENS);
constexpr u32 kSources = kCluster * kWarpsAlongK;  // warps that share K
constexpr u32 kChunkCols = 32;
constexpr u32 kStep = kSources * kChunkCols;  // columns from one chunk of a warp to its next
constexpr u32 kTiles = WC_ROW_TILES * WC_TOKEN_TILES;  // of one warp
constexpr u32 kTileRows = 16 * WC_ROW_TILES * WC_WARP_ROWS;
constexpr u32 kTileTokens = 8 * WC_TOKEN_TILES * WC_WARP_TOKENS;
constexpr u32 kInboxTiles = kTiles * WC_WARP_ROWS * WC_WARP_TOKENS;
constexpr u32 kTileBytes = kSources * 64;  // one tile's sums for one CTA: 16 × 8 / 8 floats from each warp
constexpr u32 kInboxBytes = kInboxTiles * kTileBytes;
static_assert(kInboxBytes < 1 << 20, "an mbarrier counts up to 2^20 - 1 bytes");

struct Chunk {
    f32x4 w[WC_ROW_TILES][2][2];  // tile, row g or g + 8, columns 8 t … 8 t + 3 or 8 t + 4 … 8 t + 7
    u32x4 x[WC_TOKEN_TILES];
};

WC_DEVICE f32x4 load_weights(const float* p, bool inside) {
    f32x4 v = {0, 0, 0, 0};
    if (inside) {
        asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "l"(p));
    }
    return v;
}

WC_DEVICE u32x4 load_tokens(const u16* p, bool inside) {
    u32x4 v = {0, 0, 0, 0};
    if (inside) {
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(p));
    }
    return v;
}

// Rounds two weights to a BF16 pair and leaves their rests.
WC_DEVICE u32 take_part(float& lo, float& hi) {
    const u32 pair = bf16_pair(lo, hi);
    lo -= __uint_as_float(pair << 16);
    hi -= __uint_as_float(pair & 0xffff0000u);
    return pair;
}

WC_DEVICE void multiply(float (&sums)[kTiles][4], const Chunk& chunk) {
    WC_UNROLL
    for (u32 step = 0; step < 2; ++step) {
        WC_UNROLL
        for (u32 r = 0; r < WC_ROW_TILES; ++r) {
            f32x4 top = chunk.w[r][0][step], bottom = chunk.w[r][1][step];
            WC_UNROLL
            for (u32 part = 0; part < WC_PARTS; ++part) {
                u32 a[4];
                a[0] = take_part(top.x, top.y);
                a[1] = take_part(bottom.x, bottom.y);
                a[2] = take_part(top.z, top.w);
                a[3] = take_part(bottom.z, bottom.w);
                WC_UNROLL
                for (u32 n = 0; n < WC_TOKEN_TILES; ++n) {
                    const u32x4 x = chunk.x[n];
                    mma_m16n8k16(sums[r * WC_TOKEN_TILES + n], a, step ? x.z : x.x, step ? x.w : x.y);
                }
            }
        }
    }
}

WC_DEVICE u32 remote_address(u32 smem, u32 cta) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(cta));
    return address;
}

// 16 bytes into another CTA's shared memory, counted by that CTA's barrier.
WC_DEVICE void send(u32 address, u32 barrier, const float (&v)[4]) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address),
                 "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
                 : "memory");
}

// Waits for the first phase of a barrier that other CTAs complete.
WC_DEVICE void wait_for_cluster(u32 barrier) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra wait;\n"
        "}" ::"r"(barrier)
        : "memory");
}

WC_DEVICE float sum_over_sources(float v) {
    WC_UNROLL
    for (u32 mask = 4; mask < 32; mask *= 2) v += __shfl_xor_sync(~0u, v, mask);
    return v;
}

}  // namespace

// Strides are in elements, multiples of 4 (weights) and 8 (x); both bases lie on 16 bytes and `cols` is a multiple of 8.
extern "C" __global__ void __launch_bounds__(kThreads, WC_CTAS_PER_SM)
    router(const float* __restrict__ weights, u64 weight_stride, const u16* __restrict__ x, u64 x_stride,
           float* __restrict__ out, u32 rows, u32 cols, u32 tokens) {
    extern __shared__ __align__(16) u8 inbox[];
    __shared__ u64 arrived;
    const u32 rank = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 g = lane / 4, t = lane % 4;
    const u32 source = rank * kWarpsAlongK + warp % kWarpsAlongK;  // place among the warps that share K
    const u32 group = warp / kWarpsAlongK;                         // place among the warps of other rows or tokens
    const u32 tile_row = blockIdx.y * kTileRows, tile_token = blockIdx.z * kTileTokens;
    const u32 first_row = tile_row + group / WC_WARP_TOKENS * (16 * WC_ROW_TILES) + g;
    const u32 first_token = tile_token + group % WC_WARP_TOKENS * (8 * WC_TOKEN_TILES) + g;

    // One pointer per operand: steps along rows are added as they are needed, to keep registers for loads in flight.
    u32 col = source * kChunkCols + 8 * t;
    const float* w = weights + first_row * weight_stride + col;
    const u16* tokens_from = x + first_token * x_stride + col;

    Chunk ring[WC_DEPTH];
    const auto load = [&](Chunk& chunk) {
        const bool inside = col < cols;
        WC_UNROLL
        for (u32 half = 0; half < 2 * WC_ROW_TILES; ++half) {
            const float* row = w + half * 8 * weight_stride;
            const bool wanted = inside && first_row + 8 * half < rows;
            chunk.w[half / 2][half % 2][0] = load_weights(row, wanted);
            chunk.w[half / 2][half % 2][1] = load_weights(row + 4, wanted);
        }
        WC_UNROLL
        for (u32 n = 0; n < WC_TOKEN_TILES; ++n) {
            chunk.x[n] = load_tokens(tokens_from + n * 8 * x_stride, inside && first_token + 8 * n < tokens);
        }
        col += kStep;
        w += kStep;
        tokens_from += kStep;
    };
    WC_UNROLL
    for (u32 d = 0; d < WC_DEPTH; ++d) load(ring[d]);

    // The barrier is needed only when the sums are ready: set up behind the first loads.
    const u32 barrier = smem_address(&arrived);
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_expect(barrier, kInboxBytes);
        barrier_init_fence();
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");

    float sums[kTiles][4] = {};
    for (u32 begin = 0; begin < cols; begin += WC_DEPTH * kStep) {
        WC_UNROLL
        for (u32 d = 0; d < WC_DEPTH; ++d) {
            multiply(sums, ring[d]);
            load(ring[d]);
        }
    }

    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const u32 slot = smem_address(inbox) + group * (kTiles * kTileBytes) + source * 64 + t * 16;
    const u32 there = remote_address(slot, g), barrier_there = remote_address(barrier, g);
    WC_UNROLL
    for (u32 i = 0; i < kTiles; ++i) send(there + i * kTileBytes, barrier_there, sums[i]);

    // This CTA's rows are rank and rank + 8 of every row tile; a warp takes a tile at a time.
    wait_for_cluster(barrier);
    for (u32 i = warp; i < kInboxTiles; i += kWarps) {
        const f32x4* from = reinterpret_cast<const f32x4*>(inbox + i * kTileBytes) + lane;
        f32x4 sum = {0, 0, 0, 0};
        WC_UNROLL
        for (u32 k = 0; k < kSources / 8; ++k) {
            const f32x4 v = from[32 * k];
            sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
        }
        const float s0 = sum_over_sources(sum.x), s1 = sum_over_sources(sum.y);
        const float s2 = sum_over_sources(sum.z), s3 = sum_over_sources(sum.w);
        const u32 of = i / kTiles, tile = i % kTiles;  // whose warps' tile, and which
        const u32 row = tile_row + 16 * (of / WC_WARP_TOKENS * WC_ROW_TILES + tile / WC_TOKEN_TILES) + rank + g / 2 % 2 * 8;
        const u32 token = tile_token + 8 * (of % WC_WARP_TOKENS * WC_TOKEN_TILES + tile % WC_TOKEN_TILES) + 2 * t + g % 2;
        if (g < 4 && row < rows && token < tokens) {
            out[static_cast<u64>(token) * rows + row] = g == 0 ? s0 : g == 1 ? s1 : g == 2 ? s2 : s3;
        }
    }
}
