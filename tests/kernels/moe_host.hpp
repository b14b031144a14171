// Runs the routed-experts kernels on the CPU: one fiber per CUDA thread, block after block. Stands in for ptx_moe.cuh
// and the instructions behind it; tensor-core products read operands where the hardware does, fragments and swizzle
// included. Copies complete at once and products at issue: what only asynchrony breaks does not show here.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define WC_DEVICE inline
#define __global__
#define __launch_bounds__(...)
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ SHARED

#include "ptx.cuh"

namespace simt {

struct Index {
    unsigned x = 0;
};
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline unsigned running;

inline void yield() { swapcontext(&fibers[running].context, &scheduler); }

struct Barrier {
    unsigned expected, arrived = 0, generation = 0;
    void wait() {
        const unsigned mine = generation;
        if (++arrived == expected) {
            arrived = 0;
            ++generation;
        } else {
            while (generation == mine) yield();
        }
    }
};
struct Warp {
    Barrier lanes{32};
    unsigned words[32][6];
};
inline std::vector<Warp> warps;
inline Barrier block{0};
inline std::vector<Barrier> groups;

inline unsigned lane() { return running % 32; }
inline Warp& warp() { return warps[running / 32]; }

// Shares up to six words of every lane of the warp while `use` runs.
template <class Use>
void exchange(const unsigned* words, unsigned count, Use use) {
    Warp& w = warp();
    std::memcpy(w.words[lane()], words, 4 * count);
    w.lanes.wait();
    use(w.words);
    w.lanes.wait();
}

}  // namespace simt

inline simt::Index threadIdx, blockIdx, gridDim;

inline void __syncthreads() { simt::block.wait(); }
inline unsigned __popc(unsigned v) { return static_cast<unsigned>(__builtin_popcount(v)); }
template <class T>
T shuffle(T v, unsigned from) {
    unsigned word, got = 0;
    std::memcpy(&word, &v, 4);
    simt::exchange(&word, 1, [&](auto& words) { got = words[from % 32][0]; });
    std::memcpy(&v, &got, 4);
    return v;
}
template <class T>
T __shfl_sync(unsigned, T v, unsigned from) {
    return shuffle(v, from);
}
template <class T>
T __shfl_up_sync(unsigned, T v, unsigned by) {
    return shuffle(v, simt::lane() >= by ? simt::lane() - by : simt::lane());
}
template <class T>
T __shfl_xor_sync(unsigned, T v, unsigned mask) {
    return shuffle(v, simt::lane() ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool v) {
    unsigned word = v, got = 0;
    simt::exchange(&word, 1, [&](auto& words) {
        for (unsigned l = 0; l < 32; ++l) got |= words[l][0] << l;
    });
    return got;
}
inline unsigned __match_any_sync(unsigned, int v) {
    unsigned word = static_cast<unsigned>(v), got = 0;
    simt::exchange(&word, 1, [&](auto& words) {
        for (unsigned l = 0; l < 32; ++l) got |= static_cast<unsigned>(words[l][0] == word) << l;
    });
    return got;
}
inline void __syncwarp() { simt::warp().lanes.wait(); }
template <class T>
T atomicAdd(T* p, T v) {
    return (*p += v) - v;
}
inline float __uint_as_float(unsigned v) {
    float f;
    std::memcpy(&f, &v, 4);
    return f;
}
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }

namespace wc {
namespace moe {
extern u8 shared[];
}

inline float as_float(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 as_bf16(float f) {
    u32 u;
    std::memcpy(&u, &f, 4);
    if (f != f) return 0x7fff;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline u32 bf16_pair(float lo, float hi) { return as_bf16(lo) | as_bf16(hi) << 16; }
inline u32 bf16_product(u32 a, u32 b) {
    return bf16_pair(as_float(a & 0xffff) * as_float(b & 0xffff), as_float(a >> 16) * as_float(b >> 16));
}
inline void broadcast_halves(u32 both, u32& low, u32& high) {
    low = (both & 0xffff) * 0x10001u;
    high = (both >> 16) * 0x10001u;
}
inline u32x4 load_once(const void* p) {
    u32x4 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline u32 load_pair_once(const void* p) {
    u16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline u32x4 load_in_order(const void* p) { return load_once(p); }
inline u32 load_pair_in_order(const void* p) { return load_pair_once(p); }
inline u32 smem_address(const void* p) { return static_cast<u32>(static_cast<const u8*>(p) - moe::shared); }
inline void copy_async(u32 to, const void* from) { std::memcpy(moe::shared + to, from, 16); }
inline u32x4 load_smem_in_order(u32 address) { return load_once(moe::shared + address); }
inline void copy_commit() {}
template <int kPending>
void copy_wait() {}
inline void fence_for_wgmma() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
inline void grid_dependency_wait() {}
inline void launch_dependents() {}
inline void group_barrier(u32 group) { simt::groups[group].wait(); }
inline u32 thread_index() { return threadIdx.x; }

inline float half_of(u32 word, u32 k) { return as_float(k % 2 ? word >> 16 : word & 0xffff); }

// One lane's accumulators of a 16 × 8 block: A from the warp's registers, B from `b(k, column)`.
template <class Words, class B>
void accumulate(float* d, const Words& words, B b) {
    const u32 g = simt::lane() / 4, t = simt::lane() % 4;
    for (u32 i = 0; i < 4; ++i) {
        const u32 low_row = i / 2, column = 2 * t + i % 2;
        for (u32 k = 0; k < 16; ++k) {
            d[i] += half_of(words[4 * g + k % 8 / 2][low_row + 2 * (k / 8)], k) * b(k, column);
        }
    }
}

inline void mma_sync(float* d, const u32* a, u32 b0, u32 b1) {
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    simt::exchange(mine, 6, [&](auto& words) {
        accumulate(d, words, [&](u32 k, u32 n) { return half_of(words[4 * n + k % 8 / 2][4 + k / 8], k); });
    });
}

template <u32 kTokens>
struct Wgmma {
    static void mma(float (&d)[kTokens / 2], const u32* a, u64 descriptor) {
        const u32 base = (descriptor & 0x3fff) << 4;
        simt::exchange(a, 4, [&](auto& words) {
            for (u32 n0 = 0; n0 < kTokens; n0 += 8) {
                accumulate(d + n0 / 2, words, [&](u32 k, u32 n) {
                    u32 at = base + n0 * 128 + n * 128 + 2 * k;
                    at ^= (at >> 7 & 7) << 4;
                    u16 bits;
                    std::memcpy(&bits, moe::shared + at, 2);
                    return as_float(bits);
                });
            }
        });
    }
};

}  // namespace wc

namespace simt {

inline void (*entry)(void**);
inline void** arguments;
inline void start() {
    entry(arguments);
    fibers[running].done = true;
    yield();
}

inline void launch(void (*kernel)(void**), unsigned grid, unsigned threads, void** args) {
    entry = kernel;
    arguments = args;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        fibers = std::vector<Fiber>(threads);
        warps = std::vector<Warp>(threads / 32);
        block = Barrier{threads};
        groups = std::vector<Barrier>(threads / 128, Barrier{128});
        for (Fiber& fiber : fibers) {
            getcontext(&fiber.context);
            fiber.stack.reset(new char[1 << 16]);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = 1 << 16;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, start, 0);
        }
        for (unsigned left = threads; left > 0;) {
            for (unsigned i = 0; i < threads; ++i) {
                running = (i + blockIdx.x * 41) % threads;  // no two blocks may rely on one order
                if (fibers[running].done) continue;
                threadIdx.x = running;
                swapcontext(&scheduler, &fibers[running].context);
                left -= fibers[running].done;
            }
        }
    }
}

template <class... Args, std::size_t... I>
void call(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<Args*>(args[I])...);
}
template <class... Args>
void call(void (*kernel)(Args...), void** args) {
    call(kernel, args, std::index_sequence_for<Args...>());
}

}  // namespace simt
