"""Compiled loops of `nvfp4-s5` on the host: row tiles in, bricks out, and back (``docs/format_nvfp4.md``).

The weights of rows g and g + 8 of a quarter lie in 16 consecutive step words of a brick, in the order of
their columns: word i holds the i-th four nibbles (a u16) of either row. So nibbles move by shifts of whole
words, which the compiler makes vectors of where innermost loops have constant ends and store to one array.
"""

# mypy: ignore-errors
# (numba types what is below itself)
from __future__ import annotations

from typing import Any

import numpy as np

from wcodec._compiled import compiled

TILE = 64
NIBBLE_BYTES = 2048
_GROUPS = 32  # pairs of rows g, g + 8 in a brick
_WORDS = 16  # step words of each
_U32, _U16 = np.uint32, np.uint16
# Where a step word has the sign bits of its upper and of its lower block.
_UPPER_SIGNS, _LOWER_SIGNS = np.uint32(0x80088008), np.uint32(0x02200220)
_SIGNS = np.uint16(0x8888)
_ONES, _TOPS = np.uint32(0x01010101), np.uint32(0x80808080)  # of four scale bytes in a u32
_LOW, _OUTSIDE = np.uint32(0x0F0F0F0F), np.uint32(0xE0E0E0E0)


def _spread_table() -> Any:
    """For each byte with bit 4 of four codes in its even bits: the four codes, a byte each."""
    bits = np.arange(256, dtype=np.uint32)
    return sum((bits >> (2 * t) & 1) << (8 * t + 4) for t in range(4)).astype(np.uint32)


_SPREAD = _spread_table()


@compiled(inline="always")
def _place_upper(nibbles: Any) -> int:
    """The bits of a step word that hold four nibbles of the upper block."""
    n = _U32(nibbles)
    return _U32(
        (n & _U32(0x7)) << _U32(6)
        | (n & _U32(0x8)) << _U32(12)
        | (n & _U32(0x70)) << _U32(18)
        | (n & _U32(0x80)) << _U32(24)
        | (n & _U32(0x700)) << _U32(2)
        | (n & _U32(0x800)) << _U32(8)
        | (n & _U32(0x7000)) << _U32(14)
        | (n & _U32(0x8000)) >> _U32(12)
    )


@compiled(inline="always")
def _place_lower(nibbles: Any) -> int:
    """The bits of a step word that hold four nibbles of the lower block."""
    n = _U32(nibbles)
    return _U32(
        (n & _U32(0x7))
        | (n & _U32(0x8)) << _U32(6)
        | (n & _U32(0x70)) << _U32(12)
        | (n & _U32(0x80)) << _U32(18)
        | (n & _U32(0x100)) >> _U32(4)
        | (n & _U32(0x600)) << _U32(4)
        | (n & _U32(0x800)) << _U32(10)
        | (n & _U32(0x1000)) << _U32(8)
        | (n & _U32(0x6000)) << _U32(16)
        | (n & _U32(0x8000)) >> _U32(10)
    )


@compiled(inline="always")
def _take_upper(word: Any) -> int:
    """Inverse of `_place_upper`."""
    return _U16(
        (word >> _U32(6)) & _U32(0x7)
        | (word >> _U32(12)) & _U32(0x8)
        | (word >> _U32(18)) & _U32(0x70)
        | (word >> _U32(24)) & _U32(0x80)
        | (word >> _U32(2)) & _U32(0x700)
        | (word >> _U32(8)) & _U32(0x800)
        | (word >> _U32(14)) & _U32(0x7000)
        | (word << _U32(12)) & _U32(0x8000)
    )


@compiled(inline="always")
def _take_lower(word: Any) -> int:
    """Inverse of `_place_lower`."""
    return _U16(
        word & _U32(0x7)
        | (word >> _U32(6)) & _U32(0x8)
        | (word >> _U32(12)) & _U32(0x70)
        | (word >> _U32(18)) & _U32(0x80)
        | (word << _U32(4)) & _U32(0x100)
        | (word >> _U32(4)) & _U32(0x600)
        | (word >> _U32(10)) & _U32(0x800)
        | (word >> _U32(8)) & _U32(0x1000)
        | (word >> _U32(16)) & _U32(0x6000)
        | (word << _U32(10)) & _U32(0x8000)
    )


@compiled()
def count_bytes(data: Any, counts: Any) -> None:
    """Add the histogram of uint8 `data` (1-D) to int64 `counts` (256)."""
    # Scales are alike, so neighbours often hit one counter: eight tables take turns to hide its latency.
    tables = np.zeros((8, 256), dtype=np.int64)
    whole = data.size // 8 * 8
    for i in range(0, whole, 8):
        for j in range(8):
            tables[j, data[i + j]] += 1
    for i in range(whole, data.size):
        tables[0, data[i]] += 1
    for j in range(8):
        for value in range(256):
            counts[value] += tables[j, value]


@compiled()
def encode_nibbles(weight: Any, scale: Any, bricks: Any) -> None:
    """Encode the nibbles of whole row tiles; parameters as for `encode_tiles`."""
    rows, blocks = scale.shape
    tile_columns = (blocks + 3) // 4
    nibbles, all_words = weight.view(np.uint16), bricks.view(np.uint32)
    for index in range(bricks.shape[0]):
        first_row, first_block = TILE * (index // tile_columns), 4 * (index % tile_columns)
        here = min(4, blocks - first_block)
        if here < 4 or first_row + TILE > rows:  # all of other bricks is written
            for i in range(all_words.shape[1]):
                all_words[index, i] = 0
        for group in range(_GROUPS):
            row = first_row + 16 * (group >> 3) + (group & 7)
            if row >= rows:
                continue
            first, at = _WORDS * group, 4 * first_block
            if here == 4 and row + 8 < rows:
                for i in range(_WORDS):
                    upper, lower = nibbles[row, at + i], nibbles[row + 8, at + i]
                    all_words[index, first + i] = _place_upper(upper) | _place_lower(lower)
                continue
            for i in range(4 * here):
                all_words[index, first + i] = _place_upper(nibbles[row, at + i])
                if row + 8 < rows:
                    all_words[index, first + i] |= _place_lower(nibbles[row + 8, at + i])


@compiled(inline="always")
def _codes(scales: Any, base: Any) -> int:
    """Differences, modulo 256, of the bytes of a u32 and those of another."""
    return _U32(((scales | _TOPS) - (base & ~_TOPS)) ^ ((scales ^ ~base) & _TOPS))


@compiled(inline="always")
def _gather(codes: Any) -> int:
    """Bit 4 of four codes, in the even bits of a byte."""
    bits = (codes >> _U32(4)) & _ONES
    return _U32((bits | bits >> _U32(6) | bits >> _U32(12) | bits >> _U32(18)) & _U32(0x55))


@compiled()
def _encode_scales_of(
    scale: Any, row: int, first_block: int, base: int, place: int, words: Any, brick: Any, patches: Any
) -> int:
    """Encode the scales of rows `row` and `row` + 8 in one brick; return the number of patches.

    `place` is that of the first scale, `words` are the step words of the two rows.
    """
    rows, blocks = scale.shape
    used, high = 0, 0
    group = place >> 3 & (_GROUPS - 1)
    codes_at = NIBBLE_BYTES + 40 * (group >> 3)
    for t in range(min(4, blocks - first_block)):
        low = 0
        for half in range(2):
            if row + 8 * half >= rows:
                continue
            byte = int(scale[row + 8 * half, first_block + t])
            if byte & 0x80:
                for i in range(4 * t, 4 * t + 4):
                    words[i] ^= _LOWER_SIGNS if half else _UPPER_SIGNS
            if base < 0:
                brick[NIBBLE_BYTES + 8 * group + 2 * t + half] = byte
                continue
            code = byte - base
            if code < 0 or code > 31:
                patches[used, 0] = place + 2 * t + half
                patches[used, 1] = byte
                used += 1
                continue
            low |= (code & 15) << (4 * half)
            high |= (code >> 4) << (2 * t + half)
        if base >= 0:
            brick[codes_at + 4 * (group & 7) + t] = low
    if base >= 0:
        brick[codes_at + 32 + (group & 7)] = high
    return used


@compiled()
def encode_scales(scale: Any, base: int, first_brick: int, bricks: Any, patches: Any) -> int:
    """Encode the scales of row tiles whose nibbles are encoded; as `encode_tiles`."""
    rows, blocks = scale.shape
    tile_columns = (blocks + 3) // 4
    used = 0
    all_words = bricks.view(np.uint32)
    fours = scale.reshape(-1)[: scale.size // 4 * 4].view(np.uint32)
    bases = _U32(base & 0xFF) * _ONES
    for index in range(bricks.shape[0]):
        first_row, first_block = TILE * (index // tile_columns), 4 * (index % tile_columns)
        brick, brick_words = bricks[index], all_words[index]
        for group in range(_GROUPS):
            quarter, g = group >> 3, group & 7
            row = first_row + 16 * quarter + g
            if row >= rows:
                continue
            if blocks % 4 == 0 and base >= 0 and row + 8 < rows:  # four scales of a row at a time
                one = fours[(row * blocks + first_block) >> 2]
                two = fours[((row + 8) * blocks + first_block) >> 2]
                upper, lower = _codes(one, bases), _codes(two, bases)
                if not ((upper | lower) & _OUTSIDE | (one | two) & _TOPS):
                    brick_words[(NIBBLE_BYTES + 40 * quarter) // 4 + g] = upper & _LOW | (
                        lower & _LOW
                    ) << _U32(4)
                    brick[NIBBLE_BYTES + 40 * quarter + 32 + g] = _gather(upper) | _gather(lower) << _U32(1)
                    continue
            words = brick_words[_WORDS * group : _WORDS * (group + 1)]
            place = 256 * (first_brick + index) + 8 * group
            used += _encode_scales_of(scale, row, first_block, base, place, words, brick, patches[used:])
    return used


@compiled()
def encode_tiles(weight: Any, scale: Any, base: int, first_brick: int, bricks: Any, patches: Any) -> int:
    """Encode whole row tiles; return the number of patches, which ascend.

    Parameters
    ----------
    weight, scale : uint8 arrays, shapes (rows, K / 2) and (rows, K / 16), C-contiguous
    base : int
        First value of the window, −1 for raw scales.
    first_brick : int
        Index of the first brick in the matrix.
    bricks : uint8 array, shape (bricks, bytes per brick)
        Written completely.
    patches : uint32 array, shape (patches, 2)
        Large enough for all scales outside the window.
    """
    rows, tile_columns, used = scale.shape[0], (scale.shape[1] + 3) // 4, 0
    for first in range(0, rows, TILE):  # one row tile at a time stays in the cache
        last, at = min(first + TILE, rows), first // TILE * tile_columns
        here = bricks[at : at + tile_columns]
        encode_nibbles(weight[first:last], scale[first:last], here)
        used += encode_scales(scale[first:last], base, first_brick + at, here, patches[used:])
    return used


@compiled()
def _decode_scales_of(scale: Any, row: int, first_block: int, base: int, group: int, brick: Any) -> None:
    """Decode the scales of rows `row` and `row` + 8 in one brick."""
    rows, blocks = scale.shape
    codes_at = NIBBLE_BYTES + 40 * (group >> 3)
    high = brick[codes_at + 32 + (group & 7)]
    for t in range(min(4, blocks - first_block)):
        if base < 0:
            raw = NIBBLE_BYTES + 8 * group + 2 * t
            upper, lower = brick[raw], brick[raw + 1]
        else:
            low, top = brick[codes_at + 4 * (group & 7) + t], high >> (2 * t)
            upper, lower = base + (low & 15) + 16 * (top & 1), base + (low >> 4) + 8 * (top & 2)
        scale[row, first_block + t] = upper
        if row + 8 < rows:
            scale[row + 8, first_block + t] = lower


@compiled()
def decode_scales(bricks: Any, base: int, first_brick: int, patches: Any, scale: Any) -> int:
    """Decode the scales of whole row tiles; return −1, or the index of the first patch that is malformed.

    `patches` are those of these bricks, shape (patches, 2); the others as for `encode_tiles`.
    """
    rows, blocks = scale.shape
    tile_columns = (blocks + 3) // 4
    all_words = bricks.view(np.uint32)
    fours = scale.reshape(-1)[: scale.size // 4 * 4].view(np.uint32)
    bases = _U32(base & 0xFF) * _ONES
    for index in range(bricks.shape[0]):
        first_row, first_block = TILE * (index // tile_columns), 4 * (index % tile_columns)
        brick, brick_words = bricks[index], all_words[index]
        for group in range(_GROUPS):
            quarter, g = group >> 3, group & 7
            row = first_row + 16 * quarter + g
            if row >= rows:
                continue
            if blocks % 4 == 0 and base >= 0 and row + 8 < rows:  # four scales of a row at a time
                low = brick_words[(NIBBLE_BYTES + 40 * quarter) // 4 + g]
                high = brick[NIBBLE_BYTES + 40 * quarter + 32 + g]
                upper, lower = low & _LOW | _SPREAD[high], low >> _U32(4) & _LOW | _SPREAD[high >> 1]
                fours[(row * blocks + first_block) >> 2] = bases + upper
                fours[((row + 8) * blocks + first_block) >> 2] = bases + lower
            else:
                _decode_scales_of(scale, row, first_block, base, group, brick)
    previous = -1
    for i in range(patches.shape[0]):
        place, byte = int(patches[i, 0]), int(patches[i, 1])
        index = (place >> 8) - first_brick
        if place <= previous or byte > 255 or index < 0 or index >= bricks.shape[0]:
            return i
        previous = place
        quarter, lane, lower = place >> 6 & 3, place >> 1 & 31, place & 1
        row = TILE * (index // tile_columns) + 16 * quarter + 8 * lower + (lane >> 2)
        block = 4 * (index % tile_columns) + (lane & 3)
        if row >= rows or block >= blocks:
            return i
        scale[row, block] = byte
    return -1


@compiled()
def decode_nibbles(bricks: Any, scale: Any, weight: Any) -> None:
    """Decode the nibbles of whole row tiles, whose scales are known; parameters as for `encode_tiles`."""
    rows, blocks = scale.shape
    tile_columns = (blocks + 3) // 4
    nibbles, all_words = weight.view(np.uint16), bricks.view(np.uint32)
    for index in range(bricks.shape[0]):
        first_row, first_block = TILE * (index // tile_columns), 4 * (index % tile_columns)
        here = min(4, blocks - first_block)
        for group in range(_GROUPS):
            row = first_row + 16 * (group >> 3) + (group & 7)
            if row >= rows:
                continue
            first, at = _WORDS * group, 4 * first_block
            if here == 4 and row + 8 < rows:
                words = all_words[index, first : first + _WORDS]
                upper, lower = nibbles[row, at : at + _WORDS], nibbles[row + 8, at : at + _WORDS]
                for i in range(_WORDS):
                    upper[i] = _take_upper(words[i])
                for i in range(_WORDS):
                    lower[i] = _take_lower(words[i])
                continue
            for i in range(4 * here):
                nibbles[row, at + i] = _take_upper(all_words[index, first + i])
                if row + 8 < rows:
                    nibbles[row + 8, at + i] = _take_lower(all_words[index, first + i])
    for row in range(rows):
        tops = np.uint8(0)
        for block in range(blocks):
            tops |= scale[row, block]
        if not tops & 0x80:
            continue
        for block in range(blocks):
            if scale[row, block] & 0x80:
                for i in range(4 * block, 4 * block + 4):
                    nibbles[row, i] ^= _SIGNS


@compiled()
def decode_tiles(bricks: Any, base: int, first_brick: int, patches: Any, weight: Any, scale: Any) -> int:
    """Decode whole row tiles; parameters and result as for `decode_scales`."""
    rows, tile_columns, used = scale.shape[0], (scale.shape[1] + 3) // 4, 0
    for first in range(0, rows, TILE):  # one row tile at a time stays in the cache
        last, at = min(first + TILE, rows), first // TILE * tile_columns
        here, end = bricks[at : at + tile_columns], used
        while end < patches.shape[0] and patches[end, 0] < 256 * (first_brick + at + tile_columns):
            end += 1
        bad = decode_scales(here, base, first_brick + at, patches[used:end], scale[first:last])
        if bad >= 0:
            return used + bad
        decode_nibbles(here, scale[first:last], weight[first:last])
        used = end
    return -1 if used == patches.shape[0] else used
