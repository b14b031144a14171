"""Compiled loops of `nvfp4-s5` on the host: row tiles in, bricks out, and back (``docs/format_nvfp4.md``)."""

# mypy: ignore-errors
# (numba types what is below itself)
from __future__ import annotations

from typing import Any

import numpy as np

from wcodec._compiled import compiled

TILE = 64
NIBBLE_BYTES = 2048


def _pair_table() -> Any:
    """Bits of a u32 step word for each A register (0 … 3) and each byte of two nibbles."""
    # mantissa, low exponent and sign bit of the first and of the second weight
    places = (
        ((6, 7, 15), (22, 23, 31)),
        ((0, 1, 9), (16, 17, 25)),
        ((10, 11, 19), (26, 27, 3)),
        ((4, 13, 21), (20, 29, 5)),
    )
    table = np.zeros((4, 256), dtype=np.uint32)
    for register, pair in enumerate(places):
        for byte in range(256):
            word = 0
            for nibble, (mantissa, exponent, sign) in zip((byte & 15, byte >> 4), pair, strict=True):
                word |= (nibble & 1) << mantissa | (nibble >> 1 & 3) << exponent | (nibble >> 3) << sign
            table[register, byte] = word
    return table


PAIRS = _pair_table()


@compiled()
def encode_tiles(weight: Any, scale: Any, base: int, first_brick: int, bricks: Any, patches: Any) -> int:
    """Encode whole row tiles; return the number of patches.

    Parameters
    ----------
    weight, scale : uint8 arrays, shapes (rows, K / 2) and (rows, K / 16)
    base : int
        First value of the window, −1 for raw scales.
    first_brick : int
        Index of the first brick in the matrix.
    bricks : uint8 array, shape (bricks, bytes per brick), zeroed
    patches : uint32 array, shape (patches, 2)
        Large enough for all scales outside the window.
    """
    rows, blocks = scale.shape
    tile_columns = (blocks + 3) // 4
    used = 0
    words = np.empty(4, dtype=np.uint32)
    for index in range(bricks.shape[0]):
        tile_row, tile_column = index // tile_columns, index % tile_columns
        brick = bricks[index]
        for lane_in_brick in range(128):
            quarter, lane = lane_in_brick >> 5, lane_in_brick & 31
            block = 4 * tile_column + (lane & 3)
            if block >= blocks:
                continue
            words[:] = 0
            for lower in range(2):
                row = TILE * tile_row + 16 * quarter + 8 * lower + (lane >> 2)
                if row >= rows:
                    continue
                byte = scale[row, block]
                flip = np.uint8(0x88 if byte & 0x80 else 0)
                for j in range(4):
                    first, second = weight[row, 8 * block + 2 * j], weight[row, 8 * block + 2 * j + 1]
                    words[j] |= PAIRS[lower, first ^ flip] | PAIRS[2 + lower, second ^ flip]
                if base < 0:
                    brick[NIBBLE_BYTES + 64 * quarter + 2 * lane + lower] = byte
                    continue
                code = int(byte) - base
                if code < 0 or code > 31:
                    patches[used, 0] = 256 * (first_brick + index) + 64 * quarter + 2 * lane + lower
                    patches[used, 1] = byte
                    used += 1
                    continue
                at = NIBBLE_BYTES + 40 * quarter
                brick[at + lane] |= np.uint8((code & 15) << (4 * lower))
                bit = 2 * lane + lower
                brick[at + 32 + (bit >> 3)] |= np.uint8((code >> 4) << (bit & 7))
            for j in range(4):
                for i in range(4):
                    brick[512 * quarter + 16 * lane + 4 * j + i] = (words[j] >> np.uint32(8 * i)) & 255
    return used


@compiled()
def _pair(word: Any, register: int) -> int:
    """The byte of two nibbles that a step word holds for one A register."""
    w = np.int64(word)
    if register == 1:
        w <<= 6
    elif register == 2:
        w = w >> 4 | w << 28
    elif register == 3:
        turned = w >> 6 | w << 26
        w = (turned & 0x81808180) | (w << 2 & 0x00400040)
    return (w >> 6 & 7) | (w >> 12 & 8) | (w >> 18 & 0x70) | (w >> 24 & 0x80)


@compiled()
def decode_tiles(bricks: Any, base: int, first_brick: int, patches: Any, weight: Any, scale: Any) -> int:
    """Decode whole row tiles; return −1, or the index of the first patch that is malformed.

    `patches` are those of these bricks, shape (patches, 2); `weight` and `scale` as for `encode_tiles`.
    """
    rows, blocks = scale.shape
    tile_columns = (blocks + 3) // 4
    for index in range(bricks.shape[0]):
        tile_row, tile_column = index // tile_columns, index % tile_columns
        brick = bricks[index]
        for lane_in_brick in range(128):
            quarter, lane = lane_in_brick >> 5, lane_in_brick & 31
            block = 4 * tile_column + (lane & 3)
            if block >= blocks:
                continue
            for lower in range(2):
                row = TILE * tile_row + 16 * quarter + 8 * lower + (lane >> 2)
                if row >= rows:
                    continue
                if base < 0:
                    scale[row, block] = brick[NIBBLE_BYTES + 64 * quarter + 2 * lane + lower]
                else:
                    at, bit = NIBBLE_BYTES + 40 * quarter, 2 * lane + lower
                    low = brick[at + lane] >> np.uint8(4 * lower) & 15
                    high = brick[at + 32 + (bit >> 3)] >> np.uint8(bit & 7) & 1
                    scale[row, block] = base + low + 16 * high
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
    for index in range(bricks.shape[0]):
        tile_row, tile_column = index // tile_columns, index % tile_columns
        brick = bricks[index]
        for lane_in_brick in range(128):
            quarter, lane = lane_in_brick >> 5, lane_in_brick & 31
            block = 4 * tile_column + (lane & 3)
            if block >= blocks:
                continue
            for j in range(4):
                at = 512 * quarter + 16 * lane + 4 * j
                word = np.uint32(0)
                for i in range(4):
                    word |= np.uint32(brick[at + i]) << np.uint32(8 * i)
                for lower in range(2):
                    row = TILE * tile_row + 16 * quarter + 8 * lower + (lane >> 2)
                    if row >= rows:
                        continue
                    flip = 0x88 if scale[row, block] & 0x80 else 0
                    weight[row, 8 * block + 2 * j] = _pair(word, lower) ^ flip
                    weight[row, 8 * block + 2 * j + 1] = _pair(word, 2 + lower) ^ flip
    return -1
