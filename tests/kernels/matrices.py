"""BF16 matrices that packers get wrong: every pattern, edges, zeros, nothing but exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from wcodec.bits import bf16_from_f32

Bits = npt.NDArray[np.uint16]


def gaussian(rows: int, cols: int, seed: int = 0, sigma: float = 0.02) -> Bits:
    """Weights as networks have them."""
    return bf16_from_f32(np.random.default_rng(seed).normal(0, sigma, (rows, cols)).astype(np.float32))


def all_patterns(rows: int = 256, cols: int = 256, seed: int = 1) -> Bits:
    """Each of the 65,536 patterns once, shuffled."""
    bits = np.arange(65536, dtype=np.uint16)
    np.random.default_rng(seed).shuffle(bits)
    return bits.reshape(rows, cols)


def half_zero(rows: int, cols: int) -> Bits:
    """Every second weight is zero, which is far from the others' exponents."""
    bits = gaussian(rows, cols, seed=2)
    bits[np.random.default_rng(3).random(bits.shape) < 0.5] = 0
    return bits


def only_exceptions(rows: int, cols: int) -> Bits:
    """The first brick holds nothing but exceptions: 16 rare high bytes in a matrix of others."""
    bits = gaussian(rows, cols, seed=4)
    bits[:64, :64] = np.random.default_rng(5).integers(0x6000, 0x7000, bits[:64, :64].shape, dtype=np.uint16)
    return bits


def few_exceptions(rows: int, cols: int) -> Bits:
    """0 … 13 exceptions a quarter, around the six that fit into a patch word."""
    bits = gaussian(rows, cols, seed=6)
    random = np.random.default_rng(7)
    tiles = [(r, c) for r in range(0, rows, 16) for c in range(0, cols, 64)]
    for index, (r, c) in enumerate(tiles):
        for _ in range(index % 14):
            row, col = min(r + random.integers(16), rows - 1), min(c + random.integers(64), cols - 1)
            bits[row, col] = random.integers(0x7000, 0x7F00) | random.integers(2) << 15
    return bits


#: Exceptions of one quarter after another: around 6, 32 and 64, a brick of 231, all of a quarter, none.
CROWDS = (58, 58, 58, 57, 1024, 7, 31, 32, 33, 64, 65, 6, 63, 1023, 0, 1, 512)


def crowded(rows: int, cols: int) -> Bits:
    """Quarters with as many exceptions as `CROWDS` says, in a matrix that has none besides."""
    random = np.random.default_rng(8)
    high = random.integers(0x38, 0x40, (rows, cols), dtype=np.uint16)  # eight values: they make the table
    tiles = [(r, c) for r in range(0, rows, 16) for c in range(0, cols, 64)]
    for index, (r, c) in enumerate(tiles):
        quarter = high[r : r + 16, c : c + 64]
        chosen = random.permutation(quarter.size)[: CROWDS[index % len(CROWDS)]]
        quarter[np.unravel_index(chosen, quarter.shape)] = random.integers(0x10, 0x30, chosen.size)
    low, sign = random.integers(256, size=high.shape), random.integers(2, size=high.shape)
    return (sign << 15 | high << 8 | low).astype(np.uint16)


MATRICES: dict[str, Callable[[], Bits]] = {
    "gaussian": lambda: gaussian(128, 192),
    "all patterns": all_patterns,
    "odd": lambda: gaussian(77, 131),
    "one row": lambda: gaussian(1, 65),
    "one column": lambda: gaussian(65, 1),
    "one weight": lambda: gaussian(1, 1),
    "half zero": lambda: half_zero(70, 200),
    "constant": lambda: np.full((64, 64), 0x3C23, dtype=np.uint16),
    "only exceptions": lambda: only_exceptions(512, 128),
    "few exceptions": lambda: few_exceptions(224, 136),
}


def lone_patterns() -> Bits:
    """Row r holds pattern r and zeros."""
    bits = np.zeros((65536, 64), np.uint16)
    rows = np.arange(65536)
    bits[rows, rows * 37 % 64] = rows
    return bits


# A matrix as tile, quarter, + 8, row | tile, step, + 8, pair, column; this is the order in bricks.
_BRICK_AXES = (0, 4, 1, 5, 3, 7, 6, 2, 8)


def plain_bricks(bits: Bits) -> npt.NDArray[np.uint8]:
    """Uncompressed bricks: fragment order, 2 bytes per weight, plane j = step j."""
    rows, cols = (-(-n // 64) for n in bits.shape)
    whole = np.zeros((rows * 64, cols * 64), np.uint16)
    whole[: bits.shape[0], : bits.shape[1]] = bits
    axes = whole.reshape(rows, 4, 2, 8, cols, 4, 2, 4, 2).transpose(_BRICK_AXES)
    return np.ascontiguousarray(axes).view(np.uint8).reshape(-1)


def matrix_of_bricks(bricks: Bits, shape: tuple[int, int]) -> Bits:
    """The matrix of uncompressed bricks: `plain_bricks` the other way."""
    rows, cols = (-(-n // 64) for n in shape)
    axes = bricks.reshape(rows, cols, 4, 4, 8, 4, 2, 2, 2).transpose(np.argsort(_BRICK_AXES))
    return axes.reshape(rows * 64, cols * 64)[: shape[0], : shape[1]]


def bits_of(tensor: Any) -> Bits:
    """Bit patterns of a 16-bit torch tensor, on the host."""
    import torch

    bits: Bits = tensor.view(torch.int16).cpu().numpy().view(np.uint16)
    return bits
