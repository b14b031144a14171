// simt.hpp and what the small-m product and the decoder of the large one use besides: dynamic shared memory, asynchronous copies, ldmatrix, mma.sync,
// named barriers, clusters. Copies land when their group is waited for and not before, so that a missing wait shows.
#pragma once

#include "simt.hpp"

#include <atomic>
#include <bit>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#ifndef WC_SPLIT
#define WC_SPLIT 1
#endif
#define WC_SHARED_MEMORY(name) wc::u8* const name = simt::memory()
#define SIMT_LAUNCH simt::launch_clusters

// Ours stand in for these.
#define cluster_address ptx_cluster_address
#define cluster_arrive_relaxed ptx_cluster_arrive_relaxed
#define cluster_wait ptx_cluster_wait
#define barrier_init ptx_barrier_init
#define barrier_init_fence ptx_barrier_init_fence
#define barrier_expect ptx_barrier_expect
#define barrier_wait ptx_barrier_wait
#define store_async ptx_store_async
#include "ptx_sm90.cuh"
#undef cluster_address
#undef cluster_arrive_relaxed
#undef cluster_wait
#undef barrier_init
#undef barrier_init_fence
#undef barrier_expect
#undef barrier_wait
#undef store_async

namespace simt {

struct Copy {
    unsigned to;
    const void* from;
    bool valid;
};

inline thread_local std::deque<std::vector<Copy>> groups;
inline thread_local std::vector<Copy> open_group;
inline std::mutex named_lock;
// By CTA, id and threads: libraries of other instances in this process share this variable.
inline std::map<std::tuple<unsigned, unsigned, unsigned>, std::unique_ptr<std::barrier<>>> named;

constexpr unsigned kMemoryBytes = 227 << 10, kRankShift = 24;
alignas(128) inline unsigned char cluster_memory[8][kMemoryBytes];
inline thread_local unsigned rank;
inline thread_local std::barrier<>* cluster;
inline thread_local std::unique_ptr<std::barrier<>::arrival_token> arrival;

inline unsigned char* memory() { return cluster_memory[rank]; }
inline unsigned char* remote(unsigned address) {
    return cluster_memory[address >> kRankShift] + (address & ((1u << kRankShift) - 1));
}

// What each lane puts in, readable by all until the function returns.
template <class T, class Use>
void exchange(const T& mine, Use use) {
    static std::map<Warp*, std::vector<T>> all;
    static std::mutex lock;
    std::vector<T>* slots;
    {
        const std::lock_guard<std::mutex> guard(lock);
        slots = &all[warp];
        if (slots->empty()) slots->resize(32);
    }
    (*slots)[lane] = mine;
    warp->lanes.arrive_and_wait();
    use(static_cast<const std::vector<T>&>(*slots));
    warp->lanes.arrive_and_wait();
}

inline float bf16_value(unsigned bits) {
    const unsigned wide = (bits & 0xffff) << 16;
    float v;
    std::memcpy(&v, &wide, sizeof v);
    return v;
}

template <class T>
T at(unsigned address) {
    T v;
    std::memcpy(&v, memory() + address, sizeof v);
    return v;
}

}  // namespace simt

template <class T>
T min(T a, T b) {
    return b < a ? b : a;
}
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline bool __any_sync(unsigned, bool v) {
    return simt::over_warp(v, [](unsigned r, unsigned other, unsigned) { return r | other; });
}
inline bool __all_sync(unsigned mask, bool v) { return !__any_sync(mask, !v); }
inline unsigned __shfl_sync(unsigned, unsigned v, unsigned from) {
    return simt::over_warp(v, [from](unsigned r, unsigned other, unsigned l) { return l == from ? other : r; });
}

namespace wc {

template <class T>
void keep(T&) {}

inline u32 smem_address(const void* p) { return static_cast<u32>(static_cast<const u8*>(p) - simt::memory()); }
inline u32x4 load_smem(u32 address) { return simt::at<u32x4>(address); }
inline u32 load_smem_word(u32 address) { return simt::at<u32>(address); }
inline void store_smem(u32 address, u32x4 v) { std::memcpy(simt::memory() + address, &v, sizeof v); }
inline void store_smem_byte(u32 address, u32 v) { simt::memory()[address] = static_cast<u8>(v); }
inline u32 load_word(const u32* p) { return *p; }
inline void prefetch_l2(const void* p) { (void)*static_cast<const volatile u8*>(p); }  // what is asked for must exist
inline u32 load_once_word(const void* p) {
    u32 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void copy_async(u32 to, const void* from, bool valid = true) { simt::open_group.push_back({to, from, valid}); }
inline void copy_async_cached(u32 to, const void* from, bool valid = true) { copy_async(to, from, valid); }
inline void copy_commit() {
    simt::groups.push_back(std::move(simt::open_group));
    simt::open_group.clear();
}
template <int kPending>
void copy_wait() {
    for (; simt::groups.size() > kPending; simt::groups.pop_front()) {
        for (const simt::Copy& copy : simt::groups.front()) {
            if (copy.valid) {
                std::memcpy(simt::memory() + copy.to, copy.from, 16);
            } else {
                std::memset(simt::memory() + copy.to, 0, 16);
            }
        }
    }
}

template <u32 kThreads>
void barrier_sync(u32 id) {
    std::barrier<>* barrier;
    {
        const std::lock_guard<std::mutex> guard(simt::named_lock);
        auto& slot = simt::named[{simt::rank, id, kThreads}];
        if (!slot) slot = std::make_unique<std::barrier<>>(kThreads);
        barrier = slot.get();
    }
    barrier->arrive_and_wait();
}

inline u32 cluster_address(u32 address, u32 rank) { return address | rank << simt::kRankShift; }
inline void cluster_arrive_relaxed() {
    simt::arrival = std::make_unique<std::barrier<>::arrival_token>(simt::cluster->arrive());
}
inline void cluster_wait() { simt::cluster->wait(std::move(*simt::arrival)); }

// A barrier of one arrival and one phase: the bytes to come, beside the arrival while that is missing.
constexpr int kMissing = 1 << 30;
inline int& barrier_count(unsigned char* barrier) { return *reinterpret_cast<int*>(barrier); }
inline void barrier_init(u32 barrier, u32) { barrier_count(simt::memory() + barrier) = kMissing; }
inline void barrier_init_fence() {}
inline void barrier_expect(u32 barrier, u32 bytes) {
    std::atomic_ref(barrier_count(simt::memory() + barrier)).fetch_add(static_cast<int>(bytes) - kMissing);
}
inline void store_async(u32 remote, u32x4 v, u32 remote_barrier) {
    std::memcpy(simt::remote(remote), &v, sizeof v);
    std::atomic_ref(barrier_count(simt::remote(remote_barrier))).fetch_sub(sizeof v);
}
inline void barrier_wait(u32 barrier, u32) {
    while (std::atomic_ref(barrier_count(simt::memory() + barrier)).load() != 0) std::this_thread::yield();
}

inline void ldmatrix_x4(u32 (&d)[4], u32 address) {
    simt::exchange(address, [&](const std::vector<u32>& rows) {
        for (u32 i = 0; i < 4; ++i) d[i] = simt::at<u32>(rows[8 * i + simt::lane / 4] + simt::lane % 4 * 4);
    });
}

inline void mma_m16n8k16(float (&d)[4], const u32* a, u32 b0, u32 b1) {
    struct Operands {
        u32 a[4], b[2];
    };
    simt::exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](const std::vector<Operands>& all) {
        for (u32 i = 0; i < 4; ++i) {
            const u32 row = simt::lane / 4 + i / 2 * 8, column = simt::lane % 4 * 2 + i % 2;
            for (u32 k = 0; k < 16; ++k) {
                const u32 half = k / 8, quad = k % 8 / 2, shift = k % 2 * 16;
                const u32 left = all[row % 8 * 4 + quad].a[row / 8 + 2 * half] >> shift;
                const u32 right = all[column * 4 + quad].b[half] >> shift;
                d[i] += simt::bf16_value(left) * simt::bf16_value(right);
            }
        }
    });
}

inline u16 bf16(float v) {
    u32 bits;
    std::memcpy(&bits, &v, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u32 bf16_pair(float lo, float hi) { return bf16(lo) | static_cast<u32>(bf16(hi)) << 16; }
inline float f32_from_bf16(u16 bits) { return simt::bf16_value(bits); }

}  // namespace wc

namespace simt {

// As `launch`, with the WC_SPLIT blocks of a cluster at a time.
template <class... Args>
void launch_clusters(void (*kernel)(Args...), unsigned grid, unsigned threads, void** args) {
    gridDim.x = grid;
    blockDim.x = threads;
    std::barrier<> together(WC_SPLIT * threads), end(WC_SPLIT * threads);
    std::vector<std::unique_ptr<std::barrier<>>> whole;
    for (unsigned r = 0; r < WC_SPLIT; ++r) whole.push_back(std::make_unique<std::barrier<>>(threads));
    const std::unique_ptr<Warp[]> warps(new Warp[WC_SPLIT * threads / 32]);
    std::vector<std::thread> pool;
    for (unsigned id = 0; id < WC_SPLIT * threads; ++id) {
        pool.emplace_back([&, id] {
            rank = id / threads;
            threadIdx.x = id % threads;
            lane = id % 32;
            warp = &warps[id / 32];
            block = whole[rank].get();
            cluster = &together;
            for (unsigned first = 0; first < grid; first += WC_SPLIT) {
                blockIdx.x = first + rank;
                call(kernel, args, std::index_sequence_for<Args...>());
                end.arrive_and_wait();
            }
        });
    }
    for (std::thread& thread : pool) thread.join();
}

}  // namespace simt
