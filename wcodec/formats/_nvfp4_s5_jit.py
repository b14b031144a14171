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
_SIGNS = np.uint64(0x8888888888888888)  # of a block
_ONES, _TOPS = np.uint32(0x01010101), np.uint32(0x80808080)  # of four scale bytes in a u32
_LOW, _OUTSIDE = np.uint32(0x0F0F0F0F), np.uint32(0xE0E0E0E0)


def _spread_table() -> Any:
    """For each byte with bit 4 of four codes in its even bits: the four codes, a byte each."""
    bits = np.arange(256, dtype=np.uint32)
    return sum((bits >> (2 * t) & 1) << (8 * t + 4) for t in range(4)).astype(np.uint32)


_SPREAD = _spread_table()


# An odd column's nibble is four bits above the one before it, and in a step word 16 above: a copy 12 bits up
# (or down) brings two nibbles into place with the same shifts. Two signs go their own ways.
@compiled(inline="always")
def _place_upper(nibbles: Any) -> int:
    """The bits of a step word that hold four nibbles of the upper block."""
    one = _U32(nibbles)
    two = one | one << _U32(12)
    return _U32(
        (two << _U32(6)) & _U32(0x01C001C0)
        | (two << _U32(2)) & _U32(0x1C001C00)
        | (two << _U32(12)) & _U32(0x80008000)
        | (one << _U32(8)) & _U32(0x00080000)
        | (one >> _U32(12)) & _U32(0x00000008)
    )


@compiled(inline="always")
def _place_lower(nibbles: Any) -> int:
    """The bits of a step word that hold four nibbles of the lower block."""
    one = _U32(nibbles)
    two = one | one << _U32(12)
    return _U32(
        two & _U32(0x00070007)
        | (two << _U32(6)) & _U32(0x02000200)
        | (two << _U32(4)) & _U32(0x60006000)
        | (two >> _U32(4)) & _U32(0x00100010)
        | (one << _U32(10)) & _U32(0x00200000)
        | (one >> _U32(10)) & _U32(0x00000020)
    )


@compiled(inline="always")
def _take_upper(word: Any) -> int:
    """Inverse of `_place_upper`."""
    two = (
        (word & _U32(0x01C001C0)) >> _U32(6)
        | (word & _U32(0x1C001C00)) >> _U32(2)
        | (word & _U32(0x80008000)) >> _U32(12)
    )
    return _U16(two | two >> _U32(12) | (word >> _U32(8)) & _U32(0x0800) | (word << _U32(12)) & _U32(0x8000))


@compiled(inline="always")
def _take_lower(word: Any) -> int:
    """Inverse of `_place_lower`."""
    two = (
        word & _U32(0x00070007)
        | (word & _U32(0x02000200)) >> _U32(6)
        | (word & _U32(0x60006000)) >> _U32(4)
        | (word & _U32(0x00100010)) << _U32(4)
    )
    return _U16(two | two >> _U32(12) | (word >> _U32(10)) & _U32(0x0800) | (word << _U32(10)) & _U32(0x8000))


@compiled()
def encode_nibbles(weight: Any, bricks: Any) -> None:
    """Encode the nibbles of whole row tiles; parameters as for `encode_tiles`."""
    rows, blocks = weight.shape[0], weight.shape[1] // 8
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
                if used < patches.shape[0]:
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
    for first in range(0, bricks.shape[0], max(tile_columns, 1)):
        here, words = bricks[first : first + tile_columns], all_words[first : first + tile_columns]
        for group in range(_GROUPS):
            quarter, g = group >> 3, group & 7
            row = TILE * (first // tile_columns) + 16 * quarter + g
            if row >= rows:
                continue
            by_four = blocks % 4 == 0 and base >= 0 and row + 8 < rows
            at = NIBBLE_BYTES + 40 * quarter
            low, high = words[:, at // 4 + g], here[:, at + 32 + g]
            upper = fours[row * tile_columns : (row + 1) * tile_columns]
            lower = fours[(row + 8) * tile_columns : (row + 9) * tile_columns]
            for column in range(tile_columns):
                if by_four:  # four scales of a row at a time
                    one, two = _codes(upper[column], bases), _codes(lower[column], bases)
                    if not ((one | two) & _OUTSIDE | (upper[column] | lower[column]) & _TOPS):
                        low[column] = one & _LOW | (two & _LOW) << _U32(4)
                        high[column] = _gather(one) | _gather(two) << _U32(1)
                        continue
                step_words = words[column, _WORDS * group : _WORDS * (group + 1)]
                place = 256 * (first_brick + first + column) + 8 * group
                used += _encode_scales_of(
                    scale, row, 4 * column, base, place, step_words, here[column], patches[used:]
                )
    return used


@compiled()
def encode_tiles(weight: Any, scale: Any, base: int, first_brick: int, bricks: Any, patches: Any) -> int:
    """Encode whole row tiles; return the number of patches, which come in any order.

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
        Those for which there is no room are counted only.
    """
    tile_columns, used = (scale.shape[1] + 3) // 4, 0
    for at in range(0, bricks.shape[0], max(tile_columns, 1)):  # one row tile at a time stays in the cache
        first = TILE * (at // tile_columns)
        here, rows = bricks[at : at + tile_columns], slice(first, first + TILE)
        encode_nibbles(weight[rows], here)
        used += encode_scales(scale[rows], base, first_brick + at, here, patches[used:])
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
def decode_scales(bricks: Any, base: int, scale: Any) -> None:
    """Decode the scales of whole row tiles, patches aside; parameters as for `encode_tiles`."""
    rows, blocks = scale.shape
    tile_columns = (blocks + 3) // 4
    all_words = bricks.view(np.uint32)
    fours = scale.reshape(-1)[: scale.size // 4 * 4].view(np.uint32)
    bases = _U32(base & 0xFF) * _ONES
    for first in range(0, bricks.shape[0], max(tile_columns, 1)):
        here, words = bricks[first : first + tile_columns], all_words[first : first + tile_columns]
        for group in range(_GROUPS):
            quarter, g = group >> 3, group & 7
            row = TILE * (first // tile_columns) + 16 * quarter + g
            if row >= rows:
                continue
            if blocks % 4 or base < 0 or row + 8 >= rows:
                for column in range(tile_columns):
                    _decode_scales_of(scale, row, 4 * column, base, group, here[column])
                continue
            # Four scales of a row at a time, from brick to brick: each has its scales in other cache lines,
            # and many of them are on their way at once.
            at = NIBBLE_BYTES + 40 * quarter
            low, high = words[:, at // 4 + g], here[:, at + 32 + g]
            upper = fours[row * tile_columns : (row + 1) * tile_columns]
            lower = fours[(row + 8) * tile_columns : (row + 9) * tile_columns]
            for column in range(tile_columns):
                four, tops = low[column], high[column]
                upper[column] = bases + (four & _LOW | _SPREAD[tops])
                lower[column] = bases + (four >> _U32(4) & _LOW | _SPREAD[tops >> 1])


@compiled(inline="always")
def _place_of(place: int, first_brick: int, tile_columns: int) -> tuple[int, int]:
    """Row and block of the scale at a place."""
    index = (place >> 8) - first_brick
    quarter, lane, lower = place >> 6 & 3, place >> 1 & 31, place & 1
    row = TILE * (index // tile_columns) + 16 * quarter + 8 * lower + (lane >> 2)
    return row, 4 * (index % tile_columns) + (lane & 3)


@compiled()
def check_patches(patches: Any, first_brick: int, rows: int, blocks: int) -> int:
    """Index of the first malformed patch of whole row tiles, −1 if there is none.

    Parameters
    ----------
    patches : uint32 array, shape (patches, 2)
        Those of these row tiles.
    first_brick : int
        Index of their first brick in the matrix.
    rows, blocks : int
        Shape of their scales.
    """
    tile_columns, previous = (blocks + 3) // 4, 256 * first_brick - 1
    for i in range(patches.shape[0]):
        place, byte = int(patches[i, 0]), int(patches[i, 1])
        if place <= previous or byte > 255 or not blocks:
            return i
        row, block = _place_of(place, first_brick, tile_columns)
        if row >= rows or block >= blocks:
            return i
        previous = place
    return -1


@compiled()
def apply_patches(patches: Any, first_brick: int, scale: Any) -> None:
    """Put the bytes of patches, which are checked, into the scales of whole row tiles."""
    tile_columns = (scale.shape[1] + 3) // 4
    for i in range(patches.shape[0]):
        row, block = _place_of(int(patches[i, 0]), first_brick, tile_columns)
        scale[row, block] = patches[i, 1]


@compiled()
def decode_nibbles(bricks: Any, weight: Any) -> None:
    """Decode the nibbles of whole row tiles, signs as they are stored; parameters as for `encode_tiles`."""
    rows, blocks = weight.shape[0], weight.shape[1] // 8
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


@compiled()
def invert_signs(scale: Any, weight: Any) -> None:
    """Invert the signs of all nibbles whose scale has its top bit set."""
    scales, blocks = scale.reshape(-1), weight.reshape(-1).view(np.uint64)
    for i in range(scales.size):
        if scales[i] & 0x80:
            blocks[i] ^= _SIGNS
