// Decodes a bf16-w12 blob on the CPU through the very header the GPU kernels include, one lane after another.
#include "bf16_w12.cuh"

using namespace wc;

namespace {

u32x4 load(const unsigned char* p) {
    u32 word[4];
    for (int i = 0; i < 4; ++i) word[i] = p[4 * i] | p[4 * i + 1] << 8 | p[4 * i + 2] << 16 | u32(p[4 * i + 3]) << 24;
    return {word[0], word[1], word[2], word[3]};
}

}  // namespace

extern "C" void decode_bricks(const unsigned char* blob, long bricks, long tile_cols, const u32* overflow,
                              const unsigned char* table, unsigned short* out, long rows, long cols) {
    const w12::Table entries = {table[0] | u32(table[1]) << 8 | u32(table[2]) << 16 | u32(table[3]) << 24,
                                table[4] | u32(table[5]) << 8 | u32(table[6]) << 16 | u32(table[7]) << 24};
    for (long index = 0; index < bricks; ++index) {
        const unsigned char* brick = blob + index * long(w12::kBrickBytes);
        for (u32 quarter = 0; quarter < w12::kQuarters; ++quarter) {
            u32 lanes[32][8];
            for (u32 lane = 0; lane < 32; ++lane) {
                w12::decode_high_quarter(lanes[lane], load(brick + w12::plane_offset(quarter, 2, lane)), entries);
            }
            const auto patch = [&](u32 entry) {
                const u32 place = w12::patched_byte(entry), shift = place % 4 * 8;
                const u32 half = place / (w12::kHighBytes / 2), pair = place / 8 % 2, one = place / 4 % 2;
                u32& high = lanes[place / 16 % 32][4 * pair + 2 * half + one];
                high = (high & ~(0xffu << shift)) | (entry >> 10 & 0xff) << shift;
            };
            u32x4 word = load(brick + w12::patch_offset(quarter));
            const u32 tag = w12::patch_tag(word);
            if (tag == w12::kOverflowTag) {
                for (u32 i = 0; i < word.y; ++i) patch(overflow[word.x + i]);
            } else {
                for (u32 i = 0; i < tag; ++i, word = w12::next_entry(word)) patch(word.x);
            }
            for (u32 lane = 0; lane < 32; ++lane) {
                const u32(&high)[8] = lanes[lane];
                u32 a[16];
                w12::merge_quarter(a, load(brick + w12::plane_offset(quarter, 0, lane)),
                                   load(brick + w12::plane_offset(quarter, 1, lane)), high);
                // Register i of a step: rows g, g + 8, g, g + 8; columns 2t, 2t, 2t + 8, 2t + 8 (low half first).
                for (u32 r = 0; r < 16; ++r) {
                    const long row = index / tile_cols * 64 + quarter * 16 + lane / 4 + 8 * (r & 1);
                    const long col = index % tile_cols * 64 + (r >> 2) * 16 + 2 * (lane & 3) + 8 * ((r >> 1) & 1);
                    for (int half = 0; half < 2; ++half) {
                        if (row < rows && col + half < cols) {
                            out[row * cols + col + half] = (unsigned short)(a[r] >> (16 * half));
                        }
                    }
                }
            }
        }
    }
}
