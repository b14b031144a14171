// BF16 matrix to `bf16-w12` bricks, byte for byte what the host encoder writes (docs/format.md, section 2).
//
// Grid: ceil(quarters / 8). Block: 256 threads, one warp per quarter of 16 rows × 64 columns, two bricks per CTA.
// Pass 0 only counts: counts[q] is the number of overflow entries of quarter q. The caller sums them up.
// Pass 1 writes planes, patch words and the overflow entries, whose places it takes from those sums.
// Bytes: 2 read per weight and pass, 1.5 written. Shared memory: a padded 2 KB tile per warp, 128 bytes of codes.
// WC_PASS: 0 or 1. WC_VECTOR: 8 where every row starts on 16 bytes, else 1.

#include "bf16_w12.cuh"

static_assert(WC_PASS == 0 || WC_PASS == 1, "count, or pack");
static_assert(WC_VECTOR == 8 || WC_VECTOR == 1, "columns per load");

namespace {

using namespace wc;
using namespace wc::w12;

constexpr u32 kWarps = 8;
constexpr u32 kThreads = kWarps * 32;
constexpr u32 kChunkCols = 8;  // 16 bytes
constexpr u32 kChunks = 4;     // per lane: 4 × 32 × 8 weights are a quarter
constexpr u32 kNoCode = 8;     // bit 3 marks an exception until the signs take its place

#if WC_PASS == 1
constexpr u32 kRowWords = 36;  // 32 and a pad: the fragment reads (8 rows × 4 words) then touch 32 banks
#endif

static_assert(kChunks * 32 * kChunkCols == kQuarterRows * kTileCols, "a quarter per warp");

// Eight columns of one row. Outside the matrix stands `filler`, which encodes to all zeros.
WC_DEVICE u32x4 load_chunk(const u16* row, bool row_inside, u32 col, u32 cols, u32 filler) {
    if (WC_VECTOR == 8 && row_inside && col + kChunkCols <= cols) return load_once(row + col);
    u32 word[4];
    WC_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        const u32 at = col + 2 * i;
        const u32 lo = row_inside && at < cols ? row[at] : filler;
        const u32 hi = row_inside && at + 1 < cols ? row[at + 1] : filler;
        word[i] = lo | hi << 16;
    }
    return {word[0], word[1], word[2], word[3]};
}

// Codes of the four weights whose high bytes are in `high`, in nibbles 0-3; bit 3 of a nibble marks an exception.
WC_DEVICE u32 look_up(const u8* codes, u32 high) {
    return codes[high & 0x7f] | codes[high >> 8 & 0x7f] << 4 | codes[high >> 16 & 0x7f] << 8 |
           codes[high >> 24 & 0x7f] << 12;
}

#if WC_PASS == 1
// 0xff in every byte whose nibble (0-3 of `nibbles`) has bit 3 set.
WC_DEVICE u32 exception_bytes(u32 nibbles) {
    u32 mask = 0;
    WC_UNROLL
    for (u32 i = 0; i < 4; ++i) mask |= nibbles >> (4 * i + 3) & 1 ? 0xffu << (8 * i) : 0;
    return mask;
}
#endif

}  // namespace

// `stride` is in elements. `table` holds the eight values, bytes 0-3 and 4-7. Pass 0 writes `counts`. Pass 1 writes
// `bricks` and `overflow` and reads `ends`, the inclusive sums of `counts`; it may be null where no quarter overflows.
extern "C" __global__ void __launch_bounds__(kThreads)
    bf16_w12_pack(const u16* __restrict__ weights, u64 stride, u32 rows, u32 cols, u32 table_lo, u32 table_hi,
                  u32* __restrict__ counts, const u64* __restrict__ ends, u8* __restrict__ bricks,
                  u32* __restrict__ overflow) {
    __shared__ u8 codes[128];
#if WC_PASS == 1
    alignas(16) __shared__ u32 tiles[kWarps][kQuarterRows][kRowWords];
    __shared__ u32 patches[kWarps][4];
#endif

    if (threadIdx.x < 128) {
        u32 code = kNoCode;
        WC_UNROLL
        for (u32 i = 0; i < 8; ++i) {
            if (((i < 4 ? table_lo : table_hi) >> (8 * (i & 3)) & 0xff) == threadIdx.x) code = i;
        }
        codes[threadIdx.x] = static_cast<u8>(code);
    }
    __syncthreads();

    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 tile_cols = ceil_div(cols, kTileCols);
    const u32 brick_count = ceil_div(rows, kTileRows) * tile_cols;
    const u64 index = static_cast<u64>(blockIdx.x) * kWarps + warp;
    const u32 brick = static_cast<u32>(index / kQuarters), quarter = static_cast<u32>(index % kQuarters);
    if (brick >= brick_count) return;
    const u32 first_row = brick / tile_cols * kTileRows + quarter * kQuarterRows;
    const u32 first_col = brick % tile_cols * kTileCols;
    const u32 filler = (table_lo & 0xff) << 8;

    u32x4 chunk[kChunks];
    WC_UNROLL
    for (u32 i = 0; i < kChunks; ++i) {
        const u32 row = first_row + 4 * i + lane / 8;
        chunk[i] = load_chunk(weights + row * stride, row < rows, first_col + lane % 8 * kChunkCols, cols, filler);
    }

#if WC_PASS == 0
    u32 exceptions = 0;
    WC_UNROLL
    for (u32 i = 0; i < kChunks; ++i) {
        const u32 low = look_up(codes, prmt(chunk[i].x, chunk[i].y, 0x7531));
        const u32 high = look_up(codes, prmt(chunk[i].z, chunk[i].w, 0x7531));
        exceptions += __popc((low | high << 16) & 0x88888888u);
    }
    exceptions = __reduce_add_sync(~0u, exceptions);
    if (lane == 0) counts[index] = exceptions > kInlineMax ? exceptions : 0;
#else
    u32(*tile)[kRowWords] = tiles[warp];
    WC_UNROLL
    for (u32 i = 0; i < kChunks; ++i) {
        *reinterpret_cast<u32x4*>(&tile[4 * i + lane / 8][lane % 8 * 4]) = chunk[i];
    }
    if (lane < 4) patches[warp][lane] = 0;
    __syncwarp();

    const u32 g = lane / 4, t = lane % 4;
    u32 low[2 * kSteps], code[kSteps];
    u32 exceptions = 0;  // bit 4 p + j: weight p of step j, so that the lowest bits have the lowest positions
    WC_UNROLL
    for (u32 j = 0; j < kSteps; ++j) {
        const u32 a0 = tile[g][8 * j + t], a1 = tile[g + 8][8 * j + t];
        const u32 a2 = tile[g][8 * j + t + 4], a3 = tile[g + 8][8 * j + t + 4];
        low[2 * j] = prmt(a0, a1, 0x6420);
        low[2 * j + 1] = prmt(a2, a3, 0x6420);
        u32 high0 = prmt(a0, a1, 0x7531), high1 = prmt(a2, a3, 0x7531);
        const u32 nibbles = look_up(codes, high0) | look_up(codes, high1) << 16;
        if (nibbles & 0x88888888u) {
            exceptions |= (nibbles >> 3 & 0x11111111u) << j;
            high0 &= ~exception_bytes(nibbles);
            high1 &= ~exception_bytes(nibbles >> 16);
        }
        code[j] = (nibbles & 0x77777777u) | (high0 & 0x80808080u) | (high1 & 0x80808080u) >> 4;
    }
    u8* target = bricks + static_cast<u64>(brick) * kBrickBytes;
    *reinterpret_cast<u32x4*>(target + plane_offset(quarter, 0, lane)) = {low[0], low[1], low[2], low[3]};
    *reinterpret_cast<u32x4*>(target + plane_offset(quarter, 1, lane)) = {low[4], low[5], low[6], low[7]};
    *reinterpret_cast<u32x4*>(target + plane_offset(quarter, 2, lane)) = {code[0], code[1], code[2], code[3]};

    const u32 total = __reduce_add_sync(~0u, __popc(exceptions));
    u32x4 patch = {0, 0, 0, 0};
    if (total) {
        const bool spills_over = total > kInlineMax;
        const u64 first = spills_over ? ends[index] - total : 0;
        u32 done = 0;
        for (u32 left = __reduce_or_sync(~0u, exceptions); left; left &= left - 1) {
            const u32 bit = __ffs(left) - 1, p = bit / 4, j = bit % 4;
            const bool mine = exceptions >> bit & 1;
            const u32 holders = __ballot_sync(~0u, mine);
            if (mine) {
                const u32 row = g + (p & 2) * 4, col = kStepCols * j + 2 * t + (p & 1) + (p & 4) * 2;
                const u32 high = tile[row][col / 2] >> (col & 1 ? 24 : 8) & 0xff;
                const u32 entry = (lane + 32 * bit) | high << 10;
                const u32 place = done + __popc(holders & ((1u << lane) - 1));
                if (spills_over) {
                    overflow[first + place] = entry;
                } else {
                    const u32 at = kInlineBits * place;
                    atomicOr(&patches[warp][at / 32], entry << at % 32);
                    if (at % 32 > 32 - kInlineBits) atomicOr(&patches[warp][at / 32 + 1], entry >> (32 - at % 32));
                }
            }
            done += __popc(holders);
        }
        __syncwarp();
        const u32* words = patches[warp];
        if (spills_over) {
            patch = {static_cast<u32>(first), total, 0, kOverflowTag << 24};
        } else {
            patch = {words[0], words[1], words[2], words[3] | total << 24};
        }
    }
    if (lane == 0) *reinterpret_cast<u32x4*>(target + patch_offset(quarter)) = patch;
#endif
}
