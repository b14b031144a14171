// After the loop of sm90_gemm.cu: sums of the CTAs that share a tile, and the epilogue.
#pragma once

#include "sm90_gemm_roles.cuh"

namespace wc {
namespace gemm {

// Sums a warp's blocks kFirst … kFirst + kCount − 1 over kBoxes boxes into the accumulators, some at a time.
template <u32 kBoxes, u32 kFirst, u32 kCount, class Mail>
WC_DEVICE void collect_all(float (&acc)[kTokens / 2], const Mail& mail, u32 offset, u32 stride) {
    constexpr u32 kFit = letters_per_box(kBoxes);
    constexpr u32 kFull = kCount / kFit, kRest = kCount % kFit;
    if constexpr (kFull != 0) {
        WC_UNROLL
        for (u32 i = 0; i < kFull; ++i) {
            mail.template collect<kBoxes, kFit>(acc + 4 * (kFirst + i * kFit), offset + i * kFit * kBlockBytes, stride);
        }
    }
    if constexpr (kRest != 0) {
        constexpr u32 kDone = kFull * kFit;
        mail.template collect<kBoxes, kRest>(acc + 4 * (kFirst + kDone), offset + kDone * kBlockBytes, stride);
    }
}

// Where a warp's finished blocks go.
struct Place {
    u32 tile, row, token;
};

WC_DEVICE GlobalMail mail_of(const Consumer& c, u64 boxes) {
    // One register pair for all the letters' addresses, which the compiler would else keep each on its own.
    return {opaque(c.args.partials + boxes * kFarLetter + c.group * kFarGroup + threadIdx.x % 128 * 16), c.lane};
}

// Our boxes lie together, one for every other cluster.
WC_DEVICE u64 box_index(u32 tile, u32 near, u32 far) {
    return (static_cast<u64>((tile * kPair + pair_rank()) * kCluster + near) * kClusters + far) * (kClusters - 1);
}

// Brings the letters that `collect` will watch first into L2: a miss there would cost a trip to DRAM at the end.
WC_DEVICE void expect_mail(const Consumer& c) {
    if constexpr (kClusters >= 2) {
        const u32 near = split_rank() % kCluster, far = split_rank() / kCluster;
        const u32 count = share_count(share_count(kOwn, kCluster, near), kClusters, far);
        constexpr u32 kFit = letters_per_box(kClusters - 1);
        const u32 last = (count < kFit ? count : kFit) - 1;
        const GlobalMail mail = mail_of(c, box_index(worker() / kRanks, near, far));
        if (c.lane < kClusters - 1) {
            prefetch_l2(mail.mailbox + c.lane * kFarLetter + last * kBlockBytes + (31 - c.lane) * 16);
        }
    }
}

// Below, ranks are template arguments because accumulators have no run-time index.

// Of the blocks kFirst … kFirst + kCount − 1, sends the other clusters their shares, sums and stores our own.
template <u32 kFirst, u32 kCount, u32 kFar>
WC_DEVICE void finish_far(const Consumer& c, float (&acc)[kTokens / 2], Place place) {
    if constexpr (kClusters == 1) {
        store_blocks<kCount>(c.args.out, acc + 4 * kFirst, place.row, place.token + 8 * kFirst, c.staging(), c.lane);
    } else if constexpr (kFar < kClusters) {
        if (split_rank() / kCluster != kFar) {
            finish_far<kFirst, kCount, kFar + 1>(c, acc, place);
            return;
        }
        constexpr u32 kOurs = kFirst + share_begin(kCount, kClusters, kFar);
        constexpr u32 kOurCount = share_count(kCount, kClusters, kFar), kBoxes = kClusters - 1;
        const GlobalMail mail = mail_of(c, box_index(place.tile, split_rank() % kCluster, 0));
        WC_UNROLL
        for (u32 peer = 1; peer < kClusters; ++peer) {  // not everybody to cluster 0 first
            const u32 owner = (kFar + peer) % kClusters, box = owner * kBoxes + kFar - (kFar < owner ? 0 : 1);
            const u32 begin = share_begin(kCount, kClusters, owner), end = share_begin(kCount, kClusters, owner + 1);
            WC_UNROLL
            for (u32 b = begin; b < end; ++b) {
                mail.post(box * kFarLetter + (b - begin) * kBlockBytes, acc + 4 * (kFirst + b));
            }
        }
        if (threadIdx.x == 0) stamp(c.args, kPosted);
        collect_all<kBoxes, kOurs, kOurCount>(acc, mail, kFar * kBoxes * kFarLetter, kFarLetter);
        if (threadIdx.x == 0) stamp(c.args, kCollected);
        store_blocks<kOurCount>(c.args.out, acc + 4 * kOurs, place.row, place.token + 8 * kOurs, c.staging(), c.lane);
    }
}

// Sends the other CTAs of the cluster their shares and sums our own, which goes on to the other clusters.
template <u32 kNear>
WC_DEVICE void finish_near(const Consumer& c, float (&acc)[kTokens / 2], Place place) {
    if constexpr (kCluster == 1) {
        finish_far<0, kOwn, 0>(c, acc, place);
    } else if constexpr (kNear < kCluster) {
        if (split_rank() % kCluster != kNear) {
            finish_near<kNear + 1>(c, acc, place);
            return;
        }
        constexpr u32 kFirst = share_begin(kOwn, kCluster, kNear), kCount = share_count(kOwn, kCluster, kNear);
        const ClusterMail mail{c.smem + kMailArea + c.group * kNearGroup + threadIdx.x % 128 * 16,
                               mail_barrier(c.smem, c.group)};
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();  // all have left their rings
        WC_UNROLL
        for (u32 peer = 1; peer < kCluster; ++peer) {
            const u32 owner = (kNear + peer) % kCluster, box = kNear - (kNear < owner ? 0 : 1);
            const u32 begin = share_begin(kOwn, kCluster, owner), end = share_begin(kOwn, kCluster, owner + 1);
            WC_UNROLL
            for (u32 b = begin; b < end; ++b) {
                mail.post(owner, box * kNearLetter + (b - begin) * kBlockBytes, acc + 4 * b);
            }
        }
        if (threadIdx.x == 0) stamp(c.args, kPosted);
        barrier_wait(mail.barrier, 0);
        collect_all<kCluster - 1, kFirst, kCount>(acc, mail, 0, kNearLetter);
        if (threadIdx.x == 0) stamp(c.args, kCollected);
        finish_far<kFirst, kCount, 0>(c, acc, place);
    }
}

// WC_SPLIT = 0: a tile that begins in another CTA is posted whole; one that begins here and ends in later CTAs is
// summed.
WC_DEVICE void finish_stream(const Consumer& c, float (&acc)[kTokens / 2], Place place, Range k) {
    const GlobalMail mail = mail_of(c, 0);
    if (k.begin != 0) {
        WC_UNROLL
        for (u32 b = 0; b < kOwn; ++b) mail.post(blockIdx.x * kFarLetter + b * kBlockBytes, acc + 4 * b);
        return;
    }
    const u32 units = c.args.tile_units(), end = (place.tile + 1) * units, workers = gridDim.x / kPair;
    if (k.end != units) {
        for (u32 peer = worker() + 1; peer < workers && range_of(c.args, peer).begin < end; ++peer) {
            collect_all<1, 0, kOwn>(acc, mail, (peer * kPair + pair_rank()) * kFarLetter, 0);
        }
    }
    store_blocks<kOwn>(c.args.out, acc, place.row, place.token, c.staging(), c.lane);
}

}  // namespace gemm
}  // namespace wc
