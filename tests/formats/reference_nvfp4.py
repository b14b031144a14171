"""A decoder of ``nvfp4-s5`` from docs/format_nvfp4.md alone: slow, plain, no code shared with wcodec."""

from __future__ import annotations

import struct

import numpy as np

# p: (lower block?, column, mantissa bit, low exponent bit, high exponent bit, sign bit)
WEIGHTS = (
    (0, 0, 6, 7, 8, 15),
    (0, 1, 22, 23, 24, 31),
    (1, 0, 0, 1, 2, 9),
    (1, 1, 16, 17, 18, 25),
    (0, 2, 10, 11, 12, 19),
    (0, 3, 26, 27, 28, 3),
    (1, 2, 4, 13, 14, 21),
    (1, 3, 20, 29, 30, 5),
)


def decode(blob: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Nibble bytes, shape (N, K / 2), and scale bytes, shape (N, K / 16)."""
    footer = blob[-64:]
    magic, code, version, dtype, ndim, split = struct.unpack_from("<8sHHBBB", footer)
    assert (magic, code, version, dtype, split) == (b"WCTENSOR", 2, 1, 17, ndim - 1)
    mode, base = footer[16], footer[17]
    (overflow,) = struct.unpack_from("<Q", footer, 24)
    dims = struct.unpack(f"<{ndim}Q", blob[-64 - 8 * ndim : -64])
    cols = dims[-1]
    rows = int(np.prod(dims[:-1], dtype=np.int64))
    tiles, chunks = -(-rows // 64), -(-cols // 64)
    size = 2208 if mode else 2304

    nibbles = np.zeros((tiles * 64, chunks * 64), dtype=np.uint8)
    scales = np.zeros((tiles * 64, chunks * 4), dtype=np.uint8)
    for index in range(tiles * chunks):
        brick = blob[index * size : (index + 1) * size]
        r, c = divmod(index, chunks)
        for w in range(4):
            (high,) = struct.unpack_from("<Q", brick, 2048 + 40 * w + 32) if mode else (0,)
            for lane in range(32):
                g, t = divmod(lane, 4)
                for step, word in enumerate(struct.unpack_from("<4I", brick, 512 * w + 16 * lane)):
                    for lower, column, m, e0, e1, s in WEIGHTS:
                        bits = [word >> bit & 1 for bit in (m, e0, e1, s)]
                        row = 64 * r + 16 * w + g + 8 * lower
                        nibbles[row, 64 * c + 16 * t + 4 * step + column] = sum(
                            b << i for i, b in enumerate(bits)
                        )
                for lower in range(2):
                    row = 64 * r + 16 * w + g + 8 * lower
                    if mode:
                        low = brick[2048 + 40 * w + lane] >> (4 * lower) & 15
                        value = base + low + 16 * (high >> (2 * lane + lower) & 1)
                    else:
                        value = brick[2048 + 64 * w + 2 * lane + lower]
                    scales[row, 4 * c + t] = value
    start = tiles * chunks * size
    for i in range(overflow // 2):
        place, byte = struct.unpack_from("<2I", blob, start + 8 * i)
        index, inside = divmod(place, 256)
        w, inside = divmod(inside, 64)
        lane, lower = divmod(inside, 2)
        r, c = divmod(index, chunks)
        scales[64 * r + 16 * w + lane // 4 + 8 * lower, 4 * c + lane % 4] = byte
    nibbles = nibbles[:rows, :cols]
    scales = scales[:rows, : cols // 16]
    negative = np.repeat(scales >> 7, 16, axis=1)
    nibbles = nibbles ^ (negative << 3)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scales
