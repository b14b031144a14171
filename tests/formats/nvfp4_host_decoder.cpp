// Decodes a brick with decoders_cuda/nvfp4_s5.cuh alone, as a plain C++ program sees it.
#include "nvfp4_s5.cuh"

#include <cstring>

// Per quarter and lane: 4 steps × 4 placed registers, then the lane's two scale bytes as one u32 and placed as one.
extern "C" void decode_brick(const unsigned char* brick, int windowed, unsigned base, unsigned* placed, unsigned* bytes,
                             unsigned* placed_scales) {
    using namespace wc;
    using namespace wc::nvfp4;
    for (u32 w = 0; w < 4; ++w) {
        for (u32 lane = 0; lane < 32; ++lane) {
            for (u32 step = 0; step < 4; ++step) {
                u32 word, r[4];
                std::memcpy(&word, brick + kQuarterNibbleBytes * w + 16 * lane + 4 * step, 4);
                place_step(word, r);
                std::memcpy(placed + ((w * 32 + lane) * 4 + step) * 4, r, sizeof r);
            }
            u32 both = 0;
            if (windowed) {
                const unsigned char* codes = brick + kScaleOffset + kQuarterCodeBytes * w;
                u64 high;
                std::memcpy(&high, codes + 32, 8);
                both = scales_in_window(codes[lane], static_cast<u32>(high >> (2 * lane) & 3), base);
            } else {
                std::memcpy(&both, brick + kScaleOffset + kQuarterScaleBytes * w + 2 * lane, 2);
            }
            bytes[w * 32 + lane] = both;
            placed_scales[w * 32 + lane] = place_scales(both);
        }
    }
}
