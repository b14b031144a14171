// Counts the 128 values of the 7 high exponent bits of a BF16 matrix: all that choosing a `bf16-w12` table needs.
//
// Grid: any. Block: WC_THREADS. A warp takes runs of 1,024 columns of one row, 32 lanes × 8 columns × 4 loads in flight.
// Every lane counts in its own bank of shared memory (128 × 32 counters, 16 KB), so that the few values which make up
// a trained matrix never collide inside a warp.
// WC_VECTOR: 8 where every row starts on 16 bytes, else 1.

#include "ptx.cuh"

static_assert(WC_VECTOR == 8 || WC_VECTOR == 1, "columns per load");
static_assert(WC_THREADS % 32 == 0 && WC_THREADS >= 128, "one thread per value at the end");

namespace {

using namespace wc;

constexpr u32 kValues = 128;
constexpr u32 kLanes = 32;
constexpr u32 kChunkCols = 8;
constexpr u32 kChunks = 4;
constexpr u32 kRunCols = kLanes * kChunkCols * kChunks;

WC_DEVICE void count(u32 (*counters)[kLanes], u32 lane, u32 bits16) {
    atomicAdd(&counters[bits16 >> 8 & 0x7f][lane], 1u);
}

WC_DEVICE void count_pair(u32 (*counters)[kLanes], u32 lane, u32 pair) {
    count(counters, lane, pair);
    count(counters, lane, pair >> 16);
}

}  // namespace

// `counts` (128 × u64) is added to. `stride` is in elements.
extern "C" __global__ void __launch_bounds__(WC_THREADS)
    bf16_w12_histogram(const u16* __restrict__ weights, u64 stride, u64 rows, u64 cols, u64* __restrict__ counts) {
    __shared__ u32 counters[kValues][kLanes];
    for (u32 i = threadIdx.x; i < kValues * kLanes; i += WC_THREADS) (&counters[0][0])[i] = 0;
    __syncthreads();

    const u32 lane = threadIdx.x % kLanes;
    const u64 runs = (cols + kRunCols - 1) / kRunCols;
    const u64 warps = static_cast<u64>(gridDim.x) * (WC_THREADS / kLanes);
    for (u64 item = static_cast<u64>(blockIdx.x) * (WC_THREADS / kLanes) + threadIdx.x / kLanes; item < rows * runs;
         item += warps) {
        const u64 row = item / runs;
        const u64 first = (item - row * runs) * kRunCols + lane * kChunkCols;
        const u16* source = weights + row * stride + first;
        if (WC_VECTOR == 8 && first - lane * kChunkCols + kRunCols <= cols) {
            u32x4 v[kChunks];
            WC_UNROLL
            for (u32 i = 0; i < kChunks; ++i) v[i] = load_once(source + i * kLanes * kChunkCols);
            WC_UNROLL
            for (u32 i = 0; i < kChunks; ++i) {
                count_pair(counters, lane, v[i].x);
                count_pair(counters, lane, v[i].y);
                count_pair(counters, lane, v[i].z);
                count_pair(counters, lane, v[i].w);
            }
        } else {
            // Consecutive lanes take consecutive columns here: no alignment to rely on.
            const u64 run = first - lane * kChunkCols;
            const u16* base = weights + row * stride;
            for (u64 col = run + lane; col < cols && col < run + kRunCols; col += kLanes) {
                count(counters, lane, base[col]);
            }
        }
    }
    __syncthreads();

    if (threadIdx.x < kValues) {
        u64 sum = 0;
        for (u32 i = 0; i < kLanes; ++i) sum += counters[threadIdx.x][(i + threadIdx.x) % kLanes];
        if (sum) atomicAdd(counts + threadIdx.x, sum);
    }
}
