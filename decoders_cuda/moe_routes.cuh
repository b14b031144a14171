// Which local expert each route goes to, and which part of the experts' rows each CTA computes.
//
// Every CTA sorts all routes by itself, in shared memory: that is quicker than a launch, and the next kernel can start
// on its weights before its predecessor has ended. Lists are in one fixed order: CTAs that compute different passes of
// an expert must agree on which tokens each pass has.
//
// Work is cut by its price: memory traffic, and what more tokens and a change of experts cost on top. The row tiles of
// the experts with at most `kFew` tokens, laid end to end, are dealt as one range per CTA. Experts with more tokens are
// cut into groups of four row tiles times at most `kWide` tokens, dealt round-robin; the ranges make up for what those
// cost. A range begins and ends between row tiles, or between halves of them, whose warps then split the columns: a CTA
// whose warps have no rows for part of the time takes as long as if they had.
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
    u32 begin, end;  // this CTA's grains of the row tiles of experts with few tokens, laid end to end
    u16 list[kRoutes];
};

// Prices, measured; a row tile of at most 8 tokens costs 64. Products are 8, 16, 24 or 32, 64, 128 wide.
constexpr u32 kPartPrice = PART_PRICE;  // of an expert's first row: its tokens are copied, nothing is multiplied
WC_DEVICE u32 tile_price(u32 n) { return n <= 8 ? 64 : n <= 16 ? TILE_PRICE_16 : TILE_PRICE_24; }
WC_DEVICE u32 group_price(u32 n) { return n <= 32 ? GROUP_PRICE_32 : n <= 64 ? GROUP_PRICE_64 : GROUP_PRICE_128; }

// Scratch of sorting and dealing.
template <u32 kWarps, u32 kExperts, u32 kRoutes, u32 kFew>
struct Scratch {
    u32 upto[kExperts + (kMany ? 0 : kRoutes / kFew)];  // running sum of the prices of `few`
    u16 seen[kWarps][kExperts];                         // the warp's routes so far, then those of the warps before
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
// after the next barrier, all else at once for those who called.
template <u32 kUnits, u32 kThreads, u32 kExperts, u32 kRoutes, u32 kFew, u32 kWide>
WC_DEVICE void sort_routes(Routes<kExperts, kRoutes, kFew, kWide>& r,
                           Scratch<kThreads / 32, kExperts, kRoutes, kFew>& scratch, const RouteId* ids, u32 routes,
                           const int* table, u32 first, u32 all_experts) {
    constexpr u32 kPerThread = ceil_div(kRoutes, kThreads), kWarps = kThreads / 32, kPassBits = 12;
    constexpr u32 kCut = kMany ? kWide : kFew;
    static_assert(kRoutes <= 65536 && kExperts + kRoutes / kCut < 1u << kPassBits, "routes and passes share a word");
    const u32 tid = threadIdx.x, lane = tid % 32;
    u16* const mine = scratch.seen[tid / 32];
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
        const auto price = [](u32 n) { return kPartPrice + kUnits * tile_price(n); };
        u32 before = 0, few = 0, price_before = 0;  // before: routes in the low bits, passes in the high ones
        for (u32 base = 0; base < kExperts; base += 32) {
            const u32 e = base + tid;
            u32 n = 0;
            if (e < kExperts) {
                u32 counts[kWarps];
                WC_UNROLL
                for (u32 w = 0; w < kWarps; ++w) counts[w] = scratch.seen[w][e];
                WC_UNROLL
                for (u32 w = 0; w < kWarps; ++w) {
                    scratch.seen[w][e] = static_cast<u16>(n);
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
                const bool is_few = n > 0 && n <= kFew;
                const u32 all = __ballot_sync(~0u, is_few), at = few + __popc(all & ((1u << tid) - 1));
                const u32 upto = price_before + sum_to(is_few ? price(n) : 0);
                if (is_few) {
                    r.few[at] = {static_cast<u16>(e), static_cast<u16>(n), start};
                    scratch.upto[at] = upto;
                }
                few += __popc(all);
                price_before = __shfl_sync(~0u, upto, 31);
            } else if constexpr (kFew > 8) {
                const u32 last = n - (cuts - 1) * kCut;  // tokens of the last part
                const u32 whole = price(kCut), mine = cuts == 0 ? 0 : (cuts - 1) * whole + price(last);
                const u32 upto = price_before + sum_to(mine), at = sum - own >> (32 - kPassBits);
                WC_NO_UNROLL
                for (u32 i = 0; i < cuts; ++i) {
                    scratch.upto[at + i] = i + 1 < cuts ? upto - mine + (i + 1) * whole : upto;
                }
                price_before = __shfl_sync(~0u, upto, 31);
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

template <bool kNarrow>
WC_DEVICE u32 portion(u32 price, u32 part, u32 all) {
    return kNarrow ? price * part / all : static_cast<u32>(static_cast<u64>(price) * part / all);
}

// Fills `begin` and `end` for a product with kUnits row tiles of kGrains grains per expert. Those who sorted call it.
// Where there may be passes, that is every thread, and it begins and ends with a barrier.
template <u32 kUnits, u32 kGrains, u32 kThreads, u32 kExperts, u32 kRoutes, u32 kFew, u32 kWide>
WC_DEVICE void deal(Routes<kExperts, kRoutes, kFew, kWide>& r,
                    const Scratch<kThreads / 32, kExperts, kRoutes, kFew>& scratch) {
    constexpr u32 kGroups = ceil_div(kUnits, 4);
    // Whether prices times CTAs (at most 512) fit 32 bits.
    constexpr u32 kMost = (kExperts + kRoutes / kFew) * (kPartPrice + kUnits * TILE_PRICE_24);
    constexpr bool kNarrow = !kMany && kMost < 1u << 23;
    const u32 ctas = gridDim.x, cta = blockIdx.x, tid = threadIdx.x;
    if constexpr (!kMany && kFew == 8) {
        // One price for all: thread 0 finds the begin, thread 1 the end.
        constexpr u32 kExpert = kPartPrice + kUnits * 64;
        if (tid < 2) {
            const u32 price = portion<kNarrow>(r.few_total * kExpert, cta + tid, ctas);
            const u32 index = price / kExpert, rest = price % kExpert;
            (tid == 0 ? r.begin : r.end) = index * kUnits + (rest < kPartPrice ? 0 : (rest - kPartPrice) / 64);
        }
        return;
    }
    if constexpr (kMany) {
        if (tid == 0) r.share_total = r.share_before = 0;
        __syncthreads();
    }
    const u32 few_total = r.few_total, price = few_total > 0 ? scratch.upto[few_total - 1] : 0;
    u32 before = cta, own = 1, all = ctas;
    if (kMany && r.pass_total > 0) {
        // Thread c works out what CTA c spends on groups, and what is left of an even share.
        if (tid < ctas) {
            const u32 whole = kGroups / ctas, rest = kGroups % ctas;
            u32 total = price, mine = 0, first = 0;  // first: CTA of the pass's first group
            for (u32 i = 0; i < r.pass_total; ++i) {
                const u32 cost = group_price(r.passes[i].count);
                const u32 place = tid < first ? tid + ctas - first : tid - first;
                total += cost * kGroups;
                mine += cost * (whole + (place < rest));
                first += rest;
                if (first >= ctas) first -= ctas;
            }
            const u32 even = total / ctas + 1, share = even > mine ? even - mine : 0;
            atomicAdd(&r.share_total, share);
            if (tid < cta) atomicAdd(&r.share_before, share);
            if (tid == cta) r.share_own = share;
        }
        __syncthreads();
        before = r.share_before;
        own = r.share_own;
        all = r.share_total;
    }
    // Whoever holds the expert at a price says which row tile it is.
    WC_NO_UNROLL
    for (u32 side = 0; side < 2; ++side) {
        const u32 at = portion<kNarrow>(price, before + side * own, all);
        u32& to = side == 0 ? r.begin : r.end;
        if (tid == 0 && at >= price) to = few_total * (kUnits * kGrains);
        WC_NO_UNROLL
        for (u32 i = tid; i < few_total; i += kThreads) {
            const u32 from = i > 0 ? scratch.upto[i - 1] : 0;
            if (at < from || at >= scratch.upto[i]) continue;
            const u32 rest = at - from;
            const u32 n = r.few[i].count, past = rest < kPartPrice ? 0 : rest - kPartPrice;
            const u32 grains = past * kGrains / tile_price(n);
            to = i * (kUnits * kGrains) + (n <= SYNC_TOKENS ? grains : grains / kGrains * kGrains);
        }
    }
    if constexpr (kMany) __syncthreads();
}

}  // namespace moe
}  // namespace wc
