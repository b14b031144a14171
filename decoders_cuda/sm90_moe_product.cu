// One product of the routed experts, W4A16: `nvfp4-s5` bricks with raw scales times BF16 tokens, FP32 sums.
//
// GATED 1: out[route] = silu(f_gate · W_gate x[token]) · (f_up · W_up x[token]), gate and up rows interleaved by eights,
//          columns in the order of the bricks' columns. GATED 0: out[route] = f · W x[route], natural order.
// Route r is place r % TOP_K of token r / TOP_K; rows of `out` of routes that are not local stay untouched.
//
// Tile      64 rows × 8 … 96 tokens per warpgroup, weights as register A, tokens as B from shared memory.
// Roles     four warpgroups of equals, one CTA per SM. Experts with at most FEW_TOKENS tokens: tokens resident, the
//           warpgroups split K. More: one row tile per warpgroup, tokens streamed through STAGES stages.
// Weights   straight to registers, RING chunks of 16 + 2 bytes per lane in flight: 2,304 bytes per brick, read once.
// Macros    N_ROWS, K_COLUMNS per expert (multiples of 64); EXPERTS local ones; TOP_K; ROUTES upper bound of tokens ·
//           TOP_K (≤ 65,536); ID_BYTES 4, 8; GATED 0, 1; FEW_TOKENS 8, 16, 24; RING; STAGES; MANY_COST, the cost of one
//           token more in an expert with many, in 1/16 of an eighth of a row tile's.
// Grid      any number of CTAs up to 512; shared memory as `kernels/moe.py` computes it.
#include "sm90_moe_parts.cuh"

namespace wc {
namespace moe {

WC_DEVICE void many_tokens_in_passes(Context& c, u32 expert, u32 tiles) {
    const u32 place = route_table().start[expert], n = route_table().count[expert];
    const u32 passes = ceil_div(n, kWide);
    for (u32 i = 0; i < passes; ++i) {
        const u32 from = n * i / passes, count = n * (i + 1) / passes - from;
        if (count <= 32) {
            many_tokens<32>(c, expert, tiles, place + from, count);
        } else if (kWide == 64 || count <= 64) {
            many_tokens<64>(c, expert, tiles, place + from, count);
        } else if constexpr (kWide > 64) {
            many_tokens<kWide>(c, expert, tiles, place + from, count);
        }
    }
}

WC_DEVICE void few_tokens_of(Context& c, u32 expert, u32 begin, u32 end) {
    const u32 n = route_table().count[expert];
    if (n <= 8) {
        few_tokens<8>(c, expert, begin, end);
        return;
    }
    if constexpr (kFew > 8) {
        if (n <= 16) {
            few_tokens<16>(c, expert, begin, end);
            return;
        }
    }
    if constexpr (kFew > 16) few_tokens<24>(c, expert, begin, end);
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
    if (kGated) grid_dependency_wait();
    sort_routes<kExperts, kRoutes, kThreads, kFew>(table, ids, routes, local_experts, first_expert, all_experts);
    const Range range = deal<kExperts, kRoutes, kUnits, kGroups>(table);

    Context c{weights, factors, x, out, kGated};
    const u32 groups = table.many_total * kGroups;
    for (u32 i = blockIdx.x; i < groups; i += gridDim.x) {
        many_tokens_in_passes(c, table.many[i / kGroups], i % kGroups);
    }
    for (u32 at = range.begin; at < range.end;) {
        const u32 index = at / kUnits, begin = at % kUnits, left = range.end - at;
        const u32 end = begin + left < kUnits ? begin + left : kUnits;
        few_tokens_of(c, table.few[index], begin, end);
        at += end - begin;
    }
    if (!c.waited) grid_dependency_wait();  // so that the next kernel's wait covers the one before this
}
