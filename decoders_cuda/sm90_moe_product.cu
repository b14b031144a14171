// One product of the routed experts, W4A16: `nvfp4-s5` bricks with raw scales times BF16 tokens, FP32 sums.
//
// GATED 1: out[route] = silu(f_gate · W_gate x[token]) · (f_up · W_up x[token]), gate and up rows interleaved by eights,
//          columns in the order of the bricks' columns. GATED 0: out[route] = f · W x[route], natural order.
// Route r is place r % TOP_K of token r / TOP_K; rows of `out` of routes that are not local stay untouched.
//
// Tile      64 rows × 8 … 128 tokens per warpgroup, weights as register A, tokens as B from shared memory.
// Roles     four warpgroups of equals, one CTA per SM. Experts with at most FEW_TOKENS tokens: tokens resident, the
//           warpgroups split K. More: one row tile per warpgroup, tokens streamed through STAGES stages.
// Weights   straight to registers, RING chunks of 16 + 2 bytes per lane in flight: 2,304 bytes per brick, read once.
// Macros    N_ROWS, K_COLUMNS per expert (multiples of 64); EXPERTS local ones; TOP_K; ROUTES upper bound of tokens ·
//           TOP_K (≤ 65,536); ID_BYTES 4, 8; GATED 0, 1; NATURAL 1: x in natural column order, else in the bricks';
//           FEW_TOKENS 8, 16, 24; SYNC_TOKENS, up to which mma.sync beats wgmma; WIDE_TOKENS, most tokens of a pass;
//           RING; STAGES; GROUP_COST, GROUP_COST_PER_TOKEN: see moe_routes.cuh.
// Grid      any number of CTAs up to 512; shared memory as `kernels/moe.py` computes it.
#include "sm90_moe_loops.cuh"

namespace wc {
namespace moe {

WC_DEVICE void many_tokens_of(const Context& c, Pass pass, u32 tiles, bool first) {
    if (pass.count <= 32) {
        many_tokens<32>(c, pass, tiles, first);
    } else if (pass.count <= 64) {
        many_tokens<64>(c, pass, tiles, first);
    } else {
        many_tokens<kWide>(c, pass, tiles, first);
    }
}

WC_DEVICE void few_tokens_of(const Context& c, u32 expert, u32 begin, u32 end, bool first) {
    const u32 n = route_table().count[expert];
    if (n <= 8) {
        few_tokens<8>(c, expert, begin, end, first);
    } else if (kFew == 16 || n <= 16) {
        few_tokens<(kFew < 16 ? kFew : 16)>(c, expert, begin, end, first);
    } else {
        few_tokens<kFew>(c, expert, begin, end, first);
    }
}

}  // namespace moe
}  // namespace wc

extern "C" __global__ void __launch_bounds__(wc::moe::kThreads, 1)
    sm90_moe_product(const wc::u8* __restrict__ weights, const float* __restrict__ factors,
                     const wc::u16* x, wc::u16* out, const wc::moe::RouteId* __restrict__ ids,
                     const int* __restrict__ local_experts, wc::u32 first_expert, wc::u32 all_experts, wc::u32 routes) {
    using namespace wc;
    using namespace wc::moe;
    RouteTable& table = route_table();

    launch_dependents();
    sort_routes<kExperts, kRoutes, kWide, kThreads, kFew>(table, ids, routes, local_experts, first_expert, all_experts);
    deal<kExperts, kRoutes, kWide, kUnits, kGroups>(table);

    const Context c{weights, factors, x, out};
    bool first = true;
    for (u32 i = blockIdx.x; i < table.pass_total * kGroups; i += gridDim.x) {
        many_tokens_of(c, table.passes[i / kGroups], i % kGroups, first);
        first = false;
    }
    for (u32 at = table.begin; at < table.end;) {
        const u32 index = at / kUnits, begin = at % kUnits, left = table.end - at;
        const u32 end = begin + left < kUnits ? begin + left : kUnits;
        few_tokens_of(c, table.few[index], begin, end, first);
        first = false;
        at += end - begin;
    }
    if (first) grid_dependency_wait();  // so that the next kernel's wait covers the one before this
}
