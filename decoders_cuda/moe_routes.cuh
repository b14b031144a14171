// Which local expert each route goes to, and which part of the experts' rows each CTA computes.
//
// Every CTA sorts all routes by itself, in shared memory: that is quicker than a launch, and the next kernel can start
// on its weights before its predecessor has ended. Lists are in no fixed order, which is safe because a token's
// result depends neither on its place in a list nor on its neighbours.
//
// Work is cut by memory traffic. An expert with at most `kFew` tokens costs the same per 64 rows whatever their number,
// so those experts' row tiles, laid end to end, are dealt as one even range per CTA. Experts with more tokens are cut
// into groups of four row tiles, dealt round-robin; the even ranges make up for what those cost.
#pragma once

#include "ptx.cuh"

namespace wc {
namespace moe {

#if ID_BYTES == 8
using RouteId = long long;
#else
using RouteId = int;
#endif

template <u32 kExperts, u32 kRoutes>
struct Routes {
    u32 count[kExperts];
    u32 start[kExperts + 1];
    u32 few_total, many_total, share_total, share_before, share_own;
    u16 few[kExperts], many[kExperts];
    u16 list[kRoutes];
};

// Local expert of a global one: a table where the local experts are not consecutive, else an offset. −1: not here.
WC_DEVICE int local_expert(RouteId id, const int* table, u32 first, u32 experts, u32 all_experts) {
    if (table != nullptr) {
        return static_cast<u64>(id) < all_experts ? table[id] : -1;
    }
    const u64 local = static_cast<u64>(id) - first;
    return local < experts ? static_cast<int>(local) : -1;
}

// Fills `r` from the ids of all routes. Every thread of the CTA calls it; ends with a barrier.
template <u32 kExperts, u32 kRoutes, u32 kThreads, u32 kFew>
WC_DEVICE void sort_routes(Routes<kExperts, kRoutes>& r, const RouteId* ids, u32 routes, const int* table, u32 first,
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
        u32 start = 0, few = 0, many = 0;
        for (u32 base = 0; base < kExperts; base += 32) {
            const u32 e = base + tid, n = e < kExperts ? r.count[e] : 0;
            u32 sum = n;
            WC_UNROLL
            for (u32 d = 1; d < 32; d *= 2) {
                const u32 below = __shfl_up_sync(~0u, sum, d);
                if (tid >= d) sum += below;
            }
            if (e < kExperts) r.start[e] = start + sum - n;
            start += __shfl_sync(~0u, sum, 31);
            const u32 before = (1u << tid) - 1;
            const u32 is_few = __ballot_sync(~0u, n > 0 && n <= kFew), is_many = __ballot_sync(~0u, n > kFew);
            if (n > 0 && n <= kFew) r.few[few + __popc(is_few & before)] = static_cast<u16>(e);
            if (n > kFew) r.many[many + __popc(is_many & before)] = static_cast<u16>(e);
            few += __popc(is_few);
            many += __popc(is_many);
        }
        if (tid == 0) {
            r.few_total = few;
            r.many_total = many;
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

// A CTA's row tiles [begin, end) of the experts with few tokens, laid end to end.
struct Range {
    u32 begin, end;
};

// Cost of four row tiles of an expert with n > kFew tokens, where one row tile of few tokens costs 8.
WC_DEVICE u32 group_cost(u32 n) { return 32 + n * MANY_COST / 16; }

template <u32 kExperts, u32 kRoutes, u32 kUnits, u32 kGroups>
WC_DEVICE Range deal(Routes<kExperts, kRoutes>& r) {
    const u32 units = r.few_total * kUnits, ctas = gridDim.x, cta = blockIdx.x;
    if (r.many_total == 0) {
        return {static_cast<u32>(static_cast<u64>(units) * cta / ctas),
                static_cast<u32>(static_cast<u64>(units) * (cta + 1) / ctas)};
    }
    // Thread c works out what CTA c spends on groups, and what is left of an even share.
    if (threadIdx.x < ctas) {
        u32 total = units * 8, mine = 0;
        for (u32 i = 0; i < r.many_total; ++i) {
            const u32 cost = group_cost(r.count[r.many[i]]), lo = i * kGroups, hi = lo + kGroups;
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
    const u64 all = r.share_total, before = r.share_before;
    return {static_cast<u32>(units * before / all), static_cast<u32>(units * (before + r.share_own) / all)};
}

}  // namespace moe
}  // namespace wc
