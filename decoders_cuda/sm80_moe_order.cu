// Brings the columns of BF16 tokens into the order of the NVFP4 bricks' columns, so that the products copy 16 bytes at
// a time: inside every 64 columns, pair q goes to place 4 (q mod 8) + q div 8.
//
// Grid: one thread per pair of columns, THREADS per CTA. Macros: THREADS.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    sm80_moe_order(const wc::u32* __restrict__ x, wc::u32* __restrict__ out, wc::u32 pairs) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    const wc::u32 i = blockIdx.x * THREADS + threadIdx.x, q = i % 32;
    if (i < pairs) out[i - q + 4 * (q % 8) + q / 8] = x[i];
}
