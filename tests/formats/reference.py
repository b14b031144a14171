"""An independent decoder of `docs/format.md`, written from its text alone, one weight at a time.

It shares nothing with the package on purpose. Slow; feed it small matrices.
"""

from __future__ import annotations

import struct

import numpy as np


def decode(blob: bytes) -> np.ndarray:
    """Return the weights of a `bf16-w12` blob as uint16, in their logical shape."""
    footer = blob[-64:]
    magic, code, _version, dtype, ndim, split = struct.unpack_from("<8sHHBBB", footer)
    assert (magic, code, dtype) == (b"WCTENSOR", 1, 1)
    table = footer[16:24]
    (overflow_count,) = struct.unpack_from("<Q", footer, 24)
    dims = struct.unpack(f"<{ndim}Q", blob[len(blob) - 64 - 8 * ndim : len(blob) - 64])
    n_rows = n_cols = 1
    for d in dims[:split]:
        n_rows *= d
    for d in dims[split:]:
        n_cols *= d

    row_tiles, col_tiles = (n_rows + 63) // 64, (n_cols + 63) // 64
    overflow_at = row_tiles * col_tiles * 6208
    overflow = struct.unpack(f"<{overflow_count}I", blob[overflow_at : overflow_at + 4 * overflow_count])

    weights = np.zeros((n_rows, n_cols), dtype=np.uint16)

    def place(r: int, c: int, quarter: int, step: int, lane: int, p: int) -> tuple[int, int]:
        g, t = lane // 4, lane % 4
        row = g + (8 if p in (2, 3, 6, 7) else 0)
        column = 2 * t + p % 2 + (8 if p >= 4 else 0)
        return 64 * r + 16 * quarter + row, 64 * c + 16 * step + column

    for r in range(row_tiles):
        for c in range(col_tiles):
            brick = blob[(r * col_tiles + c) * 6208 :][:6208]
            for quarter in range(4):
                base = 1536 * quarter
                for step in range(4):
                    for lane in range(32):
                        (word,) = struct.unpack_from("<I", brick, base + 1024 + 16 * lane + 4 * step)
                        for p in range(8):
                            low = brick[base + 512 * (step // 2) + 16 * lane + 8 * (step % 2) + p]
                            value = table[(word >> (4 * p)) & 7]
                            sign = (word >> (4 * (1, 3, 5, 7, 0, 2, 4, 6)[p] + 3)) & 1
                            row, column = place(r, c, quarter, step, lane, p)
                            if row < n_rows and column < n_cols:
                                weights[row, column] = sign << 15 | value << 8 | low

                patch = int.from_bytes(brick[6144 + 16 * quarter :][:16], "little")
                tag = patch >> 120
                if tag == 255:
                    start, count = patch & 0xFFFFFFFF, (patch >> 32) & 0xFFFFFFFF
                    entries = overflow[start : start + count]
                    assert len(entries) == count
                else:
                    assert tag <= 6
                    entries = [(patch >> (20 * i)) & 0x3FFFF for i in range(tag)]
                for entry in entries:
                    lane, step, p, high = entry & 31, (entry >> 5) & 3, (entry >> 7) & 7, entry >> 10
                    row, column = place(r, c, quarter, step, lane, p)
                    if row < n_rows and column < n_cols:
                        weights[row, column] = high << 8 | (int(weights[row, column]) & 0xFF)
    return weights.reshape(dims)
