// The decoder of sm90_gemm.cu alone, one warp per brick: out gets the A registers in the order of uncompressed bricks.
#include "sm90_gemm_decoder.cuh"

using namespace wc;

extern "C" __global__ void gemm_decode(const u8* bricks, const u32* overflow, u32 table_lo, u32 table_hi, u32* out) {
    WC_SHARED_MEMORY(smem);
    constexpr u32 kBytes = w12::kBrickBytes, kScratch = (kBytes + 127) / 128 * 128;
    const u32 lane = threadIdx.x, brick = smem_address(smem);
    const gemm::Bf16W12<EARLY_PATCHES> decoder = {{table_lo, table_hi}, overflow};
    for (u32 i = lane; i < kBytes; i += 32) smem[i] = bricks[static_cast<u64>(blockIdx.x) * kBytes + i];
    for (u32 i = lane; i < w12::kHighBytes; i += 32) smem[kScratch + i] = 0xA5;
    __syncwarp();
    for (u32 quarter = 0; quarter < w12::kQuarters; ++quarter) {
        gemm::Bf16W12<EARLY_PATCHES>::Share share;
        u32 a[16];
        decoder.load(share, brick, brick + kScratch, quarter, lane);
        decoder.operands(a, share);
        for (u32 r = 0; r < 16; ++r) {
            out[(blockIdx.x * w12::kQuarters + quarter) * 512 + r / 4 * 128 + lane * 4 + r % 4] = a[r];
        }
    }
}
