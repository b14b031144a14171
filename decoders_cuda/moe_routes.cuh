// Which local expert each route goes to, and which part of the experts' rows each CTA computes.
//
// Every CTA sorts all routes by itself, in shared memory: that is quicker than a launch, and the next kernel can start
// on its weights before its predecessor has ended. Lists are in no fixed order, which is safe because a token's
// result depends neither on its place in a list nor on its neighbours.
//
// Work is cut by memory traffic. An expert with at most `kFew` tokens costs the same per 64 rows whatever their number,
// so those experts' row tiles, laid end to end, are dealt as one even range per CTA. Experts with more tokens are cut
// into groups of four row tiles times at most `kWide` tokens, dealt round-robin; the even ranges make up for what those
// cost.
#pragma once

#include "moe_local.cuh"

namespace wc {
namespace moe {

// An expert's tokens from `from` on, at most `kWide` of them.
struct Pass {
    u16 expert, count;
    u32 from;  // place in the list
};

template <u32 kExperts, u32 kRoutes, u32 kWide>
struct Routes {
    u32 rows[kWide];  // of the tokens being multiplied
    Pass passes[kExperts + kRoutes / kWide];
    u32 count[kExperts];
    u32 start[kExperts + 1];
    u32 few_total, pass_total, share_total, share_before, share_own;
    u32 begin, end;  // this CTA's row tiles of the experts with few tokens, laid end to end
    u16 few[kExperts];
    u16 list[kRoutes];
};

// Sum over this and the lower lanes.
WC_DEVICE u32 sum_to(u32 v) {
    WC_UNROLL
    for (u32 d = 1; d < 32; d *= 2) {
        const u32 below = __shfl_up_sync(~0u, v, d);
        if (threadIdx.x % 32 >= d) v += below;
    }
    return v;
}

// Fills `r` from the ids of all routes. Every thread of the CTA calls it; ends with a barrier.
template <u32 kExperts, u32 kRoutes, u32 kWide, u32 kThreads, u32 kFew>
WC_DEVICE void sort_routes(Routes<kExperts, kRoutes, kWide>& r, const RouteId* ids, u32 routes, const int* table, u32 first,
                           u32 all_experts) {
    constexpr u32 kPerThread = ceil_div(kRoutes, kThreads);
    const u32 tid = threadIdx.x;
    int expert[kPerThread];
    u32 rank[kPerThread];
    RouteId id[kPerThread];
    WC_UNROLL
    for (u32 i = 0; i < kPerThread; ++i) {
        const u32 route = tid + i * kThreads;
        id[i] = route < routes ? ids[route] : -1;
    }
    for (u32 e = tid; e < kExperts; e += kThreads) r.count[e] = 0;
    __syncthreads();
    WC_UNROLL
    for (u32 i = 0; i < kPerThread; ++i) {
        expert[i] = tid + i * kThreads < routes ? local_expert(id[i], table, first, kExperts, all_experts) : -1;
        if (expert[i] >= 0) rank[i] = atomicAdd(&r.count[expert[i]], 1u);
    }
    __syncthreads();
    if (tid < 32) {
        u32 start = 0, few = 0, passes = 0;
        for (u32 base = 0; base < kExperts; base += 32) {
            const u32 e = base + tid, n = e < kExperts ? r.count[e] : 0, mine = n > kFew ? ceil_div(n, kWide) : 0;
            const u32 end = start + sum_to(n), end_passes = passes + sum_to(mine);
            if (e < kExperts) r.start[e] = end - n;
            const u32 is_few = __ballot_sync(~0u, n > 0 && n <= kFew);
            if (n > 0 && n <= kFew) r.few[few + __popc(is_few & ((1u << tid) - 1))] = static_cast<u16>(e);
            for (u32 i = 0; i < mine; ++i) {
                const u32 from = n * i / mine, count = n * (i + 1) / mine - from;
                r.passes[end_passes - mine + i] = {static_cast<u16>(e), static_cast<u16>(count), end - n + from};
            }
            start = __shfl_sync(~0u, end, 31);
            passes = __shfl_sync(~0u, end_passes, 31);
            few += __popc(is_few);
        }
        if (tid == 0) {
            r.few_total = few;
            r.pass_total = passes;
            r.share_total = r.share_before = 0;
        }
    }
    __syncthreads();
    WC_UNROLL
    for (u32 i = 0; i < kPerThread; ++i) {
        if (expert[i] >= 0) r.list[r.start[expert[i]] + rank[i]] = static_cast<u16>(tid + i * kThreads);
    }
    __syncthreads();
}

// Cost of a group with n tokens, where one row tile of few tokens costs 8: measured, the products are 32, 64 or 128 wide.
WC_DEVICE u32 group_cost(u32 n) {
    const u32 width = n <= 32 ? 32 : n <= 64 ? 64 : 128;
    return GROUP_COST + width * GROUP_COST_PER_TOKEN / 16;
}

// Fills `begin` and `end`. Every thread of the CTA calls it; ends with a barrier.
template <u32 kExperts, u32 kRoutes, u32 kWide, u32 kUnits, u32 kGroups>
WC_DEVICE void deal(Routes<kExperts, kRoutes, kWide>& r) {
    const u32 units = r.few_total * kUnits, ctas = gridDim.x, cta = blockIdx.x;
    if (r.pass_total == 0) {
        r.begin = static_cast<u64>(units) * cta / ctas;
        r.end = static_cast<u64>(units) * (cta + 1) / ctas;
        __syncthreads();
        return;
    }
    // Thread c works out what CTA c spends on groups, and what is left of an even share.
    if (threadIdx.x < ctas) {
        u32 total = units * 8, mine = 0;
        for (u32 i = 0; i < r.pass_total; ++i) {
            const u32 cost = group_cost(r.passes[i].count), lo = i * kGroups, hi = lo + kGroups;
            const u32 dealt = (hi + ctas - 1 - threadIdx.x) / ctas - (lo + ctas - 1 - threadIdx.x) / ctas;
            total += cost * kGroups;
            mine += cost * dealt;
        }
        const u32 even = total / ctas + 1, share = even > mine ? even - mine : 0;
        atomicAdd(&r.share_total, share);
        if (threadIdx.x < cta) atomicAdd(&r.share_before, share);
        if (threadIdx.x == cta) r.share_own = share;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const u64 all = r.share_total, before = r.share_before;
        r.begin = units * before / all;
        r.end = units * (before + r.share_own) / all;
    }
    __syncthreads();
}

}  // namespace moe
}  // namespace wc
