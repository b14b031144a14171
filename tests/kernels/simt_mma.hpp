// simt.hpp and what the small-m product uses besides: dynamic shared memory, asynchronous copies, ldmatrix, mma.sync,
// named barriers. Copies land when their group is waited for and not before, so that a missing wait shows.
#pragma once

#include "simt.hpp"

#include <deque>
#include <map>
#include <mutex>
#include <utility>

#undef __shared__
#define __shared__
#define __align__(n)

alignas(128) inline unsigned char smem[227 << 10];

namespace simt {

struct Copy {
    unsigned to;
    const void* from;
    bool valid;
};

inline thread_local std::deque<std::vector<Copy>> groups;
inline thread_local std::vector<Copy> open_group;
inline std::mutex named_lock;
// By id and threads: libraries of other instances in this process share this variable.
inline std::map<std::pair<unsigned, unsigned>, std::unique_ptr<std::barrier<>>> named;

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
    std::memcpy(&v, smem + address, sizeof v);
    return v;
}

}  // namespace simt

template <class T>
T min(T a, T b) {
    return b < a ? b : a;
}
inline bool __any_sync(unsigned, bool v) {
    return simt::over_warp(v, [](unsigned r, unsigned other, unsigned) { return r | other; });
}
inline unsigned __shfl_sync(unsigned, unsigned v, unsigned from) {
    return simt::over_warp(v, [from](unsigned r, unsigned other, unsigned l) { return l == from ? other : r; });
}

namespace wc {

template <class T>
void keep(T&) {}

inline u32 smem_address(const void* p) { return static_cast<u32>(static_cast<const u8*>(p) - smem); }
inline u32x4 load_smem(u32 address) { return simt::at<u32x4>(address); }
inline u32 load_smem_word(u32 address) { return simt::at<u32>(address); }
inline u32 load_once_word(const void* p) {
    u32 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void copy_async(u32 to, const void* from, bool valid = true) { simt::open_group.push_back({to, from, valid}); }
inline void copy_commit() {
    simt::groups.push_back(std::move(simt::open_group));
    simt::open_group.clear();
}
template <int kPending>
void copy_wait() {
    for (; simt::groups.size() > kPending; simt::groups.pop_front()) {
        for (const simt::Copy& copy : simt::groups.front()) {
            if (copy.valid) {
                std::memcpy(smem + copy.to, copy.from, 16);
            } else {
                std::memset(smem + copy.to, 0, 16);
            }
        }
    }
}

template <u32 kThreads>
void barrier_sync(u32 id) {
    std::barrier<>* barrier;
    {
        const std::lock_guard<std::mutex> guard(simt::named_lock);
        auto& slot = simt::named[{id, kThreads}];
        if (!slot) slot = std::make_unique<std::barrier<>>(kThreads);
        barrier = slot.get();
    }
    barrier->arrive_and_wait();
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
inline float f32_from_bf16(u16 bits) { return simt::bf16_value(bits); }

}  // namespace wc
