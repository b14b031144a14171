// One product of the routed experts, W4A16: `nvfp4-s5` bricks with raw scales times BF16 tokens, FP32 sums.
//
// GATED 1: out[route] = silu(f_gate · W_gate x[token]) · (f_up · W_up x[token]), gate and up rows interleaved by eights.
// GATED 0: out[route] = f · W x[route], natural order.
// Route r is place r % TOP_K of token r / TOP_K; rows of `out` of routes that are not local stay untouched. Tokens of
// experts with at most SYNC_TOKENS and FEW_TOKENS of them are read from `natural`, and a gated product stores their
// columns in natural order; those of the others are read from `ordered` and stored in the order of the bricks' columns.
//
// Tile      64 rows × 8 … 128 tokens, weights as register A, tokens as B from shared memory.
// Roles     four warpgroups of equals, one CTA per SM. Experts with at most FEW_TOKENS tokens: tokens resident, the
//           warpgroups split K; of half a row tile, two warps of each split its share once more. More: one row tile
//           per warpgroup, tokens streamed through STAGES stages of 32 KB.
// Weights   straight to registers, RING chunks (4 or 2 of experts with many tokens) of 16 + 2 bytes per lane in flight:
//           2,304 bytes per brick, read once for each pass.
// Macros    N_ROWS, K_COLUMNS per expert (multiples of 64); EXPERTS local ones; TOP_K; ROUTES upper bound of tokens ·
//           TOP_K (≤ 65,536); ID_BYTES 4, 8; GATED 0, 1; FEW_TOKENS 8, 16, 24; SYNC_TOKENS, up to which mma.sync beats
//           wgmma; WIDE_TOKENS, most tokens of a pass; RING; STAGES; MANY, …_PRICE…: see moe_routes.cuh.
// Grid      any number of CTAs up to 512; shared memory as `kernels/moe.py` computes it.
#include "sm90_moe_loops.cuh"

namespace wc {
namespace moe {

WC_DEVICE void many_tokens_of(const Context& c, u32 index) {
    const u32 n = route_table().passes[index / kGroups].count;
    if (n <= 32) {
        many_tokens<32>(c, index);
    } else if (n <= 64) {
        many_tokens<64>(c, index);
    } else {
        many_tokens<kWide>(c, index);
    }
}

WC_DEVICE void few_tokens_of(const Context& c) {
    const u32 n = next_part().pass.count;
    if (kFew == 8 || n <= 8) {
        few_tokens<8>(c);
    } else if (kFew == 16 || n <= 16) {
        few_tokens<(kFew > 16 ? 16 : kFew)>(c);
    } else {
        few_tokens<kFew>(c);
    }
}

}  // namespace moe
}  // namespace wc

extern "C" __global__ void __launch_bounds__(wc::moe::kThreads, 1)
    sm90_moe_product(const wc::u8* __restrict__ weights, const float* __restrict__ factors, const wc::u16* natural,
                     const wc::u16* ordered, wc::u16* out, const wc::moe::RouteId* __restrict__ ids,
                     const int* __restrict__ local_experts, wc::u32 first_expert, wc::u32 all_experts, wc::u32 routes) {
    using namespace wc;
    using namespace wc::moe;
    RouteTable& table = route_table();

    launch_dependents();
    if (threadIdx.x < kSorters) {
        SortScratch& scratch = *reinterpret_cast<SortScratch*>(shared);
        sort_routes<kUnits, kSorters>(table, scratch, ids, routes, local_experts, first_expert, all_experts);
        deal<kUnits, kGrains, kSorters>(table, scratch);
    }
    if (!kMany) __syncthreads();

    const Context c{weights, factors, natural, ordered, out};
    if constexpr (kMany) {
        for (u32 i = blockIdx.x; i < table.pass_total * kGroups; i += gridDim.x) many_tokens_of(c, i);
        __syncthreads();
    }
    while (table.begin < table.end) {
        few_tokens_of(c);
        __syncthreads();
        if (threadIdx.x == 0) table.begin = (table.begin / (kUnits * kGrains) + 1) * (kUnits * kGrains);
        __syncthreads();
    }
    grid_dependency_wait();  // so that the next kernel's wait covers the one before this
}
