"""Compiled loops of `bf16-w12` on the host: row tiles in, bricks out, and back.

Element loops instead of slice assignments: numba compiles those in a third of the time.

All loops run without the GIL and touch only their own rows, so threads share a tensor by row tiles. At the
right and the bottom edge, and only there, rows are padded to whole bricks in a 64 × 64 scratch tile.
"""

# mypy: ignore-errors
# (numba types what is below itself)
from __future__ import annotations

from typing import Any

import numpy as np

from wcodec._compiled import compiled
from wcodec.formats._bf16_w12_layout import (
    BRICK_BYTES,
    INLINE_PATCHES,
    OVERFLOW_TAG,
    PATCHES_AT,
    QUARTER_BYTES,
    QUARTER_WEIGHTS,
    TILE,
)
from wcodec.formats._bf16_w12_simd import count_outside, decode_group, encode_group

_ENTRY_MASK = np.uint64((1 << 18) - 1)


@compiled()
def count_high_exponents(bits: Any, counts: Any) -> None:
    """Add the histogram of the 7 high exponent bits of uint16 `bits` (1-D) to int64 `counts` (128)."""
    # Few values occur, so neighbours often hit one counter: eight tables take turns to hide its latency.
    # (For all 65,536 patterns one table is faster: see `wcodec._bits_jit`.)
    tables = np.zeros((8, 256), dtype=np.int64)
    whole = bits.size // 8 * 8
    for i in range(0, whole, 8):
        for j in range(8):
            tables[j, bits[i + j] >> 8] += 1
    for i in range(whole, bits.size):
        tables[0, bits[i] >> 8] += 1
    for j in range(8):
        for high in range(256):
            counts[high & 127] += tables[j, high]


@compiled()
def as_word(table: Any) -> int:
    """A table of up to eight bytes as a u64, first entry in the lowest byte."""
    word = np.uint64(0)
    for i in range(table.size):
        word |= np.uint64(table[i]) << np.uint64(8 * i)
    return word


@compiled()
def _outside(table: Any) -> Any:
    """Whether each of the 128 high-exponent values is outside the table."""
    outside = np.ones(128, dtype=np.bool_)
    for i in range(8):
        outside[table[i]] = False
    return outside


@compiled()
def _find_exceptions(tile: Any, first_row: int, groups: int, outside: Any, entries: Any) -> int:
    """Collect the exceptions of a quarter's row groups, a bit mask, into `entries`; return how many."""
    count = 0
    # In the order of positions (docs/format.md 2.3), so that nothing needs sorting.
    for p in range(8):
        for step in range(4):
            for lane in range(32):
                if not (groups >> (lane >> 2)) & 1:
                    continue
                row = first_row + (lane >> 2) + 8 * ((p >> 1) & 1)
                high = tile[row, 16 * step + 8 * (p >> 2) + 2 * (lane & 3) + (p & 1)] >> 8
                if outside[high & 0x7F]:
                    entries[count] = lane + 32 * step + 128 * p + (high << 10)
                    count += 1
    return count


@compiled()
def _write_patch_word(brick: Any, quarter: int, entries: Any, count: int, overflow: Any, used: int) -> int:
    """Write a quarter's patch word; return how many overflow entries are in use afterwards."""
    word = brick[PATCHES_AT + 16 * quarter : PATCHES_AT + 16 * quarter + 16]
    if count <= INLINE_PATCHES:
        for i in range(count):
            for bit in range(18):
                if (entries[i] >> bit) & 1:
                    at = 20 * i + bit
                    word[at >> 3] |= np.uint8(1 << (at & 7))
        word[15] = count
        return used
    for byte in range(4):
        word[byte] = (used >> (8 * byte)) & 0xFF
        word[4 + byte] = (count >> (8 * byte)) & 0xFF
    word[15] = OVERFLOW_TAG
    for i in range(min(count, overflow.size - used)):
        overflow[used + i] = entries[i]
    return used + count


@compiled()
def encode_rows(bits: Any, table: Any, bricks: Any, overflow: Any) -> int:
    """Encode whole row tiles (the last may be short).

    Parameters
    ----------
    bits : uint16 array, (rows, K), C-contiguous
    table : uint8 array, (8,)
    bricks : uint8 array, (ceil(rows / 64) * ceil(K / 64), 6208)
        Written completely.
    overflow : uint32 array
        Filled from the front; entries for which there is no room are counted only.

    Returns
    -------
    int
        Overflow entries. Patch words count from the first of them.
    """
    rows, cols = bits.shape
    tile_columns = (cols + TILE - 1) // TILE
    outside, packed_table = _outside(table), as_word(table)
    scratch = np.empty((TILE, TILE), dtype=np.uint16)
    entries = np.empty(QUARTER_WEIGHTS, dtype=np.uint32)
    used = 0
    for index in range(bricks.shape[0]):
        row0, col0 = (index // tile_columns) * TILE, (index % tile_columns) * TILE
        height, width = min(TILE, rows - row0), min(TILE, cols - col0)
        if height == TILE and width == TILE:
            tile = bits[row0 : row0 + TILE, col0 : col0 + TILE]
        else:
            # Code 0, sign 0, low byte 0: what the specification asks of padding.
            for row in range(TILE):
                for col in range(TILE):
                    inside = row < height and col < width
                    scratch[row, col] = bits[row0 + row, col0 + col] if inside else np.uint16(table[0]) << 8
            tile = scratch[:, :]
        brick = bricks[index]
        for byte in range(PATCHES_AT, BRICK_BYTES):
            brick[byte] = 0
        source = np.uint64(tile.ctypes.data)
        stride = np.uint64(tile.strides[0])
        target = np.uint64(brick.ctypes.data)
        for quarter in range(4):
            groups = 0
            for group in range(8):
                row = source + np.uint64(16 * quarter + group) * stride
                planes = target + np.uint64(QUARTER_BYTES * quarter + 64 * group)
                if encode_group(row, row + np.uint64(8) * stride, planes, packed_table):
                    groups |= 1 << group
            if groups:
                count = _find_exceptions(tile, 16 * quarter, groups, outside, entries)
                used = _write_patch_word(brick, quarter, entries, count, overflow, used)
    return used


@compiled(inline="always")
def _overflow_range(word: Any) -> tuple[int, int]:
    """Start and count of a patch word whose tag says overflow."""
    start, count = np.int64(0), np.int64(0)
    for byte in range(4):
        start |= np.int64(word[byte]) << (8 * byte)
        count |= np.int64(word[4 + byte]) << (8 * byte)
    return start, count


@compiled()
def shift_overflow(bricks: Any, shift: int) -> None:
    """Add `shift` to the overflow starts of these bricks' patch words."""
    for index in range(bricks.shape[0]):
        for quarter in range(4):
            word = bricks[index, PATCHES_AT + 16 * quarter : PATCHES_AT + 16 * quarter + 16]
            if word[15] == OVERFLOW_TAG:
                start = shift + _overflow_range(word)[0]
                for byte in range(4):
                    word[byte] = (start >> (8 * byte)) & 0xFF


@compiled(inline="always")
def _patch(tile: Any, first_row: int, entry: int) -> None:
    lane, step, p = entry & 31, (entry >> 5) & 3, (entry >> 7) & 7
    row = first_row + (lane >> 2) + 8 * ((p >> 1) & 1)
    column = 16 * step + 8 * (p >> 2) + 2 * (lane & 3) + (p & 1)
    tile[row, column] = (tile[row, column] & 0xFF) | ((entry >> 10) & 0xFF) << 8


@compiled()
def _apply_patch_word(tile: Any, quarter: int, word: Any, overflow: Any) -> bool:
    """Patch a decoded quarter; False if the patch word is malformed."""
    tag = word[15]
    if tag <= INLINE_PATCHES:
        low, high = np.uint64(0), np.uint64(0)
        for byte in range(8):
            low |= np.uint64(word[byte]) << np.uint64(8 * byte)
            high |= np.uint64(word[8 + byte]) << np.uint64(8 * byte)
        for i in range(tag):
            at = np.uint64(20 * i)
            if at >= 64:
                entry = high >> (at - np.uint64(64))
            elif at > 46:
                entry = (low >> at) | (high << (np.uint64(64) - at))
            else:
                entry = low >> at
            _patch(tile, 16 * quarter, np.int64(entry & _ENTRY_MASK))
        return True
    if tag != OVERFLOW_TAG:
        return False
    start, count = _overflow_range(word)
    if count <= INLINE_PATCHES or count > QUARTER_WEIGHTS or start + count > overflow.size:
        return False
    for i in range(start, start + count):
        _patch(tile, 16 * quarter, np.int64(overflow[i]))
    return True


@compiled()
def decode_rows(bricks: Any, table: Any, overflow: Any, bits: Any) -> int:
    """Decode whole row tiles into `bits`; the arrays are those of `encode_rows`.

    Returns
    -------
    int
        Index of the first brick with a malformed patch word, or −1.
    """
    rows, cols = bits.shape
    tile_columns = (cols + TILE - 1) // TILE
    packed_table = as_word(table)
    scratch = np.empty((TILE, TILE), dtype=np.uint16)
    for index in range(bricks.shape[0]):
        row0, col0 = (index // tile_columns) * TILE, (index % tile_columns) * TILE
        height, width = min(TILE, rows - row0), min(TILE, cols - col0)
        whole = height == TILE and width == TILE
        tile = bits[row0 : row0 + TILE, col0 : col0 + TILE] if whole else scratch[:, :]
        brick = bricks[index]
        target = np.uint64(tile.ctypes.data)
        stride = np.uint64(tile.strides[0])
        source = np.uint64(brick.ctypes.data)
        for quarter in range(4):
            for group in range(8):
                row = target + np.uint64(16 * quarter + group) * stride
                planes = source + np.uint64(QUARTER_BYTES * quarter + 64 * group)
                decode_group(planes, row, row + np.uint64(8) * stride, packed_table)
            at = PATCHES_AT + 16 * quarter
            if brick[at + 15] and not _apply_patch_word(tile, quarter, brick[at : at + 16], overflow):
                return index
        if not whole:
            for row in range(height):
                for col in range(width):
                    bits[row0 + row, col0 + col] = scratch[row, col]
    return -1


@compiled()
def count_overflow(bits: Any, table: Any) -> int:
    """Overflow entries that `encode_rows` would write for these rows, without encoding."""
    rows, cols = bits.shape
    outside, packed_table = _outside(table), as_word(table)
    whole = cols - cols % TILE
    address = np.uint64(bits.ctypes.data)
    stride = np.uint64(bits.strides[0])
    counts = np.empty((cols + TILE - 1) // TILE, dtype=np.int64)
    total = 0
    for first in range(0, rows, 16):
        for tile_column in range(counts.size):
            counts[tile_column] = 0
        for row in range(first, min(first + 16, rows)):
            at = address + np.uint64(row) * stride
            for col in range(0, whole, TILE):
                counts[col // TILE] += np.int64(count_outside(at + np.uint64(2 * col), packed_table))
            for col in range(whole, cols):
                counts[col // TILE] += outside[(bits[row, col] >> 8) & 0x7F]
        for count in counts:
            if count > INLINE_PATCHES:
                total += count
    return total
