// Runs a CUDA kernel on the CPU, one block at a time with a thread per CUDA thread, so that tests without a GPU can
// compare what the packer and the decoder write. Only what those kernels use is here. Threads run freely between
// barriers, so a missing barrier shows more readily than on a GPU.
#pragma once

#include <barrier>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#define WC_DEVICE inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__

#include "ptx.cuh"

namespace simt {

struct Index {
    unsigned x = 0;
};

struct Warp {
    std::barrier<> lanes{32};
    unsigned value[32] = {};
};

inline thread_local unsigned lane;
inline thread_local Warp* warp;
inline thread_local std::barrier<>* block;

// Every lane's value, seen by every lane.
template <class Combine>
unsigned over_warp(unsigned mine, Combine combine) {
    warp->value[lane] = mine;
    warp->lanes.arrive_and_wait();
    unsigned result = 0;
    for (unsigned l = 0; l < 32; ++l) result = combine(result, warp->value[l], l);
    warp->lanes.arrive_and_wait();
    return result;
}

}  // namespace simt

inline thread_local simt::Index threadIdx, blockIdx;
inline simt::Index gridDim, blockDim;

inline void __syncthreads() { simt::block->arrive_and_wait(); }
inline void __syncwarp() { simt::warp->lanes.arrive_and_wait(); }
inline unsigned __popc(unsigned v) { return static_cast<unsigned>(__builtin_popcount(v)); }
inline unsigned __ffs(unsigned v) { return static_cast<unsigned>(__builtin_ffs(static_cast<int>(v))); }
inline unsigned __ballot_sync(unsigned, bool v) {
    return simt::over_warp(v, [](unsigned r, unsigned bit, unsigned l) { return r | bit << l; });
}
inline unsigned __reduce_add_sync(unsigned, unsigned v) {
    return simt::over_warp(v, [](unsigned r, unsigned other, unsigned) { return r + other; });
}
inline unsigned __reduce_or_sync(unsigned, unsigned v) {
    return simt::over_warp(v, [](unsigned r, unsigned other, unsigned) { return r | other; });
}
template <class T>
T atomicOr(T* p, T v) {
    return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}
template <class T>
T atomicAdd(T* p, T v) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}

namespace wc {
inline u32x4 load_once(const void* p) {
    u32x4 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
}  // namespace wc

namespace simt {

template <class... Args, std::size_t... I>
void call(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<Args*>(args[I])...);
}

template <class... Args>
void launch(void (*kernel)(Args...), unsigned grid, unsigned threads, void** args) {
    gridDim.x = grid;
    blockDim.x = threads;
    std::barrier<> whole(threads), end(threads);
    const std::unique_ptr<Warp[]> warps(new Warp[threads / 32]);
    std::vector<std::thread> pool;
    for (unsigned id = 0; id < threads; ++id) {
        pool.emplace_back([&, id] {
            threadIdx.x = id;
            lane = id % 32;
            warp = &warps[id / 32];
            block = &whole;
            for (unsigned b = 0; b < grid; ++b) {
                blockIdx.x = b;
                call(kernel, args, std::index_sequence_for<Args...>());
                end.arrive_and_wait();  // shared memory is one block's at a time
            }
        });
    }
    for (std::thread& thread : pool) thread.join();
}

}  // namespace simt
