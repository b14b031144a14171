// Which local expert each route goes to, and which part of the experts' rows each CTA computes.
//
// Every CTA sorts all routes by itself, in shared memory: that is quicker than a launch, and the next kernel can start
// on its weights before its predecessor has ended. Lists are in one fixed order: CTAs that compute different passes of
// an expert must agree on which tokens each pass has.
//
// Work is cut by memory traffic. An expert with at most `kFew` tokens costs the same per row whatever their number, so
// those experts' rows, laid end to end, are dealt in quarters of row tiles as one even range per CTA. Experts with more
// tokens are cut into groups of four row tiles times at most `kWide` tokens, dealt round-robin; the even ranges make up
// for what those cost.
#pragma once

#include "moe_local.cuh"
#include "ptx_moe.cuh"

namespace wc {
namespace moe {

// Whether there may be passes of experts with many tokens. If not, an expert is cut into parts of at most kFew.
constexpr bool kMany = MANY != 0;

// An expert's tokens from `from` on, at most `kWide` of them.
struct Pass {
    u16 expert, count;
    u32 from;  // place in the list
};

template <u32 kExperts, u32 kRoutes, u32 kFew, u32 kWide>
struct Routes {
    u32 rows[kWide];  // of the tokens being multiplied
    Pass few[kExperts + (kMany ? 0 : kRoutes / kFew)];
    Pass passes[kMany ? kExperts + kRoutes / kWide : 1];
    u32 start[kExperts];
    u32 few_total, pass_total, share_total, share_before, share_own;
    u32 begin, end;  // this CTA's quarters of row tiles of the experts with few tokens, laid end to end
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

// Barrier among the threads that sort: a warpgroup or the whole CTA.
template <u32 kThreads>
WC_DEVICE void sorters_barrier() {
    if constexpr (kThreads == 128) {
        group_barrier(0);
    } else {
        __syncthreads();
    }
}

// Fills `r` from the ids of all routes. All threads of the CTA call it, or only the first 128. `r.list` is complete
// after the next barrier, all else at once for those who called. `seen` is scratch: per warp and expert, the warp's
// routes so far, then those of the warps before.
template <u32 kThreads, u32 kExperts, u32 kRoutes, u32 kFew, u32 kWide>
WC_DEVICE void sort_routes(Routes<kExperts, kRoutes, kFew, kWide>& r, u16* seen, const RouteId* ids, u32 routes,
                           const int* table, u32 first, u32 all_experts) {
    constexpr u32 kPerThread = ceil_div(kRoutes, kThreads), kWarps = kThreads / 32, kPassBits = 12;
    constexpr u32 kCut = kMany ? kWide : kFew;
    static_assert(kRoutes <= 65536 && kExperts + kRoutes / kCut < 1u << kPassBits, "routes and passes share a word");
    const u32 tid = threadIdx.x, lane = tid % 32;
    u16* const mine = seen + tid / 32 * kExperts;
    int expert[kPerThread];
    u32 rank[kPerThread];
    RouteId id[kPerThread];
    WC_UNROLL
    for (u32 i = 0; i < kPerThread; ++i) {
        const u32 route = tid + i * kThreads;
        id[i] = route < routes ? ids[route] : -1;
    }
    for (u32 e = lane; e < kExperts; e += 32) mine[e] = 0;
    __syncwarp();
    WC_UNROLL
    for (u32 i = 0; i < kPerThread; ++i) {
        expert[i] = -1;
        if (tid - lane + i * kThreads >= routes) continue;
        if (tid + i * kThreads < routes) expert[i] = local_expert(id[i], table, first, kExperts, all_experts);
        const u32 same = __match_any_sync(~0u, expert[i]), below = same & ((1u << lane) - 1);
        if (expert[i] >= 0) rank[i] = mine[expert[i]] + __popc(below);
        __syncwarp();
        if (expert[i] >= 0 && below == 0) mine[expert[i]] = static_cast<u16>(rank[i] + __popc(same));
        __syncwarp();
    }
    sorters_barrier<kThreads>();
    if (tid < 32) {
        u32 before = 0, few = 0;  // routes in the low bits, passes in the high ones
        for (u32 base = 0; base < kExperts; base += 32) {
            const u32 e = base + tid;
            u32 n = 0;
            if (e < kExperts) {
                u32 counts[kWarps];
                WC_UNROLL
                for (u32 w = 0; w < kWarps; ++w) counts[w] = seen[w * kExperts + e];
                WC_UNROLL
                for (u32 w = 0; w < kWarps; ++w) {
                    seen[w * kExperts + e] = static_cast<u16>(n);
                    n += counts[w];
                }
            }
            const u32 cuts = kMany && n <= kFew ? 0 : ceil_div(n, kCut), own = n | cuts << (32 - kPassBits);
            const u32 sum = before + sum_to(own), start = (sum - own) << kPassBits >> kPassBits;
            if (e < kExperts) r.start[e] = start;
            Pass* const to = (kMany ? r.passes : r.few) + (sum - own >> (32 - kPassBits));
            WC_NO_UNROLL
            for (u32 i = 0; i < cuts; ++i) {
                const u32 left = n - i * kCut;
                to[i] = {static_cast<u16>(e), static_cast<u16>(left < kCut ? left : kCut), start + i * kCut};
            }
            if constexpr (kMany) {
                const u32 is_few = __ballot_sync(~0u, n > 0 && n <= kFew);
                const u32 at = few + __popc(is_few & ((1u << tid) - 1));
                if (n > 0 && n <= kFew) r.few[at] = {static_cast<u16>(e), static_cast<u16>(n), start};
                few += __popc(is_few);
            }
            before = __shfl_sync(~0u, sum, 31);
        }
        if (tid == 0) {
            r.few_total = kMany ? few : before >> (32 - kPassBits);
            r.pass_total = kMany ? before >> (32 - kPassBits) : 0;
        }
    }
    sorters_barrier<kThreads>();
    WC_UNROLL
    for (u32 i = 0; i < kPerThread; ++i) {
        if (expert[i] < 0) continue;
        r.list[r.start[expert[i]] + mine[expert[i]] + rank[i]] = static_cast<u16>(tid + i * kThreads);
    }
}

// Cost of a group with n tokens, where one row tile of few tokens costs 8: measured. Products are 32, 64 or 128 wide.
WC_DEVICE u32 group_cost(u32 n) { return n <= 32 ? GROUP_COST_32 : n <= 64 ? GROUP_COST_64 : GROUP_COST_128; }

// Fills `begin` and `end` for a product with kUnits row tiles per expert. Those who sorted call it. Where there may be
// passes, that is every thread, and it begins and ends with a barrier.
template <u32 kUnits, u32 kExperts, u32 kRoutes, u32 kFew, u32 kWide>
WC_DEVICE void deal(Routes<kExperts, kRoutes, kFew, kWide>& r) {
    constexpr u32 kGroups = ceil_div(kUnits, 4);
    static_assert((kExperts + kRoutes / kFew) * kUnits <= 1u << 20, "products of quarters and CTAs fit 32 bits");
    const u32 ctas = gridDim.x, cta = blockIdx.x;
    if constexpr (!kMany) {
        if (threadIdx.x == 0) {
            const u32 quarters = r.few_total * kUnits * 4;
            r.begin = quarters * cta / ctas;
            r.end = quarters * (cta + 1) / ctas;
        }
        return;
    }
    if (threadIdx.x == 0) r.share_total = r.share_before = 0;
    __syncthreads();
    const u32 quarters = r.few_total * kUnits * 4;
    // Thread c works out what CTA c spends on groups, and what is left of an even share.
    if (threadIdx.x < ctas) {
        const u32 whole = kGroups / ctas, rest = kGroups % ctas;
        u32 total = quarters * 2, mine = 0, first = 0;  // first: CTA of the pass's first group
        for (u32 i = 0; i < r.pass_total; ++i) {
            const u32 cost = group_cost(r.passes[i].count);
            const u32 place = threadIdx.x < first ? threadIdx.x + ctas - first : threadIdx.x - first;
            total += cost * kGroups;
            mine += cost * (whole + (place < rest));
            first += rest;
            if (first >= ctas) first -= ctas;
        }
        const u32 even = total / ctas + 1, share = even > mine ? even - mine : 0;
        atomicAdd(&r.share_total, share);
        if (threadIdx.x < cta) atomicAdd(&r.share_before, share);
        if (threadIdx.x == cta) r.share_own = share;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const u64 all = r.share_total, before = r.share_before;
        r.begin = static_cast<u32>(quarters * before / all);
        r.end = static_cast<u32>(quarters * (before + r.share_own) / all);
    }
    __syncthreads();
}

}  // namespace moe
}  // namespace wc
