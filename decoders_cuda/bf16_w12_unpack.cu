// `bf16-w12` bricks to a row-major BF16 matrix, or to some of its rows: the whole-matrix decode.
//
// Grid: ceil(quarters of the row tiles touched / (8 * WC_QUARTERS)). Block: 256 threads; a warp decodes WC_QUARTERS
// quarters of 16 rows × 64 columns, all loads issued first. Registers go through a padded shared-memory tile, so that
// every global store is 16 bytes and four whole 128-byte lines per warp. Patches are bytes written into that tile.
// Bytes per weight: 1.516 read, 2 written. Shared memory: 2.3 KB per warp.
// WC_VECTOR: 8 where every output row starts on 16 bytes, else 1.

#include "bf16_w12.cuh"

static_assert(WC_VECTOR == 8 || WC_VECTOR == 1, "columns per store");
static_assert(WC_QUARTERS >= 1 && WC_QUARTERS <= 4, "quarters in flight per warp");

namespace {

using namespace wc;
using namespace wc::w12;

constexpr u32 kWarps = 8;
constexpr u32 kThreads = kWarps * 32;
constexpr u32 kRowWords = 36;  // 32 and a pad: fragment writes (8 rows × 4 words) then touch 32 banks

// Puts the high byte of an entry where its weight stands in the tile.
WC_DEVICE void patch_tile(u32 (*tile)[kRowWords], u32 entry) {
    const u32 g = entry >> 2 & 7, t = entry & 3, j = entry >> 5 & 3, p = entry >> 7 & 7;
    const u32 row = g + (p & 2) * 4, col = kStepCols * j + 2 * t + (p & 1) + (p & 4) * 2;
    reinterpret_cast<u8*>(tile[row])[2 * col + 1] = static_cast<u8>(entry >> 10);
}

}  // namespace

// Writes rows row_begin … row_end - 1 of a matrix of `cols` columns; `out` is where row `row_begin` goes, `stride` in
// elements. Overflow ranges are cut to `overflow_count`, so that a malformed blob cannot read past its list.
extern "C" __global__ void __launch_bounds__(kThreads, 5)
    bf16_w12_unpack(const u8* __restrict__ bricks, const u32* __restrict__ overflow, u64 overflow_count, u32 table_lo,
                    u32 table_hi, u32 cols, u32 row_begin, u32 row_end, u16* __restrict__ out, u64 stride) {
    alignas(16) __shared__ u32 tiles[kWarps][kQuarterRows][kRowWords];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 g = lane / 4, t = lane % 4;
    const u32 tile_cols = ceil_div(cols, kTileCols);
    const u32 first_brick = row_begin / kTileRows * tile_cols, last_brick = ceil_div(row_end, kTileRows) * tile_cols;
    const u64 first = static_cast<u64>(blockIdx.x) * (kWarps * WC_QUARTERS) + warp;
    u32(*tile)[kRowWords] = tiles[warp];

    u32x4 low01[WC_QUARTERS], low23[WC_QUARTERS], codes[WC_QUARTERS], patch[WC_QUARTERS];
    WC_UNROLL
    for (u32 i = 0; i < WC_QUARTERS; ++i) {
        const u64 index = first + i * kWarps;
        const u32 brick = first_brick + static_cast<u32>(index / kQuarters), quarter = index % kQuarters;
        if (brick >= last_brick) break;
        const u8* source = bricks + static_cast<u64>(brick) * kBrickBytes;
        low01[i] = load_once(source + plane_offset(quarter, 0, lane));
        low23[i] = load_once(source + plane_offset(quarter, 1, lane));
        codes[i] = load_once(source + plane_offset(quarter, 2, lane));
        patch[i] = load_once(source + patch_offset(quarter));
    }
    WC_UNROLL
    for (u32 i = 0; i < WC_QUARTERS; ++i) {
        const u64 index = first + i * kWarps;
        const u32 brick = first_brick + static_cast<u32>(index / kQuarters), quarter = index % kQuarters;
        if (brick >= last_brick) return;

        u32 a[16];
        decode_quarter(a, low01[i], low23[i], codes[i], {table_lo, table_hi});
        if (i) __syncwarp();
        WC_UNROLL
        for (u32 j = 0; j < kSteps; ++j) {
            tile[g][8 * j + t] = a[4 * j];
            tile[g + 8][8 * j + t] = a[4 * j + 1];
            tile[g][8 * j + t + 4] = a[4 * j + 2];
            tile[g + 8][8 * j + t + 4] = a[4 * j + 3];
        }
        __syncwarp();
        const u32 tag = patch_tag(patch[i]);
        if (tag) {
            if (tag != kOverflowTag) {
                for (u32 k = 0; k < tag; ++k, patch[i] = next_entry(patch[i])) patch_tile(tile, patch[i].x);
            } else {
                const u64 begin = patch[i].x, end = begin + patch[i].y;
                for (u64 k = begin + lane; k < end && k < overflow_count; k += 32) patch_tile(tile, overflow[k]);
            }
            __syncwarp();
        }

        const u32 first_row = brick / tile_cols * kTileRows + quarter * kQuarterRows;
        const u32 first_col = brick % tile_cols * kTileCols;
        if (WC_VECTOR == 8) {
            const u32 col = first_col + lane % 8 * 8;
            WC_UNROLL
            for (u32 k = 0; k < 4; ++k) {
                const u32 row = first_row + 4 * k + lane / 8;
                const u32* words = &tile[4 * k + lane / 8][lane % 8 * 4];
                if (row < row_begin || row >= row_end) continue;
                u16* target = out + (row - row_begin) * stride + col;
                if (col + 8 <= cols) {
                    *reinterpret_cast<u32x4*>(target) = *reinterpret_cast<const u32x4*>(words);
                } else {
                    const u16* halves = reinterpret_cast<const u16*>(words);
                    for (u32 c = 0; col + c < cols; ++c) target[c] = halves[c];
                }
            }
        } else {
            for (u32 k = 0; k < 2 * kQuarterRows; ++k) {
                const u32 row = first_row + k / 2, col = k % 2 * 32 + lane;
                if (row < row_begin || row >= row_end || first_col + col >= cols) continue;
                out[(row - row_begin) * stride + first_col + col] = reinterpret_cast<const u16*>(tile[k / 2])[col];
            }
        }
    }
}
